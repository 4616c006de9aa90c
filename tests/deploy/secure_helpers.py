"""Secure aggregation without a federation: participants and a server in one process."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from descant.deploy.secure.encoding import FixedPoint, Numbers, Words
from descant.deploy.secure.participant import Participant
from descant.deploy.secure.parts import Attempt, Identity
from descant.deploy.secure.summation import Summation

ATTEMPT = Attempt("0123456789abcdef", "local", 1, "token")
BOUND = 100.0
PHASES = ("advertise", "share", "mask", "confirm", "unmask")


class Authority:
    """Certifies keys, as `descant certificates` does."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        self.pem = self._signed(self._key.public_key(), self._name, None)

    def _signed(self, key: Any, name: x509.Name, use: Any) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = (x509.CertificateBuilder().subject_name(name).issuer_name(self._name).public_key(key)
                   .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(1))
                   .not_valid_after(now + datetime.timedelta(1)))
        if use is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def identity(self, use: Any = ExtendedKeyUsageOID.CLIENT_AUTH) -> Identity:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "client")])
        return Identity(key, self._signed(key.public_key(), name, use), self.pem)


class Trial:
    """An attempt at a sum among some clients, phase by phase, with what was sent."""

    def __init__(self, count: int, threshold: int, *, authority: Authority | None = None, length: int = 50,
                 attempt: Attempt = ATTEMPT, identities: Sequence[Identity] | None = None) -> None:
        self.count, self.attempt = count, attempt
        if authority is not None and identities is None:
            identities = [authority.identity() for _ in range(count)]
        known: Sequence[Identity | None] = identities or [None] * count
        self.participants = {k: Participant(attempt, k, threshold, known[k]) for k in range(count)}
        self.server = Summation(attempt, threshold, length, None if authority is None else authority.pem)
        self.vectors = {k: np.random.default_rng(k).uniform(-BOUND, BOUND, length) for k in range(count)}
        self.sent: dict[int, Words] = {}

    def there(self, gone: Mapping[str, Collection[int]], phase: str) -> list[int]:
        """Who still replies in a phase."""
        before = PHASES[: PHASES.index(phase) + 1]
        return [k for k in self.participants if not any(k in gone.get(each, ()) for each in before)]

    def advertise(self, clients: Collection[int]) -> None:
        for k in clients:
            self.server.advertised(k, self.participants[k].advertise())

    def share(self, clients: Collection[int]) -> None:
        roster = self.server.roster()
        for k in clients:
            self.server.dealt(k, self.participants[k].share(roster))

    @property
    def encoding(self) -> FixedPoint:
        return FixedPoint(BOUND, len(self.server.roster()))

    def mask(self, clients: Collection[int]) -> None:
        for k in clients:
            self.participants[k].open(self.server.boxes(k))
            self.sent[k] = self.participants[k].mask(self.encoding.encode(self.vectors[k]))
            self.server.masked(k, self.sent[k])

    def confirm(self, clients: Collection[int]) -> None:
        survivors = self.server.survivors()
        for k in clients:
            self.server.confirmed(k, self.participants[k].confirm(survivors))

    def unmask(self, clients: Collection[int]) -> None:
        survivors, signatures = self.server.survivors(), self.server.signatures()
        for k in clients:
            self.server.revealed(k, self.participants[k].unmask(survivors, signatures))

    def run(self, gone: Mapping[str, Collection[int]] | None = None, until: str = "unmask") -> Numbers:
        """The sum, where some clients drop out before a phase."""
        for phase in PHASES[: PHASES.index(until) + 1]:
            getattr(self, phase)(self.there(gone or {}, phase))
        return self.server.total(self.encoding) if until == "unmask" else np.zeros(0)

    def plain(self) -> Numbers:
        """The sum of those whose vectors came."""
        return np.sum([self.vectors[k] for k in self.sent], axis=0)
