"""descant from Python: the words of the command line, what they return, and how they refuse."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import descant
from cli_helpers import ENVIRONMENT, call
from descant import Federation, UsageError
from descant.algorithms import Ditto, FedAvg, pFedMe
from descant.comparison import execute
from descant.core.sealed import CHECK
from descant.deploy.export import export_model, load_model
from descant.experiment.config import Experiment
from descant.view import script
from helpers import PoolHere

TOML = """
[data]
dataset = "digits"
partition = "classes"
clients = 4
[algorithm]
name = "pfedme"
K = 2
[train]
rounds = 3
cohort = 3
local = { steps = 2 }
backend = "vectorised"
[eval]
every = 1
"""
ROWS = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment; its comparisons are carried out in this process."""
    monkeypatch.setattr(execute.concurrent.futures, "ProcessPoolExecutor", PoolHere)
    (tmp_path / "e.toml").write_text(TOML)
    return tmp_path / "e.toml"


@pytest.fixture(scope="module")
def fed() -> Federation:
    return Federation.from_arrays(ROWS, np.arange(60) % 2, np.array(["north", "south", "east"])[
        np.arange(60) % 3])


@pytest.fixture(scope="module")
def finished(fed: Federation) -> descant.Run:
    return descant.run(Ditto(), federation=fed, rounds=4, backend="vectorised", eval={"every": 2})


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def without_times(directory: Path) -> dict[str, Any]:
    """Everything that runs leave, but for how long they took."""
    found: dict[str, Any] = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.name in ("metrics.jsonl", "summary.json"):
            text = path.read_text()
            rows = [json.loads(text)] if path.suffix == ".json" else [*map(json.loads, text.splitlines())]
            found[name] = [{k: v for k, v in row.items() if not k.endswith("seconds") and k != CHECK}
                           for row in rows]
        elif path.suffix in (".toml", ".bin", ".safetensors") or path.name == "clients.csv":
            found[name] = path.read_bytes()
        elif path.suffix == ".csv":
            rows = read_csv(path)
            found[name] = [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in rows]
    return found


# -- the same as the command line --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_comparison_is_that_of_the_command_line_bit_for_bit(file, tmp_path):
    done = call("compare", file, "--algorithms", "pfedme,ditto:lam=0.3", "--seeds", "0,1", "--no-baselines",
                "--set", "train.rounds=2", "--out", tmp_path / "typed")
    assert done.code == 0, done
    made = descant.compare(file, tmp_path / "python", algorithms=["pfedme", Ditto(lam=0.3)], seeds=[0, 1],
                           baselines=False, set={"train.rounds": 2})
    typed, python = without_times(tmp_path / "typed"), without_times(tmp_path / "python")
    assert any(name.endswith("state.safetensors") for name in typed)
    assert typed.keys() == python.keys()
    assert [name for name in typed if typed[name] != python[name]] == []
    assert made.answer.splitlines()[0] in done.out.replace("\n", " ")


def test_a_run_is_that_of_the_command_line_bit_for_bit(file, tmp_path):
    assert call("run", file, "--out", tmp_path / "typed").code == 0
    federation = descant.federation("digits", partition="classes", clients=4)
    descant.run(pFedMe(K=2), federation=federation, rounds=3, cohort=3, local={"steps": 2},
                backend="vectorised", eval={"every": 1}, out=tmp_path / "python")
    typed, python = without_times(tmp_path / "typed"), without_times(tmp_path / "python")
    assert "checkpoint/state.safetensors" in typed
    assert [name for name in typed.keys() | python.keys() if typed.get(name) != python.get(name)] == []


