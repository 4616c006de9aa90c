"""Trouble without malice: a client's trouble is the client's; it is told, and the rest goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flower_helpers as flower
from descant.deploy import client_manager
from descant.deploy.backend import Rules
from descant.deploy.messages import WireMessage
from descant.errors import UsageError
from flower_helpers import DATA, experiment


class Enough(Exception):
    """The server waits."""


def wrong_file(place: Path) -> str:
    np.savez(place / "other.npz", x=np.ones((9, 3), np.float32), y=np.zeros(9, np.int64))
    return str(place / "other.npz")


@pytest.mark.slow
def test_a_wrong_file_that_connects_first_is_the_one_that_is_refused(tmp_path: Path) -> None:
    """Both sides are told why; and when it has come with the right one, they begin."""
    own = flower.Quiet()
    nodes = flower.make_clients({name: DATA[name] for name in "123"}, tmp_path)
    nodes = flower.make_clients({"0": wrong_file(tmp_path)}, tmp_path, own) | nodes
    server = flower.MemoryServer(nodes)
    server.offline |= {"2", "3"}

    class Coming(flower.Quiet):
        def waiting(self, *given: Any) -> None:
            if self.of("refused"):  # a person looks, and starts it again
                server.answers |= flower.make_clients({"0": DATA["0"]}, tmp_path)
                server.since[100] = 1
            server.offline.clear()
            time.sleep(client_manager.FRESH)

    told = Coming()
    found = flower.federate(experiment("fedavg"), server, tmp_path / "server", observer=told, alone=False)
    why = "its samples differ from those of the others: its shape is (3,), that of the others (64,)"
    assert told.of("refused") == [("0", why)]
    assert [str(error) for _, error in own.of("failed")] == [f"the server refuses this client: {why}"]
    assert told.of("differing")[0][:2] == (["0"], ["1"])  # of two, nobody can tell
    assert not any("rejections" in row for row in found.history)


def jobs(payload: Any, what: str) -> bool:
    return WireMessage.decode(payload).facts["what"] == what


@pytest.mark.slow
def test_clients_join_again_together_and_within_the_deadline(tmp_path: Path) -> None:
    """Each that has lost its membership and does not reply would have cost a minute, one after the other."""
    wanted = experiment("fedavg", train={"rounds": 2}, eval={"every": 5})
    nodes, broken = flower.make_clients(DATA, tmp_path), set("23")
    asked: list[float] = []
    server = flower.MemoryServer(nodes)

    class Losing(flower.Quiet):
        def played(self, row: dict[str, Any]) -> None:
            if row["round"] == 1:
                for name in broken:
                    server.answers[name] = lost(name)

    def lost(name: str) -> Any:
        def reply(payload: Any) -> Any:
            facts = WireMessage.decode(payload).facts
            if facts["what"] == "join":
                asked.append(time.monotonic())
                return None
            return WireMessage({key: facts[key] for key in ("what", "nonce")}
                               | {"name": name, "failed": "not joined", "ready": False}).encode()

        return reply

    class Stop(Losing):
        def played(self, row: dict[str, Any]) -> None:
            super().played(row)
            if row["round"] == 2:
                raise Enough

    told = Stop()
    with pytest.raises(Enough):
        flower.federate(wanted, server, tmp_path / "server", observer=told, alone=False,
                        rules=Rules(deadline=2.0))
    assert len(asked) == 4  # in the round, and for its evaluation
    assert asked[1] - asked[0] < 1.5  # sent together: each is waited for 2 s
    assert {(name, reason.partition(" within")[0]) for name, _, reason in told.of("lost")} == {
        (name, "it cannot join again: no reply") for name in broken}
    assert all(float(reason.split()[-2]) <= 2.0 for _, _, reason in told.of("lost"))  # seconds, no minute


@pytest.mark.parametrize("jump", [pytest.param(3600.0, marks=pytest.mark.slow), -3600.0])
@pytest.mark.thorough
def test_a_clock_that_jumps_makes_nobody_late(
        jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an hour, while clients work; of those that never reply the deadline is what it was."""
    nodes, real = flower.make_clients(DATA, tmp_path), time.time
    jumped: list[float] = []
    monkeypatch.setattr(time, "time", lambda: real() + sum(jumped))

    def silent(payload: Any) -> Any:
        if WireMessage.decode(payload).facts["what"] != "work":
            return nodes["2"](payload)
        jumped.append(jump)
        return None

    server, told = flower.MemoryServer({"2": silent} | {name: nodes[name] for name in "013"}), flower.Quiet()
    began = time.monotonic()
    found = flower.federate(experiment("fedavg", train={"rounds": 1}), server, tmp_path / "server",
                            observer=told, alone=False, rules=Rules(deadline=0.5))
    assert jumped
    assert {*found.history[0]["rejections"]} == {"2"}
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("trouble", ["drops", *(pytest.param(each, marks=pytest.mark.slow)
                                               for each in ("hangs", "fails"))])
@pytest.mark.thorough
def test_a_client_that_does_not_join_is_waited_for(
        trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between gathering and joining, it disconnects; or it never replies; or it fails and is mended."""
    monkeypatch.setattr(client_manager, "TIMEOUT", 0.3)
    monkeypatch.setattr(client_manager, "FRESH", 0.0)
    nodes, honest = flower.make_clients(DATA, tmp_path), 0

    def troubled(payload: Any) -> Any:
        nonlocal honest
        if not jobs(payload, "join") or honest:
            return nodes["2"](payload)
        if trouble == "drops":
            server.offline.add("2")
            return None
        if trouble == "hangs":
            return None
        facts = WireMessage.decode(payload).facts
        return WireMessage({key: facts[key] for key in ("what", "nonce")} | {"failed": "OSError"}).encode()

    server = flower.MemoryServer(nodes | {"2": troubled})

    class Mending(flower.Quiet):
        def waiting(self, *given: Any) -> None:
            nonlocal honest
            honest += 1
            server.offline.clear()
            server.since[102] = honest

    told = Mending()
    found = flower.federate(experiment("fedavg"), server, tmp_path / "server", observer=told, alone=False)
    assert honest
    assert found.rounds == 3
    if trouble != "drops":
        [(name, why)] = told.of("refused")
        assert name == "2"
        assert why == ("it cannot join: no reply within 0.3 s" if trouble == "hangs"
                       else "it cannot join: it failed: OSError")


@pytest.mark.parametrize(("method", "changes", "words"), [
    ("cgpfl", {"algorithm": {"name": "cgpfl", "K": 4}}, "3"),
    ("fedem", {"algorithm": {"name": "fedem", "M": 4}}, "3 clients"),
    ("fedavg", {"train": {"cohort": 4}}, "3"),
])
def test_too_few_clients_for_the_method_are_refused_before_any_is_waited_for(
        method: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    wanted = experiment(method, **changes)
    server = flower.MemoryServer({})
    with pytest.raises(UsageError, match=words):
        flower.federate(wanted, server, tmp_path / "server", clients=3)
    assert not (tmp_path / "server").exists()
