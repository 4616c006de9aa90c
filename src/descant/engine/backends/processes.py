"""Chunks in worker processes, one thread each.

All processes share the samples (forked pages, or torch's shared memory). The data of a chunk pass through
shared buffers of its worker, the commands through a pipe. Uploads that are added up stay with the worker,
which hands over one total at the end of a round. On Linux workers are forked, so that modules and methods
defined in a notebook work, and buffers are anonymous memory: /dev/shm is small in containers, and overflowing
it kills the process.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor

from descant.core.algorithm import Message
from descant.core.sums import GRIDS, Binned, Total
from descant.core.tree import Tree, leaves, map_tree, nbytes, rebuild, take
from descant.core.units import size
from descant.engine.adding import Adder, Adding
from descant.engine.backends.base import SCORING, Backend
from descant.engine.backends.memory import free_memory, keep_freed_memory
from descant.engine.outcome import Outcome, gather
from descant.engine.work import Job, Work
from descant.errors import DescantError

_ALIGN = 64
_START = "fork" if sys.platform == "linux" else "spawn"


class Slot(NamedTuple):
    """A worker's shared buffers."""

    inputs: Tensor  # uint8
    outputs: Tensor  # uint8
    total: Tensor  # uint8


class WorkerRequest(NamedTuple):
    """What a worker is to do."""

    job: Job
    clients: np.ndarray
    number: int
    adding: Adding | None
    is_first: bool  # of a round: what was added up before is forgotten


TOTAL = "total"  # the request to hand over what was added up


class Templates(NamedTuple):
    """One row of every message, and of a client's state."""

    messages: dict[Job, Message]
    state: Tree


class NoWorkers(DescantError):
    """Worker processes cannot be started here."""


