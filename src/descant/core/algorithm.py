"""The interface of a method: a handful of pure functions on explicit states.

Only `broadcast` and `aggregate` see the clients as a group; the `aggregate` of most methods is a mean that
they `absorb`. What a client does (`local`, `personalize`, `adapt`) is written for ONE client; the simulator
lifts it over a cohort, a real node runs it as it is. States, messages and uploads are trees: tensors in
NamedTuples.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from descant.core import fields, plugins
from descant.core.fields import Checked
from descant.core.random import key, normal, stream
from descant.core.sums import weighted_mean
from descant.core.task import Batch, Task
from descant.core.tree import Tree, map_tree, repeat, take
from descant.core.vector import Model
from descant.errors import UsageError, unknown

Weights: TypeAlias = Literal["uniform", "samples"]


class Round(NamedTuple):
    """The facts of a round that server functions may use."""

    seed: int
    number: int  # 0 before training, then 1, 2, ...
    cohort: Tensor  # int64 [cohort] ids of the clients concerned, ascending
    sizes: Tensor  # [cohort] their numbers of training samples
    population: int
    most: float = 1.0  # the largest share of one client where weights follow from what clients upload

    def generator(self, purpose: str) -> np.random.Generator:
        """Random numbers for the server's own choices in this round."""
        return stream(self.seed, f"server.{purpose}", self.number)

    def key(self, purpose: str) -> Tensor:
        """The same as a key (`descant.core.random`), from which clients can draw the same numbers."""
        return torch.tensor(key(self.seed, f"server.{purpose}", self.number))

    def weights(self, kind: Weights) -> Tensor:
        """What each client of the cohort counts in an average; sums to one."""
        weights = counted(self.sizes, kind)
        return weights / weights.sum()

    def of(self, rows: Tensor) -> Round:
        """The facts of the round for some of its clients."""
        return self._replace(cohort=self.cohort[rows], sizes=self.sizes[rows])


def counted(sizes: Tensor, kind: Weights) -> Tensor:
    """What clients with so many samples count: alike, or by these."""
    if kind not in ("uniform", "samples"):
        raise ValueError(f"weights {kind!r} do not follow from the numbers of samples")
    return torch.ones_like(sizes) if kind == "uniform" else sizes


class Message(NamedTuple):
    """What the server sends: `shared` to all alike; `each` has one row per client of the cohort.
    The ONE client that `local` is written for finds its own row in `each`."""

    shared: Tree = ()
    each: Tree = ()


class LocalStep(NamedTuple):
    """The step with which a client descends on its loss, and on a prior beside it."""

    field: str  # its name, as in "solver.lr"
    pull: float = 0.0  # the most that the prior adds to the curvature of the loss


class ClientData(Protocol):
    """What a client's code sees of its own data in a round."""

    size: Tensor  # number of training samples
    steps: Tensor  # number of local steps in this round: of batches, where a step takes one

    def scan(self, step: Callable[..., Any], carry: Any) -> Any:
        """carry <- step(carry, batch) over the steps of this round; step(carry, batch1, batch2) where the
        method asks for two batches a step. The carry is a tree."""

    def together(self, work: Callable[..., tuple[Tensor, ...]], *own: Tensor | None, which: int = 0
                 ) -> tuple[Tensor, ...] | None:
        """For solvers: `work(steps, *theirs)` for all clients that run together, in place of a scan for each.

        `theirs` are the tensors of all of them where `own` are this client's, with a leading axis, and
        `steps` yields (n, batch) for each step: the first n clients take it, on their rows [n, B, ...], which
        are those of batch `which` of the step. The results have the leading axis too. None: not possible."""

    def mean(self, f: Callable[[Batch], Tree], split: Literal["train", "validation"] = "train") -> Tree:
        """The mean over all samples of a split of `f`, which gives the mean over a batch."""

    def each(self, f: Callable[[Batch], Tensor]) -> Tensor:
        """What `f` gives for each row of a batch, for all training rows [n, ...]: those from `size` on fill
        up, and count nowhere."""

    def counted(self, counts: Tensor) -> ClientData:
        """The same data, with batches whose rows count as is said here for each training row [n, ...]."""


