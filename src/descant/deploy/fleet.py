"""A client's side of the connection: fetch a message, answer it, and come back from every loss.

This is what Flower's SuperNode does, as a loop in the client's own process: no code is fetched and nothing is
started for a message. All requests go from here to the server, so that a client needs no open port.

What can only be put right by a person (a certificate, a key, a clock, an address) ends the loop with a
sentence about it, as long as there has been no connection. After that, and whenever the server is merely not
there, the loop goes on trying, for as long as it takes.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from descant.core.files import write_atomic
from descant.deploy.certificates import ClientKeys, public_pem
from descant.deploy.superlink import UNKNOWN_KEY
from descant.deploy.wire import Address, connect, hush
from descant.errors import DescantError, UsageError

INTERVAL = 10.0  # seconds: the server takes a node for gone after twice that without a heartbeat
BEAT = 4.0  # seconds between heartbeats: a few may be lost
SHORTEST, LONGEST = 0.1, 1.0  # seconds between looks for a message
PATIENCE = 10  # a look for each twentieth of the time that there has been no message
PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts to reach the server
AT_ONCE = 2  # objects that are on their way together

Request = TypeVar("Request")
Response = TypeVar("Response")


class Events(Protocol):
    """What a connection tells."""

    def connected(self) -> None: ...

    def lost(self, reason: str) -> None:
        """Told once; attempts go on until `connected`."""

    def received(self, count: int) -> None:
        """Bytes of a message."""

    def sent(self, count: int) -> None:
        """Bytes of an answer."""


def serve(address: str, keys: ClientKeys | None, answer: Callable[[RecordDict], RecordDict], directory: Path,
          events: Events, stop: threading.Event) -> None:
    """Answer the server's messages until `stop` is set. `directory` is the client's own: what the server
    calls this node is kept there, so that a client that was killed can take its place again at once."""
    place = Address.parse(address)
    if keys is None and not place.is_loopback:
        raise UsageError(f"without keys only a server on this machine is spoken to, and {place.host} is not "
                         "its loopback: name the folder of certificates with --keys")
    hush()
    directory.mkdir(parents=True, exist_ok=True)
    node = _Node(place, keys, directory / "node_id", events, stop)
    beats = threading.Thread(target=node.beat, name="heartbeat", daemon=True)
    beats.start()
    try:
        node.loop(answer)
    except _Stopped:
        pass
    finally:
        node.leave()
        beats.join(1)
        node.close()


class _Stopped(Exception):
    """`stop` was set."""


class _Unknown(Exception):
    """The server does not know this node (any more): it was restarted."""


class _Over(Exception):
    """The run that a message belongs to is over."""


class _Refused(Exception):
    """The server cannot do that now."""


class _Node:
    def __init__(self, address: Address, keys: ClientKeys | None, file: Path, events: Events,
                 stop: threading.Event) -> None:
        self._address = address
        self._name = "this client" if keys is None else keys.name
        self._not_ours = f"what listens at {address} is not a descant server"
        self._is_encrypted = keys is not None
        private = ec.generate_private_key(ec.SECP384R1()) if keys is None else keys.private
        self._public = public_pem(private.public_key())
        self._api = connect(FleetHttpClient, address, None if keys is None else keys.ca,
                            [NodeAuthHttpInterceptor(private, private.public_key())])
        self._file = file
        self._events = events
        self._stop = stop
        self._done = threading.Event()  # no more heartbeats
        self._lock = threading.Lock()  # what is told is told in order
        self._node: Node | None = None  # None: the server does not know that we are here
        self._is_up: bool | None = None  # None: there has been no connection
        self._has_been_up = False

    def loop(self, answer: Callable[[RecordDict], RecordDict]) -> None:
        last = 0.0  # when there was a message
        while not self._stop.is_set():
            try:
                if self._node is None:
                    self._node = self._activate()
                    last = time.monotonic()
                found = self._call(self._api.PullMessages, PullMessagesRequest(node=self._node))
                if found.messages_list:
                    head = message_from_proto(found.messages_list[0])
                    self._handle(self._node, head, found.message_object_trees[0], answer)
                    last = time.monotonic()
                else:
                    idle = time.monotonic() - last
                    self._stop.wait(min(LONGEST, max(SHORTEST, idle / PATIENCE)))
            except _Unknown:
                self._node = None
                self._lose("the server was restarted")
            except (_Over, _Refused):
                self._wait(SHORTEST)  # nobody waits for the answer

    # -- being there -----------------------------------------------------------------------------

    def _activate(self) -> Node:
        """Tell the server that we are here. If an earlier process of ours was killed, it still counts as
        being there: that one is taken back first."""
        if (old := self._kept()) is not None:
            with contextlib.suppress(_Unknown, _Over, _Refused):
                self._call(self._api.DeactivateNode, DeactivateNodeRequest(node_id=old))
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=INTERVAL)
        while True:
            try:
                if not self._is_encrypted:
                    with contextlib.suppress(_Refused):  # registered already
                        self._call(self._api.RegisterNode, RegisterNodeFleetRequest(public_key=self._public))
                found = self._call(self._api.ActivateNode, request)
                break
            except _Unknown as error:  # said to who presents a key and no node: the signature is refused
                self._refuse(_about_clocks(error.__cause__))
            except _Over:
                self._refuse(self._not_ours)
            except _Refused:
                self._lose(f"the server takes {self._name} for connected already: another process may use "
                           "its key")
            self._wait(1)
        write_atomic(self._file, str(found.node_id).encode())
        self._gain()
        return Node(node_id=found.node_id)

    def _kept(self) -> int | None:
        try:
            return int(self._file.read_text())
        except (OSError, ValueError):
            return None

    def beat(self) -> None:
        """Heartbeats, for as long as an answer takes. What goes wrong is noticed and told by the loop."""
        while not self._done.wait(BEAT):
            if (node := self._node) is not None:
                request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=INTERVAL)
                with contextlib.suppress(httpx.HTTPError, ValueError, RuntimeError):
                    self._api.SendNodeHeartbeat(request)

    def leave(self) -> None:
        """Say good-bye, so that nobody waits for us."""
        self._done.set()
        if self._node is not None and self._is_up:
            self._api._client.timeout = httpx.Timeout(2)
            with contextlib.suppress(httpx.HTTPError, ValueError):
                self._api.DeactivateNode(DeactivateNodeRequest(node_id=self._node.node_id))

    def close(self) -> None:
        self._api.close()

    # -- messages --------------------------------------------------------------------------------

    def _handle(self, node: Node, head: Message, tree: ObjectTree,
                answer: Callable[[RecordDict], RecordDict]) -> None:
        run, id = head.metadata.run_id, head.metadata.message_id
        contents = self._pull(node, run, tree)
        if contents is None:
            return  # taken back meanwhile
        self._call(self._api.ConfirmMessageReceived, ConfirmMessageReceivedRequest(
            node=node, run_id=run, message_object_id=id))
        self._events.received(sum(map(len, contents.values())))
        begin = time.monotonic()
        try:
            message = inflate_object_from_contents(tree.object_id, contents)
            assert isinstance(message, Message)
            content = message.content
        except Exception:  # not a message: whoever sent it is told so
            head.metadata.__dict__["_message_id"] = id
            error = Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason="unreadable")
            reply = Message(error, reply_to=head)
        else:
            message.metadata.__dict__["_message_id"] = id
            reply = Message(answer(content), reply_to=message)
        self._push(node, run, reply, time.monotonic() - begin)

    def _pull(self, node: Node, run: int, tree: ObjectTree) -> dict[str, bytes] | None:
        """The objects that a message is made of. It may be seen before all of them are there."""
        def pull(object_id: str) -> tuple[str, bytes | None]:
            pause = 0.02
            while True:
                found = self._call(self._api.PullObject, PullObjectRequest(
                    node=node, run_id=run, object_id=object_id))
                if found.object_available or not found.object_found:
                    return object_id, found.object_content if found.object_found else None
                self._wait(pause)
                pause = min(1.0, 1.5 * pause)

        ids = dict.fromkeys(each.object_id for each in iterate_object_tree(tree))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = dict(pool.map(pull, ids))
        contents = {name: content for name, content in found.items() if content is not None}
        return contents if len(contents) == len(ids) else None

    def _push(self, node: Node, run: int, reply: Message, seconds: float) -> None:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            objects = get_all_nested_objects(reply)
            request = PushMessagesRequest(
                node=node, messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)], clientapp_runtime_list=[seconds])
            sent = 0
            # Where two nodes send an equal object, the server may have fetched and dropped the other's in
            # between: then it is asked again what is missing.
            for _ in range(5):
                asked = self._call(self._api.PushMessages, request)
                wanted = [name for name in objects if name in {*asked.objects_to_push}]

                def push(name: str, session: str = asked.session_id) -> int:
                    content = objects[name].deflate()
                    done = self._call(self._api.PushObject, PushObjectRequest(
                        node=node, run_id=run, object_id=name, object_content=content, session_id=session))
                    return len(content) if done.stored else -1

                with ThreadPoolExecutor(AT_ONCE) as pool:
                    counts = list(pool.map(push, wanted))
                sent += sum(count for count in counts if count > 0)
                if -1 not in counts:
                    break
        self._events.sent(sent)

    # -- requests --------------------------------------------------------------------------------

    def _call(self, method: Callable[[Request], Response], request: Request) -> Response:
        """A request, repeated until the server answers it."""
        pause = PAUSE
        while True:
            if self._stop.is_set():
                raise _Stopped
            try:
                response = method(request)
            except httpx.HTTPStatusError as error:
                status = error.response.status_code
                if error.response.headers.get(UNKNOWN_KEY):
                    self._refuse(f"the server does not know the key of {self._name}: ask who runs it to add "
                                 f"{self._name}.pub")
                elif status == httpx.codes.UNAUTHORIZED:
                    raise _Unknown from error
                elif status == httpx.codes.FORBIDDEN:
                    raise _Over from error
                elif status == httpx.codes.PRECONDITION_FAILED:
                    raise _Refused from error
                elif status < 500:
                    self._refuse(self._not_ours)
                else:
                    self._lose(f"the server reports an error of its own ({status})")
            except httpx.TransportError as error:
                trouble = self._trouble(error)
                if trouble.is_final:
                    self._refuse(trouble.reason)
                elif pause > PAUSE:  # a connection that was closed while it was idle is not worth a word
                    self._lose(trouble.reason)
            except ValueError:  # not a message of Flower's
                self._refuse(self._not_ours)
            else:
                if self._node is not None:
                    self._gain()
                return response
            self._wait(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    def _wait(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _Stopped

    def _gain(self) -> None:
        with self._lock:
            if not self._is_up:
                self._is_up = self._has_been_up = True
                self._events.connected()

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._is_up is not False:
                self._is_up = False
                self._events.lost(reason)

    def _refuse(self, reason: str) -> None:
        """A person has to do something. Who was connected before waits for that."""
        if not self._has_been_up:
            raise DescantError(reason)
        self._lose(reason)

    def _trouble(self, error: httpx.TransportError) -> Trouble:
        broke_off = isinstance(error, httpx.RemoteProtocolError | httpx.ReadError)
        if broke_off and not self._is_encrypted and not self._has_been_up and _speaks_tls(self._address):
            return Trouble(f"the server at {self._address} is encrypted: name the folder of certificates "
                           "with --keys", True)
        return diagnose(error, self._address)


class Trouble(NamedTuple):
    """Why a server was not reached, and whether trying again is of no use."""

    reason: str
    is_final: bool


def diagnose(error: BaseException, address: Address) -> Trouble:
    """What an error of the connection means."""
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Trouble(_about_certificate(cause, address), True)
        if isinstance(cause, ssl.SSLError):
            if cause.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"):
                return Trouble(f"the server at {address} is not encrypted: start it with certificates, or, "
                               "if it is on this machine, this client without --keys", True)
            return Trouble(f"no encrypted connection to {address} ({cause.reason or cause})", False)
        if isinstance(cause, socket.gaierror):
            is_final = cause.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
            return Trouble(f"no machine called {address.host} is known ({cause.strerror})", is_final)
        if isinstance(cause, UnicodeError):
            return Trouble(f"{address.host!r} cannot be the name of a machine", True)
    if isinstance(error, httpx.TimeoutException):
        return Trouble(f"the server at {address} does not answer in time", False)
    if isinstance(error, httpx.ConnectError):
        return Trouble(f"no server can be reached at {address} ({_last(error)})", False)
    return Trouble(f"the connection to {address} broke off ({_last(error)})", False)


def _about_certificate(error: ssl.SSLCertVerificationError, address: Address) -> str:
    found = f"the certificate of the server at {address}"
    match error.verify_code:
        case 10:
            return f"{found} has expired: who runs it must renew it with: descant certificates"
        case 9:
            return f"{found} does not hold yet: compare the clocks of the two machines"
        case 62 | 64:
            return (f"{found} is not for {address.host}: use the address that it was made for, or ask who "
                    f"runs it to make one with: descant certificates --host {address.host}")
        case 18 | 19 | 20 | 21 | 7 | 26:
            return (f"{found} was not made by the authority in ca.crt: it may be another server than you "
                    "think, or ca.crt is of another federation")
    return f"{found} is not accepted: {error.verify_message}"


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


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _last(error: BaseException) -> str:
    *_, first = _causes(error)
    told = first.strerror if isinstance(first, OSError) else None
    return told or str(first) or type(first).__name__


def _speaks_tls(address: Address) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only to learn whether it is TLS
    try:
        with socket.create_connection(address, 5) as plain, context.wrap_socket(plain):
            return True
    except OSError:
        return False
