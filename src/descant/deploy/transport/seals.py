"""Requests carry the server's signature.

TLS shows a client that it is connected to its server, not that a message which that hands out was made by it:
the link relays, and another client could find a way to bring one in. The key is that of the server's
certificate; clients need nothing but the authority's certificate (ca.crt) to check it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from descant.deploy.keys import is_for, is_issued, now, read_private
from descant.deploy.transport import Payload, Rejected, Seal

PURPOSE = b"descant request 1"  # the key signs other things too: TLS handshakes
METHOD = ec.ECDSA(hashes.SHA256())


class Seals:
    """The server's side."""

    def __init__(self, key: Path, certificate: Path) -> None:
        self._key = read_private(key)
        self._certificate = certificate.read_bytes()

    def sealed(self, payloads: Mapping[int, Payload]) -> dict[int, Payload]:
        """By address, which is signed too: a request is for one client."""
        known: dict[int, bytes] = {}  # most clients are sent the same blob
        return {address: payload._replace(seal=Seal(self._key.sign(_text(payload, address, known), METHOD),
                                                    self._certificate))
                for address, payload in payloads.items()}


def check_seal(payload: Payload, address: int, authority: bytes) -> None:
    """Raise unless the server of this authority (PEM) has signed the request for this address."""
    if payload.seal is None:
        raise Rejected("a request without the server's signature")
    try:
        own, issuer = (x509.load_pem_x509_certificate(pem) for pem in (payload.seal.certificate, authority))
        key = own.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not is_issued(own, issuer) or not is_for(
                own, ExtendedKeyUsageOID.SERVER_AUTH) or not (
                own.not_valid_before_utc <= now() <= own.not_valid_after_utc):
            raise ValueError("not a certificate of a server by this authority")
        key.verify(payload.seal.signature, _text(payload, address, {}), METHOD)
    except (ValueError, TypeError, InvalidSignature):
        raise Rejected("a request whose signature is not the server's") from None


def _text(payload: Payload, address: int, known: dict[int, bytes]) -> bytes:
    """What is signed: a digest of each part, in a fixed order."""
    def digest(part: bytes) -> bytes:
        if id(part) not in known:
            known[id(part)] = hashlib.sha256(part).digest()
        return known[id(part)]

    texts = [str(address), str(payload.facts), str(payload.tensors), *sorted(payload.blobs)]
    blobs = [digest(payload.blobs[name]) for name in sorted(payload.blobs)]
    return b"".join([PURPOSE, *(hashlib.sha256(text.encode()).digest() for text in texts), *blobs])
