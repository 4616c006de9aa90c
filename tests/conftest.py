"""What every test shares: one thread, no display, no waiting for disks, property tests that repeat, and blank
pictures."""

from __future__ import annotations

import functools
import gc
import io
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # as `descant.deploy` does, before Flower is imported

import hypothesis
import matplotlib
import numpy as np
import pytest
import torch
import typer.main
from matplotlib.figure import Figure
from matplotlib.image import imsave

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--first", action="store_true",
                     help="of every test that is neither slow nor thorough, the first case alone")


_OF_A_FILE = re.compile(r"^pytestmark = .*pytest\.mark\.(slow|thorough)\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which no test is run are not imported either: some import much."""
    if collection_path.suffix != ".py":
        return None
    text, chosen = collection_path.read_text(encoding="utf-8"), config.option.markexpr
    if any(f"mark.{mark}" not in text for mark in chosen.split(" and ") if mark in ("slow", "alone")):
        return True
    whole = _OF_A_FILE.search(text)
    if whole is None:
        return None
    return config.getoption("--first") or (whole[1], chosen) == ("slow", "not slow") or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # a test with a deadline of its own takes minutes: begun first, it is not waited for at the end
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)
    gc.freeze()  # the tests and all that they import stay: no collection needs to look at them again
    if not config.getoption("--first"):
        return
    first: dict[str, pytest.Item] = {}
    for item in items:
        if item.get_closest_marker("slow") is None and item.get_closest_marker("thorough") is None:
            first.setdefault(item.nodeid.partition("[")[0], item)
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = first.values()


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


@pytest.fixture(autouse=True)
def _blank_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of a small run's time: only tests that look at pictures, marked so, draw them."""
    if request.node.get_closest_marker("pictures") is None:
        monkeypatch.setattr(Sheet, "is_wanted", True)
        monkeypatch.setattr(Figure, "savefig", _save_blank)  # of figures that are there already


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
