"""The command line, run in this process: what it prints, what it leaves on disk, how it refuses."""

import contextlib
import io
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from rich.console import Console

import descant
from cli_helpers import ANSI, Result, call
from descant.algorithms import ALGORITHMS, FedAvg, pFedMe
from descant.cli import main
from descant.core.units import duration, size
from descant.engine.backends.choose import Timing
from descant.engine.settings import Train
from descant.experiment.catalogue import REGISTRIES
from descant.view.progress import Progress

SMALL = {
    "data.clients": 5, "train.rounds": 4, "train.cohort": 3, "train.local": "{ steps = 2 }", "algorithm.K": 1,
    "train.backend": "vectorised", "eval.every": 2,
}


def settings(**changes: object) -> list[str]:
    """SMALL with changes (`__` stands for a dot, None leaves a field out) as --set options."""
    fields = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    return [f"--set={key}={value}" for key, value in fields.items() if value is not None]


def checkpoint(directory: Path) -> dict[str, bytes]:
    base = directory / "checkpoint"
    return {str(path.relative_to(base)): path.read_bytes() for path in base.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, call("run", *settings(), "--out", out)


@pytest.fixture
def run_copy(finished, tmp_path) -> Path:
    """A finished run that a test may spoil."""
    return Path(shutil.copytree(finished[0], tmp_path / "run"))


# -- help, version ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "words"), [
    ((), ["run", "resume", "list", "show", "--version"]),
    (("run",), ["FILE", "--set", "--out", "descant run experiment.toml --set train.rounds=200"]),
    (("resume",), ["DIR", "--rounds", "descant resume runs/pfedme-digits-1 --rounds 200"]),
    (("list",), ["algorithms", "datasets", "models", "partitions", "--json", "descant list algorithms"]),
    (("show",), ["NAME", "--json", "descant show pfedme"]),
])
def test_help(command, words):
    code, out, err = call(*command, "--help")
    assert (code, err) == (0, "")
    assert [word for word in words if word not in out] == []


def test_version():
    assert call("--version") == (0, f"descant {descant.__version__}\n", "")


@pytest.mark.parametrize(("words", "found"), [
    ("descant re", {"resume", "report", "reproduce"}), ("descant export run --torch", {"--torch-export"}),
])
def test_a_shell_completes_commands_and_options(words, found, monkeypatch):
    for name, value in (("_DESCANT_COMPLETE", "complete_bash"), ("COMP_WORDS", words),
                        ("COMP_CWORD", str(words.count(" ")))):
        monkeypatch.setenv(name, value)
    assert {*call().out.split()} == found


@pytest.mark.parametrize("args", [
    ("frobnicate",), ("run", "--bad"), ("resume",), ("resume", "x", "--rounds", "many"),
    ("list",), ("list", "zebras"), ("show",),
])
def test_misuse_of_the_command_line_exits_with_2(args):
    code, out, err = call(*args)
    assert (code, out) == (2, "")
    assert "Error: " in err


