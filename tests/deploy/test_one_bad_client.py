"""One bad participant: whatever it sends and claims, the result is not its own, and the server goes on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flower_helpers as flower
from descant.core.algorithm import Round, at_most
from descant.core.federation import Federation
from descant.core.sample import SampleFormat
from descant.core.splits import SPLITS, Table
from descant.core.tree import leaves
from descant.core.vector import Model
from descant.deploy.backend import Rules
from descant.deploy.messages import PackedTensor, WireMessage
from descant.deploy.protocol import ClientInfo, RemoteExperiment
from descant.deploy.transport import Payload
from descant.engine.uploads import lengths, medians, shortened
from descant.errors import DescantError
from descant.experiment import run as runs
from descant.experiment.config import Experiment
from descant.experiment.run import Setup
from descant.priors.belief import Upload
from descant.priors.gaussian import Tempered
from flower_helpers import DATA, experiment

Change = Callable[[WireMessage], WireMessage]


def lying(change: Change, *jobs: str, what: str = "work") -> Callable[[flower.Answer], flower.Answer]:
    """A client that changes its replies to these jobs."""
    def of(answer: flower.Answer) -> flower.Answer:
        def reply(payload: Payload) -> Any:
            found = WireMessage.decode(answer(payload))  # type: ignore[arg-type]
            is_meant = found.facts["what"] == what and (not jobs or found.facts.get("job") in jobs)
            return (change(found) if is_meant and "failed" not in found.facts else found).encode()

        return reply

    return of


def with_tensors(make: Callable[[str, torch.Tensor], torch.Tensor]) -> Change:
    """Each floating-point tensor of a reply by its name."""
    def change(message: WireMessage) -> WireMessage:
        own = {name: packed.tensor(name, None) for name, packed in message.tensors.items()}
        return message._replace(tensors={
            name: PackedTensor.of(make(name, t) if t.is_floating_point() else t) for name, t in own.items()})

    return change


def uploads(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[flower.Answer], flower.Answer]:
    return lying(with_tensors(lambda name, t: make(t) if ".upload" in name else t), "local", "opening")


def federate(wanted: Experiment, place: Path, lie: Callable[[flower.Answer], flower.Answer], *,
             clients: int = 4, **options: Any) -> tuple[runs.Run, flower.Quiet]:
    """With a liar, client "2" or the last."""
    data = dict(list(DATA.items())[:clients])
    nodes = flower.make_clients(data, place)
    liar = min("2", max(data))
    told = options.pop("observer", None) or flower.Quiet()
    server = flower.MemoryServer(nodes | {liar: lie(nodes[liar])})
    return flower.federate(wanted, server, place / "server", observer=told, alone=False, **options), told


# -- how many uploads a round needs -----------------------------------------------------------------------


def test_only_uploads_that_are_aggregated_count(tmp_path: Path) -> None:
    """With two clients, of whom one sends NaN, the next model would be the other's upload."""
    with pytest.raises(DescantError, match=r"1 of 2 clients were rejected in round 1, which needs at least 2 "
                                           r"uploads; 1: upload.theta is not finite; if the training div"):
        federate(experiment("fedavg"), tmp_path, uploads(lambda t: t * torch.nan), clients=2)


def test_clients_beyond_the_cohort_do_not_count(tmp_path: Path) -> None:
    """Where all participate, all train and upload; those of the cohort are aggregated."""
    wanted = experiment("fedavg", train={"cohort": 2, "participation": "all"})
    cohort = [*runs.start(Setup.of(wanted)).cohort]
    nodes = flower.make_clients(DATA, tmp_path)
    broken = {str(client): uploads(lambda t: t * torch.nan)(nodes[str(client)]) for client in cohort[:1]}
    assert len(cohort) == 2
    with pytest.raises(DescantError, match="at least 2 uploads"):
        flower.federate(wanted, flower.MemoryServer(nodes | broken), tmp_path / "server", alone=False)


@pytest.mark.thorough
def test_whoever_is_refused_is_named_on_the_console(tmp_path: Path) -> None:
    found, told = federate(experiment("fedavg"), tmp_path, uploads(lambda t: t * torch.nan))
    assert ("2", "local", "upload.theta is not finite") in told.of("lost")
    assert found.history[0]["rejections"] == {"2": "upload.theta is not finite"}


