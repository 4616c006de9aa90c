"""Scores ride with the next round's training: no exchange of their own, and nothing else is different."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import flower_helpers as flower
from descant.core.privacy.settings import Privacy
from descant.core.tree import leaves
from descant.deploy.backend import Rules
from descant.deploy.messages import PackedTensor, WireMessage
from descant.deploy.riders import RIDER, apart, together
from descant.deploy.transport import Payload
from descant.engine.selection import idle
from descant.experiment import run as runs
from descant.experiment.config import Experiment
from descant.experiment.run import Run, Setup
from flower_helpers import DATA, Answer, experiment

ROUNDS = 3


def wanted(method: str = "ditto", **train: Any) -> Experiment:
    """Every round is evaluated."""
    return experiment(method, train={"rounds": ROUNDS} | train, eval={"every": 1})


def asked(payload: Payload) -> list[tuple[str, int]]:
    """The work in a request, as it is done: what rides first."""
    facts = WireMessage.decode(payload).facts
    parts = [facts.get(RIDER), facts] if RIDER in facts else [facts]
    return [(part["job"], part["number"]) for part in parts if "job" in part]


def noted(answer: Answer, notes: list[list[tuple[str, int]]]) -> Answer:
    def reply(payload: Payload) -> Any:
        if found := asked(payload):
            notes.append(found)
        return answer(payload)

    return reply


def federate(made: Experiment, place: Path, change: Any = None, **options: Any
             ) -> tuple[Run, dict[str, list[list[tuple[str, int]]]]]:
    """A run, and what each client was asked for; `change` changes a client's answer."""
    answers, notes = flower.make_clients(DATA, place), {name: [] for name in DATA}
    if change is not None:
        answers["2"] = change(answers["2"])
    server = flower.MemoryServer({name: noted(answer, notes[name]) for name, answer in answers.items()})
    options = {"alone": False, "rules": Rules(deadline=5)} | options
    return flower.federate(made, server, place / "server", **options), notes


def figures(run: Run) -> list[Any]:
    return [{key: row[key] for key in ("loss", "personal", "global", "rejected") if key in row}
            for row in run.history]


def same_bits(found: Run, expected: Run) -> None:
    ours, theirs = (dict(leaves(run.snapshot("last").server)) for run in (found, expected))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert figures(found) == figures(expected)
    assert (found.best_round, found.best_key) == (expected.best_round, expected.best_key)


@pytest.mark.thorough
def test_an_evaluation_costs_no_exchange_of_its_own(tmp_path: Path) -> None:
    """The figures are of the round's own models, as in the simulation; those of the last round come too."""
    found, notes = federate(wanted(), tmp_path)
    for own in notes.values():
        assert own == [[("local", 1)], [("score", 1), ("local", 2)], [("score", 2), ("local", 3)],
                       [("score", 3)]]
    expected = runs.start(Setup.of(wanted()))
    for mine, theirs in zip(found.history, expected.history, strict=True):
        for split in ("val", "test"):
            for name, spread in theirs["personal"][split].items():
                assert mine["personal"][split][name] == pytest.approx(spread, abs=1e-10)
    assert found.best_round == expected.best_round


@pytest.mark.thorough
def test_who_never_took_part_is_scored_in_the_same_exchange(tmp_path: Path) -> None:
    """Whether they train next or not: a client is asked at most once between two rounds."""
    made = wanted(cohort=2)
    found, notes = federate(made, tmp_path)
    assert found.history[0]["personal"]["newcomers"] == 2
    for own in notes.values():
        scored = [number for request in own for job, number in request if job.startswith("score")]
        assert scored == [1, 2, 3]
        assert len(own) <= ROUNDS + 1
    expected = runs.start(Setup.of(made))
    assert found.history[0]["personal"]["test"]["loss"]["mean"] == pytest.approx(
        expected.history[0]["personal"]["test"]["loss"]["mean"], abs=1e-10)


class Killed(KeyboardInterrupt):
    pass


class Killing(flower.Quiet):
    """Ends the server at its n-th step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def __getattr__(self, name: str) -> Any:
        tell = super().__getattr__(name)

        def maybe(*given: Any) -> None:
            tell(*given)
            self.step -= name in ("asked", "answered", "played")
            if self.step == 0:
                raise Killed

        return maybe


@pytest.fixture(scope="module", params=[0.0, pytest.param(0.2, marks=pytest.mark.slow)])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
          ) -> tuple[Experiment, Run, Path]:
    """A run that nothing disturbed, and where it is. Without validation rows no best round is kept, so that
    nothing but the committed round keeps a client's state."""
    place = tmp_path_factory.mktemp("whole")
    made = experiment("ditto", data={"validation": request.param}, eval={"every": 1})
    return made, federate(made, place)[0], place


# asked, four answers, asked, four answers to scores and training, played, ...: 6 to 10 are between the
# training for round 2 and the commit of round 1, 12 to 16 those for 3 and of 2
@pytest.mark.parametrize("step", [10, 14, *(
    pytest.param(step, marks=pytest.mark.slow) for step in (1, 6, 8, 11, 12, 13, 16, 17, 21, 22))])
