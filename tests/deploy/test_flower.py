"""The same algorithms on remote clients: the same numbers as in simulation, and nobody trusted."""

from __future__ import annotations

import json
import random
import re
import shutil
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import descant
import flower_helpers as flower
from descant.algorithms import ALGORITHMS
from descant.core.algorithm import Message
from descant.core.tree import leaves, take
from descant.core.vector import Model
from descant.deploy.backend import Rules
from descant.deploy.client_directory import ClientStates
from descant.deploy.client_manager import FRESH, ClientManager
from descant.deploy.messages import PackedTensor, WireMessage
from descant.deploy.protocol import received_experiment, tables_of
from descant.deploy.transport import NoReply, Payload, Rejected
from descant.engine.backends.base import InProcess
from descant.engine.backends.choose import templates
from descant.engine.outcome import Outcome
from descant.engine.rounds import Training
from descant.errors import DescantError, UsageError
from descant.experiment import run as runs
from descant.experiment.config import Experiment
from descant.experiment.run import Setup
from flower_helpers import CLIENTS, DATA, experiment
from helpers import assert_same

pytestmark = pytest.mark.thorough

STATEFUL = ["scaffold", "pfedgt", "cgpfl", "ditto", "pfedbred"]


def simulated(wanted: Experiment) -> runs.Run:
    return runs.start(Setup.of(wanted))


def on_clients(wanted: Experiment, place: Path, **options: Any) -> tuple[runs.Run, Any]:
    server = flower.MemoryServer(flower.make_clients(DATA, place))
    return flower.federate(wanted, server, place / "server", **options), server


def rules(method: str) -> Rules:
    """FedMAP's weights follow from what clients claim, and mostly give one of them all of it. In the other
    methods no bound of the server binds here."""
    return Rules(deadline=5, max_share=1.0 if method == "fedmap" else Rules.max_share)


def personal_tensors(run: runs.Run, client: int) -> tuple[torch.Tensor, ...]:
    """What the simulator's client predicts with, in the order of the names."""
    personal = run.personal(client)
    if isinstance(personal, Model):
        tensors: dict[str, torch.Tensor] = run.personal_model(client).state_dict()
    else:
        tensors = dict(leaves(personal))
    return tuple(tensors[name] for name in sorted(tensors))


def flat(table: Any, path: str = "") -> dict[str, float]:
    """The numbers of nested tables."""
    if not isinstance(table, dict):
        return {path: table}
    return {name: value for key, inner in table.items()
            for name, value in flat(inner, f"{path}.{key}").items()}


def assert_same_run(found: runs.Run, expected: runs.Run, tolerance: float) -> None:
    assert_same(found.snapshot("last").server, expected.snapshot("last").server, tolerance)
    assert found.best_round == expected.best_round
    for mine, theirs in zip(found.history, expected.history, strict=True):
        for key in ("grad_steps", "participants", "bytes_down", "bytes_up", "rejected"):
            assert mine[key] == theirs[key]
        for key in ("personal", "global"):
            assert flat(mine.get(key, {})) == pytest.approx(flat(theirs.get(key, {})), abs=tolerance)


def assert_same_model(place: Path, expected: runs.Run, client: int) -> None:
    """What a client has kept is what the simulator's predicts with."""
    own = load_file(place / "model.safetensors")
    assert_same(tuple(own[name] for name in sorted(own)), personal_tensors(expected, client), 1e-10)


def some(quick: int, *methods: str) -> Any:
    """The first of them quickly."""
    return pytest.mark.parametrize("method", [*methods[:quick], *(
        pytest.param(method, marks=pytest.mark.slow) for method in methods[quick:])])


# quickly those with states of clients, and those whose server sends or keeps more than a model
QUICK = (*STATEFUL, "fedavg", "fedmap", "fedem", "pfedhn")


@some(len(QUICK), *QUICK, *(name for name in ALGORITHMS if name not in QUICK))
def test_nodes_and_a_newcomer_get_what_the_simulator_gives(method: str, tmp_path: Path) -> None:
    """In a cohort of some, in which clients keep their states until a later round."""
    wanted = experiment(method, data={"clients": CLIENTS + 1, "unseen": 1}, train={"cohort": 2})
    expected = simulated(wanted)
    *names, newcomer = expected.setup.federation.names
    assert names == sorted(names)
    data = {name: f"digits:{name}" for name in (*names, newcomer)}
    server = flower.MemoryServer(flower.make_clients(data, tmp_path))
    server.offline.add(newcomer)

    class Coming(flower.Quiet):
        def played(self, row: dict[str, Any]) -> None:
            server.offline.discard(newcomer)

    observer = Coming()
    found = flower.federate(wanted, server, tmp_path / "server", clients=CLIENTS, observer=observer,
                            alone=False, rules=rules(method))
    assert_same_run(found, expected, 1e-10)
    for client, name in enumerate((*names, newcomer)):
        assert_same_model(tmp_path / name, expected, client)
    assert newcomer in dict(observer.of("served"))


