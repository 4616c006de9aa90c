"""Where a step of a chunk goes: `python -m benchmarks.step [--model dnn]`.

FedAvg of ten clients on Fashion-MNIST (or random data of its shape), one epoch of 27 batches of 20, one core:
by descant, by a loop written by hand for exactly this model, in the same calls of torch, and by nothing but
the products (the floor). Then pFedMe and mh, by descant and by the products of their gradients. Processor
time, of which other work on the machine takes less than of the clock's.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import nn

from benchmarks.speed.case import EPOCH, METHODS, Case, fashion_mnist
from benchmarks.speed.products import Shapes, Share
from descant.core.federation import Federation
from descant.engine.backends.choose import templates
from descant.engine.backends.memory import keep_freed_memory
from descant.engine.rounds import Training
from descant.engine.work import Work

CLIENTS, REPEATED = np.arange(10), 30
PARTS = ("look up the bytes", "as floats", "forward", "loss and slopes", "backward, step")
LEAK = nn.LeakyReLU().negative_slope


def by_hand(work: Work, theta: torch.Tensor) -> list[float]:
    """The epoch; the seconds of each part."""
    plan, own = work._plan("local", CLIENTS, 1)
    x, y = plan.pool.train.x.flatten(1), plan.pool.train.y
    n, now, spent = len(CLIENTS), time.thread_time, [0.0] * len(PARTS)
    assert work.task.layout is not None
    weights = [part.clone() for part in torch.split(theta.expand(n, -1), [
        each.stop - each.start for each in work.task.layout.parameters], 1)]
    layers = [(w.view(n, b.shape[1], -1), b) for w, b in zip(weights[::2], weights[1::2], strict=True)]
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
            given, out = [batch.mT], batch.mT
            for k, (w, b) in enumerate(layers):
                out = torch.bmm(w, out).add_(b.unsqueeze(2))
                if k + 1 < len(layers):
                    out = F.leaky_relu_(out, LEAK)
                    given.append(out)
            at.append(now())
            right = targets[:, start : start + width].unsqueeze(1)
            log_p = torch.log_softmax(out, 1)
            log_p.gather(1, right).neg_()
            slope = log_p.exp_().scatter_add_(1, right, torch.full_like(right, -1, dtype=log_p.dtype))
            slope.mul_(1 / width)
            at.append(now())
            for k in reversed(range(len(layers))):
                w, b = layers[k]
                back = torch.bmm(w.mT, slope) if k else slope
                w.baddbmm_(slope, given[k].mT, alpha=-0.01)
                b.sub_(slope.sum(2), alpha=0.01)
                if k:
                    slope = torch.ops.aten.leaky_relu_backward(back, given[k], LEAK, True)
            at.append(now())
            for k in range(1, len(PARTS)):
                spent[k] += at[k] - at[k - 1]
            start += width
    return spent


class Side:
    """A method's round of these clients, and its products."""

    def __init__(self, method: str, model: str, federation: Federation) -> None:
        case = Case(method, model, federation)
        training = Training(case.work, case.train("vectorised"))
        templates(training)
        self.work, self.theta = training.work, training.initial.theta
        self._message = self.work.algorithm.broadcast(training.server, training.round_of(CLIENTS))
        self._states, self._steps = training.store.read(CLIENTS), case.batches * case.grads_per_batch
        shapes = Shapes.of(case)
        products = Share(shapes, "products", len(CLIENTS), len(CLIENTS), 0)
        self._ways = (self._round, lambda: products.train(shapes.widths))
        self._spent: tuple[list[float], list[float]] = ([], [])

    def _round(self) -> None:
        self.work.execute("local", CLIENTS, 1, self._message, self._states)

    def play(self) -> None:
        for way, spent in zip(self._ways, self._spent, strict=True):
            began = time.thread_time()
            way()
            spent.append(time.thread_time() - began)

    def costs(self) -> tuple[float, float]:
        """Microseconds per step of the chunk: descant's and the floor's."""
        ours, floor = (statistics.median(spent) / self._steps * 1e6 for spent in self._spent)
        return ours, floor


def main(model: Annotated[str, typer.Option(help="mclr or dnn.")] = "mclr") -> None:
    """Take a step apart."""
    torch.set_num_threads(1)
    keep_freed_memory()
    federation, _ = fashion_mnist()
    sides, bare = {method: Side(method, model, federation) for method in METHODS}, []
    with torch.no_grad():
        for _ in range(REPEATED):
            for side in sides.values():
                side.play()
            bare.append(by_hand(sides["fedavg"].work, sides["fedavg"].theta))
    parts = [statistics.median(part) / EPOCH * 1e6 for part in zip(*bare, strict=True)]
    for name, spent in zip(PARTS, parts, strict=True):
        print(f"{name:18} {spent:5.0f} µs")
    hand = sum(parts)
    print(f"{'together, by hand':18} {hand:5.0f} µs")
    for method, side in sides.items():
        ours, floor = side.costs()
        line = f"{method:18} {ours:5.0f} µs, {ours / floor:.2f} times the floor of {floor:.0f}"
        print(line + (f", {ours / hand:.2f} times the code by hand" if method == "fedavg" else ""))


if __name__ == "__main__":
    typer.run(main)
