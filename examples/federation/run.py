"""A federation on this machine, of real processes: a server and four clients that speak over TLS.

    python examples/federation/run.py [DIR]     # or: make federation

The clients are the hospitals of heart_disease, each with its own patients, if the data are there (`descant
data list`), and else four sites with handwritten digits. Every process is started by the command that people
would type; only that all of them are on one machine is different. Whatever happens, none is left behind.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
DESCANT = [sys.executable, "-m", "descant"]
PATIENCE = 60  # seconds for a client to end, once the server has


def main() -> int:
    place = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/federation")
    experiment, data = choose()
    keys, address = place / "keys", f"127.0.0.1:{free_port()}"
    clients = [option for name in data for option in ("--client", name)]
    if run(["certificates", keys, "--host", "127.0.0.1", *clients], place / "certificates.log"):
        return 1
    print(f"certificates and keys: {keys}")

    server = start(["server", experiment, "--clients", len(data), "--keys", keys / "server",
                    "--host", "127.0.0.1", "--port", address.rpartition(":")[2],
                    "--out", place / "server"], None)
    processes = {"server": server}
    try:
        for name, source in data.items():
            processes[name] = start(["client", "--server", address, "--name", name, "--data", source,
                                     "--keys", keys / name, "--dir", place / name], place / f"{name}.log")
        while server.poll() is None:
            time.sleep(0.2)
            for name in data:
                if processes[name].poll() not in (None, 0):
                    print(f"{name} ended: {tail(place / f'{name}.log')}", file=sys.stderr)
                    return 1
        for name in data:
            processes[name].wait(PATIENCE if server.returncode == 0 else 1)
    except KeyboardInterrupt:  # a terminal has told the others, too; who has not heard it is told below
        end(processes.values())
        print("stopped: no process is left", file=sys.stderr)
        return 130
    except subprocess.TimeoutExpired:
        print("a client has not ended by itself", file=sys.stderr)
    finally:
        end(processes.values())
    if server.returncode:
        return server.returncode
    print("\nwhat each client said, and its model:")
    for name in data:
        print(f"  {place / f'{name}.log'}   {place / name / 'model.safetensors'}")
    return 0


def choose() -> tuple[Path, dict[str, str]]:
    """The experiment, and what data each client has."""
    from descant.data.heart_disease import HOSPITALS
    from descant.view.data import list_datasets

    found = {entry["name"]: entry for entry in list_datasets()}
    if found["heart_disease"]["where"] == "present":
        return HERE / "experiment.toml", {name: f"heart_disease:{name}" for name in HOSPITALS}
    print("the files of heart_disease are not here: four sites with handwritten digits take its place")
    return HERE / "digits.toml", {f"site-{k}": f"digits:{k}" for k in range(4)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(arguments: list[object], log: Path | None) -> subprocess.Popen[bytes]:
    """A process whose output goes to a file, or to this terminal, where the command is told, too."""
    words = [str(word) for word in arguments]
    # five processes share the cores of this machine: one thread each
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    print(f"$ descant {shlex.join(words)}", flush=True)
    if log is None:
        return subprocess.Popen([*DESCANT, *words], env=environment)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        return subprocess.Popen([*DESCANT, *words], env=environment, stdout=file, stderr=file)


def run(arguments: list[object], log: Path) -> int:
    code = start(arguments, log).wait()
    if code:
        print(tail(log), file=sys.stderr)
    return code


def tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])


def end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Ask those that still run to end; make them, if they do not."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # one Ctrl-C is enough
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, interrupt)
    sys.exit(main())
