"""The commands of a federation, in this process and without a network: what they refuse, print and leave."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli_helpers import ANSI, Result, call
from descant.errors import UsageError
from descant.view.outcome import show_outcome

pytest.importorskip("flwr", reason="Flower is missing: pip install 'descant[flower]'")

import flower_helpers as flower
from descant.deploy import certificates, client_manager, keys, server
from descant.deploy.protocol import load_experiment
from descant.deploy.transport import grpc_client, grpc_server
from descant.view import federation_client
from descant.view.federation import ServerDisplay
from descant.view.federation_client import ClientDisplay

pytestmark = pytest.mark.thorough

NAMES = ("north", "south")
TOML = """
[data]
dataset = "digits"
partition = "classes"
clients = 2
classes_per_client = 3
[model]
name = "mclr"
[algorithm]
name = "fedavg"
[train]
rounds = 3
local = { steps = 2 }
[eval]
every = 2
"""
TABLES = """
[data]
dataset = "./hospitals"
impute = "client"
[schema]
target = "ill"
classes = ["no", "yes"]
[schema.columns]
age = "number"
[algorithm]
name = "fedavg"
[train]
rounds = 2
"""


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("pki") / "keys"
    certificates.make_certificates(place, "server.example.org", NAMES)
    return place


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in, with two experiments and a table."""
    (tmp_path / "digits.toml").write_text(TOML)
    (tmp_path / "tables.toml").write_text(TABLES)
    (tmp_path / "north.csv").write_text("age,ill\n" + "".join(f"{k},{'yes' if k > 40 else 'no'}\n"
                                                             for k in range(20, 60)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(result: Result, *words: str, code: int = 2) -> None:
    """One message, which has these words, and nothing else."""
    assert result.code == code, result
    assert result.err.startswith(("error: ", "Usage: ")), result
    assert "Traceback" not in result.err
    if result.err.startswith("error: "):
        assert len(result.err.strip().splitlines()) == 1, result.err
    for word in words:
        assert word in result.err, result.err


# -- help ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["certificates", "server", "client"])
def test_help_says_what_to_type(command):
    result = call(command, "--help")
    assert result.code == 0
    assert f"descant {command} " in result.out
    assert "Examples:" in result.out


def test_help_waits_for_nothing():
    program = ("import sys; sys.argv = ['descant', 'server', '--help']\nfrom descant.cli import main\n"
               "try: main()\nexcept SystemExit: pass\n"
               "print([name for name in ('torch', 'flwr', 'cryptography', 'numpy') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", [
    ("certificates", "keys", "--host", "localhost"),
    ("server", "digits.toml", "--clients", 2, "--out", "out", "--insecure"),
    ("client", "--server", "127.0.0.1:1", "--name", "a", "--data", "a.csv", "--insecure"),
])
def test_without_flower_the_extra_is_named(arguments, home, monkeypatch):
    for name in ("flwr", "flwr.app"):
        monkeypatch.setitem(sys.modules, name, None)
    refused(call(*arguments), "pip install 'descant[flower]'")


# -- certificates ----------------------------------------------------------------------------------


def test_certificates_say_who_gets_what_and_what_comes_next(home):
    made = call("certificates", "keys", "--host", "server.example.org", "--client", "north",
                "--client", "south")
    assert made.code == 0
    for text in ("keys/north is for north only", "keys/ca.key stays here",
                 "descant server EXPERIMENT.toml --clients 2 --keys keys/server",
                 "descant client --server server.example.org:8443 --name north --data FILE --keys north"):
        assert text in made.out, made.out
    more = call("certificates", "keys", "--host", "server.example.org", "--client", "west")
    assert "kept keys/server" in more.out
    assert "a running server knows the new clients within seconds" in more.out
    assert "--clients 3" in more.out


@pytest.mark.parametrize(("arguments", "words"), [
    (["--host", "0.0.0.0", "--client", "a"], ["at which clients reach"]),
    (["--host", "a b", "--client", "a"], ["neither a host name"]),
    (["--host", "localhost", "--client", "a/b"], ["cannot be the name of a client"]),
    (["--host", "localhost", "--client", "a", "--client", "a"], ["'a'"]),
    (["--host", "localhost", "--client", "a", "--days", "0"], ["--days"]),
    (["--client", "a"], ["--host"]),
])
def test_certificates_that_cannot_be(arguments, words, home):
    refused(call("certificates", "keys", *arguments), *words)
    assert not (home / "keys").exists()


# -- the server: bad input --------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "words"), [
    ({"file": "none.toml"}, ["none.toml", "No such file"]),
    ({"--clients": 0}, ["--clients"]),
    ({"--clients": 1}, ["--at-least 1"]),
    ({"--at-least": 3}, ["--at-least 3", "--clients 2"]),
    ({"--deadline": 0}, ["--deadline"]),
    ({"--max-norm": -1}, ["--max-norm"]),
    ({"--port": 70000}, ["--port"]),
    ({"--keys": None}, ["--keys is missing", "descant certificates", "--insecure"]),
    ({"--keys": "nothing"}, ["nothing/ca.crt", "descant certificates"]),
    ({"--insecure": ""}, ["--keys and --insecure"]),
    ({"--host": "other.example.org"}, ["is for", "not for other.example.org", "descant certificates"]),
    ({"--clients": 3}, ["--clients 3", "north, south"]),
    ({"--out": "digits.toml"}, ["is a file"]),
    ({"--set": "algorithm.name=fedavgg"}, ["fedavg"]),
    ({"--set": "data.unseen=1"}, ["data.unseen", "--stay"]),
    ({"--set": "data.partition_file=p.npz"}, ["data.partition_file"]),
])
def test_a_server_that_cannot_be(changes, words, home, pki):
    given: dict[str, Any] = {"file": "digits.toml", "--clients": 2, "--out": "out", "--keys": pki / "server"}
    given |= changes
    file = given.pop("file")
    options = [part for name, value in given.items() if value is not None
               for part in ([name] if value == "" else [name, value])]
    refused(call("server", file, *options), *words)
    assert not (home / "out").exists()


