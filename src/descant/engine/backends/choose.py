"""Which backend: as the settings say, or by a quick measurement."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.algorithm import Message
from descant.core.threads import cores
from descant.core.tree import leaves, take
from descant.core.units import size, times
from descant.engine.backends.base import Backend, InProcess
from descant.engine.backends.device import chunk_by_memory, require_device
from descant.engine.backends.footprint import USED, bytes_per_client
from descant.engine.backends.memory import free_memory
from descant.engine.backends.processes import NoWorkers, Processes, Templates
from descant.engine.batches import LocalWork
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.engine.work import CPU, Job, Work, to_score
from descant.errors import UsageError

# A chunk's parameters should stay in the cache: more clients save nothing once arithmetic outweighs overhead.
CHUNK_BYTES, CHUNK = 8 * 2**20, 64
# Of small models on small samples overhead is most of a step: more clients, if the nearest cache holds them
# with their batches.
SMALL_BYTES, SMALL_CHUNK = 2**20, 256
SCORED_BYTES = 128 * 2**20  # of the models and rows that are scored together
PROBE_STEPS = 3  # steps of a client in a measurement, at least
DIVERGING = 1e3  # a number that no model reaches which is on its way to a solution
PROBES, PROBED = 6, 0.2  # the best of so many counts; fewer if they take longer than this many seconds each


class Timing(NamedTuple):
    """The cost of a way to run clients, in seconds per client and batch."""

    backend: str
    chunk: int
    workers: int
    seconds: float


def templates(training: Training) -> Templates:
    """One row of every message and state; also fills in the form of every job's result."""
    work, algorithm = training.work, training.work.algorithm
    facts = training.round_of(np.zeros(1, np.int64))
    message = algorithm.broadcast(training.server, facts)
    participant = algorithm.participant(training.server, facts)
    newcomer = algorithm.newcomer(training.server, facts)
    model = algorithm.global_model(training.server)
    state = training.store.template
    sent: dict[Job, Message] = {
        "local": message, "personalize": participant, "adapt": newcomer,
        "score": to_score(participant, model), "score_newcomer": to_score(newcomer, model),
    }
    if algorithm.opens():
        sent["opening"] = message
    for job, each in sent.items():
        work.rehearse(job, each, state)
    rows = {job: Message(each.shared, take(each.each, 0)) for job, each in sent.items()}
    return Templates(rows, state)


