"""The jobs of ONE client, lifted over a chunk of clients.

Every backend runs chunks through `Work.execute`, so that all of them give the same result.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from descant.core.algorithm import Algorithm, Message, Round, at_most
from descant.core.federation import Federation
from descant.core.kernels.lift import is_transformed
from descant.core.meter import Meter, metered
from descant.core.privacy.settings import Mechanism
from descant.core.random import torch_seeded
from descant.core.splits import SplitName
from descant.core.task import Task
from descant.core.tree import Tree, filled, leaves, map_tree, stack, take
from descant.core.vector import Model
from descant.engine.batches import LocalWork, Plan, View, plan_chunk, steps_in_round
from descant.engine.closed import ClosedView
from descant.engine.draws import Coins
from descant.engine.outcome import Outcome
from descant.engine.pool import Pool, Pools
from descant.errors import DescantError
from descant.priors.schedule import at_round
from descant.theory.truth import identified, total_error, true_models

CPU = torch.device("cpu")
Job: TypeAlias = Literal["local", "opening", "score", "score_newcomer", "personalize", "adapt"]


class LocalResult(NamedTuple):
    """What a client's training in a round gives."""

    upload: Tree
    state: Tree
    loss: Tensor  # [] mean loss over its steps


class Scores(NamedTuple):
    """The tallies of one client's predictions, and its model's distance from the truth."""

    validation: Tensor  # [sums] of `task.tally`
    test: Tensor  # [sums]
    error: Tensor  # [] ||theta - true model||^2; NaN where the true model is not known
    auroc: Tensor  # [2] on the validation and on the test rows; [0] where it is not asked for


class ClientScores(NamedTuple):
    """The scores of one client."""

    personal: Scores
    shared: Tree  # Scores of the global model on the same rows; () if there is none


class ScoreMessage(NamedTuple):
    """The shared part of a score job's message."""

    message: Tree
    model: Tree  # the global model; () if there is none


def to_score(message: Message, model: Model | None) -> Message:
    """The message of a score job: what clients are sent, and the global model."""
    return Message(ScoreMessage(message.shared, () if model is None else model), message.each)


