"""Where clients are trained. There is no accelerator in most places, so torch's `meta` device stands for
one: it calculates nothing, but refuses to mix its tensors with those of the CPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from descant.algorithms import ALGORITHMS
from descant.core.tree import Tree, leaves
from descant.core.vector import Model
from descant.engine.backends import choose, device, footprint
from descant.engine.settings import Train
from descant.engine.work import Work, to_score
from descant.errors import UsageError
from helpers import MODELS, engine, ragged

META = torch.device("meta")


class There(Work):
    """What has no values cannot come back."""

    def _back(self, values: Tree) -> Tree:
        return values


class Frozen(nn.Module):
    """Has a constant that is not learned, and a layer that goes through autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 4).requires_grad_(False)
        self.second = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.gelu(self.first(x.flatten(1))))


METHODS = ("fedavg", "pfedme", "scaffold", "pfedbred", "fedmap", "pfedgt", "cgpfl")
OTHERS = ("dnn", "conv", "groupnorm", "frozen")
# every method with the simplest model, the hardest and one of the others in turn
PAIRS = [("fedavg", "frozen"), *((method, model) for k, method in enumerate(METHODS)
                                 for model in ("mclr", "batchnorm+dropout", OTHERS[k % len(OTHERS)]))]


@pytest.mark.parametrize(("method", "model"), PAIRS)
def test_all_that_a_chunk_does_is_done_on_the_device(method: str, model: str) -> None:
    network = Frozen() if model == "frozen" else MODELS[model]()
    with engine(ALGORITHMS[method](), ragged(), network) as e:
        work = e.training.work
        there = There(work.algorithm, work.task, work.federation, work.seed, work.batch, work.local, META)
        clients = np.array([0, 1, 3])
        facts = e.training.round_of(clients)
        message, states = there.algorithm.broadcast(e.server, facts), e.training.store.read(clients)
        scored = to_score(message, there.algorithm.global_model(e.server))
        for job, sent in (("local", message), ("score", scored)):
            values, meter = there._together(job, clients, 1, sent, states)
            assert (meter.grad_steps > 0) == (job == "local")
            for name, tensor in leaves(values):
                assert tensor.device == META, name
                assert len(tensor) == len(clients)


def test_results_come_back_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(ALGORITHMS["fedavg"](), ragged(), "mclr") as e:
        work = dataclasses.replace(e.training.work, device=META)
        tree = Model(torch.ones(3, device="cpu"), torch.zeros(0))
        (moved,) = work._there((tree,))
        assert {t.device for _, t in leaves(moved)} == {META}
        back = []
        monkeypatch.setattr("descant.engine.work.map_tree", lambda f, t: back.append(f) or t)
        work._back(moved)
        assert back[0](torch.ones(2)).device.type == "cpu"


def test_chunks_follow_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(ALGORITHMS["fedavg"](), ragged(), "mclr") as e:
        work = e.training.work
        each = footprint.bytes_per_client(work)
        assert each > 8 * work.task.dim * 8
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda where: (20 * each, 40 * each))
        assert device.chunk_by_memory(work) == 10
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda where: (0, 40 * each))
        assert device.chunk_by_memory(work) == 1


@pytest.mark.parametrize(("backend", "chunk", "expected"), [("auto", None, ("vectorised", 3)),
                                                            ("vectorised", 2, ("vectorised", 2)),
                                                            ("loop", None, ("loop", 1))])
def test_the_choice_on_a_device(backend: str, chunk: int | None, expected: tuple[str, int],
                                monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(ALGORITHMS["fedavg"](), ragged(), "mclr") as e:
        e.training.work = dataclasses.replace(e.training.work, device=META)
        e.training.train = dataclasses.replace(e.training.train, backend=backend, chunk=chunk)
        monkeypatch.setattr(choose, "chunk_by_memory", lambda work: 3)
        monkeypatch.setattr(choose, "templates", lambda training: None)
        chosen, settled, measured = choose.make_backend(e.training)[:3]
        assert (settled.backend, chosen.chunk) == expected
        assert not measured


@pytest.mark.parametrize(("given", "what"), [
    ({"device": "cuda"}, r"torch finds no CUDA devices here: use train.device = \"cpu\""),
    ({"device": "cuda:7"}, "torch finds no CUDA"),
    ({"device": "mps"}, "must be \"cpu\" or \"cuda\""),
    ({"device": "cuda", "backend": "processes"}, "runs in one process"),
    ({"device": "cuda", "backend": "ray"}, "runs in one process")])
def test_a_device_that_cannot_be_used(given: dict[str, str], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        device.require_device(Train(**given))  # type: ignore[arg-type]


def test_a_device_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match=r"train.device must be \"cpu\" or \"cuda\", not 'gpu'"):
        Train(device="gpu")
