"""A federation of real processes over TLS on loopback: the numbers, the failures, the strangers."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="Flower is missing: pip install 'descant[flower]'")

from descant.core.tree import leaves
from descant.errors import DescantError
from descant.experiment import directory as layout
from descant.experiment import run as runs
from descant.experiment.checkpoint import read
from descant.experiment.config import Experiment
from descant.experiment.run import Setup
from federation_processes import Federation, Process, cleaned
from helpers import assert_same

pytestmark = [pytest.mark.slow, pytest.mark.alone]

NAMES = ("0", "1", "2")
EXPERIMENT = """
[data]
dataset = "digits"
partition = "classes"
clients = 3
classes_per_client = 4
[model]
name = "mclr"
[algorithm]
{method}
[train]
rounds = {rounds}
batch = 20
local = {{ steps = {steps} }}
dtype = "float64"
backend = "loop"
[eval]
every = {every}
"""


def text(method: str, rounds: int = 3, steps: int = 3, every: int = 2) -> str:
    named = f'name = "{method}"' + ("\nK = 2" if method == "cgpfl" else "")
    return EXPERIMENT.format(method=named, rounds=rounds, steps=steps, every=every)


@pytest.fixture(autouse=True)
def _nobody_stays() -> Iterator[None]:
    with cleaned():
        yield


def simulated(place: Path) -> runs.Run:
    return runs.start(Setup.of(Experiment.load(place)))


def server_state(out: Path) -> dict[str, Any]:
    """The tensors of the server's last committed round."""
    return {name.removeprefix("server."): tensor
            for name, tensor in read(out / "run" / "checkpoint" / "state.safetensors")[0].items()
            if name.startswith("server.")}


def assert_as_simulated(out: Path, expected: runs.Run, tolerance: float = 1e-10) -> None:
    found, wanted = server_state(out), dict(leaves(expected.snapshot("last").server))
    assert {*found} == {*wanted}
    for name, tensor in wanted.items():
        assert_same(found[name], tensor, tolerance)


def rows(out: Path) -> list[dict[str, Any]]:
    """The committed rounds so far."""
    try:
        return layout.read_metrics(out / "run")
    except (DescantError, OSError):
        return []


