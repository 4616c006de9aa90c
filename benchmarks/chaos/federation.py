"""The processes of a federation, each behind its proxy, and what can happen to them."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.chaos.clock import Clocks
from benchmarks.chaos.liar import NAME as LIAR
from benchmarks.chaos.plan import SERVER, Fault
from benchmarks.chaos.proxy import Proxy
from descant.deploy.transport.choose import Name

DEADLINE = 10  # seconds
WRONG = 5.0  # seconds after which a clock is set, where Flower's link refuses who has another time
# scores ride with the training; who is absent has none, so that they must not choose the best round
EXPERIMENT = """
[data]
dataset = "digits"
validation = 0.0
partition = "classes"
clients = {clients}
classes_per_client = 4
[model]
name = "mclr"
[algorithm]
name = "scaffold"
[train]
rounds = {rounds}
batch = 20
local = {{ steps = 3 }}
dtype = "float64"
backend = "loop"
[eval]
every = 1
"""


class Federation:
    """Started by `with`. A process that ends before its time is started again."""

    def __init__(self, place: Path, clients: list[str], rounds: int, clocks: Clocks, liar: int,
                 transport: Name) -> None:
        self._place, self._clients, self._clocks, self._liar = place, clients, clocks, liar
        self._transport = transport
        place.mkdir()
        (place / "experiment.toml").write_text(EXPERIMENT.format(clients=len(clients) + 1, rounds=rounds))
        names = [part for name in (*clients, LIAR) for part in ("--client", name)]
        subprocess.run([sys.executable, "-m", "descant", "certificates", "keys", "--host", "127.0.0.1",
                        *names], cwd=place, check=True, stdout=subprocess.DEVNULL)
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = found.getsockname()[1]
        self._proxies = {name: Proxy(self._port) for name in clients}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self.restarts = 0

    def __enter__(self) -> Federation:
        for name in (SERVER, LIAR, *self._clients):
            self._start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        for proxy in self._proxies.values():
            proxy.close()

    @property
    def out(self) -> Path:
        return self._place / "out"

    def client(self, name: str) -> Path:
        return self._place / f"client-{name}"

    def log(self) -> str:
        return (self._place / f"{SERVER}.log").read_text()

    def _command(self, name: str) -> list[object]:
        keys, everyone = self._place / "keys" / name, len(self._clients) + 1
        if name == SERVER:
            return ["descant", "server", "experiment.toml", "--clients", everyone, "--keys", keys, "--out",
                    "out", "--port", self._port, "--host", "127.0.0.1", "--no-alone", "--deadline", DEADLINE,
                    "--at-least", len(self._clients), "--transport", self._transport]
        if name == LIAR:
            return ["benchmarks.chaos.liar", f"127.0.0.1:{self._port}", keys, self.client(name), self._liar,
                    self._transport]
        return ["descant", "client", "--server", f"127.0.0.1:{self._proxies[name].port}", "--name", name,
                "--data", f"digits:{self._clients.index(name)}", "--keys", keys, "--dir", self.client(name),
                "--transport", self._transport]

    def _start(self, name: str) -> None:
        # a pipe, not a file: a full disk is for what the process itself writes
        process = subprocess.Popen([sys.executable, "-m", *map(str, self._command(name))], cwd=self._place,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   env=os.environ | self._clocks.environment(name) | {
                                       "OMP_NUM_THREADS": "1", "COLUMNS": "200",
                                       "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        self._processes[name] = process
        threading.Thread(target=_copy, args=(process, self._place / f"{name}.log"), daemon=True).start()

    def tend(self) -> bool:
        """Start again what has ended; whether the server is done."""
        with self._lock:
            for name, process in list(self._processes.items()):
                if process.poll() not in (None, 0):
                    self.restarts += 1
                    self._start(name)
            return self._processes[SERVER].poll() == 0

    def rounds(self) -> list[float]:
        """The losses of the committed rounds."""
        with contextlib.suppress(OSError, ValueError):
            lines = (self.out / "run" / "metrics.jsonl").read_text().splitlines()
            return [json.loads(line)["loss"] for line in lines]
        return []

    def strike(self, fault: Fault) -> None:
        """Let it happen. What lasts ends by itself."""
        with self._lock:
            process = self._processes[fault.target]
            if process.poll() is not None:
                return
            if fault.kind == "kill":
                process.kill()
                process.wait()
            elif fault.kind == "clock":
                self._clocks.jump(fault.target, fault.seconds)
                if self._transport is Name.flower:
                    threading.Timer(WRONG, self._clocks.jump, (fault.target, 0)).start()
            elif fault.kind in ("cut", "corrupt"):
                getattr(self._proxies[fault.target], fault.kind)()
            else:
                threading.Thread(target=self._last, args=(fault, process), daemon=True).start()

    def _last(self, fault: Fault, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError), self._lasting(fault, process):
            time.sleep(fault.seconds)

    @contextlib.contextmanager
    def _lasting(self, fault: Fault, process: subprocess.Popen[bytes]) -> Iterator[None]:
        if fault.kind == "stop":
            process.send_signal(signal.SIGSTOP)
            yield
            process.send_signal(signal.SIGCONT)
        elif fault.kind == "stall":
            self._proxies[fault.target].stall()
            yield
            self._proxies[fault.target].flow()
        else:  # a full disk: no file can grow
            _, most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, most))
            yield
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))


def _copy(process: subprocess.Popen[bytes], place: Path) -> None:
    assert process.stdout is not None
    with process.stdout, place.open("ab", buffering=0) as log:
        while data := process.stdout.read1(2**16):  # type: ignore[attr-defined]
            log.write(data)
