"""Why a client does not do what a request says. The server may see the reason: its text quotes no data."""

from __future__ import annotations

from typing import Any

from descant.errors import DescantError, UsageError


class NotJoined(DescantError):
    """This client must join first."""


class Refusal(UsageError):
    """The server does not take this client."""


class Mismatch(UsageError):
    """Server and client do not fit; both may see the reason, and some facts with it."""

    def __init__(self, reason: str, **facts: Any) -> None:
        super().__init__(reason)
        self.facts = facts
