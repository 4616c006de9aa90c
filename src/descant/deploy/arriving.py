"""The uploads of a round on their way into a sum, so that a server's memory does not grow with the cohort.

Where nothing depends on the lengths of all, a few uploads at a time are added up as they arrive. Where they
are shortened to a median, they wait for the last one: beyond `MEMORY` in a file without a name in the run's
directory, which ends with the round or with the process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import TypeAlias

import numpy as np
import torch

from descant.core.sums import Total
from descant.core.tree import Tree, leaves, nbytes, rebuild, stack, take
from descant.engine.outcome import Outcome, gather
from descant.engine.work import LocalResult

TOGETHER = 16  # uploads that are added up together
MEMORY = 2**25  # bytes of uploads that wait in memory
Adder: TypeAlias = Callable[[Outcome], Outcome]  # results of some clients -> with a total in place of uploads


class Spool:
    """Trees of one form, by number."""

    def __init__(self, template: Tree, directory: Path | None) -> None:
        self._template = template
        self._size = nbytes(template)
        where = None if directory is None else str(directory)
        self._file = SpooledTemporaryFile(max_size=MEMORY, dir=where)  # noqa: SIM115 (open for a round)
        self._places: dict[int, int] = {}
        self._free: list[int] = []

    def put(self, key: int, tree: Tree) -> None:
        place = self._free.pop() if self._free else len(self._places)
        self._file.seek(place * self._size)
        for _, leaf in leaves(tree):
            self._file.write(leaf.contiguous().numpy().tobytes())
        self._places[key] = place

    def pop(self, key: int) -> Tree:
        place = self._places.pop(key)
        self._free.append(place)
        self._file.seek(place * self._size)
        found = {}
        for name, like in leaves(self._template):
            data = bytearray(self._file.read(nbytes(like)))
            found[name] = torch.frombuffer(data, dtype=like.dtype).view(like.shape) if data else like.clone()
        return rebuild(self._template, found)

    def __len__(self) -> int:
        return len(self._places)

    def close(self) -> None:
        self._file.close()


class Arriving:
    """`add` makes a total of some results, whose `done` are positions in the round."""

    def __init__(self, template: LocalResult, directory: Path | None, add: Adder, *, at_once: bool) -> None:
        self._spool = Spool(template.upload, directory)
        self._losses: dict[int, torch.Tensor] = {}  # of those whose uploads wait, by position
        self._add = add
        self._at_once = at_once
        self._total = Total()
        self._summed: list[tuple[int, Outcome]] = []

    def put(self, position: int, result: LocalResult) -> None:
        self._spool.put(position, result.upload)
        self._losses[position] = result.loss
        if self._at_once and len(self._spool) >= TOGETHER:
            self._sum([*self._losses])

    def _sum(self, positions: Collection[int], change: Callable[[int, Tree], Tree] | None = None) -> None:
        results = []
        for position in positions:
            upload = self._spool.pop(position)
            upload = upload if change is None else change(position, upload)
            results.append(LocalResult(upload, (), self._losses.pop(position)))
        found = self._add(Outcome(np.array([*positions], np.int64), stack(results), {}, 0))
        assert found.total is not None
        self._total = self._total.plus(found.total)
        self._summed.append((0, found._replace(total=None)))

    def drop(self, position: int) -> None:
        """It does not count after all."""
        self._spool.pop(position)
        del self._losses[position]

    def close(self) -> None:
        self._spool.close()

    def outcome(self, change: Callable[[int, Tree], Tree] | None = None) -> Outcome:
        """Of all that came, each changed before it is added up."""
        waiting = sorted(self._losses)
        for k in range(0, len(waiting), TOGETHER):
            self._sum(waiting[k : k + TOGETHER], change)
        found = gather(self._summed)
        order = np.argsort(found.done)
        values = found.values if not len(order) else take(found.values, torch.from_numpy(order))
        return found._replace(done=found.done[order], values=values, total=self._total)

