"""Code that files name: a file that is merely opened runs nothing, and what is allowed works."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import re
import shutil
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

import descant
from cli_helpers import Result, call
from descant.comparison import execute
from descant.comparison import plan as planning
from descant.comparison.make import make
from descant.core import fields
from descant.core.import_object import Named, imported, marked, named_in
from descant.core.permit import NOTHING, Permit, is_project, opened, ran
from descant.core.sealed import sealed_table, unsealed_table
from descant.deploy.export import load_model, predictions
from descant.errors import UsageError
from descant.experiment.config import Experiment, parse_algorithm
from descant.models import ModelSpec, OwnModel
from descant.priors.energy import OwnPrior
from descant.priors.generators import FromGenerator

STRANGER = """
from pathlib import Path
Path("marker").touch()  # to import it is to run it

from shutil import rmtree
from torch import nn


def make(outputs, shape, **rest):
    Path("marker").touch()
    return nn.Linear(shape[0], outputs)


def prior(theta, gamma):
    Path("marker").touch()
    return (theta - gamma).square().sum()


def generator(y):
    Path("marker").touch()
    return y.square()


def score(outputs, y):
    Path("marker").touch()
    return 1.0
"""
OWN = "stranger_of_a_test"
TRAIN = {"rounds": 1, "cohort": 2, "local": {"steps": 1}, "backend": "vectorised"}
DATA = {"dataset": "logistic", "clients": 3, "dim": 4}
EVIL: dict[str, dict[str, Any]] = {  # what a hostile file may say in the place of a section
    "os": {"model": {"name": "os:system", "command": "touch marker"}},
    "subprocess": {"model": {"name": "subprocess:run", "args": ["touch", "marker"]}},
    "eval": {"model": {"name": "builtins:eval", "source": "open('marker', 'w')"}},
    "posix": {"model": {"name": "posix:system", "command": "touch marker"}},
    "model": {"model": {"name": f"{OWN}:make"}},
    "prior": {"algorithm": {"name": "fedmap", "prior": {"name": "own", "place": f"{OWN}:prior"},
                            "server_lr": 0.5}},
    "generator": {"algorithm": {"name": "pfedbred", "family": {"name": "generator",
                                                               "generator": f"{OWN}:generator"}}},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with code of a stranger in it, and a user without settings."""
    (tmp_path / f"{OWN}.py").write_text(STRANGER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setattr("sys.path", [place for place in sys.path if place])
    monkeypatch.delitem(sys.modules, OWN, raising=False)
    return tmp_path


def settings(here: Path, text: str) -> None:
    (here / "settings" / "descant").mkdir(parents=True)
    (here / "settings" / "descant" / "settings.toml").write_text(text)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as anybody may send it."""
    out = tmp_path_factory.mktemp("sent") / "run"
    tables = {"data": DATA, "algorithm": {"name": "fedavg"}, "train": TRAIN}
    file = out.parent / "e.toml"
    file.write_text(tomli_w.dumps(tables))
    assert call("run", file, "--out", out).code == 0
    return out


@pytest.fixture
def sent(run_of: Path, here: Path) -> Path:
    return Path(shutil.copytree(run_of, here / "run"))


def spoil(run: Path, changes: dict[str, Any]) -> None:
    config = run / "config.toml"
    config.write_text(tomli_w.dumps(tomllib.loads(config.read_text()) | changes))


def refused(done: Result, here: Path) -> str:
    """What a command says that neither ran anything nor failed in another way."""
    assert done.code == 2, done
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.out + done.err
    assert not (here / "marker").exists()
    return done.err


# -- directories of runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("evil", EVIL)
@pytest.mark.thorough
def test_a_run_directory_runs_no_command(evil: str, sent: Path, here: Path) -> None:
    spoil(sent, EVIL[evil])
    (here / "rows.npz").write_bytes(b"")
    for command in (["resume", sent], ["resume", sent, "--rounds", 3],
                    ["export", sent, "--client", "0", "--to", here / "models"],
                    ["personalize", sent, "--data", here / "rows.npz"]):
        said = refused(call(*command), here)
        name = next(place for _, place in named_in(EVIL[evil])).partition(":")[0]
        assert f"{sent / 'config.toml'}: " in said
        assert ("a module of Python itself" if name != OWN else f"add --allow {OWN} to the command") in said
    for door in (descant.load, descant.resume):
        with pytest.raises(UsageError, match=r"module of Python itself|allow=\["):
            door(sent)
    assert not (here / "marker").exists()


def test_a_federations_directory_runs_no_command(sent: Path, here: Path) -> None:
    """That of a server, which is read in another way."""
    pytest.importorskip("flwr")
    spoil(sent, EVIL["model"])
    kind = {"shape": [4], "dtype": "real", "target_shape": [], "target_dtype": "int64", "classes": 2,
            "tokens": None}
    members = [{"name": str(k), "train": 1, "validation": 1, "test": 1} for k in range(3)]
    led = here / "led"
    led.mkdir()
    sent.rename(led / "run")
    (led / "federation.json").write_text(json.dumps({"session": "s", "kind": kind, "members": members}))
    assert f"--allow {OWN}" in refused(call("export", led, "--global", "--to", here / "models"), here)


def test_python_itself_can_never_be_allowed(sent: Path, here: Path) -> None:
    spoil(sent, EVIL["os"])
    assert "cannot be allowed" in refused(call("resume", sent, "--allow", "os"), here)
    settings(here, 'allow = ["os"]')
    assert "cannot be allowed" in refused(call("resume", sent), here)


def test_what_is_no_code_is_looked_up_and_not_imported(sent: Path, here: Path) -> None:
    for changes in ({"data": DATA | {"partition": f"{OWN}:make"}}, {"data": {"dataset": f"{OWN}:make"}},
                    {"algorithm": {"name": f"{OWN}:make"}},
                    {"model": {"name": "mclr", "loss": f"{OWN}:make"}},
                    {"algorithm": {"name": "fedavg", "solver": {"name": f"{OWN}:make"}}}):
        spoil(sent, changes)
        refused(call("resume", sent), here)


def test_metrics_are_not_imported_to_resume(sent: Path, here: Path) -> None:
    spoil(sent, {"eval": {"every": 5, "metrics": [f"{OWN}:score"]}})
    assert call("resume", sent, "--rounds", 2).code == 0
    assert not (here / "marker").exists()


# -- models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evil", ["os", "subprocess", "eval", "posix", "model"])
def test_a_model_runs_no_command(evil: str, sent: Path, here: Path) -> None:
    assert call("export", sent, "--client", "0", "--to", here / "models").code == 0
    [model] = (here / "models").iterdir()
    about = json.loads((model / "model.json").read_text())
    hostile = unsealed_table(about) | EVIL[evil] | {"layers": None}  # else the name is not needed
    (model / "model.json").write_text(json.dumps(sealed_table(hostile)))
    (here / "rows.npz").write_bytes(b"")
    said = refused(call("predict", model, here / "rows.npz"), here)
    assert f"{model}: model.name" in said
    for door in (lambda: load_model(model), lambda: predictions(model, here / "rows.npz")):
        with pytest.raises(UsageError, match=r"model\.name"):
            door()
    assert not (here / "marker").exists()


# -- comparisons -----------------------------------------------------------------------------------------


@pytest.fixture
def compared(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A comparison without runs; those that are made are made in a thread of this process."""
    monkeypatch.setattr(execute.concurrent.futures, "ProcessPoolExecutor",
                        lambda count, **_: ThreadPoolExecutor(count))
    (here / "e.toml").write_text(tomli_w.dumps({
        "data": DATA, "train": TRAIN, "algorithms": [{"name": "fedavg"}, {"name": "ditto"}]}))
    with planning.held(here / "out"):
        make(tomllib.loads((here / "e.toml").read_text()), here / "out", [0])
    return here / "out"


def rewrite(out: Path, change: Any) -> None:
    file = out / "comparison.json"
    plan = json.loads(file.read_text())
    change(plan)
    file.write_text(json.dumps(plan))


def _metrics(plan: dict[str, Any], table: dict[str, Any]) -> None:
    plan["experiment"]["eval"]["metrics"] = [f"{OWN}:score"]


def _method(plan: dict[str, Any], table: dict[str, Any]) -> None:
    for method in plan["methods"]:  # also the baselines, which nobody names
        method |= {"asked": table, "rounds": 1}


def _budget(plan: dict[str, Any], table: dict[str, Any]) -> None:
    plan["experiment"]["algorithm"] = table


@pytest.mark.parametrize(("change", "why"), [
    (_metrics, f"--allow {OWN}"), (_method, f"--allow {OWN}"), (_budget, f"--allow {OWN}")])
@pytest.mark.thorough
def test_a_comparison_runs_no_command(change: Any, why: str, compared: Path, here: Path) -> None:
    table = fields.dump(parse_algorithm(EVIL["prior"]["algorithm"]))
    rewrite(compared, lambda plan: change(plan, table))
    assert call("report", compared).code == 0  # which needs no code
    assert not (here / "marker").exists()
    done = call("compare", here / "e.toml", "--out", compared, "--seeds", "0", "--algorithms", "scaffold")
    assert done.code in (1, 2), done  # it may be one run that fails
    assert why in done.err
    assert "Traceback" not in done.err
    assert not (here / "marker").exists()


def test_values_of_a_search_are_no_code(compared: Path, here: Path) -> None:
    place = {"name": "own", "place": "no_such_package:prior"}

    def change(plan: dict[str, Any]) -> None:
        plan["methods"][0] |= {"asked": {"name": "fedmap", "prior": place, "server_lr": 0.5},
                               "tuned": {"prior.place": f"{OWN}:prior"}}

    rewrite(compared, change)
    [method, *_] = planning.read(compared).methods.values()
    with pytest.raises(UsageError, match="imported only if you allow it"):
        method.algorithm.prior.energy(torch.zeros(1), torch.zeros(1))  # type: ignore[attr-defined]
    assert not (here / "marker").exists()


@pytest.mark.slow
def test_the_run_of_a_comparison_is_that_of_the_plan(compared: Path, here: Path) -> None:
    """A directory in it that somebody has changed is refused before anything of it is read."""
    assert call("compare", here / "e.toml", "--out", compared, "--seeds", "0").code == 0
    [run] = (compared / "runs" / "ditto").iterdir()
    spoil(run, EVIL["os"])
    (run / "summary.json").unlink()
    done = call("compare", here / "e.toml", "--out", compared, "--seeds", "0")
    assert done.code == 1
    assert "does not belong to this comparison" in done.err
    assert not (here / "marker").exists()


# -- what the user runs, and allows ----------------------------------------------------------------------


@pytest.mark.parametrize("evil", ["os", "subprocess", "eval", "posix"])
def test_not_even_the_users_own_file_names_python_itself(evil: str, here: Path) -> None:
    (here / "e.toml").write_text(tomli_w.dumps({"data": DATA, "train": TRAIN,
                                                "algorithm": {"name": "fedavg"}} | EVIL[evil]))
    assert "a module of Python itself" in refused(call("run", here / "e.toml"), here)
    assert "a module of Python itself" in refused(call("compare", here / "e.toml", "--out", "c"), here)


def test_a_library_is_not_the_users_project(here: Path) -> None:
    tables = {"data": DATA, "train": TRAIN, "algorithm": {"name": "fedavg"},
              "model": {"name": "torch.hub:load", "repo_or_dir": ".", "model": "x"}}
    (here / "e.toml").write_text(tomli_w.dumps(tables))
    assert "add --allow torch to the command" in refused(call("run", here / "e.toml"), here)
    assert not is_project("torch")
    assert not is_project("descant")
    assert is_project("test_permit")


@pytest.mark.parametrize(("evil", "field"), [
    ("model", "model.name"), ("prior", "prior.place"), ("generator", "family.generator")])
def test_ones_own_run_and_how_to_go_on_with_it(evil: str, field: str, here: Path) -> None:
    """The user's file may name the user's module, and it is said which; the directory may not, until the user
    allows it: by the option, in the settings, or in Python."""
    package = f"own_{evil}_of_a_test"
    (here / f"{package}.py").write_text(STRANGER.replace("marker", "seen"))
    tables = {"data": DATA, "train": TRAIN, "algorithm": {"name": "fedavg"}} | EVIL[evil]
    (here / "e.toml").write_text(tomli_w.dumps(tables).replace(OWN, package))
    done = call("run", here / "e.toml", "--out", "run")
    assert done.code == 0, done
    assert f"imports {package} (./{package}.py) for {field}\n" in done.err
    again = call("run", here / "e.toml", "--out", "run")
    assert f"`descant resume run --allow {package}`" in again.err
    assert f"--allow {package}" in refused(call("resume", "run", "--rounds", 2), here)
    assert call("resume", "run", "--rounds", 2, "--allow", package).code == 0
    assert descant.load("run", allow=[package]).rounds == 2
    with pytest.raises(UsageError, match="imported only if you allow it"):
        descant.load("run")  # what was allowed once is not allowed for ever
    settings(here, f'allow = ["{package}"]')
    assert descant.load("run").rounds == 2
    assert call("export", "run", "--global", "--to", "models").code == 0
    assert "--allow" not in call("run", here / "e.toml", "--out", "run").err


@pytest.mark.thorough
def test_a_model_of_ones_own_is_handed_over(here: Path) -> None:
    fed = descant.federation("logistic", clients=3, dim=4)
    run = descant.run("fedavg", federation=fed, model=f"{OWN}:make", rounds=1)
    place = descant.deploy.export.export_model(run, 0, here / "models")
    (here / "marker").unlink()
    assert torch.equal(load_model(place).weight, run.personal_model(0).weight)  # type: ignore[arg-type]
    assert not (here / "marker").exists()  # made of its layers, without code
    about = unsealed_table(json.loads((place / "model.json").read_text())) | {"layers": None}
    (place / "model.json").write_text(json.dumps(sealed_table(about)))
    with pytest.raises(UsageError, match=rf'allow=\["{OWN}"\]'):
        load_model(place)
    assert torch.equal(load_model(place, allow=[OWN]).weight, run.personal_model(0).weight)  # type: ignore[arg-type]
    about["model"] = {"name": f"{OWN}:rmtree", "path": str(place)}
    (place / "model.json").write_text(json.dumps(sealed_table(about)))
    with pytest.raises(UsageError, match=r"rmtree of shutil, a module of Python itself: it is refused"):
        load_model(place, allow=[OWN])
    assert place.exists()


@pytest.mark.slow
def test_a_comparison_of_the_users_own_asks_for_nothing(here: Path) -> None:
    """Its runs are made in processes of their own, stopped and continued, and nothing must be allowed."""
    tables = {"data": DATA, "train": TRAIN | {"rounds": 4}, "algorithm": EVIL["prior"]["algorithm"],
              "model": EVIL["model"]["model"], "eval": {"every": 2, "metrics": [f"{OWN}:score"]}}
    (here / "e.toml").write_text(tomli_w.dumps(tables))
    command = ("compare", here / "e.toml", "--out", here / "out", "--seeds", "0,1", "--jobs", 2)
    done = call(*command)
    assert done.code == 0, done
    assert f"imports {OWN} (./{OWN}.py) for" in done.err
    for run in (here / "out" / "runs").glob("*/seed-0"):
        (run / "summary.json").unlink()
    done = call(*command)
    assert done.code == 0, done
    assert "score" in (here / "out" / "results.csv").read_text()
    assert call("compare", here / "e.toml", "--out", here / "out", "--seeds", "2").code == 0


# -- permits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("allow", "place", "covered"), [
    (["a"], "a:f", True), (["a"], "a.b:f", True), (["a"], "ab:f", False), (["a.b"], "a.b:f", True),
    (["a.b"], "a.b.c:f", True), (["a.b"], "a:f", False), (["a.b"], "a.bc:f", False),
    (["a.b:f"], "a.b:f", True), (["a.b:f"], "a.b:g", False), ([], "a:f", False), ("a", "a:f", True)])
