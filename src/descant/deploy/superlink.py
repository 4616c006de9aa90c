"""Flower's SuperLink as a process of its own: `python -m descant.deploy.superlink`.

The process keeps the mail of a federation: messages and the tensors in them, in memory. It is a process,
since its heartbeats must not wait for a server that aggregates; it never imports torch, and runs no code
that anybody sends.

Flower serves everything on one port, among it an API by which anybody could register nodes or start runs.
Here a gate stands before it. Clients reach the few calls of the Fleet API that a client needs, and only
with a key that is registered; the parent reaches the few calls of the Runtime API that a server needs, with
a token that only the two processes know; all else is closed to everybody. So nodes and the one run are
entered here, before the port answers, rather than over the network.

The parent says what to do in one line of JSON on standard input, where no other user can read it, and keeps
that pipe open: when it ends, however the parent ended, so does this process.
"""

from __future__ import annotations

import base64
import datetime
import gc
import json
import logging
import os
import secrets
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple

LARGEST = 32 * 2**20  # bytes of one request of a client: Flower cuts tensors into pieces of 5 MB
UNKNOWN_KEY = "x-descant-unknown-key"  # a header that tells a client why it is refused

FLEET = frozenset(f"/v1/fleet/{name}" for name in (
    "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages",
    "pull-object", "push-object", "confirm-message-received"))
REGISTER = "/v1/fleet/register-node"  # where no keys are used, nodes enter themselves
RUNTIME = frozenset(f"/v1/runtime/{name}" for name in (
    "get-nodes", "push-messages", "pull-messages", "pull-object", "push-object", "confirm-message-received"))

# must be set before Flower is imported: nothing is reported to anybody, nothing is fetched from anywhere
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
         "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Orders(NamedTuple):
    """What the parent says."""

    parent: int  # its process
    listener: int  # the descriptor of a socket that listens
    token: str
    clients: dict[str, str] | None  # name -> public key (PEM); None: unencrypted, and without names
    certificate: str | None = None  # paths
    key: str | None = None
    ca: str | None = None


class Opened(NamedTuple):
    """What the process answers, once it is up: how the parent takes part in the run."""

    run: int
    task: int
    token: str  # of the task


