"""The floor: the products of a case on all cores, in whatever arrangement is the fastest here.

That depends on the machine, so it is tried first: threads in one process or one-thread processes side by
side, many clients in a product or few, unfolded convolutions or real ones.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from benchmarks.speed.apart import orders
from benchmarks.speed.case import BATCH
from benchmarks.speed.products import ROOM, Kind, Shapes, Share
from benchmarks.speed.side import Played, Scored
from descant.core.units import times

Way: TypeAlias = Literal["threads", "processes"]

WAYS: tuple[Way, ...] = ("processes", "threads")
ELIGIBLE: tuple[Kind, ...] = ("products", "convolutions")
HOPELESS = 2.0  # times the best: not to be tried any longer
# Arrangements that are run in every repetition, because a trial may have been lucky or unlucky: threads are
# the first to suffer when the machine is not ours alone
KEPT: dict[Way, int] = {"processes": 3, "threads": 1}
CHUNKS = (1, 2, 5, 10, 20)
TRIAL = 2e9  # multiplications and additions of a trial, over all clients: some hundredths of a second
SPENT = 0.2  # seconds for the trials of an arrangement, at least


class Arrangement(NamedTuple):
    way: Way
    kind: Kind
    chunk: int  # clients in a product

    def __str__(self) -> str:
        return f"{self.kind} in {self.way}, {times(self.chunk, 'client')} at once"


class Tried(NamedTuple):
    arrangement: Arrangement
    seconds: float  # per gradient step, the best of some


class Floor:
    """The floor of one case after another. Made in a fresh process: threads do not survive a fork."""

    def __init__(self, cores: int) -> None:
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self._cores = cores
        self._pipes: list[Connection] = []
        self._workers = []
        for _ in range(cores):  # before this process has threads
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(theirs,), daemon=True)
            worker.start()
            theirs.close()
            self._pipes.append(ours)
            self._workers.append(worker)
        torch.set_num_threads(cores)
        self._tried: dict[Any, list[Tried]] = {}
        self._here: dict[Arrangement, Share] = {}  # what this process works on itself
        self._kept: list[Arrangement] = []
        self._won: Counter[Arrangement] = Counter()

    @property
    def note(self) -> str:
        """The arrangement that was the fastest most often."""
        return str(max(self._kept, key=lambda arrangement: self._won[arrangement])) if self._kept else ""

    def fit(self, shapes: Shapes) -> list[Tried]:
        """Find the fastest arrangements, or remember them. Fused and bare products are tried for information:
        the floor is to update the weights, and in a step of its own, as optimizers do."""
        for arrangement in self._kept:
            self._forget(arrangement)
        self._shapes = shapes
        known = (shapes.layers, shapes.clients)
        if known not in self._tried:
            self._tried[known] = self._try_all()
        eligible = [t for t in self._tried[known] if t.arrangement.kind in ELIGIBLE]
        fastest = sorted(eligible, key=lambda t: t.seconds)
        self._kept = []
        for way, count in KEPT.items():
            self._kept += [t.arrangement for t in fastest if t.arrangement.way == way][:count]
        self._won = Counter()
        for arrangement in self._kept:
            self._prepare(arrangement)
        return self._tried[known]

    def _try_all(self) -> list[Tried]:
        shapes, tried, best = self._shapes, [], math.inf
        kinds = ELIGIBLE if any(layer.window is not None for layer in shapes.layers) else ELIGIBLE[:1]
        each = sum(layer.operations(BATCH) for layer in shapes.layers) * shapes.grads * shapes.clients
        trial = shapes.widths[: max(1, int(TRIAL / each))]
        for way in WAYS:
            for kind in kinds:
                for chunk in self._chunks(way):
                    tried.append(self._try(Arrangement(way, kind, chunk), trial, HOPELESS * best))
                    best = min(best, tried[-1].seconds)
        fastest = min(tried, key=lambda t: t.seconds).arrangement
        further: tuple[Kind, ...] = ("fused", "bare")
        return tried + [self._try(fastest._replace(kind=kind), trial, math.inf) for kind in further]

    def round(self) -> Played:
        """The products of a round, in each arrangement that has a chance; the fastest counts."""
        return Played(self._fastest("train", self._shapes.widths), self._shapes.grad_steps)

    def evaluate(self) -> Scored:
        """The forward products on the test rows; likewise."""
        return Scored(self._fastest("evaluate"), float("nan"))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for worker in self._workers:
            worker.join()

    def _chunks(self, way: Way) -> list[int]:
        """The numbers of clients at once that are worth a try."""
        clients = self._shapes.clients if way == "threads" else -(-self._shapes.clients // self._cores)
        room = sum(layer.room(BATCH) for layer in self._shapes.layers)
        return [size for size in CHUNKS if size == 1 or (size <= clients and size * room <= ROOM)]

    def _try(self, arrangement: Arrangement, widths: tuple[int, ...], limit: float) -> Tried:
        """The best of many, or the first if it is beyond the limit: threads that wait for each other on a
        busy machine can take a hundred times as long."""
        self._prepare(arrangement)
        one = self._shapes._replace(widths=widths[:1])
        best = self._seconds(arrangement, "train", one.widths) / one.grad_steps
        began = time.perf_counter()
        while best <= limit and time.perf_counter() - began < SPENT:
            seconds = self._seconds(arrangement, "train", widths)
            best = min(best, seconds / self._shapes._replace(widths=widths).grad_steps)
        self._forget(arrangement)
        return Tried(arrangement, best)

    def _prepare(self, arrangement: Arrangement) -> None:
        (way, kind, chunk), shapes = arrangement, self._shapes
        if way == "threads":
            self._here[arrangement] = Share(shapes, kind, chunk, shapes.clients, shapes.evaluated)
            return
        shares = zip(self._parts(shapes.clients), self._parts(shapes.evaluated), strict=True)
        self._together([("prepare", arrangement, shapes, kind, chunk, *share) for share in shares])

    def _forget(self, arrangement: Arrangement) -> None:
        if arrangement.way == "threads":
            del self._here[arrangement]
        else:
            self._together([("forget", arrangement)] * self._cores)

    def _parts(self, count: int) -> list[int]:
        """So many in nearly equal parts, one for each worker."""
        return [count // self._cores + (k < count % self._cores) for k in range(self._cores)]

    def _fastest(self, what: str, *arguments: Any) -> float:
        seconds = {arrangement: self._seconds(arrangement, what, *arguments) for arrangement in self._kept}
        best = min(seconds.values())
        for arrangement, found in seconds.items():
            self._won[arrangement] += found == best
            if found > HOPELESS * best and arrangement.way == "threads":
                self._kept.remove(arrangement)
                self._forget(arrangement)
        return best

    def _seconds(self, arrangement: Arrangement, what: str, *arguments: Any) -> float:
        start = time.perf_counter()
        if arrangement.way == "threads":
            getattr(self._here[arrangement], what)(*arguments)
        else:
            self._together([(what, arrangement, *arguments)] * self._cores)
        return time.perf_counter() - start

    def _together(self, each: list[tuple[Any, ...]]) -> None:
        """An order for each worker; returns when all are done."""
        for pipe, order in zip(self._pipes, each, strict=True):
            pipe.send(order)
        for pipe in self._pipes:
            pipe.recv()


def _serve(pipe: Connection) -> None:
    """The life of a worker of the floor."""
    torch.set_num_threads(1)
    shares: dict[Arrangement, Share] = {}
    for what, arrangement, *arguments in orders(pipe):
        if what == "prepare":
            shares[arrangement] = Share(*arguments)
        elif what == "forget":
            del shares[arrangement]
        else:
            getattr(shares[arrangement], what)(*arguments)
        pipe.send(None)