# -- list and show ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(REGISTRIES))
def test_list(kind):
    code, out, err = call("list", f"{kind}s")
    assert (code, err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert list(lines) == list(REGISTRIES[kind])
    for name, line in lines.items():
        assert line.strip() == REGISTRIES[kind][name].__doc__.splitlines()[0]

    entries = json.loads(call("list", f"{kind}s", "--json").out)
    assert {entry["name"]: entry["description"] for entry in entries} \
        == {name: line.strip() for name, line in lines.items()}
    if kind == "algorithm":
        assert [entry["citation"] for entry in entries] == [cls.citation for cls in ALGORITHMS.values()]


@pytest.mark.parametrize(("kind", "name"), [
    (kind, name) for kind, registry in REGISTRIES.items() for name in registry])
def test_show(kind, name):
    cls = REGISTRIES[kind][name]
    code, out, err = call("show", name)
    assert (code, err) == (0, "")
    assert f"{name} ({kind})" in out
    first, *rest = [line.strip() for line in cls.__doc__.strip().splitlines()]
    assert out.count(first) == 1
    assert all(line in out for line in rest)  # formulas stay as they are written

    entry = next(entry for entry in json.loads(call("show", name, "--json").out) if entry["kind"] == kind)
    assert (entry["name"], entry["summary"]) == (name, first)
    assert [field["name"] for field in entry["fields"]] == [f.name for f in descant.core.fields.describe(cls)]
    for field in entry["fields"]:
        assert field["meaning"] in out
        for option in field["options"]:
            assert f'.{field["name"]} = {{ name = "{option["name"]}" }}' in out
            assert all(inner["meaning"] in out for inner in option["fields"])
    if kind == "algorithm":
        assert entry["citation"] == cls.citation
        assert cls.citation in out


def test_show_gives_type_and_default():
    pfedme = call("show", "pfedme").out
    assert re.search(r"^ +lam +15\.0 +strength of the pull of theta to w +a number or a list of numbers or "
                     r"\{ adaptive \} or \{ learned \} *$", pfedme, re.M)
    assert re.search(r"^ +eta +absent +step size of w; absent: 3/4 of the way to theta, 0\.75 / lam "
                     r"+a number *$", pfedme, re.M)
    ditto = call("show", "ditto").out
    assert re.search(r'^ +solver +\{ name = "sgd" \} ', ditto, re.M)
    assert re.search(r"^ +beta2 +0\.999 ", ditto, re.M)


def test_show_tells_entries_of_one_name_apart(monkeypatch):
    monkeypatch.setitem(REGISTRIES, "model", {"digits": REGISTRIES["model"]["mclr"]})
    code, out, _ = call("show", "digits")
    assert code == 0
    assert "digits (dataset)" in out
    assert "(model)" in out


def test_show_of_an_unknown_name_gives_the_nearest():
    code, out, err = call("show", "pfedmee")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "did you mean 'pfedme'?" in err


# -- run -------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.pictures
def test_run_leaves_its_files(finished):
    out, result = finished
    assert (result.code, result.err) == (0, "")
    assert {path.name for path in out.iterdir()} >= {
        "config.toml", "metrics.jsonl", "clients.csv", "summary.json", "curve.png", "checkpoint"}
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 4
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert tomllib.loads((out / "config.toml").read_text())["train"]["rounds"] == 4


@pytest.mark.pictures
def test_run_ends_with_the_figures(finished):
    out, (_, text, _) = finished
    summary = json.loads((out / "summary.json").read_text())
    for which in ("last", "best"):
        assert f"{which}, {summary[which]['round']}" in text
        accuracy = summary[which]["personal"]["test"]["accuracy"]
        cells = " +".join(f"{accuracy[key]:.4f}" for key in ("mean", "weighted", "std", "worst_decile"))
        assert re.search(f"personal +accuracy +{cells}", text)
        shared = summary[which]["global"]
        assert re.search(rf"global +accuracy +{shared['test']['accuracy']['mean']:.4f} .*"
                         rf"{shared['pooled']['accuracy']:.4f}", text)
    assert re.search(rf"^clients +5, of them {summary['last']['personal']['newcomers']} newcomer", text, re.M)
    assert re.search(r"^rejected +0 uploads", text, re.M)
    assert re.search(rf"^gradient steps +{summary['grad_steps']:,}", text, re.M)
    down, up = (size(summary[key]) for key in ("bytes_down", "bytes_up"))
    assert re.search(rf"^traffic +{down} down, {up} up", text, re.M)
    assert re.search(r"^time +[\d.]+ (m?s|min)", text, re.M)
    assert f"{out / 'curve.png'}\n" in text
    assert text.endswith(f"{out}\n")
    table = text[text.index("on the clients' own test data"):text.index("curve")]
    assert max(len(line.rstrip()) for line in table.splitlines()) < 80


def test_piped_progress_is_plain(finished):
    _, text, _ = finished[1]
    assert not ANSI.search(text)
    assert "backend: vectorised, chunk 3\n" in text
    line = r"^round +(\d+)/4  personal test accuracy 0\.\d{4}  global test accuracy 0\.\d{4}  [\d,]+ steps/s$"
    assert re.findall(line, text, re.M) == ["2", "4"]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["vectorised", "processes"])