@pytest.mark.slow
def test_an_experiment_is_a_file_its_sections_an_object_or_a_federation(file, tmp_path):
    from descant.experiment.config import read_toml

    federation = descant.federation("digits", partition="classes", clients=4)
    settings: dict[str, Any] = {"algorithms": "fedavg", "seeds": [3], "baselines": False}
    train = {"rounds": 3, "cohort": 3, "local": {"steps": 2}, "backend": "vectorised", "eval": {"every": 1}}
    made = [descant.compare(file, tmp_path / "file", **settings),
            descant.compare(read_toml(file), tmp_path / "sections", **settings),
            descant.compare(Experiment.load(file), tmp_path / "object", **settings),
            descant.compare(federation, tmp_path / "federation", model="mclr", **settings, **train)]
    # a federation has no [algorithm] whose steps are the budget: the first of the list sets it
    assert [each.plan.methods["fedavg"].rounds for each in made] == [6, 6, 6, 3]
    first, *others = (without_times(each.directory / "runs") for each in made[:3])
    assert others == [first, first]


@pytest.mark.thorough
def test_a_report_is_that_of_the_command_line(file, tmp_path):
    made = descant.compare(file, tmp_path / "c", algorithms=[FedAvg()], seeds=[0], baselines=False)
    (made.directory / "report.html").unlink()
    again = descant.report(made.directory)
    assert call("report", made.directory, "-o", tmp_path / "typed.html").code == 0
    assert (made.directory / "report.html").read_bytes() == (tmp_path / "typed.html").read_bytes()
    assert repr(again) == repr(made)
    with pytest.raises(UsageError, match="holds no comparison"):
        descant.report(tmp_path)


# -- what is returned --------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_what_is_gained_over_training_alone(file, tmp_path):
    made = descant.compare(file, tmp_path / "c", algorithms=["ditto"], seeds=[0], baselines=False)
    assert "not known" in made.gained
    made = descant.compare(file, tmp_path / "c", algorithms=["localtrain"], seeds=[0], baselines=False)
    level = {row["method"]: float(row["personal"]) for row in read_csv(made.directory / "results.csv")}
    assert made.gained.startswith(f"Alone, clients reach a test accuracy of {level['localtrain']:.4f}; with "
                                  f"{made.best}, {max(level.values()):.4f}.")
    assert ("over training alone on average" in made.gained) == (made.best == "ditto")


@pytest.mark.slow
def test_a_comparison_in_a_notebook(file, tmp_path, drawing):
    made = descant.compare(file, tmp_path / "c", algorithms=["pfedme", "ditto"], seeds=[0, 1],
                           baselines=False)
    table, written = made.table(), read_csv(made.directory / "results.csv")
    assert list(table.index) == [row["method"] for row in written]
    assert [repr(value) for value in table["personal"]] == [row["personal"] for row in written]
    assert made.best == table.index[0]
    [row] = made.differences().to_dict("records")
    [same] = read_csv(made.directory / "differences.csv")
    assert {name: str(row[name]) for name in same} == same
    assert repr(made).startswith("Comparison(2 methods, 2 seeds: ")
    assert "\n" not in repr(made)
    assert f"<td>{made.best}</td>" in made._repr_html_()
    assert made.answer.splitlines()[0].replace("'", "&#x27;") in made._repr_html_()
    with drawing():
        made.plot().savefig(kept := io.BytesIO(), format="png")
    assert len(kept.getvalue()) > 10_000
    assert made.run("ditto", seed=1).setup.train.seed == 1
    with pytest.raises(UsageError, match="no method 'dito': known are pfedme, ditto"):
        made.run("dito")


@pytest.mark.thorough
def test_a_search(file, tmp_path, drawing):
    pytest.importorskip("optuna")
    found = descant.tune(file, 3, tmp_path / "search", fixed=["lam"], set={"algorithm.K": 1})
    table = found.table()
    assert list(table.columns) == ["state", "validation", "grad_steps", "rounds", "eta", "alpha"]
    best = table["validation"].idxmax()
    assert found.best == dict(table.loc[best, ["eta", "alpha"]])
    assert found.algorithm == pFedMe(K=1, **found.best)
    assert repr(found).startswith("Search(pfedme, 3 trials: eta=")
    assert found._repr_html_().count("<b>") == 1 + len(table.columns)  # the row of the best trial
    with drawing():
        assert len(found.plot().axes) == 2
    more = descant.tune(file, 4, tmp_path / "search", fixed=["lam"], set={"algorithm.K": 1})
    assert more.table()[:3].equals(table)


