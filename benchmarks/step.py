"""Where a step of a chunk goes: `python -m benchmarks.step [--model dnn]`.

FedAvg of ten clients on Fashion-MNIST (or random data of its shape), one epoch of 27 batches of 20, one core:
by descant, by a loop written by hand for exactly this model, in the same calls of torch, and by nothing but
the products (the floor). Then pFedMe and mh, by descant and by the products of their gradients. With `--model
cnn2`, three clients and three batches, and in place of code by hand what each layer takes, whose calls are
torch's own convolutions and poolings. Processor time, of which other work on the machine takes less than of
the clock's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import nn

from benchmarks.speed.case import EPOCH, METHODS, Case, fashion_mnist
from benchmarks.speed.command import LARGE
from benchmarks.speed.products import Kind, Shapes, Share
from descant.core.federation import Federation
from descant.core.kernels.chain_layers import Layer
from descant.engine.backends.choose import templates
from descant.engine.backends.memory import keep_freed_memory
from descant.engine.rounds import Training
from descant.engine.work import Work

CLIENTS, REPEATED = np.arange(10), 30
CLIENTS_LARGE, BATCHES_LARGE, REPEATED_LARGE = 3, 3, 7
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


class Timed(Layer):
    """A layer that notes what it takes."""

    def __init__(self, layer: Layer) -> None:
        self._layer, self.owns, self.reads_context, self.spent = layer, layer.owns, layer.reads_context, 0.0

    def _noted(self, call: Callable[..., Any], *given: Any) -> Any:
        began = time.thread_time()
        found = call(*given)
        self.spent += time.thread_time() - began
        return found

    def forward(self, *given: Any) -> Any:
        return self._noted(self._layer.forward, *given)

    def backward(self, *given: Any) -> Any:
        return self._noted(self._layer.backward, *given)

    def add_gradient(self, *given: Any) -> None:
        self._noted(self._layer.add_gradient, *given)


def by_layer(side: Side) -> dict[str, float]:
    """Microseconds of each layer in a step of the chunk, the median of some rounds; last, of all else."""
    gradients = side.work.task.chunk_gradients
    assert gradients is not None
    places, rounds = gradients.chain.places, []
    gradients.chain.places = [place._replace(layer=Timed(place.layer)) for place in places]
    timed = {f"{k + 1} {type(place.layer).__name__}": shown.layer for k, (place, shown) in enumerate(
        zip(places, gradients.chain.places, strict=True))}
    for _ in range(REPEATED_LARGE):
        before, began = {name: layer.spent for name, layer in timed.items()}, time.thread_time()
        side.round()
        whole, each = time.thread_time() - began, {n: layer.spent - before[n] for n, layer in timed.items()}
        rounds.append(each | {"all else": whole - sum(each.values())})
    gradients.chain.places = places
    return {name: statistics.median(each[name] for each in rounds) / side.steps * 1e6 for name in rounds[0]}


class Side:
    """A method's round of these clients, and its products."""

    def __init__(self, method: str, model: str, federation: Federation) -> None:
        is_large = model in LARGE
        case = Case(method, model, federation, batches=BATCHES_LARGE if is_large else EPOCH)
        training = Training(case.work, case.train("vectorised"))
        templates(training)
        self.work, self.theta = training.work, training.initial.theta
        self._clients = clients = CLIENTS[:CLIENTS_LARGE] if is_large else CLIENTS
        self._message = self.work.algorithm.broadcast(training.server, training.round_of(clients))
        self._states, self.steps = training.store.read(clients), case.batches * case.grads_per_batch
        shapes = Shapes.of(case)
        kinds: tuple[Kind, ...] = ("products", "convolutions") if is_large else ("products",)
        floors = [Share(shapes, kind, at_once, len(clients), 0) for kind in kinds
                  for at_once in ({1, len(clients)} if is_large else {len(clients)})]
        self._ways = (self.round, *(partial(floor.train, shapes.widths) for floor in floors))
        self._spent: tuple[list[float], ...] = tuple([] for _ in self._ways)

    def round(self) -> None:
        self.work.execute("local", self._clients, 1, self._message, self._states)

    def play(self) -> None:
        for way, spent in zip(self._ways, self._spent, strict=True):
            began = time.thread_time()
            way()
            spent.append(time.thread_time() - began)

    def costs(self) -> tuple[float, float]:
        """Microseconds per step of the chunk: descant's, and the floor's in its fastest arrangement."""
        ours, *floors = (statistics.median(spent) / self.steps * 1e6 for spent in self._spent)
        return ours, min(floors)


def main(model: Annotated[str, typer.Option(help="mclr, dnn or cnn2.")] = "mclr") -> None:
    """Take a step apart."""
    torch.set_num_threads(1)
    keep_freed_memory()
    federation, _ = fashion_mnist()
    sides, bare = {method: Side(method, model, federation) for method in METHODS}, []
    with torch.no_grad():
        for _ in range(REPEATED_LARGE if model in LARGE else REPEATED):
            for side in sides.values():
                side.play()
            if model not in LARGE:
                bare.append(by_hand(sides["fedavg"].work, sides["fedavg"].theta))
        if bare:
            parts = {name: statistics.median(part) / EPOCH * 1e6
                     for name, part in zip(PARTS, zip(*bare, strict=True), strict=True)}
        else:
            parts = by_layer(sides["fedavg"])
    for name, spent in parts.items():
        print(f"{name:18} {spent:6.0f} µs")
    whole = sum(parts.values())
    print(f"{'together' + ', by hand' * bool(bare):18} {whole:6.0f} µs")
    for method, side in sides.items():
        ours, floor = side.costs()
        line = f"{method:18} {ours:6.0f} µs, {ours / floor:.2f} times the floor of {floor:.0f}"
        print(line + (f", {ours / whole:.2f} times the code by hand" if method == "fedavg" and bare else ""))


if __name__ == "__main__":
    typer.run(main)