def test_a_server_only_speaks_openly_to_itself(home):
    refused(call("server", "digits.toml", "--clients", 2, "--out", "out", "--insecure", "--host", "0.0.0.0"),
            "loopback")


def test_a_port_that_is_taken(home, pki):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = call("server", "digits.toml", "--clients", 2, "--out", "out", "--keys", pki / "server",
                      "--host", "127.0.0.1", "--port", port)
    refused(result, f"port {port} on 127.0.0.1 is in use", "--port")


def test_a_certificate_that_has_ended(home, pki, monkeypatch):
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=400)
    monkeypatch.setattr(keys, "now", lambda: later)
    refused(call("server", "digits.toml", "--clients", 2, "--out", "out", "--keys", pki / "server"),
            "server.pem expired on", "descant certificates")


def _blocks(language: str) -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / "federation.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_experiments_of_the_document_and_the_examples_are_valid(home):
    (home / "document.toml").write_text(_blocks("toml")[0])
    assert load_experiment(Path("document.toml"), []).data.dataset.name == "nodes"
    for path in (Path(__file__).parents[2] / "examples" / "federation").glob("*.toml"):
        assert load_experiment(path, []).train.rounds <= 30


def test_a_folder_need_not_be_where_the_server_is(home):
    experiment = load_experiment(Path("tables.toml"), [])
    assert experiment.data.dataset.name == "nodes"
    assert experiment.data.schema is not None
    assert experiment.data.schema.target == "ill"
    with pytest.raises(UsageError, match="every client has its own"):
        load_experiment(Path("tables.toml"), ["data.partition=dirichlet"])
    assert load_experiment(Path("digits.toml"), ["train.rounds=7"]).train.rounds == 7


# -- a client: bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "words"), [
    ({"--server": "localhost"}, ["HOST:PORT"]),
    ({"--server": "https://localhost:1"}, ["HOST:PORT"]),
    ({"--name": "a/b"}, ["--name"]),
    ({"--name": "east"}, ["east.key", "north"]),
    ({"--keys": None}, ["--keys is missing"]),
    ({"--keys": "nothing"}, ["nothing/ca.crt"]),
    ({"--insecure": ""}, ["--keys and --insecure"]),
    ({"--insecure": "", "--keys": None, "--server": "192.0.2.1:1"}, ["--insecure is only for"]),
    ({"--data": "none.csv"}, ["none.csv", "no such file"]),
    ({"--data": "digits.toml"}, [".csv", ".npz"]),
    ({"--expect": "none.toml"}, ["none.toml"]),
])
def test_a_client_that_cannot_be(changes, words, home, pki):
    given: dict[str, Any] = {"--server": "127.0.0.1:9", "--name": "north", "--data": "north.csv",
                             "--keys": pki / "north"} | changes
    options = [part for name, value in given.items() if value is not None
               for part in ([name] if value == "" else [name, value])]
    refused(call("client", *options), *words)
    assert not (home / "descant-north").exists()