def fitted_chunk(work: Work) -> int:
    """How many clients to run together."""
    size = work.task.dtype.itemsize
    rows = int(work.federation.train.sizes.max()) if work.batch == "full" else work.batch
    own, batch = size * work.task.dim, size * rows * work.federation.x[:1].numel()
    return max(1, min(CHUNK, CHUNK_BYTES // own), min(SMALL_CHUNK, SMALL_BYTES // (own + batch)))


def make_backend(training: Training) -> tuple[Backend, Train, list[Timing]]:
    """The backend, with notes where it differs from the settings; the settings with every choice filled in;
    and the timings, if any."""
    train, work = training.train, training.work
    require_device(train)
    forms = templates(training)
    population, cohort = work.federation.population, training.most_trained()
    workers = train.workers or cores()
    chunk = min(train.chunk or fitted_chunk(work), cohort)
    if work.device != CPU:
        chunk = 1 if train.backend == "loop" else min(train.chunk or chunk_by_memory(work), cohort)
        settled = dataclasses.replace(train, backend="loop" if chunk == 1 else "vectorised", chunk=chunk)
        return InProcess(work, chunk), settled, []
    if train.backend == "ray":
        return *_on_ray(work, train, cohort, chunk, forms), []
    measured: list[Timing] = []
    notes: list[str] = []
    name: str = train.backend
    if name != "loop" and chunk > 1 and (why := work.task.alone) is not None:
        chunk = 1
        if name == "vectorised":
            notes.append(f"the clients are run one by one: {why}")
    if name == "processes" and train.chunk is None:
        chunk = min(chunk, -(-cohort // workers))  # something for every worker
    if name != "loop":
        chunk = _that_fits(work, chunk, cohort, 1 if name == "vectorised" else workers, notes)
    if name == "auto":
        measured = measure(training, forms, cohort, chunk, workers, notes)
        best = min(measured, key=lambda m: m.seconds)
        name, chunk = best.backend, best.chunk
    scored = _scored(work, chunk, population, workers if name == "processes" else 1)
    backend, settled = _made(work, train, name, chunk, scored, workers, forms, notes)
    backend.notes += notes
    return backend, settled, measured


def _scored(work: Work, chunk: int, population: int, workers: int) -> int:
    """How many clients to score together: many, since a pass over a chain takes a bounded number of rows. The
    same for a run that is resumed, whose chunk has been settled."""
    if chunk == 1 or work.task.chunk_gradients is None:
        return chunk
    rows = min(work.task.rows_at_once, int(work.federation.test.sizes.max(initial=1)))
    each = work.task.dtype.itemsize * (rows * work.federation.x[:1].numel() + work.task.dim)
    return min(max(fitted_chunk(work), min(SMALL_CHUNK, SCORED_BYTES // each)), -(-population // workers))


def _made(work: Work, train: Train, name: str, chunk: int, scored: int, workers: int, forms: Templates,
          notes: list[str]) -> tuple[Backend, Train]:
    """The backend of that name; if there can be no workers, one without."""
    if name == "processes":
        if workers > (available := cores()):
            notes.append(f"{workers} workers share {times(available, 'core')}: expect no speed-up")
        try:
            backend = Processes(work, chunk, workers, forms, scored)
        except NoWorkers as error:
            notes.append(f"there can be no worker processes ({error}): the clients are run in this one")
            name = "vectorised" if chunk > 1 else "loop"
        else:
            return backend, dataclasses.replace(train, backend="processes", chunk=chunk, workers=workers)
    if name == "vectorised":
        settled = dataclasses.replace(train, backend="vectorised", chunk=chunk, workers=None)
        return InProcess(work, chunk, scored), settled
    return InProcess(work, 1), dataclasses.replace(train, backend="loop", chunk=None, workers=None)


def _that_fits(work: Work, chunk: int, cohort: int, workers: int, notes: list[str]) -> int:
    """The chunk, or a smaller one if the free memory does not hold so many clients."""
    free, at_once = free_memory(), min(cohort, workers * chunk)
    if free is None or chunk == 1 or at_once * (each := bytes_per_client(work)) <= USED * free:
        return chunk
    fits = max(1, int(USED * free) // each // workers)
    notes.append(f"chunks of {times(chunk, 'client')} would take about {size(at_once * each)} of memory, and "
                 f"{size(free)} are free: the chunk is {fits}")
    return fits


def _on_ray(work: Work, train: Train, cohort: int, chunk: int, forms: Templates) -> tuple[Backend, Train]:
    try:
        from descant.engine.backends.ray import OnRay  # an extra
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UsageError("train.backend is \"ray\", and Ray is not installed: "
                         "pip install 'descant[ray]'") from None
    backend = OnRay(work, train, cohort, chunk, forms)
    return backend, dataclasses.replace(train, chunk=backend.chunk, workers=backend.shards)


def measure(training: Training, forms: Templates, cohort: int, chunk: int, workers: int, notes: list[str]
            ) -> list[Timing]:
    """Time a few batches of the first cohort in each way that can pay."""
    work, algorithm = training.work, training.work.algorithm

    def run(backend: Backend, count: int) -> float:
        """Seconds per client and batch."""
        assert backend.work.local.steps is not None
        clients = np.arange(count)
        message = algorithm.broadcast(training.server, training.round_of(clients))
        states, adding = training.store.read(clients), training.adding(clients, clients)
        start = time.perf_counter()
        backend.run("local", clients, 0, message, states, adding)
        return (time.perf_counter() - start) / (count * backend.work.local.steps)

    few, pair = dataclasses.replace(work, local=LocalWork(steps=PROBE_STEPS)), min(2, cohort)
    [cost] = _best_of_turns([partial(run, InProcess(few, 1), pair)])
    steps = _probe_steps(work, cost * min(cohort, workers * chunk))
    probe = dataclasses.replace(work, local=LocalWork(steps=steps))
    ways = {("loop", 1, 1): partial(run, InProcess(probe, 1), pair)}
    if chunk > 1 and _can_be_vectorised(training, few):
        ways["vectorised", chunk, 1] = partial(run, InProcess(probe, chunk), chunk)
    found = [Timing(*way, cost) for way, cost in zip(ways, _best_of_turns([*ways.values()]), strict=True)]
    best = min(found, key=lambda m: m.seconds)
    per_worker = min(best.chunk, -(-cohort // workers))
    if workers > 1 and cohort > 1:
        try:
            with closing(Processes(probe, per_worker, workers, forms)) as processes:
                here, there = _best_of_turns([ways[best[:3]], partial(
                    run, processes, min(cohort, workers * per_worker))])
            found = [m if m is not best else m._replace(seconds=min(here, m.seconds)) for m in found]
            found.append(Timing("processes", per_worker, workers, there))
        except NoWorkers as error:
            notes.append(f"there can be no worker processes ({error})")
    return found


def _best_of_turns(ways: Sequence[Callable[[], float]]) -> list[float]:
    """What each way costs at best, after a turn to warm up. They take turns, so that other load on the
    machine, which only adds time, meets all alike."""
    for way in ways:
        way()
    best, began = [math.inf] * len(ways), time.perf_counter()
    for _ in range(PROBES):
        best = [min(cost, way()) for cost, way in zip(best, ways, strict=True)]
        if time.perf_counter() - began > PROBED * len(ways):
            break
    return best


def _probe_steps(work: Work, cost: float) -> int:
    """How many steps are measured, if one takes so many seconds at most: as many as a client of middle size
    takes in a round, because what a round costs besides its steps decides for small models; fewer if that
    takes long."""
    size = int(np.median(work.federation.train.sizes))
    per_step = work.algorithm.batches_per_step()
    usual = len(work.local.lengths(size, size if work.batch == "full" else work.batch, per_step)) // per_step
    return max(PROBE_STEPS, min(usual, int(PROBED / cost)))


def _can_be_vectorised(training: Training, probe: Work) -> bool:
    """Whether clients get the same result together as alone, up to rounding.

    `task.alone` tested the module on a few samples; this tests the method on real batches. Most errors show
    in padding, so the smallest, a middle and the largest client are compared.
    """
    by_size = np.argsort(probe.federation.train.sizes[: probe.federation.population], kind="stable")
    clients = np.unique(by_size[[0, len(by_size) // 2, -1]])
    message = probe.algorithm.broadcast(training.server, training.round_of(clients))
    states = training.store.read(clients)
    alone = InProcess(probe, 1).run("local", clients, 0, message, states)
    together = InProcess(probe, len(clients)).run("local", clients, 0, message, states)
    if together.note is not None or not np.array_equal(alone.done, together.done):
        return False
    pairs = zip(leaves(alone.values), leaves(together.values), strict=True)
    return all(_agree(*each) for (_, a), (_, b) in pairs for each in zip(a, b, strict=True))


def _agree(alone: Tensor, together: Tensor) -> bool:
    """Whether a client's results are the same up to rounding. Where steps are too large for the problem they
    grow without bound, and rounding with them: then by their largest number."""
    alone, together = alone.double(), together.double()
    if not bool(alone.isfinite().all()):
        return not bool(together.isfinite().all())
    size = float(alone.abs().amax()) if alone.numel() else 0.0
    return torch.allclose(alone, together, rtol=1e-2, atol=1e-2 * size if size > DIVERGING else 1e-4)
