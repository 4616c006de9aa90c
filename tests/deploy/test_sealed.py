"""What server and clients keep on their disks is sealed: damage is told, and never used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from descant.core.sample import SampleFormat
from descant.deploy.client_directory import ClientDirectory, ClientStates
from descant.deploy.protocol import ClientInfo, read_clients
from descant.deploy.server import read_served
from descant.errors import DescantError


class State(NamedTuple):
    theta: Tensor
    count: Tensor


STATE = State(torch.arange(5.0), torch.tensor(3))


def believed(states: ClientStates, path: Path) -> State | None:
    """The state that is read, if it is not refused."""
    try:
        found: State = states.read(7, STATE)
    except DescantError as error:
        return None if str(path) in str(error) else State(torch.zeros(0), torch.tensor(0))
    return found


def test_every_flipped_bit_of_a_state_is_noticed(tmp_path: Path) -> None:
    states = ClientDirectory(tmp_path).states("s")
    states.write(7, STATE, ())
    path = tmp_path / "s" / "state7.safetensors"
    good = path.read_bytes()
    for bit in range(0, 8 * len(good), 3):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        # in the name of the checksum a bit makes a file without one, and all else is as it was
        assert believed(states, path) is None or torch.equal(believed(states, path).theta, STATE.theta)
    path.write_bytes(good)
    assert torch.equal(states.read(7, STATE).theta, STATE.theta)


def test_a_state_of_another_round_or_form(tmp_path: Path) -> None:
    states = ClientDirectory(tmp_path).states("s")
    states.write(7, STATE, ())
    (tmp_path / "s" / "state7.safetensors").rename(tmp_path / "s" / "state8.safetensors")
    with pytest.raises(DescantError, match=r"state8\.safetensors is damaged \(it is the state of round 7\)"):
        states.read(8, STATE)
    save_file({"theta": torch.ones(6), "count": torch.tensor(3)}, tmp_path / "s" / "state9.safetensors")
    with pytest.raises(DescantError, match="its theta has another shape or type"):
        states.read(9, STATE)
    save_file({"count": torch.tensor(3)}, tmp_path / "s" / "state9.safetensors")
    with pytest.raises(DescantError, match="it has no theta"):
        states.read(9, STATE)


def test_a_state_of_an_older_version(tmp_path: Path) -> None:
    states = ClientDirectory(tmp_path).states("s")
    save_file(STATE._asdict(), tmp_path / "s" / "state4.safetensors")
    assert torch.equal(states.read(4, STATE).theta, STATE.theta)


def test_what_a_client_has_joined(tmp_path: Path) -> None:
    directory = ClientDirectory(tmp_path)
    assert directory.joined() is None
    facts = {"session": "s", "client": 3, "experiment": {"train": {"seed": 1}}}
    directory.join(facts)
    assert directory.joined() == facts
    path = tmp_path / "federation.json"
    good = path.read_text()
    for damage in (good.replace('"client": 3', '"client": 2'), good.replace('"seed": 1', '"seed": 7'),
                   "[]", "{}", "[" * 10_000, '{"session": 3}', good[:-20]):
        path.write_text(damage)
        with pytest.raises(DescantError, match=r"federation\.json is damaged .*: remove it, and the client"):
            directory.joined()
    path.write_text(json.dumps(facts))  # of an older version
    assert directory.joined() == facts


@pytest.mark.parametrize("text", ["", "{", "[]", '{"north": 3}', '{"north": {"personal": {"loss": "low"}}}',
                                  '{"north": {"personal": 3}}', "[" * 10_000, "\x00"])
def test_a_damaged_list_of_served_clients(tmp_path: Path, text: str) -> None:
    path = tmp_path / "clients.json"
    assert read_served(path) == {}
    path.write_text(text)
    with pytest.raises(DescantError, match=r"clients\.json is damaged .*: remove it, and the clients "):
        read_served(path)
    path.write_text('{"north": {"personal": {"loss": 0.5, "accuracy": null}}}')
    assert read_served(path) == {"north": {"personal": {"loss": 0.5, "accuracy": None}}}


def test_the_members_of_a_federation(tmp_path: Path) -> None:
    kind = SampleFormat((3,), classes=2, target_dtype="int64")
    table = {"session": "s", "kind": kind.dump(), "members": [ClientInfo("north", 8, 2, 3)._asdict()]}
    path = tmp_path / "federation.json"
    path.write_text(json.dumps(table))  # of an older version
    assert read_clients(path) == ("s", kind, [ClientInfo("north", 8, 2, 3)])
    for damage in (table | {"check": "00000000"}, table | {"members": []}, table | {"members": [3]}, [],
                   table | {"members": [{"name": "north", "train": 10**10, "validation": 2, "test": 3}]},
                   table | {"members": [{"name": "north", "train": 8.5, "validation": 2, "test": 3}]}):
        path.write_text(json.dumps(damage))
        with pytest.raises(DescantError, match=r"federation\.json is damaged"):
            read_clients(path)
