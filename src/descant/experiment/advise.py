"""How strongly to personalize, and why: what the theory of one-stage FedProx says about a federation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from descant.core.plain import plain
from descant.core.threads import one_thread
from descant.engine.backends.base import InProcess
from descant.engine.rounds import NobodyLeft, Training
from descant.errors import UsageError
from descant.experiment import evidence
from descant.experiment.config import Experiment
from descant.experiment.run import Setup
from descant.priors.adaptive import Choice, practical_lambda, theorem_lambda
from descant.theory.estimate import Estimates, pilot_clients, survey
from descant.theory.moreau import Steps, corollary_steps, predicted_gradients, predicted_rounds

MANY = 20  # full gradients in a round beyond which minibatches are offered
CLEARLY = 0.02  # by which models of others are more accurate on a client's rows than its own


class Budget(NamedTuple):
    """What the experiment spends, in gradient steps of all clients together."""

    total: int
    batches: int  # what it would be with one gradient on each batch


@dataclass(frozen=True)
class Advice:
    """What was estimated, what is recommended, and the reasons in plain sentences."""

    clients: int  # of the federation
    asked: int  # of them, for the estimates
    n: float  # training rows of a client
    d: int  # parameters
    ridge: float  # of the pilot solutions, part of L and mu
    L: float
    mu: float
    kappa: float
    rho: float
    R: float  # without the noise of estimation
    R_max: float
    R_naive: float  # with it
    noise: float  # expected squared error of a client's own model
    transfer: float | None  # accuracy of others' models less that of a client's own; None: not known
    regime: Literal["alike", "different"]  # R against 1/sqrt(n)
    theorem: Choice  # lambda by Theorem 1
    practical: Choice  # lambda by the rule of the paper's experiments
    lam: float  # the recommended one
    steps: Steps  # of Corollary 1 for it
    eps: float  # share of the squared error that is left after so many
    rounds: int
    gradients: int  # of each client, on all its rows
    cost: float | None  # of all that, as a multiple of the experiment's gradient steps; None: not known
    reasons: tuple[str, ...]
    together: evidence.Verdict  # what learning together brought in studied federations like this one
    seen: tuple[str, ...]  # the same in plain sentences
    settings: dict[str, Any]  # the fields of an experiment that follow the advice

    @property
    def others_help(self) -> bool:
        """Whether what others have learned is clearly worth more to a client than its own rows."""
        return self.transfer is not None and self.transfer > CLEARLY

    @property
    def is_disputed(self) -> bool:
        """Whether the theory and what was seen point in different directions."""
        return bool(_about_both(self))

    def dump(self) -> dict[str, Any]:
        """Plain values, for JSON: a bound that is infinite is null."""
        named = {name: getattr(self, name)._asdict() for name in ("theorem", "practical", "steps")}
        return plain(dataclasses.asdict(self) | named)  # type: ignore[no-any-return]


def ask(experiment: Experiment, *, clients: int = 20, steps: int = 300, ridge: float | None = None,
        begin: Callable[[int], Callable[[int], None]] = lambda count: lambda done: None) -> Estimates:
    """The estimates for an experiment's data and model, from a sample of its clients. Without a ridge or a
    weight decay the ridge is 1 / n: the pull of a standard normal prior. `begin` is told how many clients are
    asked, and gives what is told how many are done."""
    federation = experiment.data.federation().to(torch.float64)
    task = experiment.model.task(federation, torch.float64, experiment.train.seed)
    chosen = pilot_clients(federation, clients, experiment.train.seed)
    if ridge is None:
        solver = getattr(experiment.algorithm, "solver", experiment.algorithm)
        ridge = getattr(solver, "weight_decay", 0.0) or 1 / float(federation.train.sizes[chosen].mean())
    return survey(task, federation, chosen, ridge=ridge, steps=steps, told=begin(len(chosen)))


def spent(experiment: Experiment) -> Budget:
    """The gradient steps of an experiment, by one round of it."""
    setup = Setup.of(experiment)
    train, work = setup.train, setup.work()
    training = Training(work, train)
    cohort, _ = training.sample()
    batches = sum(len(train.local.lengths(n, n if train.batch == "full" else train.batch))
                  for n in setup.federation.train.sizes[cohort].tolist())
    steps = batches
    with one_thread(), suppress(NobodyLeft):  # a method that diverges at once tells nothing of its cost
        steps = training.play(InProcess(work, 16)).grad_steps
    return Budget(steps * train.rounds, batches * train.rounds)


def recommend(found: Estimates, *, cap: float = 100.0, eps: float = 0.01, budget: Budget | None = None
              ) -> Advice:
    """What follows from the estimates. `eps` is the share of the squared error at which training may stop.
    The settings are those of the theory or, where these cost too much, of the paper's experiments."""
    if not 0 < cap < math.inf:
        raise UsageError(f"the cap of lambda must be a number greater than 0, not {cap:g}")
    if not 0 < eps < 1:
        raise UsageError(f"eps, the share of the error that is left, must lie between 0 and 1, not {eps:g}")
    R, L, mu, n = found.spread.R, found.L, found.mu, found.n
    theorem = theorem_lambda(R, n, found.rows, L=L, mu=mu, rho=found.rho, cap=cap)
    practical = practical_lambda(R, n, cap=cap)
    lam = practical.lam
    steps = corollary_steps(lam, L, mu)
    rounds = predicted_rounds(lam, L, mu, eps)
    gradients = predicted_gradients(lam, L, mu, eps)
    cost = None if budget is None else gradients * found.population / max(1, budget.total)
    settings: dict[str, Any] = {
        "algorithm.name": "one_stage_fedprox", "algorithm.lam": _short(lam), "algorithm.steps": "theory",
        "algorithm.L": _short(L), "algorithm.mu": _short(mu), "algorithm.weight_decay": _short(found.ridge),
        "train.batch": "full", "train.local": {"steps": 1}, "train.rounds": max(1, rounds)}
    if budget is not None and cost is not None and cost > 1:
        settings = {
            "algorithm.name": "one_stage_fedprox", "algorithm.lam": _short(lam),
            "algorithm.K": max(1, budget.total // max(1, budget.batches)),
            "algorithm.eta": _short(steps.eta / 2), "algorithm.weight_decay": _short(found.ridge)}
    transfer = None if found.transfer is None else found.transfer.gain
    seen = evidence.answer(n, transfer, found.population)
    advice = Advice(
        found.population, len(found.clients), n, found.models.shape[1], found.ridge, L, mu, L / mu, found.rho,
        R, found.spread.R_max, found.spread.naive, float(found.noise.mean()), transfer,
        "different" if math.sqrt(n) * R > 1 else "alike", theorem, practical, lam, steps, eps, rounds,
        gradients, cost, (), seen.together, seen.words, settings)
    return dataclasses.replace(advice, seen=(*seen.words, *_about_both(advice)), reasons=(
        *_about_clients(advice), *_about_lambda(advice), *_about_theory(advice, found),
        *_about_cost(advice, budget)))


def _about_clients(a: Advice) -> list[str]:
    scale = f"1/sqrt(n) = {1 / math.sqrt(a.n):.3g}"
    if a.R == 0:
        return [f"The clients' own models lie {a.R_naive:.3g} from their mean, no farther than models of one "
                f"and the same truth, each fitted to {a.n:.0f} rows: nothing speaks against one for all."]
    seen = (f"The clients' own models lie {a.R_naive:.3g} from their mean; without the noise of fitting them "
            f"to {a.n:.0f} rows each it is R = {a.R:.3g}.")
    if a.regime == "alike":
        return [seen, f"That is within {scale}: the clients differ less than a client can tell from its own "
                      "rows, so that learning together gains more than it costs."]
    share = a.R**2 / a.noise if a.noise else math.inf
    if a.others_help and share > 1:
        assert a.transfer is not None
        return [seen, f"That is beyond {scale}, and more than the noise of estimation. But models of others "
                      f"are {100 * a.transfer:.1f} points more accurate on a client's rows than its own: the "
                      "distance tells how models are fitted to few rows more than how clients differ. Learn "
                      "together first."]
    strong = ("far more than the noise of estimation: personalize strongly" if share > 10 else
              "more than the noise of estimation: personalize" if share > 1 else
              "but no more than the noise of estimation: a client is better off with the others than alone")
    return [seen, f"That is beyond {scale}: the clients differ, {strong}."]


def _about_lambda(a: Advice) -> list[str]:
    rule = "5 / (n R^2)" if math.sqrt(a.n) * a.R >= 1 else "5 / (sqrt(n) R)"
    more = f", which asks for {a.practical.wanted:.3g}: more than the cap" if a.practical.capped else ""
    said = [f"lambda = {a.lam:.3g} by the rule {rule} of the paper's experiments{more}."]
    if a.lam >= a.L:
        said.append("It is above L: the common model outweighs a client's data, and all stay close to it.")
    elif a.lam <= a.mu:
        said += ["It is below mu: a client's data outweighs the common model, and it learns nearly alone.",
                 "That is not what this federation calls for: compare it with FedAvg with fine-tuning before "
                 "you decide." if a.others_help or a.noise >= a.R**2 else
                 "LocalTrain, which needs no communication, would do about as well: compare them before you "
                 "decide."]
    else:
        said.append("It lies between mu and L: a client keeps what its own data tells clearly, and takes the "
                    "rest from the common model.")
    if a.regime == "different":
        said.append(f"Theorem 1 allows up to rho^2 / (n mu R^2) = {a.theorem.wanted:.3g}"
                    + (", more than the cap." if a.theorem.capped else "."))
    else:
        said.append(f"Theorem 1 asks for at least {a.theorem.wanted:.3g} (64 kappa^2 L or more)"
                    + (", which is far beyond use, hence the cap." if a.theorem.capped else "."))
    return said


def _about_theory(a: Advice, found: Estimates) -> list[str]:
    said = []
    if a.mu <= 1.01 * a.ridge:
        said.append(f"mu is the ridge of {a.ridge:.3g} alone: the losses by themselves are flat in some "
                    "direction, and the ridge decides how many rounds it takes.")
    if not bool(found.convex.all()):
        said.append("The theory is for convex losses, and this model's are not: L, mu and the distances "
                    "between models hold near the solutions that were found, the rest is a rule of thumb.")
    if unsolved := int((~found.solved).sum()):
        said.append(f"The models of {unsolved} of {a.asked} clients were still on their way when the pilot "
                    "ended: R may be larger. Give it more steps.")
    said.append(f"Rounds and gradients are upper bounds (Corollary 1), until {a.eps:.3g} of the squared "
                f"error is left, of the losses with the ridge of {a.ridge:.3g} (weight_decay). A smaller "
                "lambda takes fewer rounds with more local steps each.")
    if a.steps.K > MANY and (a.cost is None or a.cost <= 1):
        said.append(f"K = {a.steps.K:,} gradients on all rows are many for a round. In practice, and without "
                    "a promise, take minibatches and gamma = 1 / lambda, as the paper does on real data: "
                    f'algorithm.steps = "given", algorithm.K = 1, algorithm.eta = {a.steps.eta / 2:.3g} '
                    "(half, since a batch can curve more than all rows), train.batch = 20 and "
                    "train.local = { epochs = 1 }.")
    return said


def _about_cost(a: Advice, budget: Budget | None) -> list[str]:
    if budget is None or a.cost is None:
        return []
    steps = (f"{a.gradients * a.clients:,} gradient steps in all, {a.cost:.2g} times the experiment's "
             f"{budget.total:,}")
    if a.cost <= 1:
        return [f"With the steps of Corollary 1 that is {steps}."]
    return [f"With the steps of Corollary 1 it would be {steps}. The settings below leave the "
            "experiment's rounds and batches as they are and spend no more: gamma = 1 / lambda, as in the "
            f"paper's experiments on real data, and half of eta = {a.steps.eta:.3g}, since a batch can curve "
            "more than all rows. No rate is promised for them. "
            'For the promise, take steps = "theory", '
            f'L = {a.L:.4g}, mu = {a.mu:.4g}, batch = "full", one local step and {a.rounds:,} rounds.']


def _about_both(a: Advice) -> list[str]:
    """Where the theory and what was seen point in different directions."""
    if a.together == "gains" and a.lam <= a.mu:
        return ["The rule of lambda lets the clients learn nearly alone, and there learning together gained: "
                "the two do not agree, so that a comparison must decide."]
    if a.others_help and a.lam <= a.mu:
        return ["The rule of lambda lets the clients learn nearly alone, and models of others serve them "
                "better: the two do not agree, so that a comparison must decide."]
    if a.together == "loses" and a.lam >= a.L:
        return ["The rule of lambda keeps all clients close to a common model, and there training alone was "
                "better: the two do not agree, so that a comparison must decide."]
    return []


def _short(value: float) -> float:
    return float(f"{value:.4g}")
