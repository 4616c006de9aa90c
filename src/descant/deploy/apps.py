"""For who runs Flower by its own commands: a ServerApp and a ClientApp.

`flwr run` starts them in processes of their own, a new one for every message to a client, which costs some
seconds a round; `descant server` and `descant client` do without. What they do is the same.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from descant.cli.terminal import make_console
from descant.deploy.commands import read_experiment
from descant.deploy.exchange import Exchange
from descant.deploy.lead import lead
from descant.deploy.letters import Letter, Refused
from descant.deploy.node import Node
from descant.deploy.nodes import Rules
from descant.errors import UsageError
from descant.view.federation import ServerDisplay
from descant.view.federation_client import ClientDisplay

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Lead a federation. Of the run config: experiment (a file), clients, out; and, if wanted, deadline,
    at-least and max-norm."""
    config = context.run_config
    experiment = read_experiment(Path(_text(config, "experiment")), [])
    rules = {name: config[key] for name, key in
             (("deadline", "deadline"), ("at_least", "at-least"), ("max_norm", "max-norm")) if key in config}
    clients = config.get("clients")
    if not isinstance(clients, int) or clients < 1:
        raise UsageError(f"clients in the run config must be a whole number of at least 1, not {clients!r}")
    out = Path(_text(config, "out"))
    with ServerDisplay(make_console(), clients, out) as display:
        lead(experiment, Exchange(grid), out, clients, Rules(**rules), display)  # type: ignore[arg-type]


@client_app.train()
def answer(message: Message, context: Context) -> Message:
    """Answer one message. Of the node config: name, data, and, if wanted, dir and allow (with commas)."""
    config = context.node_config
    name = _text(config, "name")
    allow = [entry.strip() for entry in str(config.get("allow", "")).split(",") if entry.strip()]
    place = Path(str(config.get("dir", f"descant-{name}")))
    with ClientDisplay(make_console(), name, threading.Event(), True) as display:
        node = Node(name, _text(config, "data"), place, display, allow=allow)
        try:
            found = node.answer(Letter.read(message.content))
        except Refused as error:  # whose text is ours
            found = Letter({"failed": str(error)})
    return Message(found.content(), reply_to=message)


def _text(config: Mapping[str, Any], name: str) -> str:
    value = config.get(name)
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} is missing from the config that Flower was given")
    return value