def test_two_processes_with_one_directory(home, pki):
    from descant.core.files import locked

    (home / "descant-north").mkdir()
    with locked(home / "descant-north"):
        result = call("client", "--server", "127.0.0.1:9", "--name", "north", "--data", "north.csv", "--keys",
                      pki / "north")
    refused(result, "another process", "descant-north", code=1)


# -- a server and its nodes in one process -----------------------------------------------------------


@pytest.fixture
def linked(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., flower.MemoryServer]:
    def to(**data: str) -> flower.MemoryServer:
        transport = flower.MemoryServer(flower.make_clients(data, home / "nodes"))
        monkeypatch.setattr(grpc_server, "open_server", lambda host, port, keys: transport)
        return transport

    return to


def serve(*options: object, file: str = "digits.toml") -> Result:
    return call("server", file, "--clients", 2, "--out", "out", "--insecure", *options)


def test_a_server_from_the_first_client_to_the_table(linked, home):
    linked(north="digits:0", south="digits:1")
    result = serve()
    assert result.code == 0, result.err
    assert "WARNING: --insecure" in result.out
    assert "fedavg, mclr: 2 clients, 650 parameters, 3 rounds" in result.out
    assert re.search(r"round 2/3  2 clients in .*, .* k?B  personal test accuracy \d", result.out)
    assert "sending the models" in result.out
    table = result.out.partition("on the clients' own test rows")[2]
    assert re.search(r"client +alone +shared model +personal model +gain over alone", table)
    for name in (*NAMES, "mean", "mean balanced_accuracy"):
        assert re.search(rf"{name} +\d\.\d{{4}} +\d\.\d{{4}} +\d\.\d{{4}} +[+-]\d\.\d{{4}}", table), table
    assert "out/clients.json" in table
    assert {*json.loads((home / "out" / "clients.json").read_text())} == {*NAMES}


def test_the_same_command_continues(linked, monkeypatch):
    linked(north="digits:0", south="digits:1")
    play = server.runs.Training.play
    rounds = iter([1, 2])

    def stopped(training: Any, backend: Any) -> Any:
        if next(rounds, None) is None:
            raise KeyboardInterrupt
        return play(training, backend)

    monkeypatch.setattr(server.runs.Training, "play", stopped)
    first = serve()
    assert first.code == 130
    assert first.err == "stopped after round 2 of 3; rerun the same command to continue\n"
    monkeypatch.setattr(server.runs.Training, "play", play)
    second = serve()
    assert second.code == 0
    assert "the clients of this federation: north, south" in second.out
    assert "continuing after round 2 of 3" in second.out
    third = serve("--no-alone")
    assert third.code == 0
    assert "all 3 rounds are done" in third.out
    assert re.search(r"north +\d", third.out)  # from the file: nobody is asked again
    fewer = call("server", "digits.toml", "--clients", 3, "--out", "out", "--insecure")
    refused(fewer, "--clients 2")


def test_who_was_not_there_for_its_model(linked, monkeypatch):
    transport = linked(north="digits:0", south="digits:1")
    deliver = server.ModelDelivery.deliver

    def after_south_left(delivery: Any) -> None:
        transport.offline.add("south")
        delivery._manager._greeted = -1.0
        deliver(delivery)

    monkeypatch.setattr(server.ModelDelivery, "deliver", after_south_left)
    result = serve("--no-alone")
    refused(result, "no model yet for south", "start the server again", code=1)
    assert re.search(r"north +\d\.\d{4} +\d\.\d{4} *\n", result.out)  # no column for alone
    monkeypatch.setattr(server.ModelDelivery, "deliver", deliver)
    transport.offline.clear()
    again = serve("--no-alone")
    assert again.code == 0
    assert "south has its model" in again.out


