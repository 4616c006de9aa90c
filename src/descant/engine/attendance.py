"""Who takes part in a round: its cohort, others who train, and those whom a simulation may leave out."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from descant.core.algorithm import Message
from descant.core.tree import Tree, take
from descant.engine.availability import Trace
from descant.engine.backends.base import Planned
from descant.engine.cohort import sampled
from descant.engine.outcome import Outcome, gather
from descant.engine.settings import Train
from descant.engine.work import Work


class Sampled(NamedTuple):
    """Who takes part in a round, each ascending, without those who dropped out or are late."""

    cohort: np.ndarray  # whose uploads are aggregated
    trained: np.ndarray  # the cohort, and others whose training is looked at
    asked: np.ndarray  # all who train in a federation, also where nobody looks at it
    late: int  # how many of the cohort are
    is_apart: bool = False  # the cohort trains by itself, in the same chunks whether others train or not

    def apart(self, *, alone: bool) -> Sampled:
        """With the cohort apart from the others, who are left out if it is `alone`."""
        return self._replace(trained=self.cohort if alone else self.asked, is_apart=True)

    @property
    def groups(self) -> list[np.ndarray]:
        """The positions in `trained` of those who train together."""
        own = np.isin(self.trained, self.cohort)
        parts = [np.flatnonzero(own), np.flatnonzero(~own)] if self.is_apart else [np.arange(len(own))]
        return [part for part in parts if len(part)]

    def in_groups(self, run: Callable[..., Outcome], planned: Planned, states: Tree) -> Outcome:
        """What those who train make of a job, which `run` runs for some clients."""
        job, clients, number, message, adding = planned
        if len(self.groups) < 2:
            return run(job, clients, number, message, states, adding)
        found = []
        for at in self.groups:
            rows = torch.from_numpy(at)
            outcome = run(job, clients[at], number, Message(message.shared, take(message.each, rows)),
                          take(states, rows), None if adding is None else adding.of(at))
            found.append((0, outcome._replace(
                done=at[outcome.done], failed={int(at[k]): why for k, why in outcome.failed.items()},
                wrong=tuple((int(at[k]), why) for k, why in outcome.wrong))))
        return gather(found)


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