class Gate:
    """Lets through what a client or the parent needs."""

    def __init__(self, app: App, token: str, keys: frozenset[bytes] | None, key_header: str) -> None:
        self._app = app
        self._bearer = f"Bearer {token}".encode()
        self._keys = keys
        self._key_header = key_header.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        refusal = self._refusal(scope) if scope["type"] == "http" else (404, [])
        if refusal is None:
            return await self._app(scope, receive, send)
        status, headers = refusal
        if scope["type"] == "http":
            headers = [*headers, (b"content-length", b"0"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close"})
        return None

    def _refusal(self, scope: Scope) -> tuple[int, list[tuple[bytes, bytes]]] | None:
        headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # the first of each, as Flower reads
        path = scope["path"]
        if path in RUNTIME:
            is_parent = secrets.compare_digest(headers.get(b"authorization", b""), self._bearer)
            return None if is_parent else (404, [])
        if path not in FLEET and not (path == REGISTER and self._keys is None):
            return 404, []
        if self._keys is not None:
            try:
                key = base64.b64decode(headers.get(self._key_header, b""), validate=True)
            except ValueError:
                return 400, []
            if key not in self._keys:
                return 403, [(UNKNOWN_KEY.encode(), b"1")]
        length = headers.get(b"content-length", b"")
        if not length.isdigit():
            return 411, []
        return None if int(length) <= LARGEST else (413, [])


def serve(orders: Orders, report: Callable[[Opened], None], is_wanted: Callable[[], bool]) -> None:
    """Serve for as long as the parent wants it. `report` is called once, when requests are answered."""
    import uvicorn
    from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
    from flwr.supercore.constant import (
        FLEET_HTTP_PUBLIC_KEY_HEADER,
        FLWR_IN_MEMORY_DB_NAME,
        NOOP_FEDERATION_ID,
    )
    from flwr.superlink.auth_plugin import ControlAuthnPlugin
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
    from flwr.superlink.config_loader import SuperLinkLifespanConfig
    from flwr.superlink.main import create_app

    class Nobody(ControlAuthnPlugin):
        """The Control API is behind the gate; were it not, nobody could use it either."""

        def __init__(self) -> None:
            pass

        def get_login_details(self) -> None:
            return None

        def get_auth_tokens(self, device_code: str) -> None:
            return None

        def refresh_tokens(self, metadata: Any) -> tuple[None, None]:
            return None, None

        def validate_tokens_in_metadata(self, metadata: Any) -> tuple[bool, None]:
            return False, None

    is_plain = orders.clients is None
    listener = socket.socket(fileno=orders.listener)
    host, port = listener.getsockname()[:2]
    app = create_app(SuperLinkLifespanConfig(
        control_address="", health_server_address=None, host=host, port=port, insecure=is_plain,
        certificates=None, superexec_auth_secret=secrets.token_bytes(32),  # nobody takes over tasks
        authn_plugin=Nobody(), event_log_plugin=None, fleet_event_log_plugin=None, enable_event_log=False,
        artifact_provider=None, enable_supernode_auth=not is_plain, fleet_api_type="grpc-rere",
        fleet_api_address=None, simulation=False, ssl_ca_certfile=orders.ca, ssl_certfile=orders.certificate,
        ssl_keyfile=orders.key, database=FLWR_IN_MEMORY_DB_NAME, isolation="process",
        runtime_dependency_install=False), SuperLinkLifespan)
    state = app.state.linkstate_factory.state()
    keys = {name: key.encode() for name, key in (orders.clients or {}).items()}
    for name, key in keys.items():
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0, name=name)

    known = None if is_plain else frozenset(keys.values())
    gate = Gate(app, orders.token, known, FLEET_HTTP_PUBLIC_KEY_HEADER.lower())
    server = uvicorn.Server(uvicorn.Config(
        gate, log_config=None, access_log=False, server_header=False, ws="none", lifespan="on",
        ssl_certfile=orders.certificate, ssl_keyfile=orders.key, timeout_keep_alive=30,
        timeout_graceful_shutdown=1))
    # in a thread, where uvicorn leaves signals alone
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.01)
    if server.started:
        report(_open_run(state, NOOP_FEDERATION_ID, NOOP_FLWR_AID))
    # Requests leave their bodies, of megabytes, in cycles that Python would look for too seldom. What is
    # there from the start is left out, so that looking costs little.
    gc.collect()
    gc.freeze()
    while thread.is_alive() and is_wanted():
        gc.collect()
    server.should_exit = True
    thread.join(3)


def _open_run(state: Any, federation: str, account: str) -> Opened:
    """One run for the life of this process. It has no app: there is nothing for a node to fetch or run."""
    run = state.create_run(None, None, None, {}, federation, None, account, "flwr-serverapp")
    (task,) = state.get_tasks(run_ids=[run])
    token = state.claim_task(task.task_id)
    if token is None or not state.activate_task(task.task_id):
        raise RuntimeError("Flower does not start a run")
    # The parent cannot die without this process; so no heartbeat of it is needed, and a machine that was
    # suspended goes on where it was.
    state.task_token_store[task.task_id].active_until = datetime.datetime.max.replace(tzinfo=datetime.UTC)
    return Opened(run, task.task_id, token)


def main() -> None:
    stopped = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which decides
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed goes to the log, too
    text = sys.stdin.buffer.readline()
    if not text:
        return  # the parent has gone already
    orders = Orders(**json.loads(text))
    os.environ.update(QUIET)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from flwr.supercore.logger import FLOWER_LOGGER
    FLOWER_LOGGER.handlers.clear()  # colours
    FLOWER_LOGGER.setLevel(logging.WARNING)

    def is_wanted() -> bool:
        """Waits a moment. The pipe alone would not do where a process that the parent forked has it, too."""
        readable, _, _ = select.select([0], [], [], 0.25)
        if readable and not os.read(0, 1):
            return False
        return not stopped.is_set() and os.getppid() == orders.parent

    def report(opened: Opened) -> None:
        with answers:
            answers.write(json.dumps(opened._asdict()) + "\n")

    try:
        serve(orders, report, is_wanted)
    finally:
        if home := os.environ.get("FLWR_HOME"):
            shutil.rmtree(home, ignore_errors=True)
        logging.shutdown()
        sys.stderr.flush()
        os._exit(0 if stopped.is_set() else 1)  # threads of requests are not waited for


if __name__ == "__main__":
    main()
