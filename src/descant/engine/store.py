"""The states of all clients, one row each, made when a client first takes part.

Rows lie in memory or in sparse files (one per tensor of the state), so that a client that never took part
costs nothing. A round's new rows are staged: they can be read at once, but reach the arrays only with
`write`, after the journal is safe.
"""

from __future__ import annotations

import mmap
import os
import weakref
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from descant.core.tree import Tree, leaves, map_tree, rebuild
from descant.errors import DescantError

ASKED = -1  # in place of the last round: has a state from an opening, and never took part


class Array(Protocol):
    """One tensor of the state of every client."""

    def read(self, clients: np.ndarray) -> Tensor:
        """The clients' rows, as a copy."""

    def write(self, clients: np.ndarray, rows: Tensor) -> None:
        """Replace the clients' rows; files are durable when it returns."""


class MemoryArray:
    def __init__(self, template: Tensor, population: int) -> None:
        # the system makes pages when they are touched; with huge pages a client's first row would take 2 MB
        dtype = template.numpy().dtype
        size = max(1, population * template.numel() * template.element_size())
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        rows = np.frombuffer(memory, dtype, population * template.numel())
        self._rows = rows.reshape(population, *template.shape)

    def read(self, clients: np.ndarray) -> Tensor:
        return torch.from_numpy(self._rows[clients])

    def write(self, clients: np.ndarray, rows: Tensor) -> None:
        self._rows[clients] = rows.numpy()


class MappedArray:
    """Rows in a sparse file: read through a memory map, written by `pwrite`. On a full disk, writing through
    the map would raise SIGBUS; and flushing a map costs by its size, not by what was written."""

    def __init__(self, template: Tensor, population: int, path: Path, read_only: bool) -> None:
        self._row_bytes = template.numel() * template.element_size()
        dtype = template.numpy().dtype
        self._file = os.open(path, os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT, 0o644)
        weakref.finalize(self, os.close, self._file)  # also where Python ends, and modules are gone already
        if not read_only:
            os.ftruncate(self._file, population * self._row_bytes)
        self._rows = np.memmap(path, dtype, "r", shape=(population, *template.shape))

    def read(self, clients: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(self._rows[clients]))

    def write(self, clients: np.ndarray, rows: Tensor) -> None:
        for client, row in zip(clients.tolist(), rows.contiguous().numpy(), strict=True):
            _write_all(self._file, row.tobytes(), client * self._row_bytes)
        os.fdatasync(self._file)


def require_files(directory: Path, template: Tree, population: int) -> None:
    """An error if a store's files are missing or have the wrong size."""
    for name, leaf in leaves(template):
        path, size = directory / f"{name}.bin", population * leaf.numel() * leaf.element_size()
        found = path.stat().st_size if path.exists() else 0
        if found != size:
            raise DescantError(f"the checkpoint is damaged: {path} has {found} bytes, expected {size}; "
                               "restore it from a copy, or start the run anew")


def _write_all(file: int, data: bytes, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)


def _check_sums(rows: Tree, at: Iterable[int]) -> np.ndarray:
    """A CRC-32 over all tensors of each of the given rows."""
    arrays = [leaf.contiguous().numpy() for _, leaf in leaves(rows) if leaf.numel()]
    sums = []
    for k in at:
        crc = 0
        for array in arrays:
            crc = zlib.crc32(array[k].tobytes(), crc)
        sums.append(crc)
    return np.array(sums, np.int64)


class StagedRows(NamedTuple):
    clients: np.ndarray  # ascending
    rows: Tree  # [clients, ...]
    before: np.ndarray  # [clients] their last rounds before


