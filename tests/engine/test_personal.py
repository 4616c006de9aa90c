"""A client's personal model: broadcast and personalize for who took part, else newcomer and adapt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import descant
from descant.algorithms import Ditto, FedAvg
from descant.core.algorithm import Message
from descant.core.tree import take
from descant.core.vector import Model
from descant.engine.personal import job_for, message_for, personal_model, personal_models
from descant.engine.rounds import Training
from descant.errors import DescantError
from descant.models import make_task
from descant.models.module import ModuleTask
from descant.priors.solve import SGD
from helpers import assert_same, engine, ragged


class Fails(FedAvg):
    """On the newcomer with the most rows."""

    def personalize(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        return message.shared

    def adapt(self, task: Any, message: Message, data: Any) -> Any:
        if float(data.size) == max(ragged().train.sizes):
            raise ValueError("too many rows")
        return message.shared


def test_the_jobs_of_a_client() -> None:
    assert [job_for(False), job_for(True)] == ["personalize", "adapt"]
    assert [job_for(False, score=True), job_for(True, score=True)] == ["score", "score_newcomer"]


@pytest.mark.parametrize("backend", ["loop", "vectorised"])
def test_alone_in_groups_and_by_the_engine(backend: str) -> None:
    """Clients that took part in one round of a cohort of 2, and those that did not."""
    with engine(Ditto(solver=SGD(lr=0.05)), ragged(), cohort=2, backend=backend) as e:
        e.play(1)
        snapshot, here = e.training.snapshot, e.training.work
        took_part = snapshot.store.took_part(e.everyone)
        assert 0 < took_part.sum() < len(e.everyone)
        found: dict[int, Any] = {}
        for at, outcome in personal_models(e.backend, snapshot, e.everyone[1:], at_once=2):
            assert len(at) <= 2
            assert len({*took_part[e.everyone[1:][at]]}) == 1  # one kind of clients at a time
            found |= {int(k): take(outcome.values, j) for j, k in enumerate(at[outcome.done])}
        assert sorted(found) == list(range(len(e.everyone) - 1))
        for client in e.everyone[1:].tolist():
            one = personal_model(here, snapshot, client)
            assert_same(found[client - 1], one, 1e-12)
            facts = here.round_of(np.array([client]), 1)
            rule = e.training.work.algorithm
            message = (rule.broadcast if took_part[client] else rule.newcomer)(e.server, facts)
            job: Any = "personalize" if took_part[client] else "adapt"
            own = here.execute(job, np.array([client]), 1, message, snapshot.store.read(np.array([client])))
            assert_same(one, take(own.values, 0))
            given = message_for(rule, e.server, facts, not took_part[client], score=True)
            assert_same(given.shared.message, message.shared)
            assert_same(given.shared.model, e.model)
        scored = e.score().personal.test[3]
        figures = here.task.figures(personal_model(here, snapshot, 3, score=True).personal.test)
        torch.testing.assert_close(figures, scored)


def test_a_client_that_fails_is_named() -> None:
    largest = int(ragged().train.sizes.argmax())
    run = descant.run(Fails(), federation=ragged(), rounds=1, cohort=1, backend="loop", eval={"clients": 1})
    assert not run.snapshot("last").store.took_part(np.array([largest]))[0]
    assert isinstance(run.personal((largest + 1) % 5, "last"), Model)
    with pytest.raises(DescantError, match=f"^client {largest} cannot be personalized: ValueError: too many"):
        run.personal(largest, "last")


@pytest.mark.parametrize("out", [False, True])
def test_a_run_has_one_training_and_its_backend_the_same_work(out: bool, tmp_path: Any,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Training] = []
    init = Training.__init__

    def counted(self: Training, *args: Any) -> None:
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(Training, "__init__", counted)
    played: list[Any] = []
    play = Training.play
    monkeypatch.setattr(Training, "play", lambda self, backend: (
        played.append(backend.work), play(self, backend))[1])
    settings: dict[str, Any] = {"federation": ragged(), "backend": "loop",
                                "out": tmp_path / "run" if out else None}
    run = descant.run(FedAvg(), rounds=1, **settings)
    assert [each.work is run.work for each in made] == [True]
    assert [each is run.work for each in played] == [True]
    if out:
        made.clear()
        assert descant.run(FedAvg(), rounds=2, resume=True, **settings).rounds == 2
        assert len(made) == 1


def test_a_fitted_task_is_another_one() -> None:
    """Fitting a task to a federation changes nothing of the task."""
    federation = ragged(classes=None, shape=(4,)).to(torch.float64)

    def absolute(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (outputs.reshape(y.shape) - y).abs()

    class Scaled(torch.nn.Module):  # no chain of known layers, so that it is tried
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(federation.x.shape[1], 1)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.seen += 1
            return self.linear(x)

    task = ModuleTask(Scaled(), absolute, dtype=torch.float64)
    before = dict(vars(task))
    fitted = make_task(task, federation, dtype=torch.float64)
    assert vars(task) == before
    assert task.metric_names == ("loss",)
    assert fitted.metric_names == ("loss", "mse", "r2")
    assert isinstance(fitted, ModuleTask)
    assert [s.name for s in fitted.layout.statistics] == ["seen"]
    assert not task.layout.statistics


def test_pooled_figures_are_those_of_all_test_rows() -> None:
    federation = ragged()
    with engine(FedAvg(), federation, "mclr", backend="vectorised", batch=4, local={"steps": 2}) as e:
        e.play()
        scores = e.score()
        assert scores.shared is not None
        assert scores.pooled is not None
        sizes = torch.from_numpy(federation.test.sizes).double()
        losses = scores.shared.test[:, 0].nan_to_num()  # client 1 has no test rows
        torch.testing.assert_close(scores.pooled[0], (sizes * losses).sum() / sizes.sum())
