"""`descant advise`: its figures are those of the theory on the data, and its sentences follow from them."""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import descant
from cli_helpers import call
from descant.core.task import Batch
from descant.core.vector import Model
from descant.errors import UsageError
from descant.experiment import evidence
from descant.experiment.advise import Advice, Budget, ask, recommend, spent
from descant.experiment.config import Experiment, override
from descant.models import make_task
from descant.priors.adaptive import practical_lambda, theorem_lambda
from descant.theory.estimate import Estimates, Heterogeneity, Transfer, survey
from descant.theory.moreau import corollary_steps, predicted_gradients, predicted_rounds
from descant.view import advice as report

pytestmark = pytest.mark.thorough

LOGISTIC = """
[data]
dataset = "logistic"
clients = 6
rows = 60
dim = 3
classes = 3

[train]
seed = 4
"""
QUADRATICS = """
[data]
dataset = "quadratics"
clients = 5
dim = 4
rows = 16
kappa = 5.0

[model]
name = "quadratic"
"""


def write(directory: Path, text: str) -> Path:
    path = directory / "experiment.toml"
    path.write_text(text)
    return path


def estimates(R: float, *, n: float = 100.0, L: float = 2.0, mu: float = 0.1, rho: float = 1.5,
              noise: float = 0.2, ridge: float = 0.01, solved: bool = True, convex: bool = True,
              transfer: float | None = None) -> Estimates:
    """What a survey of 3 of 10 clients could have found."""
    def each(value: Any) -> torch.Tensor:
        return torch.tensor([value] * 3)

    return Estimates(np.arange(3), each(n), 10, int(10 * n), torch.zeros(3, 7), each(L), each(mu),
                     each(rho**2), each(noise), each(solved), each(convex), ridge,
                     Heterogeneity(R, 2 * R, math.sqrt(R**2 + noise), 3 * R, each(R**2)),
                     None if transfer is None else Transfer(0.5, 0.5 + transfer, 60))


def said(advice: Advice) -> str:
    return " ".join(advice.reasons)


# -- what follows from estimates --------------------------------------------------------------------------


@pytest.mark.parametrize("R", [0.0, 0.02, 0.0999, 0.11, 1.0, 30.0])
def test_the_figures_are_those_of_the_theory(R: float) -> None:
    found = estimates(R)
    a = recommend(found, cap=50.0, eps=0.001)
    L, mu, rho = found.L, found.mu, found.rho  # of float32 tensors
    assert a.practical == practical_lambda(R, 100, cap=50.0)
    assert a.theorem == theorem_lambda(R, 100, 1000, L=L, mu=mu, rho=rho, cap=50.0)
    assert a.lam == a.practical.lam
    assert a.steps == corollary_steps(a.lam, L, mu)
    assert a.rounds == predicted_rounds(a.lam, L, mu, 0.001)
    assert a.gradients == predicted_gradients(a.lam, L, mu, 0.001) == a.rounds * a.steps.K
    assert a.regime == ("different" if R > 0.1 else "alike")
    assert a.kappa == pytest.approx(20)
    assert (a.clients, a.asked, a.n, a.d) == (10, 3, 100, 7)
    json.loads(json.dumps(a.dump(), allow_nan=False))


@pytest.mark.parametrize(("R", "noise", "words"), [
    (0.0, 0.2, ["nothing speaks against one for all", "more than the cap", "above L"]),
    (0.05, 0.2, ["differ less than a client can tell", "5 / (sqrt(n) R)", "64 kappa^2 L", "hence the cap"]),
    (0.2, 0.2, ["no more than the noise", "between mu and L", "Theorem 1 allows up to"]),
    (1.0, 0.2, ["more than the noise of estimation: personalize.", "5 / (n R^2)", "below mu"]),
    (3.0, 0.2, ["far more than the noise of estimation: personalize strongly"]),
    (3.0, 0.0, ["far more than the noise of estimation: personalize strongly"]),
])
def test_the_reasons_follow_from_the_figures(R: float, noise: float, words: list[str]) -> None:
    text = said(recommend(estimates(R, noise=noise)))
    assert [word for word in words if word not in text] == []


