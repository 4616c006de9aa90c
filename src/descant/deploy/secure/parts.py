"""What server and clients tell each other in an attempt at a sum, and whose word it is."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import NamedTuple

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from descant.deploy.keys import PrivateKey, PublicKey, is_for, is_issued, now
from descant.deploy.secure import primitives
from descant.deploy.transport import Rejected
from descant.errors import DescantError

LEAST = 3  # clients in a sum: of two, each knows the other's vector


class TooFew(DescantError):
    """There are not enough clients left for a sum."""


class Attempt(NamedTuple):
    """An attempt at the sum of a round. A round that is repeated has another token.

    Everything that is signed, sealed or masked depends on all of this, so that there is no sum of clients
    that were told different terms."""

    session: str
    job: str
    number: int
    token: str
    terms: str = ""  # what else is the same for all, such as a digest of the model that they are sent

    @property
    def text(self) -> bytes:
        return json.dumps(self).encode()


class Advert(NamedTuple):
    """The public keys of a client for one attempt."""

    mask_key: bytes  # for the streams that two clients have in common
    box_key: bytes  # for what only one client may read
    signature: bytes = b""
    certificate: bytes = b""  # of the key that signed (PEM)


class Dealing(NamedTuple):
    """The shares that a client deals to the others."""

    commitment: bytes  # to its own seed
    boxes: Mapping[int, bytes]  # a share of its key and one of its seed, for one client to read
    digests: Mapping[int, tuple[bytes, bytes]]  # of these shares: who reveals another is found out


class Revealed(NamedTuple):
    """The shares that a client gives back."""

    seeds: Mapping[int, bytes]  # of clients that are in the sum
    keys: Mapping[int, bytes]  # of clients that are not


class Identity(NamedTuple):
    """The key by which a client is known to the others, and the authority (PEM) that they trust."""

    key: PrivateKey
    certificate: bytes  # empty if it has none: then the others do not take it, nor does it believe them
    authority: bytes


def needed(threshold: int, clients: int) -> int:
    """How many of so many clients a sum needs: a majority at least, so that no client's seed and key can both
    be had from clients that reveal one of them."""
    return max(threshold, LEAST, clients // 2 + 1)


def advert_text(attempt: Attempt, client: int, mask_key: bytes, box_key: bytes) -> bytes:
    return primitives.digest(b"descant advertise 1", attempt.text, str(client).encode(), mask_key, box_key)


def survivors_text(attempt: Attempt, roster: Mapping[int, Advert], survivors: Collection[int]) -> bytes:
    keys = b"".join(primitives.digest(str(client).encode(), roster[client].mask_key, roster[client].box_key)
                    for client in sorted(roster))
    return primitives.digest(b"descant confirm 1", attempt.text, keys, json.dumps(sorted(survivors)).encode())


def signer(advert: Advert, authority: bytes) -> PublicKey:
    """The key of the client that signed, if the authority has certified it as a client's."""
    try:
        own, issuer = (x509.load_pem_x509_certificate(pem) for pem in (advert.certificate, authority))
        key = own.public_key()
        if not isinstance(key, PublicKey) or not is_issued(own, issuer) or not is_for(
                own, ExtendedKeyUsageOID.CLIENT_AUTH) or not (
                own.not_valid_before_utc <= now() <= own.not_valid_after_utc):
            raise ValueError("not a client's certificate of this authority")
    except (ValueError, TypeError):
        raise Rejected("its keys are not certified by the authority of this federation") from None
    return key


def check_advert(attempt: Attempt, client: int, advert: Advert, authority: bytes | None) -> PublicKey | None:
    """Raise unless these keys are a client's for this attempt. Without an authority nothing is signed."""
    for point in (advert.mask_key, advert.box_key):
        primitives.unpacked(point)
    if authority is None:
        return None
    key = signer(advert, authority)
    text = advert_text(attempt, client, advert.mask_key, advert.box_key)
    if not primitives.is_signed(key, advert.signature, text):
        raise Rejected("the signature of its keys is not of this attempt")
    return key
