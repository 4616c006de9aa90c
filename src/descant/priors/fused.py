"""Local training of all clients of a chunk at once, in place.

`solve` and `inner_solve` are written for ONE client. Where the network is a chain (`core/kernels/chain.py`),
the prior quadratic and the solver one of ours, the same steps are made here on the parameters of all
clients that run together: vmap is left once for all steps, and where the solver allows it, a step is a part
of the products of the backward pass. The results are those of the plain steps up to rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from descant.core import meter
from descant.core.algorithm import ClientData
from descant.core.kernels.chunk import ChunkGradients
from descant.core.kernels.lift import over_clients
from descant.core.kernels.products import room
from descant.core.kernels.span import Span, Spanning
from descant.core.parts import Part
from descant.core.task import Batch, Task
from descant.core.vector import Model
from descant.priors.prior import Prior
from descant.priors.quadratic import Flat, Gaussian, Quadratic
from descant.priors.schedule import is_by_step

Add: TypeAlias = Callable[[Tensor, float, float], None]

if TYPE_CHECKING:
    from descant.priors.solve import Optimizer


@runtime_checkable
class InPlace(Protocol):
    """A solver that can make a step for many clients at once."""

    def remembered(self) -> int:
        """How many tensors like theta it keeps from one step to the next; they begin as zeros."""

    def step_(self, theta: Tensor, add: Add, prior: Prior, memory: list[Tensor], number: int) -> None:
        """Make the step of this number, 1, 2, ..., in place, on one parameter of the clients [clients, ...];
        `add(into, keep, factor)` makes keep * into + factor * gradient of what `into` holds."""


def solve(task: Task, models: Sequence[Model], data: ClientData, solver: Optimizer, prior: Prior = Flat(),
          scale: Tensor | float = 1.0, which: int = 0, only: Part | None = None, *, counted: bool = False
          ) -> list[Model] | None:
    """As `descant.priors.solve.solve`, for several models on the same batches, whose rows count for each what
    its column says, if they are `counted`; None: not possible here."""
    descents = []
    for model in models:
        if (descent := _descent(task, model, solver, prior, scale, only)) is None:
            return None
        descents.append(descent)
    taken = 0

    def work(steps: Iterable[tuple[int, Batch]], *chunk: Any) -> tuple[Tensor, ...]:
        nonlocal taken
        each = len(chunk) // len(descents)
        for m, descent in enumerate(descents):
            descent.start(*chunk[m * each : (m + 1) * each])
        for n, batch in steps:
            for m, descent in enumerate(descents):
                descent.step(n, batch.of_model(m) if counted else batch)
            taken += n
        return tuple([tensor for descent in descents for tensor in descent.end()])

    found = data.together(work, *[tensor for descent in descents for tensor in descent.own], which=which)
    if found is None:
        return None
    solved, each = [], len(found) // len(models)
    for m, model in enumerate(models):
        loss, theta, *stats = found[m * each : (m + 1) * each]
        if (opened := meter.current()) is not None:
            opened.count_scan(loss, data.steps, taken)
        solved.append(Model(theta, *stats or [model.stats]))
    return solved


def inner_solve(task: Task, model: Model, batch: Batch, solver: Optimizer, prior: Prior, steps: int
                ) -> Model | None:
    """As `descant.priors.solve.inner_solve`; None: not possible here."""
    if (descent := _descent(task, model, solver, prior, 1.0)) is None:
        return None

    spanning = descent.spanning()

    def work(*given: Any) -> tuple[Tensor, ...]:
        batch, chunk = Batch(*given[: len(Batch._fields)]), given[len(Batch._fields) :]
        if (span := None if spanning is None else spanning.span(batch.x, steps)) is not None:
            assert spanning is not None
            return _taken(SpannedDescent(descent, spanning, span), batch._replace(x=span.rows), steps, chunk)
        return _taken(descent, batch, steps, chunk)

    if (found := over_clients(work, *batch, *descent.own)) is None:
        return None
    loss, theta, *stats = found
    if (opened := meter.current()) is not None:
        opened.count(loss, steps)
    return Model(theta, *stats or [model.stats])


def _taken(descent: Descent, batch: Batch, steps: int, chunk: Sequence[Any]) -> tuple[Tensor, ...]:
    """So many steps on one batch."""
    descent.start(*chunk)
    for k in range(steps):
        descent.step(len(batch.x), batch.redrawn(k))
    return descent.end()


class Parameter(NamedTuple):
    """One parameter of the clients that still take steps, and what concerns it."""

    theta: Tensor  # [clients, ...]
    memory: list[Tensor]  # what the solver remembers
    prior: Any  # Flat, Gaussian or Quadratic

    def first(self, clients: int) -> Parameter:
        return Parameter(self.theta[:clients], [each[:clients] for each in self.memory],
                         type(self.prior)(*[_first(part, clients) for part in self.prior]))


class Descent:
    """Steps on scale * loss + prior. `own` are the tensors of ONE client; `start` is given the chunk's."""

    def __init__(self, gradients: ChunkGradients, model: Model, solver: InPlace, prior: Any,
                 scale: Tensor | float, only: Part | None) -> None:
        self.gradients, self._solver, self._prior, self._only = gradients, solver, prior, only
        factor = None
        if isinstance(scale, Tensor) or scale != 1:
            factor = torch.as_tensor(scale, dtype=model.theta.dtype)
        self.own = (model.theta, model.stats if model.stats.numel() else None, factor,
                    *[part for part in prior if isinstance(part, Tensor)])

    def spanning(self) -> Spanning | None:
        """The network as steps on one batch can be made in its span; None if they cannot."""
        numbers = [part for part in self._prior[1:] if isinstance(part, Tensor)]
        if not getattr(self._solver, "is_linear", False) or any(part.dim() for part in numbers):
            return None  # what is done to a parameter must be the same for all its numbers
        return self.gradients.spanning

    def start(self, theta: Tensor, stats: Tensor | None, scale: Tensor | None, *parts: Tensor) -> None:
        self._begin([room(each, each.shape).copy_(each) for each in self.gradients.parameters(theta)],
                    [self.gradients.parameters(part) if part.dim() == 2 else part for part in parts],
                    stats, scale)

    def _begin(self, theta: list[Tensor], parts: Sequence[list[Tensor] | Tensor], stats: Tensor | None,
               scale: Tensor | None) -> None:
        """With the parameters, and what the prior has for each of them, or for all."""
        self._theta = theta
        self._moving = [
            Parameter(each, [room(each, each.shape).zero_() for _ in range(self._solver.remembered())], prior)
            for each, prior in zip(theta, self._priors(parts), strict=True)]
        self._stats = None if stats is None else stats.clone()
        self._losses: dict[tuple[int, int, int], list[Tensor]] = defaultdict(list)  # of batches of one form
        self._scale = scale
        self._number = 0

    def _priors(self, parts: Sequence[list[Tensor] | Tensor]) -> list[Any]:
        """The clients' priors on each parameter."""
        made = []
        for k, theta in enumerate(self._theta):
            tensors = iter([part.view(-1, *[1] * (theta.dim() - 1)) if isinstance(part, Tensor) else part[k]
                            for part in parts])
            made.append(type(self._prior)(*[next(tensors) if isinstance(part, Tensor) else part
                                            for part in self._prior]))
        return made

    def step(self, clients: int, batch: Batch) -> None:
        """The first so many clients make a step each; the others have ended."""
        if clients < self._moving[0].theta.size(0):
            self._moving = [each.first(clients) for each in self._moving]
        slopes = self.gradients.slopes(
            [each.theta for each in self._moving], _first(self._stats, clients), *batch,
            scale=_first(self._scale, clients))
        self._number += 1
        moving: Iterable[Any] = zip(self._moving, slopes.terms, strict=True)
        if self._only is not None:
            moving = compress(moving, self._only.parameters)
        for (theta, memory, prior), term in moving:
            self._solver.step_(theta, term.add, prior, memory, self._number)
        self._losses[(clients, slopes.losses.shape[1], slopes.rows)].append(slopes.losses)
        if self._stats is not None and slopes.stats is not None:
            self._stats[:clients] = slopes.stats

    def end(self) -> tuple[Tensor, ...]:
        """The clients' sums of losses, their models, and their statistics, if any."""
        theta = self._vectors()
        total = theta.new_zeros(len(theta))
        for (clients, _, rows), losses in self._losses.items():
            total[:clients] += torch.stack(losses).sum((0, 2)) / rows
        return (total, theta) if self._stats is None else (total, theta, self._stats)

    def _vectors(self) -> Tensor:
        return torch.cat([each.flatten(1) for each in self._theta], 1)


