"""The package as it is installed: version, typing marker, lazy names, and the built wheel."""

import importlib.metadata
import importlib.resources
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import descant

ROOT = Path(__file__).resolve().parent.parent


def test_version_is_that_of_the_installed_distribution():
    assert descant.__version__ == importlib.metadata.version("descant")


def test_typing_marker_is_present():
    assert importlib.resources.files("descant").joinpath("py.typed").is_file()


def test_every_public_name_resolves():
    assert descant.__all__
    assert len(set(descant.__all__)) == len(descant.__all__)
    missing = [name for name in descant.__all__ if not hasattr(descant, name)]
    assert missing == []


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = descant.no_such_name


def test_import_alone_does_not_import_torch():
    program = "import sys, descant; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def _run(*command: str | Path, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} failed with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of an empty environment into which only the built wheel was installed."""
    base = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "build", "--wheel", "--outdir", base / "dist", ROOT, cwd=base)
    [wheel] = (base / "dist").glob("descant-*.whl")
    _run(sys.executable, "-m", "venv", base / "venv", cwd=base)
    scripts = base / "venv" / "bin"
    pip = [scripts / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run(*pip, "-c", ROOT / "constraints.txt", wheel, cwd=base)
    return scripts


@pytest.mark.slow
def test_wheel_has_the_command(installed: Path, tmp_path: Path):
    assert "run" in _run(installed / "descant", "--help", cwd=tmp_path)
    assert _run(installed / "descant", "list", "algorithms", cwd=tmp_path).strip()


@pytest.mark.slow
def test_wheel_has_the_typing_marker_and_the_licence(installed: Path, tmp_path: Path):
    program = (
        "import importlib.metadata as m, importlib.resources as r; "
        "print(r.files('descant').joinpath('py.typed').is_file(), "
        "any(f.name == 'LICENSE' for f in m.files('descant')))"
    )
    assert _run(installed / "python", "-c", program, cwd=tmp_path).split() == ["True", "True"]


@pytest.mark.slow
def test_wheel_runs_an_experiment(installed: Path, tmp_path: Path):
    out = tmp_path / "out"
    _run(installed / "descant", "run", "--set", "train.rounds=2", "--out", out, cwd=tmp_path)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert records
    assert json.loads((out / "summary.json").read_text())