class ClientStore:
    """The states of the population; a client that never took part is in the state `template`."""

    def __init__(self, template: Tree, population: int, directory: Path | None = None, *,
                 read_only: bool = False) -> None:
        self.template = template
        self.population = population
        self.last_round = np.zeros(population, np.int64)  # in which they took part; 0: never; or ASKED
        self.check_sums = np.zeros(population, np.int64)  # of the rows on disk
        self._unchecked = np.zeros(population, bool)  # rows that another process wrote
        self._directory = directory
        self._nothing = StagedRows(np.zeros(0, np.int64), map_tree(lambda t: t[None][:0], template),
                               np.zeros(0, np.int64))
        self.staged = self._nothing
        if directory is not None and not read_only:
            directory.mkdir(parents=True, exist_ok=True)
        self._arrays: dict[str, Array] = {
            name: MemoryArray(leaf, population) if directory is None
            else MappedArray(leaf, population, directory / f"{name}.bin", read_only)
            for name, leaf in leaves(template) if leaf.numel()  # empty tensors need no row
        }

    def took_part(self, clients: np.ndarray) -> np.ndarray:
        """Whether each of the clients ever did; held-out clients, beyond the population, never do."""
        return np.asarray(self._last(clients) > 0)

    @property
    def written(self) -> np.ndarray:
        """The last rounds without what is staged: those from which a killed run goes on."""
        found = self.last_round.copy()
        found[self.staged.clients] = self.staged.before
        return found

    def _has_row(self, clients: np.ndarray) -> np.ndarray:
        return np.asarray(self._last(clients) != 0)

    def _last(self, clients: np.ndarray) -> np.ndarray:
        taking_part = clients < self.population
        return np.where(taking_part, self.last_round[np.where(taking_part, clients, 0)], 0)

    def read(self, clients: np.ndarray) -> Tree:
        """The states of clients (ascending), with a leading axis."""
        known = self._has_row(clients)
        is_staged = np.isin(clients, self.staged.clients)
        stored, from_stage = np.flatnonzero(known & ~is_staged), np.flatnonzero(is_staged)
        at = torch.from_numpy(np.searchsorted(self.staged.clients, clients[from_stage]))
        staged_rows = dict(leaves(self.staged.rows))

        def fetch(name: str, leaf: Tensor) -> Tensor:
            rows = leaf.expand(len(clients), *leaf.shape)
            if not leaf.numel() or not known.any():
                return rows
            rows = rows.clone()
            rows[torch.from_numpy(stored)] = self._arrays[name].read(clients[stored])
            rows[torch.from_numpy(from_stage)] = staged_rows[name][at]
            return rows

        states = rebuild(self.template, {name: fetch(name, leaf) for name, leaf in leaves(self.template)})
        self._check(clients, stored[self._unchecked[clients[stored]]], states)
        return states

    def stage(self, clients: np.ndarray, rows: Tree, number: int | np.ndarray) -> None:
        """New states of clients (ascending) after round `number` (ASKED: after an opening)."""
        self.staged = StagedRows(clients, rows, self.last_round[clients])
        self.last_round[clients] = number
        self._note(clients, rows)

    def unstage(self) -> None:
        """Take back what was staged and not written."""
        self.last_round[self.staged.clients] = self.staged.before
        self.staged = self._nothing

    def write(self) -> None:
        """Move the staged rows into the arrays."""
        self._write(self.staged.clients, self.staged.rows)
        self.staged = self._nothing

    def follow(self, other: ClientStore, clients: np.ndarray) -> None:
        """Copy the states of some clients, and all bookkeeping, from another store."""
        for start in range(0, len(clients), 256):  # bounded memory, whatever the population
            part = clients[start : start + 256]
            rows = other.read(part)
            self._write(part, rows)
            self._note(part, rows)
        self.last_round[:] = other.last_round

    def restore(self, last_round: np.ndarray, check_sums: np.ndarray) -> None:
        """Set the bookkeeping to that of a store that another process wrote."""
        self.last_round[:] = last_round
        self.check_sums[:] = check_sums
        self._unchecked[:] = last_round != 0

    def _note(self, clients: np.ndarray, rows: Tree) -> None:
        """Record the checksums of rows that we wrote."""
        if self._directory is not None and len(clients):
            self.check_sums[clients] = _check_sums(rows, range(len(clients)))
            self._unchecked[clients] = False

    def _check(self, clients: np.ndarray, at: np.ndarray, states: Tree) -> None:
        """An error if rows are not as another process wrote them."""
        wrong = clients[at][_check_sums(states, at) != self.check_sums[clients[at]]]
        if len(wrong):
            raise DescantError(f"the checkpoint is damaged: the state of client {wrong[0]} in "
                               f"{self._directory} is not as it was written; restore it from a copy, "
                               "or start the run anew")
        self._unchecked[clients[at]] = False

    def _write(self, clients: np.ndarray, rows: Tree) -> None:
        if len(clients):
            for name, leaf in leaves(rows):
                if name in self._arrays:
                    self._arrays[name].write(clients, leaf)
