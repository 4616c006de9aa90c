"""`python -m benchmarks.chaos`, or `make chaos`."""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.chaos.clock import Clocks
from benchmarks.chaos.federation import Federation
from benchmarks.chaos.plan import Fault, draw
from descant.deploy.transport.choose import Name
from descant.experiment.checkpoint import read

CLIENTS = ["east", "north", "south"]
LONGEST = 300.0  # seconds without a new round: it hangs


class Broken(Exception):
    """The result is another, or there is none."""


def main(faults: Annotated[int, typer.Option(help="How many.")] = 28,
         rounds: Annotated[int, typer.Option(help="Of the federation.")] = 60,
         seed: Annotated[int, typer.Option(help="Of the plan; 0: any.")] = 0,
         transport: Annotated[Name, typer.Option(help="That carries the federation.")] = Name.grpc) -> None:
    """Run a federation undisturbed and under faults, and compare."""
    seed = seed or 1 + secrets.randbelow(2**31)
    print(f"seed {seed}")
    try:
        print(compare(faults, rounds, seed, transport))
    except Broken as error:
        sys.exit(f"BROKEN: {error}")


def compare(faults: int, rounds: int, seed: int, transport: Name = Name.grpc) -> str:
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        clocks = Clocks(base)
        if clocks.library is None:
            print("without a C compiler (cc) no clock jumps")
        plan = draw(seed, faults, rounds, CLIENTS, clocks.library is not None)
        calm, _ = run(Federation(base / "calm", CLIENTS, rounds, clocks, 0, transport), [])
        wild, restarts = run(Federation(base / "wild", CLIENTS, rounds, clocks, seed, transport), plan)
        same(calm, wild)
    return (f"over {transport}: {len(plan)} faults, {restarts} restarts, {rounds} rounds: the state, "
            f"the loss of each round and the models of {len(CLIENTS)} clients are those of the undisturbed "
            "federation, bit for bit")


def run(federation: Federation, plan: list[Fault]) -> tuple[Federation, int]:
    """To its end; the faults happen in their rounds."""
    left = list(plan)
    with federation:
        done, since = 0, time.monotonic()
        while not federation.tend():
            time.sleep(0.05)
            if (now := len(federation.rounds())) != done:
                done, since = now, time.monotonic()
            if time.monotonic() - since > LONGEST:
                raise Broken(f"no round after {done} within {LONGEST:g} s:\n{federation.log()[-3000:]}")
            while left and left[0].round <= done:
                print(left[0], flush=True)
                federation.strike(left.pop(0))
    if left:
        raise Broken(f"it was over before {left[0]}")
    return federation, federation.restarts


def same(calm: Federation, wild: Federation) -> None:
    if calm.rounds() != wild.rounds():
        raise Broken(f"the losses of the rounds differ: {calm.rounds()} and {wild.rounds()}")
    ours, theirs = (read(each.out / "run" / "checkpoint" / "state.safetensors")[0] for each in (calm, wild))
    for name in ours.keys() | theirs.keys():
        if not torch.equal(ours[name], theirs[name]):
            raise Broken(f"the server's {name} differs")
    for client in CLIENTS:
        models = [each.client(client) / "model.safetensors" for each in (calm, wild)]
        if models[0].read_bytes() != models[1].read_bytes():
            raise Broken(f"the model of {client} differs")


if __name__ == "__main__":
    typer.run(main)
