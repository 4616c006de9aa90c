"""Make the certificates and keys of a federation.

A federation has its own certificate authority, which signs the certificates of the server and of the clients.
The server also knows each client's public key, and takes no other: to revoke a client is to remove its key,
and needs no new authority. Each organisation gets one folder:

    DIR/ca.crt, ca.key                     the authority; its key stays with the server's operator
    DIR/server/ca.crt, server.pem, server.key, clients/NAME.pub, clients/NAME.pem, revoked/NAME-HASH.pub
    DIR/NAME/ca.crt, NAME.key, NAME.pub, NAME.pem

NAME.pem is asked for at the TLS handshake, and shows other clients that a key is a client's of this
federation, for secure aggregation. It does not say whose: clients do not learn each other's names.

Repeated calls keep what exists, add what is missing and renew certificates that expire soon; no key is
replaced unless that is asked for (`rotate`). A file is written atomically and after the files it depends on,
so that the next call completes what a kill has left. A client may also make its own key and send only
NAME.pub; it then gets NAME.pem.
"""

from __future__ import annotations

import datetime
import glob
import hashlib
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from descant.core.files import locked, sync_directory, write_atomic
from descant.deploy import keys
from descant.deploy.keys import PrivateKey, PublicKey, now
from descant.errors import UsageError

AUTHORITY_DAYS = 3650
BACKDATE = datetime.timedelta(days=1)  # clocks differ
RENEW = datetime.timedelta(days=30)  # a certificate that expires sooner is replaced


class Certificates(NamedTuple):
    """What a call has made."""

    directory: Path
    authority: Literal["made", "kept"]
    server: Literal["made", "renewed", "kept"]
    expires: datetime.datetime  # the server's certificate
    added: tuple[str, ...]  # clients
    renewed: tuple[str, ...]  # clients that existed, and have another certificate
    kept: tuple[str, ...]  # clients that existed
    revoked: tuple[str, ...]  # clients whose key is not taken any more


def make_certificates(directory: Path, host: str, clients: Sequence[str], days: int = 365, *,
                      rotate: Sequence[str] = (), revoke: Sequence[str] = ()) -> Certificates:
    """Make what is missing for a server that is reached at `host`, and for these clients. Those of `rotate`
    get another key, and those of `revoke` are not admitted any more."""
    _check_host(host)
    _check_names([*clients, *rotate, *revoke])
    if not 1 <= days <= AUTHORITY_DAYS:
        raise UsageError(f"--days must be from 1 to {AUTHORITY_DAYS}, not {days}")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(directory):
        had_authority = (directory / "ca.crt").exists()
        authority = _authority(directory)
        server = directory / "server"
        for folder in (server, server / "clients"):
            folder.mkdir(mode=0o700, exist_ok=True)
        done, expires = _server(server, authority, host, days)
        for name in (*rotate, *revoke):
            _revoke(directory, name)
        for name in rotate:
            for ending in ("key", "pub", "pem"):
                (directory / name / f"{name}.{ending}").unlink(missing_ok=True)
        made = {name: _client(directory, name, authority, days) for name in (*clients, *rotate)}
        for known in sorted((server / "clients").glob("*.pub")):  # and of clients with keys of their own
            if known.stem not in made and _certify(directory / known.stem, known.with_suffix(".pem"),
                                                   keys.read_public(known), authority, days):
                made[known.stem] = "renewed"
    added, renewed, kept = (tuple(name for name, what in made.items() if what == wanted)
                            for wanted in ("made", "renewed", "kept"))
    return Certificates(directory, "kept" if had_authority else "made", done, expires, added, renewed, kept,
                        tuple(revoke))


class _Authority(NamedTuple):
    key: PrivateKey
    certificate: x509.Certificate