def test_a_run_in_a_notebook(finished, drawing):
    table = finished.table()
    assert list(table.index) == [1, 2, 3, 4]
    assert table["personal_test_accuracy"].notna().tolist() == [False, True, False, True]
    last = finished.history[-1]["personal"]["test"]["accuracy"]["mean"]
    assert table["personal_test_accuracy"][4] == last
    assert repr(finished).startswith("Run(ditto on arrays: 4 of 4 rounds, test accuracy 0.")
    assert f"<td>{last:.4f}</td>" in finished._repr_html_()
    with drawing():
        assert [axes.get_xlabel() for axes in finished.plot().axes] == ["round", "round"]


def test_a_personal_model_by_name(finished, fed):
    x = torch.from_numpy(ROWS[:5])
    north = fed.names.index("north")
    assert torch.equal(finished.personal_model("north")(x), finished.personal_model(north)(x))
    with pytest.raises(UsageError, match="unknown client 'nord': did you mean 'north'"):
        finished.personal_model("nord")
    for client in (1.5, True, None):
        with pytest.raises(UsageError, match="its number or its name"):
            finished.personal_model(client)


def test_without_pandas_the_extra_is_named(finished, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match=r"run.table\(\) needs pandas.*descant\[pandas\]"):
        finished.table()


# -- nothing that is printed shows a row -------------------------------------------------------------------


