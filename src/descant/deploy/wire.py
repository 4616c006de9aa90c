"""Flower's HTTP clients, made so that they fit here.

Flower's own would follow redirects, ask a proxy for the way to this very machine, end the process when they
are refused, and write to the terminal. None of that suits a library.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import httpx
from flwr.supercore.protobuf.client import (
    ProtobufCall,
    ProtobufClient,
    ProtobufClientInterceptor,
    ProtobufRequestContext,
)

from descant.errors import UsageError

TIMEOUT = 30.0  # seconds without a byte
Client = TypeVar("Client", bound=ProtobufClient)


class Address(NamedTuple):
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """HOST:PORT, with an IPv6 address in brackets."""
        found = re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", text)
        if found is None or not 0 < int(found[2]) < 2**16:
            raise UsageError(f"{text!r} is not the address of a server: write HOST:PORT, such as "
                             "server.example.org:8443 or [2001:db8::1]:8443")
        return cls(found[1].strip("[]"), int(found[2]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether nothing that is sent there can leave this machine."""
        try:
            found = {ipaddress.ip_address(self.host)}
        except ValueError:
            try:
                infos = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            except OSError:
                return False
            found = {ipaddress.ip_address(str(info[4][0])) for info in infos}
        return all(each.is_loopback for each in found)


class Headers:
    """Adds headers to each request; and the name under which the server's certificate is checked."""

    def __init__(self, headers: Mapping[str, str], server_name: str | None = None) -> None:
        self._headers = headers
        self._extensions = {} if server_name is None else {"sni_hostname": server_name}

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers.update(self._headers)
        context.request.extensions = {**context.request.extensions, **self._extensions}
        return call_next(context)


def connect(kind: type[Client], address: Address, ca: bytes | None,
            interceptors: Sequence[ProtobufClientInterceptor], retry: Any = None) -> Client:
    """A client of one of Flower's APIs; with `ca`, over TLS, and only to a server that it vouches for."""
    verify: ssl.SSLContext | bool = False
    if ca is not None:
        verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        verify.load_verify_locations(cadata=ca.decode("ascii"))
    scheme = "http" if ca is None else "https"
    client = kind(f"{scheme}://{address}", interceptors=interceptors, verify=verify, retry_invoker=retry)
    client._client.close()
    client._client = httpx.Client(verify=verify, timeout=TIMEOUT, follow_redirects=False,
                                  trust_env=not address.is_loopback)
    return client


def hush() -> None:
    """Nothing of Flower's log reaches the terminal of this process; what matters is raised."""
    logging.getLogger("flwr").disabled = True