@pytest.mark.thorough
def test_a_server_that_is_killed_anywhere_comes_to_the_same_bits(
        step: int, whole: tuple[Experiment, Run, Path], tmp_path: Path) -> None:
    """Also where clients have trained for a round whose predecessor was never committed."""
    (made, expected, undisturbed), place = whole, tmp_path
    answers = flower.make_clients(DATA, place)
    with pytest.raises(KeyboardInterrupt):
        flower.federate(made, flower.MemoryServer(answers), place / "server", observer=Killing(step),
                        alone=False)
    again = flower.make_clients(DATA, place)  # the clients are restarted, too
    same_bits(flower.federate(made, flower.MemoryServer(again), place / "server", alone=False), expected)
    for name in DATA:
        models = [(base / name / "model.safetensors").read_bytes() for base in (undisturbed, place)]
        assert models[0] == models[1]


@pytest.mark.thorough
def test_nobody_trains_for_a_round_that_an_evaluation_may_prevent(tmp_path: Path) -> None:
    """With patience, scores ride only as long as they cannot end the run."""
    made = experiment("fedavg", algorithm={"solver": {"lr": 1e-9}}, train={"rounds": 40, "patience": 2},
                      eval={"every": 1})
    found, notes = federate(made, tmp_path)
    expected = runs.start(Setup.of(made))
    assert found.is_converged
    assert found.rounds == expected.rounds < 40
    for own in notes.values():
        trained = [number for request in own for job, number in request if job == "local"]
        assert trained == list(range(1, found.rounds + 1))
        for request in own:
            number = request[0][1]
            may_end = number == 40 or idle(found.history[: number - 1], found.setup.deciding.name) + 1 >= 2
            assert len(request) == (1 if request[0][0] == "local" or may_end else 2)
    assert any(len(request) == 2 for request in notes["0"])


@pytest.mark.thorough
def test_what_is_wrong_with_scores_does_not_concern_the_training(tmp_path: Path) -> None:
    """And the other way round."""
    def without_scores(answer: Answer) -> Answer:
        def reply(payload: Payload) -> Any:
            found = WireMessage.decode(answer(payload))  # type: ignore[arg-type]
            if asked(payload) == [("score", 1), ("local", 2)]:
                return apart(found, 2)[1].encode()
            if asked(payload) == [("score", 2), ("local", 3)]:
                scored, trained = apart(found, 2)
                return together([scored, WireMessage({**trained.facts, "failed": "no"})]).encode()
            return found.encode()

        return reply

    found, _ = federate(wanted(), tmp_path, without_scores)
    first, second, third = found.history
    assert first["personal"]["failed"] == 1
    assert second["rejected"] == 0, "its training for round 2 counts"
    assert second["personal"]["failed"] == 0, "its scores of round 2 count"
    assert third["rejections"] == {"2": "it failed: no"}


@pytest.mark.thorough
def test_false_tallies_that_ride_choose_no_round(tmp_path: Path) -> None:
    def boasting(answer: Answer) -> Answer:
        def reply(payload: Payload) -> Any:
            found = WireMessage.decode(answer(payload))  # type: ignore[arg-type]
            if len(asked(payload)) == 2:
                found = found._replace(tensors={
                    name: PackedTensor.of(packed.tensor(name, None) * 1000) if "scores_" in name else packed
                    for name, packed in found.tensors.items()})
            return found.encode()

        return reply

    observer = flower.Quiet()
    found, _ = federate(wanted(), tmp_path, boasting, observer=observer)
    assert [row["personal"]["failed"] for row in found.history] == [1, 1, 0]
    assert [row["rejected"] for row in found.history] == [0, 0, 0]
    assert {name for name, job, _ in observer.of("lost") if job == "score"} == {"2"}


@pytest.mark.thorough
def test_training_does_not_ride(tmp_path: Path) -> None:
    """A client is asked to train by a request of its own, which it counts."""
    answer, kept = flower.make_clients(DATA, tmp_path)["0"], []

    def keeping(payload: Payload) -> Any:
        kept.append(WireMessage.decode(payload))
        return answer(payload)

    server = flower.MemoryServer(flower.make_clients(DATA, tmp_path) | {"0": keeping})
    flower.federate(wanted(), server, tmp_path / "server", alone=False)
    both = next(request for request in kept if RIDER in request.facts)
    scored, trained = apart(both, 2)
    reply = WireMessage.decode(answer(together([trained, scored]).encode()))  # type: ignore[arg-type]
    assert reply.facts[RIDER]["failed"] == "Rejected"
    assert "failed" not in reply.facts


@pytest.mark.parametrize("kind", ["secure", "privacy"])
@pytest.mark.thorough
def test_where_training_spends_something_nothing_rides(kind: str, tmp_path: Path) -> None:
    """A second sum of a round cannot be had, and a reply that is not used spends privacy all the same."""
    made, rules = wanted("fedavg", local={"epochs": 1}), Rules(deadline=5)
    if kind == "privacy":
        private = Privacy(noise=1.0, sampling="known", figures="told")
        made = dataclasses.replace(made, privacy=private)
    else:
        rules = Rules(deadline=5, secure=True, threshold=3)
    found, notes = federate(made, tmp_path, rules=rules)
    assert all(len(request) == 1 for own in notes.values() for request in own)
    assert all("personal" in row for row in found.history)