def test_what_an_entry_covers(allow: Any, place: str, covered: bool, here: Path) -> None:
    assert opened(allow).covers(place) is covered


@pytest.mark.parametrize("entry", ["", "a b", "a/b", "a:", ":f", ".a", "-x", "os", "os.path",
                                   "builtins:eval"])
def test_what_cannot_be_allowed(entry: str, here: Path) -> None:
    with pytest.raises(UsageError, match="--allow"):
        opened([entry])


@pytest.mark.parametrize(("text", "why"), [
    ("allow = 3", "must be a list"), ("alow = []", "did you mean 'allow'"), ("allow = [", "not valid TOML"),
    ("allow = [3]", "must name a package")])
def test_faults_of_the_settings_are_told(text: str, why: str, here: Path) -> None:
    settings(here, text)
    with pytest.raises(UsageError, match=why) as told:
        opened()
    assert str(here / "settings" / "descant" / "settings.toml") in str(told.value)


def test_settings_are_looked_for_in_the_users_home_alone(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "descant").mkdir()
    (here / "descant" / "settings.toml").write_text(f'allow = ["{OWN}"]')
    monkeypatch.setenv("XDG_CONFIG_HOME", ".")  # not absolute: it does not count
    monkeypatch.setenv("HOME", str(here / "home"))
    assert opened() == NOTHING
    (here / "home" / ".config" / "descant").mkdir(parents=True)
    (here / "descant" / "settings.toml").rename(here / "home" / ".config" / "descant" / "settings.toml")
    assert opened() == Permit((OWN,))


