"""Datasets and federations in the terminal: the list of datasets, and the figures of one federation with a
sketch of who has which classes."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from descant.core.federation import Federation
from descant.core.units import size, times
from descant.data import DATASETS
from descant.data.cache import Prepared, Source, data_dir
from descant.data.heterogeneity import Measured, facts, shares, short
from descant.data.samples import Dataset
from descant.errors import DescantError
from descant.experiment.catalogue import entries
from descant.view.tables import facts_table, table

WIDTH, HEIGHT = 110, 25  # the most that is drawn, however wide the terminal and many the classes
# from nothing to the most; the second of each pair for terminals without block characters
SHADES, PLAIN_SHADES = " ·░▒▓█", " .:+*#"
STEPS, PLAIN_STEPS = "▁▂▃▄▅▆▇█", "123456789"


# -- a federation --------------------------------------------------------------------------------------


def show_federation(console: Console, federation: Federation, measured: Measured) -> None:
    """Print sizes, splits and heterogeneity, notes, and who has which classes."""
    console.print(facts_table(facts(federation, measured), 18))
    for note in federation.notes:
        console.print(f"note: {note}", soft_wrap=True)
    console.print()
    plain = not console.encoding.lower().startswith("utf")
    for line in draw_blocks(federation, measured, console.width, plain):
        console.print(line, soft_wrap=True)


@dataclass(frozen=True)
class Columns:
    """Clients side by side, several to a column if need be: column k holds order[edges[k]:edges[k + 1]]."""

    order: np.ndarray
    edges: np.ndarray
    seen: float  # columns of the clients that train; those of the unseen ones follow

    @classmethod
    def of(cls, federation: Federation, most: int, by: tuple[np.ndarray, ...] = ()) -> Columns:
        """At most `most` columns. Clients are sorted by the keys `by` [clients], the last key first."""
        clients = federation.everyone
        columns = min(clients, most)
        order = np.lexsort((*by, np.arange(clients) >= federation.population))  # stable
        edges = np.arange(columns + 1) * clients // columns
        return cls(order, edges, federation.population * columns / clients)

    def __len__(self) -> int:
        return len(self.edges) - 1

    @property
    def merged(self) -> float | None:
        """How many clients share a column, if any do."""
        return None if len(self) == len(self.order) else len(self.order) / len(self)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """`values` [clients, ...] averaged over the clients of each column."""
        totals = np.add.reduceat(values[self.order].astype(float), self.edges[:-1])
        result: np.ndarray = totals / np.diff(self.edges).reshape(-1, *[1] * (values.ndim - 1))
        return result


def by_class(counts: np.ndarray) -> tuple[np.ndarray, ...]:
    """Keys that put clients with the same most frequent class together, those with most of it first."""
    share = shares(counts)
    return -share.max(1), share.argmax(1)


def draw_blocks(federation: Federation, measured: Measured, width: int, plain: bool) -> list[str]:
    """A column per client (or per few similar clients), a row per class, the sizes on top."""
    counts = measured.counts
    classes, labels = (np.zeros((federation.everyone, 0)), []) if counts is None else _merged(
        counts, federation.class_names)
    margin = 2 + max(len(label) for label in ("client", *labels))
    room = max(min(width, WIDTH) - margin, 10)
    keys = (-measured.sizes,) if counts is None else by_class(counts)
    columns = Columns.of(federation, room, keys if federation.everyone > room else ())
    wide = max(1, min(3, room // len(columns)))

    steps, shades = (PLAIN_STEPS, PLAIN_SHADES) if plain else (STEPS, SHADES)
    named = not all(map(str.isdecimal, federation.names))
    rows = {"client": [str(k) for k in range(len(columns))]} if wide == 3 else {}
    height = columns.mean(measured.sizes)
    rows["rows"] = [steps[k] for k in _levels(height, len(steps)) - 1]
    share = columns.mean(classes)
    for label, level in zip(labels, _levels(share, len(shades) - 1).T, strict=True):
        rows[label] = [shades[k] for k in level]
    lines = [f"{label:>{margin - 2}}  {''.join(_cell(sign, wide) for sign in row)}".rstrip()
             for label, row in rows.items()]
    if federation.unseen:
        mark = round(columns.seen * wide)
        lines.append(" " * (margin + mark) + "^" * (len(columns) * wide - mark) + " unseen")
    if named and wide == 3:  # columns are numbered then, one client each
        lines += textwrap.wrap("clients: " + ", ".join(f"{k} {short(name)}" for k, name in
                                                       enumerate(federation.names)), max(width, 40))
    return [*lines, _legend(columns, height, share)]


def _cell(sign: str, wide: int) -> str:
    """A sign as wide as a column; wide columns have a gap between them, and room for a number."""
    return f"{sign * 2 if len(sign) == 1 and not sign.isdecimal() else sign:<3}" if wide == 3 else sign * wide


def _merged(counts: np.ndarray, names: Sequence[str] | None) -> tuple[np.ndarray, list[str]]:
    """The clients' shares of the classes and their labels; of many classes, neighbours are merged."""
    classes = counts.shape[1]
    edges = np.arange(min(classes, HEIGHT) + 1) * classes // min(classes, HEIGHT)
    called = [str(k) for k in range(classes)] if names is None else [short(name) for name in names]
    labels = [called[low] if high - low == 1 else f"{called[low]}-{called[high - 1]}"
              for low, high in itertools.pairwise(edges)]
    return np.add.reduceat(shares(counts), edges[:-1], axis=1), labels


