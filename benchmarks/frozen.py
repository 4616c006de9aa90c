"""What it gains that frozen layers with which a network begins run once for each row.

    python -m benchmarks.frozen

The same run twice: with room for the features, and without, where all layers run in every step.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import descant
from descant.engine import pool

CLIENTS, ROWS, SIDE, REPEATS = 10, 60, 16, 3


def federation() -> descant.Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(CLIENTS * ROWS, 1, SIDE, SIDE, generator=generator)
    y = (x[:, 0, : SIDE // 2].mean((1, 2)) > x[:, 0, SIDE // 2 :].mean((1, 2))).long()
    return descant.Federation.from_arrays(x, y, client=torch.arange(len(x)) % CLIENTS)


def network() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(4), nn.Flatten()).requires_grad_(False)
    return nn.Sequential(body, nn.Dropout(0.2), nn.Linear(256, 2))


def seconds(fed: descant.Federation, net: nn.Module, rounds: int, room: int) -> float:
    pool.BUDGET = room
    start = time.perf_counter()
    descant.run("ditto", fed, model=net, rounds=rounds, local={"steps": 20}, batch=20, backend="vectorised",
                progress=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    fed, net = federation(), network()
    kept, whole = (min(seconds(fed, net, rounds, room) for _ in range(REPEATS)) for room in (pool.BUDGET, 0))
    print(f"{CLIENTS} clients, {rounds} rounds of 20 steps with evaluation, best of {REPEATS}: "
          f"on features {kept:.2f} s, through all layers {whole:.2f} s; ratio {whole / kept:.1f}")


if __name__ == "__main__":
    main()
