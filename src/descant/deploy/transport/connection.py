"""A client's connection, whatever the transport: whether the server may be and is reached."""

from __future__ import annotations

import threading

from descant.deploy.keys import ClientKeys
from descant.deploy.transport import Events
from descant.deploy.transport.address import Address
from descant.errors import DescantError, UsageError

STRANGER = "the server does not know the key of {0}: ask its operator to add {0}.pub"
CONNECTED_ALREADY = "the server has {} connected already: another process may use its key"


def require_keys(address: Address, keys: ClientKeys | None) -> None:
    """Nothing leaves this machine in the clear."""
    if keys is None and not address.is_loopback:
        raise UsageError(f"without keys a client connects only to its own machine, and {address.host} is "
                         "not its loopback: name the folder of certificates with --keys")


class Connection:
    """Reports each change once, and in order, from whichever thread."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._lock = threading.Lock()
        self._is_up: bool | None = None  # None: never tried
        self.has_been_up = False

    @property
    def is_up(self) -> bool:
        return bool(self._is_up)

    def gain(self) -> None:
        with self._lock:
            if not self._is_up:
                self._is_up = self.has_been_up = True
                self._events.connected()

    def lose(self, reason: str) -> None:
        with self._lock:
            if self._is_up is not False:
                self._is_up = False
                self._events.lost(reason)

    def fail(self, reason: str) -> None:
        """A person has to act: raise before the first connection, else wait."""
        if not self.has_been_up:
            raise DescantError(reason)
        self.lose(reason)