@some(2, *STATEFUL)
def test_nodes_that_all_take_part_have_their_states_at_hand(method: str, tmp_path: Path) -> None:
    wanted = experiment(method, train={"cohort": "all"})
    expected = simulated(wanted)
    found, _ = on_clients(wanted, tmp_path, alone=False, rules=rules(method))
    assert_same_run(found, expected, 1e-10)
    for client in range(CLIENTS):
        assert_same_model(tmp_path / str(client), expected, client)


@some(1, "scaffold", "cgpfl", "pfedgt", "fedavg", "pfedme", "fedmap")
def test_running_statistics_travel_too(method: str, tmp_path: Path) -> None:
    place = "flower_helpers:batchnorm"
    # one by one, as nodes are: of the rounding in a bias before BatchNorm Adam makes whole steps
    wanted = experiment(method, model={"name": place}, train={"backend": "loop"})
    server = flower.MemoryServer(flower.make_clients(DATA, tmp_path, allow=["flower_helpers"]))
    found = flower.federate(wanted, server, tmp_path / "server", alone=False, rules=rules(method))
    assert_same_run(found, simulated(wanted), 1e-10)


@pytest.mark.slow
def test_a_row_passes_frozen_layers_once_on_its_node(tmp_path: Path) -> None:
    passed = []
    for rounds in (2, 5):
        wanted = experiment("ditto", model={"name": "flower_helpers:frozen"}, train={"rounds": rounds},
                            eval={"every": 5})
        place = tmp_path / str(rounds)
        server = flower.MemoryServer(flower.make_clients(DATA, place, allow=["flower_helpers"]))
        flower.Counted.rows = 0
        found = flower.federate(wanted, server, place / "server", alone=False)
        passed.append(flower.Counted.rows)
    assert passed[0] == passed[1]  # trials of the network, and each row
    expected = simulated(wanted)
    assert_same_run(found, expected, 1e-10)
    for client in range(CLIENTS):
        assert_same_model(place / str(client), expected, client)


@some(2, "pfedbred", "fedmap", "fedavg", "scaffold", "cgpfl", "pfedgt")
def test_in_single_precision_too(method: str, tmp_path: Path) -> None:
    wanted = experiment(method, train={"dtype": "float32", "rounds": 1})
    found, _ = on_clients(wanted, tmp_path, alone=False, rules=rules(method))
    assert_same_run(found, simulated(wanted), 1e-5)


COLUMNS = """
[data]
dataset = "{folder}"
scale = "client"
impute = "client"
[schema]
target = "ill"
classes = ["no", "yes"]
[schema.columns]
age = "number"
sex = ["f", "m"]
note = "ignore"
[algorithm]
name = "fedmap"
[train]
rounds = 2
dtype = "float64"
backend = "loop"
local = {{ steps = 2 }}
"""


def write_hospitals(folder: Path) -> dict[str, str]:
    """Three files as hospitals have them, one with an empty cell."""
    folder.mkdir()
    rng, files = random.Random(0), {}
    for k, name in enumerate(("north", "south", "west")):
        rows = [f"{rng.gauss(50 + 5 * k, 9):.1f},{rng.choice('fm')},x,{rng.choice(['no', 'yes'])}"
                for _ in range(20 + 7 * k)]
        rows[3] = ",f,x,yes"
        path = folder / f"{name}.csv"
        path.write_text("\n".join(["age,sex,note,ill", *rows]) + "\n")
        files[name] = str(path)
    return files


def test_files_of_their_own(tmp_path: Path) -> None:
    """Each hospital's file on its own machine gives what a folder with all of them gives in simulation."""
    files = write_hospitals(tmp_path / "hospitals")
    (tmp_path / "own.toml").write_text(COLUMNS.format(folder="./hospitals"))
    expected = simulated(Experiment.load(tmp_path / "own.toml"))
    away = Experiment.load(tmp_path / "own.toml", ["data.dataset=nodes"])
    server = flower.MemoryServer(flower.make_clients(files, tmp_path))
    found = flower.federate(away, server, tmp_path / "server", rules=rules("fedmap"))
    assert_same_run(found, expected, 1e-10)
    with pytest.raises(UsageError, match="`descant server`"):
        simulated(away)
    # what was done to the rows is in the manifest, for those that come later
    federation = expected.setup.federation
    for client, (name, path) in enumerate(files.items()):
        constants = json.loads((tmp_path / name / "model.json").read_text())["preprocess"]
        fill, mean, std = (torch.tensor(constants[part]).double() for part in ("fill", "mean", "std"))
        raw = torch.from_numpy(away.data.schema.read(path)[0]).double()
        done = (raw.where(~raw.isnan(), fill) - mean) / std
        own = np.concatenate([federation.split(split)[client] for split in ("train", "validation", "test")])
        assert_same(done, federation.x[torch.from_numpy(np.sort(own))], 1e-6)


