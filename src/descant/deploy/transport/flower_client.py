"""A client's transport over Flower: fetch a request, send the reply, reconnect after every loss.

This is what Flower's SuperNode does, as a loop in the client's own process: no code is fetched, and no
process is started. All connections go from the client to the server, so that a client needs no open port.

Before the first connection, an error that only a person can fix (a certificate, a key, a clock, an address)
is raised. After it, and whenever the server is merely absent, the loop keeps trying.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto import fleet_pb2, message_pb2
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable import inflatable_object as objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from descant.core.files import write_atomic
from descant.deploy.client_directory import open_directory
from descant.deploy.keys import ClientKeys, public_pem
from descant.deploy.transport import Events, Rejected, Reply
from descant.deploy.transport.address import (
    NEW_ONE,
    NOT_TAKEN,
    OTHER_LINK,
    Address,
    Failure,
    diagnose,
    hangs_up,
    speaks_grpc,
    speaks_tls,
)
from descant.deploy.transport.connection import CONNECTED_ALREADY, STRANGER, Connection, require_keys
from descant.deploy.transport.http import connect, silence
from descant.deploy.transport.records import from_records, to_records
from descant.deploy.transport.seals import check_seal
from descant.deploy.transport.superlink import UNKNOWN_KEY
from descant.deploy.transport.tls import client_context
from descant.errors import DescantError

INTERVAL = 10.0  # seconds; after twice that without a heartbeat a client counts as disconnected
BEAT = 4.0  # seconds between heartbeats: a few may be lost
SHORTEST, LONGEST = 0.1, 1.0  # seconds between looks for a request
IDLE_SHARE = 10  # a look for each tenth of the time without a request
PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts to reach the server
UNREADABLE = "a message that cannot be read"
AT_ONCE = 2  # objects that are transferred together

Call = TypeVar("Call")
Result = TypeVar("Result")


class FlowerClient:
    """A `ClientTransport`. `directory` is the client directory: the id that the server gave this client is
    stored there, so that a client that was killed can reconnect at once."""

    def __init__(self, address: Address, keys: ClientKeys | None, directory: Path) -> None:
        require_keys(address, keys)
        self._address, self._keys, self._directory = address, keys, directory

    def serve(self, reply: Reply, events: Events, stop: threading.Event) -> None:
        silence()
        open_directory(self._directory)
        session = _Session(self._address, self._keys, self._directory / "node_id", events, stop)
        heartbeat = threading.Thread(target=session.beat, name="heartbeat", daemon=True)
        heartbeat.start()
        try:
            session.loop(reply)
        except _Stopped:
            pass
        finally:
            session.leave()
            heartbeat.join(1)
            session.close()


class _Stopped(Exception):
    """`stop` was set."""


class _Unknown(Exception):
    """The server does not know this client (any more): the server was restarted."""


class _Over(Exception):
    """The run of a request is over."""


class _Denied(Exception):
    """The server cannot do this now."""


_REFUSALS: dict[int, type[Exception]] = {401: _Unknown, 403: _Over, 412: _Denied}  # by status


class _Session:
    def __init__(self, address: Address, keys: ClientKeys | None, file: Path, events: Events,
                 stop: threading.Event) -> None:
        self._address = address
        self._name = "this client" if keys is None else keys.name
        self._not_ours = f"{address} is not a descant server"
        self._ca = None if keys is None else keys.ca
        private = ec.generate_private_key(ec.SECP384R1()) if keys is None else keys.private
        self._public = public_pem(private.public_key())
        self._keys = keys
        self._api = connect(FleetHttpClient, address, None if keys is None else client_context(keys),
                            [NodeAuthHttpInterceptor(private, private.public_key())])
        self._file = file
        self._events = events
        self._stop = stop
        self._done = threading.Event()  # no more heartbeats
        self._node: Node | None = None  # None: not registered
        self._link = Connection(events)

    def loop(self, reply: Reply) -> None:
        last = 0.0  # time of the last request
        while not self._stop.is_set():
            try:
                if self._node is None:
                    self._node = self._activate()
                    last = time.monotonic()
                found = self._call(self._api.PullMessages, fleet_pb2.PullMessagesRequest(node=self._node))
                if found.messages_list:
                    self._try(self._node, found, reply)
                    last = time.monotonic()
                else:
                    idle = time.monotonic() - last
                    self._stop.wait(min(LONGEST, max(SHORTEST, idle / IDLE_SHARE)))
            except _Unknown:
                self._node = None
                self._link.lose("the server was restarted")
            except (_Over, _Denied):
                self._wait(SHORTEST)  # nobody waits for the reply

    # -- presence -----------------------------------------------------------------------------

    def _activate(self) -> Node:
        """Register with the server. An earlier process that was killed still counts as connected, and is
        deregistered first."""
        with contextlib.suppress(OSError, ValueError, _Unknown, _Over, _Denied):  # perhaps there is no file
            old = fleet_pb2.DeactivateNodeRequest(node_id=int(self._file.read_text()))
            self._call(self._api.DeactivateNode, old)
        request = fleet_pb2.ActivateNodeRequest(public_key=self._public, heartbeat_interval=INTERVAL)
        while True:
            try:
                if self._keys is None:
                    register = fleet_pb2.RegisterNodeFleetRequest(public_key=self._public)
                    with contextlib.suppress(_Denied):  # registered already
                        self._call(self._api.RegisterNode, register)
                found = self._call(self._api.ActivateNode, request)
                break
            except _Unknown as error:  # without a node id this means that the signature is refused
                self._link.fail(_about_clocks(error.__cause__))
            except _Over:
                self._link.fail(self._not_ours)
            except _Denied:
                self._link.lose(CONNECTED_ALREADY.format(self._name))
            self._wait(1)
        write_atomic(self._file, str(found.node_id).encode(), private=True)
        self._link.gain()
        return Node(node_id=found.node_id)

    def beat(self) -> None:
        """Send heartbeats, also while a reply is computed. Errors are left to the loop."""
        while not self._done.wait(BEAT):
            if (node := self._node) is not None:
                request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=INTERVAL)
                with contextlib.suppress(httpx.HTTPError, ValueError, RuntimeError):
                    self._api.SendNodeHeartbeat(request)

    def leave(self) -> None:
        """Deregister, so that the server does not wait."""
        self._done.set()
        if self._node is not None and self._link.is_up:
            self._api._client.timeout = httpx.Timeout(2)
            with contextlib.suppress(httpx.HTTPError, ValueError):
                self._api.DeactivateNode(fleet_pb2.DeactivateNodeRequest(node_id=self._node.node_id))

    def close(self) -> None:
        self._api.close()

    # -- messages --------------------------------------------------------------------------------

    def _try(self, node: Node, found: fleet_pb2.PullMessagesResponse, reply: Reply) -> None:
        """Whatever comes, this client goes on."""
        try:
            head, tree = message_from_proto(found.messages_list[0]), found.message_object_trees[0]
            self._handle(node, head, tree, reply)
        except (_Stopped, _Unknown, _Over, _Denied, DescantError):
            raise
        except Exception as error:
            self._events.ignored(f"{UNREADABLE} ({type(error).__name__})")

    def _handle(self, node: Node, head: Message, tree: ObjectTree, reply: Reply) -> None:
        run, id = head.metadata.run_id, head.metadata.message_id
        contents = self._pull(node, run, tree)
        if contents is None:
            return  # withdrawn meanwhile
        self._call(self._api.ConfirmMessageReceived, message_pb2.ConfirmMessageReceivedRequest(
            node=node, run_id=run, message_object_id=id))
        self._events.received(sum(map(len, contents.values())))
        begin = time.monotonic()
        try:
            message = inflate_object_from_contents(tree.object_id, contents)
            assert isinstance(message, Message)
            payload = from_records(message.content)
            if self._ca is not None:
                check_seal(payload, node.node_id, self._ca)
        except Exception as reason:  # not a request of the server's: the sender is told so
            self._events.ignored(str(reason) if isinstance(reason, Rejected) else UNREADABLE)
            head.metadata.__dict__["_message_id"] = id
            error = Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason="unreadable")
            answer = Message(error, reply_to=head)
        else:
            message.metadata.__dict__["_message_id"] = id
            answer = Message(to_records(reply(payload)), reply_to=message)
        self._push(node, run, answer, time.monotonic() - begin)

    def _pull(self, node: Node, run: int, tree: ObjectTree) -> dict[str, bytes] | None:
        """The objects of a message, which may be announced before all of them are there."""
        def pull(object_id: str) -> tuple[str, bytes | None]:
            pause = 0.02
            while True:
                found = self._call(self._api.PullObject, message_pb2.PullObjectRequest(
                    node=node, run_id=run, object_id=object_id))
                if found.object_available or not found.object_found:
                    return object_id, found.object_content if found.object_found else None
                self._wait(pause)
                pause = min(1.0, 1.5 * pause)

        ids = dict.fromkeys(each.object_id for each in objects.iterate_object_tree(tree))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = dict(pool.map(pull, ids))
        contents = {name: content for name, content in found.items() if content is not None}
        return contents if len(contents) == len(ids) else None

    def _push(self, node: Node, run: int, reply: Message, seconds: float) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with objects.no_object_id_recompute():
            parts = objects.get_all_nested_objects(reply)
            request = fleet_pb2.PushMessagesRequest(
                node=node, messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[objects.get_object_tree(reply)], clientapp_runtime_list=[seconds])
            sent = 0
            # Where two clients send an equal object, the server may have fetched and dropped the other's in
            # between: ask again what is missing.
            for _ in range(5):
                asked = self._call(self._api.PushMessages, request)
                wanted = [name for name in parts if name in {*asked.objects_to_push}]

                def push(name: str, session: str = asked.session_id) -> int:
                    content = parts[name].deflate()
                    done = self._call(self._api.PushObject, message_pb2.PushObjectRequest(
                        node=node, run_id=run, object_id=name, object_content=content, session_id=session))
                    return len(content) if done.stored else -1

                with ThreadPoolExecutor(AT_ONCE) as pool:
                    counts = list(pool.map(push, wanted))
                sent += sum(count for count in counts if count > 0)
                if -1 not in counts:
                    break
        self._events.sent(sent)

    # -- requests --------------------------------------------------------------------------------

    def _call(self, method: Callable[[Call], Result], request: Call) -> Result:
        """Call the server until it responds."""
        pause = PAUSE
        while True:
            if self._stop.is_set():
                raise _Stopped
            try:
                response = method(request)
            except httpx.HTTPStatusError as error:
                status = error.response.status_code
                if error.response.headers.get(UNKNOWN_KEY):
                    self._link.fail(STRANGER.format(self._name))
                elif status in _REFUSALS:
                    raise _REFUSALS[status] from error
                elif status < 500:
                    self._link.fail(self._not_ours)
                else:
                    self._link.lose(f"the server reports an internal error ({status})")
            except httpx.TransportError as error:
                failure = self._diagnose(error)
                if failure.is_final:
                    self._link.fail(failure.reason)
                elif pause > PAUSE:  # an idle connection that was closed is not worth a message
                    self._link.lose(failure.reason)
            except ValueError:  # not Flower's format
                self._link.fail(self._not_ours)
            else:
                if self._node is not None:
                    self._link.gain()
                return response
            self._wait(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    def _wait(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _Stopped

    def _diagnose(self, error: httpx.TransportError) -> Failure:
        broke = isinstance(error, httpx.RemoteProtocolError | httpx.ReadError)
        if broke and not self._link.has_been_up:
            if self._keys is None and speaks_tls(self._address):
                return Failure(f"the server at {self._address} is encrypted: name the folder of certificates "
                               "with --keys", True)
            if self._keys is not None and speaks_grpc(self._address, self._keys):
                return Failure(OTHER_LINK.format(self._address, "grpc"), True)
            if self._keys is not None and hangs_up(self._address, self._keys):
                return Failure(f"{NOT_TAKEN.format(self._address)}: {NEW_ONE}", True)
        return diagnose(error, self._address)


def _about_clocks(error: BaseException | None) -> str:
    assert isinstance(error, httpx.HTTPStatusError)
    text = "the server refuses this client's signature"
    with contextlib.suppress(TypeError, ValueError):
        there = email.utils.parsedate_to_datetime(error.response.headers["date"])
        ahead = (datetime.datetime.now(datetime.UTC) - there).total_seconds()
        if abs(ahead) > 3:
            how = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'}"
            return (f"{text}: this machine's clock is {how} the server's: set it (it may be 5 s ahead, or "
                    "5 minutes behind)")
    return text
