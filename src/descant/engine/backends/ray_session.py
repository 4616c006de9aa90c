"""A Ray session: started here, or a cluster that is joined.

Ray waits minutes for a wrong address, prints, and leaves files behind. Here a wrong address is an error
within seconds, nothing is printed or reported, and what we started ends with us.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray._private.services
import ray._private.worker

from descant.core.units import size
from descant.errors import DescantError, UsageError

ANSWER = 5.0  # seconds that an address may take to answer
BETWEEN = 5.0  # seconds between checks of a cluster
LOST = 30.0  # seconds without an answer until we give up; after 60, Ray ends this process
SAFE = "all committed rounds are saved: resume the run when the cluster is back"
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0",  # report nothing
          "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}  # silences a warning of some versions


class Session:
    """A connection to Ray. Without an address, one is started here with so many cores."""

    def __init__(self, address: str | None, cores: int) -> None:
        self.notes: list[str] = []  # for the user
        self._place: str | None = None  # the files of a Ray that we started
        self._ours = not ray.is_initialized()
        self._checked = time.monotonic()
        if not self._ours:
            _require_same(address)
            return
        self._before = _ProcessState()
        os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
        try:
            if address is None:
                self._start(cores)
            else:
                _join(address)
            ray._private.worker._worker_logs_enabled = False
        except BaseException:
            self.close()
            raise

    @property
    def cores(self) -> int:
        """The cores of all nodes."""
        return int(ray.cluster_resources().get("CPU", 0))

    @property
    def store(self) -> int:
        """Bytes of a node's object store, on average."""
        nodes: int = sum(node["Alive"] for node in ray.nodes())
        return int(ray.cluster_resources().get("object_store_memory", 0)) // max(nodes, 1)

    def check(self) -> None:
        """An error if the cluster is gone, before Ray ends this process."""
        if time.monotonic() - self._checked < BETWEEN:
            return
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        deadline = time.monotonic() + LOST
        while not _answers(host, int(port)):
            if time.monotonic() > deadline:
                raise DescantError(f"the Ray cluster at {host}:{port} no longer answers; {SAFE}")
            time.sleep(1)
        self._checked = time.monotonic()

    def close(self) -> None:
        if not self._ours:
            return
        ray.shutdown()
        self._before.restore()
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)

    def _start(self, cores: int) -> None:
        free = _shared_memory()
        # a short name: socket paths are limited to 107 characters
        self._place = tempfile.mkdtemp(prefix="descant-ray-", dir=os.environ.get("RAY_TMPDIR", "/tmp"))
        try:
            ray.init(address="local", num_cpus=cores, num_gpus=0, include_dashboard=False,
                     log_to_driver=False, logging_level=logging.ERROR, _temp_dir=self._place)
        except Exception as error:
            raise DescantError(f"Ray cannot be started here: {_in_one_line(error)}") from error
        if free < self.store:
            self.notes.append(f"/dev/shm has only {size(free)} free, of {size(self.store)} that Ray wants: "
                              "what travels goes through files, which is slower (in Docker, --shm-size gives "
                              "more)")


class _ProcessState:
    """The state of the process that Ray changes."""

    def __init__(self) -> None:
        self._environ = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
        self._logs = getattr(ray._private.worker, "_worker_logs_enabled", True)
        self._sigterm: Any = signal.getsignal(signal.SIGTERM)

    def restore(self) -> None:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]
        os.environ.update(self._environ)
        ray._private.worker._worker_logs_enabled = self._logs
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._sigterm or signal.SIG_DFL)


def _require_same(address: str | None) -> None:
    """Refuse another address if this process is connected already."""
    joined = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", joined):
        raise UsageError(f"train.ray_address is {address!r}, but this process is connected to the Ray "
                         f"cluster at {joined}: leave the address out, or call ray.shutdown() before")


def _join(address: str) -> None:
    where = address
    if address == "auto":
        try:
            where = str(ray._private.services.canonicalize_bootstrap_address("auto"))
        except ConnectionError:
            raise DescantError('train.ray_address is "auto", but no Ray runs on this machine: start it with '
                               "`ray start --head`, or give the address of a cluster as host:port") from None
    _reach(where)
    find_nodes = getattr(ray._private.services, "find_node_ids", None)  # new in some version
    if find_nodes is not None and not find_nodes():  # Ray would look for them for a minute
        raise DescantError(f"this machine is not part of the Ray cluster at {where}: let it join first, with "
                           f"no cores for workers: ray start --address={where} --num-cpus=0")
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        reason = _in_one_line(error.__cause__ or error)
        if "AuthToken" in reason:
            reason = ("it asks for a token: have that in ~/.ray/auth_token on all its machines, and set "
                      "RAY_AUTH_MODE=token")
        else:
            reason += ("; all its machines need the same versions of Ray and Python, and this must be one of "
                       "them")
        raise DescantError(f"cannot join the Ray cluster at {where}: {reason}") from error


def _reach(address: str) -> None:
    """An error unless something that can be Ray answers. Ray itself would end this process after a minute."""
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(f'train.ray_address {address!r} must be "auto", or host:port of the cluster\'s head '
                         "such as 10.0.0.1:6379")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER) as connection:
            if os.environ.get("RAY_USE_TLS", "0") == "1" or _speaks_http2(connection):
                return
            reason = "what answers there is not Ray (its port is 6379, unless `ray start` was told another)"
    except OSError as error:
        reason = error.strerror or str(error)
    raise DescantError(f"no Ray cluster can be reached at {address}: {reason}; is it running "
                       "(ray start --head --port=6379), and is the port open?")


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), port), ANSWER):
        return True
    return False


def _speaks_http2(connection: socket.socket) -> bool:
    """Whether the other side answers an HTTP/2 preface with its settings, as gRPC does."""
    settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
    return connection.recv(9)[3:4] == settings[3:4]


def _shared_memory() -> int:
    """Free bytes of /dev/shm."""
    place = Path("/dev/shm")
    return shutil.disk_usage(place).free if place.is_dir() else sys.maxsize


def _in_one_line(error: BaseException) -> str:
    """The message of an error, without the traceback that Ray may put into it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if any("Traceback" in line for line in lines) else " ".join(" ".join(lines).split())
