"""The client directory is for its own user alone, whoever makes it first."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

import flower_helpers as flower
from descant.cli.client import _display
from descant.deploy.transport.address import Address
from flower_helpers import DATA, experiment


@pytest.fixture(autouse=True)
def _open_to_all() -> Iterator[None]:
    """A umask that hides nothing."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(place: Path) -> dict[str, int]:
    found = {"": place, **{str(path.relative_to(place)): path for path in place.rglob("*")}}
    return {name: path.stat().st_mode & 0o777 for name, path in found.items()}


def assert_private(place: Path, *expected: str) -> None:
    found = modes(place)
    assert {*expected} <= {*found}
    assert {name: oct(mode) for name, mode in found.items() if mode & 0o077} == {}


def federate(place: Path) -> None:
    clients = {name: DATA[name] for name in ("0", "1")}
    flower.federate(experiment("ditto", train={"rounds": 1}),
                    flower.MemoryServer(flower.make_clients(clients, place)), place / "server", alone=False)


@pytest.mark.parametrize("first", ["client", "command", "transport", "empty"])
def test_nobody_else_can_look(first: str, tmp_path: Path) -> None:
    """States, model, means of columns, and the node's id."""
    place = tmp_path / "0"
    if first == "command":
        with _display(Console(quiet=True), "0", place, stay=False):
            pass
    elif first == "transport":
        transport = pytest.importorskip("descant.deploy.transport.flower_client", exc_type=ImportError)
        stop = threading.Event()
        stop.set()
        transport.FlowerClient(Address("127.0.0.1", 1), None, place).serve(lambda p: p, flower.Quiet(), stop)
    elif first == "empty":
        place.mkdir(mode=0o755)
    federate(tmp_path)
    assert_private(place, "federation.json", "model.safetensors", "model.json")
    assert any(name.endswith("state1.safetensors") for name in modes(place))


def test_what_an_earlier_version_left_open_is_closed(tmp_path: Path) -> None:
    federate(tmp_path)
    place = tmp_path / "0"
    for path in (place, *place.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    flower.make_clients({"0": DATA["0"]}, tmp_path)  # a restart
    assert oct(place.stat().st_mode & 0o777) == "0o700"


def test_a_directory_of_other_files_keeps_its_mode(tmp_path: Path) -> None:
    """It could be anything, such as /tmp; the client's own files in it are private all the same."""
    place = tmp_path / "0"
    place.mkdir(mode=0o755)
    (place / "notes.txt").write_text("mine")
    federate(tmp_path)
    found = modes(place)
    assert (found[""], found["notes.txt"]) == (0o755, 0o666)
    assert {found[name] for name in ("federation.json", "model.safetensors", "model.json")} == {0o600}
    assert all(mode in (0o600, 0o700) for name, mode in found.items() if name not in ("", "notes.txt"))
