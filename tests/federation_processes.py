"""Real processes of a federation on loopback: started with their own ports, and all ended again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

STARTED: list[subprocess.Popen[bytes]] = []


class Process:
    """`descant ...` with its output in a file."""

    def __init__(self, log: Path, *command: object, python: str | None = None) -> None:
        self.log = log
        self._from = log.stat().st_size if log.exists() else 0
        start = [sys.executable, "-m", "descant"] if python is None else [sys.executable, "-c", python]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*start, *map(str, command)], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True, cwd=log.parent)
        STARTED.append(self.process)

    @property
    def output(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._from)
            return file.read().decode()

    def wait_for(self, pattern: str, seconds: float = 60.0) -> re.Match[str]:
        """Until the output has it."""
        until = time.monotonic() + seconds
        while True:
            if (found := re.search(pattern, self.output)) is not None:
                return found
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < until, f"no {pattern!r} within {seconds} s in:\n{self.output}"
            time.sleep(0.05)

    def ended(self, code: int, seconds: float = 90.0) -> str:
        """Until it ends by itself, with this code."""
        try:
            found = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on after {seconds} s:\n{self.output}") from None
        assert found == code, f"it ended with {found}:\n{self.output}"
        return self.output

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def cleaned() -> Iterator[None]:
    """All that was started is ended, and all that these started."""
    try:
        yield
    finally:
        for process in STARTED:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        STARTED.clear()
        until = time.monotonic() + 10
        while (left := superlinks()) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left, f"left behind: {left}"


def superlinks() -> list[int]:
    """SuperLinks whose parent is gone."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (place / "cmdline").read_bytes()
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if b"transport.superlink" in command and parent == 1:
                found.append(int(place.name))
    return found


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Federation:
    """Certificates, a port, and the commands that fit them."""

    def __init__(self, place: Path, names: Sequence[str], experiment: str, data: dict[str, str] | None = None
                 ) -> None:
        self.place = place
        self.names = list(names)
        self.port = free_port()
        self.data = data or {name: f"digits:{k}" for k, name in enumerate(names)}
        (place / "experiment.toml").write_text(experiment)
        command = ["certificates", place / "keys", "--host", "127.0.0.1"]
        for name in names:
            command += ["--client", name]
        Process(place / "certificates.log", *command).ended(0)

    def server(self, *options: object, experiment: Path | None = None, out: str = "server") -> Process:
        return Process(self.place / f"{out}.log", "server", experiment or self.place / "experiment.toml",
                       "--clients", len(self.names), "--keys", self.place / "keys" / "server", "--out",
                       self.place / out, "--port", self.port, "--host", "127.0.0.1", *options)

    def client(self, name: str, *options: object, **changes: Any) -> Process:
        chosen = {"--server": f"127.0.0.1:{self.port}", "--name": name, "--data": self.data.get(name),
                  "--keys": self.place / "keys" / name, "--dir": self.place / f"client-{name}"} | changes
        given = [part for key, value in chosen.items() if value is not None for part in (key, value)]
        return Process(self.place / f"client-{name}.log", "client", *given, *options)

    def clients(self, *options: object) -> dict[str, Process]:
        return {name: self.client(name, *options) for name in self.names}
