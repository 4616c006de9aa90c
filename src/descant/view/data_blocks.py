"""The classes of the clients as shaded blocks, for the terminal."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence

import numpy as np

from descant.core.federation import Federation
from descant.core.units import times
from descant.data.heterogeneity import Measured, shares
from descant.view.data_columns import Columns, by_class

WIDTH, HEIGHT = 110, 25  # the most that is drawn, however wide the terminal and many the classes
# from nothing to the most; the second where the terminal has no blocks
LONGEST = 16  # letters of a name
SHADES, PLAIN_SHADES = " ·░▒▓█", " .:+*#"
STEPS, PLAIN_STEPS = "▁▂▃▄▅▆▇█", "123456789"


def draw_blocks(federation: Federation, measured: Measured, width: int, plain: bool) -> list[str]:
    """A column per client (or per few clients that are alike), a row per class, the sizes on top."""
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
    if named and wide == 3:  # and columns are numbered, each for one client
        lines += textwrap.wrap("clients: " + ", ".join(f"{k} {short(name)}" for k, name in
                                                       enumerate(federation.names)), max(width, 40))
    return [*lines, _legend(columns, height, share)]


def short(name: str) -> str:
    """A name as it fits into a table."""
    return name if len(name) <= LONGEST else f"{name[:LONGEST - 1]}…"


def _cell(sign: str, wide: int) -> str:
    """A sign as wide as a column; wide columns have a gap between them, and room for a number."""
    return f"{sign * 2 if len(sign) == 1 and not sign.isdecimal() else sign:<3}" if wide == 3 else sign * wide


def _merged(counts: np.ndarray, names: Sequence[str] | None) -> tuple[np.ndarray, list[str]]:
    """The clients' shares of the classes, neighbours put together where there are many, and what these are
    called: by their names, as far as there is room."""
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
        who = f"a column is the mean of {columns.merged:.3g} clients, which are ordered by {order}"
    scale = f"highest: {times(round(height.max()), 'row')}"
    return f"{who}; {scale}" + (f"; darkest: {share.max():.0%} of the client's rows" if has_classes else "")
