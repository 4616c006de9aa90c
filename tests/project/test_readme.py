"""The README tells a story that works: its commands run in order, in one folder, and end well."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
LONGEST = 300  # seconds for one command, on a busy machine
WAITS = ("server",)  # commands that serve others until these are done
# comparisons beside the one whose answer is shown: a grid and a search, which need not be long
SHORTER = {out: ["--set", "train.rounds=5", "--seeds", "0,1,2"] for out in ("results/lam", "results/tuned")}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def commands() -> list[list[str]]:
    """Every command of the README, without `make`: that is how this test is started."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line for line in words if line and line[0] != "make"]


def test_every_block_of_commands_is_run():
    """A block of commands without its language would not be found, and rot."""
    text = README.read_text(encoding="utf-8")
    unmarked = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert not [block for block in unmarked if re.search(r"^(descant|make|python) ", block, re.MULTILINE)]
    names = {line[1] for line in commands()}
    assert {"run", "resume", "compare", "report", "export", "predict", "personalize"} <= names
    assert {"certificates", "server", "client"} <= names
    assert {line[0] for line in commands()} == {"descant"}
    assert SHORTER.keys() < {line[-1] for line in commands()}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_commands_of_the_readme_run_in_order_in_one_folder(tmp_path):
    (tmp_path / "digits.toml").write_text(blocks("toml")[0], encoding="utf-8")
    serving: list[subprocess.Popen[str]] = []
    together: list[subprocess.Popen[str]] = []
    try:
        for written in commands():
            start = time.perf_counter()
            words = [*written, *SHORTER.get(written[-1], [])]
            if words[1] in WAITS:
                serving.append(launch(words, tmp_path))
            elif words[1] == "client":  # clients take part at the same time
                together.append(launch(words, tmp_path))
            else:
                ends_well(launch(words, tmp_path))
            print(f"{time.perf_counter() - start:6.1f} s  {shlex.join(words)}")
        for process in (*together, *serving):
            ends_well(process)
    finally:
        for process in (*together, *serving):
            process.kill()
    assert (tmp_path / "results/mine/report.html").exists()
    assert (tmp_path / "predictions.csv").read_text(encoding="utf-8").startswith("predicted,")
    assert (tmp_path / "north/model.safetensors").exists()


def launch(words: list[str], place: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", *words], cwd=place, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"})


def ends_well(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, f"{process.args}\n{output}"
    assert "Traceback" not in output
    for word in ("diverge", "No method serves", "nan"):
        assert word not in output, f"{word!r} in {process.args}\n{output}"
