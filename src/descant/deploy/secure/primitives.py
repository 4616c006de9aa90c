"""Keys, streams and shares: thin names for what Flower and `cryptography` have."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key

from descant.deploy.keys import PrivateKey, PublicKey
from descant.deploy.secure.encoding import Words
from descant.deploy.transport import Rejected

CURVE = ec.SECP256R1()
SCALAR = 32  # bytes of a private key
SEED = 31  # bytes of a client's own seed: 248 bits, and with the padding two blocks of a share
METHOD = ec.ECDSA(hashes.SHA256())


def new_key() -> PrivateKey:
    return ec.generate_private_key(CURVE)


def new_seed() -> bytes:
    return secrets.token_bytes(SEED)


def packed(key: PublicKey) -> bytes:
    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def unpacked(data: bytes) -> PublicKey:
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(CURVE, data)
    except ValueError:
        raise Rejected("a key that is not a point of the curve") from None


def scalar(key: PrivateKey) -> bytes:
    return key.private_numbers().private_value.to_bytes(SCALAR, "big")


def key_of(secret: bytes) -> PrivateKey | None:
    """The private key of this scalar; None if there is none."""
    try:
        return ec.derive_private_key(int.from_bytes(secret, "big"), CURVE)
    except ValueError:
        return None


def agreed(private: PrivateKey, public: PublicKey) -> bytes:
    """What only the owners of two keys know."""
    return generate_shared_key(private, public)


def locked_for(key: bytes, text: bytes) -> bytes:
    return encrypt(key, text)


def unlocked(key: bytes, data: bytes) -> bytes | None:
    """None: it was not locked with this key."""
    try:
        return decrypt(key, data)
    except (InvalidToken, TypeError, ValueError):
        return None


def stream(secret: bytes, context: bytes, count: int) -> Words:
    """So many random words that follow from a secret: AES-256 in counter mode, under a key for this alone."""
    key = HKDF(hashes.SHA256(), 32, None, b"descant mask 1" + context).derive(secret)
    text = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * count))
    return np.frombuffer(text, np.dtype("<u8")).astype(np.uint64, copy=False)


def dealt(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares of a secret, of which any `threshold` give it back."""
    return create_shares(secret, threshold, count)


def combined(shares: Sequence[bytes]) -> bytes | None:
    """None: these are no shares of one secret."""
    try:
        return combine_shares(list(shares))
    except (ValueError, IndexError):
        return None


def digest(*parts: bytes) -> bytes:
    """Of the parts, not of their concatenation."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def signed(key: PrivateKey, text: bytes) -> bytes:
    return key.sign(text, METHOD)


def is_signed(key: PublicKey, signature: bytes, text: bytes) -> bool:
    try:
        key.verify(signature, text, METHOD)
    except InvalidSignature:
        return False
    return True