# -- what a client counts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "share", "expected"), [
    ([1.0, 2, 3], 0.5, [1.0, 2, 3]),  # as they are
    ([1e10, 3, 4], 0.5, [7.0, 3, 4]),
    ([100.0, 90, 5], 0.4, [10.0, 10, 5]),
    ([5.0, 1], 0.5, [1.0, 1]),
    ([5.0, 1], 0.3, [1.0, 1]),  # too few for that
    ([1.0, 0, 0], 0.5, [1.0, 1, 1]),
    ([7.0], 0.5, [7.0]),
])
def test_a_largest_share(weights: list[float], share: float, expected: list[float]) -> None:
    assert at_most(torch.tensor(weights), share).tolist() == pytest.approx(expected)


def claiming(train: int) -> Callable[[flower.Answer], flower.Answer]:
    """So many training rows, when it is asked and when it joins."""
    def change(message: WireMessage) -> WireMessage:
        if message.facts["what"] == "hello":
            return message._replace(facts=message.facts | {"rows": train + 10})
        return message._replace(facts=message.facts | {"sizes": {"train": train, "validation": 5, "test": 5}})

    return lambda answer: lying(change, what="hello")(lying(change, what="join")(answer))


@pytest.mark.thorough
def test_a_claim_of_a_million_rows_does_not_own_the_model(tmp_path: Path) -> None:
    """The upload says where the model would go."""
    def lie(answer: flower.Answer) -> flower.Answer:
        return claiming(10**6)(uploads(lambda t: t + 1.0)(answer))

    wanted = experiment("fedavg", train={"rounds": 1})
    honest = runs.start(Setup.of(wanted)).snapshot("last").server.theta
    moved = {}
    for share in (0.5, 1.0):
        rules = Rules(deadline=5, clip=None, max_share=share)
        found, told = federate(wanted, tmp_path / str(share), lie, rules=rules)
        moved[share] = float((found.snapshot("last").server.theta - honest).mean())
        assert bool(told.of("noted")) is (share < 1)
    assert moved[1.0] == pytest.approx(1.0, abs=0.05)
    assert moved[0.5] == pytest.approx(0.5, abs=0.05)


def test_whose_rows_are_bounded_is_told(tmp_path: Path) -> None:
    _, told = federate(experiment("fedavg", train={"rounds": 1}), tmp_path, claiming(10**6))
    assert told.of("noted") == [
        ("2 has 99.9 % of the training rows; by rows it counts for 50 % (--max-share)",)]


class Enough(Exception):
    """The server waits."""


class Impatient(flower.Quiet):
    """Ends the server when it waits."""

    def waiting(self, *given: Any) -> None:
        raise Enough


