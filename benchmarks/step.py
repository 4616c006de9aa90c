"""Where a step of a chunk goes: `python benchmarks/step.py`.

Ten clients of softmax regression on Fashion-MNIST (or random data of its shape), one epoch of 27 batches of
20, one core: by descant, and by a loop written by hand for exactly this model, in the same calls of torch.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.speed.case import Case, fashion_mnist
from descant.engine.backends.choose import templates
from descant.engine.backends.memory import keep_freed_memory
from descant.engine.rounds import Training
from descant.engine.work import Work

CLIENTS, REPEATED = np.arange(10), 60
PARTS = ("look up the bytes", "as floats", "forward", "loss and slopes", "backward", "SGD")


def by_hand(work: Work, theta: torch.Tensor) -> list[float]:
    """The epoch; the seconds of each part."""
    x, y = work.federation.x.flatten(1), work.federation.y
    plan, own = work._plan("local", CLIENTS, 1)
    n, now, spent = len(CLIENTS), time.perf_counter, [0.0] * len(PARTS)
    theta, step = theta.expand(n, -1).clone(), torch.empty(n, theta.numel())
    (w, b), (dw, db) = ([t[:, :7840].view(n, 10, 784), t[:, 7840:]] for t in (theta, step))
    targets, start = y[own.rows], 0
    for group in plan.gathered:
        at = [now()]
        found = F.embedding(own.rows[:, start : start + sum(plan.widths[k] for k in group)], x)
        spent[0] += now() - at[0]
        first = start
        for width in (plan.widths[k] for k in group):
            at = [now()]
            batch = found[:, start - first : start - first + width].to(torch.float32).mul_(1 / 255)
            at.append(now())
            out = torch.baddbmm(b.unsqueeze(1), batch, w.transpose(1, 2))
            at.append(now())
            right = targets[:, start : start + width].unsqueeze(2)
            log_p = torch.log_softmax(out, 2)
            log_p.gather(2, right).neg_().squeeze(2).mean(1)
            slope = log_p.exp_().scatter_add_(2, right, torch.full_like(right, -1, dtype=log_p.dtype))
            slope.mul_(1 / width)
            at.append(now())
            torch.bmm(slope.transpose(1, 2), batch, out=dw)
            torch.sum(slope, 1, out=db)
            at.append(now())
            theta.sub_(step, alpha=0.01)
            at.append(now())
            for k in range(1, len(PARTS)):
                spent[k] += at[k] - at[k - 1]
            start += width
    return spent


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    federation, _ = fashion_mnist()
    case = Case("fedavg", "mclr", federation)
    training = Training(case.work, case.train("vectorised"))
    templates(training)
    work, theta = training.work, training.initial.theta
    message = work.algorithm.broadcast(training.server, training.round_of(CLIENTS))
    states, steps, ours, bare = training.store.read(CLIENTS), case.batches, [], []
    with torch.no_grad():
        for _ in range(REPEATED):
            began = time.perf_counter()
            work.execute("local", CLIENTS, 1, message, states)
            ours.append(time.perf_counter() - began)
            bare.append(by_hand(work, theta))
    parts = [statistics.median(part) / steps * 1e6 for part in zip(*bare, strict=True)]
    for name, spent in zip(PARTS, parts, strict=True):
        print(f"{name:18} {spent:5.0f} µs")
    needed = sum(parts[k] for k in (2, 4, 5))
    print(f"{'together':18} {sum(parts):5.0f} µs, of which products and SGD {needed:.0f}")
    print(f"{'descant':18} {statistics.median(ours) / steps * 1e6:5.0f} µs")


if __name__ == "__main__":
    main()