def test_tables_vouch_for_nothing(here: Path) -> None:
    """Whatever reads a file without saying so cannot import what is in it: not even what Python itself named
    before in this process."""
    prior, generator = f"{OWN}:prior", f"{OWN}:generator"
    one = torch.ones(2)
    assert float(OwnPrior(prior).energy(one, 0 * one)) == 2.0  # a program's own
    assert float(FromGenerator(generator).g(one)) == 2.0
    (here / "marker").unlink()
    tables = {"data": DATA, "train": TRAIN, "algorithm": EVIL["prior"]["algorithm"],
              "eval": {"metrics": [f"{OWN}:score"]}}
    read = Experiment.parse(tables)
    families = parse_algorithm(EVIL["generator"]["algorithm"])
    for use in (lambda: read.algorithm.prior.energy(one, one),  # type: ignore[attr-defined]
                lambda: families.family.g(one),  # type: ignore[attr-defined]
                lambda: imported(read.eval.metrics[0], "eval.metrics"),  # type: ignore[index]
                lambda: ModelSpec.parse({"name": f"{OWN}:make"}).model.network(None)):  # type: ignore
        with pytest.raises(UsageError, match="imported only if you allow it"):
            use()
    assert not (here / "marker").exists()
    assert Experiment.parse(tables, [OWN]) == Experiment.parse(tables)  # they differ in nothing else