@pytest.mark.parametrize(("facts", "reason"), [
    ({"rows": 10**10}, "it claims 10000000000 rows, and 100000000 are the most"),
    ({"rows": 0}, "it claims 0 rows"), ({"classes": 2_000_000}, "2000000 classes are more than descant "),
    ({"tokens": 2**30}, "1073741824 tokens are more"), ({"shape": [10**6, 10**6]}, "numbers in a sample"),
    ({"target_shape": [2**30]}, "numbers in a target"), ({"shape": [1] * 1000}, "numbers in a sample"),
], ids=["rows", "none", "classes", "tokens", "shape", "target", "dimensions"])
def test_claims_are_bounded_before_anything_is_made_of_them(
        facts: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """Nor is any of it written down: the next start is as if it had not been."""
    def change(message: WireMessage) -> WireMessage:
        own = {name: value for name, value in facts.items() if name == "rows"}
        kind = message.facts["kind"] | {name: value for name, value in facts.items() if name != "rows"}
        return message._replace(facts=message.facts | own | {"kind": kind})

    nodes = flower.make_clients(DATA, tmp_path)
    server, told = flower.MemoryServer(nodes | {"2": lying(change, what="hello")(nodes["2"])}), Impatient()
    with pytest.raises(Enough):
        flower.federate(experiment("fedavg"), server, tmp_path / "server", observer=told)
    [(name, why)] = told.of("refused")
    assert name == "2"
    assert reason in why
    assert not [*(tmp_path / "server").iterdir()]


def test_a_hundred_million_rows_take_no_memory(tmp_path: Path) -> None:
    """They are only claimed. What identifies a run is as if they were there."""
    wanted = experiment("fedavg")
    remote = RemoteExperiment(wanted, SampleFormat((64,), target_dtype="int64", classes=10), 2, "")
    large = remote.federation([ClientInfo("a", 10**8, 1, 1), ClientInfo("b", 1, 1, 1)])
    assert large.train.indices.base is not None
    assert sum(array.nbytes for array in (large.train.offsets, large.train.indices.base)) < 1000
    small = remote.federation([ClientInfo("a", 30, 1, 1), ClientInfo("b", 1, 0, 1)])
    assert small.fingerprint() == Federation.fingerprint(dataclasses.replace(small, **{
        split: Table(np.ascontiguousarray(getattr(small, split).indices), getattr(small, split).offsets)
        for split in SPLITS}))


def test_the_rows_of_joining_are_those_of_the_greeting(tmp_path: Path) -> None:
    def more(message: WireMessage) -> WireMessage:
        return message._replace(facts=message.facts | {"sizes": {"train": 10**6, "validation": 5, "test": 5}})

    with pytest.raises(Enough):
        federate(experiment("fedavg"), tmp_path, lying(more, what="join"), observer=(told := Impatient()))
    [(name, why)] = told.of("refused")
    assert name == "2"
    assert re.fullmatch(r"it cannot join: it said that it has \d+ rows, and joins with 1000010", why)


@pytest.mark.thorough
def test_a_claimed_likelihood_takes_no_more_than_its_share(tmp_path: Path) -> None:
    """FedMAP's weights follow from what clients claim."""
    facts = Round(0, 1, torch.arange(4), torch.ones(4), 4, most=0.5)
    for claim, expected in ((0.0, [0.0, 0.0, 0.5, 0.5]), (1e9, [0.25] * 4)):  # the others underflow
        logs = torch.tensor([-300.0, -200.0, claim, -100.0]).double()
        w = Tempered("omega")(Upload(Model(torch.zeros(4, 1), torch.zeros(4, 0)), log_weight=logs), facts)
        assert w.tolist() == pytest.approx(expected)

    def likely(name: str, t: torch.Tensor) -> torch.Tensor:
        return torch.full_like(t, 1e9) if name.endswith("log_weight") else t

    found, _ = federate(experiment("fedmap"), tmp_path, lying(with_tensors(likely), "local"))
    assert all(row["info"]["weights"]["most"] <= 0.5 for row in found.history)


# -- how far an upload moves the server -------------------------------------------------------------------

SHORTENED = ["fedavg", "cgpfl", "fedpac", "pfedhn", *(
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("globaltrain", "ditto", "fedem", "pfedbayes", "ifca"))]


def distance(found: runs.Run, expected: runs.Run) -> float:
    a, b = (dict(leaves(run.snapshot("last").server)) for run in (found, expected))
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a if a[name].numel())


@pytest.mark.parametrize("method", SHORTENED)
@pytest.mark.thorough
def test_an_upload_is_shortened_to_a_few_times_the_median(method: str, tmp_path: Path) -> None:
    wanted = experiment(method)
    found, _ = federate(wanted, tmp_path, uploads(lambda t: t + 1e6))
    assert [row["note"] for row in found.history] == [
        "shortened to 3 times the median of the round: the updates of 2"] * 3
    assert not any("rejections" in row for row in found.history)
    assert distance(found, runs.start(Setup.of(wanted))) < 50


@pytest.mark.parametrize("method", ["scaffold", "pfedgt"])
@pytest.mark.thorough
def test_a_change_that_is_tracked_is_refused_rather_than_shortened(method: str, tmp_path: Path) -> None:
    """Shortened, it would leave the server's mean and the client's state apart for ever."""
    found, _ = federate(experiment(method), tmp_path, uploads(lambda t: t + 1e6))
    for row in found.history:
        assert {*row["rejections"]} == {"2"}
        assert re.search(r"has length .*, and no more than .* is usual", row["rejections"]["2"])


