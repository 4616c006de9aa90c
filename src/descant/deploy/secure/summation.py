"""The server's side of an attempt at a sum."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from descant.deploy.secure import primitives
from descant.deploy.secure.encoding import FixedPoint, Numbers, Words
from descant.deploy.secure.participant import add_stream
from descant.deploy.secure.parts import Advert, Attempt, Dealing, Revealed, TooFew, check_advert, needed
from descant.deploy.transport import Rejected

DIGEST = 32  # bytes


class Liar(Rejected):
    """The sum is lost, and it is known by whom."""

    def __init__(self, client: int, reason: str) -> None:
        super().__init__(reason)
        self.client = client


class Summation:
    """Clients are added to phase after phase; `roster`, `boxes`, `survivors` and `total` end one, and raise
    `TooFew` if there are not enough. What a client sends that cannot be right is `Rejected`."""

    def __init__(self, attempt: Attempt, threshold: int, length: int, authority: bytes | None = None) -> None:
        self.attempt = attempt
        self._threshold = threshold
        self._authority = authority
        self._roster: dict[int, Advert] = {}
        self._dealings: dict[int, Dealing] = {}
        self._masked: set[int] = set()
        self._sum: Words = np.zeros(length, np.uint64)
        self._signatures: dict[int, bytes] = {}
        self._seeds: dict[int, list[bytes]] = {}  # shares, by whose secret they are of
        self._keys: dict[int, list[bytes]] = {}

    @property
    def needed(self) -> int:
        return needed(self._threshold, len(self._roster))

    def _enough(self, clients: int, what: str) -> None:
        if clients < self.needed:
            raise TooFew(f"{clients} clients {what}, and secure aggregation needs {self.needed}")

    # -- advertise ---------------------------------------------------------------------------------

    def advertised(self, client: int, advert: Advert) -> None:
        check_advert(self.attempt, client, advert, self._authority)
        if any({advert.mask_key, advert.box_key} & {other.mask_key, other.box_key}
               for other in self._roster.values()):
            raise Rejected("it has the keys of another client")
        self._roster[client] = advert

    def roster(self) -> dict[int, Advert]:
        self._enough(len(self._roster), "advertised keys")
        return dict(self._roster)

    # -- share -------------------------------------------------------------------------------------

    def dealt(self, client: int, dealing: Dealing) -> None:
        everyone = self._roster.keys()
        if dealing.boxes.keys() != everyone - {client} or dealing.digests.keys() != everyone or any(
                len(each) != DIGEST for pair in dealing.digests.values() for each in pair) or len(
                dealing.commitment) != DIGEST:
            raise Rejected("its shares are not for the clients that take part")
        self._dealings[client] = dealing

    def boxes(self, client: int) -> dict[int, bytes]:
        """What the others dealt to this client."""
        self._enough(len(self._dealings), "dealt shares")
        return {other: dealing.boxes[client] for other, dealing in self._dealings.items() if other != client}

    # -- mask --------------------------------------------------------------------------------------

    def masked(self, client: int, words: Words) -> None:
        if client not in self._dealings or client in self._masked or words.shape != self._sum.shape:
            raise Rejected("a vector that is not expected")
        np.add(self._sum, words, out=self._sum)
        self._masked.add(client)

    def survivors(self) -> list[int]:
        """Who is in the sum."""
        self._enough(len(self._masked), "sent their vectors")
        return sorted(self._masked)

    # -- confirm, unmask ---------------------------------------------------------------------------

    def confirmed(self, client: int, signature: bytes) -> None:
        self._signatures[client] = signature

    def signatures(self) -> dict[int, bytes]:
        self._enough(len(self._signatures), "confirmed who is in the sum")
        return dict(self._signatures)

    def revealed(self, client: int, revealed: Revealed) -> None:
        gone = self._dealings.keys() - self._masked
        if revealed.seeds.keys() != self._masked or revealed.keys.keys() != gone:
            raise Rejected("its shares are not those that the sum needs")
        shares = {**revealed.keys, **revealed.seeds}
        wrong = [other for other, share in shares.items()
                 if primitives.digest(share) != self._dealings[other].digests[client][other in self._masked]]
        for other in shares.keys() - wrong:
            found = self._seeds if other in self._masked else self._keys
            found.setdefault(other, []).append(shares[other])

    def total(self, encoding: FixedPoint) -> Numbers:
        """The sum over the survivors."""
        total = self._sum.copy()
        for client in sorted(self._masked):
            total -= primitives.stream(self._seed_of(client), self.attempt.text, len(total))
        for gone in sorted(self._dealings.keys() - self._masked):
            self._remove_key(gone, total)
        return encoding.decode(total, len(self._masked))

    def _seed_of(self, client: int) -> bytes:
        seed = self._combined(self._seeds, client)
        if primitives.digest(seed) != self._dealings[client].commitment:
            raise Liar(client, "the shares that it dealt are not of its seed")
        return seed

    def _remove_key(self, gone: int, total: Words) -> None:
        """Take out the streams that the survivors have in common with a client that is not in the sum."""
        key = primitives.key_of(self._combined(self._keys, gone))
        if key is None or primitives.packed(key.public_key()) != self._roster[gone].mask_key:
            raise Liar(gone, "the shares that it dealt are not of its key")
        for client in sorted(self._masked):
            add_stream(total, key, self._roster[client].mask_key, self.attempt, plus=client > gone)

    def _combined(self, shares: Mapping[int, list[bytes]], client: int) -> bytes:
        found = shares.get(client, [])
        if len(found) < self.needed:
            raise TooFew(f"{len(found)} clients revealed right shares of client {client}, and secure "
                         f"aggregation needs {self.needed}")
        secret = primitives.combined(found[: self.needed])
        if secret is None:
            raise Liar(client, "the shares that it dealt are not of one secret")
        return secret
