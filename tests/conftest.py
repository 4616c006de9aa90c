"""What every test shares: one thread, no display, property tests that repeat, and blank pictures."""

import io
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imsave

torch.set_num_threads(1)
matplotlib.use("Agg")

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")



def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--first", action="store_true", help="of every test, the first case alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--first"):
        return
    first: dict[str, pytest.Item] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            first.setdefault(item.nodeid.partition("[")[0], item)
    others = [item for item in items if item not in set(first.values())]
    config.hook.pytest_deselected(items=others)
    items[:] = first.values()


_blank = io.BytesIO()
imsave(_blank, np.ones((1, 1, 3)), format="png")


def _save_blank(figure: Figure, where: Any, **options: Any) -> None:
    if hasattr(where, "write"):
        where.write(_blank.getvalue())
    else:
        Path(where).write_bytes(_blank.getvalue())


@pytest.fixture(autouse=True)
def _blank_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of a small run's time: only tests that look at pictures, marked so, draw them."""
    if request.node.get_closest_marker("pictures") is None:
        monkeypatch.setattr(Figure, "savefig", _save_blank)
