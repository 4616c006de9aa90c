"""A client bounds what its server may ask for: experiment, rounds, repetitions, sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import descant
import flower_helpers as flower
from descant.deploy.client import REPEATS
from descant.deploy.messages import WireMessage
from descant.deploy.protocol import tables_of
from descant.experiment.config import Experiment
from descant.experiment.run import Setup
from flower_helpers import DATA, experiment
from helpers import assert_same


class Server:
    """Asks one client what it likes, keeping each request that an honest one made."""

    def __init__(self, wanted: Experiment, place: Path, **options: Any) -> None:
        self.place, self.told = place, flower.Quiet()
        self._options = options
        self.asked: list[WireMessage] = []
        self.start()

        def answer(payload: Any) -> Any:
            self.asked.append(WireMessage.decode(payload))
            return self._reply(payload)

        nodes = flower.make_clients({name: DATA[name] for name in "123"}, place) | {"0": answer}
        flower.federate(wanted, flower.MemoryServer(nodes), place / "server", alone=False)

    def start(self) -> None:
        [self._reply] = flower.make_clients({"0": DATA["0"]}, self.place, self.told, **self._options).values()

    def ask(self, what: str, **changes: Any) -> dict[str, Any]:
        """The facts of the reply to the first request of this kind, changed."""
        request = next(each for each in self.asked if what in (each.facts["what"], each.facts.get("job")))
        return WireMessage.decode(self._reply(request._replace(facts=request.facts | changes).encode())).facts


def hello(wanted: Experiment) -> WireMessage:
    return WireMessage({"what": "hello", "protocol": 1, "version": descant.__version__,
                        "experiment": tables_of(wanted)})


@pytest.mark.thorough
def test_no_more_rounds_than_were_agreed(tmp_path: Path) -> None:
    """Nor in the requests of a server that says so when it is joined, and then goes on."""
    agreed = experiment("fedavg", train={"rounds": 3})
    for rounds, is_refused in ((2, False), (3, False), (4, True), (10**18, True)):
        told = flower.Quiet()
        [reply] = flower.make_clients({"0": DATA["0"]}, tmp_path / "a", told, expected=agreed).values()
        asked = hello(experiment("fedavg"))
        asked.facts["experiment"]["train"]["rounds"] = rounds
        assert ("failed" in WireMessage.decode(reply(asked.encode())).facts) is is_refused
        assert [str(error) for _, error in told.of("failed")] == (
            [f"the server's experiment has {rounds} rounds, and 3 were agreed"] if is_refused else [])
    server = Server(agreed, tmp_path, expected=agreed)
    assert "failed" not in server.ask("local", number=3)
    found = server.ask("local", number=4)
    assert (found["failed"], found["ready"]) == ("not joined", False)
    assert server.ask("local", number=10**18)["failed"] == "not joined"
    server.start()  # from its directory: the same
    assert server.ask("local", number=4)["failed"] == "not joined"
    tables = tables_of(agreed)
    tables["train"]["rounds"] = 10**18
    assert server.ask("join", experiment=tables)["failed"] == "UsageError"
    assert "failed" in server.ask("local", number=-1)


@pytest.mark.slow
def test_a_federation_may_be_given_more_rounds(tmp_path: Path) -> None:
    """If nothing else was agreed: its clients join again, and the numbers are those of one run."""
    place, data = tmp_path / "nodes", {name: DATA[name] for name in "0123"}
    server = flower.MemoryServer(flower.make_clients(data, place))
    flower.federate(experiment("scaffold", train={"rounds": 2}), server, tmp_path / "server", alone=False)
    wanted = experiment("scaffold", train={"rounds": 4})
    found = flower.federate(wanted, server, tmp_path / "server", alone=False)
    expected = descant.experiment.run.start(Setup.of(wanted))
    assert not any("rejections" in row for row in found.history)
    assert_same(found.snapshot("last").server, expected.snapshot("last").server, 1e-10)


@pytest.mark.thorough
def test_a_request_is_replied_to_a_few_times(tmp_path: Path) -> None:
    """The ledger outlives the process."""
    server = Server(experiment("fedavg"), tmp_path)
    [ledger] = (tmp_path / "0").glob("*/ledger.json")
    assert json.loads(ledger.read_text())["local 1"] == 1
    for _ in range(REPEATS - 1):
        server.start()
        assert "failed" not in server.ask("local")
    assert server.ask("local")["failed"] == (f"the server has asked {REPEATS + 1} times for 'local' of round "
                                             f"1: this client replies {REPEATS} times")
    server.start()
    assert "asked" in server.ask("local")["failed"]
    assert "failed" not in server.ask("local", number=2)
    fewer = ledger.read_text().replace(f'"local 1": {REPEATS + 2}', '"local 1": 2')
    assert fewer != ledger.read_text()
    for text in ("[1]", fewer):
        ledger.write_text(text)
        server.start()
        assert server.ask("local")["failed"] == "DescantError"
        assert "ledger.json is damaged" in str(server.told.of("failed")[-1][1])


@pytest.mark.parametrize("facts", [
    {"clients": 10**12}, {"clients": 0}, {"unseen": 3}, {"unseen": -1},
    {"kind": {"shape": [10**9], "dtype": "real", "target_shape": [], "target_dtype": "int64", "classes": 10,
              "tokens": None}},
], ids=["clients", "nobody", "new", "negative", "kind"])
def test_joining_keeps_no_client_busy(facts: dict[str, Any], tmp_path: Path) -> None:
    server = Server(experiment("fedavg", train={"rounds": 1}), tmp_path)
    assert server.ask("join", **facts)["failed"] in ("Rejected", "UsageError")


def test_the_flower_app_holds_its_server_to_the_experiment(tmp_path: Path) -> None:
    app = pytest.importorskip("descant.deploy.flower_app", exc_type=ImportError)
    from flwr.app import Context, RecordDict
    from flwr.app import Metadata as Head
    from flwr.app.message import make_message

    from descant.deploy.transport.records import from_records, to_records

    (tmp_path / "agreed.toml").write_text(
        '[data]\ndataset = "digits"\npartition = "classes"\nclients = 4\nclasses_per_client = 2\n'
        '[model]\nname = "mclr"\n[algorithm]\nname = "fedavg"\n[train]\nrounds = 3\nbatch = 20\n'
        'local = { steps = 3 }\ndtype = "float64"\n[eval]\nevery = 2\n')

    def failed(wanted: Experiment) -> object:
        head = Head(run_id=1, message_id="a", src_node_id=1, dst_node_id=2, reply_to_message_id="",
                    group_id="", created_at=1.8e9, ttl=1e9, message_type="train")
        message = make_message(metadata=head, content=to_records(hello(wanted).encode()))
        config = {"name": "0", "data": DATA["0"], "dir": str(tmp_path / "0"),
                  "expect": str(tmp_path / "agreed.toml")}
        context = Context(run_id=1, node_id=2, node_config=config, state=RecordDict(), run_config={})
        reply = app.client_app(message, context)
        return WireMessage.decode(from_records(reply.content)).facts.get("failed")

    assert failed(experiment("fedavg")) is None
    assert failed(experiment("fedavg", train={"rounds": 4})) == "UsageError"
    assert failed(experiment("fedavg", train={"batch": 1})) == "UsageError"


