"""Two pieces of work in one message: scores ride with a request for training, and with its reply.

A rider is a part of the message by itself: facts under a name of their own, tensors with a prefix. What is
wrong with one part does not concern the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from descant.deploy.messages import WireMessage

RIDER = "scores"  # in the facts
PREFIX = "scores_"  # of the names of its tensors


def together(parts: Sequence[WireMessage]) -> WireMessage:
    """One message of one or two; the first of two rides."""
    if len(parts) == 1:
        return parts[0]
    rider, main = parts
    tensors = {PREFIX + name: packed for name, packed in rider.tensors.items()}
    return WireMessage(main.facts | {RIDER: rider.facts}, {**main.tensors, **tensors})


def apart(message: WireMessage, count: int) -> list[WireMessage]:
    """The parts of a message that should have so many."""
    if count == 1:
        return [message]
    facts = message.facts.get(RIDER)
    rider = {name.removeprefix(PREFIX): packed for name, packed in message.tensors.items()
             if name.startswith(PREFIX)}
    main = {name: packed for name, packed in message.tensors.items() if not name.startswith(PREFIX)}
    missing = {"failed": "there are no scores in the reply"}
    return [WireMessage(facts if isinstance(facts, dict) else missing, rider),
            WireMessage({name: fact for name, fact in message.facts.items() if name != RIDER}, main)]