def _authority(directory: Path) -> _Authority:
    place, key_place = directory / "ca.crt", directory / "ca.key"
    if place.exists() and not key_place.exists():
        raise UsageError(f"{key_place} is missing, and nothing can be signed without it: put it back, or "
                         + keys.START_ANEW)
    key = _key(key_place)
    if not place.exists():
        name = _name(f"descant authority {secrets.token_hex(4)}")  # two authorities differ
        made = _signed(name, name, key.public_key(), key, _end(AUTHORITY_DAYS), is_authority=True)
        write_atomic(place, made.public_bytes(Encoding.PEM))
    certificate = keys.read_certificate(place)
    if certificate.public_key() != key.public_key():
        raise UsageError(f"{key_place} is not the key of {place}")
    keys.check_dates(place, certificate, keys.START_ANEW)
    return _Authority(key, certificate)


def _server(directory: Path, authority: _Authority, host: str, days: int
            ) -> tuple[Literal["made", "renewed", "kept"], datetime.datetime]:
    place, key_place = directory / "server.pem", directory / "server.key"
    _write_if_changed(directory / "ca.crt", authority.certificate.public_bytes(Encoding.PEM))
    key = _key(key_place)
    was_there = place.exists()
    if was_there:
        found = keys.read_certificate(place)
        if host in keys.hosts_of(found) and _is_fresh(found, key.public_key(), authority, days):
            return "kept", found.not_valid_after_utc
    names = [_general_name(each) for each in dict.fromkeys([host, *keys.LOCAL_HOSTS])]
    made = _signed(
        _name(host if len(host) <= 64 else "server"), authority.certificate.subject, key.public_key(),
        authority.key, min(_end(days), authority.certificate.not_valid_after_utc), is_authority=False,
        extensions=[x509.SubjectAlternativeName(names),
                    x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
                    x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())])
    write_atomic(place, made.public_bytes(Encoding.PEM))
    return "renewed" if was_there else "made", made.not_valid_after_utc


def _is_fresh(certificate: x509.Certificate, key: PublicKey, authority: _Authority, days: int) -> bool:
    """Whether a certificate is for this key and lasts."""
    left = certificate.not_valid_after_utc - now()
    return (left > min(RENEW, datetime.timedelta(days=days) / 2) and certificate.public_key() == key
            and keys.is_issued(certificate, authority.certificate))


def _client(directory: Path, name: str, authority: _Authority, days: int
            ) -> Literal["made", "renewed", "kept"]:
    """Make a client's folder, register its key with the server, and give it a certificate."""
    folder, known = directory / name, directory / "server" / "clients" / f"{name}.pub"
    key_place, public_place = folder / f"{name}.key", folder / f"{name}.pub"
    was_there = known.exists()
    if was_there and not key_place.exists():  # its folder was moved, or it made its own key
        public = keys.read_public(known)
    else:
        folder.mkdir(mode=0o700, exist_ok=True)
        _write_if_changed(folder / "ca.crt", authority.certificate.public_bytes(Encoding.PEM))
        public = _key(key_place, PrivateFormat.OpenSSH).public_key()
        text = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
        _write_if_changed(public_place, text)
        if was_there and keys.read_public(known) != public:
            raise UsageError(f"{known} does not belong to {key_place}: remove the wrong one")
        if _revoked_at(directory, name, public).exists():
            raise UsageError(f"the key of {name} was revoked: make another with --rotate {name}")
        if not was_there:
            write_atomic(known, text)
    is_new = _certify(folder, known.with_suffix(".pem"), public, authority, days)
    return "made" if not was_there else "renewed" if is_new else "kept"


