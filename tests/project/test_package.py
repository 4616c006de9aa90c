"""The package as it is installed: version, typing marker, lazy names, and the built wheel."""

import importlib.metadata
import importlib.resources
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import descant
from benchmarks.hashes import needed

ROOT = Path(__file__).resolve().parents[2]


def test_version_is_that_of_the_installed_distribution():
    assert descant.__version__ == importlib.metadata.version("descant")


@pytest.mark.thorough
def test_the_deployment_extra_is_pinned_by_hash():
    """Every package of the extra, with the versions of constraints.txt, and nothing of this machine."""
    text = (ROOT / "deployment.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert "/" not in "".join(lines)
    assert "@" not in "".join(lines)
    found: dict[str, str] = {}
    hashes: dict[str, int] = {}
    for line in lines:
        if (pin := re.fullmatch(r'([a-z0-9-]+)==([\w.]+)(\+cpu)?( ; sys_platform .= "linux")? \\', line)
                ) is not None:
            found[pin[1]] = pin[2]
        else:
            assert re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line), line
            hashes[[*found][-1]] = hashes.get([*found][-1], 0) + 1
    assert found == needed()
    assert {"torch", "flwr", "cryptography", "grpcio"} <= found.keys() == hashes.keys()


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


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_later_pythons_compile_and_import_it(version: str, tmp_path: Path):
    """Without torch, which is imported when it is needed. Warnings are those of code that will not go on."""
    places = [shutil.which(f"python{version}"), *Path("~/.pyenv/versions").expanduser().glob(
        f"{version}.*/bin/python")]  # the first may be a name that pyenv knows and does not offer
    found = [path for path in places if path is not None and subprocess.run(
        [path, "--version"], check=False, capture_output=True).returncode == 0]
    if not found:
        pytest.skip(f"no Python {version} here")
    source = tmp_path / "descant"
    shutil.copytree(Path(descant.__file__).parent, source, ignore=shutil.ignore_patterns("__pycache__"))
    _run(found[0], "-W", "error", "-m", "compileall", "-q", source, cwd=tmp_path)
    program = "import sys, descant; print('torch' in sys.modules, *sys.version_info[:2])"
    told = _run(found[0], "-W", "error", "-c", program, cwd=tmp_path).split()
    assert told == ["False", *version.split(".")]


# of this environment; and what is compiled once should not be compiled by every process
UNWANTED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")


def _run(*command: str | Path, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in UNWANTED}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} failed with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def install(base: Path) -> Path:
    """The bin directory of an empty environment into which only the built wheel was installed."""
    _run(sys.executable, "-m", "build", "--wheel", "--outdir", base / "dist", ROOT, cwd=base)
    [wheel] = (base / "dist").glob("descant-*.whl")
    _run(sys.executable, "-m", "venv", base / "venv", cwd=base)
    scripts = base / "venv" / "bin"
    # what is imported is compiled then; to compile all would take half of the time
    pip = [scripts / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run(*pip, "--no-compile", "-c", ROOT / "constraints.txt", wheel, cwd=base)
    return scripts


def pinned() -> dict[str, str]:
    """What constraints.txt says, by normalised names."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


OF_A_GRAPHICS_CARD = ("nvidia", "cuda", "triton")  # what another build of torch brings along


@pytest.mark.thorough
def test_every_requirement_is_pinned_within_its_bounds():
    """Of descant with all extras, and of all that is installed and that these need."""
    versions, seen = pinned(), set()
    left = [("descant", frozenset(importlib.metadata.metadata("descant").get_all("Provides-Extra", [])))]
    while left:
        name, extras = left.pop()
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # one of an extra that is not installed here
        for line in requires:
            need = Requirement(line)
            if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in (*extras, "")):
                continue
            key = canonicalize_name(need.name)
            if key.startswith(OF_A_GRAPHICS_CARD):
                continue
            assert key == "descant" or key in versions, f"{name} needs {line}: constraints.txt has no {key}"
            assert key == "descant" or need.specifier.contains(versions[key], prereleases=True), (
                f"{name} needs {line}: constraints.txt has {versions[key]}")
            if (entry := (key, frozenset(need.extras))) not in seen:
                seen.add(entry)
                left.append(entry)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_extras_install_together(tmp_path: Path):
    """pip finds versions of everything that fit each other and constraints.txt, which names them all."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run",
               "--ignore-installed", "--report", tmp_path / "report.json", "-c", ROOT / "constraints.txt",
               f"{ROOT}[{','.join(extras)}]"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    offline = r"new connection|name resolution|ConnectTimeout|No route to host|Network is unreachable"
    if done.returncode and re.search(offline, done.stderr):
        pytest.skip("no package index can be reached from here: what fits together cannot be found out")
    assert done.returncode == 0, done.stderr
    entries = [entry["metadata"] for entry in json.loads((tmp_path / "report.json").read_text())["install"]]
    found = {canonicalize_name(entry["name"]): entry["version"] for entry in entries}
    if found["torch"].endswith("+cpu"):
        assert not [name for name in found if name.startswith(OF_A_GRAPHICS_CARD)]
    plain = {name: version.partition("+")[0] for name, version in found.items()
             if not name.startswith(OF_A_GRAPHICS_CARD)}
    assert plain.pop("descant") == descant.__version__
    assert dict(plain.items() - pinned().items()) == {}
    assert {"flwr", "flwr-datasets", "ray", "pyarrow", "optuna", "onnx", "torch"} <= plain.keys()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_alone_does_the_work(tmp_path: Path):
    """One test, since installing takes a minute: it has the command, the typing marker, the licence, runs an
    experiment, and has the templates of the report."""
    installed = install(tmp_path)
    assert "run" in _run(installed / "descant", "--help", cwd=tmp_path)
    assert _run(installed / "descant", "list", "algorithms", cwd=tmp_path).strip()
    program = (
        "import importlib.metadata as m, importlib.resources as r; "
        "print(r.files('descant').joinpath('py.typed').is_file(), "
        "any(f.name == 'LICENSE' for f in m.files('descant')))"
    )
    assert _run(installed / "python", "-c", program, cwd=tmp_path).split() == ["True", "True"]
    out = tmp_path / "out"
    _run(installed / "descant", "run", "--set", "train.rounds=2", "--out", out, cwd=tmp_path)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert records
    assert json.loads((out / "summary.json").read_text())
    program = ("from descant.view import page; [page._templates().get_template(name) "
               "for name in ('page.html', 'parts.html', 'pieces.html')]; page.content_policy(live=False)")
    _run(installed / "python", "-c", program, cwd=tmp_path)
