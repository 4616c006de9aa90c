"""Flower's SuperLink as a process of its own, started with `python -m`.

It holds messages and their tensors in memory. It is a separate process, because heartbeats must not wait for
a server that aggregates; it never imports torch, and runs no code that anybody sends.

A gate (`gate.py`) lets clients with a registered key reach the calls of the Fleet API that they need, and the
parent those of the Runtime API, with a token that only the two processes know; all else is closed
(docs/federation.md). So nodes and the one run are registered here, before the port opens.

The parent sends its options as one line of JSON on standard input, where no other user can read them, and
keeps that pipe open: when it closes, however the parent ended, this process ends too.
"""

from __future__ import annotations

import datetime
import gc
import json
import logging
import os
import resource
import secrets
import select
import shutil
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

FEW = 4 * 2**20  # bytes of a reply beside its tensors
FILES = 2**16  # open connections, if the system allows it
UNKNOWN_KEY = "x-descant-unknown-key"  # the header that tells a client why it is refused

# set before Flower is imported: no telemetry, no downloads
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
         "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1"}


class Options(NamedTuple):
    """What the parent sends."""

    parent: int  # its process
    listener: int  # the descriptor of a listening socket
    token: str
    clients: dict[str, str] | None  # name -> public key (PEM); None: unencrypted, no names
    certificate: str | None = None  # paths
    key: str | None = None
    ca: str | None = None


class Opened(NamedTuple):
    """What the process writes once it is up: how the parent joins the run."""

    run: int
    task: int
    token: str  # of the task


def serve(options: Options, report: Callable[[Opened], None], is_wanted: Callable[[], bool]) -> None:
    """Serve while the parent wants it. `report` is called once, when requests are served."""
    import uvicorn
    from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
    from flwr.supercore import constant

    from descant.deploy.transport.gate import Gate, Impatient

    _raise_limits()
    is_plain = options.clients is None
    listener = socket.socket(fileno=options.listener)
    app = _application(options, listener)
    state = app.state.linkstate_factory.state()
    keys = {name: key.encode() for name, key in (options.clients or {}).items()}
    for name, key in keys.items():
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0, name=name)

    gate = Gate(app, options.token, None if is_plain else frozenset(keys.values()), state)
    # uvicorn takes uvloop where it is there: asyncio's own loop does not give back the memory of large bodies
    server = uvicorn.Server(uvicorn.Config(
        gate, http=Impatient, log_config=None, access_log=False, server_header=False,
        ws="none", lifespan="on", ssl_certfile=options.certificate, ssl_keyfile=options.key,
        ssl_ca_certs=options.ca, ssl_cert_reqs=ssl.CERT_NONE if is_plain else ssl.CERT_REQUIRED,
        timeout_keep_alive=30, timeout_graceful_shutdown=1))
    # in a thread uvicorn leaves signals alone
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.01)
    if server.started:
        report(_open_run(state, constant.NOOP_FEDERATION_ID, NOOP_FLWR_AID))
    # Requests leave their bodies, of megabytes, in reference cycles that Python collects too seldom.
    # Freezing what exists at the start makes each collection cheap.
    gc.collect()
    gc.freeze()
    while thread.is_alive() and is_wanted():
        gc.collect()
    server.should_exit = True
    thread.join(3)


def _application(options: Options, listener: socket.socket) -> Any:
    """Flower's own, with the records in memory and none of the services that are not needed."""
    from flwr.supercore import constant
    from flwr.superlink.auth_plugin import ControlAuthnPlugin
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
    from flwr.superlink.config_loader import SuperLinkLifespanConfig
    from flwr.superlink.main import create_app

    class Nobody(ControlAuthnPlugin):
        """The Control API is closed by the gate, and has no users besides."""

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

    is_plain = options.clients is None
    host, port = listener.getsockname()[:2]
    return create_app(SuperLinkLifespanConfig(
        control_address="", health_server_address=None, host=host, port=port, insecure=is_plain,
        certificates=None, superexec_auth_secret=secrets.token_bytes(32),  # nobody else claims tasks
        authn_plugin=Nobody(), event_log_plugin=None, fleet_event_log_plugin=None, enable_event_log=False,
        artifact_provider=None, enable_supernode_auth=not is_plain, fleet_api_type="grpc-rere",
        fleet_api_address=None, simulation=False, ssl_ca_certfile=options.ca,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.key, database=constant.FLWR_IN_MEMORY_DB_NAME, isolation="process",
        runtime_dependency_install=False), SuperLinkLifespan)


def _raise_limits() -> None:
    """As many open connections as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if most == resource.RLIM_INFINITY else min(FILES, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _open_run(state: Any, federation: str, account: str) -> Opened:
    """One run for the life of this process, without an app: there is no code to fetch."""
    run = state.create_run(None, None, None, {}, federation, None, account, "flwr-serverapp")
    (task,) = state.get_tasks(run_ids=[run])
    token = state.claim_task(task.task_id)
    if token is None or not state.activate_task(task.task_id):
        raise RuntimeError("Flower does not start a run")
    # This process ends with the parent, so the parent needs no heartbeat; a suspended machine can go on.
    state.task_token_store[task.task_id].active_until = datetime.datetime.max.replace(tzinfo=datetime.UTC)
    return Opened(run, task.task_id, token)


def main() -> None:
    stopped = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints go to the log, too
    text = sys.stdin.buffer.readline()
    if not text:
        return  # the parent is gone already
    options = Options(**json.loads(text))
    os.environ.update(QUIET)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from flwr.supercore.logger import FLOWER_LOGGER
    FLOWER_LOGGER.handlers.clear()  # colours
    FLOWER_LOGGER.setLevel(logging.WARNING)

    def is_wanted() -> bool:
        """Waits a moment. The pipe alone is not enough: a child that the parent forked may hold it, too."""
        readable, _, _ = select.select([0], [], [], 0.25)
        if readable and not os.read(0, 1):
            return False
        return not stopped.is_set() and os.getppid() == options.parent

    def report(opened: Opened) -> None:
        with answers:
            answers.write(json.dumps(opened._asdict()) + "\n")

    try:
        serve(options, report, is_wanted)
    finally:
        if home := os.environ.get("FLWR_HOME"):
            shutil.rmtree(home, ignore_errors=True)
        logging.shutdown()
        sys.stderr.flush()
        os._exit(0 if stopped.is_set() else 1)  # without waiting for request threads


if __name__ == "__main__":
    main()
