"""The server's transport over Flower's public grid."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping

from flwr.app import Message
from flwr.serverapp import Grid

from descant.deploy.transport import Connection, NoReply, Payload, Rejected
from descant.deploy.transport.records import from_records, to_records

SPARE = 30.0  # seconds that Flower keeps a message longer: a late reply is ours to report
UNAVAILABLE = 5  # Flower's code for a client that has disconnected


class GridTransport:
    """A `ServerTransport`; the grid is opened and closed by Flower."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._largest = 0  # bytes of tensors of a reply

    def connected(self) -> dict[int, Connection]:
        return {node.node_id: Connection(node.name, str(node.last_activated_at))
                for node in self._grid.get_nodes()}

    def expect(self, count: int) -> None:
        self._largest = count

    def send(self, payloads: Mapping[int, Payload], seconds: float) -> dict[int, str]:
        # the group is ours to use; `gate.py` reads it
        messages = [Message(to_records(payload), address, "train", ttl=seconds + SPARE,
                            group_id=str(self._largest)) for address, payload in payloads.items()]
        pushed = self._grid.push_messages(messages)
        return {address: id for address, id in zip(payloads, pushed, strict=True) if id}

    def receive(self, requests: Collection[str]) -> Iterator[tuple[str, Payload | NoReply]]:
        for reply in self._grid.pull_messages(list(requests)):
            yield reply.metadata.reply_to_message_id, _payload(reply)

    def wait(self, seconds: float) -> None:
        """Flower is asked again and again."""
        time.sleep(seconds)

    def forget(self, requests: Collection[str]) -> None:
        """Flower drops messages by their time to live."""

    def close(self) -> None:
        """Flower's own commands close the grid."""


def _payload(reply: Message) -> Payload | NoReply:
    if reply.has_error():
        is_final = reply.error.code != UNAVAILABLE
        return NoReply(f"Flower reports error {reply.error.code}", is_final)
    try:
        return from_records(reply.content)
    except Rejected as error:
        return NoReply(str(error), True)