class SpannedDescent(Descent):
    """Steps on one batch, in its span (`core/kernels/span.py`)."""

    def __init__(self, whole: Descent, spanning: Spanning, span: Span) -> None:
        vars(self).update(vars(whole))
        self._spanning, self._span, self.gradients = spanning, span, spanning.gradients

    def start(self, theta: Tensor, stats: Tensor | None, scale: Tensor | None, *parts: Tensor) -> None:
        own, others = self._spanning.split(theta)
        self._given, self._layers = theta, [own]
        made: list[list[Tensor] | Tensor] = []
        for part in parts:
            if part.dim() == 2:
                layer, rest = self._spanning.split(part)
                self._layers.append(layer)
                made.append([self._span.of(layer, 1), *rest])
            else:
                made.append(part)
        self._begin([self._span.of(own, 0), *[room(each, each.shape).copy_(each) for each in others]],
                    made, stats, scale)

    def _vectors(self) -> Tensor:
        theta = room(self._given, self._given.shape)
        own, others = self._spanning.split(theta)
        coefficients, *formed = self._theta
        self._span.form(coefficients, self._layers, own)
        for place, each in zip(others, formed, strict=True):
            place.copy_(each)
        return theta


def _descent(task: Task, model: Model, solver: Optimizer, prior: Prior, scale: Tensor | float,
             only: Part | None = None) -> Descent | None:
    if task.chunk_gradients is None or type(prior) not in (Flat, Gaussian, Quadratic):
        return None
    if not isinstance(solver, InPlace) or not makes_own_steps(solver):
        return None
    return Descent(task.chunk_gradients, model, solver, prior, scale, only)


def makes_own_steps(solver: InPlace) -> bool:
    """Whether both kinds of steps are the same. A subclass of a solver may have other plain ones; and the
    norm that is clipped is one of all parameters, while steps are made here on one after the other; and a
    step size that changes from step to step is each client's own."""
    return (_origin(solver, "step") is _origin(solver, "step_") and getattr(solver, "clip", None) is None
            and not is_by_step(getattr(solver, "schedule", None)))


def _origin(solver: InPlace, name: str) -> type:
    """The class that says how a method goes."""
    return next(cls for cls in type(solver).__mro__ if name in vars(cls))


def _first(part: Any, clients: int) -> Any:
    return part[:clients] if isinstance(part, Tensor) else part
