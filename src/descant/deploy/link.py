"""The server's side of the connection: a SuperLink of its own, and Flower's grid on it.

`open_link` starts the process (`superlink.py`), which ends with this one however this one ends. The grid is
Flower's, with three differences: no signal is ever sent to this process, a SuperLink that died is an error
with the end of its log, and a reply whose tensors are still on their way is left for the next look instead of
being waited for, so that one slow client does not keep the others.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
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

from descant.deploy.certificates import HERE, ServerKeys
from descant.deploy.superlink import QUIET, Opened, Orders
from descant.deploy.wire import Address, Headers, connect, hush
from descant.errors import DescantError, UsageError

START = 60.0  # seconds that the process may take to start: on a busy machine it takes ten
PAUSES = (0.05, 0.2, 1.0, 2.0, 4.0)  # seconds between attempts to reach a process on this machine
LINES = 12  # of its log, in an error


class Link:
    """A running SuperLink. `grid` is used by one thread."""

    def __init__(self, process: subprocess.Popen[bytes], home: tempfile.TemporaryDirectory[str], log: Path,
                 begins: int, address: Address) -> None:
        self.address = address  # at which this process reaches it; the port is the one clients use
        self.grid: LinkGrid
        self._process = process
        self._home = home
        self._log = log
        self._begins = begins  # bytes of the log that are of earlier runs
        self._is_open = True

    @property
    def port(self) -> int:
        return self.address.port

    @property
    def process(self) -> int:
        """The SuperLink's process."""
        return self._process.pid

    def check(self) -> None:
        """Raise if the SuperLink is gone."""
        if (code := self._process.poll()) is not None:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            raise DescantError(f"the SuperLink {how}{self._tail()}")

    def forget(self, ids: Iterable[str]) -> None:
        """Let the SuperLink drop messages whose answers nobody waits for any more."""
        self.grid.forget(ids)

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if hasattr(self, "grid"):
            self.grid.close()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # which it takes for the end
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._home.cleanup()

    def __enter__(self) -> Link:
        return self

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

    def _open(self, orders: Orders, keys: ServerKeys | None) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: said below
            self._process.stdin.write(json.dumps(orders._asdict()).encode() + b"\n")
            self._process.stdin.flush()
        opened = Opened(**json.loads(self._first_line()))
        headers = Headers({"authorization": f"Bearer {orders.token}", TASK_TOKEN_HEADER: opened.token},
                          server_name=None if keys is None else HERE[0])
        client = connect(RuntimeHttpClient, self.address, None if keys is None else keys.ca, [headers],
                         Patience(self.check))
        # Flower looks in these globals when a message is made.
        TaskIdentity.task_id, TaskIdentity.run_id = opened.task, opened.run
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        self.grid = LinkGrid(client, opened)

    def _first_line(self) -> bytes:
        """What the process says when it is up."""
        assert self._process.stdout is not None
        descriptor, deadline, text = self._process.stdout.fileno(), time.monotonic() + START, b""
        os.set_blocking(descriptor, False)
        while not text.endswith(b"\n"):
            try:
                text += (piece := os.read(descriptor, 4096))
            except BlockingIOError:
                if time.monotonic() > deadline:
                    late = f"the SuperLink did not start within {START:g} s"
                    raise DescantError(f"{late}{self._tail()}") from None
                time.sleep(0.02)
                continue
            if not piece:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(5)
                self.check()
                raise DescantError(f"the SuperLink did not start{self._tail()}")
        self._process.stdout.close()
        return text


def open_link(host: str, port: int, keys: ServerKeys | None, log: Path) -> Link:
    """Start a SuperLink that listens at this address, with these clients' keys; port 0 takes a free one.
    Without keys nothing is encrypted and anybody may join: only within this machine."""
    hush()
    if keys is None and not Address(host, port).is_loopback:
        raise UsageError(f"without certificates the server is only for this machine, and {host} is not its "
                         "loopback: use 127.0.0.1, or make certificates with: descant certificates")
    listener = _listen(host, port)
    with listener:
        bound = Address(*listener.getsockname()[:2])
        here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound.host, bound.host)
        home = tempfile.TemporaryDirectory(prefix="descant-superlink-", ignore_cleanup_errors=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        # Flower's own settings in the environment are not for this SuperLink
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
        with log.open("ab") as file:
            begins = file.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "descant.deploy.superlink"], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=file, pass_fds=[listener.fileno()], start_new_session=True,
                env=environment | QUIET | {"FLWR_HOME": home.name})
        link = Link(process, home, log, begins, Address(here, bound.port))
        orders = Orders(os.getpid(), listener.fileno(), secrets.token_hex(32), None)
        if keys is not None:
            orders = orders._replace(clients={name: key.decode() for name, key in keys.clients.items()},
                                     certificate=str(keys.certificate), key=str(keys.key),
                                     ca=str(keys.directory / "ca.crt"))
    try:
        link._open(orders, keys)
    except BaseException:
        link.close()
        raise
    return link


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens, so that nobody else can take the port while the process starts."""
    if not 0 <= port < 2**16:
        raise UsageError(f"a port is a number up to 65535, not {port}")
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise UsageError(f"{host!r} is not a name or an address of this machine: choose one with --host"
                         ) from None
    family, kind, protocol, _, address = infos[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UsageError({
            errno.EADDRINUSE: f"port {port} on {host} is in use: choose another with --port",
            errno.EACCES: f"port {port} is kept for the system: choose one from 1024 on with --port",
            errno.EADDRNOTAVAIL: f"{host} is not an address of this machine: listen on all that it has with "
                                 "--host 0.0.0.0",
        }.get(error.errno or 0, f"cannot listen on {host}:{port}: {error.strerror}")) from None
    return listener


class Patience:
    """In place of what Flower retries requests with: that one would interrupt this process when refused."""

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
        raise DescantError(f"the SuperLink does not answer as it should ({reason})")


class _Arriving(NamedTuple):
    """A reply of which not everything is there yet."""

    id: str
    reply_to: str
    missing: list[str]  # objects
    contents: dict[str, bytes]


class LinkGrid(HttpGrid):
    """Flower's grid on a client that was made for it."""

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
        for message in messages:  # made for the run that was opened last
            message.metadata.__dict__["_run_id"] = self._run_id
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies to these messages that are there as a whole; each of them once."""
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
        """What has come of a reply since the last look; the whole of it if there is no more to come."""
        while reply.missing:
            found = self._runtime_client.PullObject(PullObjectRequest(
                node=self.node, run_id=self._run_id, object_id=reply.missing[-1]))
            if not found.object_found:  # the upload was given up, or took too long
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
        except Exception:  # whatever a client may have sent in place of one
            return self._unavailable(reply)
        message.metadata.__dict__["_message_id"] = reply.id
        return message

    def _confirm(self, message: str) -> None:
        self._runtime_client.ConfirmMessageReceived(ConfirmMessageReceivedRequest(
            node=self.node, run_id=self._run_id, message_object_id=message))

    def _unavailable(self, reply: _Arriving) -> Message:
        """Flower's error for a reply that cannot be had."""
        node = self.node.node_id
        return make_message(
            metadata=Metadata(run_id=self._run_id, message_id="", src_node_id=node, dst_node_id=node,
                              message_type=SYSTEM_MESSAGE_TYPE, group_id="", ttl=0, created_at=time.time(),
                              reply_to_message_id=reply.reply_to),
            error=Error(code=ErrorCode.MESSAGE_UNAVAILABLE, reason="the reply did not arrive as a whole"))
