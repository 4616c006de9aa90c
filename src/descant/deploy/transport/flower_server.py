"""The server's transport over Flower: a SuperLink in a process of its own, and a grid on it.

The process (`superlink.py`) ends with this one, however this one ends. The grid is Flower's with three
differences: no signal is sent to this process, a dead SuperLink is an error with the end of its log, and a
reply that is still being uploaded is left for the next look, so that one slow client does not block the
others.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from flwr.app import Error, Message, Metadata
from flwr.app.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE, TASK_TOKEN_HEADER
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from descant.deploy.keys import LOCAL_HOSTS, ServerKeys
from descant.deploy.transport import Connection, Payload, superlink
from descant.deploy.transport.address import Address, listen
from descant.deploy.transport.grid import GridTransport
from descant.deploy.transport.http import Headers, connect, silence
from descant.deploy.transport.seals import Seals
from descant.deploy.transport.superlink import QUIET, Opened, Options
from descant.deploy.transport.tls import write_own_certificate
from descant.errors import DescantError, UsageError

START = 60.0  # seconds to start: ten on a busy machine
PAUSES = (0.05, 0.2, 1.0, 2.0, 4.0)  # seconds between attempts to reach a process on this machine
LINES = 12  # of its log, in an error
OWN, AUTHORITIES = "parent.pem", "authorities.crt"  # in the process's own directory


class FlowerServer(GridTransport, contextlib.AbstractContextManager["FlowerServer"]):
    """A running SuperLink and the grid on it: a `ServerTransport`."""

    def __init__(self, process: subprocess.Popen[bytes], home: tempfile.TemporaryDirectory[str], log: Path,
                 begins: int, address: Address, keys: ServerKeys | None) -> None:
        self._seals = None if keys is None else Seals(keys.key, keys.certificate)
        self._largest = 0
        self.address = address  # for this process; the port is the one that clients use
        self._grid: SuperLinkGrid
        self._process = process
        self._home = home
        self._log = log
        self._begins = begins  # bytes of the log from earlier runs
        self._is_open = True

    @property
    def port(self) -> int:
        return self.address.port

    @property
    def process(self) -> int:
        """The SuperLink's process."""
        return self._process.pid

    def connected(self) -> dict[int, Connection]:
        self.check()
        return super().connected()

    def check(self) -> None:
        """Raise if the SuperLink is gone."""
        if (code := self._process.poll()) is not None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise DescantError(f"the SuperLink {how}{self._tail()}")

    def send(self, payloads: Mapping[int, Payload], seconds: float) -> dict[int, str]:
        """Signed, so that clients can tell a request from what somebody else has brought into the link."""
        return super().send(payloads if self._seals is None else self._seals.sealed(payloads), seconds)

    def forget(self, requests: Collection[str]) -> None:
        self._grid.forget(requests)

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if hasattr(self, "_grid"):
            self._grid.close()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # which ends it
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._home.cleanup()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tail(self) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(max(self._begins, file.seek(0, os.SEEK_END) - 4000))
                lines = file.read().decode("utf-8", "replace").splitlines()[-LINES:]
        except OSError:
            lines = []
        return f"; the end of {self._log}:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""

    def _start(self, options: Options, keys: ServerKeys | None) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: raised below
            self._process.stdin.write(json.dumps(options._asdict()).encode() + b"\n")
            self._process.stdin.flush()
        opened = Opened(**json.loads(self._first_line()))
        headers = Headers({"authorization": f"Bearer {options.token}", TASK_TOKEN_HEADER: opened.token},
                          server_name=None if keys is None else LOCAL_HOSTS[0])
        context = None
        if keys is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(cadata=keys.ca.decode("ascii"))
            context.load_cert_chain(Path(self._home.name) / OWN)
        client = connect(RuntimeHttpClient, self.address, context, [headers], Retry(self.check))
        # Flower reads these globals when it makes a message.
        TaskIdentity.task_id, TaskIdentity.run_id = opened.task, opened.run
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        self._grid = SuperLinkGrid(client, opened)

    def _first_line(self) -> bytes:
        """What the process writes when it is up."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], START)[0]:
            raise DescantError(f"the SuperLink did not start within {START:g} s{self._tail()}")
        text = self._process.stdout.readline()
        if not text.endswith(b"\n"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self.check()
            raise DescantError(f"the SuperLink did not start{self._tail()}")
        self._process.stdout.close()
        return text


def open_server(host: str, port: int, keys: ServerKeys | None, log: Path) -> FlowerServer:
    """Start a SuperLink that listens at this address, with these clients' keys; port 0 takes a free one.
    Without keys nothing is encrypted and anybody may join: only within this machine."""
    silence()
    if keys is None and not Address(host, port).is_loopback:
        raise UsageError(f"without certificates a server is only for its own machine, and {host} is not its "
                         "loopback: use 127.0.0.1, or make certificates with: descant certificates DIR "
                         "--host HOST")
    listener = listen(host, port)
    with listener:
        bound = Address(*listener.getsockname()[:2])
        here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound.host, bound.host)
        home = tempfile.TemporaryDirectory(prefix="descant-superlink-", ignore_cleanup_errors=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        # without Flower's settings in the user's environment
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
        with log.open("ab") as file:
            begins = file.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", superlink.__name__], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=file, pass_fds=[listener.fileno()], start_new_session=True,
                env=environment | QUIET | {"FLWR_HOME": home.name})
        server = FlowerServer(process, home, log, begins, Address(here, bound.port), keys)
        options = Options(os.getpid(), listener.fileno(), secrets.token_hex(32), None)
        if keys is not None:
            place = Path(home.name)
            (place / AUTHORITIES).write_bytes(keys.ca + write_own_certificate(place / OWN))
            options = options._replace(clients={name: key.decode() for name, key in keys.clients.items()},
                                     certificate=str(keys.certificate), key=str(keys.key),
                                     ca=str(place / AUTHORITIES))
    try:
        server._start(options, keys)
    except BaseException:
        server.close()
        raise
    return server


class Retry:
    """Replaces Flower's, which interrupts this process when it is refused."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def invoke(self, request: Callable[[], Any]) -> Any:
        for pause in (*PAUSES, None):
            try:
                return request()
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
            except httpx.HTTPStatusError as error:
                reason = f"status {error.response.status_code}: {error.response.text[:300]}"
                if error.response.status_code < 500:
                    break
            self._check()
            if pause is not None:
                time.sleep(pause)
        self._check()
        raise DescantError(f"the SuperLink does not respond properly ({reason})")


