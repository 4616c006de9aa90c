"""Gaussian weights: their divergence, its slopes, and steps on them for all clients of a chunk in place.

A method says what ONE client does. Where the network is a chain (`core/kernels/chain.py`) and the solver one
of ours, `descend` does the same for the clients that run together, some at a time: what a step reads and
writes of them should stay in the cache. The results are those of the plain steps up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from descant.core import meter, random
from descant.core.algorithm import ClientData
from descant.core.kernels.chunk import ChunkGradients
from descant.core.task import Batch, Task
from descant.priors.fused import Add, InPlace, makes_own_steps
from descant.priors.quadratic import Flat

if TYPE_CHECKING:
    from descant.priors.solve import Solver

NOISE = 2**20  # the sub-stream of a batch's key for eps: Dropout draws from the first ones
AT_ONCE = 2**18  # numbers of a tensor of the clients that step together: one client's, if it has more
WHOLE = 64  # numbers to a multiple of which rows are filled up: no client's end is computed by other code


class Gauss(NamedTuple):
    """Independent Gaussians N(mu, sigma^2) for all parameters, sigma = softplus(rho)."""

    mu: Tensor  # [d]
    rho: Tensor  # [d]
    stats: Tensor  # [s]


def divergence(q: Gauss, w: Gauss) -> Tensor:
    """KL(q || w) = sum log(s/sigma) + (sigma^2 + (mu - m)^2) / (2 s^2) - 1/2."""
    sigma, s = F.softplus(q.rho), F.softplus(w.rho)
    return ((s / sigma).log() + (sigma.square() + (q.mu - w.mu).square()) / (2 * s.square()) - 0.5).sum()


def prior_slopes(q: Gauss, w: Gauss, s: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of weight KL(q || w) for the m and rho of w, whose standard deviation is s."""
    sigma, gap = F.softplus(q.rho), w.mu - q.mu
    slope = (1 - (sigma.square() + gap.square()) / s.square()) / s
    return weight * gap / s.square(), weight * slope * torch.sigmoid(w.rho)


def descend(task: Task, q: Gauss, w: Gauss, weight: Tensor, data: ClientData, solver: Solver, K: int,
            weight_decay: float) -> tuple[Gauss, Gauss] | None:
    """q and w after K steps on q and one on w for each batch, as `pFedBayes` has them, whose weight decay is
    of the sampled weights; None: not possible here."""
    gradients = task.chunk_gradients
    if gradients is None or not makes_own_steps(solver):
        return None
    taken = 0

    def work(steps: Iterable[tuple[int, Batch]], *chunk: Any) -> tuple[Tensor, ...]:
        nonlocal taken
        pairs = Pairs(gradients, solver, K, weight_decay, *chunk)
        for n, batch in steps:
            pairs.step(n, batch)
            taken += n * K
        return pairs.end()

    has_stats = bool(q.stats.numel())
    found = data.together(work, weight, q.stats if has_stats else None, q.mu, q.rho, w.mu, w.rho)
    if found is None:
        return None
    loss, q_mu, q_rho, w_mu, w_rho, *stats = found
    if (opened := meter.current()) is not None:
        opened.count_scan(loss, K * data.steps, taken)
    own = stats[0] if stats else q.stats  # w takes the statistics of q, which has seen the data
    return Gauss(q_mu, q_rho, own), Gauss(w_mu, w_rho, own if stats else w.stats)


class Sides(NamedTuple):
    """Some clients' Gaussians, and what the solver remembers of each part."""

    mu: Tensor  # [clients, room]
    rho: Tensor
    of_mu: list[Tensor]
    of_rho: list[Tensor]

    def at(self, rows: slice) -> Sides:
        return Sides(self.mu[rows], self.rho[rows], [each[rows] for each in self.of_mu],
                     [each[rows] for each in self.of_rho])