@pytest.mark.slow
def test_what_each_is_worth_is_told(tmp_path: Path) -> None:
    observer = flower.Quiet()
    run, _ = on_clients(experiment("ditto", train={"rounds": 8}), tmp_path, observer=observer)
    served = dict(observer.of("served"))
    assert {*served} == {*DATA}
    kept = json.loads((tmp_path / "server" / "clients.json").read_text())
    assert kept == served
    alone = simulated(experiment("localtrain", train={"rounds": run.snapshot("best").number}))
    for figures in served.values():
        assert {*figures} == {"personal", "shared", "alone"}
        assert 0 <= figures["personal"]["accuracy"] <= 1
    mean = statistics.mean(figures["alone"]["accuracy"] for figures in served.values())
    best = alone.history[(alone.best_round or alone.rounds) - 1]
    assert mean == pytest.approx(best["personal"]["test"]["accuracy"]["mean"], abs=0.2)


# -- clients that are not there ---------------------------------------------------------------------------


class Absent(InProcess):
    """The simulator's loop, without the clients that are not there in a round."""

    def __init__(self, work: Any, absent: dict[int, set[int]]) -> None:
        super().__init__(work, 1)
        self._absent = absent

    def run(self, job: Any, clients: np.ndarray, number: int, message: Any, states: Any, adding: Any = None
            ) -> Outcome:
        outcome = super().run(job, clients, number, message, states)
        absent = self._absent.get(number, set()) if job == "local" else set()
        gone = [k for k, client in enumerate(clients) if client in absent]
        done = np.setdiff1d(outcome.done, gone)
        return outcome._replace(done=done, values=take(outcome.values, torch.from_numpy(done)),
                                failed=dict.fromkeys(gone, "absent"))


def simulated_without(wanted: Experiment, absent: dict[int, set[int]], out: Path) -> runs.Run:
    setup = Setup.of(wanted)

    def backend(run: runs.Run) -> Absent:
        templates(Training(run.work, setup.train))
        return Absent(run.work, absent)

    return runs.lead(setup, out, backend, runs.Silent())


@some(2, *STATEFUL)
def test_an_answer_that_is_lost_has_not_happened(method: str, tmp_path: Path) -> None:
    """Client 2 works in round 2, and its answer is lost: its new state must not count, and it goes on from
    the one before."""
    wanted = experiment(method)
    expected = simulated_without(wanted, {2: {2}}, tmp_path / "simulated")
    nodes = flower.make_clients(DATA, tmp_path)
    answer = nodes["2"]

    def late(content: Any) -> Any:
        found, facts = answer(content), WireMessage.decode(content).facts
        return None if (facts.get("job"), facts.get("number")) == ("local", 2) else found

    server = flower.MemoryServer(nodes | {"2": late})
    found = flower.federate(wanted, server, tmp_path / "server", alone=False, rules=Rules(deadline=0.3))
    assert_same(found.snapshot("last").server, expected.snapshot("last").server, 1e-10)
    assert found.history[1]["rejections"] == {"2": "no reply within 0.3 s"}
    mine, theirs = (flat(run.history[2]["personal"]) for run in (found, expected))
    assert mine == pytest.approx(theirs, abs=1e-10)


@pytest.mark.slow
def test_whoever_comes_back_takes_part_again(tmp_path: Path) -> None:
    wanted = experiment("scaffold", train={"rounds": 4})
    expected = simulated_without(wanted, {2: {1}, 3: {1}}, tmp_path / "simulated")
    server = flower.MemoryServer(flower.make_clients(DATA, tmp_path))

    class Away(flower.Quiet):
        def played(self, row: dict[str, Any]) -> None:
            (server.offline.add if row["round"] in (1, 2) else server.offline.discard)("1")
            time.sleep(FRESH)

    found = flower.federate(wanted, server, tmp_path / "server", observer=Away(), alone=False)
    assert [row.get("rejections") for row in found.history] == [None, *[{"1": "not connected"}] * 2, None]
    assert_same(found.snapshot("last").server, expected.snapshot("last").server, 1e-10)


