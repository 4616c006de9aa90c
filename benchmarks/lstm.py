"""Why descant has a recurrence of its own: gradients of several clients, against nn.LSTM under vmap.

    python benchmarks/lstm.py
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from descant.models.lstm import Recurrence

CLIENTS, BATCH, STEPS, UNITS, REPEATS = 10, 20, 25, 50, 7


def gradients(module: nn.Module, outputs: Callable[[object], Tensor]) -> Callable[[], object]:
    """The gradients of all clients at once, ready to be timed."""
    parameters = {name: torch.stack([p.detach()] * CLIENTS) for name, p in module.named_parameters()}
    x = torch.randn(CLIENTS, BATCH, STEPS, UNITS)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return outputs(functional_call(module, parameters, (x,))).square().mean()

    return lambda: vmap(grad(loss))(parameters, x)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch warns that nn.LSTM has no rule for vmap
    size = {"input_size": UNITS, "hidden_size": UNITS, "num_layers": 2, "batch_first": True}
    work = {"nn.LSTM": gradients(nn.LSTM(**size), lambda out: out[0]),
            "Recurrence": gradients(Recurrence(**size), lambda out: out)}
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(REPEATS + 1):
        for name, run in work.items():  # interleaved, so that noise hits both alike
            start = time.perf_counter()
            run()
            if repeat:  # the first pays for set-up
                seconds[name].append(time.perf_counter() - start)
    best = {name: min(times) for name, times in seconds.items()}
    print(f"{CLIENTS} clients, batch {BATCH}, {STEPS} steps, 2 x {UNITS} units, best of {REPEATS}: "
          + ", ".join(f"{name} {1e3 * t:.1f} ms" for name, t in best.items())
          + f"; ratio {best['Recurrence'] / best['nn.LSTM']:.2f}")


if __name__ == "__main__":
    main()