class _Arriving(NamedTuple):
    """A reply that is still being uploaded."""

    id: str
    reply_to: str
    missing: list[str]  # objects
    contents: dict[str, bytes]


class SuperLinkGrid(HttpGrid):
    """Flower's grid on our own HTTP client."""

    def __init__(self, client: RuntimeHttpClient, opened: Opened) -> None:
        super().__init__(token=opened.token)
        self._client = client
        self._run = Run.create_empty(opened.run)
        self._run_id = opened.run
        self._arriving: dict[str, _Arriving] = {}  # by the message they reply to

    def _connect(self) -> None:
        raise DescantError("the connection to the SuperLink is closed")

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:  # Flower would take the run that was opened last
            message.metadata.__dict__["_run_id"] = self._run_id
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The complete replies to these messages, each once."""
        asked = {*message_ids}
        if new := asked - self._arriving.keys():
            answer = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=sorted(new)))
            for head, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
                objects = list(dict.fromkeys(each.object_id for each in iterate_object_tree(tree)))
                reply_to = head.metadata.reply_to_message_id
                self._arriving[reply_to] = _Arriving(head.metadata.message_id, reply_to, objects, {})
        pulled = (self._pull(self._arriving[each]) for each in sorted(asked & self._arriving.keys()))
        return [message for message in pulled if message is not None]

    def forget(self, message_ids: Iterable[str]) -> None:
        for message in message_ids:
            reply = self._arriving.pop(message, None)
            for each in [message] if reply is None else [message, reply.id]:
                self._confirm(each)

    def _pull(self, reply: _Arriving) -> Message | None:
        """Fetch what has arrived of a reply; returns it when it is complete."""
        while reply.missing:
            found = self._runtime_client.PullObject(PullObjectRequest(
                node=self.node, run_id=self._run_id, object_id=reply.missing[-1]))
            if not found.object_found:  # the upload was abandoned, or took too long
                del self._arriving[reply.reply_to]
                return self._unavailable(reply)
            if not found.object_available:
                return None
            reply.contents[reply.missing.pop()] = found.object_content
        del self._arriving[reply.reply_to]
        self._confirm(reply.id)
        try:
            message = inflate_object_from_contents(reply.id, reply.contents)
            assert isinstance(message, Message)
        except Exception:  # a client may send anything
            return self._unavailable(reply)
        message.metadata.__dict__["_message_id"] = reply.id
        return message

    def _confirm(self, message: str) -> None:
        self._runtime_client.ConfirmMessageReceived(ConfirmMessageReceivedRequest(
            node=self.node, run_id=self._run_id, message_object_id=message))

    def _unavailable(self, reply: _Arriving) -> Message:
        """Flower's error for a reply that did not arrive."""
        node = self.node.node_id
        return make_message(
            metadata=Metadata(run_id=self._run_id, message_id="", src_node_id=node, dst_node_id=node,
                              message_type=SYSTEM_MESSAGE_TYPE, group_id="", ttl=0, created_at=time.time(),
                              reply_to_message_id=reply.reply_to),
            error=Error(code=ErrorCode.MESSAGE_UNAVAILABLE, reason="the reply is incomplete"))