def wait_for_round(out: Path, number: int, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while len(rows(out)) < number:
        assert time.monotonic() < until, f"round {number} was not reached: {rows(out)}"
        time.sleep(0.05)


def test_the_same_numbers_as_in_simulation(tmp_path: Path) -> None:
    """One server after another, each with another method; the clients stay and take part in all of them."""
    federation = Federation(tmp_path, NAMES, text("fedavg"))
    clients = federation.clients("--stay")
    for method in ("scaffold", "cgpfl", "fedmap", "pfedgt"):  # in memory all of them are compared
        place = tmp_path / f"{method}.toml"
        place.write_text(text(method))
        expected = simulated(place)
        # FedMAP's weights are bounded otherwise
        server = federation.server("--no-alone", "--max-share", 1, experiment=place, out=method)
        output = server.ended(0)
        assert re.search("personal", output), output
        assert_as_simulated(tmp_path / method, expected)
        for k, name in enumerate(NAMES):
            own = load_file(tmp_path / f"client-{name}" / "model.safetensors")
            wanted = expected.personal_model(k).state_dict()
            assert_same(tuple(own[n] for n in sorted(own)), tuple(wanted[n] for n in sorted(wanted)), 1e-10)
    for client in clients.values():
        client.signal(signal.SIGTERM)
        client.process.wait(20)


def wait_until(is_so: Callable[[dict[str, str]], bool], out: Path, after: int = 0) -> int:
    """Until a round after that one is so, by who was refused in it; which one."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for row in rows(out)[after:]:
            if is_so(row.get("rejections", {})):
                return int(row["round"])
        time.sleep(0.1)
    raise AssertionError(rows(out)[-3:])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_is_killed_or_frozen(how: signal.Signals, tmp_path: Path) -> None:
    """The rounds go on with the others; it takes part again when it is back."""
    federation = Federation(tmp_path, NAMES, text("scaffold", rounds=5000, steps=2, every=5000))
    clients = federation.clients()
    server, out = federation.server("--deadline", 5), tmp_path / "server"
    wait_for_round(out, 2)
    clients["1"].signal(how)
    gone = wait_until(lambda refused: {*refused} == {"1"}, out)
    assert re.search(r"no reply within|not connected", rows(out)[gone - 1]["rejections"]["1"])
    if how == signal.SIGKILL:
        clients["1"].process.wait()
        clients["1"] = federation.client("1")
    else:
        clients["1"].signal(signal.SIGCONT)
    wait_until(lambda refused: not refused, out, gone)
    for process in (server, *clients.values()):
        process.signal(signal.SIGTERM)
    assert "rerun the same command to continue" in server.ended(143)


def test_a_server_that_is_killed_goes_on(tmp_path: Path) -> None:
    """With the same command, from its last round, to the same end; the clients come back by themselves."""
    federation = Federation(tmp_path, NAMES, text("pfedgt", rounds=12, steps=3, every=4))
    expected = simulated(tmp_path / "experiment.toml")
    clients, out = federation.clients(), tmp_path / "server"
    for rounds in (3, 7):
        server = federation.server("--no-alone")
        wait_for_round(out, rounds)
        server.kill()
    again = federation.server("--no-alone")
    assert re.search(r"continuing after round \d+ of 12", again.ended(0, 120))
    assert_as_simulated(out, expected)
    assert [row["round"] for row in rows(out)] == list(range(1, 13))
    assert not any("rejections" in row for row in rows(out))
    for client in clients.values():
        client.ended(0)


LIAR = """
import json, sys, torch
from descant.deploy.client import Client
from descant.deploy.messages import PackedTensor

honest, kept, count = Client._work, [], [0]

def lie(self, request):
    reply = honest(self, request)
    if reply.facts["job"] != "local":
        return reply
    count[0] += 1
    theta = reply.tensors["value.upload.theta"].tensor("theta", None)
    def with_(tensor):
        return reply._replace(tensors={**reply.tensors, "value.upload.theta": PackedTensor.of(tensor)})
    kept.append(reply)
    lies = [reply, with_(theta * torch.nan), with_(theta[:-1]), with_(theta.float()),
            with_(theta * 1e9), reply._replace(facts=kept[0].facts), with_(theta.repeat(2000))]
    return lies[count[0] - 1] if count[0] <= len(lies) else reply

Client._work = lie
from descant.cli import main
sys.argv = ["descant", *sys.argv[1:]]
main()
"""


def test_a_client_that_lies(tmp_path: Path) -> None:
    """NaN, a wrong shape, a wrong type, too large, an old answer, too much: refused by name and counted, and
    the others go on. The last lie ends its connection; once it is back, and honest, it takes part again."""
    federation = Federation(tmp_path, NAMES, text("fedavg", rounds=5000, every=5000))
    clients = [federation.client(name) for name in NAMES[:2]]
    given = ["client", "--server", f"127.0.0.1:{federation.port}", "--name", "2", "--data", "digits:2",
             "--keys", tmp_path / "keys" / "2", "--dir", tmp_path / "client-2"]
    clients.append(Process(tmp_path / "liar.log", *given, python=LIAR))
    server, out = federation.server("--max-norm", 100, "--no-alone"), tmp_path / "server"
    wait_for_round(out, 7)
    back = wait_until(lambda refused: not refused, out, 7)
    refused = [row.get("rejections", {}) for row in rows(out)][:back]
    assert refused[0] == {}
    for found, reason in zip(refused[1:7], (
            "not finite", r"shape \(649,\)", "float32, expected", "norm .* the limit is 100",
            "replies to another request", "bytes, and [0-9]+ are the most"), strict=True):
        assert {*found} == {"2"}
        assert re.search(reason, found["2"]), found
    for found in refused[7:-1]:  # until it is back
        assert {*found} == {"2"}
        assert re.search(r"no reply within|not connected", found["2"]), found
    for process in (server, *clients):
        process.signal(signal.SIGTERM)
    assert "nothing from 2" in server.ended(143)
    assert all(bool(tensor.isfinite().all()) for tensor in server_state(out).values())


def test_strangers_are_refused(tmp_path: Path) -> None:
    """An unknown key, a certificate of another authority, plain text: each is told why; nobody notices."""
    federation = Federation(tmp_path, NAMES, text("fedavg"))
    (tmp_path / "other").mkdir()
    Federation(tmp_path / "other", ["0", "stranger"], text("fedavg"))
    server = federation.server("--no-alone")
    server.wait_for("listening on")
    keys = tmp_path / "other" / "keys"
    # a key that is not registered, with the right authority
    mixed = tmp_path / "mixed"
    shutil.copytree(keys / "stranger", mixed)
    shutil.copy(tmp_path / "keys" / "0" / "ca.crt", mixed / "ca.crt")
    stranger = federation.client("stranger", **{"--keys": mixed, "--data": "digits:0"})
    misled = federation.client("0", **{"--keys": keys / "0"})
    plain = Process(tmp_path / "plain.log", "client", "--server", f"127.0.0.1:{federation.port}", "--name",
                    "0", "--data", "digits:0", "--insecure", "--dir", tmp_path / "plain")
    assert re.search(r"stranger.pem was not issued by the authority in ca.crt", stranger.ended(2))
    assert re.search("was not issued by the authority in ca.crt", misled.ended(1))
    assert re.search("is encrypted: name the folder of certificates with --keys", plain.ended(1))
    taken = Process(tmp_path / "taken.log", "server", tmp_path / "experiment.toml", "--clients", 3, "--keys",
                    tmp_path / "keys" / "server", "--out", tmp_path / "taken", "--port", federation.port)
    assert re.search(rf"port {federation.port} on 0.0.0.0 is in use", taken.ended(2))
    clients = federation.clients()
    server.ended(0)
    for client in clients.values():
        client.ended(0)


def test_a_newcomer_after_the_training(tmp_path: Path) -> None:
    federation = Federation(tmp_path, (*NAMES, "late"), text("ditto", rounds=2))
    federation.names.remove("late")
    federation.data["late"] = "digits:1"
    server = federation.server("--stay")
    clients = federation.clients()
    for client in clients.values():
        client.ended(0)
    late = federation.client("late")
    assert "joined as a newcomer" in late.ended(0)
    assert (tmp_path / "client-late" / "model.safetensors").exists()
    server.wait_for("late, a newcomer, has its model")
    server.signal(signal.SIGINT)
    server.ended(130, 20)
    served = json.loads((tmp_path / "server" / "clients.json").read_text())
    assert {*served} == {*NAMES, "late"}
    assert {*served["late"]} == {"alone", "personal", "shared"}


def test_a_model_of_ten_million_parameters(tmp_path: Path) -> None:
    """40 MB to each client and back, in pieces."""
    large = text("fedavg", rounds=1, steps=1).replace('name = "mclr"', 'name = "dnn"\nhidden = 133400')
    large = large.replace("float64", "float32").replace("clients = 3", "clients = 2")
    federation = Federation(tmp_path, NAMES[:2], large)
    expected = simulated(tmp_path / "experiment.toml")
    assert expected.setup.task.dim > 10**7
    clients = federation.clients()
    federation.server("--no-alone", "--max-share", "1").ended(0, 150)  # of two, one has more than half
    assert_as_simulated(tmp_path / "server", expected, 1e-5)
    for client in clients.values():
        client.ended(0)
