"""What methods may take, and what they took.

A budget is gradient steps of training. What a method does only to predict, such as fine-tuning, does not
count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from descant.comparison.finished import FinishedRun
from descant.comparison.methods import Contender
from descant.comparison.plan import CAP, Budget, Plan
from descant.core.algorithm import Message
from descant.core.threads import one_thread
from descant.core.tree import Tree
from descant.core.units import times
from descant.engine.adding import Adding
from descant.engine.backends.base import InProcess
from descant.engine.backends.choose import templates
from descant.engine.evaluation import evaluate
from descant.engine.outcome import Outcome
from descant.engine.rounds import Training
from descant.engine.work import Job
from descant.errors import DescantError
from descant.experiment import run as runs

WARM = 0.5  # seconds of a first round, above which it needs no second one to be timed,
MOSTLY = 0.5  # if this share of them is the clients'
MISMATCH = 0.05  # a share of the budget that is worth a note


class Cost(NamedTuple):
    """What a method takes."""

    rounds: int  # of a run
    seconds: float  # of a round
    scoring: float  # seconds of an evaluation, if they are asked for


def rounds_of(setup: runs.Setup, found: Sequence[Contender], budget: Budget, *, scored: bool = False
              ) -> dict[str, Cost]:
    """How many rounds each method gets: those of [train] are for the method of [algorithm]. With `scored`, an
    evaluation is timed, too."""
    if not found:
        return {}
    planned = setup.train.rounds
    # the same round for all, so that all are measured on the same cohort
    number = 1 + any(method.opens() for method in (setup.algorithm, *(c.algorithm for c in found)))
    whole = planned * _steps(setup, number, scored=False)[0]
    rounds = {}
    for contender in found:
        method = contender.algorithm
        steps, seconds, scoring = _steps(dataclasses.replace(setup, algorithm=method), number, scored=scored)
        least, fitting = 1 + method.opens(), planned
        if budget != "rounds" and steps:  # without any, it fails on all clients: its run will say so
            fitting = max(least, round(whole / steps))
        rounds[contender.label] = Cost(fitting * (CAP if budget == "converge" else 1), seconds, scoring)
    return rounds


class _Counted(InProcess):
    """Keeps the steps and the seconds of the last job, also where its results cannot be used."""

    grad_steps, seconds = 0, 0.0

    def run(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree,
            adding: Adding | None = None) -> Outcome:
        start = time.process_time()
        outcome = super().run(job, clients, number, message, states, adding)
        self.grad_steps, self.seconds = outcome.grad_steps, time.process_time() - start
        return outcome


def _steps(setup: runs.Setup, number: int, *, scored: bool) -> tuple[int, float, float]:
    """How many gradients a round takes, and about how many seconds, and those of an evaluation: by playing
    it, also where the method diverges at once."""
    work = setup.work()
    backend, steps = _Counted(work, 16), []
    with one_thread():
        training = Training(work, setup.train)
        if work.algorithm.opens():
            with contextlib.suppress(DescantError):
                training.play(backend)
        for later in range(2):  # later rounds are faster than the first, and clusters are found once
            training.number = number - 1 + later
            start = time.process_time()  # one process, one thread: what else runs here does not count
            with contextlib.suppress(DescantError):
                training.play(backend)
            seconds = time.process_time() - start
            steps.append(backend.grad_steps)
            if seconds > WARM and backend.seconds > MOSTLY * seconds:
                break
        seconds *= _share_trained(training, setup)
        return steps[0], seconds, _scoring(training, backend, setup) if scored else 0.0


def _share_trained(training: Training, setup: runs.Setup) -> float:
    """The share of the clients, over all rounds, that a run trains of those whom this one has trained."""
    population, rounds = setup.federation.population, setup.train.rounds
    if setup.train.participation == "cohort":
        return 1.0
    training.scored_in(lambda number: setup.eval.due(number, rounds))
    overlooked = sum(training.overlooks_others(number) for number in range(1, rounds + 1)) / rounds
    return 1 - overlooked * (1 - setup.train.cohort_size(population) / population)


def _scoring(training: Training, backend: InProcess, setup: runs.Setup) -> float:
    """About how many processor seconds an evaluation takes: by scoring those that have trained, since what
    newcomers do first is another thing."""
    everyone = np.concatenate(setup.evaluated)
    known = everyone[training.store.took_part(everyone)]
    if not len(known):
        return 0.0
    templates(training)  # evaluation asks for the forms of results
    start = time.process_time()
    with contextlib.suppress(DescantError):
        evaluate(training, backend, known, setup.eval.rows)
    return (time.process_time() - start) * len(everyone) / len(known)


def notes(plan: Plan, finished: Sequence[FinishedRun]) -> Iterator[str]:
    """How the methods kept to the budget: when each stopped, or whose rounds are too long to fit."""
    for run in finished:
        if run.ended_diverged:
            yield (f"{run.label} with seed {run.seed} diverged after {times(run.rounds, 'round')}, and ended "
                   "there.")
    of = {label: [run for run in finished if run.label == label and not run.ended_diverged]
          for label in plan.methods}
    of = {label: found for label, found in of.items() if found}
    if plan.budget == "converge":
        for label, found in of.items():
            rounds, steps = ([run.summary[key] for run in found] for key in ("rounds", "grad_steps"))
            cost = f"{_range(rounds)} rounds, {_range(steps)} gradient steps"
            if going := sum(run.summary.get("stopped") is None for run in found):
                yield (f"{label} was still improving at the limit of {plan.methods[label].rounds} rounds "
                       f"with {going} of {times(len(found), 'seed')} ({cost}).")
            else:
                yield f"{label} stopped improving after {cost}."
    elif plan.budget == "steps":
        mean = {label: float(np.mean([run.summary["grad_steps"] for run in found]))
                for label, found in of.items() if found[0].rounds == plan.methods[label].rounds}
        usual = median(mean.values()) if mean else 0.0
        for label, count in mean.items():
            if abs(count / usual - 1) > MISMATCH:
                yield (f"{label} took {100 * count / usual:.0f} % of the gradient steps of the others: its "
                       "rounds are too long for a closer match.")


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
