"""Flower's HTTP clients without their side effects: they follow redirects, use a proxy for this very machine,
end the process when they are refused, and write to the terminal."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import httpx
from flwr.supercore.protobuf import client as protobuf

from descant.deploy.transport.address import Address

TIMEOUT = 30.0  # seconds without a byte
Client = TypeVar("Client", bound=protobuf.ProtobufClient)


class Headers:
    """Adds headers to each request, and the name for which the server's certificate is checked."""

    def __init__(self, headers: Mapping[str, str], server_name: str | None = None) -> None:
        self._headers = headers
        self._extensions = {} if server_name is None else {"sni_hostname": server_name}

    def intercept(self, context: protobuf.ProtobufRequestContext, call_next: protobuf.ProtobufCall
                  ) -> httpx.Response:
        context.request.headers.update(self._headers)
        context.request.extensions = {**context.request.extensions, **self._extensions}
        return call_next(context)


def connect(kind: type[Client], address: Address, context: ssl.SSLContext | None,
            interceptors: Sequence[protobuf.ProtobufClientInterceptor], retry: Any = None) -> Client:
    """A client of one of Flower's APIs; with a context, over TLS."""
    verify: ssl.SSLContext | bool = False if context is None else context
    scheme = "http" if context is None else "https"
    client = kind(f"{scheme}://{address}", interceptors=interceptors, verify=verify, retry_invoker=retry)
    client._client.close()
    client._client = httpx.Client(verify=verify, timeout=TIMEOUT, follow_redirects=False,
                                  trust_env=not address.is_loopback)
    return client


def silence() -> None:
    """Keep Flower's log away from the terminal; errors are raised."""
    logging.getLogger("flwr").disabled = True