@pytest.mark.slow
def test_a_round_waits_for_as_many_as_it_needs(tmp_path: Path) -> None:
    wanted = experiment("fedavg")
    server = flower.MemoryServer(flower.make_clients(DATA, tmp_path))

    class Away(flower.Quiet):
        def played(self, row: dict[str, Any]) -> None:
            if row["round"] == 1:
                server.offline.update("012")
                time.sleep(FRESH)

        def waiting(self, there: int, needed: int, missing: Any) -> None:
            self.told.append(("waiting", there, needed, missing))
            if len(self.of("waiting")) == 3:
                server.offline.discard("1")

    observer = Away()
    found = flower.federate(wanted, server, tmp_path / "server", observer=observer, alone=False,
                            rules=Rules(deadline=5, at_least=2))
    assert observer.of("waiting")[0] == (1, 2, ["0", "1", "2"])
    assert {*found.history[1]["rejections"]} == {"0", "2"}
    with pytest.raises(UsageError, match=r"at least 5 clients .* but there are 4: lower it"):
        flower.federate(wanted, server, tmp_path / "other", rules=Rules(at_least=5))


def test_a_restarted_client_goes_on(tmp_path: Path) -> None:
    """Another process with the same directory: the state is there, and it need not join again."""
    wanted = experiment("pfedgt")
    server = flower.MemoryServer(flower.make_clients(DATA, tmp_path))

    class Restarting(flower.Quiet):
        def played(self, row: dict[str, Any]) -> None:
            server.answers |= flower.make_clients(DATA, tmp_path)
            server.since = dict.fromkeys(server.ids, row["round"])

    found = flower.federate(wanted, server, tmp_path / "server", observer=Restarting(), alone=False)
    assert_same_run(found, simulated(wanted), 1e-10)


def test_a_client_that_lost_its_directory_is_refused_until_it_has_it_back(tmp_path: Path) -> None:
    wanted = experiment("scaffold", train={"rounds": 4}, eval={"every": 4})
    expected = simulated_without(wanted, {2: {3}}, tmp_path / "simulated")
    server, told = flower.MemoryServer(flower.make_clients(DATA, tmp_path)), flower.Quiet()

    class Losing(flower.Quiet):
        def played(self, row: dict[str, Any]) -> None:
            own, aside = tmp_path / "3", tmp_path / "aside"
            if row["round"] == 1:
                own.rename(aside)
                server.answers |= flower.make_clients({"3": DATA["3"]}, tmp_path, told)
            if row["round"] == 2:
                shutil.rmtree(own)
                aside.rename(own)
                server.answers |= flower.make_clients({"3": DATA["3"]}, tmp_path)

    found = flower.federate(wanted, server, tmp_path / "server", observer=Losing(), alone=False)
    assert found.history[1]["rejections"] == {"3": "it failed: DescantError"}
    assert any("the state of round 1 is not in" in str(error) for _, error in told.of("failed"))
    assert_same(found.snapshot("last").server, expected.snapshot("last").server, 1e-10)


# -- a server that is killed ------------------------------------------------------------------------------


class Killed(KeyboardInterrupt):
    pass


@pytest.mark.parametrize("at", [
    ("answered", "local", 5), *(pytest.param(at, marks=pytest.mark.slow)
                                for at in (("answered", "score", 2), ("asked", "local", 2)))])
@some(2, *STATEFUL)
def test_a_server_that_is_killed_continues(method: str, at: tuple[str, str, int], tmp_path: Path) -> None:
    """In the middle of a round, of an evaluation (states are made, and nothing is committed), between."""
    wanted = experiment(method)
    what, job, count = at

    class Killing(flower.Quiet):
        def __getattr__(self, name: str) -> Any:
            tell = super().__getattr__(name)

            def maybe(*given: Any) -> None:
                tell(*given)
                if name == what and sum(job in told for told in self.told if told[0] == what) == count:
                    raise Killed

            return maybe

    server = flower.MemoryServer(flower.make_clients(DATA, tmp_path))
    with pytest.raises(KeyboardInterrupt):
        flower.federate(wanted, server, tmp_path / "server", observer=Killing(), alone=False)
    found = flower.federate(wanted, server, tmp_path / "server", alone=False)
    assert_same_run(found, simulated(wanted), 1e-10)


