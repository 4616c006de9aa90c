"""The connection, over both transports: real processes on the loopback, TLS, keys, kills and restarts."""

from __future__ import annotations

import contextlib
import datetime
import http.server
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPSConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

import httpx

import descant
from benchmarks.chaos.clock import Clocks
from descant.deploy import certificates, keys
from descant.deploy.certificates import make_certificates
from descant.deploy.keys import ClientKeys, ServerKeys
from descant.deploy.messages import WireMessage
from descant.deploy.transport import NoReply, Payload, ServerTransport, choose, flower_client
from descant.deploy.transport.address import Address, diagnose
from descant.deploy.transport.choose import Name, make_client
from descant.deploy.transport.flower_server import open_server
from descant.deploy.transport.http import connect
from descant.deploy.transport.tls import client_context
from descant.errors import DescantError, UsageError

pytestmark = [pytest.mark.slow, pytest.mark.alone]

NAMES = ("north", "south")
over_flower = pytest.mark.parametrize("federation", [Name.flower], indirect=True)
over_both = pytest.mark.parametrize("transport", list(Name))
# the package that these tests see is the one that is run, installed or not
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(descant.__file__).parents[1])}
NODE = """
import json, sys, threading, time
from pathlib import Path
from descant.deploy.keys import ClientKeys
from descant.deploy.transport.address import Address
from descant.deploy.transport.choose import Name, make_client

address, pki, name, transport = sys.argv[1:]

class Events:
    def connected(self): print("connected", flush=True)
    def lost(self, reason): print("lost", reason, flush=True)
    def received(self, count): pass
    def sent(self, count): pass
    def ignored(self, reason): print("ignored", reason, flush=True)

def echo(payload):
    time.sleep(json.loads(payload.facts).get("seconds", 0))
    return payload

keys = None if pki == "none" else ClientKeys.load(Path(pki) / name, name)
client = make_client(Name(transport), Address.parse(address), keys, Path(name))
client.serve(echo, Events(), threading.Event())
"""
PARENT = """
import sys, time
from pathlib import Path
from descant.deploy.transport.flower_server import open_server

link = open_server("127.0.0.1", 0, None, Path("orphan.log"))
print(link.process, link._home.name, flush=True)
time.sleep(100)
"""


