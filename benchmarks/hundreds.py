"""What a round of a federation of hundreds costs the server, and its memory.

    python -m benchmarks.hundreds [--clients 64] [--rounds 8] [--transport grpc] [--parameters 0]

A server as it is, `descant server` with certificates on loopback. The clients are real ones, with keys,
certificates, connections and directories of their own, but light: softmax regression on a few rows, one
gradient step, many clients in each of two processes. So what is measured is the server and the transport, as
far as two cores that they share with the clients allow; clients in processes of their own would each need
250 MB and a start of seconds. Shown are the seconds from one round's line of metrics.jsonl to the next, which
is all of it: training, evaluation, commit; and the memory of the server, of which the rounds are one thing
and the picture of the curve, with the library that draws it, another. `--every 0` evaluates the last round
alone.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from benchmarks.federation import children, end, memory

PROCESSES = 2
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
batch = 5
local = {{ steps = 1 }}
backend = "loop"
[eval]
every = {every}
"""
LIGHT = """
import sys, threading
from pathlib import Path
from benchmarks.hundreds import light_clients
light_clients(*sys.argv[1:])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--every", type=int, default=1, help="rounds between evaluations; 0: the last alone")
    parser.add_argument("--parameters", type=int, default=0, help="of a network with one hidden layer")
    parser.add_argument("--transport", default="grpc")
    parser.add_argument("--clip", type=float, default=3.0, help="of the server; 0: uploads wait for nobody")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        rounds, peaks, uploads = federate(Path(place), given, stack)
    early, late, after = (max(peaks[k], default=0.0) for k in (1, given.rounds - 1, given.rounds))
    print(f"{given.clients} clients, {given.transport}, "
          f"{'each evaluated' if given.every == 1 else 'evaluated now and then'}: "
          f"{statistics.median(rounds):.2f} s a round ({min(rounds):.2f} to {max(rounds):.2f}, {len(rounds)} "
          f"rounds)\nmemory of the server: {peaks[0][0]:.0f} MB before the first round, at most "
          f"{max(peaks[0]):.0f} in it, {early:.0f} in round 2, {late:.0f} in round {given.rounds}, "
          f"{after:.0f} when it draws the curve; all uploads of a round {uploads / 2**20:.1f} MB")


def federate(base: Path, given: argparse.Namespace, stack: contextlib.ExitStack
             ) -> tuple[list[float], dict[int, list[float]], int]:
    """The seconds of the rounds after the first; the megabytes of the server, looked at now and then, by how
    many rounds are done; and the bytes of a round's uploads."""
    given = argparse.Namespace(**vars(given) | {"every": given.every or given.rounds})
    model = f'name = "dnn"\nhidden = {given.parameters // 75}' if given.parameters else 'name = "mclr"'
    (base / "experiment.toml").write_text(EXPERIMENT.format(model=model, **vars(given)))
    names = [f"n{k:03d}" for k in range(given.clients)]
    options = [part for name in names for part in ("--client", name)]
    descant(base, "certificates", "keys", "--host", "127.0.0.1", *options).wait()
    server = descant(base, "server", "experiment.toml", "--clients", given.clients, "--keys", "keys/server",
                     "--out", "out", "--port", 0, "--host", "127.0.0.1", "--no-alone", "--transport",
                     given.transport, "--clip", given.clip)
    stack.callback(end, server)
    port = wait_for_port(base / "server.log", server)
    for number in range(PROCESSES):
        with (base / "clients.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", LIGHT, str(base), str(port), given.transport, str(number),
                 str(given.clients)], stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"})
        stack.callback(end, process)
    peaks: dict[int, list[float]] = defaultdict(list)
    ends: list[float] = []
    metrics = base / "out" / "run" / "metrics.jsonl"
    for look in itertools.count():
        if server.poll() is not None:
            break
        time.sleep(0.02)
        if look % 3 == 0 and (base / "out" / "run").exists():
            with contextlib.suppress(OSError):
                peaks[len(ends)].append(sum(map(memory, [server.pid, *children(server.pid)])))
        if metrics.exists():
            ends += [time.monotonic()] * (metrics.read_bytes().count(b"\n") - len(ends))
    if server.returncode:
        sys.exit((base / "server.log").read_text() + (base / "clients.log").read_text()[-2000:])
    last = json.loads(metrics.read_text().splitlines()[-1])
    return [after - before for before, after in itertools.pairwise(ends)], peaks, last["bytes_up"]


def wait_for_port(log: Path, server: subprocess.Popen[bytes]) -> int:
    while (found := re.search(r"listening on 127\.0\.0\.1:(\d+)", log.read_text())) is None:
        if server.poll() is not None:
            sys.exit(log.read_text())
        time.sleep(0.1)
    return int(found[1])


def descant(base: Path, *command: object) -> subprocess.Popen[bytes]:
    with (base / f"{command[0]}.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "descant", *map(str, command)], cwd=base, stdout=log,
                                stderr=log, start_new_session=True,
                                env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"})


# -- the clients -----------------------------------------------------------------------------------


class Silent:
    """Observes a client and its connection."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._tell

    def _tell(self, *given: object, **named: object) -> None:
        for each in given:
            if isinstance(each, Exception):
                print(each, flush=True)


def light_clients(place: str, port: str, transport: str, number: str, clients: str) -> None:
    """Every second client or so, each in a thread."""
    import threading

    from descant.deploy.client import Client
    from descant.deploy.keys import ClientKeys
    from descant.deploy.transport.address import Address
    from descant.deploy.transport.choose import Name, make_client

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    one = threading.Lock()  # torch is set to one thread while a client works

    def serve(k: int) -> None:
        name, base = f"n{k:03d}", Path(place)
        client = Client(name, f"digits:{k}", base / f"client-{name}", Silent())  # type: ignore[arg-type]
        keys = ClientKeys.load(base / "keys" / name, name)

        def reply(payload: object) -> object:
            with one:
                return client.reply(payload)  # type: ignore[arg-type]

        make_client(Name(transport), Address("127.0.0.1", int(port)), keys, base / f"client-{name}").serve(
            reply, Silent(), stop)  # type: ignore[arg-type]

    threads = [threading.Thread(target=serve, args=(k,)) for k in range(int(number), int(clients), PROCESSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
