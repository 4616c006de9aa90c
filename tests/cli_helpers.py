"""The command line as tests call it: `call` in this process, `start` and `finish` in a process of its own."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import descant
from descant.cli import main

ANSI = re.compile(r"\x1b\[[\d;?]*\w")
COMMAND = [sys.executable, "-m", "descant"]
# the package that these tests see is the one that is run, installed or not
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(descant.__file__).parents[1])}


class Result(NamedTuple):
    code: int
    out: str
    err: str


def call(*args: object) -> Result:
    """`descant args`, as the console script runs it."""
    out, err = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["descant", *map(str, args)]
    try:
        with (contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
              pytest.raises(SystemExit) as end):
            main()
    finally:
        sys.argv = argv
    code = end.value.code
    return Result(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())


class Process(subprocess.Popen[str]):
    """A process that does not outlive its test: at the end of a `with`, one that still runs is killed. A
    Popen would be waited for, however long."""

    def __exit__(self, *error: Any) -> None:
        self.kill()
        super().__exit__(*error)


def start(*args: object, cwd: Path, **options: Any) -> Process:
    return Process([*COMMAND, *map(str, args)], cwd=cwd, env=ENVIRONMENT, text=True,
                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def finish(*args: object, cwd: Path) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    with start(*args, cwd=cwd) as process:
        out, err = process.communicate(timeout=300)  # the machine may be busy
    return process.returncode, out, err


def group_is_alive(group: int) -> bool:
    """Whether any process of the group still runs (a zombie does not)."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(pgrp) == group and state != "Z":
            return True
    return False
