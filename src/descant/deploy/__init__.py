"""A federation of real nodes: the methods of descant on Flower.

`server_app` and `client_app` are for who runs Flower by its own commands (`flwr run`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from descant.errors import UsageError

if TYPE_CHECKING:
    from descant.deploy.apps import client_app, server_app

__all__ = ["client_app", "server_app"]


def __getattr__(name: str) -> Any:  # imported when they are asked for: Flower is an extra
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_flower()
    from descant.deploy import apps

    return getattr(apps, name)


def require_flower() -> None:
    """Say what to install where Flower is missing."""
    try:
        import flwr.app  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "flwr":
            raise
        raise UsageError("a federation needs Flower, which is not installed: pip install 'descant[flower]'"
                         ) from None