def test_files_that_do_not_fit(linked, home):
    (home / "south.csv").write_text("age,ill\nseventy,no\n41,yes\n")
    linked(north="north.csv", south="south.csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.time, "sleep", lambda _: signal.raise_signal(signal.SIGINT))
        result = serve(file="tables.toml")
    assert result.code == 130
    assert "north connected (1 of 2)" in result.out
    assert "refused south: it failed: UsageError" in result.out
    assert "seventy" not in result.out + result.err
    assert result.err == ("stopped while waiting for clients: 1 of 2 were connected; rerun the same command "
                          "to continue\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_server(number, code, linked, monkeypatch):
    linked(north="digits:0", south="digits:1")
    monkeypatch.setattr(server.runs.Training, "play", lambda *_: signal.raise_signal(number))
    before = signal.getsignal(signal.SIGTERM)
    result = serve()
    assert (result.code, result.err) == (
        code, "stopped after round 0 of 3; rerun the same command to continue\n")
    assert signal.getsignal(signal.SIGTERM) is before


# -- a client, with a server in the same process -----------------------------------------------------


def take_part(monkeypatch: pytest.MonkeyPatch, home: Path, *options: object, experiment: str = "digits.toml",
              data: str = "digits:0", other: str = "digits:1") -> tuple[Result, Any, bool]:
    """`descant client` for north, while south is another node; returns also what the server saw, and whether
    the client wanted to stop."""
    seen, wanted = flower.Quiet(), []
    monkeypatch.setattr(federation_client, "LINGER", 0.0)

    def fake(client: Any, answer: Callable[..., Any], events: Any, stop: threading.Event) -> None:
        def north(content: Any) -> Any:
            events.received(100)
            found = answer(content)
            events.sent(200)
            return found

        events.connected()
        south = flower.make_clients({"south": other}, home / "nodes")
        transport = flower.MemoryServer({"north": north} | south)
        with contextlib.suppress(KeyboardInterrupt):
            flower.federate(load_experiment(Path(experiment), []), transport, home / "out", observer=seen)
        wanted.append(stop.wait(0.5))

    monkeypatch.setattr(grpc_client.GrpcClient, "serve", fake)
    monkeypatch.setattr(server.time, "sleep", lambda _: signal.raise_signal(signal.SIGINT))
    result = call("client", "--server", "127.0.0.1:8443", "--name", "north", "--data", data, "--insecure",
                  *options)
    return result, seen, bool(wanted and wanted[0])


@pytest.mark.slow
def test_a_client_shows_what_it_sends_and_ends_with_its_model(home, monkeypatch):
    result, _, ended = take_part(monkeypatch, home)
    assert result.code == 0, result.err
    assert ended
    for text in ("WARNING: --insecure", "connected to 127.0.0.1:8443",
                 "joined as one of 2 clients: fedavg, mclr", "sizes (train ", "value.upload",
                 "tensors as before", "steps 2", "your model: descant-north/model.safetensors"):
        assert text in result.out, result.out
    assert re.search(r"accuracy +\d\.\d{4} +\d\.\d{4} +\d\.\d{4} +[+-]\d", result.out)
    assert (home / "descant-north" / "model.safetensors").exists()
    scope: dict[str, Any] = {}
    exec(_blocks("python")[0], scope)  # what the document says of the model
    assert scope["network"].network.head.out_features == 10
    again, _, stayed = take_part(monkeypatch, home, "--stay")
    assert not stayed
    assert "note: the next model replaces descant-north/model.safetensors" in again.out


@pytest.mark.parametrize(("table", "words"), [
    ("years,ill\n20,no\n", ["columns", "years", "age"]),
    ("age,ill\n70,no\nseventy,yes\n", ["north.csv", "line 3", "'age'", "seventy"]),
    ("age,ill\n70,no\n", ["1 rows", "at least 2"]),
    ("age,ill\n70,no\n71,perhaps\n", ["perhaps"]),
])
def test_a_file_that_does_not_fit_is_told_in_full_only_here(table, words, home, monkeypatch):
    (home / "south.csv").write_text((home / "north.csv").read_text())
    (home / "north.csv").write_text(table)
    result, seen, ended = take_part(monkeypatch, home, experiment="tables.toml", data="north.csv",
                                    other="south.csv")
    refused(result, *words)
    assert ended
    assert seen.of("refused") == [("north", "it failed: UsageError")]


def test_another_version_is_told_on_both_sides(home, monkeypatch):
    monkeypatch.setattr(client_manager, "__version__", "9.9")
    result, seen, _ = take_part(monkeypatch, home)
    refused(result, "the client runs descant", "the server 9.9")
    assert "the server 9.9" in seen.of("refused")[0][1]


def test_an_experiment_that_was_not_agreed_on(home, monkeypatch):
    (home / "agreed.toml").write_text(TOML.replace("steps = 2", "steps = 20"))
    result, _, _ = take_part(monkeypatch, home, "--expect", "agreed.toml")
    refused(result, "is not the expected one", "steps")
    (home / "agreed.toml").write_text(TOML.replace("rounds = 3", "rounds = 9"))
    assert take_part(monkeypatch, home, "--expect", "agreed.toml")[0].code == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_client(number, code, home, monkeypatch):
    stopped = []

    def fake(*given: Any) -> None:
        try:
            signal.raise_signal(number)
        finally:
            stopped.append(given[-1].is_set())

    monkeypatch.setattr(grpc_client.GrpcClient, "serve", fake)
    result = call("client", "--server", "127.0.0.1:1", "--name", "north", "--data", "north.csv", "--insecure")
    assert (result.code, stopped) == (code, [True])
    assert result.err == "stopped; rerun the same command to continue with descant-north\n"


# -- displays ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def terminal() -> Iterator[Console]:
    yield Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=100, markup=False,
                  highlight=False, emoji=False)


def printed(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return ANSI.sub("", file.getvalue())


def test_on_a_terminal_the_server_shows_who_is_at_work(home):
    with terminal() as console, ServerDisplay(console, 2) as display:
        transport = flower.MemoryServer(
            flower.make_clients({"north": "digits:0", "south": "digits:1"}, home / "nodes"))
        flower.federate(load_experiment(Path("digits.toml"), []), transport, home / "out", observer=display)
        display.asked("local", 3, NAMES)
        display.answered("north", "local", 0.5, 1000)
        console.print(display.lines())
    text = printed(console)
    assert "round 3/3: training, 1 of 2 done" in text
    assert re.search(r"south +working for", text)
    assert re.search(r"north +replied after 0.5 s, 1.0 kB", text)


def test_many_clients_fit_on_a_terminal(home):
    with terminal() as console:
        display = ServerDisplay(console, 50)
        display._names = tuple(map(str, range(50)))
        display.asked("local", 1, display._names)
        display.answered("0", "local", 1.0, 10)
        console.print(display.lines())
    assert "and 30 clients more" in printed(console)
    assert not re.search(r"^  0 ", printed(console), re.MULTILINE)  # who has answered comes last


def test_what_others_say_cannot_move_the_cursor(home):
    with terminal() as console:
        display = ServerDisplay(console, 2)
        display.refused("evil\x1b[2J\nname", "it failed: \x1b]0;title\x07")
    file = console.file
    assert isinstance(file, io.StringIO)
    assert "\x1b]" not in file.getvalue()
    assert "\x1b[2J" not in file.getvalue()
    assert file.getvalue().count("\n") == 1


def test_a_lost_client_is_told_once(home):
    console = Console(file=io.StringIO(), width=200)
    display = ServerDisplay(console, 2)
    display._names, display._rounds = NAMES, 5
    for _ in range(3):
        display.lost("south", "local", "not connected")
    display.waiting(1, 2, ["south"])
    display.waiting(1, 2, ["south"])
    display.answered("south", "local", 1.0, 10)
    assert printed(console).splitlines() == [
        "round 1: nothing from south: not connected",
        "waiting for south: 1 of 2 needed clients are connected",
        "south is back"]


def test_a_client_leaves_when_the_server_has_gone():
    stop = threading.Event()
    with ClientDisplay(Console(file=io.StringIO(), width=200), "north", stop, False) as display:
        display.finished({"personal": {"loss": 1.0}}, Path("model.safetensors"))
        assert not stop.is_set()
        display.sent(10)
        assert not stop.is_set()  # the server may not have fetched it yet
        display.lost("no server can be reached")
        assert stop.is_set()


def test_the_table_of_figures_that_are_no_accuracy():
    console = Console(file=io.StringIO(), width=200)
    row = {"personal": {"loss": 1.0, "mse": 2.0, "r2": 0.5}, "shared": {"loss": 1.0, "mse": 3.0, "r2": 0.25},
           "alone": {"loss": 1.0, "mse": 2.5, "r2": None}}
    show_outcome(console, ["a", "b"], {"b": row, "new": row}, Path("out"))
    text = printed(console)
    assert "loss on the clients' own test rows" in text  # what rounds are selected by without an accuracy
    assert re.search(r"b +1 +1 +1 +\+0\s", text)
    assert re.search(r"mean r2 +- +0.25 +0.5 +-\s", text)
    assert re.search(r"new \(newcomer\) +1", text)
    assert re.search(r"mean mse +2.5 +3 +2 +\+0.5", text)  # less is better
    show_outcome(console, ["a"], {}, Path("out"))