def test_a_profile_says_where_the_time_went(tmp_path, backend):
    code, text, err = call("run", *settings(train__backend=backend, train__workers=1), "--out",
                           tmp_path / "run", "--profile")
    assert (code, err) == (0, "")
    told = text[text.index("where the time went"):]
    rows = re.findall(r"^(\w+) +[\d.]+ (?:µs|ms|s) +([\d.]+)%", told, re.M)
    assert [part for part, _ in rows] == ["sampling", "broadcast", "gathering", "local", "aggregate",
                                          "evaluate", "checkpoint"]
    shares = {part: float(share) for part, share in rows}
    assert sum(shares.values()) == pytest.approx(100, abs=0.5)
    assert min(shares["local"], shares["gathering"], shares["evaluate"], shares["checkpoint"]) > 0
    assert re.search(r"^samples: [\d.]+ [kM]B copied so that each client's lie together", told, re.M)
    again = call("resume", tmp_path / "run", "--profile")
    assert again.out.endswith("no round was trained: there is nothing to profile\n")


def test_demo_takes_settings_and_another_method(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changed = settings(algorithm__K=None, algorithm__name="ditto", algorithm__lam=0.5, train__rounds=1)
    for number in (1, 2):
        code, out, _ = call("run", *changed)
        assert code == 0
        assert "demo" in out
        assert f"runs/ditto-digits-{number}\n" in out
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["ditto-digits-1", "ditto-digits-2"]
    config = tomllib.loads((tmp_path / "runs/ditto-digits-1/config.toml").read_text())
    assert (config["algorithm"]["name"], config["algorithm"]["lam"]) == ("ditto", 0.5)
    assert "eta" not in config["algorithm"]


def test_numbers_go_on_after_the_highest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("pfedme-digits-9", "pfedme-digits-notes", "ditto-digits-30"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert "directory: runs/pfedme-digits-10\n" in call("run", *settings(train__rounds=1)).out


@pytest.mark.parametrize("change", [{"train__cohort": 99}, {"data__clients": 0}])
def test_a_refused_run_leaves_no_numbered_directory(tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    assert call("run", *settings(**change)).code == 2
    assert list(tmp_path.iterdir()) == []


def test_function_tasks_show_their_loss(tmp_path):
    (tmp_path / "experiment.toml").write_text("""
        data = { dataset = "quadratics", clients = 3 }
        model = { name = "quadratic" }
        algorithm = { name = "fedavg" }
        train = { rounds = 1, backend = "loop", local = { steps = 1 } }
    """)
    code, out, _ = call("run", tmp_path / "experiment.toml", "--out", tmp_path / "run")
    assert code == 0
    assert re.search(r"^round 1/1  personal test loss \d", out, re.M)
    assert re.search(r"personal +loss +\d", out)
    assert "accuracy" not in out


def test_no_validation_and_no_test_data(tmp_path):
    nothing_held_out = settings(data__validation=0, data__test=0, train__rounds=1)
    code, out, _ = call("run", *nothing_held_out, "--out", tmp_path / "run")
    assert code == 0
    assert "personal test accuracy -" in out
    assert re.search(r"^best round +none: there is no validation data", out, re.M)


def test_text_from_the_user_is_never_markup(tmp_path):
    out = tmp_path / "[red]x[/blue]"
    code, text, _ = call("run", *settings(train__rounds=1), "--out", out)
    assert code == 0
    assert text.endswith(f"{out}\n")
    code, _, err = call("resume", tmp_path / "[bold]none[/]")
    assert code == 2
    assert "[bold]none[/]" in err


# -- run refuses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "words"), [
    ({"algorithm.name": "pfedmee"}, ["algorithm.name", "did you mean 'pfedme'?"]),
    ({"data.dataset": "digitz"}, ["data.dataset", "did you mean 'digits'?"]),
    ({"data.partition": "dirichle"}, ["data.partition", "did you mean 'dirichlet'?"]),
    ({"model.name": "dmn"}, ["model.name", "did you mean 'dnn'?"]),
    ({"model.loss": "mae"}, ["model.loss", '"mse"']),
    ({"train.cohorts": 3}, ["train field 'cohorts'", "did you mean 'cohort'?"]),
    ({"algorithm.lamb": 3}, ["algorithm field 'lamb'", "did you mean 'lam'?"]),
    ({"data.client": 3}, ["data field 'client'", "did you mean 'clients'?"]),
    ({"trian.rounds": 3}, ["section 'trian'", "did you mean 'train'?"]),
    ({"train.rounds": "many"}, ["train.rounds must be an integer, not 'many'"]),
    ({"train.rounds": 1.5}, ["train.rounds must be an integer, not 1.5"]),
    ({"train.rounds": 0}, ["rounds must be at least 1, not 0"]),
    ({"train.local": "{ steps = 1, epochs = 1 }"}, ["train.local", "{ steps = n } or { epochs = n }"]),
    ({"train.cohort": 6}, ["train.cohort is 6", "5 clients", "take at most 5"]),
    ({"algorithm.lam": -1}, ["lam must be at least 0, not -1"]),
    ({"algorithm.lam": "nan"}, ["lam must be a finite number, not nan"]),
    ({"data.clients": 0}, ["clients must be at least 1, not 0"]),
    ({"data.clients": 100000}, ["clients = 100000", "1797 rows", "at most"]),
    ({"data.classes_per_client": 11}, ["classes_per_client = 11", "10 classes", "at most"]),
    ({"data.classes_per_client": 0}, ["classes_per_client must be at least 1, not 0"]),
    ({"data.partition": "natural"}, ["'natural'", "choose 'iid'"]),
    ({"data.partition": "dirichlet", "data.min_size": 1000}, ["min_size = 1000", "fewer clients"]),
    ({"data.dataset": "quadratics"}, ["'classes' needs class labels", "choose 'iid' or 'natural'"]),
    ({"data.test": 1}, ["test must be less than 1, not 1"]),
    ({"model.name": "quadratic"}, ['"quadratic"', "quadratics"]),
    ({"algorithm": 3}, ["--set 'algorithm=3'", "section.field=value"]),
    ({"train.rounds.x": 3}, ["--set 'train.rounds.x=3'", "rounds is not a section"]),
])
def test_bad_settings_are_refused(tmp_path, change, words):
    options = [f"--set={key}={value}" for key, value in (SMALL | change).items()]
    code, out, err = call("run", *options, "--out", tmp_path / "run")
    assert code == 2
    assert err.startswith("error: ")
    assert "Traceback" not in out + err
    assert [word for word in words if word not in err] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("text", "words"), [
    ("[train\nrounds = 3", ["is not valid TOML", "line 1"]),
    ("train = 3", ["[train] must be a section, not 3"]),
    ("[train]\nrounds = 3", ["algorithm.name is missing", "pfedme"]),
    (b"\xff\xfe\x00", ["it is not a text file"]),
])
def test_bad_files_are_refused(tmp_path, text, words):
    file = tmp_path / "experiment.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    code, _, err = call("run", file, "--out", tmp_path / "run")
    assert code == 2
    assert err.startswith("error: ")
    assert [word for word in words if word not in err] == []
    assert list(tmp_path.iterdir()) == [file]