def test_another_federation_is_not_continued(tmp_path: Path) -> None:
    _, server = on_clients(experiment("fedavg"), tmp_path, alone=False)
    with pytest.raises(UsageError, match="of another experiment: restore that one"):
        flower.federate(experiment("ditto"), server, tmp_path / "server")
    with pytest.raises(UsageError, match="of 4 clients, not 3: start it with --clients 4"):
        flower.federate(experiment("fedavg"), server, tmp_path / "server", clients=3)
    wanted = experiment("fedavg", train={"rounds": 5})
    observer = flower.Quiet()
    longer = flower.federate(wanted, server, tmp_path / "server", alone=False, observer=observer)
    assert {*dict(observer.of("served"))} == {*DATA}, "the models of the longer training"
    assert_same(longer.snapshot("last").server, simulated(wanted).snapshot("last").server, 1e-10)


# -- clients that lie -------------------------------------------------------------------------------------


def forged(change: Any) -> Any:
    """A change of the answers to local work."""
    def lie(content: Any, answer: Any) -> Any:
        message = WireMessage.decode(answer)
        if message.facts.get("job") != "local":
            return answer
        made = change(message)
        return made.encode() if isinstance(made, WireMessage) else made

    return lie


def with_theta(make: Any) -> Any:
    def change(message: WireMessage) -> WireMessage:
        theta = message.tensors["value.upload.theta"].tensor("theta", None)
        changed = {"value.upload.theta": PackedTensor.of(make(theta))}
        return message._replace(tensors={**message.tensors, **changed})

    return forged(change)


def claimed(**fields: Any) -> Any:
    """A tensor that says of itself what is not so."""
    def change(message: WireMessage) -> WireMessage:
        told = message.tensors["value.upload.theta"]._replace(**fields)
        return message._replace(tensors={**message.tensors, "value.upload.theta": told})

    return forged(change)


def raw(facts: Any, tensors: Any = None, **blobs: bytes) -> Any:
    return forged(lambda message: Payload(facts, tensors, blobs))


def facts(**changes: Any) -> Any:
    return forged(lambda message: message._replace(facts=message.facts | changes))


OTHER = dict(WireMessage.of({}, other=torch.ones(3)).tensors)
LIES: dict[str, tuple[Any, str]] = {
    "nan": (with_theta(lambda t: t * torch.nan), "upload.theta is not finite"),
    "inf": (with_theta(lambda t: t / 0), "upload.theta is not finite"),
    "shape": (with_theta(lambda t: t[:-1]), r"upload.theta has shape \(649,\) of float64, expected \(650,\)"),
    "size": (with_theta(lambda t: t.repeat(1000)), r"has shape \(650000,\)"),
    "type": (with_theta(lambda t: t.float()), "of float32, expected .* of float64"),
    "bytes": (claimed(data=b"\0" * 16), "its value has 24 bytes, expected 5208"),
    "negative": (claimed(shape=(-650,)), "does not describe a tensor"),
    "real shape": (claimed(shape=(650.0,)), "does not describe a tensor"),
    "no shape": (claimed(shape=None), "does not describe a tensor"),
    "dtype": (claimed(dtype="object"), "does not describe a tensor"),
    "pickle": (claimed(dtype="object", data=b"cos\nsystem\n(S'true'\ntR."), "does not describe a tensor"),
    "unlisted": (raw("{}", tensors="{}", value=b"1"), "unlisted bytes: 'value'"),
    "list": (raw("{}", tensors="[]"), "its tensors are not a JSON object"),
    "other list": (raw("{}", tensors='{"value": 3}'), "3 does not describe tensors"),
    "twice": (raw("{}", tensors='{"value": [["value", "bool", [1]], ["value", "bool", [1]]]}',
                  value=b"12"), "does not describe a tensor"),
    "bomb": (raw("{}", tensors='{"value": [["value", "float64", [1000000000, 1000000000]]]}'),
             "its value has 0 bytes, expected 8000000000000000000"),
    "missing": (forged(lambda message: message._replace(tensors={})), "value.* is missing"),
    "more": (forged(lambda message: message._replace(tensors={**message.tensors, **OTHER})),
             "other is not expected"),
    "job": (facts(job="score"), "it replies to another request"),
    "round": (facts(number=99), "it replies to another request"),
    "steps": (facts(steps=-1), "it claims -1 gradient steps"),
    "steps as text": (facts(steps="many"), "field 'steps': expected int, got 'many'"),
    "nonce": (facts(nonce="0"), "it repeats the reply to another request"),
    "garbage": (forged(lambda message: NoReply("not a message of descant", True)),
                "not a message of descant"),
    "number": (raw(1), "are not text of at most 1048576 characters"),
    "no json": (raw("{"), "are not JSON"),
    "a list": (raw("[1]"), "are not a JSON object"),
    "failure": (forged(lambda message: WireMessage(message.facts | {"failed": "\x1b[31mno"})),
                "it failed:  .31mno"),
}