class Processes(Backend):
    def __init__(self, work: Work, chunk: int, workers: int, templates: Templates, scored: int | None = None
                 ) -> None:
        super().__init__(work, chunk, scored)
        keep_freed_memory()  # states pass through this process, too
        self._templates = templates
        _ = work.pool  # made here, it is one for all workers
        rows = max(self.chunk, self.scored)
        given = max(_room(m.shared, 1) + _room(m.each, rows) for m in templates.messages.values())
        given += _room(templates.state, rows)
        made = max(_room(template, self.scored if job.startswith("score") else chunk)
                   for job, template in work.templates.items())
        self._workers: list[Any] = []
        self._pipes: list[Connection] = []
        self._slots: list[Slot] = []
        total = _total_room(work, templates)
        needed, free = workers * (given + made + total), free_memory()
        if free is not None and needed > free:
            raise NoWorkers(f"their buffers would take {size(needed)}, and {size(free)} of memory are free")
        try:
            for _ in range(workers):
                self._add_worker(Slot(_shared(given), _shared(made), _shared(total)))
        except OSError as error:
            self.close()
            raise NoWorkers(error.strerror or str(error)) from None

    def _add_worker(self, slot: Slot) -> None:
        context: Any = torch.multiprocessing.get_context(_START)
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(self.work, self._templates, slot, theirs), daemon=True)
        self._pipes.append(ours)
        self._slots.append(slot)
        with _no_collection():
            process.start()
        self._workers.append(process)
        theirs.close()

    def run(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree,
            adding: Adding | None = None) -> Outcome:
        form = self.work.templates[job]
        if adding is not None:
            form = form._replace(upload=())
        values = map_tree(lambda t: t.new_empty(len(clients), *t.shape), form)
        whole = gather(self._arriving(job, clients, number, message, states, adding, form, values))
        everyone = len(whole.done) == len(clients)
        return whole._replace(values=values if everyone else take(values, torch.from_numpy(whole.done)))

    def _arriving(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree,
                  adding: Adding | None, form: Tree, values: Tree) -> Iterator[tuple[int, Outcome]]:
        """The outcomes of the chunks as they come, and then the workers' totals; the values are written into
        the rows of `values`."""
        waiting = deque(self._chunks(job, clients))
        idle = list(range(len(self._workers)))
        busy: dict[Connection, tuple[int, int]] = {}  # pipe -> (worker, first client)
        told: dict[int, int] = {}  # worker -> where what is sent to all ends in its buffer
        while waiting or busy:
            while waiting and idle:
                worker = idle.pop()
                start, part = waiting.popleft()
                inputs, is_first = self._slots[worker].inputs, worker not in told
                if is_first:  # once, however large it is
                    told[worker] = _pack(inputs, message.shared)
                _pack(inputs[told[worker] :], (take(message.each, part), take(states, part)))
                self._send(worker, WorkerRequest(job, clients[part], number,
                                                 None if adding is None else adding.of(part), is_first))
                busy[self._pipes[worker]] = (worker, start)
            for pipe in wait(list(busy)):
                worker, start = busy.pop(pipe)  # type: ignore[call-overload]
                outcome = self._receive(worker)
                if len(outcome.done):
                    made = _unpack(self._slots[worker].outputs, _rows(form, len(outcome.done)))
                    rows = torch.from_numpy(start + outcome.done)
                    map_tree(lambda whole, part, rows=rows: whole.index_copy_(0, rows, part), values, made)
                idle.append(worker)
                yield start, outcome
        if adding is not None:
            for worker in told:
                self._send(worker, TOTAL)
            for worker in told:
                total = _unpack_total(self._slots[worker].total, self._receive(worker))
                yield len(clients), Outcome(np.zeros(0, np.int64), (), {}, 0, total=total)

    def _chunk_of(self, job: Job, count: int) -> int:
        """Scoring is divided evenly, so that no worker is idle where few clients are scored."""
        most = super()._chunk_of(job, count)
        if job not in SCORING:
            return most
        parts = len(self._workers) * max(1, -(-count // (most * len(self._workers))))
        return max(1, -(-count // parts))

    def _send(self, worker: int, request: WorkerRequest | str) -> None:
        try:
            self._pipes[worker].send(request)
        except OSError:
            raise self._death(worker) from None

    def _receive(self, worker: int) -> Any:
        try:
            answer = self._pipes[worker].recv()
        except (EOFError, OSError):
            raise self._death(worker) from None
        if isinstance(answer, str):
            raise DescantError(f"a worker process failed: {answer}")
        return answer

    def _death(self, worker: int) -> DescantError:
        self._workers[worker].join(1)
        code = self._workers[worker].exitcode
        cause = "killed (out of memory?)" if code == -9 else f"exit code {code}"
        return DescantError(f"a worker process ended unexpectedly ({cause}); "
                            "resume the run with fewer workers or a smaller chunk")

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
        for process in self._workers:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers, self._pipes, self._slots = [], [], []


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No collection of garbage, neither here nor in a process that is started meanwhile."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _serve(work: Work, templates: Templates, slot: Slot, pipe: Connection) -> None:
    """The main loop of a worker."""
    # What the parent left to its collector is the parent's: here it could wait for ever for threads that a
    # fork does not have (a session of ONNX Runtime does).
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)
    keep_freed_memory()
    parent, adder = multiprocessing.parent_process(), Adder(work)
    assert parent is not None
    while True:
        # other workers hold copies of the pipe's far end: it may never close
        ready = wait([pipe, parent.sentinel])
        if pipe not in ready:
            return
        try:
            request = pipe.recv()
        except EOFError:
            return
        if request is None:
            return
        if request == TOTAL:
            pipe.send(_pack_total(slot.total, adder.total))
            continue
        if request.is_first:
            adder = Adder(work)
        pipe.send(_answer(adder, templates, slot, request))


def _answer(adder: Adder, templates: Templates, slot: Slot, request: WorkerRequest) -> Any:
    job, clients, number, adding, _ = request
    sent = templates.messages[job]
    form = (Message(sent.shared, _rows(sent.each, len(clients))), _rows(templates.state, len(clients)))
    try:
        own, states = _unpack(slot.inputs, form)
        outcome = adder.execute(job, clients, number, own, states, adding)
        if len(outcome.done):
            _pack(slot.outputs, outcome.values)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return outcome._replace(values=())


def _shared(length: int) -> Tensor:
    """A buffer that workers see too."""
    if _START == "fork":
        return torch.frombuffer(mmap.mmap(-1, length), dtype=torch.uint8)
    try:
        buffer: Tensor = torch.zeros(length, dtype=torch.uint8).share_memory_()
        return buffer
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from None


def _rows(template: Tree, count: int) -> Tree:
    """The form of that many rows."""
    return map_tree(lambda t: t.expand(count, *t.shape), template)


def _room(template: Tree, rows: int) -> int:
    """How many bytes rows of this form take in a buffer, alignment included."""
    return rows * nbytes(template) + _ALIGN * (1 + sum(1 for _ in leaves(template)))


def _pack(buffer: Tensor, tree: Tree) -> int:
    """Write the tensors of a tree into a buffer, end to end; returns where the next one would begin."""
    offset = 0
    for _, leaf in leaves(tree):
        size = leaf.numel() * leaf.element_size()
        if size:
            buffer[offset : offset + size].view(leaf.dtype).view(leaf.shape).copy_(leaf)
        offset = -(-(offset + size) // _ALIGN) * _ALIGN
    return offset


def _unpack(buffer: Tensor, form: Tree) -> Tree:
    """The tree of the given form in a buffer, as views."""
    found, offset = {}, 0
    for name, leaf in leaves(form):
        size = leaf.numel() * leaf.element_size()
        found[name] = buffer[offset : offset + size].view(leaf.dtype).view(leaf.shape)
        offset = -(-(offset + size) // _ALIGN) * _ALIGN
    return rebuild(form, found)


class PackedTotal(NamedTuple):
    """A total whose pieces lie in a buffer."""

    clients: int
    weight: Binned
    parts: dict[str, tuple[int, torch.Size]]  # the first grid of each, and the shape of its pieces


def _pack_total(buffer: Tensor, total: Total) -> PackedTotal:
    _pack(buffer, tuple(part.pieces for part in total.parts.values()))
    return PackedTotal(total.clients, total.weight,
                       {name: (part.top, part.pieces.shape) for name, part in total.parts.items()})


def _unpack_total(buffer: Tensor, packed: PackedTotal) -> Total:
    """The total, as views: good until its worker has another one."""
    pieces = _unpack(buffer, tuple(_pieces(shape) for _, shape in packed.parts.values()))
    return Total(packed.clients, packed.weight, {
        name: Binned(top, each) for (name, (top, _)), each in zip(packed.parts.items(), pieces, strict=True)})


def _total_room(work: Work, templates: Templates) -> int:
    """How many bytes a total takes in a buffer, if there is ever one."""
    if work.algorithm.needs_rows:
        return _ALIGN
    jobs: list[Job] = [job for job in ("local", "opening") if job in templates.messages]
    return max(_room(map_tree(lambda t: _pieces((GRIDS, *t.shape)), work.algorithm.contribution(
        templates.messages[job], work.templates[job].upload)), 1) for job in jobs)


def _pieces(shape: Sequence[int]) -> Tensor:
    """The form of pieces."""
    return torch.empty(shape, dtype=torch.float64, device="meta")
