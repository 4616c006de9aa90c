"""What a federation costs beside its simulation: seconds a round over TLS on loopback, and memory.

    python benchmarks/federation.py [--clients 4] [--rounds 30] [--parameters 10000000]

Starts a server and its clients as real processes on this machine, with softmax regression on the digits, or,
with --parameters, a network of that size. The same experiment runs in simulation before (backend "loop").
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXPERIMENT = """
[data]
dataset = "digits"
partition = "iid"
clients = {clients}
[model]
{model}
[algorithm]
name = "fedavg"
[train]
rounds = {rounds}
batch = 20
local = {{ steps = 5 }}
backend = "loop"
[eval]
every = {rounds}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--parameters", type=int, default=0, help="of a network with one hidden layer")
    given = parser.parse_args()
    model = f'name = "dnn"\nhidden = {given.parameters // 75}' if given.parameters else 'name = "mclr"'
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        base = Path(place)
        (base / "experiment.toml").write_text(EXPERIMENT.format(model=model, **vars(given)))
        run(base, "run", "experiment.toml", "--out", "simulated").wait()
        names = [f"n{k:02d}" for k in range(given.clients)]
        run(base, "certificates", "keys", "--host", "127.0.0.1",
            *(part for name in names for part in ("--client", name))).wait()
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        clients = [run(base, "client", "--server", f"127.0.0.1:{port}", "--name", name, "--keys",
                       f"keys/{name}", "--data", f"digits:{k}") for k, name in enumerate(names)]
        server = run(base, "server", "experiment.toml", "--clients", given.clients, "--keys", "keys/server",
                     "--out", "out", "--port", port, "--host", "127.0.0.1", "--no-alone")
        for process in (server, *clients):
            stack.callback(end, process)
        peaks: list[tuple[int, float, float]] = []  # round, megabytes of server and SuperLink
        while server.poll() is None:
            time.sleep(0.25)
            done = len(seconds(base / "out" / "run"))
            with contextlib.suppress(OSError, IndexError):
                peaks.append((done, memory(server.pid), memory(children(server.pid)[0])))
        if server.returncode:
            sys.exit((base / "server.log").read_text())
        here, there = seconds(base / "out" / "run"), seconds(base / "simulated")
    alone, federated = statistics.median(there[1:]), statistics.median(here[1:])
    print(f"{given.clients} clients, {given.rounds} rounds, {model.replace(chr(10), ', ')}")
    print(f"a round: {federated:.3f} s on nodes, {alone:.3f} s in simulation: {federated - alone:.3f} s more")
    for share in (0.1, 0.5, 1.0):
        at = [peak for peak in peaks if 0 < peak[0] <= max(1, share * given.rounds)][-1]
        print(f"after {at[0]} rounds: server {at[1]:.0f} MB, SuperLink {at[2]:.0f} MB")


def run(base: Path, *command: object) -> subprocess.Popen[bytes]:
    """`descant ...` in a directory, its output in a file."""
    with (base / f"{command[0]}.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "descant", *map(str, command)], cwd=base, stdout=log,
                                stderr=log, start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def seconds(out: Path) -> list[float]:
    """What the rounds took, as far as they are done."""
    with contextlib.suppress(OSError, ValueError):
        return [json.loads(line)["seconds"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    return []


def memory(pid: int) -> float:
    """Megabytes of a process that are its own."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


if __name__ == "__main__":
    main()
