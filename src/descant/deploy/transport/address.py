"""The address of a server, and what an error of the connection to it means."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
import ssl
from collections.abc import Iterator
from typing import NamedTuple

import httpx

from descant.deploy.keys import ClientKeys
from descant.deploy.transport.tls import client_context
from descant.errors import UsageError

REFUSED = "ALERT"  # in the reason of an error: the other side has ended the handshake
OWN = ("CERTIFICATE", "UNKNOWN_CA")  # ... because of our certificate
NOT_TAKEN = "the server at {} does not take this client's certificate"
NEW_ONE = "ask its operator for a new one"
OTHER_LINK = "the server at {} uses another transport: start this client with --transport {}"


class Address(NamedTuple):
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """HOST:PORT, with an IPv6 address in brackets."""
        found = re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", text)
        if found is None or not 0 < int(found[2]) < 2**16:
            raise UsageError(f"{text!r} is not a server address: write HOST:PORT, such as "
                             "server.example.org:8443 or [2001:db8::1]:8443")
        return cls(found[1].strip("[]"), int(found[2]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        try:
            found = {ipaddress.ip_address(self.host)}
        except ValueError:
            try:
                infos = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            except OSError:
                return False
            found = {ipaddress.ip_address(str(info[4][0])) for info in infos}
        return all(each.is_loopback for each in found)


class Failure(NamedTuple):
    """Why a server was not reached, and whether trying again is useless."""

    reason: str
    is_final: bool


def diagnose(error: BaseException, address: Address) -> Failure:
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Failure(_about_certificate(cause, address), True)
        if isinstance(cause, ssl.SSLError):
            if cause.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"):
                return Failure(f"the server at {address} is not encrypted: start it with certificates, or, "
                               "on the same machine, this client with --insecure and without --keys", True)
            reason = str(cause.reason or "")
            if REFUSED in reason and any(word in reason for word in OWN):
                return Failure(f"{NOT_TAKEN.format(address)} ({reason.lower().replace('_', ' ')}): {NEW_ONE}",
                               True)
            return Failure(f"no encrypted connection to {address} ({reason or cause})", False)
        if isinstance(cause, socket.gaierror):
            is_final = cause.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
            return Failure(f"unknown host {address.host} ({cause.strerror})", is_final)
        if isinstance(cause, UnicodeError):
            return Failure(f"{address.host!r} is not a host name", True)
    if isinstance(error, httpx.TimeoutException):
        return Failure(f"the server at {address} does not reply in time", False)
    if isinstance(error, httpx.ConnectError):
        return Failure(f"cannot reach a server at {address} ({_last(error)})", False)
    return Failure(f"the connection to {address} broke ({_last(error)})", False)


def _about_certificate(error: ssl.SSLCertVerificationError, address: Address) -> str:
    found = f"the certificate of the server at {address}"
    match error.verify_code:
        case 10:
            return (f"{found} has expired: renew it on the server's side with: descant "
                    "certificates DIR --host HOST")
        case 9:
            return f"{found} is not valid yet: compare the clocks of the two machines"
        case 62 | 64:
            return (f"{found} is not for {address.host}: connect to the address it was made for, or make one "
                    f"on the server's side with: descant certificates DIR --host {address.host}")
        case 18 | 19 | 20 | 21 | 7 | 26:
            return (f"{found} was not issued by the authority in ca.crt: this is another server, or ca.crt "
                    "belongs to another federation")
    return f"{found} is not accepted: {error.verify_message}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _last(error: BaseException) -> str:
    *_, first = _causes(error)
    reason = first.strerror if isinstance(first, OSError) else None
    return reason or str(first) or type(first).__name__


def speaks_tls(address: Address) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only to learn whether it is TLS
    try:
        with socket.create_connection(address, 5) as plain, context.wrap_socket(plain):
            return True
    except OSError:
        return False


def probe(address: Address, keys: ClientKeys | None) -> Failure:
    """Why gRPC does not get through, which it says in words of its own: by a handshake as it makes one."""
    try:
        plain = socket.create_connection(address, 5)
    except OSError as error:
        found = diagnose(error, address)
        return found if isinstance(error, socket.gaierror) else found._replace(
            reason=f"cannot reach a server at {address} ({_last(error)})")
    except UnicodeError as error:
        return diagnose(error, address)
    with plain:
        if keys is None:
            if speaks_tls(address):
                return Failure(f"the server at {address} is encrypted: name the folder of certificates with "
                               "--keys", True)
            return Failure(f"the connection to {address} broke", False)
        context = client_context(keys)
        context.set_alpn_protocols(["h2"])
        try:
            with context.wrap_socket(plain, server_hostname=address.host) as secure:
                if secure.selected_alpn_protocol() is None:
                    return Failure(OTHER_LINK.format(address, "flower"), True)
                secure.settimeout(2)
                with contextlib.suppress(TimeoutError):
                    if not secure.recv(1):  # gRPC speaks first, but to whom it does not take
                        return Failure(f"{NOT_TAKEN.format(address)}: {NEW_ONE}", True)
        except ConnectionResetError:
            return Failure(f"{NOT_TAKEN.format(address)}: {NEW_ONE}", True)
        except OSError as error:
            return diagnose(error, address)
    return Failure(f"the connection to {address} broke", False)


def speaks_grpc(address: Address, keys: ClientKeys) -> bool:
    context = client_context(keys)
    context.set_alpn_protocols(["h2"])
    try:
        with (socket.create_connection(address, 5) as plain,
              context.wrap_socket(plain, server_hostname=address.host) as secure):
            return secure.selected_alpn_protocol() == "h2"
    except OSError:
        return False


def hangs_up(address: Address, keys: ClientKeys) -> bool:
    """Whether a server ends the connection after the handshake, before anything is said. With TLS 1.3 a
    client learns only then that its certificate is not taken, and not always in so many words."""
    try:
        with (socket.create_connection(address, 5) as plain,
              client_context(keys).wrap_socket(plain, server_hostname=address.host) as secure):
            secure.settimeout(2)
            return not secure.recv(1)
    except TimeoutError:  # it waits for us to speak
        return False
    except ConnectionResetError:
        return True
    except OSError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """A listening socket: no other process can take the port while a SuperLink starts."""
    if not 0 <= port < 2**16:
        raise UsageError(f"--port must be at most 65535, not {port}")
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise UsageError(f"{host!r} is not a name or address of this machine: choose one with --host"
                         ) from None
    family, kind, protocol, _, address = infos[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UsageError({
            errno.EADDRINUSE: f"port {port} on {host} is in use: choose another with --port",
            errno.EACCES: f"port {port} is reserved for the system: choose one from 1024 on with --port",
            errno.EADDRNOTAVAIL: f"{host} is not an address of this machine: listen on all of its addresses "
                                 "with --host 0.0.0.0",
        }.get(error.errno or 0, f"cannot listen on {host}:{port}: {error.strerror}")) from None
    return listener