def _levels(values: np.ndarray, steps: int) -> np.ndarray:
    """0 for nothing, else 1 to `steps`, in proportion."""
    levels: np.ndarray = np.ceil(values / max(values.max(initial=0.0), 1e-12) * steps - 1e-9).astype(int)
    return levels


def _legend(columns: Columns, height: np.ndarray, share: np.ndarray) -> str:
    has_classes = share.shape[1] > 0
    who = "a column is a client"
    if columns.merged is not None:
        order = "their most frequent class" if has_classes else "size"
        who = f"a column is the mean of {columns.merged:.3g} clients, sorted by {order}"
    scale = f"highest: {times(round(height.max()), 'row')}"
    return f"{who}; {scale}" + (f"; darkest: {share.max():.0%} of the client's rows" if has_classes else "")


# -- the list of datasets ------------------------------------------------------------------------------


def list_datasets() -> list[dict[str, Any]]:
    """Every dataset with its clients, rows (None if only loading would tell), place and description."""
    described = {entry["name"]: entry["description"] for entry in entries("dataset")}
    found = []
    for name, cls in DATASETS.items():
        rows, where = _state(cls())
        found.append({"name": name, "clients": cls.default_clients, "owners": cls.natural, "rows": rows,
                      "where": where, "description": described[name]})
    return found


def show_datasets(console: Console, found: list[dict[str, Any]]) -> None:
    """Print the list for people."""
    rows = [[entry["name"], f"{entry['clients']:,}" if entry["owners"] else "any",
             "" if entry["rows"] is None else f"{entry['rows']:,}", entry["where"], entry["description"]]
            for entry in found]
    console.print(table("lrrpp", ["name", "clients", "rows", "where", "description"], rows))
    console.print(f"\ndata directory: {data_dir()}", soft_wrap=True)
    console.print("clients: the default number; data.clients and data.partition change it. any: rows without "
                  "owners are split among any number of clients", soft_wrap=True)


def _state(dataset: Dataset) -> tuple[int | None, str]:
    """How many rows there are, and where."""
    source: Source | None = getattr(dataset, "source", None)
    if source is None:
        # generated data have owners; data that come with a library have none
        return None, "synthetic" if dataset.natural else "embedded"
    path = data_dir() / f"{source.name}.npz"
    if path.exists():
        try:
            return _rows(source, path), "present"
        except DescantError:
            return None, f"damaged: {path.name}"
    folder = path.parent / (source.folder or source.name)
    if folder.is_dir() and any(file.suffix != ".part" for file in folder.iterdir()):
        return None, "official files, to be prepared"
    if source.installed is not None and source.installed.is_dir():
        return None, "installed, to be prepared"
    if source.remotes:
        return None, f"to be downloaded ({size(sum(remote.size for remote in source.remotes))})"
    return None, "to be fetched by hand"


def _rows(source: Source, path: Path) -> int | None:
    """The number of labels, from the headers of the file; None where rows are formed when it is loaded."""
    prepared = Prepared(path, source.layout)
    labels = [name for name in source.layout if name == "y" or name.startswith("y_")]
    return sum(prepared.shape(name)[0] for name in labels) if labels else None