@dataclass(frozen=True)
class Algorithm(Checked, ABC):
    """A method. The fields are its hyper-parameters, named as in its paper."""

    name: ClassVar[str]
    citation: ClassVar[str]
    #: Values of some fields by the name of the whole. "paper" has those of the authors where the defaults,
    #: which are chosen to train in tens of rounds of tens of steps, are others.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    #: Server and client states must move together (control variates): a client's state may change
    #: only in rounds in which its upload is aggregated.
    tracking: ClassVar[bool] = False
    #: `personalize` trains on batches (fine-tuning); otherwise it is given none.
    trains_to_personalize: ClassVar[bool] = False
    #: Clients draw random numbers of their own: their batches have a key whatever the model.
    draws: ClassVar[bool] = False
    #: Where a step takes several batches, each is drawn from a share of the client's rows of its own, the
    #: same in every round (sample splitting); a client with fewer rows than that has one share for all.
    disjoint_batches: ClassVar[bool] = False

    #: Clients cannot do their work without validation rows.
    needs_validation: ClassVar[bool] = False

    @classmethod
    def preset(cls, name: str, **given: Any) -> Self:
        """The method with the values of a preset; fields that are given win."""
        if not isinstance(name, str) or name not in cls.presets:
            raise unknown(f"preset of {cls.name}", name, cls.presets)
        return cls(**{**cls.presets[name], **given})

    def as_table(self) -> dict[str, Any]:
        """The [algorithm] table that makes this method again, with its name as a file must have it."""
        return fields.as_table(self) | {"name": written_name(type(self))}

    def personal_steps(self) -> int | None:
        """How many batches `adapt` (and a `personalize` that trains) is given; None: those of a round."""
        return None

    def batches_per_step(self) -> int:
        """How many independent batches each local step is given (meta-learning wants two)."""
        return 1

    def local_step(self) -> LocalStep | None:
        """The step that decides whether training is stable, where there is one: on losses of curvature L,
        plain gradient steps must be less than 2 / (L + pull)."""
        return LocalStep("solver.lr") if hasattr(self, "solver") else None

    def cautions(self) -> list[str]:
        """What is allowed but will hardly work, such as a step beyond its stability bound."""
        return []

    def remarks(self, task: Task) -> list[str]:
        """What there is to know about the method on such models."""
        return []

    def client_weights(self, round: Round) -> Tensor | None:
        """What each client of `round` counts on the server; sums to one. None: that depends on the uploads,
        and `aggregate` reports it as "client_weights"."""
        return round.weights(getattr(self, "weights", "uniform"))

    @abstractmethod
    def init_server(self, task: Task, model: Model, round: Round) -> Tree:
        """The server's state before the first round; `model` is the common initial model."""

    def init_client(self, task: Task, model: Model) -> Tree:
        """The state of a client before it takes part for the first time."""
        return ()

    @abstractmethod
    def broadcast(self, server: Tree, round: Round) -> Message:
        """What the server sends to the cohort."""

    @abstractmethod
    def local(self, task: Task, message: Message, state: Tree, data: ClientData) -> tuple[Tree, Tree]:
        """The work of ONE client in a round: its upload, and its new state."""

    def opens(self) -> bool:
        """Whether the first round is an opening: every client is asked once, whatever the cohort. Who was
        only asked has not taken part: it is a newcomer, with a state of its own."""
        return False

    def opening(self, task: Task, message: Message, state: Tree, data: ClientData) -> tuple[Tree, Tree]:
        """What ONE client does in an opening, in place of `local`: an upload and a state of the same form."""
        return self.local(task, message, state, data)

    def forgets(self) -> bool:
        """Whether a client makes what it keeps anew in every round: `local` does not look at its state."""
        return False

    # -- the server's step: a method writes `absorb`, if a mean is all that it needs, or else `aggregate` --

    @property
    def needs_rows(self) -> bool:
        """Whether the server must see the uploads one by one, so that they can be neither added up where they
        are made nor hidden from it: of a method that has an `aggregate` of its own."""
        own = {"aggregate", "absorb", "needs_rows"}
        home = next(cls for cls in type(self).__mro__ if own & vars(cls).keys())
        return not own - {"aggregate"} & vars(home).keys()

    def counts(self, sizes: Tensor) -> Tensor:
        """What clients with so many training samples count in the mean, up to a common factor."""
        return counted(sizes, getattr(self, "weights", "uniform"))

    def contribution(self, message: Message, upload: Tree) -> Tree:
        """What the server needs the mean of, from ONE client that was sent `message`: real numbers."""
        return upload

    def absorb(self, server: Tree, mean: Tree, round: Round) -> tuple[Tree, dict[str, Any]]:
        """The new state of the server, and what to report, from the weighted mean of the contributions of
        all clients of `round`. A `note` in the report is told to people."""
        raise UsageError(f"{type(self).__name__} has neither absorb nor aggregate: write one of them")

    def aggregate(self, server: Tree, uploads: Tree, round: Round) -> tuple[Tree, dict[str, Any]]:
        """The same from the uploads, with a row per client of `round`."""
        each = contributions(self.contribution, self.broadcast(server, round), uploads)
        return self.absorb(server, weighted_mean(each, self.counts(round.sizes)), round)

    @abstractmethod
    def personalize(self, task: Task, message: Message, state: Tree, data: ClientData) -> Tree:
        """What ONE client that has taken part predicts with: usually a Model."""

    def predict(self, task: Task, personal: Tree, x: Tensor) -> Tensor:
        """The outputs of ONE client for samples x [n, ...]."""
        return task.predict(personal, x)

    def participant(self, server: Tree, round: Round) -> Message:
        """What clients that have taken part are given to `personalize`; where that is their state alone,
        nothing."""
        return self.broadcast(server, round)

    def newcomer(self, server: Tree, round: Round) -> Message:
        """What a client that never took part is given: nothing that is made for one client."""
        return Message(self.broadcast(server, round).shared)

    @abstractmethod
    def adapt(self, task: Task, message: Message, data: ClientData) -> Tree:
        """What ONE newcomer predicts with, made from its own data alone."""

    def global_model(self, server: Tree) -> Model | None:
        """The one model for all, where the method has one."""
        return None