def test_a_federation_prints_no_row():
    x = np.full((40, 3), 123.25)
    made = Federation.from_arrays(x, np.arange(40) % 2, np.arange(40) // 20, unseen=0)
    for shown in (repr(made), str(made), str(descant.data.Samples(made.x, made.y, 2)),
                  repr(descant.data.DataSpec.parse({"dataset": "digits"}))):
        assert "123" not in shown
        assert "tensor" not in shown
    assert repr(made) == ("Federation(arrays: 2 clients, samples of 3 (float64), 2 classes; "
                          "rows: 24 train, 6 validation, 10 test)")


# -- progress ----------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.thorough
def test_a_bar_on_a_terminal_and_nothing_in_a_log(fed, monkeypatch, capsys):
    settings: dict[str, Any] = {"federation": fed, "rounds": 4, "backend": "vectorised"}
    descant.run("ditto", **settings)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(script.sys, "stderr", terminal := Terminal())
    descant.run("ditto", **settings, eval={"every": 4})
    lines = terminal.getvalue().split("\r")
    assert [line.split()[1] for line in lines if line.startswith("round")] == ["1/4", "2/4", "3/4", "4/4"]
    assert "██████░░░░░░░░░░░░░░░░░░" in lines[1]
    assert "personal test accuracy" in lines[4]
    assert lines[-2:] == [" " * len(lines[4]), ""]  # the line is clear again
    terminal.truncate(0)
    descant.run("ditto", **settings, progress=False)
    assert not terminal.getvalue().strip("\0")


@pytest.mark.thorough
def test_a_comparison_shows_its_progress_where_it_is_asked_to(file, tmp_path, capsys):
    settings: dict[str, Any] = {"algorithms": "fedavg", "seeds": [0], "baselines": False}
    descant.compare(file, tmp_path / "quiet", **settings)
    assert capsys.readouterr() == ("", "")
    descant.compare(file, tmp_path / "loud", **settings, progress=True)
    assert "fedavg, seed 0 done (1 of 1" in capsys.readouterr().err


def test_a_federation_may_come_second():
    fed = descant.federation("digits", clients=3)
    given: dict[str, Any] = {"rounds": 1, "local": {"steps": 1}, "backend": "loop"}
    named, second = descant.run("fedavg", federation=fed, **given), descant.run("fedavg", fed, **given)
    assert torch.equal(named.personal(0).theta, second.personal(0).theta)


# -- refusals ----------------------------------------------------------------------------------------------


def run(**changes: Any) -> Any:
    return descant.run("fedavg", **{"federation": arrays(), "rounds": 1, "backend": "vectorised"} | changes)


def arrays(x: Any = ROWS, y: Any = None, **options: Any) -> Federation:
    return Federation.from_arrays(x, np.arange(60) % 2 if y is None else y, np.arange(60) % 3, **options)


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda: descant.federation(pytest.importorskip("pandas").DataFrame({"a": [1.0]})), "not a DataFrame"),
    (lambda: descant.federation(ROWS), "not an ndarray"),
    (lambda: Federation.from_datasets([[{"x": ROWS[0], "label": 1}] * 8]), "tables with x, label"),
    (lambda: Federation.from_datasets([[1, 2, 3, 4]]), "must be a pair"),
    (lambda: Federation.from_datasets([[(ROWS[0], "a")] * 8]), "cannot be put together"),
    (lambda: Federation.from_datasets([[(ROWS[0], 1), (ROWS[0, :2], 1)]]), "all of the same shape"),
    (lambda: Federation.from_arrays(ROWS.astype(complex), np.zeros(60, int), np.zeros(60)), "complex"),
    (lambda: run(model=nn.Linear(4, 2).bfloat16()), r"'weight' of the model is bfloat16.*\.float\(\)"),
    (lambda: run(model=torch.jit.trace(nn.Linear(4, 2), torch.zeros(2, 4))), "TorchScript"),
    (lambda: run(observer=print), r"has no started\(run, measured\) and no played"),
    (lambda: run(out=3), "out must be the path"),
    (lambda: descant.compare(3, "nowhere"), "must be a TOML file"),
    (lambda: descant.compare({}, "nowhere", rounds=3), r"rounds is in the experiment already.*set="),
    (lambda: descant.compare(Federation.from_arrays(ROWS, np.zeros(60, int), np.zeros(60)), "nowhere"),
     "made of arrays"),
    (lambda: descant.compare(descant.federation("digits"), "nowhere", model=nn.Linear(64, 10)),
     "make the model again"),
    (lambda: descant.compare({}, "nowhere", seeds="0,1"), "seeds must be whole numbers"),
    (lambda: descant.compare({}, "nowhere", jobs=0), "jobs must be a whole number from 1"),
    (lambda: descant.compare({}, "nowhere", budget="step"), "did you mean 'steps'"),
    (lambda: descant.compare({}, "nowhere", algorithms=[Ditto]), "with brackets"),
    (lambda: descant.tune({}, "many", "nowhere"), "trials must be a whole number"),
    (lambda: descant.compare({}, "nowhere", track="mlflow"), "track must be a list"),
    (lambda: descant.compare({}, "nowhere", track=["mlflw"]), "did you mean 'mlflow'"),
    (lambda: descant.run("fedavg"), "federation must be a Federation, not a NoneType"),
    (lambda: FedAvg(lr=1), r"it is one of its solver, so write FedAvg\(solver=SGD\(lr=1\)\)"),
    (lambda: run(finetune=3), r"finetune is a field of the method: .* FedAvg\(finetune=3\)"),
    (lambda: FedAvg(slover=1), "did you mean 'solver'"),
    (lambda: descant.federation((ROWS, ROWS, ROWS)), r"a pair \(x, y\), not a tuple: tables are read"),
    (lambda: descant.federation(Path("nowhere")), "cannot read the folder .*nowhere"),
    (lambda: Federation.from_datasets(3), "a dataset for each client, .* not an int"),
    (lambda: Federation.from_datasets({"a": pytest.importorskip("pandas").DataFrame({"a": [1.0]})}),
     "put the tables together"),
    (lambda: arrays(test="0.2"), r"test must be a share in \[0, 1\), not '0.2'"),
    (lambda: arrays(seed="a"), "seed must be a whole number, not 'a'"),
    (lambda: arrays(unseen=1.5), "unseen must be a whole number, not 1.5"),
    (lambda: arrays(scale="constants", mean="a", std=1.0), "mean must be a number, or one for each column"),
    (lambda: arrays(y=np.where(ROWS[:, 0] > 0, 1, -1)), "number the classes from 0"),
    (lambda: arrays(x=torch.tensor(ROWS).to_sparse()), r"x is sparse, .* give x.to_dense\(\)"),
    (lambda: arrays(x=torch.empty(60, 4, device="meta")), "x is on torch's meta device"),
    (lambda: arrays(x=[[1.0], [1.0, 2.0]]), "x has rows of different shapes"),
    (lambda: run(epochs=3), r"epochs is not a field of \[train\]: give local={'epochs': 3}"),
    (lambda: run(lr=0.1), r"give it to the solver of the method, as in FedAvg\(solver=SGD\(lr=0.1\)\)"),
    (lambda: run(local=5), r"train.local must be { steps = ... } or { epochs = ... }, not 5"),
    (lambda: run(model=nn.Linear), r"not a type: call it, as in Linear\(...\)"),
    (lambda: run(model=nn.DataParallel(nn.Linear(4, 2))), "give the module in it, .module"),
    (lambda: run(model=nn.Linear(4, 2, device="meta")), "is on torch's meta device"),
    (lambda: run(model=nn.Linear(4, 2), initial={"weight": torch.ones(2, 4) / 0, "bias": torch.ones(2)}),
     "'weight' of the model is not finite"),
    (lambda: run(loss=nn.CrossEntropyLoss), r"such as nn.CrossEntropyLoss\(reduction=\"none\"\), not"),
    (lambda: run(federation=arrays(y=ROWS[:, 0]), loss="cross_entropy"), "give class numbers, as of y.a"),
    (lambda: FedAvg(solver=torch.optim.SGD([torch.zeros(1)], lr=0.1)), "not an? SGD$"),
    (lambda: run(out="a\0b"), "cannot be the directory of a run: embedded null byte"),
    (lambda: run(out="a" * 300), "cannot be the directory of a run: File name too long"),
    (lambda: descant.compare({}, "nowhere", set="train.rounds=3"), "set must be a mapping"),
    (lambda: descant.reproduce(3), "item must be text"),
    (lambda: descant.tune(descant.federation("digits"), 1, "nowhere", algorithm="ditto", fixed="lam"),
     r'fixed must be a list of names, such as \["lam"\]'),
    (lambda: descant.tune(descant.federation("digits"), 1, "nowhere", algorithm="ditto", fixed=["lm"]),
     "unknown field in fixed 'lm': did you mean 'lam'"),
    (lambda: descant.WandB(mode="maybe"), 'mode must be "offline" or "online"'),
    (lambda: export_model("run", 0, "nowhere"), "export_model needs a run"),
    (lambda: load_model(None), "load_model needs the path"),
    (lambda: descant.SGD(0.1, 2, 3, 4, 5, 6, 7), "too many positional arguments; give fields by their names"),
])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_is_wrong_is_a_usage_error(wrong, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        wrong()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_script_compares_without_a_guard(tmp_path):
    """Spawned processes must not import the script, which would compare again."""
    (tmp_path / "e.toml").write_text(TOML)
    (tmp_path / "compare.py").write_text("""
import descant
made = descant.compare("e.toml", "out", algorithms=["fedavg"], seeds=[0, 1], baselines=False)
print(len(made.table()), len(made.results.finished))
""")
    done = subprocess.run([sys.executable, "compare.py"], cwd=tmp_path, env=ENVIRONMENT, text=True,
                          capture_output=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 2\n", "")
