"""What every test shares: one thread, no display, no waiting for disks, property tests that repeat, and blank
pictures."""

from __future__ import annotations

import functools
import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import matplotlib
import numpy as np
import pytest
import torch
import typer.main
from matplotlib.figure import Figure
from matplotlib.image import imsave

from descant.engine.backends import choose, memory

torch.set_num_threads(1)
matplotlib.use("Agg")

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

# A command line is made of all commands anew at every call, which takes longer than most of them.
typer.main.get_command = functools.cache(typer.main.get_command)

# A shell ignores Ctrl-C for what it starts in the background, and so would all processes of the tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test cuts the power: what is written is there for whoever reads it, and disks need not be waited for.
os.fsync = os.fdatasync = lambda descriptor: None

# Which backend is the fastest matters to no test: each is measured once, not six times.
choose.PROBES = 1

# The limits of this process stay as they are; a test of other ones has a root of its own.
_of_groups = memory._of_groups
_of_this_process = functools.cache(lambda root: tuple(_of_groups(root)))
memory._of_groups = lambda root: _of_this_process(root) if root == Path("/") else _of_groups(root)

_save = Figure.savefig
_blank = io.BytesIO()
imsave(_blank, np.ones((1, 1, 3)), format="png")


def _save_blank(figure: Any, where: Any, **options: Any) -> None:
    if hasattr(where, "write"):
        where.write(_blank.getvalue())
    else:
        Path(where).write_bytes(_blank.getvalue())


class Sheet:
    """In place of a figure, its axes and all that is on them: takes everything, and shows nothing."""

    savefig = _save_blank
    is_wanted = False

    def subplots(self, rows: int = 1, columns: int = 1, *, squeeze: bool = True, **options: Any) -> Any:
        axes = np.empty((rows, columns), object)
        axes.fill(self)
        if not squeeze:
            return axes
        return self if axes.size == 1 else axes.squeeze()

    def __getattr__(self, name: str) -> Sheet:
        return self

    def __call__(self, *args: Any, **options: Any) -> Sheet:
        return self

    def __getitem__(self, key: Any) -> Sheet:
        return self

    def __iter__(self) -> Iterator[Sheet]:
        return iter(())


def _figure(cls: type[Figure], *args: Any, **options: Any) -> Any:
    return Sheet() if Sheet.is_wanted and cls is Figure else object.__new__(cls)


# for good: a class whose __new__ was set for a while refuses arguments afterwards
Figure.__new__ = _figure


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Drawing takes most of a small run's time: only tests that look at pictures, marked so, draw them. It is
    settled before the fixtures, since those of a whole file make runs too."""
    is_looking = item.get_closest_marker("pictures") is not None
    Sheet.is_wanted = not is_looking
    Figure.savefig = _save if is_looking else _save_blank  # of figures that are there already


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """For a test that looks at one picture and makes many: `with drawing():` it is drawn."""
    @contextmanager
    def really() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(Sheet, "is_wanted", False)
            patch.setattr(Figure, "savefig", _save)
            yield

    return really
