"""The page of a running comparison, served to browsers on this machine only."""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from descant.errors import DescantError
from descant.view import page

HERE = "127.0.0.1"
PORT = 8008  # unless it is taken
EVERY = 2.0  # seconds, as often as the page asks
LOOPBACK = (HERE, "localhost", "[::1]")


class Latest:
    """The latest page data that could be read, and why they may be out of date."""

    def __init__(self, read: Callable[[], dict[str, Any]],
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._lock = threading.Lock()
        self._good = read()  # an error at the start is raised at once
        self._error = ""
        self._at = clock()

    def data(self) -> dict[str, Any]:
        with self._lock:  # concurrent requests wait for the same answer
            if self._clock() - self._at >= EVERY:
                try:
                    self._good, self._error = self._read(), ""
                except DescantError as error:
                    self._error = f"This page may be out of date: {error}"
                except Exception as error:  # files that are being written can raise anything
                    self._error = f"This page may be out of date: {type(error).__name__}: {error}"
                self._at = self._clock()
            notes = [*self._good["notes"], *([self._error] if self._error else [])]
            return {**self._good, "live": True, "notes": notes}


class Watch(ThreadingHTTPServer):
    """Serves the page and its data."""

    daemon_threads = True
    block_on_close = False  # an open connection does not keep the program alive

    def __init__(self, latest: Latest, port: int | None) -> None:
        self.latest = latest
        try:
            super().__init__((HERE, PORT if port is None else port), Answer)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            if port is not None:
                why = "is taken" if error.errno == errno.EADDRINUSE else "needs a permission that you lack"
                raise DescantError(f"port {port} {why}: choose another --port, or omit it") from None
            super().__init__((HERE, 0), Answer)

    @property
    def address(self) -> str:
        return f"http://{HERE}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # the page was closed
            super().handle_error(request, client_address)


class Answer(BaseHTTPRequestHandler):
    server: Watch
    server_version, sys_version = "descant", ""

    def do_GET(self) -> None:
        if not self._is_from_here():
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"served to this machine only\n")
        elif self.path == "/":
            self._send(HTTPStatus.OK, "text/html", page.render(self.server.latest.data()))
        elif self.path == "/data.json":
            self._send(HTTPStatus.OK, "application/json", page.render_json(self.server.latest.data()))
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is only / and /data.json\n")

    def _is_from_here(self) -> bool:
        """A site whose name resolves to this machine (DNS rebinding) must not read the page."""
        host = self.headers.get("Host", "")
        return host in (f"{name}:{self.server.server_port}" for name in LOOPBACK)

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        policy = page.content_policy(live=True)
        self.send_header("Content-Security-Policy", f"{policy}; frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: a line per request would bury the address."""
