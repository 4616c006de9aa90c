"""pFedBreD whose clients also upload the envelope gradient of their last local round, and its coherence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from descant.algorithms import pFedBreD
from descant.algorithms.pfedbred import Own
from descant.core.algorithm import ClientData, Message
from descant.core.task import Task
from descant.core.tree import Tree
from descant.core.vector import Model
from descant.engine.diagnostics import Observed
from descant.theory.coherence import generalized_coherence


class Told(NamedTuple):  # an `Upload` with more
    model: Model
    evidence: Tree
    log_weight: Tree
    envelope: Tensor  # [d] mu - theta


@dataclass(frozen=True)
class Telling(pFedBreD):
    """The same method, of a fixed lam; its server leaves the gradients aside."""

    name: ClassVar[str] = "pfedbred_telling"

    def local(self, task: Task, message: Message, state: Own, data: ClientData) -> tuple[Told, Own]:
        received = self.received(task, message, state.theta)
        done = self.rounds(task, received, state, data)
        own = Own(done.theta, done.w.theta if self._means.remembers else ())
        return Told(*received.tell(done.w, done.theta), done.mu - done.theta.theta), own


def envelopes(seen: Observed) -> dict[str, float]:
    """The coherence of the envelope gradients lam (mu - theta), whose length does not count."""
    return generalized_coherence(seen.uploads.envelope)._asdict()