def _energy(prior: OwnPrior) -> float:
    return float(prior.energy(torch.ones(2), torch.zeros(2)))


def test_a_permit_goes_with_the_name(here: Path) -> None:
    permitted = parse_algorithm(EVIL["prior"]["algorithm"], allow=ran())
    again = pickle.loads(pickle.dumps(permitted))
    assert isinstance(again.prior.place, Named)  # type: ignore[attr-defined]
    assert again.prior.place.permit.covers(f"{OWN}:prior")  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(again)) == permitted
    kept = marked({"a": [again.prior.place]}, NOTHING)  # type: ignore[attr-defined]
    assert kept["a"][0].permit == again.prior.place.permit  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_permit_reaches_a_process(here: Path) -> None:
    permitted, refusing = (parse_algorithm(EVIL["prior"]["algorithm"], allow=allow) for allow in (ran(), ()))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_energy, (permitted.prior,)) == 2.0  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match="imported only if you allow it"):
            pool.apply(_energy, (refusing.prior,))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "why"), [
    ("Path", "Path of pathlib, a module of Python itself"), ("rmtree", "rmtree of shutil"),
    ("nn", "an object of type module")])
def test_what_is_no_model_is_not_called(name: str, why: str, here: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        OwnModel(f"{OWN}:{name}").network(None)  # type: ignore[arg-type]


def test_what_an_allowed_module_has_from_elsewhere_is_not_allowed(here: Path) -> None:
    (here / "hands_on_of_a_test.py").write_text(f"from {OWN} import make")
    place = Named("hands_on_of_a_test:make", opened(["hands_on_of_a_test"]))
    with pytest.raises(UsageError, match=f"add --allow {OWN}"):
        imported(place, "model.name")
    assert imported(Named(place, opened(["hands_on_of_a_test", OWN])), "model.name")
    assert imported(Named(place, ran()), "model.name")  # in a file of the user's own


def test_the_permit_of_a_plan(here: Path) -> None:
    """What `compare` hands to its processes covers what the file names, and no more."""
    tables = {"data": DATA, "train": TRAIN, "algorithm": EVIL["prior"]["algorithm"]}
    with planning.held(here / "out"):
        plan, labels = make(tables, here / "out", [0], permit=ran(), baselines=False)
    [run] = plan.runs(labels)
    [(field, place)] = named_in(pickle.loads(pickle.dumps(run)).experiment.dump())
    assert (field, place) == ("algorithm.prior.place", f"{OWN}:prior")
    assert isinstance(place, Named)
    assert place.permit.covers(place)
    assert execute._run(run, ()) == []
