"""Who takes part in a round: its cohort, others who train, and those whom a simulation may leave out."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from descant.core.algorithm import Message
from descant.core.tree import Tree, nbytes, take
from descant.engine.availability import Trace
from descant.engine.backends.base import Planned
from descant.engine.cohort import sampled
from descant.engine.outcome import Outcome, gather
from descant.engine.settings import Train
from descant.engine.work import Work


class Sampled(NamedTuple):
    """Who takes part in a round, without those who dropped out or are late."""

    cohort: np.ndarray  # whose uploads are aggregated; ascending
    trained: np.ndarray  # the cohort, and others whose training is looked at; ascending, each if `is_apart`
    asked: np.ndarray  # all who train in a federation, also where nobody looks at it; ascending
    late: int  # how many of the cohort are
    is_apart: bool = False  # the cohort trains by itself, in the same chunks whether others train or not

    def apart(self, *, alone: bool) -> Sampled:
        """With the cohort apart from the others, who are left out if it is `alone`."""
        others = self.cohort[:0] if alone else np.setdiff1d(self.asked, self.cohort, assume_unique=True)
        return self._replace(trained=np.concatenate([self.cohort, others]), is_apart=True)

    @property
    def groups(self) -> list[slice]:
        """Those of `trained` who train together."""
        first = len(self.cohort)
        parts = [slice(0, first), slice(first, None)] if self.is_apart else [slice(0, None)]
        return [part for part in parts if len(self.trained[part])]

    def in_groups(self, run: Callable[..., Outcome], planned: Planned, states: Tree) -> Outcome:
        """What those who train make of a job, which `run` runs for some clients."""
        job, clients, number, message, adding = planned
        if len(self.groups) < 2:
            return run(job, clients, number, message, states, adding)
        return gather((part.start, run(job, clients[part], number, _of(message, part), take(states, part),
                                       None if adding is None else adding.of(part)))
                      for part in self.groups)


def _of(message: Message, part: slice) -> Message:
    return Message(message.shared, take(message.each, part))


def attending(work: Work, train: Train, number: int, trace: Trace | None) -> Sampled:
    """Who takes part in a round of training."""
    privacy = None if work.privacy is None else work.privacy.privacy
    there = None if trace is None else np.flatnonzero(trace.reachable(number))
    cohort, trained = sampled(work.federation, train, number, privacy, there)
    in_time = cohort
    if trace is not None and train.deadline is not None:  # where nobody meets it, it waits for the fastest
        seconds = trace.seconds(number, work.steps_of(cohort))[cohort]
        in_time = cohort[seconds <= max(train.deadline, float(seconds.min()))]
    late = np.setdiff1d(cohort, in_time, assume_unique=True)
    asked = np.setdiff1d(trained, late, assume_unique=True)
    return Sampled(in_time, asked, asked, len(late))


def may_overlook(work: Work, train: Train, *, is_stateless: bool) -> bool:
    """Whether there can be rounds in which nobody looks at what clients outside the cohort make of them: they
    keep nothing, or what they keep is made anew, by all, before it is scored. On remote machines a client may
    want its model at any time."""
    if work.federation.is_remote:
        return False
    return is_stateless or (work.algorithm.forgets() and train.availability is None and not train.drop)


def bytes_down(message: Message, clients: int) -> int:
    return clients * nbytes(message.shared) + nbytes(message.each)
