"""Chunks in Ray actors, on one machine or on a cluster.

The clients are dealt out to shards, client i to shard i mod `train.workers`, and only clients of one
shard share a chunk: what is computed together depends on the settings and the cohort alone, never on
which machines there are. An actor is a process with one thread that holds the rows of its shards. There
is one for every shard as far as the cluster has the cores for it; otherwise some hold several.

An actor that ends, alone or with its machine, is replaced. Until the new one has started, others take
over its shards, and only chunks that were not finished are done again. The clients' states stay in the
driver's store and travel with each call, so that nothing is lost with an actor.
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
from descant.engine.backends.base import Backend
from descant.engine.backends.processes import Templates
from descant.engine.backends.ray_session import SAFE, Session
from descant.engine.backends.shard import Rows, Shard
from descant.engine.settings import Train
from descant.engine.work import Job, Outcome, Work, gather
from descant.errors import DescantError

AHEAD = 2  # chunks that an actor has at a time, so that it need not wait for the driver between them
LIVES = 3  # actors that may end over one chunk
PATIENCE = 60.0  # seconds that actors may take to start
PULSE = 5.0  # seconds to wait for anything at a time

Arrays: TypeAlias = dict[str, np.ndarray]  # a tree's tensors; Ray shares arrays, where it would copy tensors
Ref: TypeAlias = Any  # a result that is to come


class Versions(NamedTuple):
    """What must be the same everywhere for the results to be the same."""

    descant: str
    torch: str
    python: str

    @classmethod
    def here(cls) -> Versions:
        python = platform.python_version_tuple()[:2]
        return cls(__version__, torch.__version__.partition("+")[0], ".".join(python))

    def told(self) -> str:
        return f"descant {self.descant}, torch {self.torch}, Python {self.python}"


class Actor:
    """A process that holds some shards and runs chunks of their clients."""

    def __init__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
        torch.set_num_threads(1)
        self._shards: dict[int, Work] = {}

    def hello(self, path: list[str]) -> tuple[Versions, str]:
        """What runs here, and on which machine. Modules are also looked for where the driver finds them."""
        sys.path.extend(place for place in path if place not in sys.path)
        return Versions.here(), platform.node()

    def begin(self, order: tuple[Work, Templates]) -> None:
        """Learn what is to be done; the federation is a frame without rows."""
        self._work, self._templates = order

    def hold(self, shard: int, rows: Rows) -> None:
        frame = self._work.federation
        assert isinstance(frame, Shard)
        self._shards[shard] = dataclasses.replace(self._work, federation=frame.holding(rows))

    def drop(self, shard: int) -> None:
        del self._shards[shard]

    def run(self, shard: int, job: Job, clients: np.ndarray, number: int, shared: Arrays, each: Arrays,
            states: Arrays) -> Outcome:
        """The outcome of a chunk, with arrays for its values."""
        form = self._templates.messages[job]
        own = Message(_tree(form.shared, shared), _tree(form.each, each))
        outcome = self._shards[shard].execute(job, clients, number, own,
                                              _tree(self._templates.state, states))
        return outcome._replace(values=_arrays(outcome.values))


@dataclasses.dataclass(eq=False)
class Seat:
    """An actor as the driver sees it."""

    actor: Any
    greeting: Ref | None  # the answer to its `hello`, as long as that has not come
    shards: set[int] = dataclasses.field(default_factory=set)
    since: float = dataclasses.field(default_factory=time.monotonic)
    chunks: int = 0  # that it has at present
    gone: bool = False

    @property
    def is_starting(self) -> bool:
        return self.greeting is not None and not self.gone

    @property
    def is_up(self) -> bool:
        return self.greeting is None and not self.gone


@dataclasses.dataclass(eq=False)
class Chunk:
    """Clients of one shard, by their positions in the list of those who are asked."""

    shard: int
    at: np.ndarray
    losses: int = 0  # actors that ended over it


class OnRay(Backend):
    """Chunks in actors. Where the settings leave `chunk` or `workers` open they are fitted to the cluster;
    what they came to is `chunk` and `shards`."""

    def __init__(self, work: Work, train: Train, cohort: int, chunk: int, templates: Templates) -> None:
        super().__init__(work, chunk)
        self._templates = templates
        self._seats: list[Seat] = []
        here = os.cpu_count() or 1
        self._session = Session(train.ray_address, min(train.workers or here, here))
        self._news = self._session.notes  # for the note of the next round
        try:
            cores = self._session.cores
            if not cores:
                raise DescantError("the Ray cluster has no cores: all its nodes were started with num_cpus=0")
            self.shards = min(train.workers or cores, work.federation.everyone)
            if train.chunk is None:
                self.chunk = min(chunk, -(-cohort // self.shards))  # something for every actor
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

    def run(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree) -> Outcome:
        with _failures_told():
            outcomes = self._outcomes(job, clients, number, message, states)
        whole = gather([(0, outcome) for outcome in outcomes])
        order = np.argsort(whole.done)
        notes = [*self._news, *([] if whole.note is None else [whole.note])]
        if job in ("local", "opening"):  # the notes of other jobs are not written down
            self._news = []
        return whole._replace(done=whole.done[order], values=take(whole.values, torch.from_numpy(order)),
                              note="; ".join(notes) or None)

    def close(self) -> None:
        for seat in self._seats:
            with contextlib.suppress(Exception):
                ray.kill(seat.actor)
        self._seats = []
        self._session.close()

    def _outcomes(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree
                  ) -> list[Outcome]:
        """The outcomes of all chunks, with positions in the list of clients."""
        self._seats = [self._hired() if seat.gone else seat for seat in self._seats]
        waiting = {shard: deque(chunks) for shard, chunks in self._dealt(clients)}
        busy: dict[Ref, tuple[Seat, Chunk]] = {}
        shared = ray.put(_arrays(message.shared))

        def send(seat: Seat, chunk: Chunk) -> None:
            rows = torch.from_numpy(chunk.at)
            ref = seat.actor.run.remote(chunk.shard, job, clients[chunk.at], number, shared,
                                        _arrays(take(message.each, rows)), _arrays(take(states, rows)))
            busy[ref] = (seat, chunk)
            seat.chunks += 1

        def receive(ref: Ref) -> Outcome | None:
            seat, chunk = busy.pop(ref)
            seat.chunks -= 1
            try:
                outcome: Outcome = self._get(ref)
            except RayError as error:
                self._lose(seat, chunk, error)
                waiting[chunk.shard].appendleft(chunk)
                return None
            values = _tree(self.work.templates[job], outcome.values) if len(outcome.done) else ()
            failed = {int(chunk.at[k]): why for k, why in outcome.failed.items()}
            return outcome._replace(done=chunk.at[outcome.done], values=values, failed=failed)

        outcomes = []
        while busy or any(waiting.values()):
            for shard, chunks in waiting.items():
                while chunks and (seat := self._seat_for(shard)) is not None:
                    if shard in seat.shards or self._gives(shard, seat, chunks[0]):
                        send(seat, chunks.popleft())
            outcomes += [receive(ref) for ref in self._awaited(list(busy))]
        return [outcome for outcome in outcomes if outcome is not None]

    def _dealt(self, clients: np.ndarray) -> Iterator[tuple[int, list[Chunk]]]:
        """The chunks of every shard."""
        for shard in range(self.shards):
            at = np.flatnonzero(clients % self.shards == shard)
            yield shard, [Chunk(shard, at[part]) for _, part in self._chunks(at)]

    def _travelling(self, actors: int) -> int:
        """How many bytes are on their way at a time, at most: a shard's rows, or a round's chunks."""
        messages, state = self._templates
        shared, each = (max(nbytes(getattr(message, part)) for message in messages.values())
                        for part in ("shared", "each"))
        row = each + nbytes(state) + max(map(nbytes, self.work.templates.values()))
        pool = nbytes((self.work.federation.x, self.work.federation.y))
        return max(pool // self.shards, shared + actors * AHEAD * self.chunk * row)

    # -- who does it -------------------------------------------------------------------------------

    def _assemble(self, count: int) -> None:
        """Start the actors. Whoever finds no core in time comes later, or never."""
        self._actors: Any = ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(Actor)
        frame = dataclasses.replace(self.work, federation=Shard.frame(self.work.federation))
        self._order = ray.put((frame, self._templates))
        self._seats = [self._hired() for _ in range(count)]
        deadline = time.monotonic() + PATIENCE
        while any(seat.is_starting for seat in self._seats) and time.monotonic() < deadline:
            self._awaited([])
        up = sum(seat.is_up for seat in self._seats)
        if not up:
            raise self._nobody()
        if up < count:
            self._news.append(f"only {up} of {count} workers could be started in time; they do all the work")

    def _hired(self) -> Seat:
        actor = self._actors.remote()
        return Seat(actor, actor.hello.remote(sys.path))

    def _welcome(self, seat: Seat) -> None:
        """Put an actor that has started to work."""
        try:
            versions, machine = self._get(seat.greeting)
            if versions != Versions.here():
                raise DescantError(f"the machine {machine} of the Ray cluster has {versions.told()}, and "
                                   f"this one {Versions.here().told()}: install the same on all")
            self._get(seat.actor.begin.remote(self._order))
        except RayError as error:
            self._dismiss(seat, error)
        seat.greeting = None

    def _seat_for(self, shard: int) -> Seat | None:
        """Who works for a shard: its own actor, or another as long as that is not there; None while they have
        enough to do."""
        seat = self._seats[shard % len(self._seats)]
        if not seat.is_up:
            up = [seat for seat in self._seats if seat.is_up]
            seat = min(up, key=lambda s: (shard not in s.shards, len(s.shards)), default=seat)
        return seat if seat.is_up and seat.chunks < AHEAD else None

    def _gives(self, shard: int, seat: Seat, chunk: Chunk) -> bool:
        """Give a shard's rows to an actor; whether that is there to take them."""
        federation = self.work.federation
        rows = Rows.of(federation, np.arange(shard, federation.everyone, self.shards))
        try:
            self._get(seat.actor.hold.remote(shard, rows))
        except RayError as error:
            self._lose(seat, chunk, error)
            return False
        for other in self._seats:
            if other.is_up and shard in other.shards:
                other.shards.remove(shard)
                other.actor.drop.remote(shard)  # when it has done the chunks that it has
        seat.shards.add(shard)
        return True

    def _lose(self, seat: Seat, chunk: Chunk, error: RayError) -> None:
        """Replace an actor that has ended over a chunk."""
        if not seat.gone:
            self._dismiss(seat, error)
            self._seats[self._seats.index(seat)] = self._hired()
            self._news.append(f"a worker was lost ({_cause(error)}): what it had not finished was done again")
        chunk.losses += 1
        if chunk.losses == LIVES:
            raise DescantError(f"{LIVES} workers were lost over the same chunk of clients (the last was "
                               f"{_cause(error)}); all rounds that were committed are safe. If they need "
                               "more memory than there is, a new run with a smaller train.chunk needs less")

    def _dismiss(self, seat: Seat, error: RayError) -> None:
        """Give up an actor that has ended or cannot be reached. Any other error is the user's to know."""
        if isinstance(error, RayTaskError | ObjectStoreFullError | OutOfDiskError) or _missing(error):
            raise error
        seat.gone = True
        with contextlib.suppress(Exception):
            ray.kill(seat.actor)

    def _nobody(self) -> DescantError:
        return DescantError("no worker could be started on the Ray cluster in time: its cores may be in use "
                            f"by others, or its machines gone (see `ray status`); {SAFE}")

    # -- waiting -----------------------------------------------------------------------------------

    def _awaited(self, busy: list[Ref]) -> list[Ref]:
        """Those of the chunks that have come to an end, if any; new actors are welcomed meanwhile."""
        starting = {seat.greeting: seat for seat in self._seats if seat.is_starting}
        idle = not busy and not any(seat.is_up for seat in self._seats)
        if idle and all(time.monotonic() - seat.since > PATIENCE for seat in starting.values()):
            raise self._nobody()
        ready = self._ready([*busy, *starting])
        for ref in ready:
            if ref in starting:
                self._welcome(starting[ref])
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
    """The tree of these arrays. They are copied: what Ray shares cannot be written to, and how it lies in
    memory would show in the last bit of a product."""
    return rebuild(template, {name: torch.tensor(array) for name, array in arrays.items()})


@contextlib.contextmanager
def _failures_told() -> Iterator[None]:
    """What Ray raises, in our words."""
    try:
        yield
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise DescantError("Ray's object store is full, and so is the disk that it falls back to: make room "
                           "in Ray's directory (/tmp/ray), or start Ray with a larger --object-store-memory; "
                           "all rounds that were committed are safe") from error
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
    return "killed for want of memory" if "low on memory" in str(error) else "killed or crashed"


def _last_line(error: RayError) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
