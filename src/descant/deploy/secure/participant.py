"""A client's side of an attempt at a sum.

The server is not believed. A phase that is asked for again gets the same reply, and anything that does not
fit what was said before is refused: a second list of survivors would let the server ask for the seed of a
client here and for its key there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from descant.deploy.keys import PrivateKey, PublicKey
from descant.deploy.secure import primitives
from descant.deploy.secure.encoding import Words
from descant.deploy.secure.parts import (
    Advert,
    Attempt,
    Dealing,
    Identity,
    Revealed,
    TooFew,
    advert_text,
    check_advert,
    needed,
    survivors_text,
)
from descant.deploy.transport import Rejected

T = TypeVar("T")


class Accusation(Rejected):
    """What another client sent, by way of the server, is wrong."""

    def __init__(self, client: int, reason: str) -> None:
        super().__init__(f"client {client}: {reason}")
        self.client = client


class Share(NamedTuple):
    """What this client holds for another."""

    key: bytes
    seed: bytes


class Participant:
    """Its secrets are never written down: a client that is restarted has dropped out of the attempt."""

    def __init__(self, attempt: Attempt, client: int, threshold: int, identity: Identity | None = None
                 ) -> None:
        self.attempt = attempt
        self.client = client
        self._threshold = threshold
        self._identity = identity
        self._mask_key, self._box_key = primitives.new_key(), primitives.new_key()
        self._seed = primitives.new_seed()
        self._roster: dict[int, Advert] = {}
        self._signers: dict[int, PublicKey] = {}
        self._shares: dict[int, Share] = {}
        self._said: dict[str, tuple[Any, Any]] = {}  # phase -> what was asked, the reply

    def _once(self, phase: str, asked: Any, reply: Callable[[], T]) -> T:
        if phase not in self._said:
            self._said[phase] = asked, reply()
        if self._said[phase][0] != asked:
            raise Rejected(f"phase {phase!r} was asked for before, with something else")
        found: T = self._said[phase][1]
        return found

    def _require(self, phase: str) -> None:
        if phase not in self._said:
            raise Rejected(f"phase {phase!r} comes first")

    @property
    def clients(self) -> tuple[int, ...]:
        """Who takes part, with this client."""
        return tuple(sorted(self._roster))

    @property
    def needed(self) -> int:
        return needed(self._threshold, len(self._roster))

    # -- the phases --------------------------------------------------------------------------------

    def advertise(self) -> Advert:
        return self._once("advertise", None, self._advertise)

    def _advertise(self) -> Advert:
        keys = primitives.packed(self._mask_key.public_key()), primitives.packed(self._box_key.public_key())
        if self._identity is None:
            return Advert(*keys)
        text = advert_text(self.attempt, self.client, *keys)
        return Advert(*keys, primitives.signed(self._identity.key, text), self._identity.certificate)

    def share(self, roster: Mapping[int, Advert]) -> Dealing:
        """Deal shares to those who advertised keys."""
        self._require("advertise")
        return self._once("share", dict(roster), lambda: self._share(dict(roster)))

    def _share(self, roster: dict[int, Advert]) -> Dealing:
        if roster.get(self.client) != self.advertise():
            raise Rejected("this client's keys are not among those that the server hands out")
        authority = None if self._identity is None else self._identity.authority
        signers: dict[int, PublicKey] = {}
        for client, advert in roster.items():
            try:
                if (key := check_advert(self.attempt, client, advert, authority)) is not None:
                    signers[client] = key
            except Rejected as error:
                raise Accusation(client, str(error)) from None
        _require_different([advert.mask_key for advert in roster.values()])
        _require_different([advert.box_key for advert in roster.values()])
        _require_different([primitives.packed(key) for key in signers.values()])
        self._roster, self._signers = roster, signers
        if len(roster) < self.needed:
            raise TooFew(f"{len(roster)} clients take part, and {self.needed} are needed")
        secrets = primitives.scalar(self._mask_key), self._seed
        shares = [Share(*pair) for pair in zip(
            *(primitives.dealt(secret, self.needed, len(roster)) for secret in secrets), strict=True)]
        owned = dict(zip(self.clients, shares, strict=True))
        self._shares[self.client] = owned[self.client]
        boxes = {client: primitives.locked_for(self._box(client),
                                               self._header(self.client, client) + own.key + own.seed)
                 for client, own in owned.items() if client != self.client}
        return Dealing(primitives.digest(self._seed), boxes,
                       {client: (primitives.digest(own.key), primitives.digest(own.seed))
                        for client, own in owned.items()})

    def _box(self, other: int) -> bytes:
        return primitives.agreed(self._box_key, primitives.unpacked(self._roster[other].box_key))

    def _header(self, source: int, to: int) -> bytes:
        """What a box is for: a box that is sent back to its maker would open too."""
        return primitives.digest(self.attempt.text, str(source).encode(), str(to).encode())

    def open(self, boxes: Mapping[int, bytes]) -> None:
        """Read what the others dealt to this client, before it works for the sum."""
        self._require("share")
        self._once("open", dict(boxes), lambda: self._open(boxes))

    def _open(self, boxes: Mapping[int, bytes]) -> None:
        if self.client in boxes or not boxes.keys() <= self._roster.keys():
            raise Rejected("shares of clients that do not take part")
        if len(boxes) + 1 < self.needed:
            raise TooFew(f"{len(boxes) + 1} clients dealt shares, and {self.needed} are needed")
        for client, data in boxes.items():
            text, header = primitives.unlocked(self._box(client), data), self._header(client, self.client)
            own = self._shares[self.client]
            length = len(header) + len(own.key) + len(own.seed)
            if text is None or not text.startswith(header) or len(text) != length:
                raise Accusation(client, "its shares cannot be read")
            body = text[len(header):]
            self._shares[client] = Share(body[: len(own.key)], body[len(own.key) :])

    def mask(self, words: Words) -> Words:
        """The vector as the server may see it. It is masked once: two vectors under one mask would show how
        they differ."""
        self._require("open")
        return self._once("mask", None, lambda: self._masked(words))

    def _masked(self, words: Words) -> Words:
        masked = words + primitives.stream(self._seed, self.attempt.text, len(words))
        for client in self._shares.keys() - {self.client}:
            add_stream(masked, self._mask_key, self._roster[client].mask_key, self.attempt,
                       plus=self.client < client)
        return masked

    def confirm(self, survivors: Collection[int]) -> bytes:
        """Sign who is in the sum."""
        self._require("mask")
        return self._once("confirm", sorted(survivors), lambda: self._confirm(survivors))

    def _confirm(self, survivors: Collection[int]) -> bytes:
        if self.client not in survivors or not {*survivors} <= self._shares.keys():
            raise Rejected("a sum of clients that do not take part, or without this one")
        if len({*survivors}) < self.needed:
            raise TooFew(f"a sum of {len({*survivors})} clients, and {self.needed} are needed")
        if self._identity is None:
            return b""
        return primitives.signed(self._identity.key, survivors_text(self.attempt, self._roster, survivors))

    def unmask(self, survivors: Collection[int], signatures: Mapping[int, bytes]) -> Revealed:
        """Reveal the shares that the sum needs, if enough clients have signed that this is the sum."""
        self.confirm(survivors)
        if self._identity is not None:
            self._require_agreement(survivors, signatures)
        shares, inside = self._shares, {*survivors}
        return Revealed({client: shares[client].seed for client in shares.keys() & inside},
                        {client: shares[client].key for client in shares.keys() - inside})

    def _require_agreement(self, survivors: Collection[int], signatures: Mapping[int, bytes]) -> None:
        text = survivors_text(self.attempt, self._roster, survivors)
        agreeing = [client for client in {*survivors} & signatures.keys()
                    if primitives.is_signed(self._signers[client], signatures[client], text)]
        if len(agreeing) < self.needed:
            raise TooFew(f"{len(agreeing)} clients have signed who is in the sum, and {self.needed} are "
                         "needed")


def add_stream(total: Words, private: PrivateKey, public: bytes, attempt: Attempt, plus: bool) -> None:
    """Add, or subtract, the stream that two clients have in common."""
    secret = primitives.agreed(private, primitives.unpacked(public))
    words = primitives.stream(secret, attempt.text, len(total))
    (np.add if plus else np.subtract)(total, words, out=total)


def _require_different(keys: list[bytes]) -> None:
    if len({*keys}) < len(keys):
        raise Rejected("two clients have the same key")
