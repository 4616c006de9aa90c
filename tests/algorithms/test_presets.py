"""Named values of a method's fields, and defaults that follow from other fields."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

import descant
from cli_helpers import call
from descant.algorithms import ALGORITHMS, CGPFL, FedMAP, OneStageFedProx, pFedBreD, pFedMe
from descant.comparison.methods import contenders
from descant.core import fields
from descant.engine.settings import Train
from descant.errors import UsageError
from descant.experiment.config import DEMO, override, parse_algorithm
from descant.priors.precision import Adaptive
from descant.priors.solve import SGD, Adam


def test_a_preset_gives_the_fields_that_are_not_there() -> None:
    assert FedMAP.preset("paper").solver == Adam(lr=1e-4)
    assert FedMAP.preset("paper", solver=SGD(lr=0.5)).solver == SGD(lr=0.5)
    assert parse_algorithm({"name": "fedmap", "preset": "paper"}) == FedMAP.preset("paper")
    assert parse_algorithm({"name": "pfedme", "preset": "paper", "eta": 0.02}) == pFedMe(
        lam=15.0, eta=0.02, alpha=0.09)


def test_a_table_without_a_name_changes_fields_of_the_preset_s() -> None:
    found = parse_algorithm({"name": "fedmap", "preset": "paper", "solver": {"beta1": 0.5}})
    assert found == FedMAP(solver=Adam(lr=1e-4, beta1=0.5))
    found = parse_algorithm({"name": "fedmap", "preset": "paper", "solver": {"name": "sgd"}})
    assert found == FedMAP(solver=SGD())


@pytest.mark.parametrize("table", [{"name": "fedmap", "preset": "papr"}, {"name": "fedmap", "preset": 3},
                                   {"name": "fedavg", "preset": "paper"}])
def test_an_unknown_preset_is_refused_with_the_nearest(table: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as error:
        parse_algorithm(table)
    assert str(error.value).startswith(f"unknown algorithm.preset {table['preset']!r}")
    assert ("did you mean 'paper'?" in str(error.value)) == (table["preset"] == "papr")
    with pytest.raises(UsageError, match="unknown preset of fedmap 'papr': did you mean 'paper'"):
        FedMAP.preset("papr")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_written_down_is_the_fields(name: str) -> None:
    """A config.toml has every field resolved, so that a run goes on bit for bit whatever defaults become."""
    for preset in (None, *ALGORITHMS[name].presets):
        made = parse_algorithm({"name": name} | ({} if preset is None else {"preset": preset}))
        assert made.cautions() == []
        table = fields.dump(made)
        assert "preset" not in table
        assert parse_algorithm(table) == made


def test_another_method_drops_the_preset() -> None:
    tables = override({"algorithm": {"name": "fedmap", "preset": "paper"}}, ["algorithm.name=fedavg"])
    assert tables["algorithm"] == {"name": "fedavg"}


@pytest.mark.thorough
def test_presets_in_a_comparison() -> None:
    listed = "fedmap,fedmap:preset=paper,pfedme:preset=paper,eta=0.02"
    found = contenders({}, listed, Train(), baselines=False)
    assert [each.label for each in found] == ["fedmap", "fedmap preset=paper", "pfedme"]
    assert found[1].algorithm == FedMAP.preset("paper")
    assert found[1].given == frozenset()  # its fields can be searched
    assert found[2].given == {"eta"}
    grid = contenders({}, "pfedme:preset=paper,lam=[5,15]", Train(), baselines=False)
    assert [each.algorithm.alpha for each in grid] == [0.09, 0.09]  # type: ignore[attr-defined]


def test_show_lists_presets() -> None:
    code, out, _ = call("show", "pfedme")
    assert code == 0
    assert "  paper: lam = 15.0, eta = 0.005, alpha = 0.09\n" in out
    assert "presets" not in call("show", "fedavg").out


@pytest.mark.thorough
def test_run_takes_a_preset(tmp_path: Path) -> None:
    code, _, err = call("run", "--set", "algorithm.preset=paper", "--set", "train.rounds=1", "--set",
                        "train.backend=loop", "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["algorithm"]
    assert (written["eta"], written["alpha"], "preset" in written) == (0.005, 0.09, False)


# -- steps that follow from lam -----------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [0.1, 15.0, 30.0, 300.0, (1.0, 50.0), Adaptive(cap=40.0)])
@pytest.mark.parametrize("method", [pFedMe, pFedBreD, CGPFL, OneStageFedProx])
def test_no_strength_of_the_pull_makes_the_steps_unstable(method: Any, lam: Any) -> None:
    assert method(lam=lam).cautions() == []


def test_steps_are_derived_from_the_lam_that_is_given() -> None:
    method = pFedMe(lam=30.0)
    assert (method.eta, method.alpha) == pytest.approx((0.75 / 30, 1 / 50))
    assert pFedMe(lam=30.0, alpha=0.09).alpha == 0.09
    assert pFedMe(lam=0.0).eta == 1.0  # which moves nothing
    assert OneStageFedProx(lam=1.0, L=3.0).eta == 1 / 4
    assert OneStageFedProx(lam=1.0, L=3.0, mu=0.1, steps="theory").eta is None
    tables = override(DEMO, ["algorithm.lam=60"])
    assert parse_algorithm(tables["algorithm"]) == pFedMe(lam=60.0)
    with pytest.raises(UsageError, match=r"pfedme\.alpha must be greater than 0"):
        pFedMe(alpha=-1.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the model has no BatchNorm layer")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_defaults_train_on_scaled_data(name: str) -> None:
    """In 20 rounds of 20 steps, every method gets most of what there is to learn on the digits (a constant is
    right for half of a client's rows), and none diverges. FedMAP's 1e-4 left 0.40 of them right."""
    fed = descant.federation("digits", partition="classes", clients=10, classes_per_client=2)
    model = "dnn" if getattr(ALGORITHMS[name](), "shared", "all") in ("body", "head") else "mclr"
    run = descant.run(name, federation=fed, model=model, rounds=20, local={"steps": 20}, eval={"every": 20},
                      backend="vectorised")
    last = run.summary["last"]["personal"]
    assert last["test"]["accuracy"]["mean"] > 0.85
    assert run.summary["divergence"] is None
