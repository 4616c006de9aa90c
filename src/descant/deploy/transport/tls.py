"""Certificates of clients in TLS: the server asks for one before it reads anything."""

from __future__ import annotations

import datetime
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from descant.deploy.keys import ClientKeys, now

AGES = datetime.timedelta(days=3650)


def client_context(keys: ClientKeys) -> ssl.SSLContext:
    """Accepts only a server of this federation's authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=keys.ca.decode("ascii"))
    with tempfile.NamedTemporaryFile() as file:  # for this user alone; Python takes keys from files only
        file.write(keys.private_pem + keys.certificate)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def write_own_certificate(place: Path) -> bytes:
    """For the server's own process, which asks its SuperLink as clients do: a key that is as old as the
    two, with a certificate that nobody but that SuperLink trusts. Returns the certificate (PEM)."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the server's own process")])
    made = (x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(now() - AGES)
            .not_valid_after(now() + AGES).add_extension(x509.BasicConstraints(True, None), critical=True)
            .sign(key, hashes.SHA384()))
    place.touch(0o600)
    place.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
                      + made.public_bytes(Encoding.PEM))
    return made.public_bytes(Encoding.PEM)