class Pairs:
    """q and w of the clients of a chunk."""

    def __init__(self, gradients: ChunkGradients, solver: InPlace, K: int, weight_decay: float,
                 weight: Tensor, stats: Tensor | None, *vectors: Tensor) -> None:
        self._gradients, self._solver, self._K, self._weight_decay = gradients, solver, K, weight_decay
        clients, self._d = vectors[0].shape
        self._room = -(-self._d // WHOLE) * WHOLE
        q_mu, q_rho, w_mu, w_rho = (F.pad(each, (0, self._room - self._d)) for each in vectors)
        self._q, self._w = self._sides(q_mu, q_rho), self._sides(w_mu, w_rho)
        self._weight = weight[:, None]
        self._stats = None if stats is None else stats.clone()
        self._losses = vectors[0].new_zeros(clients)
        self._number = 0  # of batches
        self._at_once = max(1, min(clients, AT_ONCE // self._room))
        self._rooms = [vectors[0].new_zeros(self._at_once, self._room) for _ in range(6)]

    def _sides(self, mu: Tensor, rho: Tensor) -> Sides:
        of_mu, of_rho = ([torch.zeros_like(mu) for _ in range(self._solver.remembered())] for _ in range(2))
        return Sides(mu, rho, of_mu, of_rho)

    def step(self, clients: int, batch: Batch) -> None:
        """The first so many clients take a batch; the others have ended."""
        for start in range(0, clients, self._at_once):
            rows = slice(start, min(start + self._at_once, clients))
            some: list[Any] = [None if each is None else each[rows] for each in batch]
            self._some_step(rows, Batch(*some))
        self._number += 1

    def _some_step(self, rows: slice, batch: Batch) -> None:
        q, w, weight = self._q.at(rows), self._w.at(rows), self._weight[rows]
        *rooms, room = (each[: len(q.mu)] for each in self._rooms)
        s = w.rho.exp().log1p_()
        precision = weight / s.square()
        assert batch.key is not None
        keys = random.fold(batch.key[:, None], torch.arange(self._K))  # as in `batch.redrawn`
        noise = random.fold(keys, NOISE)
        for k in range(self._K):
            random.draw_coarse_normal_(rooms[0], noise[:, k])
            self._q_step(q, w.mu, precision, rows, batch._replace(key=keys[:, k]),
                         self._number * self._K + k + 1, rooms, room)
        sigma, gap = q.rho.exp().log1p_(), w.mu - q.mu
        turn = w.rho.sigmoid()

        def for_m(into: Tensor) -> Tensor:
            return torch.mul(gap, precision, out=into)

        def for_rho(into: Tensor) -> Tensor:
            torch.mul(sigma, sigma, out=into).addcmul_(gap, gap).mul_(precision)
            return torch.sub(weight, into, out=into).mul_(turn).div_(s)

        for theta, memory, form in ((w.rho, w.of_rho, for_rho), (w.mu, w.of_mu, for_m)):
            self._solver.step_(theta, _adding(form, room), Flat(), memory, self._number + 1)

    def _q_step(self, q: Sides, m: Tensor, precision: Tensor, rows: slice, batch: Batch, number: int,
                rooms: list[Tensor], room: Tensor) -> None:
        """A step on f(mu + sigma eps; batch) + weight KL(q || N(m, weight / precision))."""
        eps, sigma, turn, theta, slope = rooms
        torch.log1p(torch.exp(q.rho, out=turn), out=sigma)
        turn.div_(torch.add(turn, 1, out=theta))
        torch.addcmul(q.mu, sigma, eps, out=theta)
        at, into = (self._gradients.parameters(each[:, : self._d]) for each in (theta, slope))
        found = self._gradients.slopes(at, None if self._stats is None else self._stats[rows], *batch)
        for term, place in zip(found.terms, into, strict=True):
            term.add(place, 0.0, 1.0)
        if self._weight_decay:
            slope.add_(theta, alpha=self._weight_decay)
        self._losses[rows] += found.means
        if self._stats is not None and found.stats is not None:
            self._stats[rows] = found.stats
        weight = self._weight[rows]

        def for_mu(into: Tensor) -> Tensor:
            return torch.addcmul(slope, torch.sub(q.mu, m, out=into), precision, out=into)

        def for_rho(into: Tensor) -> Tensor:
            torch.div(-weight, sigma, out=into)
            return into.addcmul_(precision, sigma).addcmul_(slope, eps).mul_(turn)

        for theta, memory, form in ((q.mu, q.of_mu, for_mu), (q.rho, q.of_rho, for_rho)):
            self._solver.step_(theta, _adding(form, room), Flat(), memory, number)

    def end(self) -> tuple[Tensor, ...]:
        """The clients' sums of losses, the parts of q and w, and the statistics, if any."""
        parts = [each[:, : self._d] for each in (self._q.mu, self._q.rho, self._w.mu, self._w.rho)]
        return (self._losses, *parts, *([] if self._stats is None else [self._stats]))


def _adding(form: Callable[[Tensor], Tensor], room: Tensor) -> Add:
    """keep * into + factor * gradient, of the gradient that `form` makes in the room it is given."""

    def add(into: Tensor, keep: float, factor: float) -> None:
        if keep == 0 and factor == 1:
            form(into)
        else:
            into.mul_(keep).add_(form(room), alpha=factor)

    return add