class Nodes:
    """Clients in processes of their own."""

    def __init__(self, directory: Path, pki: Path | None, transport: Name) -> None:
        self._directory = directory
        self._transport = transport
        self._pki = pki
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, port: int, *names: str) -> None:
        for name in names:
            with (self._directory / f"{name}.log").open("ab") as log:
                self._processes[name] = subprocess.Popen(
                    [sys.executable, "-c", NODE, f"localhost:{port}", str(self._pki or "none"), name,
                     self._transport],
                    cwd=self._directory, env=ENVIRONMENT, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text()

    def close(self) -> None:
        for name in list(self._processes):
            self.kill(name)


class Federation:
    """A link that can be replaced, and its nodes."""

    def __init__(self, directory: Path, keys: ServerKeys, nodes: Nodes, transport: Name) -> None:
        self.keys = keys
        self.nodes = nodes
        self.transport = transport
        self._log = directory / "superlink.log"
        self.link = self._open(0)

    def _open(self, port: int) -> Any:
        return choose.open_server(self.transport, "0.0.0.0", port, self.keys, self._log)

    def restart(self) -> None:
        port = self.link.port
        self.link.close()
        self.link = self._open(port)


@pytest.fixture(scope="module")
def pki(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("pki")
    make_certificates(directory / "ours", "localhost", NAMES)
    make_certificates(directory / "others", "localhost", NAMES)
    return directory


@pytest.fixture(scope="module", params=list(Name))
def federation(request, pki, tmp_path_factory) -> Iterator[Federation]:
    directory = tmp_path_factory.mktemp("federation")
    nodes = Nodes(directory, pki / "ours", request.param)
    found = Federation(directory, ServerKeys.load(pki / "ours" / "server"), nodes, request.param)
    try:
        nodes.start(found.link.port, *NAMES)
        yield found
    finally:
        nodes.close()
        found.link.close()


def until(what: Callable[[], Any], seconds: float = 30) -> Any:
    """Wait for it."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)
    return found


def online(link: ServerTransport, count: int = len(NAMES)) -> dict[str, int]:
    def look() -> dict[str, int] | None:
        found = {connection.name: address for address, connection in link.connected().items()}
        return found if len(found) == count else None
    found: dict[str, int] = until(look)
    return found


def message(tensor: torch.Tensor | None = None, **facts: Any) -> Payload:
    return WireMessage.of(facts, **({} if tensor is None else {"x": tensor})).encode()


def ask(link: ServerTransport, payloads: Mapping[int, Payload], seconds: float = 60
        ) -> dict[int, WireMessage]:
    """The replies of these clients; a request to a client that is just coming back is sent again."""
    replies: dict[int, WireMessage] = {}
    sent: dict[str, int] = {}
    deadline = time.monotonic() + seconds
    while len(replies) < len(payloads):
        assert time.monotonic() < deadline, "no reply in time"
        missing = {address: payload for address, payload in payloads.items()
                   if address not in replies and address not in sent.values()}
        if missing:
            sent |= {id: address for address, id in link.send(missing, 60).items()}
        for id, reply in link.receive(sent):
            address = sent.pop(id)
            if not isinstance(reply, NoReply):
                replies[address] = WireMessage.decode(reply)
        time.sleep(0.02)
    return replies


def received(link: ServerTransport, id: str) -> bool:
    return bool([*link.receive([id])])


def test_an_echo_through_tls(federation):
    nodes = online(federation.link)
    assert {*nodes} == {*NAMES}
    for turn in range(3):
        found = ask(federation.link, {node: message(turn=turn, to=name) for name, node in nodes.items()})
        assert {name: found[node].facts for name, node in nodes.items()} == {
            name: {"turn": turn, "to": name} for name in NAMES}


def test_eighty_megabytes(federation):
    node = online(federation.link)["north"]
    federation.link.expect(80_000_000)
    tensor = torch.from_numpy(np.random.default_rng(0).standard_normal(10_000_000))
    found = ask(federation.link, {node: message(tensor)})[node].tree("x", tensor)
    assert torch.equal(found, tensor)


@over_flower
def test_heartbeats_go_on_while_an_answer_is_made(federation):
    """And nobody else waits for it."""
    link = federation.link
    nodes = online(link)
    (slow,) = link.send({nodes["north"]: message(seconds=2.5 * flower_client.BEAT)}, 60).values()

    def holds() -> float:
        (until,) = [node.online_until for node in link._grid.get_nodes() if node.name == "north"]
        return until

    begin = holds()
    ask(link, {nodes["south"]: message()})
    until(lambda: holds() > begin + 1.5 * flower_client.BEAT)
    assert not received(link, slow)
    until(lambda: received(link, slow))


def test_a_message_that_nobody_will_answer_is_forgotten(federation):
    """Also when the answer comes late: the node drops it and answers the next."""
    link = federation.link
    node = online(link)["south"]
    (late,) = link.send({node: message(seconds=1.5)}, 1.0).values()
    time.sleep(0.3)
    link.forget([late])
    assert ask(link, {node: message(turn=2)}, 10)[node].facts["turn"] == 2


@over_flower
def test_forgotten_messages_take_no_memory(federation):
    link = federation.link
    node = online(link)["south"]
    status = Path("/proc") / str(link.process) / "status"

    def megabytes() -> int:
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS"))

    # a node that is busy fetches nothing more
    (busy,) = link.send({node: message(seconds=4.0)}, 60).values()
    time.sleep(0.3)
    grown: list[int] = []  # by 60 each time if messages were kept; an allocator has enough at last
    while not grown or grown[-1] >= 30:
        assert len(grown) < 8, grown
        begin = megabytes()
        for turn in range(15):
            link.forget([*link.send({node: message(torch.full((10**6,), turn))}, 60).values()])
        time.sleep(1.0)  # garbage is collected meanwhile
        grown.append(megabytes() - begin)
    until(lambda: received(link, busy))


def test_a_port_in_use(federation, tmp_path):
    port = federation.link.port
    with pytest.raises(UsageError, match=f"port {port} on 127.0.0.1 is in use: choose another with --port"):
        choose.open_server(federation.transport, "127.0.0.1", port, None, tmp_path / "log")


@over_both
def test_addresses_that_cannot_be_served(transport, tmp_path, pki):
    keys = ServerKeys.load(pki / "ours" / "server")
    for host, port, why in [("192.0.2.1", 0, "not an address of this machine"),
                            ("127.0.0.1", 70000, "at most 65535"),
                            ("no such host", 0, "not a name or address")]:
        with pytest.raises(UsageError, match=why):
            choose.open_server(transport, host, port, keys, tmp_path / "log")
    with pytest.raises(UsageError, match=r"0\.0\.0\.0 is not its loopback"):
        choose.open_server(transport, "0.0.0.0", 0, None, tmp_path / "log")


# -- who is let in -------------------------------------------------------------------------------


class Events:
    def __init__(self) -> None:
        self.told: list[str] = []

    def connected(self) -> None:
        self.told.append("connected")

    def lost(self, reason: str) -> None:
        self.told.append(reason)

    def received(self, count: int) -> None:
        pass

    def sent(self, count: int) -> None:
        pass

    def ignored(self, reason: str) -> None:
        self.told.append(reason)


def attempt(address: str, keys: ClientKeys | None, directory: Path, transport: Name = Name.flower) -> str:
    """Why a client does not even begin."""
    with pytest.raises(DescantError) as error:
        make_client(transport, Address.parse(address), keys, directory).serve(
            lambda payload: payload, Events(), threading.Event())
    return str(error.value)


def test_an_unknown_key_is_refused(federation, pki, tmp_path):
    """Though its certificate is one of the authority's."""
    make_certificates(pki / "ours", "localhost", ["east"])
    (pki / "ours" / "server" / "clients" / "east.pub").unlink()
    time.sleep(1.5)  # a server looks again and again
    stranger = ClientKeys.load(pki / "ours" / "east", "east")
    assert attempt(f"localhost:{federation.link.port}", stranger, tmp_path, federation.transport) == (
        "the server does not know the key of east: ask its operator to add east.pub")


def test_a_certificate_of_another_authority_is_refused_at_the_handshake(federation, pki, tmp_path):
    stranger = ClientKeys.load(pki / "others" / "north", "north")._replace(
        ca=(pki / "ours" / "ca.crt").read_bytes())
    told = attempt(f"localhost:{federation.link.port}", stranger, tmp_path, federation.transport)
    assert "does not take this client's certificate" in told


def test_without_a_certificate_nobody_shakes_hands(federation):
    """A stranger gets no byte but TLS's refusal."""
    context = ssl.create_default_context(cadata=federation.keys.ca.decode())
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (socket.create_connection(("127.0.0.1", federation.link.port), 10) as plain,
          context.wrap_socket(plain, server_hostname="127.0.0.1") as secure):
        try:
            assert secure.recv(1000) == b""
        except (ssl.SSLError, ConnectionResetError) as error:
            assert "CERTIFICATE_REQUIRED" in str(error) or "reset" in str(error)  # noqa: PT017


def test_the_other_transport_is_named(federation, pki, tmp_path):
    other = Name.flower if federation.transport == Name.grpc else Name.grpc
    keys = ClientKeys.load(pki / "ours" / "north", "north")
    told = attempt(f"localhost:{federation.link.port}", keys, tmp_path, other)
    assert f"start this client with --transport {federation.transport}" in told


def test_a_server_of_another_authority_is_refused(federation, pki, tmp_path):
    keys = ClientKeys.load(pki / "others" / "north", "north")
    told = attempt(f"localhost:{federation.link.port}", keys, tmp_path, federation.transport)
    assert "was not issued by the authority in ca.crt" in told


def test_a_certificate_for_another_host_is_refused(federation, pki, tmp_path):
    keys = ClientKeys.load(pki / "ours" / "north", "north")
    told = attempt(f"127.0.0.2:{federation.link.port}", keys, tmp_path, federation.transport)
    assert "is not for 127.0.0.2: connect to the address" in told


def test_plain_text_against_tls(federation, tmp_path):
    told = attempt(f"localhost:{federation.link.port}", None, tmp_path, federation.transport)
    assert "is encrypted: name the folder" in told


@over_flower
def test_a_clock_that_is_wrong(federation, pki, tmp_path, monkeypatch):
    from flwr.supernode import node_auth_http_interceptor as signing

    ahead = datetime.timedelta(minutes=2)
    right = signing.now
    monkeypatch.setattr(signing, "now", lambda: right() + ahead)

    class Ahead(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime.now(tz) + ahead

    monkeypatch.setattr(flower_client, "datetime", SimpleNamespace(datetime=Ahead, UTC=datetime.UTC))
    keys = ClientKeys.load(pki / "ours" / "north", "north")
    told = attempt(f"localhost:{federation.link.port}", keys, tmp_path)
    assert re.search(r"clock is 1[12]\d s ahead of the server's: set it", told)


@over_flower
def test_everything_else_is_closed(federation, pki):
    """Flower would serve it to anybody on the same port."""
    from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.proto.runtime_pb2 import AcquireTaskRequest, GetNodesRequest, PullAppMessagesRequest
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supernode.fleet_http_client import FleetHttpClient

    online(federation.link)
    context = client_context(ClientKeys.load(pki / "ours" / "north", "north"))
    server = Address("127.0.0.1", federation.link.port), context

    def status(call: Callable[[Any], Any], request: Any) -> int:
        with pytest.raises(httpx.HTTPStatusError) as error:
            call(request)
        return error.value.response.status_code

    with connect(ControlHttpClient, *server, []) as control:
        assert status(control.StartRun, StartRunRequest()) == 404
        assert status(control.RegisterNode, RegisterNodeRequest()) == 404
        assert status(control.ListNodes, ListNodesRequest()) == 404
    # not even with the token of the task: only who has this process's own token
    token = RuntimeTokenHttpInterceptor(federation.link._grid._token)
    with connect(RuntimeHttpClient, *server, [token]) as runtime:
        assert status(runtime.AcquireTask, AcquireTaskRequest(supported_task_types=["flwr-serverapp"])) == 404
        assert status(runtime.GetNodes, GetNodesRequest()) == 404
        assert status(runtime.PullMessages, PullAppMessagesRequest()) == 404
    with connect(FleetHttpClient, *server, []) as stranger:
        known = federation.keys.clients["north"]
        assert status(stranger.ActivateNode, ActivateNodeRequest(public_key=known)) == 403
    with httpx.Client(base_url=f"https://127.0.0.1:{federation.link.port}", verify=context) as web:
        for path in ("/", "/docs", "/openapi.json", "/health", "/v1/fleet/get-fab", "/v1/fleet//pull-object",
                     "/v1/fleet/register-node", "/v1/responses", "/v1/control/get-login-details"):
            assert web.get(path).status_code == web.post(path).status_code == 404, path


@over_flower
@pytest.mark.parametrize(("header", "value"), [
    ("content-length", "99999999"), ("transfer-encoding", "chunked")])
def test_unsigned_requests_of_any_length_are_refused_before_they_are_read(federation, pki, header, value):
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

    context = client_context(ClientKeys.load(pki / "ours" / "north", "north"))
    with contextlib.closing(HTTPSConnection("127.0.0.1", federation.link.port, context=context)) as web:
        web.putrequest("POST", "/v1/fleet/push-object")
        web.putheader(FLEET_HTTP_PUBLIC_KEY_HEADER, b64encode(federation.keys.clients["north"]))
        web.putheader(header, value)
        web.endheaders()
        assert web.getresponse().status == 401


@over_flower
def test_a_client_gives_no_orders_to_another(federation, pki):
    """With a key of its own, in the server's name: Flower would pass it on."""
    from flwr.app import Message, RecordDict
    from flwr.common.constant import SUPERLINK_NODE_ID
    from flwr.common.serde import message_to_proto
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.inflatable.inflatable_object import get_object_tree
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    nodes = online(federation.link)
    order = Message(RecordDict(), nodes["south"], "train", ttl=60)
    order.metadata.__dict__ |= {"_message_id": order.object_id, "_run_id": federation.link._grid._run_id,
                                "_src_node_id": SUPERLINK_NODE_ID}
    own = ClientKeys.load(pki / "ours" / "north", "north")
    server = Address("127.0.0.1", federation.link.port), client_context(own)
    signing = [NodeAuthHttpInterceptor(own.private, own.public)]
    with (connect(FleetHttpClient, *server, signing) as liar,
          pytest.raises(httpx.HTTPStatusError) as error):
        liar.PushMessages(PushMessagesRequest(node=Node(node_id=nodes["north"]),
                                              messages_list=[message_to_proto(order)],
                                              message_object_trees=[get_object_tree(order)]))
    assert error.value.response.status_code == 403


@over_flower
def test_the_superlink_has_no_torch_and_no_secret_in_its_command(federation):
    process = Path("/proc") / str(federation.link.process)
    assert "torch" not in (process / "maps").read_text()
    shown = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
    assert federation.link._grid._token.encode() not in shown
    assert b"Bearer" not in shown


def test_nothing_is_written_to_the_terminal(federation, capfd):
    ask(federation.link, dict.fromkeys(online(federation.link).values(), message()))
    assert capfd.readouterr() == ("", "")


# -- servers that are not ours -------------------------------------------------------------------


@contextlib.contextmanager
def listening(context: ssl.SSLContext | None, answer: bytes = b"") -> Iterator[int]:
    """Something that accepts connections, perhaps with TLS, and says the same to everybody."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                accepted, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), accepted:
                accepted.settimeout(5)
                end = accepted if context is None else context.wrap_socket(accepted, server_side=True)
                with end:
                    end.recv(100_000)
                    end.sendall(answer)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@over_both
def test_a_certificate_that_has_expired(transport, pki, tmp_path, monkeypatch):
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=30)
    with monkeypatch.context() as patch:
        for module in (certificates, keys):
            patch.setattr(module, "now", lambda: past)
        make_certificates(tmp_path, "localhost", ["north"], days=10)
        old = ClientKeys.load(tmp_path / "north", "north")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server" / "server.pem", tmp_path / "server" / "server.key")
    with listening(context) as port:
        told = attempt(f"localhost:{port}", old, tmp_path / "state", transport)
    assert told == (f"the certificate of the server at localhost:{port} has expired: renew it on the "
                    "server's side with: descant certificates DIR --host HOST")


@pytest.mark.parametrize("answer", [
    b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"])
def test_a_server_of_another_kind(tmp_path, answer):
    with listening(None, answer) as port:
        assert attempt(f"localhost:{port}", None, tmp_path).endswith("is not a descant server")


@over_both
def test_tls_against_plain_text(transport, pki, tmp_path):
    class Web(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        keys = ClientKeys.load(pki / "ours" / "north", "north")
        told = attempt(f"localhost:{web.server_port}", keys, tmp_path, transport)
        web.shutdown()
        thread.join()
    assert "is not encrypted" in told


def test_addresses_that_are_none(tmp_path):
    for address in ("localhost", "localhost:", ":8443", "localhost:0", "localhost:70000", "https://localhost:1",
                    "::1:8443", "a b:1", "x@y:1"):
        assert "write HOST:PORT" in attempt(address, None, tmp_path)
    assert Address.parse("[::1]:8443") == ("::1", 8443)
    assert "is not its loopback" in attempt("192.0.2.1:8443", None, tmp_path)


def test_a_name_that_nobody_has():
    error = httpx.ConnectError("x")
    error.__cause__ = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert diagnose(error, Address("nowhere.example", 1)) == (
        "unknown host nowhere.example (Name or service not known)", True)
    error.__cause__ = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    assert not diagnose(error, Address("nowhere.example", 1)).is_final


@over_both
def test_a_server_that_is_not_there_yet_is_waited_for(transport, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    events, stop = Events(), threading.Event()
    made = make_client(transport, Address("127.0.0.1", port), None, tmp_path)
    client = threading.Thread(target=made.serve, args=(lambda payload: payload, events, stop))
    client.start()
    try:
        until(lambda: events.told)
        assert events.told == [f"cannot reach a server at 127.0.0.1:{port} (Connection refused)"]
        with choose.open_server(transport, "127.0.0.1", port, None, tmp_path / "log") as link:  # unencrypted
            (node,) = online(link, 1).values()
            assert ask(link, {node: message(turn=1)})[node].facts["turn"] == 1
            assert events.told[1:] == ["connected"]
            begin = time.monotonic()
            stop.set()
            client.join(10)
            until(lambda: not link.connected(), 5)  # it has deregistered
            assert time.monotonic() - begin < 8
    finally:
        stop.set()
        client.join(10)


# -- kills and restarts --------------------------------------------------------------------------


def test_a_node_that_was_killed_comes_back(federation):
    link, nodes = federation.link, federation.nodes
    before = online(link)
    nodes.kill("north")
    nodes.start(link.port, "north")
    assert ask(link, {before["north"]: message(turn=7)})[before["north"]].facts["turn"] == 7
    assert "connected already" not in nodes.log("north")  # nor until the killed one counts as gone
    assert online(link) == before


def test_nodes_come_back_to_a_server_that_was_restarted(federation):
    online(federation.link)
    federation.restart()
    nodes = online(federation.link)
    found = ask(federation.link, {node: message(to=name) for name, node in nodes.items()})
    assert {found[node].facts["to"] for node in nodes.values()} == {*NAMES}
    for name in NAMES:
        lines = federation.nodes.log(name).splitlines()
        assert lines[-1] == "connected"
        assert lines[-2].startswith("lost ")


def test_a_superlink_that_was_killed(tmp_path):
    link = open_server("127.0.0.1", 0, None, tmp_path / "log")
    try:
        link.check()
        os.kill(link.process, signal.SIGINT)  # as Ctrl-C does: the parent decides
        time.sleep(0.3)
        link.check()
        os.kill(link.process, signal.SIGKILL)
        until(lambda: link._process.poll() is not None)
        with pytest.raises(DescantError, match="the SuperLink was killed by signal 9"):
            link.check()
        with pytest.raises(DescantError, match="the SuperLink was killed by signal 9"):
            link._grid.get_nodes()
    finally:
        link.close()
    link.close()  # again
    with pytest.raises(DescantError, match="is closed"):
        link._grid.get_nodes()


def test_a_superlink_that_does_not_start(pki, tmp_path):
    (tmp_path / "damaged.pem").write_text("no certificate")
    keys = ServerKeys.load(pki / "ours" / "server")._replace(certificate=tmp_path / "damaged.pem")
    with pytest.raises(DescantError, match="the SuperLink ended with code 1; the end of") as error:
        open_server("127.0.0.1", 0, keys, tmp_path / "log")
    assert "SSLError" in str(error.value)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("jump", [3600, -3600])
def test_a_server_whose_clock_jumps(jump, pki, tmp_path, monkeypatch):
    """The SuperLink refuses clients for as long as its clock is wrong. The server waits, and goes on."""
    clocks = Clocks(tmp_path)
    if clocks.library is None:
        pytest.skip("a clock that jumps needs a C compiler (cc), and there is none")
    for name, value in clocks.environment("server").items():
        monkeypatch.setenv(name, value)
    nodes = Nodes(tmp_path, pki / "ours", Name.flower)
    link = open_server("127.0.0.1", 0, ServerKeys.load(pki / "ours" / "server"), tmp_path / "log")
    try:
        nodes.start(link.port, *NAMES)
        assert ask(link, dict.fromkeys(online(link).values(), message(n=1)))
        clocks.jump("server", jump)
        for _ in range(30):
            waiting = link.send(dict.fromkeys(link.connected(), message(n=2)), 60)
            [*link.receive(waiting.values())]
            link.forget(waiting.values())
            time.sleep(0.1)
        clocks.jump("server", 0)
        replies = ask(link, dict.fromkeys(online(link).values(), message(n=3)))
        assert [reply.facts["n"] for reply in replies.values()] == [3, 3]
    finally:
        nodes.close()
        link.close()


def test_closing_is_quick_and_leaves_nothing(tmp_path):
    link = open_server("127.0.0.1", 0, None, tmp_path / "log")
    process, home = Path("/proc") / str(link.process), Path(link._home.name)
    assert process.exists()
    assert home.stat().st_mode & 0o077 == 0
    begin = time.monotonic()
    link.close()
    assert time.monotonic() - begin < 3
    assert not process.exists()
    assert not home.exists()
    assert (tmp_path / "log").read_text() == ""


def test_the_superlink_ends_with_its_parent(tmp_path):
    """Even if that is killed."""
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, env=ENVIRONMENT,
                          stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            process, home = parent.stdout.readline().split()
            assert (Path("/proc") / process).exists()
        finally:
            parent.kill()
    until(lambda: not (Path("/proc") / process).exists(), 10)
    assert not Path(home).exists()
