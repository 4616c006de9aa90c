"""Chunks in Ray actors, on one machine or on a cluster.

Client i belongs to shard i mod `train.workers`, and only clients of one shard share a chunk: what is computed
together depends on the settings and the cohort, never on the machines. An actor is a process with one thread
that holds the rows of one shard, or of several if the cluster has fewer cores.

An actor that ends, alone or with its machine, is replaced. Until the new one has started, others take over
its shards, and unfinished chunks are repeated. Client states stay in the driver's store, so that none is
lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import ray
import torch
from ray.exceptions import ActorUnavailableError, ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError

from descant import __version__
from descant.core.algorithm import Message
from descant.core.tree import Tree, leaves, nbytes, rebuild, take
from descant.core.units import size, times
from descant.engine.adding import Adding, execute
from descant.engine.backends.base import Backend
from descant.engine.backends.processes import Templates
from descant.engine.backends.ray_session import SAFE, Session
from descant.engine.backends.shard import Rows, Shard
from descant.engine.outcome import Outcome, gather
from descant.engine.pool import Pools
from descant.engine.settings import Train
from descant.engine.work import Job, Work
from descant.errors import DescantError

AHEAD = 2  # chunks that an actor has at a time, so that it never waits for the driver
LIVES = 3  # actors that may be lost over one chunk
PATIENCE = 120.0  # seconds that actors may take to start: they import torch, in a minute if ten share a core
PULSE = 5.0  # seconds of one wait

Arrays: TypeAlias = dict[str, np.ndarray]  # a tree's tensors: Ray shares arrays and copies tensors
Ref: TypeAlias = Any  # of a future result


class Versions(NamedTuple):
    """Versions that must agree on all machines."""

    descant: str
    torch: str
    python: str

    @classmethod
    def here(cls) -> Versions:
        python = platform.python_version_tuple()[:2]
        return cls(__version__, torch.__version__.partition("+")[0], ".".join(python))

    def __str__(self) -> str:
        return f"descant {self.descant}, torch {self.torch}, Python {self.python}"


class Actor:
    """A process that holds some shards and runs chunks of their clients."""

    def __init__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
        torch.set_num_threads(1)
        self._shards: dict[int, Work] = {}

    def hello(self, path: list[str]) -> tuple[Versions, str]:
        """The versions here, and the machine. Modules are also found where the driver finds them."""
        sys.path.extend(place for place in path if place not in sys.path)
        return Versions.here(), platform.node()

    def begin(self, order: tuple[Work, Templates]) -> None:
        """Receive the work; its federation has no rows."""
        self._work, self._templates = order

    def hold(self, shard: int, rows: Rows) -> None:
        frame = self._work.federation
        assert isinstance(frame, Shard)
        self._shards[shard] = dataclasses.replace(self._work, federation=frame.holding(rows), pools=Pools())

    def drop(self, shard: int) -> None:
        del self._shards[shard]

    def run(self, shard: int, job: Job, clients: np.ndarray, number: int, shared: Arrays, each: Arrays,
            states: Arrays, adding: Adding | None) -> Outcome:
        """The outcome of a chunk, with arrays for its values."""
        form = self._templates.messages[job]
        own = Message(_tree(form.shared, shared), _tree(form.each, each))
        outcome = execute(self._shards[shard], job, clients, number, own,
                          _tree(self._templates.state, states), adding)
        return outcome._replace(values=_arrays(outcome.values))


@dataclasses.dataclass(eq=False)
class Worker:
    """An actor, as the driver knows it."""

    actor: Any
    greeting: Ref | None  # the answer to its `hello`, until that has come
    shards: set[int] = dataclasses.field(default_factory=set)
    since: float = dataclasses.field(default_factory=time.monotonic)
    chunks: int = 0  # that it has now
    gone: bool = False

    @property
    def is_starting(self) -> bool:
        return self.greeting is not None and not self.gone

    @property
    def is_up(self) -> bool:
        return self.greeting is None and not self.gone


@dataclasses.dataclass(eq=False)
class Chunk:
    """Clients of one shard, by their positions in the list of clients."""

    shard: int
    at: np.ndarray
    losses: int = 0  # actors that were lost over it


class OnRay(Backend):
    """Chunks in actors. `chunk` and `shards` are fitted to the cluster unless the settings fix them."""

    def __init__(self, work: Work, train: Train, cohort: int, chunk: int, templates: Templates) -> None:
        super().__init__(work, chunk)
        self._templates = templates
        self._workers: list[Worker] = []
        here = os.cpu_count() or 1
        self._session = Session(train.ray_address, min(train.workers or here, here))
        self._news = self._session.notes  # for the note of the next round
        try:
            cores = self._session.cores
            if not cores:
                raise DescantError("the Ray cluster has no cores: all its nodes were started with num_cpus=0")
            self.shards = min(train.workers or cores, work.federation.everyone)
            if train.chunk is None:
                self.chunk = self.scored = min(chunk, -(-cohort // self.shards))  # something for all
            if self.shards > cores:
                self._news.append(f"train.workers is {self.shards}, but Ray has only {times(cores, 'core')}: "
                                  "fewer workers do the work of all")
            if (needed := self._travelling(min(self.shards, cores))) > self._session.store:
                self._news.append(f"{size(needed)} travel at a time, and Ray's object store has only "
                                  f"{size(self._session.store)}: the rest goes through files, which is "
                                  "slower (ray start --object-store-memory=BYTES gives more)")
            with _failures_told():
                self._assemble(min(self.shards, cores))
        except BaseException:
            self.close()
            raise

    def run(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree,
            adding: Adding | None = None) -> Outcome:
        with _failures_told():
            whole = gather((0, outcome) for outcome in self._outcomes(job, clients, number, message, states,
                                                                       adding))
        order = np.argsort(whole.done)
        notes = [*self._news, *([] if whole.note is None else [whole.note])]
        if job in ("local", "opening"):  # the notes of other jobs are not written down
            self._news = []
        return whole._replace(done=whole.done[order], values=take(whole.values, torch.from_numpy(order)),
                              note="; ".join(notes) or None)

    def close(self) -> None:
        for worker in self._workers:
            with contextlib.suppress(Exception):
                ray.kill(worker.actor)
        self._workers = []
        self._session.close()

    def _outcomes(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree,
                  adding: Adding | None) -> Iterator[Outcome]:
        """The outcomes of all chunks as they come, with positions in the list of clients."""
        self._workers = [self._started() if worker.gone else worker for worker in self._workers]
        waiting = {shard: deque(chunks) for shard, chunks in self._dealt(job, clients)}
        busy: dict[Ref, tuple[Worker, Chunk]] = {}
        shared, form = ray.put(_arrays(message.shared)), self.work.templates[job]

        def send(worker: Worker, chunk: Chunk) -> None:
            rows = torch.from_numpy(chunk.at)
            ref = worker.actor.run.remote(chunk.shard, job, clients[chunk.at], number, shared,
                                        _arrays(take(message.each, rows)), _arrays(take(states, rows)),
                                        None if adding is None else adding.of(chunk.at))
            busy[ref] = (worker, chunk)
            worker.chunks += 1

        def receive(ref: Ref) -> Outcome | None:
            worker, chunk = busy.pop(ref)
            worker.chunks -= 1
            try:
                outcome: Outcome = self._get(ref)
            except RayError as error:
                self._lose(worker, chunk, error)
                waiting[chunk.shard].appendleft(chunk)
                return None
            made = form if adding is None else form._replace(upload=())
            return outcome._replace(
                done=chunk.at[outcome.done], values=_tree(made, outcome.values) if len(outcome.done) else (),
                failed={int(chunk.at[k]): why for k, why in outcome.failed.items()},
                wrong=tuple((int(chunk.at[k]), why) for k, why in outcome.wrong))

        while busy or any(waiting.values()):
            for shard, chunks in waiting.items():
                while chunks and (worker := self._worker_for(shard)) is not None:
                    if shard in worker.shards or self._assign(shard, worker, chunks[0]):
                        send(worker, chunks.popleft())
            for ref in self._awaited(list(busy)):
                if (outcome := receive(ref)) is not None:
                    yield outcome

    def _dealt(self, job: Job, clients: np.ndarray) -> Iterator[tuple[int, list[Chunk]]]:
        """The chunks of every shard."""
        for shard in range(self.shards):
            at = np.flatnonzero(clients % self.shards == shard)
            yield shard, [Chunk(shard, at[part]) for _, part in self._chunks(job, at)]

    def _travelling(self, actors: int) -> int:
        """The most bytes that are sent at a time: a shard's rows, or a round's chunks."""
        messages, state = self._templates
        shared, each = (max(nbytes(getattr(message, part)) for message in messages.values())
                        for part in ("shared", "each"))
        row = each + nbytes(state) + max(map(nbytes, self.work.templates.values()))
        pool = nbytes((self.work.federation.x, self.work.federation.y))
        return max(pool // self.shards, shared + actors * AHEAD * self.chunk * row)

    # -- workers -----------------------------------------------------------------------------------

    def _assemble(self, count: int) -> None:
        """Start the actors; some may find a core later, or never."""
        self._actors: Any = ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(Actor)
        frame = dataclasses.replace(self.work, federation=Shard.frame(self.work.federation), pools=Pools())
        self._order = ray.put((frame, self._templates))
        self._workers = [self._started() for _ in range(count)]
        deadline = time.monotonic() + PATIENCE
        while any(worker.is_starting for worker in self._workers) and time.monotonic() < deadline:
            self._awaited([])
        up = sum(worker.is_up for worker in self._workers)
        if not up:
            raise self._no_workers()
        if up < count:
            self._news.append(f"only {up} of {count} workers started in time; they do all the work")

    def _started(self) -> Worker:
        actor = self._actors.remote()
        return Worker(actor, actor.hello.remote(sys.path))

    def _admit(self, worker: Worker) -> None:
        """Check an actor that has started, and give it the work."""
        try:
            versions, machine = self._get(worker.greeting)
            if versions != Versions.here():
                raise DescantError(f"the machine {machine} of the Ray cluster has {versions}, and "
                                   f"this one {Versions.here()}: install the same on all")
            self._get(worker.actor.begin.remote(self._order))
        except RayError as error:
            self._give_up(worker, error)
        worker.greeting = None

    def _worker_for(self, shard: int) -> Worker | None:
        """The worker of a shard: its own, or another until that has started; None while they are busy."""
        worker = self._workers[shard % len(self._workers)]
        if not worker.is_up:
            up = [worker for worker in self._workers if worker.is_up]
            worker = min(up, key=lambda s: (shard not in s.shards, len(s.shards)), default=worker)
        return worker if worker.is_up and worker.chunks < AHEAD else None

    def _assign(self, shard: int, worker: Worker, chunk: Chunk) -> bool:
        """Give a shard's rows to a worker; whether it took them."""
        federation = self.work.federation
        rows = Rows.of(federation, np.arange(shard, federation.everyone, self.shards))
        try:
            self._get(worker.actor.hold.remote(shard, rows))
        except RayError as error:
            self._lose(worker, chunk, error)
            return False
        for other in self._workers:
            if other.is_up and shard in other.shards:
                other.shards.remove(shard)
                other.actor.drop.remote(shard)  # when it has done the chunks that it has
        worker.shards.add(shard)
        return True

    def _lose(self, worker: Worker, chunk: Chunk, error: RayError) -> None:
        """Replace a worker that was lost over a chunk."""
        if not worker.gone:
            self._give_up(worker, error)
            self._workers[self._workers.index(worker)] = self._started()
            self._news.append(f"a worker was lost ({_cause(error)}): what it had not finished was done again")
        chunk.losses += 1
        if chunk.losses == LIVES:
            raise DescantError(f"{LIVES} workers were lost over the same chunk of clients (the last was "
                               f"{_cause(error)}); all committed rounds are saved. If the workers ran out "
                               "of memory, start a new run with a smaller train.chunk")

    def _give_up(self, worker: Worker, error: RayError) -> None:
        """Give up a worker that has ended or cannot be reached; raise any other error."""
        if isinstance(error, RayTaskError | ObjectStoreFullError | OutOfDiskError) or _missing(error):
            raise error
        worker.gone = True
        with contextlib.suppress(Exception):
            ray.kill(worker.actor)

    def _no_workers(self) -> DescantError:
        return DescantError("no worker could be started on the Ray cluster in time: its cores may be in use "
                            f"by others, or its machines gone (see `ray status`); {SAFE}")

    # -- waiting -----------------------------------------------------------------------------------

    def _awaited(self, busy: list[Ref]) -> list[Ref]:
        """The finished chunks, if any; workers that have started meanwhile are admitted."""
        starting = {worker.greeting: worker for worker in self._workers if worker.is_starting}
        idle = not busy and not any(worker.is_up for worker in self._workers)
        if idle and all(time.monotonic() - worker.since > PATIENCE for worker in starting.values()):
            raise self._no_workers()
        ready = self._ready([*busy, *starting])
        for ref in ready:
            if ref in starting:
                self._admit(starting[ref])
        return [ref for ref in ready if ref not in starting]

    def _get(self, ref: Ref) -> Any:
        while not self._ready([ref]):
            pass
        return ray.get(ref)

    def _ready(self, refs: list[Ref]) -> list[Ref]:
        """The first that is ready, or none after some seconds."""
        ready, _ = ray.wait(refs, timeout=PULSE)
        self._session.check()
        return list(ready)


