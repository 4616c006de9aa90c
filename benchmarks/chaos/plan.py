"""Which faults happen when: drawn from a seed, by round, so that a plan can be repeated."""

from __future__ import annotations

import random
from typing import NamedTuple

SERVER = "server"
KINDS = ("kill", "stop", "cut", "stall", "corrupt", "full disk", "clock")
JUMPS = (3600, -3600, 86_000, -40_000)  # seconds: certificates are valid from a day before they are made


class Fault(NamedTuple):
    round: int  # after which it happens
    kind: str
    target: str  # the server, or a client
    seconds: float  # that it lasts, or that the clock jumps by

    def __str__(self) -> str:
        what = f"the clock of {self.target} jumps by {self.seconds:g} s" if self.kind == "clock" else (
            f"{self.kind}: {self.target}" + (f", {self.seconds:.1f} s" if self.seconds else ""))
        return f"round {self.round}: {what}"


def draw(seed: int, count: int, rounds: int, clients: list[str], with_clocks: bool) -> list[Fault]:
    """So many faults; each kind as often as any other, in any order."""
    generator = random.Random(seed)
    kinds = [kind for kind in KINDS if with_clocks or kind != "clock"]
    chosen = [kinds[k % len(kinds)] for k in range(count)]
    generator.shuffle(chosen)
    at = sorted(generator.randrange(1, rounds - 1) for _ in chosen)
    return [_fault(generator, number, kind, clients) for number, kind in zip(at, chosen, strict=True)]


def _fault(generator: random.Random, number: int, kind: str, clients: list[str]) -> Fault:
    on_the_way = kind in ("cut", "stall", "corrupt")  # between a client and the server
    target = generator.choice(clients if on_the_way else [*clients, SERVER])
    seconds = {"clock": float(generator.choice(JUMPS)), "kill": 0.0, "cut": 0.0, "corrupt": 0.0}
    return Fault(number, kind, target, seconds.get(kind, generator.uniform(1.0, 4.0)))
