"""What a step costs at least that has to pass over all parameters: `python -m benchmarks.passes`.

A step of SGD changes a linear layer within one product. A step of Adam reads and writes its moments besides,
and pFedBayes has two vectors with such moments for each client, a number of noise for each parameter, and the
exponentials of its standard deviations. FedMAP and FedAMP are drawn to a mean, FedMAP and FedPAC pass over
all rows besides their batches, and the servers of FedAMP and pFedHN multiply matrices that are as large as
many models. Each part is timed by itself, in the calls of torch that descant
makes of it, on as many parameters at once as descant takes, and their sum is held against the products of a
step of SGD. Microseconds of processor time per client; the least of some, since other work on the machine
only adds to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from descant.core import random
from descant.core.threads import one_thread
from descant.priors.quadratic import Flat
from descant.priors.solve import Adam
from descant.priors.variational import AT_ONCE

SHAPES = {"mclr": [(10, 784)], "dnn": [(100, 784), (10, 100)]}  # of the weights
BATCH, REPEATED = 20, 100
K = 5  # steps on a batch, over which those of the server's Gaussian count
# as `benchmarks/methods.py` has it: who is in a round, its steps, and all rows of a client
COHORT, POPULATION, STEPS, ROWS, HIDDEN, CLASSES = 20, 100, 25, 500, 100, 10


class Parts:
    """The parts of a step, for as many clients as pFedBayes takes at once."""

    def __init__(self, model: str) -> None:
        self._layers = SHAPES[model]
        d = sum(rows * columns + rows for rows, columns in self._layers)
        self.clients = max(1, AT_ONCE // d)
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(self.clients, *shape, generator=generator)

        self._x = [drawn(BATCH, columns) for _, columns in self._layers]
        self._w = [drawn(*shape) for shape in self._layers]
        self._slopes = [drawn(rows, BATCH) for rows, _ in self._layers]
        self._a, self._b, self._c, self._g, self._first, self._second = (drawn(d).abs_() for _ in range(6))
        self._keys = torch.arange(self.clients)

    def products(self) -> None:
        for k, (x, w, slope) in enumerate(zip(self._x, self._w, self._slopes, strict=True)):
            torch.bmm(w, x.mT)
            if k:
                torch.bmm(slope.mT, w)
            w.baddbmm_(slope, x, alpha=1e-9)

    def adam(self) -> None:
        def add(into: torch.Tensor, keep: float, factor: float) -> None:
            """The gradient is there."""

        Adam(lr=1e-9).step_(self._a, add, Flat(), [self._g, self._first, self._second], 10)

    def noise(self) -> None:
        random.draw_coarse_normal_(self._b, self._keys)

    def deviations(self) -> None:
        """sigma = softplus(rho), and its slope."""
        torch.log1p(torch.exp(self._a, out=self._b), out=self._c)
        self._b.div_(torch.add(self._b, 1, out=self._g))

    def one_pass(self) -> None:
        torch.addcmul(self._a, self._b, self._c, out=self._g)


    def pull(self) -> None:
        self._a.add_(self._b, alpha=1e-9)


class Whole:
    """What is done once a round: by a client over all its rows, or by the server over many models."""

    def __init__(self, model: str) -> None:
        self._layers = SHAPES[model]
        d = sum(rows * columns + rows for rows, columns in self._layers)
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self._x, self._w = drawn(ROWS, self._layers[0][1]), [drawn(*shape) for shape in self._layers]
        self._of_class = drawn(CLASSES, ROWS)
        self._models, self._xi, self._sent = drawn(POPULATION, d), drawn(COHORT, POPULATION), drawn(COHORT, d)
        self._last, self._moment, self._g = (drawn(d, HIDDEN) for _ in range(3))
        self._h = drawn(COHORT, HIDDEN)

    def _forward(self, weights: list[torch.Tensor]) -> torch.Tensor:
        rows = self._x
        for w in weights:
            rows = rows @ w.T
        return rows

    def losses(self) -> None:
        self._forward(self._w)

    def features(self) -> None:
        """Of all rows before and after training, and their sums by class."""
        for _ in range(2):
            torch.mm(self._of_class, self._forward(self._w[:-1]))

    def attention(self) -> None:
        """The products of all pairs of models, and the means that the cohort is sent."""
        torch.mm(self._models, self._models.T)
        torch.mm(self._xi, self._models, out=self._sent)

    def hypernetwork(self) -> None:
        """Its last layer, which gives the models: forward, both products back, and a step with momentum."""
        torch.mm(self._h, self._last.T, out=self._sent)
        torch.mm(self._sent, self._last)
        torch.mm(self._sent.T, self._h, out=self._g)
        self._moment.mul_(0.9).add_(self._g)
        self._last.sub_(self._moment, alpha=1e-9)


def least(part: Callable[[], None], repeated: int | None = None) -> float:
    """Microseconds."""
    spent = []
    for _ in range(repeated or REPEATED):
        start = time.thread_time()
        part()
        spent.append(time.thread_time() - start)
    return 1e6 * min(spent)


def show_others(console: Console, found: dict[str, tuple[Parts, float, float]]) -> None:
    """The second table: methods with SGD or Adam, and more than a step. `found` has the products of SGD and a
    step of Adam."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left",
                  title="µs of processor time per client and step: what a method has at least (times SGD)")
    for heading in ("model", "products\nof SGD", "with a\npull", "FedMAP: Adam, pull,\nlosses of all rows",
                    "FedPAC: features of\nall rows, twice", "FedAMP: pull,\nserver",
                    "pFedHN:\nserver"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model, (parts, products, adam) in found.items():
        whole, pull = Whole(model), least(parts.pull) / parts.clients
        losses, features = (least(part, REPEATED // 5) / STEPS for part in (whole.losses, whole.features))
        attention, network = (least(part, REPEATED // 5) / (COHORT * STEPS) for part in (
            whole.attention, whole.hypernetwork))
        sums = (products + pull, products + adam + pull + losses, products + features,
                products + pull + attention, products + network)
        table.add_row(model, f"{products:.0f}", *(f"{each:.0f} ({each / products:.1f})" for each in sums))
    console.print(table)


def main() -> None:
    table = Table(box=box.SIMPLE_HEAD, title="µs of processor time per client and step", title_justify="left")
    for heading in ("model", "clients\nat once", "products\nof SGD", "Adam", "noise", "sigma", "one pass",
                    "Adam:\nat least", "times\nSGD", "pFedBayes:\nat least", "times\nSGD"):
        table.add_column(heading, justify="right", no_wrap=True)
    found: dict[str, tuple[Parts, float, float]] = {}
    with one_thread():
        for model in SHAPES:
            parts = Parts(model)
            products, adam, noise, sigma, once = (least(part) / parts.clients for part in (
                parts.products, parts.adam, parts.noise, parts.deviations, parts.one_pass))
            by_adam = products + adam
            # of q: two steps of Adam, noise, sigma, the sample, and six passes for the two slopes; of w: two
            # steps of Adam, sigma, and six passes for every K
            bayes = products + 2 * adam + noise + sigma + 7 * once + (2 * adam + sigma + 6 * once) / K
            table.add_row(model, str(parts.clients), *(f"{each:.0f}" for each in (
                products, adam, noise, sigma, once, by_adam)), f"{by_adam / products:.1f}", f"{bayes:.0f}",
                f"{bayes / products:.1f}")
            found[model] = (parts, products, adam)
        console = Console(width=130)
        console.print(table)
        show_others(console, found)


if __name__ == "__main__":
    main()