def _certify(folder: Path, issued: Path, key: PublicKey, authority: _Authority, days: int) -> bool:
    """The certificate of a client, in its folder and, for the next call, with the server; whether it is new.
    A folder that was handed over is made again only for a new one."""
    place = folder / issued.name
    there = [keys.read_certificate(path) for path in (place, issued) if path.exists()]
    found = next((each for each in there if _is_fresh(each, key, authority, days)), None)
    made = found or _signed(
        _name(f"descant client {secrets.token_hex(8)}"), authority.certificate.subject, key, authority.key,
        min(_end(days), authority.certificate.not_valid_after_utc), is_authority=False,
        extensions=[x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]),
                    x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())])
    text = made.public_bytes(Encoding.PEM)
    if found is None:
        folder.mkdir(mode=0o700, exist_ok=True)
        _write_if_changed(folder / "ca.crt", authority.certificate.public_bytes(Encoding.PEM))
    if folder.exists():
        _write_if_changed(place, text)
    _write_if_changed(issued, text)
    return found is None


def _revoked_at(directory: Path, name: str, key: PublicKey) -> Path:
    digest = hashlib.sha256(keys.public_pem(key)).hexdigest()[:16]
    return directory / "server" / "revoked" / f"{name}-{digest}.pub"


def _revoke(directory: Path, name: str) -> None:
    """Remove a client's key from those that the server takes, and remember it: it cannot come back."""
    known = directory / "server" / "clients" / f"{name}.pub"
    if not known.exists():
        if not [*(directory / "server" / "revoked").glob(f"{glob.escape(name)}-*.pub")]:
            raise UsageError(f"there is no client {name} with a key in {known.parent}")
        return  # done, or done by a call that was killed
    place = _revoked_at(directory, name, keys.read_public(known))
    place.parent.mkdir(mode=0o700, exist_ok=True)
    known.rename(place)
    sync_directory(known.parent)
    known.with_suffix(".pem").unlink(missing_ok=True)


def _check_host(host: str) -> None:
    try:
        is_unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_unspecified = False
        if re.fullmatch(r"[0-9.]+", host) or len(host) > 253 or not re.fullmatch(
                r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*", host):
            raise UsageError(f"{host!r} is neither a host name, such as server.example.org, nor an IP "
                             "address") from None
    if is_unspecified:
        raise UsageError(f"{host} is an address to listen on: name the one at which clients reach the "
                         "server")


def _check_names(names: Sequence[str]) -> None:
    if wrong := [name for name in names if not keys.is_name(name)]:
        raise UsageError(f"{', '.join(map(repr, wrong))} cannot be the name of a client: a name has up to "
                         f"{keys.LONGEST_NAME} printable characters without / and \\, does not begin with a "
                         "dot or a dash, and is not 'server'")
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise UsageError(f"several clients are called {', '.join(map(repr, twice))}: names must differ")


def _signed(subject: x509.Name, issuer: x509.Name, key: PublicKey, signer: PrivateKey,
            expires: datetime.datetime, *, is_authority: bool, extensions: Sequence[x509.ExtensionType] = ()
            ) -> x509.Certificate:
    usage = x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=is_authority, crl_sign=is_authority, encipher_only=False,
        decipher_only=False)
    constraints = x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None)
    builder = (x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
               .serial_number(x509.random_serial_number()).not_valid_before(now() - BACKDATE)
               .not_valid_after(expires).add_extension(constraints, critical=True)
               .add_extension(usage, critical=True))
    for extension in (x509.SubjectKeyIdentifier.from_public_key(key), *extensions):
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(signer, hashes.SHA384())


def _end(days: int) -> datetime.datetime:
    return now() + datetime.timedelta(days=days)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key(path: Path, form: PrivateFormat = PrivateFormat.PKCS8) -> PrivateKey:
    """The key in a file; a new one if there is none."""
    if not path.exists():
        key = ec.generate_private_key(ec.SECP384R1())
        _write_private(path, key.private_bytes(Encoding.PEM, form, NoEncryption()))
    return keys.read_private(path)


def _write_private(path: Path, data: bytes) -> None:
    """Write a file atomically; no other user can read it at any time."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # from a call that was killed
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)


def _write_if_changed(path: Path, data: bytes) -> None:
    if not path.exists() or path.read_bytes() != data:
        write_atomic(path, data)
