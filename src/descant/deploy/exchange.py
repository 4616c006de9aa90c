"""Letters to nodes, and their answers, through Flower's grid.

A node may not be there, may come back in the middle of its work, or may never answer. A letter is sent again
to a node that was restarted since; a node that is not there when all others have answered is not waited for;
and whoever has not answered by the deadline is late. A late answer is never looked at: answers belong to the
message that they reply to, and that message is forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid

from descant.deploy.letters import Letter, Refused

PAUSE, LONGEST_PAUSE = 0.05, 0.25  # seconds between looks for answers: longer the longer none came
LOOK = 1.0  # seconds between looks at who is there
SPARE = 30.0  # seconds that a message outlives its deadline: who is late is for us to say, not for Flower
UNAVAILABLE = 5  # Flower's code for a node that went away


class Seen(NamedTuple):
    """A node that is connected."""

    name: str  # under which its key is registered; empty where keys are not used
    since: str  # when it came: another time, and it was restarted


class Lost(NamedTuple):
    """Why there is no answer, or none that can be read."""

    reason: str
    final: bool = False  # whether asking again would be of no use


def _nothing(ids: list[str]) -> None:
    pass


class Exchange:
    """`forget` tells Flower of messages that nobody will ask for any more; `check` raises if the connection
    is gone for good."""

    def __init__(self, grid: Grid, forget: Callable[[list[str]], None] = _nothing,
                 check: Callable[[], None] = lambda: None) -> None:
        self._grid = grid
        self._forget = forget
        self._check = check

    def online(self) -> dict[int, Seen]:
        """The nodes that are connected."""
        self._check()
        return {node.node_id: Seen(node.name, str(node.last_activated_at)) for node in self._grid.get_nodes()}

    def ask(self, letters: Mapping[int, Letter], seconds: float) -> Iterator[tuple[int, Letter | Lost]]:
        """Send each node its letter; yields its answer, or why there is none, as they come."""
        deadline = time.monotonic() + seconds
        unanswered = dict(letters)
        sent: dict[str, tuple[int, str]] = {}  # message -> node, and when that had come
        online, looked, pause = self.online(), time.monotonic(), PAUSE
        try:
            while unanswered:
                waiting_for = {node for node, _ in sent.values()}
                ready = unanswered.keys() & online.keys() - waiting_for
                self._send({node: unanswered[node] for node in ready}, online, deadline, sent)
                if not sent:  # whoever is left is not there
                    break
                found = False
                for node, answer in self._receive(sent):
                    found = True
                    if answer is None:  # it went away: perhaps it comes back
                        online.pop(node, None)
                        continue
                    del unanswered[node]
                    yield node, answer
                now = time.monotonic()
                if now > deadline:
                    break
                if now - looked > LOOK:
                    online, looked = self.online(), now
                    self._drop_restarted(sent, online)
                pause = PAUSE if found else min(LONGEST_PAUSE, 1.3 * pause)
                if unanswered and sent:
                    time.sleep(pause)
            for node in unanswered:
                late = any(node == other for other, _ in sent.values())
                yield node, Lost(f"no answer within {seconds:.3g} s" if late else "not connected")
        finally:
            self._forget(list(sent))

    def _send(self, letters: dict[int, Letter], online: Mapping[int, Seen], deadline: float,
              sent: dict[str, tuple[int, str]]) -> None:
        if not letters:
            return
        ttl = max(0.0, deadline - time.monotonic()) + SPARE
        messages = [Message(letter.content(), node, "train", ttl=ttl) for node, letter in letters.items()]
        for node, message in zip(letters, self._grid.push_messages(messages), strict=True):
            if message:  # else nobody of that name is known any more
                sent[message] = node, online[node].since

    def _receive(self, sent: dict[str, tuple[int, str]]) -> Iterator[tuple[int, Letter | Lost | None]]:
        for reply in self._grid.pull_messages(list(sent)):
            found = sent.pop(reply.metadata.reply_to_message_id, None)
            if found is None:
                continue
            if reply.has_error():
                gone = reply.error.code == UNAVAILABLE
                yield found[0], None if gone else Lost(f"Flower reports error {reply.error.code}", True)
                continue
            try:
                yield found[0], Letter.read(reply.content)
            except Refused as error:
                yield found[0], Lost(str(error), True)

    def _drop_restarted(self, sent: dict[str, tuple[int, str]], online: Mapping[int, Seen]) -> None:
        """A message that a node had fetched before it was restarted is lost: it is to be sent again."""
        lost = [message for message, (node, since) in sent.items()
                if node in online and online[node].since != since]
        for message in lost:
            del sent[message]
        if lost:
            self._forget(lost)
