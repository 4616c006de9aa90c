"""Whether a method keeps to the rules that the engine relies on: `check_algorithm(MyMethod())`.

It plays rounds by hand on a small federation whose clients differ in every way (one has a single row, some
have no validation or test rows), and watches every call; then the engine runs the same clients together.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from descant.core import fields
from descant.core.algorithm import Algorithm, Message, Round, contributions
from descant.core.alike import parts, same
from descant.core.meter import metered
from descant.core.random import generators_used, torch_seeded
from descant.core.rules import CHECKS, CheckFailed, FailureLog, Unusable
from descant.core.sums import Total, added
from descant.core.threads import one_thread
from descant.core.tree import Tree, leaves, map_tree, stack, take
from descant.core.vector import Model
from descant.data.ragged import CLASSES, SIZES, ragged, retested
from descant.engine.backends.base import InProcess
from descant.engine.batches import LocalWork
from descant.engine.work import Job, Work, misfit, to_score
from descant.errors import DescantError, UsageError, first_line, unknown
from descant.experiment import methods
from descant.models import make_task

__all__ = ["CHECKS", "CheckFailed", "check_algorithm"]

SOME, OTHERS = np.array([0, 2, 3]), np.array([1, 2, 4])
TOLERANCE = 1e-10  # in float64, relative above one


def check_algorithm(method: Algorithm, *, skip: Collection[str] = (),
                    on_fail: Literal["raise", "report"] = "raise") -> list[CheckFailed]:
    """Raise a CheckFailed, which is an AssertionError, for the first check that a method does not pass; with
    on_fail="report", return one for each. Checks in `skip` do not count: for a method that breaks a rule by
    its nature."""
    if not isinstance(method, Algorithm):
        raise UsageError("check_algorithm takes a method with its settings, such as MyMethod() (with "
                         f"brackets), not {method!r}")
    for name in skip:
        if name not in CHECKS:
            raise unknown("check", name, CHECKS)
    log = FailureLog(getattr(method, "name", type(method).__name__), frozenset(skip), on_fail == "raise")
    with one_thread(), suppress(Unusable):
        _check_class(log, method)
        everyone = np.arange(len(SIZES))
        # for the types alone; an opening asks everyone
        Trial(log, make_work(method, torch.float32)).play([everyone if method.opens() else SOME])
        trial = Trial(log, make_work(method, torch.float64))
        trial.check(trial.play([everyone, SOME]))
    return log.failures


def _check_class(log: FailureLog, method: Algorithm) -> None:
    if wrong := methods.lacks(type(method)):
        raise log.stop("class", wrong)
    signature = f"{type(method).__name__}("  # what a dataclass has in place of a docstring
    if (vars(type(method)).get("__doc__") or signature).startswith(signature):
        log.fail("class", "it has no docstring: write the update there, in formulas")
    for field in dataclasses.fields(method):
        if not field.metadata.get("doc"):
            log.fail("class", f"its field {field.name} does not tell what it is: write "
                              f'{field.name}: ... = hyper(default, "what it is")')
    try:
        table = {key: value for key, value in fields.as_table(method).items() if key != "name"}
        if fields.parse(type(method), table, method.name) != method:
            log.fail("table", f"the table {table} makes another method: do not change fields in the object")
        if pickle.loads(pickle.dumps(method)) != method:
            log.fail("table", "a pickled copy of it is another method")
    except (UsageError, pickle.PicklingError, AttributeError, TypeError) as error:
        log.fail("table", f"{first_line(error)}: fields hold numbers, text and tables of these, and the "
                          "class is defined at the top of a module")


class FederationState(NamedTuple):
    """The federation after some rounds."""

    facts: Round  # of the last round
    server: Tree
    states: Tree  # [clients, ...]
    uploads: Tree  # [cohort, ...] of the last round


class Trial:
    """A method on the small federation."""

    def __init__(self, log: FailureLog, work: Work) -> None:
        self.log, self.work = log, work
        self.method, self.task = work.algorithm, work.task
        self.everyone = np.arange(work.federation.population)

    # -- one call, watched ---------------------------------------------------------------------------------

    def call(self, name: str, given: dict[str, Any], check: str = "runs") -> Any:
        """The result of a function of the method, which must leave everything as it was, and give the same
        again."""
        kept = {key: {part: tensor.clone() for part, tensor in parts(value).items()}
                for key, value in given.items()}
        with generators_used() as used:
            found = self._result(name, given, check)
        changed = [key for key in given if not same(parts(given[key]), kept[key])]
        for key in changed:
            self.log.fail("pure", f"{name} changes its {key} in place: make a new tensor, as in w + step, "
                                  "where it says w += step, w[...] = or w.add_(step)")
            for part, tensor in parts(given[key]).items():
                tensor.copy_(kept[key][part])  # what follows is judged by itself
        for source in sorted(used):
            self.log.fail("random", f"{name} draws from the generator of {source}, so that a run cannot be "
                                    "resumed: the server draws from round.generator(purpose), a client "
                                    "from batch.key (descant.core.random)")
        if not changed and not used and not same(parts(found), parts(self._result(name, given, check))):
            self.log.fail("repeatable", f"{name} gives another result when it is called again with the "
                                        "same arguments: what it keeps must be in the states, and random "
                                        "numbers come from round.generator or batch.key")
        return found

    def _result(self, name: str, given: dict[str, Any], check: str) -> Any:
        try:
            with torch.no_grad(), metered(1):
                return getattr(self.method, name)(*given.values())
        except Exception as error:
            raise self.log.stop(check, f"{name} fails with {type(error).__name__}: {first_line(error)}"
                                ) from error

    def tree(self, value: Any, what: str, like: Tree = None, of: str = "") -> Tree:
        """The value, if it is a tree of tensors of the run's type, finite, and in the form of another."""
        try:
            found = dict(leaves(value))
        except TypeError as error:
            raise self.log.stop("trees", f"{what}: {error}") from None
        for name, tensor in found.items():
            if tensor.requires_grad:
                self.log.fail("trees", f"{what}: {name} still has a gradient: detach it")
            if tensor.is_floating_point() and tensor.dtype != self.task.dtype:
                self.log.fail("dtype", f"{what}: {name} is {tensor.dtype}, where the run is in "
                                       f"{self.task.dtype}: make it like a tensor that is there, as in "
                                       "torch.zeros_like(w.theta) or w.theta.new_tensor(1.0)")
            if not bool(torch.isfinite(tensor).all()):
                self.log.fail("finite", f"{what}: {name} is not finite{of}: beware of a mean or a spread "
                                        "over no rows or one, and of a division by what may be 0")
        if like is not None and (wrong := misfit(value, like)):
            raise self.log.stop("form", f"{what}: {wrong}: tensors, shapes and types are those of "
                                        "init_client, or of the first upload, in all clients and rounds")
        return value

    def message(self, name: str, server: Tree, facts: Round, check: str = "runs") -> Message:
        """What the server sends, with the rows of the cohort."""
        found = self.call(name, {"server": server, "round": facts}, check)
        if not isinstance(found, Message):
            raise self.log.stop("trees", f"{name} must return a Message, not a {type(found).__name__}")
        self.tree(found, f"what {name} returns")
        for leaf, rows in leaves(found.each):
            if rows.ndim == 0 or len(rows) != len(facts.cohort):
                raise self.log.stop("rows", f"{name} returns each.{leaf} of shape {tuple(rows.shape)} for "
                                            f"a cohort of {len(facts.cohort)}: pick the rows of "
                                            "round.cohort")
        return found

    def trained(self, job: Job, client: int, number: int, message: Message, state: Tree) -> tuple[Tree, Tree]:
        """The upload and the new state of ONE client."""
        found = self.call(job, {"task": self.task, "message": message, "state": state,
                                "data": self.work.view(job, client, number)})
        if not isinstance(found, tuple) or len(found) != 2:
            raise self.log.stop("trees", f"{job} must return two trees, its upload and its new state, not "
                                         f"a {type(found).__name__}")
        of = f" for a client with {SIZES[client]} training rows"
        return (self.tree(found[0], f"the upload of {job}", of=of),
                self.tree(found[1], f"the new state of {job}", state, of))

    def personal(self, job: Job, client: int, number: int, message: Message, state: Tree) -> Tree:
        """What ONE client predicts with."""
        name = "personalize" if job == "score" else "adapt"
        given = {"task": self.task, "message": message} | ({} if name == "adapt" else {"state": state}) | {
            "data": self.work.view(job, client, number)}
        return self.tree(self.call(name, given), f"what {name} returns",
                         of=f" for a client with {SIZES[client]} training rows")

    # -- rounds ----------------------------------------------------------------------------------------

    def play(self, cohorts: list[np.ndarray]) -> FederationState:
        """A round of each cohort."""
        facts, begun = self.work.round_of(self.everyone, 0), {"task": self.task, "model": self.task.init()}
        found = self.call("init_server", begun | {"round": facts})
        server = _own(self.tree(found, "what init_server returns"))
        state = self.tree(self.call("init_client", begun), "what init_client returns")
        states = [_own(state) for _ in self.everyone]
        for number, cohort in enumerate(cohorts, 1):
            facts, uploads = self.work.round_of(cohort, number), list[Tree]()
            message = self.message("broadcast", server, facts)
            job: Job = "opening" if number == 1 and self.method.opens() else "local"
            for k, client in enumerate(cohort.tolist()):
                upload, state = self.trained(job, client, number, _row(message, k), states[client])
                states[client] = _own(state)
                uploads.append(self.tree(upload, f"the upload of {job}", (uploads or [upload])[0]))
            server = self.aggregated(server, stack(uploads), facts)
        return FederationState(facts, server, stack(states), stack(uploads))

    def aggregated(self, server: Tree, uploads: Tree, facts: Round) -> Tree:
        """The new state of the server."""
        found = self.call("aggregate", {"server": server, "uploads": uploads, "round": facts})
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], dict):
            raise self.log.stop("trees", "aggregate must return the server's state, and a report (a dict)")
        weights = self.method.client_weights(facts)
        weights = found[1].get("client_weights") if weights is None else weights
        if weights is not None and (len(weights) != len(facts.cohort)
                                    or not math.isclose(float(weights.sum()), 1, abs_tol=1e-5)):
            self.log.fail("rows", f"client_weights are {len(weights)} numbers of the sum "
                                  f"{float(weights.sum()):g} for {len(facts.cohort)} clients: make them "
                                  "one for each client of the round, of the sum 1")
        return self.tree(found[0], "the server state of aggregate")

    def check(self, after: FederationState) -> None:
        """All that is left, on the state after some rounds."""
        number, server, states = after.facts.number, after.server, after.states
        message, own = (self.message(name, server, self.work.round_of(self.everyone, number))
                        for name in ("broadcast", "participant"))
        some = self.message("broadcast", server, self.work.round_of(SOME, number))
        if not same(parts(some), parts(_row(message, torch.from_numpy(SOME)))):
            self.log.fail("cohort", "broadcast sends a client something else when others are in the "
                          "cohort, if only in the last bit: look up its row, with no mean and no product")
        self._check_order(after)
        self._check_forgets(number + 1, message, states)
        newcomer = self._check_newcomers(server, number)
        self._check_models(number, [("score", own, states), ("score_newcomer", newcomer, states)])
        shared = self.call("global_model", {"server": server})
        if shared is not None and not (isinstance(shared, Model) and shared.theta.shape == (self.task.dim,)):
            raise self.log.stop("trees", "global_model must return one Model, or None")
        try:
            self.work.rehearse("local", _row(message, slice(0, 1)), take(states, 0))
        except DescantError as error:
            raise self.log.stop("runs", f"local, without a step: {error}") from error
        if wrong := misfit(take(after.uploads, 0), self.work.templates.pop("local").upload):
            raise self.log.stop("form", f"the upload of local: {wrong} from a client that takes no step, "
                                        "by which the engine learns its form before the first round")
        for job, sent in (("local", message), ("score", to_score(own, shared)),
                          ("score_newcomer", to_score(newcomer, shared))):
            self._check_together(job, number + 1, sent, states)  # type: ignore[arg-type]

    def _check_order(self, after: FederationState) -> None:
        order = torch.tensor([2, 0, 1])
        straight = self.aggregated(after.server, after.uploads, after.facts)
        mixed = self.aggregated(after.server, take(after.uploads, order), after.facts.of(order))
        if not same(parts(straight), parts(mixed), TOLERANCE):
            self.log.fail("order", "aggregate comes to something else when the same uploads lie in another "
                                   "order: find a client by its number in round.cohort, not by its place")
        if not self.method.needs_rows:
            self._check_sums(after, straight)

    def _check_sums(self, after: FederationState, straight: Tree) -> None:
        server, counts = after.server, self.call("counts", {"sizes": after.facts.sizes}, "sums")
        message = self.method.broadcast(server, after.facts)
        each = contributions(self.method.contribution, message, after.uploads)
        if any(not rows.is_floating_point() for _, rows in leaves(each)) or len(counts) != len(SOME):
            raise self.log.stop("sums", "contribution returns something else than real numbers, or counts "
                                        "not one number for each client: a mean can be of nothing else")
        for groups in ([[0, 1, 2]], [[2], [0, 1]], [[1], [2], [0]]):
            total = added(Total.of(take(each, rows), counts[rows]) for rows in groups)
            given = {"server": server, "mean": total.mean(take(each, 0)), "round": after.facts}
            if not same(parts(self.call("absorb", given, "sums")[0]), parts(straight)):
                self.log.fail("sums", "absorb makes something else of the mean of the contributions than "
                                      "aggregate of the uploads: write one of the two")

    def _check_forgets(self, number: int, message: Message, states: Tree) -> None:
        if not self.method.forgets():
            return
        others = map_tree(lambda rows: ~rows if rows.dtype == torch.bool else rows + 1, states)
        mine, other = (parts(self.trained("local", 0, number, _row(message, 0), take(each, 0)))
                       for each in (states, others))
        if not same(mine, other):
            self.log.fail("forgets", "local makes something else of another state, and forgets says that it "
                                     "does not look at it: leave forgets out")

    def _check_newcomers(self, server: Tree, number: int) -> Message:
        for beyond in (0, len(self.everyone)):  # clients that were never drawn, and clients that come later
            pair = [facts._replace(cohort=facts.cohort + beyond)
                    for facts in (self.work.round_of(clients, number) for clients in (SOME, OTHERS))]
            one, other = (parts(self.message("newcomer", server, facts, "newcomer")) for facts in pair)
            if not same(one, other):
                self.log.fail("newcomer", "newcomer sends what depends on who asks: a client that never "
                                          "took part gets nothing that is made for one client")
        return self.message("newcomer", server, self.work.round_of(self.everyone, number))

    def _check_models(self, number: int, jobs: list[tuple[Any, Message, Tree]]) -> None:
        changed = dataclasses.replace(self.work, federation=retested(self.work.federation))
        for job, message, states in jobs:
            own, state = _row(message, 0), take(states, 0)
            personal = self.personal(job, 0, number, own, state)
            other = Trial(self.log, changed).personal(job, 0, number, own, state)
            if not same(parts(personal), parts(other)):
                name = "personalize" if job == "score" else "adapt"
                self.log.fail("test rows", f"{name} makes another model where the test rows are others: it "
                                           "may read data.scan, and data.mean of the training and "
                                           "validation rows, alone")
            self.personal(job, 2, number, _row(message, 2), take(states, 2))  # one row, no validation rows
            x = self.work.federation.x[:3]
            outputs = self.call("predict", {"task": self.task, "personal": personal, "x": x})
            if not isinstance(outputs, Tensor) or len(outputs) != len(x):
                raise self.log.stop("rows", "predict must return a row of outputs for each sample")

    def _check_together(self, job: Job, number: int, message: Message, states: Tree) -> None:
        """All clients in one chunk, and one by one."""
        alone, together = (InProcess(self.work, chunk).run(job, self.everyone, number, message, states)
                           for chunk in (1, len(self.everyone)))
        name = {"score": "personalize or predict", "score_newcomer": "adapt or predict"}.get(job, job)
        for why in (*alone.failed.values(), *together.failed.values()):
            raise self.log.stop("runs", f"{name} fails with {why}")
        if together.note is not None:
            reason = together.note.partition(": ")[2]
            check, advice = next(each for word, *each in _REFUSALS if word in reason)
            raise self.log.stop(check, f"{name} cannot be run for several clients together ({reason}): "
                                       f"{advice}")
        if not same(parts(alone.values), parts(together.values), TOLERANCE):
            self.log.fail("vectorised", f"{name} comes to something else when clients run together: "
                                        "batches are then filled up to one length, and batch.weight says "
                                        "which rows count, not len(batch.y)")
        if alone.grad_steps != together.grad_steps:
            self.log.fail("vectorised", f"{name} takes {alone.grad_steps} gradients of clients one by one, "
                                        f"and {together.grad_steps} of clients together")


_BRANCH = ("branch", "write torch.where(condition, a, b) in place of if, and no .item(), bool() or float()")
_REFUSALS = [  # what vmap says, which check that is, and what to do
    ("control flow", *_BRANCH), (".item()", *_BRANCH),
    ("random", "random", "random numbers of a client come from batch.key (descant.core.random)"),
    ("", "vectorised", "write it with functions that torch.func.vmap knows, and change nothing in place"),
]


def batchnorm_net() -> nn.Module:
    """Running statistics and dropout, which methods easily forget."""
    with torch_seeded(0):
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3),
                             nn.Linear(6, CLASSES))


def make_work(method: Algorithm, dtype: torch.dtype) -> Work:
    federation = ragged().to(dtype)
    return Work(method, make_task(batchnorm_net(), federation, dtype=dtype), federation, 0, 4,
                LocalWork(steps=2))


def _row(message: Message, which: Any) -> Message:
    return Message(message.shared, take(message.each, which))


def _own(value: Tree) -> Tree:
    """The tree with tensors that nobody else has, as the engine keeps states."""
    return map_tree(lambda tensor: tensor.detach().clone(), value)