@dataclass(frozen=True)
class Work:
    """The work of one experiment: method, task, data, and the seed of all random numbers."""

    algorithm: Algorithm
    task: Task
    federation: Federation
    seed: int
    batch: int | Literal["full"]
    local: LocalWork
    device: torch.device = CPU
    most: float = 1.0  # the largest share of one client in an average, where their claims are not trusted
    ranks: bool = False  # whether scores include the AUROC, which tallies cannot give
    privacy: Mechanism | None = None  # what protects clients, or their rows
    private: Task | None = None  # what `local` sees of the rows, where these are protected
    templates: dict[Job, Tree] = field(default_factory=dict)  # filled by `rehearse`
    pools: Pools = field(default_factory=Pools, repr=False)
    closed: bool = False  # whether nobody may look at a row, since those here are none

    def round_of(self, clients: np.ndarray, number: int) -> Round:
        """The facts of a round for a group of clients."""
        sizes = torch.from_numpy(self.federation.train.sizes)
        if self.most < 1:
            population = self.federation.population
            sizes = torch.cat([at_most(sizes[:population], self.most), sizes[population:]])
        sizes = sizes[torch.from_numpy(clients)].to(self.task.dtype)
        return Round(self.seed, number, torch.from_numpy(clients), sizes, self.federation.population,
                     self.most)

    def steps_of(self, clients: np.ndarray) -> np.ndarray:
        """How many local steps each client of the population takes in a round; 0 for those not asked for."""
        found, sizes = np.zeros(self.federation.population, np.int64), self.federation.train.sizes
        per_step, shares = self.algorithm.batches_per_step(), self.algorithm.disjoint_batches
        for client in clients.tolist():
            found[client] = steps_in_round(int(sizes[client]), self.batch, self.local, per_step, shares)
        return found

    def at(self, number: int) -> Work:
        """The work of a round: step sizes may follow a schedule."""
        method = at_round(self.algorithm, number)
        return self if method is self.algorithm else dataclasses.replace(self, algorithm=method)

    def execute_one(self, job: Job, client: int, number: int, message: Message, state: Tree
                    ) -> tuple[Tree, int]:
        """The result of ONE client's job, and its gradient steps; a DescantError if it fails.
        `message.each` and `state` have one row."""
        outcome = self.execute(job, np.array([client]), number, message, state)
        if outcome.failed:
            raise DescantError(outcome.failed[0])
        return take(outcome.values, 0), outcome.grad_steps

    def execute(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree) -> Outcome:
        """Run one chunk. `message.each` and `states` have a row per client."""
        start = time.perf_counter()
        outcome = self.at(number)._execute(job, clients, number, message, states)
        return outcome._replace(seconds=time.perf_counter() - start)

    def _execute(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree) -> Outcome:
        if len(clients) > 1 and self.task.alone is None:
            try:
                values, meter = self._together(job, clients, number, message, states)
                if wrong := misfit(take(values, 0), self.templates.get(job)):
                    raise TypeError(wrong)
                return Outcome(np.arange(len(clients)), values, {}, meter.grad_steps,
                               gathering=meter.gathering, rows=meter.rows, shortened=meter.shortened)
            except Exception as error:  # one by one shows which client fails
                outcome = self._one_by_one(job, clients, number, message, states)
                note = f"clients had to be run one by one: {_reason(error)}"
                return outcome if outcome.failed else outcome._replace(note=note)
        return self._one_by_one(job, clients, number, message, states)

    def _one_by_one(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree
                    ) -> Outcome:
        done, results, failed, spent = [], [], {}, Meter(1)
        for k in range(len(clients)):
            # copies: the alignment of a row in memory shows in the last bit of matrix products
            each, state = (map_tree(torch.clone, take(rows, k)) for rows in (message.each, states))
            own = Message(message.shared, each)
            try:
                value, meter = self._alone(job, int(clients[k]), number, own, state)
            except Exception as error:
                failed[k] = _reason(error)
                continue
            spent.grad_steps += meter.grad_steps
            spent.gathering += meter.gathering
            spent.rows += meter.rows
            spent.shortened += meter.shortened
            if wrong := misfit(value, self.templates.get(job)):
                failed[k] = wrong
                continue
            done.append(k)
            results.append(value)
        values = stack(results) if results else ()
        return Outcome(np.array(done, np.int64), values, failed, spent.grad_steps,
                       gathering=spent.gathering, rows=spent.rows, shortened=spent.shortened)

    def _together(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree
                  ) -> tuple[Tree, Meter]:
        with torch.no_grad(), metered(len(clients)) as meter, self._placed():
            with meter.gathers():
                plan, tensors = self._plan(job, clients, number)
            message, states, tensors = self._there((message, states, tensors))

            given, form = (message.each, states, tensors), ()

            def one(*flat: Tensor) -> tuple[Tensor, ...]:
                nonlocal form
                each, state, own = filled(given, flat)
                received, data = Message(message.shared, each), self._seen(job, plan, own)
                form = _JOBS[job](self, received, state, data, meter)
                return tuple([tensor for _, tensor in leaves(form)])

            # of plain tuples: taking trees apart and putting them together costs vmap more than a step
            found = vmap(one)(*[tensor for _, tensor in leaves(given)])
        return self._back(filled(form, found)), meter

    def _alone(self, job: Job, client: int, number: int, message: Message, state: Tree) -> tuple[Tree, Meter]:
        with torch.no_grad(), metered(1) as meter, self._placed():
            with meter.gathers():
                plan, tensors = self._plan(job, np.array([client]), number)
            own = take(tensors, 0)
            message, state, own = self._there((message, state, own))
            # random numbers that a user's module draws by itself are at least repeatable
            with torch_seeded(int(own.key)):
                value = _JOBS[job](self, message, state, self._seen(job, plan, own), meter)
        return self._back(value), meter

    def _is_private(self, job: Job) -> bool:
        """Whether what a client does in a job leaves it, so that its rows must be protected."""
        return self.private is not None and job in ("local", "opening")

    def _seen(self, job: Job, plan: Plan, own: Any) -> View:
        return (ClosedView if self.closed else View)(plan, own, private=self._is_private(job))

    def view(self, job: Job, client: int, number: int) -> View:
        """What ONE client sees of its data in a job."""
        plan, tensors = self._plan(job, np.array([client]), number)
        return View(plan, take(tensors, 0))

    def _plan(self, job: Job, clients: np.ndarray, number: int) -> tuple[Plan, Any]:
        work, splits = self.local, _SPLITS[job]
        purpose = "local" if job in ("local", "opening") else "personal"
        if job in ("personalize", "score") and not self.algorithm.trains_to_personalize:
            work = LocalWork(steps=0)
        elif purpose == "personal" and work.steps != 0 and (n := self.algorithm.personal_steps()) is not None:
            work = LocalWork(steps=n)
        plan, tensors = plan_chunk(self.pool, clients, seed=self.seed, purpose=purpose, number=number,
                                   batch=self.batch, work=work, per_step=self.algorithm.batches_per_step(),
                                   dtype=self.task.dtype, splits=splits,
                                   draws=self.task.draws or self.algorithm.draws or self._is_private(job),
                                   disjoint=self.algorithm.disjoint_batches, coins=self._coins(job))
        if "test" in splits and (truth := true_models(self.task, self.federation)) is not None:
            tensors = tensors._replace(truth=truth[clients])
        return plan, tensors

    def _coins(self, job: Job) -> Coins | None:
        if not self._is_private(job) or self.privacy is None or not self.privacy.is_poisson:
            return None
        return "secret" if self.privacy.secret else "stream"

    # -- the device --------------------------------------------------------------------------------

    @property
    def pool(self) -> Pool:
        """The samples, on the device; made once, when they are first asked for."""
        return self.pools.of(self.federation, self._arranged)

    def _arranged(self) -> Pool:
        if self.device != CPU:  # with the constants of the task's module
            self.task.move_to(self.device)
        found = (Pool.of(self.federation, self.task.dtype) if self.federation.has_rows
                 else Pool.as_it_lies(self.federation))
        return found.to(self.device)

    def _placed(self) -> AbstractContextManager[Any]:
        """New tensors are made on the device."""
        return nullcontext() if self.device == CPU else self.device

    def _there(self, trees: tuple[Tree, ...]) -> tuple[Tree, ...]:
        return trees if self.device == CPU else map_tree(lambda t: t.to(self.device), trees)

    def _back(self, values: Tree) -> Tree:
        return values if self.device == CPU else map_tree(lambda t: t.to(CPU), values)

    def tried(self, job: Job, message: Message, state: Tree) -> Tree:
        """The result of a job of the first client, to see whether it can be done."""
        return self._alone(job, 0, 0, message, state)[0]

    def rehearse(self, job: Job, message: Message, state: Tree) -> None:
        """Learn the form of a job's result from a client without batches; if it fails, from the next one.
        `message.each` has one row."""
        own = Message(message.shared, take(message.each, 0))
        quiet = dataclasses.replace(self, local=LocalWork(steps=0))
        error: Exception | None = None
        for client in range(min(self.federation.population, 5)):
            try:
                value, _ = quiet._alone(job, client, 0, own, state)
            except Exception as failure:
                error = error or failure
                continue
            self.templates[job] = map_tree(torch.zeros_like, value)
            return
        raise DescantError(f"{self.algorithm.name} fails on every client that was tried: "
                           f"{_reason(error)}") from error


