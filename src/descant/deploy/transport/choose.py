"""Which of the transports carries a federation."""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from descant.deploy.keys import ClientKeys, ServerKeys
from descant.deploy.transport import ClientTransport, ServerTransport
from descant.deploy.transport.address import Address


class Name(StrEnum):
    grpc = "grpc"
    flower = "flower"


class Listening(ServerTransport, Protocol):
    """A server's transport that is open."""

    @property
    def port(self) -> int: ...


def open_server(name: Name, host: str, port: int, keys: ServerKeys | None, log: Path
                ) -> AbstractContextManager[Listening]:
    """Listen at this address; `log` is for the process that Flower's link needs."""
    if name is Name.grpc:
        from descant.deploy.transport import grpc_server

        return grpc_server.open_server(host, port, keys)
    from descant.deploy.transport import flower_server

    return flower_server.open_server(host, port, keys, log)


def make_client(name: Name, address: Address, keys: ClientKeys | None, directory: Path) -> ClientTransport:
    if name is Name.grpc:
        from descant.deploy.transport.grpc_client import GrpcClient

        return GrpcClient(address, keys, directory)
    from descant.deploy.transport.flower_client import FlowerClient

    return FlowerClient(address, keys, directory)
