"""For who runs Flower by its own commands: a ServerApp and a ClientApp.

`flwr run` starts them in processes of their own, a new one for every message to a client, which costs some
seconds a round; `descant server` and `descant client` do without. What they do is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from descant.errors import UsageError
from descant.experiment.config import Experiment
from descant.flower.commands import load_experiment
from descant.flower.exchange import Exchange
from descant.flower.lead import lead
from descant.flower.letters import Letter, Refused
from descant.flower.node import Node
from descant.flower.nodes import Rules
from descant.report.federation import client_lines, server_lines

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Lead a federation. Of the run config: experiment (a file), clients, out; and, if wanted, deadline,
    at-least and max-norm."""
    config = context.run_config
    experiment: Experiment = load_experiment(Path(_text(config, "experiment")), [])
    rules = {name: config[key] for name, key in
             (("deadline", "deadline"), ("at_least", "at-least"), ("max_norm", "max-norm")) if key in config}
    clients = config.get("clients")
    if not isinstance(clients, int) or clients < 1:
        raise UsageError(f"clients in the run config must be a whole number of at least 1, not {clients!r}")
    lead(experiment, Exchange(grid), Path(_text(config, "out")), clients,
         Rules(**rules), server_lines())  # type: ignore[arg-type]


@client_app.train()
def answer(message: Message, context: Context) -> Message:
    """Answer one message. Of the node config: name, data, and, if wanted, dir and allow (with commas)."""
    config = context.node_config
    name = _text(config, "name")
    allowed = str(config.get("allow", "")).split(",")
    node = Node(name, _text(config, "data"), Path(str(config.get("dir", f"descant-{name}"))), client_lines(),
                allowed=allowed)
    try:
        order = Letter.read(message.content)
    except Refused as error:  # whose text is ours
        return Message(Letter({"failed": str(error)}).content(), reply_to=message)
    return Message(node.answer(order).content(), reply_to=message)


def _text(config: Mapping[str, Any], name: str) -> str:
    value = config.get(name)
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} is missing from the config that Flower was given")
    return value