def _train(work: Work, message: Message, state: Tree, data: View, meter: Any, *, opening: bool = False
           ) -> LocalResult:
    step = work.algorithm.opening if opening else work.algorithm.local
    upload, state = step(work.private or work.task, message, state, data)
    return LocalResult(upload, state, meter.loss().to(work.task.dtype))


def _personalize(work: Work, message: Message, state: Tree, data: View, meter: Any) -> Tree:
    return work.algorithm.personalize(work.task, message, state, data)


def _adapt(work: Work, message: Message, state: Tree, data: View, meter: Any) -> Tree:
    return work.algorithm.adapt(work.task, message, data)


def _score(work: Work, message: Message, state: Tree, data: View, meter: Any, *, newcomer: bool = False
           ) -> ClientScores:
    own = Message(message.shared.message, message.each)
    personal = (_adapt if newcomer else _personalize)(work, own, state, data, meter)
    return _scored(work, personal, message.shared.model, data)


def _scored(work: Work, personal: Tree, model: Tree, data: View) -> ClientScores:
    """The scores of the personal and of the global model; each sample is looked up once."""
    predict: list[Callable[[Tensor], Tensor]] = [partial(work.algorithm.predict, work.task, personal)]
    is_same = model != () and _is_same(work, personal, model)
    if model != () and not is_same:
        predict.append(partial(work.task.predict, model))

    def tallies(split: SplitName) -> tuple[list[Tensor], list[Tensor]]:
        outputs = [[each(x) for each in predict] for x in data.samples(split, work.task.rows_at_once)]
        targets = data.targets(split, with_x=work.task.scores_need_x)
        whole = [torch.cat(blocks) for blocks in zip(*outputs, strict=True)]
        return ([work.task.tally(each, targets) for each in whole],
                [work.task.auroc(each, targets) for each in whole] if work.ranks else [])

    test, test_areas = tallies("test")
    validation, areas = tallies("validation") if len(work.federation.validation.indices) else (
        [torch.zeros_like(each) for each in test], [torch.full_like(each, torch.nan) for each in test_areas])
    both = [torch.stack(each) for each in zip(areas, test_areas, strict=True)] or [
        torch.zeros(0, dtype=torch.float64)] * len(predict)
    errors = [_error(work, personal, data.truth), torch.full((), torch.nan, dtype=work.task.dtype)]
    scores = [Scores(*each) for each in zip(validation, test, errors, both, strict=False)]
    if model == ():
        return ClientScores(scores[0], ())
    return ClientScores(scores[0], scores[0]._replace(error=errors[1]) if is_same else scores[1])


