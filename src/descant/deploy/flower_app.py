"""For deployments that use Flower's own CLI: a ServerApp and a ClientApp.

`flwr run` starts them in processes of their own, a new one for every message to a client, which costs some
seconds a round. `descant server` and `descant client` do the same without that.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from descant.deploy.backend import Rules
from descant.deploy.client import Client
from descant.deploy.protocol import load_experiment
from descant.deploy.server import run_server
from descant.deploy.transport.grid import GridTransport
from descant.deploy.transport.records import from_records, to_records
from descant.errors import UsageError
from descant.view.federation import ServerDisplay
from descant.view.federation_client import ClientDisplay
from descant.view.terminal import make_console

RULES = ("deadline", "at-least", "clip", "max-share", "max-norm")

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """The run config has experiment (a file), clients and out; optionally the rules of `RULES`."""
    config = context.run_config
    experiment = load_experiment(Path(_text(config, "experiment")), [])
    # Flower's config has no absent values: 0 turns the clipping off, as in `descant server`
    rules = {key.replace("-", "_"): config[key] or None for key in RULES if key in config}
    clients = config.get("clients")
    if not isinstance(clients, int) or clients < 1:
        raise UsageError(f"clients in the run config must be a whole number of at least 1, not {clients!r}")
    out = Path(_text(config, "out"))
    with ServerDisplay(make_console(), clients) as display:
        run_server(experiment, GridTransport(grid), out, clients, Rules(**rules),  # type: ignore[arg-type]
                   display)


@client_app.train()
def answer(message: Message, context: Context) -> Message:
    """The node config has name and data; optionally dir, allow (separated by commas) and expect (a file)."""
    config = context.node_config
    name = _text(config, "name")
    allow = [entry.strip() for entry in str(config.get("allow", "")).split(",") if entry.strip()]
    expect = config.get("expect")
    expected = None if expect is None else load_experiment(Path(str(expect)), [])
    directory = Path(str(config.get("dir", f"descant-{name}")))
    with ClientDisplay(make_console(), name, threading.Event(), True) as display:
        client = Client(name, _text(config, "data"), directory, display, allow=allow, expected=expected)
        reply = client.reply(from_records(message.content))
    return Message(to_records(reply), reply_to=message)


def _text(config: Mapping[str, Any], name: str) -> str:
    value = config.get(name)
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} is missing from Flower's config")
    return value
