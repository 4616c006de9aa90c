"""The certificates and keys of a server or a client, read from its folder and checked."""

from __future__ import annotations

import contextlib
import datetime
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from descant.errors import UsageError

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")  # every server's certificate is also for its own machine
LONGEST_NAME = 100
SOON = datetime.timedelta(days=30)  # before a certificate expires
START_ANEW = "make certificates for all clients in another directory"
CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
OTHER_CURVE = "is not a key on one of the curves P-256, P-384 and P-521"

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey


def is_name(name: str) -> bool:
    """Whether this can be a client's name, which is also the name of a folder."""
    return (0 < len(name.encode("utf-8", "replace")) <= LONGEST_NAME and name.isprintable()
            and name == name.strip() and not name.startswith((".", "-")) and not {*name} & {"/", "\\"}
            and name.casefold() != "server" and name not in ("ca.crt", "ca.key"))


class ServerKeys(NamedTuple):
    """The folder DIR/server."""

    directory: Path
    ca: bytes  # PEM
    certificate: Path
    key: Path
    hosts: tuple[str, ...]  # of the certificate
    clients: dict[str, bytes]  # name -> public key (PEM, as Flower takes it)
    notes: tuple[str, ...]  # warnings

    @classmethod
    def load(cls, directory: Path) -> ServerKeys:
        ca, certificate, key = (directory / name for name in ("ca.crt", "server.pem", "server.key"))
        how = f"descant certificates {directory.parent} --host HOST"
        authority = read_certificate(ca, how)
        own = read_certificate(certificate, how)
        check_dates(ca, authority, START_ANEW)
        check_dates(certificate, own, f"renew it with: {how}")
        if read_private(key, how).public_key() != own.public_key():
            raise UsageError(f"{key} is not the key of {certificate}")
        if not is_issued(own, authority):
            raise UsageError(f"{certificate} was not issued by the authority in {ca}")
        return cls(directory, ca.read_bytes(), certificate, key, hosts_of(own),
                   _read_clients(directory / "clients"),
                   (*_notes(key), *_ending(directory / "clients", directory.parent)))

    def require_host(self, host: str) -> None:
        if host not in self.hosts:
            raise UsageError(f"{self.certificate} is for {', '.join(self.hosts)}, not for {host}: renew it "
                             f"with: descant certificates {self.directory.parent} --host {host}")


class ClientKeys(NamedTuple):
    """The folder DIR/NAME."""

    name: str
    ca: bytes  # PEM
    private: PrivateKey
    public: PublicKey
    notes: tuple[str, ...]
    certificate: bytes  # PEM

    @classmethod
    def load(cls, directory: Path, name: str) -> ClientKeys:
        ca, key, public = (directory / file for file in ("ca.crt", f"{name}.key", f"{name}.pub"))
        others = sorted(path.stem for path in directory.glob("*.key"))
        hint = f" ({directory} has the key of {', '.join(others)}: is the name right?)" if others else ""
        how = f"descant certificates DIR --host HOST --client {name}"
        authority = read_certificate(ca, how)
        check_dates(ca, authority, "ask the server's operator for a new folder")
        private = read_private(key, how, hint)
        if public.exists() and read_public(public) != private.public_key():
            raise UsageError(f"{public} does not belong to {key}")
        own = _own_certificate(directory / f"{name}.pem", private.public_key(), authority, how)
        return cls(name, ca.read_bytes(), private, private.public_key(), _notes(key),
                   own.public_bytes(serialization.Encoding.PEM))

    @property
    def public_pem(self) -> bytes:
        """As Flower sends it."""
        return public_pem(self.public)

    @property
    def private_pem(self) -> bytes:
        """As TLS takes it."""
        return self.private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                          serialization.NoEncryption())


def _own_certificate(path: Path, key: PublicKey, authority: x509.Certificate, how: str) -> x509.Certificate:
    """A client's certificate, which only the operator of the server can make."""
    remedy = f"ask the server's operator for a new one, made with: {how}"
    if not path.exists():
        raise UsageError(f"there is no {path}: {remedy}")
    own = read_certificate(path)
    check_dates(path, own, remedy)
    if own.public_key() != key:
        raise UsageError(f"{path} is not for the key of this client: {remedy}")
    if not is_issued(own, authority):
        raise UsageError(f"{path} was not issued by the authority in ca.crt: {remedy}")
    return own


def public_pem(key: PublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def hosts_of(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress)))


def registered(directory: Path) -> dict[bytes, str]:
    """The names of the clients by their keys, as they are now: files that cannot be read do not count."""
    found: dict[bytes, str] = {}
    for path in sorted(directory.glob("*.pub")):
        with contextlib.suppress(UsageError):
            found.setdefault(public_pem(read_public(path)), path.stem)
    return found


def _read_clients(directory: Path) -> dict[str, bytes]:
    found = {path.stem: public_pem(read_public(path)) for path in sorted(directory.glob("*.pub"))}
    if not found:
        raise UsageError(f"{directory} has no keys: add clients with: descant certificates "
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


def read_certificate(path: Path, how: str | None = None) -> x509.Certificate:
    data = _read(path, how)
    try:
        return x509.load_pem_x509_certificate(data)
    except ValueError:
        raise UsageError(f"{path} is not a certificate (PEM)") from None


def read_private(path: Path, how: str | None = None, hint: str = "") -> PrivateKey:
    data = _read(path, how, hint)
    is_openssh = b"OPENSSH" in data[:64]
    load = serialization.load_ssh_private_key if is_openssh else serialization.load_pem_private_key
    try:
        key = load(data, password=None)
    except TypeError:
        raise UsageError(f"{path} is protected by a password, which a server or client cannot enter: use a "
                         "key without one") from None
    except (ValueError, UnsupportedAlgorithm):
        raise UsageError(f"{path} is not a private key") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, CURVES):
        raise UsageError(f"{path} {OTHER_CURVE}")
    return key


def read_public(path: Path) -> PublicKey:
    data = _read(path, None)
    try:
        key = serialization.load_ssh_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise UsageError(f"{path} is not a public key (OpenSSH)") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, CURVES):
        raise UsageError(f"{path} {OTHER_CURVE}")
    return key


def is_issued(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def is_for(certificate: x509.Certificate, use: x509.ObjectIdentifier) -> bool:
    """Whether a certificate is for a server, or for a client: the authority issues both."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return False
    return use in found


def check_dates(path: Path, certificate: x509.Certificate, remedy: str) -> None:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now() > ends:
        raise UsageError(f"{path} expired on {ends:%Y-%m-%d}: {remedy}")
    if now() < begins:
        raise UsageError(f"{path} is valid from {begins:%Y-%m-%d %H:%M} UTC, and the clock of this machine "
                         f"says {now():%Y-%m-%d %H:%M} UTC: set it")


def _ending(directory: Path, keys: Path) -> list[str]:
    """Which clients' certificates expire soon, or have: they are refused then."""
    ends = {path.stem: read_certificate(path).not_valid_after_utc for path in sorted(directory.glob("*.pem"))}
    return [f"the certificate of {name} {'expires' if end > now() else 'expired'} on {end:%Y-%m-%d}: make "
            f"another with: descant certificates {keys} --host HOST --client {name}"
            for name, end in ends.items() if end - now() < SOON]


def _notes(key: Path) -> tuple[str, ...]:
    if not key.stat().st_mode & 0o077:
        return ()
    return (f"{key} is readable by other users of this machine: chmod 600 {key}",)


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
