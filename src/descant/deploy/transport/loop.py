"""The one event loop of this process on which gRPC runs, in a thread of its own.

gRPC's asynchronous part shares one poller among all event loops of a process, and does not like two; and
connections must be served while the main thread trains or aggregates.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")
_LOCK = threading.Lock()
_LOOP: asyncio.AbstractEventLoop | None = None


def event_loop() -> asyncio.AbstractEventLoop:
    """Started at the first use; it ends with the process."""
    global _LOOP
    with _LOCK:
        if _LOOP is None:
            _LOOP = asyncio.new_event_loop()
            threading.Thread(target=_LOOP.run_forever, name="grpc", daemon=True).start()
    return _LOOP


def submit(work: Coroutine[Any, Any, Result]) -> Future[Result]:
    """Run this there."""
    return asyncio.run_coroutine_threadsafe(work, event_loop())
