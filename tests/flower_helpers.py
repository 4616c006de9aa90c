"""A federation in one process: nodes behind a grid that delivers at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from descant.deploy.exchange import Exchange
from descant.deploy.lead import lead
from descant.deploy.letters import Letter
from descant.deploy.node import Node
from descant.deploy.nodes import Rules
from descant.experiment.config import Experiment
from descant.experiment.run import Run

TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # which Flower's messages want to know
Answer = Callable[[RecordDict], RecordDict | None]  # None: no answer comes


class Quiet:
    """Watches both sides, and remembers."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)

        def tell(*given: Any) -> None:
            self.told.append((name, *given))

        return tell

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [told[1:] for told in self.told if told[0] == kind]


class Grid:
    """What `Exchange` asks of Flower's."""

    def __init__(self, answers: dict[str, Answer], named: bool = True) -> None:
        self.answers = answers
        self.ids = {100 + k: name for k, name in enumerate(answers)}
        self.since = dict.fromkeys(self.ids, 0)
        self.offline: set[str] = set()
        self.sent: list[tuple[str, RecordDict]] = []
        self._named = named
        self._replies: dict[str, Any] = {}
        self._count = 0

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=node, name=name if self._named else "",
                                last_activated_at=self.since[node])
                for node, name in self.ids.items() if name not in self.offline]

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        made = []
        for message in messages:
            self._count += 1
            made.append(f"message {self._count}")
            name = self.ids[message.metadata.dst_node_id]
            self.sent.append((name, message.content))
            answer = self.answers[name](message.content)
            if answer is not None:
                self.deliver(made[-1], answer)
        return made

    def deliver(self, message: str, content: RecordDict) -> None:
        self._replies[message] = SimpleNamespace(
            metadata=SimpleNamespace(reply_to_message_id=message), content=content, has_error=lambda: False)

    def pull_messages(self, ids: Iterable[str]) -> list[Any]:
        return [self._replies.pop(message) for message in ids if message in self._replies]


def answers(node: Node) -> Answer:
    return lambda content: node.answer(Letter.read(content)).content()


def make_nodes(data: dict[str, str], directory: Path, watcher: Any = None, **options: Any
               ) -> dict[str, Answer]:
    """Nodes by name, each with its data."""
    return {name: answers(Node(name, what, directory / name, watcher or Quiet(), **options))
            for name, what in data.items()}


def batchnorm(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A network of one's own, with running statistics."""
    hidden = nn.Linear(math.prod(shape), 6)
    return nn.Sequential(nn.Flatten(), hidden, nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, outputs))


def federate(experiment: Experiment, grid: Grid, out: Path, *, watcher: Any = None,
             rules: Rules | None = None, **options: Any) -> Run:
    exchange = Exchange(grid)  # type: ignore[arg-type]
    clients = options.pop("clients", len(grid.ids))
    return lead(experiment, exchange, out, clients, rules or Rules(deadline=5), watcher or Quiet(), **options)