@pytest.fixture(scope="module")
def lied(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the server noted of the round of each lie. Client 2 tells them all, and the run is unharmed: it
    ends as without this client."""
    place = tmp_path_factory.mktemp("lied")
    wanted = experiment("fedavg", train={"rounds": len(LIES)}, eval={"every": len(LIES)})
    nodes, told = flower.make_clients(DATA, place), [*LIES.values()]
    answer = nodes["2"]

    def lie(content: Any) -> Any:
        change, _ = told[WireMessage.decode(content).facts.get("number", 1) - 1]
        return change(content, answer(content))

    server = flower.MemoryServer(nodes | {"2": lie})
    found = flower.federate(wanted, server, place / "server", alone=False)
    absent = {number: {2} for number in range(1, len(LIES) + 1)}
    expected = simulated_without(wanted, absent, place / "simulated")
    assert_same(found.snapshot("last").server, expected.snapshot("last").server, 1e-10)
    return dict(zip(LIES, found.history, strict=True))


@pytest.mark.parametrize("lie", LIES)
def test_a_liar_is_refused_by_name(lie: str, lied: dict[str, dict[str, Any]]) -> None:
    row, (_, reason) = lied[lie], LIES[lie]
    assert row["rejected"] == 1
    assert re.search(reason, row["rejections"]["2"]), row["rejections"]


def test_an_old_answer_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    wanted = experiment("fedavg")
    nodes, kept = flower.make_clients(DATA, tmp_path), {}
    answer = nodes["2"]

    def replay(content: Any) -> Any:
        if WireMessage.decode(content).facts.get("job") != "local":
            return answer(content)
        return kept.setdefault("first", answer(content))

    server = flower.MemoryServer(nodes | {"2": replay})
    found = flower.federate(wanted, server, tmp_path / "server", alone=False)
    assert [row.get("rejections") for row in found.history] == [
        None, *[{"2": "it repeats the reply to another request"}] * 2]


@some(2, "fedavg", "cgpfl", "scaffold", "pfedgt", "globaltrain")
def test_the_norm_of_updates_is_bounded(method: str, tmp_path: Path) -> None:
    """Of what is learned, not of the model: a large model with a small update passes."""
    wanted = experiment(method)
    nodes = flower.make_clients(DATA, tmp_path)
    answer = nodes["2"]

    def scaled(content: Any) -> Any:
        message = WireMessage.decode(answer(content))
        if message.facts.get("job") not in ("local", "opening"):
            return message.encode()
        own = {name: packed.tensor(name, None) for name, packed in message.tensors.items()}
        grown = {name: PackedTensor.of(1e3 * t + 1e3) for name, t in own.items()
                 if ".upload" in name and t.is_floating_point()}
        return message._replace(tensors={**message.tensors, **grown}).encode()

    rules = Rules(deadline=5, max_norm=500.0)
    server = flower.MemoryServer(nodes | {"2": scaled})
    found = flower.federate(wanted, server, tmp_path / "server", alone=False, rules=rules)
    for row in found.history:
        assert {*row["rejections"]} == {"2"}
        assert re.search("its update has norm .*; the limit is 500", row["rejections"]["2"])


def test_a_failing_client_tells_its_error_at_home_only(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, seen = flower.Quiet(), flower.Quiet()
    nodes = flower.make_clients(DATA, tmp_path) | flower.make_clients({"1": DATA["1"]}, tmp_path, told)
    server = flower.MemoryServer(nodes)

    def secret(*given: Any) -> Any:
        raise ValueError("the patient is Mrs Smith")

    monkeypatch.setattr(ClientStates, "write", secret)
    with pytest.raises(DescantError, match="were rejected"):
        flower.federate(experiment("ditto"), server, tmp_path / "server", observer=seen)
    assert ("work", "ValueError: the patient is Mrs Smith") in [
        (what, f"{type(error).__name__}: {error}") for what, error in told.of("failed")]
    assert {reason for _, _, reason in seen.of("lost")} == {"it failed: ValueError"}


# -- who may take part ------------------------------------------------------------------------------------


def test_names_are_those_of_the_keys(tmp_path: Path) -> None:
    """A node that calls itself otherwise, or like another, is refused by name."""
    class Two(flower.Quiet):
        def waiting(self, *given: Any) -> None:
            raise Killed

    for named, reason in ((True, "it calls itself '0', but its key is that of 'b'"),
                          (False, "a client called '0' is already connected")):
        observer, place = Two(), tmp_path / str(named)
        nodes = flower.make_clients({"0": DATA["0"]}, place)
        other = flower.make_clients({"0": DATA["1"]}, place / "b")["0"]
        server = flower.MemoryServer(nodes | {"b": other}, named)
        with pytest.raises(Killed):
            flower.federate(experiment("fedavg"), server, place / "server", observer=observer)
        assert [why for _, why in observer.of("refused")] == [reason]


def test_data_of_another_kind_do_not_begin(tmp_path: Path) -> None:
    class Two(flower.Quiet):
        def waiting(self, *given: Any) -> None:
            raise Killed

    np.savez(tmp_path / "other.npz", x=np.ones((9, 3), np.float32), y=np.zeros(9, np.int64))
    data = {"a": "digits:0", "b": str(tmp_path / "other.npz")}
    server = flower.MemoryServer(flower.make_clients(data, tmp_path))
    observer = Two()
    with pytest.raises(Killed):
        flower.federate(experiment("fedavg"), server, tmp_path / "server", observer=observer)
    [(some, others, how)] = observer.of("differing")  # of two, nobody can tell who is right
    assert (some, others) == (["a"], ["b"])
    assert how == "its shape is (3,), that of the others (64,)"


def test_versions_must_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("descant.deploy.client_manager.__version__", "99.0")
    nodes = flower.make_clients(DATA, tmp_path)
    server, observer = flower.MemoryServer(nodes), flower.Quiet()
    manager = ClientManager(server, tables_of(experiment("fedavg")), observer.refused)
    assert manager.connected() == {}
    assert all("the server 99.0: install the same version on both" in why
               for _, why in observer.of("refused"))


def test_code_of_ones_own_is_run_only_if_both_sides_name_it(tmp_path: Path) -> None:
    """A model, a prior, a generator: whatever a server could make a client import."""
    place = "flower_helpers:batchnorm"
    for changes in ({"model": {"name": place}},
                    {"algorithm": {"name": "fedmap", "prior": {"name": "own", "place": place}}},
                    {"algorithm": {"name": "pfedbred", "family": {"name": "generator", "generator": place}}}):
        tables = tables_of(experiment("fedavg")) | changes
        for allowed in ([], ["flower_helpers:other"]):
            with pytest.raises(UsageError, match=r"the server's experiment: .*add --allow flower_helpers to"):
                received_experiment(tables, allowed)
    for allowed in ([place], ["flower_helpers"]):
        received_experiment(tables_of(experiment("fedavg", model={"name": place})), allowed)
    with pytest.raises(UsageError, match="a module of Python itself"):
        received_experiment(tables | {"model": {"name": "os:system", "command": "true"}})


def test_a_client_can_insist_on_an_experiment(tmp_path: Path) -> None:
    expected = experiment("fedavg", train={"batch": 20})
    told = flower.Quiet()
    for wanted, works in ((experiment("fedavg", train={"rounds": 2}), True),
                          (experiment("fedavg", train={"batch": 1}), False)):
        [answer] = flower.make_clients({"0": DATA["0"]}, tmp_path, told, expected=expected).values()
        hello = {"what": "hello", "protocol": 1, "version": descant.__version__,
                 "experiment": tables_of(wanted)}
        found = WireMessage.decode(answer(WireMessage(hello).encode())).facts
        assert ("failed" not in found) is works
    assert "is not the expected one: train.batch: 20 became 1" in str(told.of("failed")[0][1])


@pytest.mark.parametrize("data", [
    {"dataset": "/etc"}, {"dataset": "./here"}, {}, {"dataset": "nodes", "partition_file": "/x"}])
def test_a_server_cannot_name_files_of_a_client(data: dict[str, Any]) -> None:
    tables = tables_of(experiment("fedavg"))
    with pytest.raises(UsageError, match=r"neither with the clients|on another machine"):
        received_experiment(tables | {"data": data})


# -- what leaves a client ---------------------------------------------------------------------------------


def test_nothing_but_tensors_counts_and_figures_leaves_a_client(tmp_path: Path) -> None:
    """Every answer is read: its facts are numbers and the client's own name, its tensors are those of the
    method's upload and of the tallies, and no row of the client's is among their bytes."""
    wanted = experiment("ditto", train={"dtype": "float32"})
    answers: list[Any] = []
    nodes = flower.make_clients(DATA, tmp_path)

    def listening(name: str) -> Any:
        def answer(content: Any) -> Any:
            found = nodes[name](content)
            answers.append((name, WireMessage.decode(found)))
            return found

        return answer

    server = flower.MemoryServer({name: listening(name) for name in nodes})
    flower.federate(wanted, server, tmp_path / "server")
    federation = Setup.of(wanted).federation
    rows = {federation.x[k].numpy().tobytes() for k in range(len(federation.x))}
    rows |= {federation.x[k].float().div(255).numpy().tobytes() for k in range(len(federation.x))}
    allowed = {"what", "nonce", "name", "kind", "rows", "version", "session", "client", "sizes", "job",
               "number", "steps", "figures"}
    for name, message in answers:
        riding = message.facts.pop("scores", {})
        assert {*riding} <= {"job", "number", "steps"}
        assert {*message.facts} <= allowed
        assert message.facts["name"] == name
        words = [value for value in message.facts.values() if isinstance(value, str)]
        assert all(len(word) <= 16 for word in words)
        assert {*message.tensors} <= {
            "value.upload.model.theta", "value.upload.model.stats", "value.loss",
            *(f"{place}.{who}.{what}" for place in ("value", "scores_value") for who in ("personal", "shared")
              for what in ("validation", "test", "error", "auroc"))}
        for packed in message.tensors.values():
            assert not any(row in packed.data for row in rows)


def test_messages_arrive_as_they_were_sent() -> None:
    """Whatever is in them, empty tensors too."""
    sent = Message(Model(torch.randn(10), torch.zeros(0)), (torch.tensor(True), torch.arange(3), ()))
    message = WireMessage.of({"what": "x", "n": 1}, shared=sent.shared, each=sent.each)
    found = WireMessage.decode(message.encode())
    assert found.facts == {"what": "x", "n": 1}
    assert_same(found.tree("shared", sent.shared), sent.shared)
    assert_same(found.tree("each", sent.each), sent.each)


@pytest.mark.parametrize("size", [10, 10**6])
def test_flowers_records_carry_payloads(size: int) -> None:
    """Small blobs with the facts, large ones as arrays."""
    records = pytest.importorskip("descant.deploy.transport.records", exc_type=ImportError)
    payload = WireMessage.of({"what": "x"}, shared=torch.randn(size), each=torch.arange(3)).encode()
    content = records.to_records(payload)
    assert ("pieces" in content) is (size > 10)
    assert records.from_records(content) == payload
    other = records.to_records(payload._replace(facts="{}"))
    if size > 10:  # what is the same for two clients is the same array
        assert other["pieces"]["shared"].data == content["pieces"]["shared"].data
    del content["descant"]
    with pytest.raises(Rejected, match="not a message of descant"):
        records.from_records(content)
    content["x"] = other["descant"]
    with pytest.raises(Rejected, match="not a message of descant"):
        records.from_records(content)


def test_a_request_that_cannot_be_read_is_replied_to(tmp_path: Path) -> None:
    [reply] = flower.make_clients({"0": DATA["0"]}, tmp_path).values()
    assert "are not JSON" in WireMessage.decode(reply(Payload("{", "{}"))).facts["failed"]


# -- the transport ----------------------------------------------------------------------------------------


def test_another_transport_is_all_that_another_network_needs(tmp_path: Path) -> None:
    """Clients in threads that come one by one and leave by themselves, on a transport without Flower."""
    wanted, server, told = experiment("pfedme"), flower.MemoryServer({}), flower.Quiet()
    stop = threading.Event()
    clients = [threading.Thread(target=flower.MemoryClient(server, name).serve,
                                args=(reply, told, stop)) for name, reply in
               flower.make_clients(DATA, tmp_path).items()]
    for client in clients:
        client.start()
    try:
        found = flower.federate(wanted, server, tmp_path / "server", clients=CLIENTS, alone=False)
    finally:
        stop.set()
        for client in clients:
            client.join(10)
    assert_same_run(found, simulated(wanted), 1e-10)
    assert len(told.of("connected")) == CLIENTS
    assert sum(count for (count,) in told.of("sent")) > 0
    assert server.connected() == {}


def test_only_the_transport_imports_flowers_private_parts() -> None:
    """And nothing of Flower at all but in its own apps, and its shares and keys for secure aggregation."""
    folder = Path(descant.__file__).parent
    public = ("flwr.app", "flwr.clientapp", "flwr.serverapp")
    for path in folder.rglob("*.py"):
        if (folder / "deploy" / "transport") in path.parents:
            continue
        if path == folder / "deploy" / "secure" / "primitives.py":
            crypto = "flwr.common.secure_aggregation.crypto"
            assert {*re.findall("flwr[\\w.]*", path.read_text())} == {
                f"{crypto}.shamir", f"{crypto}.symmetric_encryption"}
            continue
        names = re.findall(r"^\s*(?:from|import) (flwr[\w.]*)", path.read_text(), re.MULTILINE)
        assert all(name in public for name in names), path
        if names:
            assert path.name in ("flower_app.py", "__init__.py"), path
