"""Certificates and keys: who may be the server, and who may be which client.

A federation has an authority of its own, which vouches for its one server; every client has a pair of keys,
of which the server knows the public half. Each organisation is handed one folder:

    DIR/ca.crt, ca.key                     the authority; its key stays with who runs the server
    DIR/server/ca.crt, server.pem, server.key, clients/NAME.pub
    DIR/NAME/ca.crt, NAME.key, NAME.pub

Making them can be repeated: what exists is kept, what is missing is added, and no key is ever replaced.
Files that depend on another are written after it, each in one step, so that a kill leaves what the next
call completes. A client may also make its own key and hand over NAME.pub only.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from descant.core.files import locked, sync_directory, write_atomic
from descant.errors import UsageError

HERE = ("localhost", "127.0.0.1", "::1")  # the server's own machine, for itself and for trying
AUTHORITY_DAYS = 3650
LONGEST_NAME = 100
EARLY = datetime.timedelta(days=1)  # certificates hold from yesterday: clocks differ
RENEWED = datetime.timedelta(days=30)  # a certificate that ends sooner is replaced

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey


class Made(NamedTuple):
    """What a call has done."""

    directory: Path
    authority: Literal["made", "kept"]
    server: Literal["made", "renewed", "kept"]
    ends: datetime.datetime  # of the server's certificate
    added: tuple[str, ...]  # clients
    kept: tuple[str, ...]  # clients that there were


def make_certificates(directory: Path, host: str, clients: Sequence[str], days: int = 365) -> Made:
    """Make what is missing for a server that is reached at `host`, and for these clients."""
    _check_host(host)
    _check_names(clients)
    if not 1 <= days <= AUTHORITY_DAYS:
        raise UsageError(f"certificates hold from 1 to {AUTHORITY_DAYS} days, not {days}")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(directory):
        had_authority = (directory / "ca.crt").exists()
        authority = _authority(directory)
        server = directory / "server"
        for folder in (server, server / "clients"):
            folder.mkdir(mode=0o700, exist_ok=True)
        done, ends = _server(server, authority, host, days)
        added = tuple(name for name in clients if _client(directory, name, authority.certificate))
    return Made(directory, "kept" if had_authority else "made", done, ends, added,
                tuple(name for name in clients if name not in added))


# -- making --------------------------------------------------------------------------------------


class _Authority(NamedTuple):
    key: PrivateKey
    certificate: x509.Certificate


def _authority(directory: Path) -> _Authority:
    place, key_place = directory / "ca.crt", directory / "ca.key"
    if place.exists() and not key_place.exists():
        raise UsageError(f"{key_place} is missing, and without it nothing can be added to {place}: put it "
                         "back, or make certificates for everybody in another directory")
    if not key_place.exists():
        _write_private(key_place, _pem(ec.generate_private_key(ec.SECP384R1())))
    key = _read_private(key_place)
    if not place.exists():
        name = _name(f"descant authority {secrets.token_hex(4)}")  # two of them can be told apart
        builder = _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = builder.add_extension(identifier, critical=False)
        write_atomic(place, builder.sign(key, hashes.SHA384()).public_bytes(Encoding.PEM))
    certificate = _read_certificate(place)
    if certificate.public_key() != key.public_key():
        raise UsageError(f"{key_place} is not the key of {place}")
    _check_dates(place, certificate, "make certificates for everybody in another directory")
    return _Authority(key, certificate)


def _server(directory: Path, authority: _Authority, host: str, days: int
            ) -> tuple[Literal["made", "renewed", "kept"], datetime.datetime]:
    place, key_place = directory / "server.pem", directory / "server.key"
    _write_if_other(directory / "ca.crt", authority.certificate.public_bytes(Encoding.PEM))
    if not key_place.exists():
        _write_private(key_place, _pem(ec.generate_private_key(ec.SECP384R1())))
    key = _read_private(key_place)
    was_there = place.exists()
    if was_there:
        found = _read_certificate(place)
        left = found.not_valid_after_utc - _now()
        if (host in hosts_of(found) and left > min(RENEWED, datetime.timedelta(days=days) / 2)
                and found.public_key() == key.public_key() and _is_issued(found, authority.certificate)):
            return "kept", found.not_valid_after_utc
    builder = _builder(_name(host if len(host) <= 64 else "server"), authority.certificate.subject,
                       key.public_key(), days, not_after=authority.certificate.not_valid_after_utc)
    names = [_general_name(each) for each in dict.fromkeys([host, *HERE])]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = builder.add_extension(identifier, critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    made = builder.add_extension(issuer, critical=False).sign(authority.key, hashes.SHA384())
    write_atomic(place, made.public_bytes(Encoding.PEM))
    return "renewed" if was_there else "made", made.not_valid_after_utc


def _client(directory: Path, name: str, authority: x509.Certificate) -> bool:
    """Make a client's folder, and tell the server of it; whether that is new."""
    folder, known = directory / name, directory / "server" / "clients" / f"{name}.pub"
    key_place, public_place = folder / f"{name}.key", folder / f"{name}.pub"
    if known.exists() and not key_place.exists():
        return False  # its folder was handed over, or it made its own key
    folder.mkdir(mode=0o700, exist_ok=True)
    _write_if_other(folder / "ca.crt", authority.public_bytes(Encoding.PEM))
    if not key_place.exists():
        key = ec.generate_private_key(ec.SECP384R1())
        _write_private(key_place, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = _read_private(key_place).public_key()
    text = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
    _write_if_other(public_place, text)
    if known.exists():
        if _read_public(known) != public:
            raise UsageError(f"{known} is not of the key in {key_place}: remove the one that is wrong")
        return False
    write_atomic(known, text)
    return True


def _check_host(host: str) -> None:
    try:
        if ipaddress.ip_address(host).is_unspecified:
            raise UsageError(f"{host} is an address to listen on: name the one at which clients reach the "
                             "server")
        return
    except UsageError:
        raise
    except ValueError:
        pass  # a name
    if re.fullmatch(r"[0-9.]+", host) or len(host) > 253 or not re.fullmatch(
            r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*", host):
        raise UsageError(f"{host!r} is neither the name of a machine, such as server.example.org, nor an IP "
                         "address")


def _check_names(names: Sequence[str]) -> None:
    if wrong := [name for name in names if not is_name(name)]:
        raise UsageError(f"{', '.join(map(repr, wrong))} cannot be the name of a client: a name has up to "
                         f"{LONGEST_NAME} printable characters without / and \\, does not begin with a dot "
                         "or a dash, and is not 'server'")
    if twice := sorted({name for name in names if list(names).count(name) > 1}):
        raise UsageError(f"more than one client is called {', '.join(map(repr, twice))}: names must differ")


def is_name(name: str) -> bool:
    """Whether a client may be called this: the name is that of a folder, too."""
    return (0 < len(name.encode("utf-8", "replace")) <= LONGEST_NAME and name.isprintable()
            and name == name.strip() and not name.startswith((".", "-")) and not {*name} & {"/", "\\"}
            and name.casefold() != "server" and name not in ("ca.crt", "ca.key"))


def _builder(subject: x509.Name, issuer: x509.Name, key: PublicKey, days: int,
             not_after: datetime.datetime | None = None) -> x509.CertificateBuilder:
    ends = _now() + datetime.timedelta(days=days)
    return (x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
            .serial_number(x509.random_serial_number()).not_valid_before(_now() - EARLY)
            .not_valid_after(ends if not_after is None else min(ends, not_after)))


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        encipher_only=False, decipher_only=False)


def _pem(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write_private(path: Path, data: bytes) -> None:
    """Write a file that nobody else can read, not even while it is written; in one step."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # of a call that was killed
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)


def _write_if_other(path: Path, data: bytes) -> None:
    if not path.exists() or path.read_bytes() != data:
        write_atomic(path, data)


# -- reading -------------------------------------------------------------------------------------


class ServerKeys(NamedTuple):
    """What a server needs: the folder DIR/server."""

    directory: Path
    ca: bytes  # PEM
    certificate: Path
    key: Path
    hosts: tuple[str, ...]  # that the certificate is for
    clients: dict[str, bytes]  # name -> public key (PEM, as Flower wants it)
    notes: tuple[str, ...]  # what is not wrong, but not well either

    @classmethod
    def load(cls, directory: Path) -> ServerKeys:
        ca, certificate, key = (directory / name for name in ("ca.crt", "server.pem", "server.key"))
        how = f"descant certificates {directory.parent} --host HOST"
        authority = _read_certificate(ca, how)
        own = _read_certificate(certificate, how)
        _check_dates(ca, authority, "make certificates for everybody in another directory")
        _check_dates(certificate, own, f"renew it with: {how}")
        if _read_private(key, how).public_key() != own.public_key():
            raise UsageError(f"{key} is not the key of {certificate}")
        if not _is_issued(own, authority):
            raise UsageError(f"{certificate} was not made by the authority in {ca}")
        return cls(directory, ca.read_bytes(), certificate, key, hosts_of(own),
                   _read_clients(directory / "clients"), _notes(key))

    def require_host(self, host: str) -> None:
        """Raise unless clients that connect to `host` will find the certificate to be for it."""
        if host not in self.hosts:
            raise UsageError(f"{self.certificate} is for {', '.join(self.hosts)}, not for {host}: renew it "
                             f"with: descant certificates {self.directory.parent} --host {host}")


class ClientKeys(NamedTuple):
    """What a client needs: the folder DIR/NAME."""

    name: str
    ca: bytes  # PEM
    private: PrivateKey
    public: PublicKey
    notes: tuple[str, ...]

    @classmethod
    def load(cls, directory: Path, name: str) -> ClientKeys:
        ca, key, public = (directory / file for file in ("ca.crt", f"{name}.key", f"{name}.pub"))
        others = sorted(path.stem for path in directory.glob("*.key"))
        hint = f" ({directory} has the key of {', '.join(others)}: is it the right name?)" if others else ""
        how = f"descant certificates DIR --host HOST {name}"
        authority = _read_certificate(ca, how)
        _check_dates(ca, authority, "ask who runs the server for a new folder")
        private = _read_private(key, how, hint)
        if public.exists() and _read_public(public) != private.public_key():
            raise UsageError(f"{public} is not of the key in {key}")
        return cls(name, ca.read_bytes(), private, private.public_key(), _notes(key))

    @property
    def public_pem(self) -> bytes:
        """As Flower sends it."""
        return public_pem(self.public)


def public_pem(key: PublicKey) -> bytes:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def hosts_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """The names and addresses that a certificate is for."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress)))


def _read_clients(directory: Path) -> dict[str, bytes]:
    found = {path.stem: public_pem(_read_public(path)) for path in sorted(directory.glob("*.pub"))}
    if not found:
        raise UsageError(f"{directory} has no client's key: add clients with: descant certificates "
                         f"{directory.parent.parent} --host HOST --client NAME")
    if wrong := [name for name in found if not is_name(name)]:
        raise UsageError(f"{directory / f'{wrong[0]}.pub'}: {wrong[0]!r} cannot be the name of a client")
    owners: dict[bytes, str] = {}
    for name, key in found.items():
        if (other := owners.setdefault(key, name)) != name:
            raise UsageError(f"{other} and {name} have the same key in {directory}: each needs its own")
    return found


def _read(path: Path, how: str | None, hint: str = "") -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        advice = "" if how is None else f": make it with: {how}"
        raise UsageError(f"there is no {path}{hint}{advice}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _read_certificate(path: Path, how: str | None = None) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_read(path, how))
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} is not a certificate (PEM)") from None


def _read_private(path: Path, how: str | None = None, hint: str = "") -> PrivateKey:
    data = _read(path, how, hint)
    try:
        key = (load_ssh_private_key if b"OPENSSH" in data[:64] else load_pem_private_key)(data, password=None)
    except TypeError:
        raise UsageError(f"{path} is protected by a password, which nobody could give to a server or client "
                         "that runs by itself: use a key without") from None
    except (ValueError, UnsupportedAlgorithm):
        raise UsageError(f"{path} is not a private key") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not _is_usual(key.curve):
        raise UsageError(f"{path} is not a key on one of the curves P-256, P-384 and P-521")
    return key


def _read_public(path: Path) -> PublicKey:
    try:
        key = load_ssh_public_key(_read(path, None))
    except (ValueError, UnsupportedAlgorithm) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} is not a public key (OpenSSH)") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not _is_usual(key.curve):
        raise UsageError(f"{path} is not a key on one of the curves P-256, P-384 and P-521")
    return key


def _is_usual(curve: ec.EllipticCurve) -> bool:
    return isinstance(curve, ec.SECP256R1 | ec.SECP384R1 | ec.SECP521R1)


def _is_issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_dates(path: Path, certificate: x509.Certificate, what_to_do: str) -> None:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if _now() > ends:
        raise UsageError(f"{path} ended on {ends:%Y-%m-%d}: {what_to_do}")
    if _now() < begins:
        raise UsageError(f"{path} holds from {begins:%Y-%m-%d %H:%M} UTC, and here it is "
                         f"{_now():%Y-%m-%d %H:%M} UTC: set the clock of this machine")


def _notes(key: Path) -> tuple[str, ...]:
    if not key.stat().st_mode & 0o077:
        return ()
    return (f"{key} can be read by other users of this machine: chmod 600 {key}",)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