def test_what_the_theory_does_not_cover_is_told() -> None:
    plain = said(recommend(estimates(1.0)))
    for word in ("convex losses", "still on their way", "ridge of 0.01 alone"):
        assert word not in plain
    assert "convex losses" in said(recommend(estimates(1.0, convex=False)))
    assert "3 of 3 clients were still on their way" in said(recommend(estimates(1.0, solved=False)))
    assert "ridge of 0.01 alone" in said(recommend(estimates(1.0, mu=0.01)))


@pytest.mark.parametrize(("options", "message"), [
    ({"cap": 0.0}, "cap of lambda"), ({"cap": math.inf}, "cap of lambda"),
    ({"eps": 0.0}, "eps.*between 0 and 1"), ({"eps": 1.0}, "eps.*between 0 and 1"),
])
def test_bad_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        recommend(estimates(1.0), **options)


def test_what_was_seen_elsewhere_is_told() -> None:
    """In the words of the study; without a transfer that is not known."""
    a = recommend(estimates(0.2, transfer=0.05))
    found = evidence.answer(100.0, Transfer(0.5, 0.55, 60).gain, 10)
    assert (a.together, a.seen[: len(found.words)]) == (found.together, found.words)
    unknown = recommend(estimates(0.2))
    assert unknown.together == "unknown"
    assert "Not known" in unknown.seen[0]