def test_a_missing_file_is_refused(tmp_path):
    assert call("run", tmp_path / "no.toml", "--out", tmp_path / "run") \
        == (2, "", f"error: cannot read {tmp_path / 'no.toml'}: No such file or directory\n")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_taken_is_refused(run_copy, tmp_path):
    before = checkpoint(run_copy)
    code, _, err = call("run", *settings(), "--out", run_copy)
    assert code == 2
    assert f"{run_copy} already holds a run: continue it with `descant resume {run_copy}`" in err
    assert checkpoint(run_copy) == before

    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    code, _, err = call("run", *settings(), "--out", other)
    assert code == 2
    assert "not empty: choose another --out" in err
    code, _, err = call("run", *settings(), "--out", other / "thesis.txt")
    assert code == 2
    assert "choose another --out" in err
    assert [path.read_text() for path in other.iterdir()] == ["mine"]


@pytest.mark.parametrize("place", ["/proc/descant/run", "under-a-file"])
def test_a_place_that_cannot_be_written_is_an_error(tmp_path, place):
    (tmp_path / "file").write_text("")
    if place == "/proc/descant/run" and not Path("/proc/self").exists():
        pytest.skip("there is no /proc, the one directory in which root cannot write either")
    out = tmp_path / "file" / "run" if place == "under-a-file" else Path(place)
    code, _, err = call("run", *settings(), "--out", out)
    assert code == 1
    assert err.startswith(f"error: cannot write to {out}: ")
    assert "choose another --out" in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_ctrl_c_before_the_run(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("descant.experiment.run.make_backend", interrupt)
    code, _, err = call("run", *settings())
    assert (code, err) == (130, "stopped before the first round\n")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_a_run(tmp_path, monkeypatch):
    class Impatient(Progress):
        def played(self, row):
            super().played(row)
            if row["round"] == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr("descant.view.progress.Progress", Impatient)
    out = tmp_path / "run"
    assert call("run", *settings(), "--out", out)[::2] \
        == (130, f"stopped after round 2 of 4; continue with: descant resume {out}\n")


def test_a_bug_shows_its_traceback(tmp_path, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("descant.experiment.run.make_backend", broken)
    monkeypatch.setattr(sys, "argv", ["descant", "run", *settings(), "--out", str(tmp_path / "run")])
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(ZeroDivisionError):
        main()


# -- resume ----------------------------------------------------------------------------------------


def test_resume_of_a_finished_run_says_so(run_copy):
    before = checkpoint(run_copy)
    code, out, err = call("resume", run_copy)
    assert (code, err) == (0, "")
    assert "finished: all 4 rounds are done" in out
    assert f"descant resume {run_copy} --rounds" in out
    assert re.search(r"^last, 4 +personal +accuracy", out, re.M)
    assert checkpoint(run_copy) == before


def test_extending_equals_a_longer_run(run_copy, tmp_path):
    whole = tmp_path / "whole"
    assert call("run", *settings(train__rounds=8), "--out", whole).code == 0
    code, out, _ = call("resume", run_copy, "--rounds", 8)
    assert code == 0
    assert "continuing after round 4 of 8" in out
    assert checkpoint(run_copy) == checkpoint(whole)
    assert (run_copy / "config.toml").read_bytes() == (whole / "config.toml").read_bytes()
    assert (run_copy / "clients.csv").read_bytes() == (whole / "clients.csv").read_bytes()


@pytest.mark.parametrize(("rounds", "words"), [
    (3, ["3", "4 rounds", "can only be extended"]),
    (0, ["at least 1"]),
])
def test_fewer_rounds_are_refused(run_copy, rounds, words):
    before = checkpoint(run_copy)
    code, _, err = call("resume", run_copy, "--rounds", rounds)
    assert code == 2
    assert [word for word in words if word not in err] == []
    assert checkpoint(run_copy) == before


@pytest.mark.parametrize("place", ["empty", "missing", "file"])
def test_resume_of_a_place_without_a_run(tmp_path, place):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    code, _, err = call("resume", tmp_path / place)
    assert code == 2
    assert err == f"error: {tmp_path / place} holds no run: it has no config.toml\n"


@pytest.mark.parametrize(("old", "new", "field"), [
    ("lam = 15.0", "lam = 30.0", "algorithm.lam"),
    ("clients = 5", "clients = 6", "data.clients"),
    ("batch = 20", "batch = 10", "train.batch"),
])
def test_resume_with_a_changed_config_names_the_field(run_copy, old, new, field):
    config = run_copy / "config.toml"
    text = config.read_text()
    assert text.count(old) == 1
    config.write_text(text.replace(old, new))
    before = checkpoint(run_copy)
    code, _, err = call("resume", run_copy)
    assert code == 2
    assert f"({field}: " in err
    assert "put it back" in err
    assert checkpoint(run_copy) == before


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 0xFF
    path.write_bytes(data)


def flip_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[2] ^= 0xFF
    path.write_bytes(data)


def replace_with_foreign(path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.zeros(3)}, path)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(("file", "damage", "words"), [
    ("state.safetensors", cut, ["damaged", "start the run anew"]),
    ("state.safetensors", empty, ["damaged", "start the run anew"]),
    ("state.safetensors", flip_last, ["damaged", "checksum", "start the run anew"]),
    ("state.safetensors", flip_header, ["damaged", "start the run anew"]),
    ("state.safetensors", replace_with_foreign, ["not a checkpoint"]),
    ("best/state.safetensors", cut, ["damaged", "start the run anew"]),
    ("clients/theta.bin", cut, ["damaged", "expected", "start the run anew"]),
    ("best/clients/theta.bin", cut, ["damaged", "expected", "start the run anew"]),
    ("clients/theta.bin", Path.unlink, ["damaged", "expected", "start the run anew"]),
])
def test_a_damaged_checkpoint_is_an_error(run_copy, file, damage, words):
    damage(run_copy / "checkpoint" / file)
    before = checkpoint(run_copy)
    code, _, err = call("resume", run_copy)
    assert code == 1
    assert err.startswith("error: ")
    assert str(run_copy / "checkpoint" / file) in err
    assert [word for word in words if word not in err] == []
    assert checkpoint(run_copy) == before


# -- progress --------------------------------------------------------------------------------------


def a_run(rounds: int = 12, **train: object) -> SimpleNamespace:
    setup = SimpleNamespace(
        train=Train(rounds=rounds, **train), origin=None, algorithm=FedAvg(),
        federation=SimpleNamespace(population=9, notes=()), task=SimpleNamespace(dim=1),
        deciding=SimpleNamespace(name="accuracy"), about_attacks=list)
    return SimpleNamespace(setup=setup, rounds=0, directory=None, notes=[], why_metric=None,
                           is_converged=False, is_spent=False)


def a_row(number: int, **more: object) -> dict:
    return {"round": number, "seconds": 0.5, "grad_steps": 1000, "rejected": 0, **more}


def scores(mean: float | None, failed: int = 0) -> dict:
    return {"test": {"loss": {"mean": 1.0}, "accuracy": {"mean": mean}}, "failed": failed}


def watched(run: SimpleNamespace, rows: list[dict], measured: list[Timing], **terminal: object) -> str:
    console = Console(file=io.StringIO(), markup=False, highlight=False, _environ={}, **terminal)
    with Progress(console) as progress:
        progress.started(run, measured)
        for row in rows:
            progress.played(row)
    return console.file.getvalue()


def test_cautions_are_told() -> None:
    run = a_run()
    run.setup.algorithm = pFedMe(alpha=0.2, lam=15.0, eta=0.1)
    out = watched(run, [a_row(1)], [])
    assert "caution: alpha = 0.2 with lam = 15: the steps diverge for any loss" in out
    assert "at most 0.133333" in out
    assert "caution: eta lam = 1.5: w overshoots theta; it needs eta <= 1 / lam = 0.0666667" in out


def test_what_is_not_as_it_was_asked_for_is_told() -> None:
    run = a_run(backend="vectorised", chunk=2)
    run.notes = ["chunks were too large"]
    assert "note: chunks were too large\n" in watched(run, [a_row(1)], [])


def test_progress_in_lines():
    rows = [a_row(1), a_row(2, personal=scores(0.5, failed=2)),
            a_row(3, rejected=1, rejections={"a\x1b[31m": "upload.theta is not finite"}),
            a_row(4, rejected=5, rejections={str(k): "late" for k in range(5)})]
    measured = [Timing("loop", 1, 1, 1.9e-3), Timing("vectorised", 10, 1, 2.4e-4),
                Timing("processes", 5, 2, 3e-5)]
    text = watched(a_run(backend="vectorised", chunk=10), rows, measured, width=40)
    assert text.splitlines() == [
        "fedavg: 9 clients, 1 parameter, 12 rounds",
        "backend: vectorised, chunk 10 (measured per client and batch: loop 1.9 ms, vectorised 0.24 ms, "
        "processes 30 µs)",
        "round 2: 2 clients could not be scored",
        "round  2/12  personal test accuracy 0.5000  2,000 steps/s",
        r"round 3: rejected 'a\x1b[31m' (upload.theta is not finite)",
        "round 4: rejected '0' (late), '1' (late), '2' (late) and 2 more",
    ]


def test_progress_on_a_terminal():
    rows = [a_row(1, personal=scores(0.25)), a_row(2, rejected=1, rejections={"[b]": "late"})]
    run = a_run(backend="processes", workers=2, chunk=3)
    text = ANSI.sub("", watched(run, rows, [], width=100, force_terminal=True))
    assert "backend: processes, 2 workers, chunk 3" in text
    assert "round 2: rejected '[b]' (late)" in text
    assert "round 2/12" in text
    assert "personal test accuracy 0.2500" in text
    assert "2,000 steps/s" in text


@pytest.mark.parametrize(("seconds", "text"), [
    (2.31e-5, "23 µs"), (1.9e-3, "1.9 ms"), (0.24, "0.2 s"), (59.94, "59.9 s"), (59.96, "1 min 0 s"),
    (200, "3 min 20 s"), (7500, "2 h 5 min")])
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [
    (0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (999_960, "1.0 MB"), (2_600_000, "2.6 MB"),
    (3 * 10**15, "3000.0 TB")])
def test_sizes(count, text):
    assert size(count) == text