def _arrays(tree: Tree) -> Arrays:
    return {name: tensor.numpy() for name, tensor in leaves(tree)}


def _tree(template: Tree, arrays: Arrays) -> Tree:
    """The tree of these arrays, copied: Ray's are read-only, and alignment shows in the last bit of
    products."""
    return rebuild(template, {name: torch.tensor(array) for name, array in arrays.items()})


@contextlib.contextmanager
def _failures_told() -> Iterator[None]:
    """Turn Ray's errors into DescantErrors."""
    try:
        yield
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise DescantError("Ray's object store is full, and so is the disk that it falls back to: make room "
                           "in Ray's directory (/tmp/ray), or start Ray with a larger --object-store-memory; "
                           "all committed rounds are saved") from error
    except RayError as error:
        if module := _missing(error):
            raise DescantError(
                f"a machine of the Ray cluster has no module {module!r}: install the same packages on all "
                f"(descant[ray] {__version__}), and put modules of your own where all find them; what is "
                "defined in the notebook or script itself travels with it") from error
        raise DescantError(f"a worker failed: {_last_line(error)}; {SAFE}") from error


def _missing(error: RayError) -> str | None:
    """The module that a machine lacks, if that is what is wrong."""
    found = re.search(r"No module named '([\w.]+)'|import of ([\w.]+) halted", str(error))
    return found and (found[1] or found[2])


def _cause(error: RayError) -> str:
    """Why a worker was lost, as far as Ray knows."""
    if isinstance(error, ActorUnavailableError):
        return "out of reach"
    if "node has died" in str(error):
        return "gone with its machine"
    return "killed (out of memory)" if "low on memory" in str(error) else "killed or crashed"


def _last_line(error: RayError) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