def _is_same(work: Work, personal: Tree, model: Model) -> bool:
    """Whether the personal model is the global one, as in methods that do not personalize. On an accelerator
    the comparison would force a sync."""
    return (isinstance(personal, Model) and type(work.algorithm).predict is Algorithm.predict
            and work.device == CPU
            and not is_transformed(*personal) and all(map(torch.equal, personal, model)))


def _error(work: Work, personal: Tree, truth: Tensor | None) -> Tensor:
    if truth is None or not isinstance(personal, Model):
        return torch.full((), torch.nan, dtype=work.task.dtype)
    return total_error(identified(work.task, personal.theta), truth)


_JOBS: dict[Job, Callable[[Work, Message, Tree, View, Any], Tree]] = {
    "local": _train, "opening": partial(_train, opening=True), "score": _score,
    "score_newcomer": partial(_score, newcomer=True),
    "personalize": _personalize, "adapt": _adapt,
}
_SPLITS: dict[Job, tuple[SplitName, ...]] = {
    "local": ("train", "validation"), "opening": ("train", "validation"),
    "score": ("train", "validation", "test"),
    "score_newcomer": ("train", "validation", "test"), "personalize": ("train", "validation"),
    "adapt": ("train", "validation"),
}


def misfit(value: Tree, template: Tree | None) -> str | None:
    """How a result differs in form from its template, or None."""
    if template is None:
        return None
    expected = dict(leaves(template))
    try:
        found = dict(leaves(value))
    except TypeError as error:
        return str(error)
    if found.keys() != expected.keys():
        return f"the result has the parts {sorted(found)}, expected {sorted(expected)}"
    for name, tensor in found.items():
        want = expected[name]
        if tensor.shape != want.shape or tensor.dtype != want.dtype:
            return (f"{name} has shape {tuple(tensor.shape)} of {tensor.dtype}, "
                    f"expected {tuple(want.shape)} of {want.dtype}")
    return None


def _reason(error: Exception | None) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"