def test_numbers_whose_squares_overflow_have_a_length(tmp_path: Path) -> None:
    huge = Model(torch.full((4,), 1e200, dtype=torch.float64), torch.zeros(0).double())
    assert lengths(huge, {}) == {"theta": pytest.approx(2e200), "stats": 0.0}
    assert shortened(huge, {}, {"theta": 4.0}).theta.tolist() == pytest.approx([2.0] * 4)
    far = Model(torch.tensor([1.7e308], dtype=torch.float64), torch.zeros(0).double())
    origin = {"theta": torch.tensor([-1.7e308], dtype=torch.float64)}
    assert shortened(far, origin, {"theta": 1e307}).theta.tolist() == pytest.approx([-1.6e308])
    with pytest.raises(DescantError, match=r"its update has norm \S+e\+20\d; the limit is 500"):
        federate(experiment("fedavg"), tmp_path, uploads(lambda t: t + 1e200), clients=2,
                 rules=Rules(deadline=5, max_norm=500.0))


def test_the_median_is_that_of_those_who_send_something() -> None:
    own = [{"theta": 1.0, "log_weight": 5.0}, {"theta": 0.0}, {"theta": 3.0}, {"theta": 2.0}]
    assert medians(own) == {"theta": 2.0}
    assert medians(own[:1] + own[3:]) == {"theta": 2.0}  # of two: nobody can tell who is right


@pytest.mark.parametrize("method", ["scaffold", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("cgpfl", "fedavg", "pfedbred"))])
@pytest.mark.thorough
def test_bounds_that_do_not_bind_change_nothing(method: str, tmp_path: Path) -> None:
    states = []
    for name, rules in (("bound", Rules(deadline=5)), ("free", Rules(deadline=5, clip=None, max_share=1.0))):
        found, _ = federate(experiment(method), tmp_path / name, lambda answer: answer, rules=rules)
        assert not any("note" in row for row in found.history)
        states.append(dict(leaves(found.snapshot("last").server)))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.thorough
def test_a_cluster_that_does_not_exist(tmp_path: Path) -> None:
    """Whatever number a client sends, the server counts it."""
    def change(message: WireMessage) -> WireMessage:
        far = PackedTensor.of(torch.tensor(10**15))
        return message._replace(tensors={**message.tensors, "value.upload.cluster": far})

    found, _ = federate(experiment("ifca"), tmp_path, lying(change, "local"))
    assert found.rounds == 3


# -- tallies ----------------------------------------------------------------------------------------------


def tallied(change: Callable[[torch.Tensor], torch.Tensor], *, which: str = ".personal.validation"
            ) -> Callable[[flower.Answer], flower.Answer]:
    return lying(with_tensors(lambda name, t: change(t) if name.endswith(which) else t), "score",
                 "score_newcomer")


def plus(at: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tally: torch.Tensor) -> torch.Tensor:
        tally = tally.clone()
        tally[at] += value
        return tally

    return change


@pytest.mark.parametrize(("lie", "reason"), [
    (plus(0, 1e9), r"its tally is of 1e\+09 rows, and it has \d+ \(validation\)"),
    (plus(0, torch.nan), "its tally is of nan rows"),
    (plus(1, -1e9), r"its losses add up to -1e\+09"),
    (plus(2, 22_222_222), r"it claims 2.2\S+ right of \d+ rows"),
    (plus(-1, 1e6), "its counts by class contradict each other"),
    (plus(-1, -1e6), "its counts by class contradict each other"),
], ids=["rows", "nan rows", "loss", "right", "right by class", "negative"])
def test_tallies_are_of_the_rows_with_which_a_client_joined(
        lie: Callable[[torch.Tensor], torch.Tensor], reason: str, tmp_path: Path) -> None:
    found, told = federate(experiment("fedavg", train={"rounds": 2}), tmp_path, tallied(lie))
    [(name, job, why)] = told.of("lost")
    assert (name, job) == ("2", "score")
    assert re.search(reason, why)
    assert found.history[-1]["personal"]["val"]["accuracy"]["mean"] <= 1
    assert found.history[-1]["personal"]["failed"] == 1


def test_tallies_of_real_targets() -> None:
    task = Setup.of(Experiment.parse({"data": {"dataset": "fedmap_linear"}, "model": {"name": "mclr"},
                                      "algorithm": {"name": "fedavg"}})).task
    sound = torch.tensor([4.0, 2.0, 2.0, 4.0, 6.0]).double()
    assert task.flaw(sound, 4) is None
    assert "squared errors add up to -1" in str(task.flaw(sound + torch.tensor([0, 0, -3.0, 0, 0]), 4))
    assert "sums of its targets" in str(task.flaw(sound + torch.tensor([0, 0, 0, 4.0, 0]), 4))
