"""Which backend: as the user says, or by a quick measurement."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import NamedTuple

import numpy as np
import torch

from descant.algorithm import Message
from descant.engine.backend import Backend, InProcess
from descant.engine.batches import LocalWork
from descant.engine.device import chunk_by_memory, require_device
from descant.engine.processes import Processes, Templates
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.engine.work import CPU, Job, Work, to_score
from descant.errors import UsageError
from descant.tree import leaves, take

# A chunk's matrix of parameters should stay near the processor: more clients per chunk save nothing
# once the arithmetic outweighs the overhead of an operation, and cost memory traffic.
CHUNK_BYTES = 8 * 2**20
PROBE_STEPS = 3  # batches per client in a measurement


class Measured(NamedTuple):
    """A way to run the clients, with its cost in seconds per client and batch."""

    backend: str
    chunk: int
    workers: int
    seconds: float


def templates(training: Training) -> Templates:
    """One row of everything that travels; also lets every job show the form of its result."""
    work, algorithm = training.work, training.work.algorithm
    facts = training.round_of(np.zeros(1, np.int64))
    message = algorithm.broadcast(training.server, facts)
    newcomer = algorithm.newcomer(training.server, facts)
    model = algorithm.global_model(training.server)
    state = training.store.template
    sent: dict[Job, Message] = {
        "local": message, "personalize": message, "adapt": newcomer,
        "score": to_score(message, model), "score_newcomer": to_score(newcomer, model),
    }
    if algorithm.opens():
        sent["opening"] = message
    for job, each in sent.items():
        work.rehearse(job, each, state)
    rows = {job: Message(each.shared, take(each.each, 0)) for job, each in sent.items()}
    return Templates(rows, state)


def fitted_chunk(work: Work) -> int:
    """How many clients to run together."""
    bytes_per_client = work.task.dim * torch.finfo(work.task.dtype).bits // 8
    return max(1, min(64, CHUNK_BYTES // bytes_per_client))


def make_backend(training: Training) -> tuple[Backend, Train, list[Measured]]:
    """The backend, the settings with every choice written down, and what was measured if it was."""
    train, work = training.train, training.work
    require_device(train)
    forms = templates(training)
    population = work.federation.population
    cohort = population if train.participation == "all" else train.cohort_size(population)
    workers = train.workers or os.cpu_count() or 1
    chunk = min(train.chunk or fitted_chunk(work), cohort)
    if work.device != CPU:
        chunk = 1 if train.backend == "loop" else min(train.chunk or chunk_by_memory(work), cohort)
        settled = dataclasses.replace(train, backend="loop" if chunk == 1 else "vectorised", chunk=chunk)
        return InProcess(work, chunk), settled, []
    measured: list[Measured] = []
    name = train.backend
    if name == "auto":
        measured = measure(training, forms, cohort, chunk, workers)
        best = min(measured, key=lambda m: m.seconds)
        name, chunk = best.backend, best.chunk  # type: ignore[assignment]
    elif name == "processes" and train.chunk is None:
        chunk = min(chunk, -(-cohort // workers))  # something for every worker
    if name == "ray":
        return *_on_ray(work, train, cohort, chunk, forms), measured
    if name == "loop":
        settled = dataclasses.replace(train, backend=name, chunk=None, workers=None)
        return InProcess(work, 1), settled, measured
    if name == "vectorised":
        settled = dataclasses.replace(train, backend=name, chunk=chunk, workers=None)
        return InProcess(work, chunk), settled, measured
    settled = dataclasses.replace(train, backend="processes", chunk=chunk, workers=workers)
    return Processes(work, chunk, workers, forms), settled, measured


def _on_ray(work: Work, train: Train, cohort: int, chunk: int, forms: Templates) -> tuple[Backend, Train]:
    try:
        from descant.engine.on_ray import OnRay  # an extra
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UsageError("train.backend is \"ray\", and Ray is not installed: "
                         "pip install 'descant[ray]'") from None
    backend = OnRay(work, train, cohort, chunk, forms)
    return backend, dataclasses.replace(train, chunk=backend.chunk, workers=backend.shards)


def measure(training: Training, forms: Templates, cohort: int, chunk: int, workers: int) -> list[Measured]:
    """Time a few batches of the first cohort in each way that can pay."""
    work, algorithm = training.work, training.work.algorithm
    probe = dataclasses.replace(work, local=LocalWork(steps=PROBE_STEPS))

    def seconds(backend: Backend, count: int) -> float:
        clients = np.arange(count)
        message = algorithm.broadcast(training.server, training.round_of(clients))
        states = training.store.read(clients)
        backend.run("local", clients, 0, message, states)  # the first call pays for caches and set-up
        start = time.perf_counter()
        backend.run("local", clients, 0, message, states)
        return (time.perf_counter() - start) / (len(clients) * PROBE_STEPS)

    found = [Measured("loop", 1, 1, seconds(InProcess(probe, 1), min(2, cohort)))]
    if chunk > 1 and _can_be_vectorised(training, probe):
        found.append(Measured("vectorised", chunk, 1, seconds(InProcess(probe, chunk), chunk)))
    best = min(found, key=lambda m: m.seconds)
    per_worker = min(best.chunk, -(-cohort // workers))
    if workers > 1 and cohort > 1:
        processes = Processes(probe, per_worker, workers, forms)
        try:
            found.append(Measured("processes", per_worker, workers,
                                  seconds(processes, min(cohort, workers * per_worker))))
        finally:
            processes.close()
    return found


def _can_be_vectorised(training: Training, probe: Work) -> bool:
    """Whether clients run together come out as they do alone, up to rounding.

    A module that mixes the samples of a batch in a way that `layers` does not know of, or draws random
    numbers of its own, is right in the loop only. Padding brings it to light, so the smallest, a middle
    and the largest client are tried.
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
    return all(torch.allclose(a, b, rtol=1e-2, atol=1e-4, equal_nan=True) for (_, a), (_, b) in pairs)