def contributions(one: Callable[[Message, Tree], Tree], message: Message, uploads: Tree) -> Tree:
    """What `one` makes of every client's upload: a row for each, as in `message.each` and `uploads`."""
    if uploads == () or getattr(one, "__func__", None) is Algorithm.contribution:  # as it is
        return uploads
    lifted = vmap(lambda each, upload: one(Message(message.shared, each), upload))
    return lifted(message.each, uploads)


def written_name(method: type[Algorithm]) -> str:
    """What a file calls a method: descant's and those of installed packages by their names, others by the
    place of the class. A class that cannot be imported has only its name."""
    home, name = method.__module__, method.__qualname__
    if home.partition(".")[0] == "descant" or any(offer.is_of(method) for offer in plugins.offers()):
        return method.name
    is_there = home != "__main__" and getattr(sys.modules.get(home), name, None) is method
    return f"{home}:{name}" if is_there else method.name


def mean_losses(task: Task, models: Model, data: ClientData, split: Literal["train", "validation"]
                ) -> Tensor:
    """The mean losses of the models [n, ...] on the rows of ONE client [n]; NaN on no rows."""

    def losses(batch: Batch) -> Tensor:  # one after the other: not every model can be run under vmap
        return torch.stack([task.loss(take(models, k), batch) for k in range(len(models.theta))])

    found: Tensor = data.mean(losses, split)
    return found


def least_loss(task: Task, models: Model, data: ClientData, split: Literal["train", "validation"]
               ) -> Tensor:
    """Which of the models [n, ...] has the least mean loss on the rows of ONE client: an index []. The first
    of equal ones; the first of all on no rows, where no loss is a number."""
    return mean_losses(task, models, data, split).nan_to_num(nan=torch.inf, posinf=torch.inf).argmin()


def apart(model: Model, count: int, spread: float, key: Tensor) -> Model:
    """Models [count, ...] that begin differently: the first is `model`, the others have noise by the key,
    `spread` times as large as its parameters are (in the root of the mean square; 1 where all are zero)."""
    theta = model.theta
    size = theta.square().mean().sqrt()
    noise = spread * torch.where(size > 0, size, 1.0) * normal(key, (count - 1, theta.numel()), theta.dtype)
    return Model(torch.cat([theta[None], theta + noise]), repeat(model.stats, count).clone())


def renewed(rows: Tree, new: Tree, round: Round) -> Tree:
    """What the server keeps of all clients, [population, ...], with the rows of the cohort replaced."""
    if torch.equal(round.cohort, torch.arange(round.population)):  # no copy: they may be large
        return new
    return map_tree(lambda old, new: old.index_copy(0, round.cohort, new), rows, new)


def at_most(weights: Tensor, share: float) -> Tensor:
    """Weights of which none is more than this share of their sum: those that are, are lowered to one value.
    Alike where there are too few for that; as they are where none is more."""
    if len(weights) < 2 or float(weights.max()) <= share * float(weights.sum()):
        return weights
    upwards = weights.double().sort().values
    for lowered in range(1, len(weights)):  # how many are
        rest, left = upwards[:-lowered], 1 - share * lowered
        if left > 0 and (limit := share / left * float(rest.sum())) >= float(rest[-1]) and limit > 0:
            return weights.clamp(max=limit)
    return torch.ones_like(weights)


def average(models: Model, weights: Tensor) -> Model:
    """The mean of models that count so much: parameters and statistics alike. models: [clients, ...]."""
    averaged: Model = weighted_mean(models, weights)
    return averaged


def interpolate(old: Model, new: Model, beta: float) -> Model:
    """(1 - beta) old + beta new for the parameters; statistics follow the new model.

    With beta > 1 (aggregation momentum) the step overshoots, which a running variance must not.
    """
    return Model(old.theta + beta * (new.theta - old.theta) if beta != 1 else new.theta, new.stats)
