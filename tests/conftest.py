"""How the tests are chosen and ordered. What they have around them is in `surroundings.py`."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # as `descant.deploy` does, before Flower is imported

# new objects between two collections: every 700 of them, as is usual, one finds next to nothing
OBJECTS = 20_000


def pytest_configure(config: pytest.Config) -> None:
    """A process that hands out the tests to workers, who wait for it, needs nothing of what they import."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("surroundings")


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
    gc.set_threshold(OBJECTS)
    if not config.getoption("--first"):
        return
    first: dict[str, pytest.Item] = {}
    for item in items:
        if item.get_closest_marker("slow") is None and item.get_closest_marker("thorough") is None:
            first.setdefault(item.nodeid.partition("[")[0], item)
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = first.values()
