"""Weight averaging at the end: models that are means over the last rounds (Izmailov et al. 2018).

Training is not changed. From round `first` on, clients predict with means: of the server's states after the
rounds `first`, ..., now, and of a client's own states after those of them in which it took part. A client
that took part in none of them predicts with its own state as it is. Where a method's models are linear in its
states, as in FedAvg, Ditto or FedPer, these are the means of the models. Integers are not averaged.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from descant.core.algorithm import Algorithm, ClientData, Message, Round
from descant.core.task import Task
from descant.core.tree import Tree, leaves, map_tree, where
from descant.core.vector import Model


class AveragedServer(NamedTuple):
    now: Tree
    mean: Tree  # over the rounds from `first` on; before, as now


class AveragedState(NamedTuple):
    """Of a client, whose method keeps states."""

    now: Tree
    mean: Tree  # over so many ...
    rounds: Tensor  # []
    window: Tensor  # [] ... of the window that begins with this round; 0: of none


class AveragedMessage(NamedTuple):
    shared: Tree
    window: Tensor  # [] the round with which the present window begins; 0: there is none yet


def averaged(method: Algorithm, first: int) -> Algorithm:
    """The method, with means over the rounds from `first` on to predict with. It has the same fields."""
    made: Algorithm = object.__new__(_kind(type(method), first))
    made.__dict__.update(vars(method))
    return made


@lru_cache(64)
def _kind(method: type[Algorithm], first: int) -> type[Algorithm]:
    own = {"plain": method, "first": first, "__doc__": method.__doc__}
    return type(method.__name__, (_Averaged, method), own)


def _copied(tree: Tree) -> Tree:
    """Checkpoints want each tensor in memory of its own."""
    return map_tree(torch.clone, tree)


def _mean(mean: Tree, new: Tree, count: Tensor | int) -> Tree:
    """The mean of `count` values of which `new` is the last; integers are the last."""
    return map_tree(lambda m, x: m + (x - m) / count if x.is_floating_point() else x, mean, new)


class _Averaged(Algorithm):
    """What `averaged` changes: the inner method never sees the means."""

    plain: ClassVar[type[Algorithm]]
    first: ClassVar[int]

    @cached_property
    def inner(self) -> Algorithm:
        made: Algorithm = object.__new__(self.plain)
        made.__dict__.update({name: value for name, value in vars(self).items() if name != "inner"})
        return made

    def __reduce__(self) -> Any:
        return averaged, (self.inner, self.first)

    def forgets(self) -> bool:
        return False  # means remember

    def _sent(self, message: Message, number: int) -> Message:
        window = torch.tensor(self.first if number >= self.first else 0)
        return Message(AveragedMessage(message.shared, window), message.each)

    # -- the server ------------------------------------------------------------------------------------

    def init_server(self, task: Task, model: Model, round: Round) -> Tree:
        start = self.inner.init_server(task, model, round)
        return AveragedServer(start, _copied(start))

    def broadcast(self, server: AveragedServer, round: Round) -> Message:
        return self._sent(self.inner.broadcast(server.now, round), round.number)

    def aggregate(self, server: AveragedServer, uploads: Tree, round: Round) -> tuple[Tree, dict[str, Any]]:
        now, info = self.inner.aggregate(server.now, uploads, round)
        count = round.number - self.first + 1
        return AveragedServer(now, _copied(now) if count <= 1 else _mean(server.mean, now, count)), info

    def participant(self, server: AveragedServer, round: Round) -> Message:
        return self._sent(self.inner.participant(server.mean, round), round.number)

    def newcomer(self, server: AveragedServer, round: Round) -> Message:
        return self._sent(self.inner.newcomer(server.mean, round), round.number)

    def global_model(self, server: AveragedServer) -> Model | None:
        return self.inner.global_model(server.mean)

    # -- ONE client ------------------------------------------------------------------------------------

    def init_client(self, task: Task, model: Model) -> Tree:
        state = self.inner.init_client(task, model)
        if not any(leaves(state)):  # a method without states keeps none
            return state
        return AveragedState(state, _copied(state), torch.tensor(0.0, dtype=task.dtype), torch.tensor(0))

    def local(self, task: Task, message: Message, state: Tree, data: ClientData) -> tuple[Tree, Tree]:
        upload, now = self.inner.local(task, _inner(message), _now(state), data)
        return upload, _continued(state, now, message.shared.window)

    def opening(self, task: Task, message: Message, state: Tree, data: ClientData) -> tuple[Tree, Tree]:
        upload, now = self.inner.opening(task, _inner(message), _now(state), data)
        return upload, _continued(state, now, message.shared.window)

    def personalize(self, task: Task, message: Message, state: Tree, data: ClientData) -> Tree:
        own, window = state, message.shared.window
        if isinstance(state, AveragedState):
            own = where((state.window == window) & (window > 0), state.mean, state.now)
        return self.inner.personalize(task, _inner(message), own, data)

    def adapt(self, task: Task, message: Message, data: ClientData) -> Tree:
        return self.inner.adapt(task, _inner(message), data)


def _inner(message: Message) -> Message:
    return Message(message.shared.shared, message.each)


def _now(state: Tree) -> Tree:
    return state.now if isinstance(state, AveragedState) else state


def _continued(state: Tree, now: Tree, window: Tensor) -> Tree:
    """A client's state after a round of a window."""
    if not isinstance(state, AveragedState):
        return now
    goes_on = (state.window == window) & (window > 0)
    count = torch.where(goes_on, state.rounds + 1, torch.ones_like(state.rounds))
    mean = where(goes_on, _mean(state.mean, now, count), now)
    return AveragedState(now, mean, count, window.expand_as(state.window).clone())
