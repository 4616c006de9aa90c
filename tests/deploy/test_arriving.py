"""Uploads that are added up on their way: no more of them are in memory than fit, whatever comes after which,
and a server comes to the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flower_helpers as flower
from descant.core.sums import Total
from descant.core.tree import Tree, leaves, map_tree
from descant.core.vector import Model
from descant.deploy import arriving as module
from descant.deploy.arriving import Arriving, Spool
from descant.deploy.backend import Rules
from descant.deploy.messages import PackedTensor, WireMessage
from descant.deploy.transport import Payload
from descant.engine.outcome import Outcome
from descant.engine.work import LocalResult
from descant.experiment.run import Run
from flower_helpers import DATA, Answer, MemoryServer, experiment


def upload(seed: int) -> Model:
    rng = np.random.default_rng(seed)
    return Model(*(torch.from_numpy(rng.standard_normal(shape)).to(dtype)
                   for shape, dtype in ((7, torch.float32), ((2, 1), torch.float64))))


@pytest.mark.parametrize("memory", [1, 2**20])
def test_what_is_put_away_comes_back(memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEMORY", memory)
    spool = Spool(upload(0), tmp_path)
    for k in range(5):
        spool.put(k, upload(k))
    assert torch.equal(spool.pop(3).theta, upload(3).theta)
    spool.put(9, upload(9))  # where the other was
    for k in (9, 0, 4, 2, 1):
        found = spool.pop(k)
        assert torch.equal(found.theta, upload(k).theta)
        assert torch.equal(found.stats, upload(k).stats)
    assert len(spool) == 0
    assert not [*tmp_path.iterdir()]  # the file has no name
    spool.close()


def summed(at_once: bool, order: list[int], change: Any = None, dropped: int | None = None
           ) -> tuple[Outcome, list[int]]:
    groups = []

    def add(some: Outcome) -> Outcome:
        groups.append(len(some.done))
        total = Total.of(some.values.upload, torch.from_numpy(some.done + 1.0))
        return some._replace(values=some.values._replace(upload=()), total=total)

    template = LocalResult(upload(0), (), torch.tensor(0.0))
    uploads = Arriving(template, None, add, at_once=at_once)
    for k in order:
        uploads.put(k, LocalResult(upload(k), (), torch.tensor(float(k))))
    if dropped is not None:
        uploads.drop(dropped)
    found = uploads.outcome(change)
    uploads.close()
    return found, groups


@pytest.mark.parametrize("at_once", [False, True])
def test_the_sum_is_the_same_in_any_order(at_once: bool) -> None:
    n = 2 * module.TOGETHER + 3
    rows = [upload(k) for k in range(n)]
    whole = Total.of(Model(*(torch.stack(part) for part in zip(*rows, strict=True))),
                     torch.arange(n, dtype=torch.float64) + 1)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(n).tolist()
        found, groups = summed(at_once, order)
        assert found.total is not None
        assert torch.equal(found.total.parts["theta"].value(), whole.parts["theta"].value())
        assert found.done.tolist() == list(range(n))
        assert found.values.loss.tolist() == list(map(float, range(n)))
        assert max(groups) == module.TOGETHER
        assert found.total.clients == n


@pytest.mark.slow
def test_what_waits_can_be_changed_and_left_out() -> None:
    def halved(position: int, tree: Tree) -> Tree:
        return map_tree(lambda leaf: leaf / 2, tree) if position == 1 else tree

    found, _ = summed(False, [2, 0, 1], halved, dropped=0)
    assert found.total is not None
    expected = 2 * upload(1).theta.double() / 2 + 3 * upload(2).theta.double()
    torch.testing.assert_close(found.total.parts["theta"].value(), expected, rtol=1e-14, atol=1e-15)
    assert found.done.tolist() == [1, 2]


# -- a server ----------------------------------------------------------------------------------------------


def long(answer: Answer) -> Answer:
    """A client whose uploads are a hundred times as large."""

    def reply(payload: Payload) -> Any:
        found = answer(payload)
        assert isinstance(found, Payload)
        message = WireMessage.decode(found)
        if message.facts.get("job") != "local":
            return found
        larger = {name: PackedTensor.of(100 * packed.tensor(name, None))
                  for name, packed in message.tensors.items() if name.startswith("value.upload")}
        return message._replace(tensors={**message.tensors, **larger}).encode()

    return reply


def served(place: Path, method: str, rules: Rules) -> Run:
    answers = flower.make_clients(DATA, place)
    answers["2"] = long(answers["2"])
    return flower.federate(experiment(method), MemoryServer(answers), place / "server", rules=rules,
                           alone=False)


@pytest.mark.parametrize(("method", "clip"), [("fedavg", 3.0), ("fedavg", None), ("scaffold", 3.0)])
@pytest.mark.thorough
def test_a_server_comes_to_the_same_from_a_file_and_by_twos(
        method: str, clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a client that is shortened, or refused where changes are tracked."""
    rules = Rules(deadline=30, clip=clip)
    usual = served(tmp_path / "usual", method, rules)
    monkeypatch.setattr(module, "MEMORY", 1)
    monkeypatch.setattr(module, "TOGETHER", 2)
    sparing = served(tmp_path / "sparing", method, rules)
    for (_, mine), (_, theirs) in zip(leaves(usual.snapshot("last").server),
                                      leaves(sparing.snapshot("last").server), strict=True):
        assert torch.equal(mine, theirs)
    assert [row.get("note") for row in usual.history] == [row.get("note") for row in sparing.history]
    assert [row["rejected"] for row in usual.history] == [row["rejected"] for row in sparing.history]
    if clip is not None:
        told = usual.history[0].get("note") or str(usual.history[0].get("rejections"))
        assert "2" in told


@pytest.mark.thorough
def test_what_all_clients_are_sent_is_in_memory_once(tmp_path: Path) -> None:
    """In the rounds, and in the requests for the personal models."""
    counted: dict[str, set[int]] = {}

    class Looking(MemoryServer):
        def send(self, payloads: Mapping[int, Payload], seconds: float) -> dict[int, str]:
            facts = WireMessage.decode(next(iter(payloads.values()))).facts
            shared = {id(payload.blobs["shared"]) for payload in payloads.values()
                      if "shared" in payload.blobs}
            if shared:
                assert len(payloads) == len(DATA)
                counted.setdefault(facts.get("job", facts["what"]), set()).add(len(shared))
            return super().send(payloads, seconds)

    flower.federate(experiment("fedavg"), Looking(flower.make_clients(DATA, tmp_path)), tmp_path / "server")
    assert counted == {"local": {1}, "score": {1}, "finish": {1}}