@pytest.mark.parametrize(("together", "R", "disagree"), [
    ("gains", 30.0, True), ("gains", 0.0, False), ("loses", 0.0, True), ("loses", 30.0, False),
    ("open", 0.0, False), ("unknown", 30.0, False),
])
def test_a_theory_that_says_otherwise_is_not_hidden(together: Any, R: float, disagree: bool,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """R = 30: lambda is below mu, and clients learn nearly alone; R = 0: it is at its cap, above L."""
    monkeypatch.setattr(evidence, "answer", lambda *given: evidence.Answer(together, (), ("Seen.",)))
    a = recommend(estimates(R))
    assert ("do not agree" in " ".join(a.seen)) == disagree


def test_the_settings_make_an_experiment() -> None:
    """As sections of a file, and as --set options over any other experiment: with the steps of the advice, up
    to the digits that are written."""
    a = recommend(estimates(0.4))
    other = tomllib.loads(LOGISTIC + '[algorithm]\nname = "ditto"\nlam = 3.0\n')
    listed = [f"{path}={report.as_toml(value)}" for path, value in a.settings.items()]
    for tables in ({"data": other["data"], **tomllib.loads(report.toml(a))}, override(other, listed)):
        made = Experiment.parse(tables)
        assert made.algorithm.name == "one_stage_fedprox"
        eta, gamma, K = made.algorithm.schedule()  # type: ignore[attr-defined]
        assert (eta, gamma) == pytest.approx(a.steps[:2], rel=1e-3)
        assert abs(K - a.steps.K) <= 1
        assert (made.train.batch, made.train.local.steps, made.train.rounds) == ("full", 1, a.rounds)


# -- from an experiment -----------------------------------------------------------------------------------


def test_which_ridge_the_pilot_has() -> None:
    """The experiment's own weight decay; 1 / n without; or as told."""
    tables = tomllib.loads(LOGISTIC)
    n = 36  # 60 rows, less a quarter, less a fifth of the rest
    for algorithm, ridge, expected in (
        ({"name": "pfedme"}, None, 1 / n), ({"name": "ditto"}, None, 1 / n), ({"name": "pfedme"}, 0.2, 0.2),
        ({"name": "ditto", "solver": {"name": "sgd", "weight_decay": 0.03}}, None, 0.03),
        ({"name": "globaltrain", "weight_decay": 0.05}, None, 0.05),
    ):
        found = ask(Experiment.parse(tables | {"algorithm": algorithm}), clients=2, steps=5, ridge=ridge)
        assert found.ridge == pytest.approx(expected)
        assert len(found.clients) == 2


def test_advise_in_json_is_the_survey_and_the_theory(tmp_path: Path) -> None:
    code, out, err = call("advise", write(tmp_path, LOGISTIC), "--json", "--eps", "0.05", "--cap", 7)
    assert (code, err) == (0, "")
    found = json.loads(out)
    federation = descant.federation("logistic", clients=6, rows=60, dim=3, classes=3).to(torch.float64)
    task = make_task("mclr", federation, dtype=torch.float64, seed=4)
    surveyed = survey(task, federation, np.arange(6), ridge=1 / 36)
    demo = {"algorithm": {"name": "pfedme", "lam": 15.0}}
    budget = spent(Experiment.parse(demo | tomllib.loads(LOGISTIC)))
    assert found == json.loads(json.dumps(recommend(surveyed, eps=0.05, cap=7.0, budget=budget).dump()))
    assert found["L"] == surveyed.L
    assert found["R"] == surveyed.spread.R < surveyed.spread.naive == found["R_naive"]


def test_advise_finds_the_known_constants(tmp_path: Path) -> None:
    """Quadratics without noise: L = 1 and mu = 1 / kappa, with the ridge; and R is the root of the mean
    squared distance of the optima from their mean, because nothing is noise."""
    path = write(tmp_path, QUADRATICS)
    code, out, err = call("advise", path, "--ridge", "1e-9", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    a = descant.federation("quadratics", clients=5, dim=4, rows=16, kappa=5.0).truth["optima"]
    R = float((a - a.mean(0)).square().sum(1).mean().sqrt())
    assert (found["L"], found["mu"], found["R"], found["R_naive"]) == pytest.approx((1, 0.2, R, R), rel=1e-7)
    assert found["rho"] == pytest.approx(0, abs=1e-6)
    assert found["lam"] == pytest.approx(5 / (found["n"] * R**2), rel=1e-6)


def test_the_advice_keeps_its_promise(tmp_path: Path) -> None:
    """Followed on quadratics, no more than eps of the squared error of w_g is left after the rounds. The
    solution is w_g = (sum_i A_i)^-1 sum_i A_i a_i with A_i = H_i (H_i + lam)^-1; w_g starts at 0."""
    experiment = Experiment.parse({"algorithm": {"name": "fedavg"}, **tomllib.loads(QUADRATICS)})
    advice = recommend(ask(experiment, ridge=1e-9), eps=0.01)
    fields = {path.removeprefix("algorithm."): value for path, value in advice.settings.items()
              if path.startswith("algorithm.")}
    federation = experiment.data.federation()
    H, a = federation.truth["H"], federation.truth["optima"]
    A = H @ torch.linalg.inv(H + fields["lam"] * torch.eye(4, dtype=torch.float64))
    solution = torch.linalg.solve(A.sum(0), torch.einsum("ijk,ik->j", A, a))
    method = descant.algorithms.ALGORITHMS[fields.pop("name")](**fields)
    run = descant.run(method, federation=federation, model="quadratic", rounds=advice.rounds, batch="full",
                      local={"steps": 1}, dtype="float64", backend="vectorised")
    left = (run.snapshot("last").server.mean.theta - solution).square().sum()
    assert float(left) <= 0.01 * float(solution.square().sum())
    assert sum(row["grad_steps"] for row in run.history) == 5 * advice.gradients


@pytest.mark.slow
@pytest.mark.parametrize("ridge", [0.1, 0.3])
def test_the_advice_keeps_its_promise_where_the_ridge_matters(ridge: float) -> None:
    """Followed on logistic losses, the run reaches the solution of the losses with the ridge, which is found
    here by L-BFGS over w_g and all w_i together: sum_i f_i(w_i) + ridge/2 ||w_i||^2 + lam/2 ||w_i - w_g||^2.
    No more than eps of the squared error is left; without the weight decay it would be somewhere else."""
    experiment = Experiment.parse({"algorithm": {"name": "fedavg"}, **tomllib.loads(LOGISTIC)})
    advice = recommend(ask(experiment, ridge=ridge), eps=0.01)
    assert advice.settings["algorithm.weight_decay"] == ridge
    fields = {path.removeprefix("algorithm."): value for path, value in advice.settings.items()
              if path.startswith("algorithm.")}
    federation = experiment.data.federation().to(torch.float64)
    task = make_task("mclr", federation, dtype=torch.float64, seed=4)
    start = task.init()
    batches = [Batch(federation.x[rows], federation.y[rows])
               for rows in (federation.train[client] for client in range(6))]
    w = start.theta.expand(7, -1).clone().requires_grad_()  # w_g, and the w_i
    solver = torch.optim.LBFGS([w], max_iter=500, history_size=50, tolerance_grad=1e-9, tolerance_change=0,
                               line_search_fn="strong_wolfe")

    def objective() -> torch.Tensor:
        solver.zero_grad()
        losses = [task.loss(Model(w[1 + i], start.stats), batch) for i, batch in enumerate(batches)]
        pulls = fields["weight_decay"] * w[1:].square().sum() + fields["lam"] * (w[1:] - w[0]).square().sum()
        value = torch.stack(losses).sum() + pulls / 2
        value.backward()
        return value

    solver.step(objective)
    assert w.grad is not None
    assert float(w.grad.norm()) < 1e-6  # of curvatures above 0.01: nothing beside a tenth of the way
    solution = w[0].detach()
    left = []
    for decay in (fields["weight_decay"], 0.0):
        method = descant.algorithms.OneStageFedProx(**{k: v for k, v in fields.items() if k != "name"}
                                                    | {"weight_decay": decay})
        run = descant.run(method, federation=federation, rounds=advice.settings["train.rounds"], batch="full",
                          local={"steps": 1}, dtype="float64", backend="vectorised", seed=4)
        error = run.snapshot("last").server.mean.theta - solution
        left.append(float(error.square().sum() / (start.theta - solution).square().sum()))
    assert left[0] <= 0.01 < left[1]


def test_minibatches_are_offered_where_K_is_large() -> None:
    """As settings over those of the advice, they make an experiment: K = 1 and gamma = 1 / lambda."""
    assert "minibatches" not in said(recommend(estimates(1.0, L=0.1, mu=0.1)))
    a = recommend(estimates(1.0))
    [offer] = [reason for reason in a.reasons if "minibatches" in reason]
    assert f"K = {a.steps.K:,} gradients" in offer
    offered = dict(re.findall(r"((?:algorithm|train)\.\w+) = (\{.*?\}|[^\s,]*[^\s,.])", offer))
    assert set(offered) == {"algorithm.steps", "algorithm.K", "algorithm.eta", "train.batch", "train.local"}
    listed = [f"{path}={report.as_toml(value)}" for path, value in a.settings.items() if path not in offered]
    made = Experiment.parse(override(tomllib.loads(LOGISTIC) | {"algorithm": {"name": "fedavg"}},
                                     [*listed, *(f"{path}={text}" for path, text in offered.items())]))
    eta, gamma, K = made.algorithm.schedule()  # type: ignore[attr-defined]
    assert (gamma, K) == (None, 1)
    assert eta == pytest.approx(a.steps.eta / 2, rel=0.01)
    assert made.train.batch == 20
    assert made.algorithm.weight_decay == 0.01  # type: ignore[attr-defined]


def test_what_an_experiment_spends() -> None:
    """pFedMe takes K = 5 gradients on each batch; an epoch of 36 rows has two batches of 20."""
    train = {"rounds": 3, "cohort": 4, "batch": 20, "local": {"epochs": 2}}
    tables = tomllib.loads(LOGISTIC) | {"algorithm": {"name": "pfedme"}, "train": train}
    assert spent(Experiment.parse(tables)) == Budget(5 * 4 * 4 * 3, 4 * 4 * 3)
    tables |= {"algorithm": {"name": "fedavg"}, "train": train | {"batch": "full"}}
    assert spent(Experiment.parse(tables)) == Budget(2 * 4 * 3, 2 * 4 * 3)


def test_settings_that_cost_too_much_make_room_for_some_within_the_budget() -> None:
    """The theory's are kept where the experiment can pay for them; the others leave its rounds and batches
    alone, and take as many gradients on each batch as it does."""
    found = estimates(1.0)
    full = recommend(found)
    needed = full.gradients * full.clients
    assert full.cost is None
    rich = recommend(found, budget=Budget(needed, needed))
    assert (rich.settings, rich.cost) == (full.settings, 1.0)
    assert "1 times the experiment's" in said(rich)
    poor = recommend(found, budget=Budget(needed // 18, needed // 90))
    assert poor.cost == pytest.approx(18, rel=0.01)
    assert "18 times the experiment's" in said(poor)
    assert not any(path.startswith("train.") for path in poor.settings)
    assert (poor.settings["algorithm.K"], poor.lam) == (5, full.lam)
    listed = [f"{path}={report.as_toml(value)}" for path, value in poor.settings.items()]
    made = Experiment.parse(override(tomllib.loads(LOGISTIC) | {"algorithm": {"name": "fedavg"}}, listed))
    assert made.algorithm.cautions() == []


def test_who_learns_nearly_alone_is_told_of_localtrain() -> None:
    """lambda <= mu: a client's own data outweighs the common model."""
    alone = recommend(estimates(30.0))
    assert alone.lam <= alone.mu
    assert "LocalTrain, which needs no communication, would do about as well" in said(alone)
    together = recommend(estimates(0.3))
    assert together.lam > together.mu
    assert "LocalTrain" not in said(together)


def test_who_is_served_by_others_is_not_told_to_learn_alone() -> None:
    """Distances of models that are fitted to few rows are no reason to, where others' are more accurate."""
    others = estimates(30.0)._replace(transfer=Transfer(own=0.7, others=0.8, rows=100))
    told = recommend(others)
    assert told.lam <= told.mu
    text = said(told)
    assert "models of others are 10.0 points more accurate on a client's rows than its own" in text
    assert "FedAvg with fine-tuning" in text
    assert "personalize" not in text
    assert "LocalTrain" not in text
    assert "the two do not agree" in " ".join(told.seen)
    assert told.is_disputed
    assert "personalize strongly" in said(recommend(others._replace(
        transfer=Transfer(own=0.8, others=0.7, rows=100))))


def test_advise_for_people(tmp_path: Path) -> None:
    path = write(tmp_path, LOGISTIC)
    code, out, err = call("advise", path, "--clients", "3")
    assert (code, err) == (0, "")
    figures = json.loads(call("advise", path, "--clients", "3", "--json").out)
    rows = {line[:22].strip(): line[22:].split() for line in out.splitlines() if line[:1].isalpha()}
    assert rows["clients"] == ["6", "3", "were", "asked"]
    for name, key in (("smoothness L", "L"), ("convexity mu", "mu"), ("heterogeneity R", "R"),
                      ("lambda", "lam"), ("gradient noise rho", "rho"), ("condition kappa", "kappa")):
        assert rows[name][0] == f"{figures[key]:.4g}"
    assert rows["rounds"][0] == f"{figures['rounds']:,}"
    assert rows["local steps K"][0] == f"{figures['steps']['K']:,}"
    assert all(f"- {reason}" in out for reason in (*figures["reasons"], *figures["seen"]))
    assert rows["transfer"][0] == f"{100 * figures['transfer']:+.1f}"
    assert f"--set algorithm.lam={figures['settings']['algorithm.lam']}" in out
    assert "  [algorithm]\n" in out
    assert not any(line.endswith("  ") for line in out.partition("why")[2].splitlines())


def test_advise_without_a_file_is_about_the_demo() -> None:
    code, out, err = call("advise", "--clients", "2", "--steps", "2", "--set", "model.name=dnn",
                          "--set", "model.hidden=2")
    assert (code, err) == (0, "")
    assert "this is the demo experiment" in out
    assert "2 of 2 clients were still on their way" in out
    assert "convex losses, and this model's are not" in out


@pytest.mark.parametrize(("args", "message"), [
    (["no-such-file.toml"], "cannot read no-such-file.toml"),
    (["--clients", "1"], "--clients"),
    (["--steps", "0"], "--steps"),
    (["--ridge", "0"], "--ridge must be greater than 0"),
    (["--ridge", "nan"], "--ridge must be greater than 0"),
    (["--set", "data.clients=1", "--set", "data.partition=iid"], "two clients"),
    (["--cap", "-1"], "--cap must be greater than 0"),
    (["--eps", "2"], "--eps must be greater than 0 and less than 1"),
    (["--set", "model.name=nonsense"], "nonsense"),
])
def test_bad_input(args: list[str], message: str) -> None:
    code, out, err = call("advise", *args)
    assert code == 2
    assert message in err
    assert "Traceback" not in out + err


def test_help() -> None:
    code, out, err = call("advise", "--help")
    assert (code, err) == (0, "")
    for word in ("FILE", "--clients", "--steps", "--ridge", "--cap", "--eps", "--json", "descant advise exp"):
        assert word in out
    assert "descant advise experiment.toml" in call("--help").out
