"""What secure aggregation adds to a round: `python -m benchmarks.secure`.

Ten clients as real processes on this machine, over TLS with signed keys, FedAvg on 784-100-10 (79,510
parameters). Federations with and without secure aggregation take turns; of each the first round is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.federation import end, run, seconds

EXPERIMENT = """
[data]
dataset = "mnist"
partition = "iid"
clients = {clients}
[model]
name = "dnn"
hidden = 100
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


def federated(base: Path, names: list[str], secure: bool) -> list[float]:
    """Seconds of the rounds after the first."""
    base.mkdir()
    (base / "experiment.toml").write_text((base.parent / "experiment.toml").read_text())
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    option = ["--secure-aggregation"] if secure else []
    with contextlib.ExitStack() as stack:
        keys = base.parent / "keys"
        processes = [run(base, "client", "--server", f"127.0.0.1:{port}", "--name", name, "--keys",
                         keys / name, "--data", f"mnist:{k}", *option) for k, name in enumerate(names)]
        server = run(base, "server", "experiment.toml", "--clients", len(names), "--keys", keys / "server",
                     "--out", "out", "--port", port, "--host", "127.0.0.1", "--no-alone", *option)
        for process in (server, *processes):
            stack.callback(end, process)
        if server.wait():
            sys.exit((base / "server.log").read_text())
        return seconds(base / "out" / "run")[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--turns", type=int, default=1)
    given = parser.parse_args()
    took: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        (base / "experiment.toml").write_text(EXPERIMENT.format(**vars(given)))
        names = [f"n{k:02d}" for k in range(given.clients)]
        run(base, "certificates", "keys", "--host", "127.0.0.1",
            *(part for name in names for part in ("--client", name))).wait()
        for turn in range(given.turns):
            for secure in (False, True):
                took[secure] += federated(base / f"{turn}{secure}", names, secure)
    plain, masked = (statistics.median(took[secure]) for secure in (False, True))
    print(f"{given.clients} clients, 79,510 parameters, {given.turns} x {given.rounds} rounds each")
    for word, secure in (("plain", False), ("secure", True)):
        print(f"{word}: {statistics.median(took[secure]):.2f} s a round ({min(took[secure]):.2f} to "
              f"{max(took[secure]):.2f})")
    print(f"{masked - plain:.2f} s more")


if __name__ == "__main__":
    main()
