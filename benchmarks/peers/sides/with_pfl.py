"""pfl-research: its own FedAvg on its own simulator, in one process or in several.

    python with_pfl.py WORK PROCESSES
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys


def main() -> None:
    """Start the further processes of a simulation as pfl's guide does, and be the first of them."""
    processes, others = int(sys.argv[2]), []
    if processes > 1 and "PFL_WORKER_RANK" not in os.environ:
        os.environ["PFL_WORKER_ADDRESSES"] = ",".join(f"127.0.0.1:{port}" for port in free_ports(processes))
        others = [subprocess.Popen([sys.executable, *sys.argv], stdin=subprocess.DEVNULL, stdout=sys.stderr,
                                   env=os.environ | {"PFL_WORKER_RANK": str(rank)})
                  for rank in range(1, processes)]
        os.environ["PFL_WORKER_RANK"] = "0"
    from pfl_simulation import simulate  # not before: pfl looks for the others when it is imported

    simulate()
    for process in others:
        process.wait()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for found in sockets:
            found.bind(("127.0.0.1", 0))
        return [found.getsockname()[1] for found in sockets]


if __name__ == "__main__":
    main()
