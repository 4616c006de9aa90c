"""Remote federations: a server and clients on machines of their own, over gRPC or Flower.

May import experiment, export and what is below them; view only in `flower_app`, which is for `flwr run`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from descant.errors import UsageError

if TYPE_CHECKING:
    from descant.deploy.flower_app import client_app, server_app

# before gRPC is imported, which Flower does: strangers' failed handshakes are no news, and nothing is forked
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__all__ = ["client_app", "server_app"]


def __getattr__(name: str) -> Any:  # on first use: Flower is an extra
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_flower()
    from descant.deploy import flower_app

    return getattr(flower_app, name)


def require_flower() -> None:
    """Raise with what to install if Flower is missing."""
    try:
        import flwr.app  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        raise UsageError("a remote federation needs Flower, which is not installed: pip install "
                         "'descant[flower]'") from None
