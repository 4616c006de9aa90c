"""Where a step of a chunk goes: `python -m benchmarks.step`.

Ten clients of softmax regression on Fashion-MNIST (or random data of its shape), one epoch of 27 batches of
20, one core: by descant, by a loop written by hand for exactly this model, in the same calls of torch, and by
nothing but the products. Processor time, of which other work on the machine takes less than of the clock's.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.speed.case import Case, fashion_mnist
from benchmarks.speed.products import Shapes, Share
from descant.engine.backends.choose import templates
from descant.engine.backends.memory import keep_freed_memory
from descant.engine.rounds import Training
from descant.engine.work import Work

CLIENTS, REPEATED = np.arange(10), 60
PARTS = ("look up the bytes", "as floats", "forward", "loss and slopes", "step")


def by_hand(work: Work, theta: torch.Tensor) -> list[float]:
    """The epoch; the seconds of each part."""
    plan, own = work._plan("local", CLIENTS, 1)
    x, y = plan.pool.train.x.flatten(1), plan.pool.train.y
    n, now, spent = len(CLIENTS), time.thread_time, [0.0] * len(PARTS)
    theta = theta.expand(n, -1)
    w, b = theta[:, :7840].reshape(n, 10, 784).clone(), theta[:, 7840:].clone()
    targets, start, place = y[own.rows], 0, torch.empty(n, max(plan.widths), x.shape[1])
    for group in plan.gathered:
        at = [now()]
        found = F.embedding(own.rows[:, start : start + sum(plan.widths[k] for k in group)], x)
        spent[0] += now() - at[0]
        first = start
        for width in (plan.widths[k] for k in group):
            at = [now()]
            batch = place[:, :width].copy_(found[:, start - first : start - first + width]).mul_(1 / 255)
            at.append(now())
            out = torch.bmm(w, batch.mT).add_(b.unsqueeze(2))
            at.append(now())
            right = targets[:, start : start + width].unsqueeze(1)
            log_p = torch.log_softmax(out, 1)
            log_p.gather(1, right).neg_()
            slope = log_p.exp_().scatter_add_(1, right, torch.full_like(right, -1, dtype=log_p.dtype))
            slope.mul_(1 / width)
            at.append(now())
            w.baddbmm_(slope, batch, alpha=-0.01)
            b.sub_(slope.sum(2), alpha=0.01)
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
    states, steps, ours, bare, floor = training.store.read(CLIENTS), case.batches, [], [], []
    shapes = Shapes.of(case)
    products = Share(shapes, "products", len(CLIENTS), len(CLIENTS), 0)
    with torch.no_grad():
        for _ in range(REPEATED):
            began = time.thread_time()
            work.execute("local", CLIENTS, 1, message, states)
            ours.append(time.thread_time() - began)
            began = time.thread_time()
            products.train(shapes.widths)
            floor.append(time.thread_time() - began)
            bare.append(by_hand(work, theta))
    parts = [statistics.median(part) / steps * 1e6 for part in zip(*bare, strict=True)]
    for name, spent in zip(PARTS, parts, strict=True):
        print(f"{name:18} {spent:5.0f} µs")
    needed = parts[2] + parts[4]
    print(f"{'together':18} {sum(parts):5.0f} µs, of which products {needed:.0f}")
    for name, times in (("descant", ours), ("floor", floor)):
        print(f"{name:18} {statistics.median(times) / steps * 1e6:5.0f} µs")


if __name__ == "__main__":
    main()
