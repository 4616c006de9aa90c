"""What clients reply to a job: values, failures, and the uploads on their way into a sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from descant.core.algorithm import Message
from descant.core.tree import take
from descant.deploy.arriving import Arriving
from descant.deploy.messages import WireMessage
from descant.engine.backends.base import Planned


@dataclass
class Replies:
    """What has come of a job, by client."""

    planned: Planned
    arriving: Arriving | None = None  # where the uploads are, if they are added up
    values: dict[int, tuple[Any, int]] = field(default_factory=dict)  # with the gradient steps
    failed: dict[int, str] = field(default_factory=dict)
    absent: dict[int, str] = field(default_factory=dict)  # who may come back, and why they are
    lengths: dict[int, dict[str, float]] = field(default_factory=dict)  # of the uploads, as they came
    shortened: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.job, self.number = self.planned.job, self.planned.number
        self.position = {int(client): k for k, client in enumerate(self.planned.clients)}
        self.shared = WireMessage.of({}, shared=self.planned.message.shared).tensors

    def missing(self) -> list[int]:
        return [client for client in self.position if client not in self.values and client not in self.failed]

    def message(self, client: int) -> Message:
        """What this client is sent."""
        message = self.planned.message
        return Message(message.shared, take(message.each, self.position[client]))

    def close(self) -> None:
        if self.arriving is not None:
            self.arriving.close()
