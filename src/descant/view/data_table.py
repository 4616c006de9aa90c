"""What a federation is, as a table for the terminal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from descant.core.federation import Federation
from descant.core.splits import SPLITS
from descant.data.heterogeneity import Measured, effective_classes, gini, label_distances
from descant.view.data_blocks import draw_blocks, short

NAMED = 12  # the most classes that are listed by name


def show_federation(console: Console, federation: Federation, measured: Measured) -> None:
    """Print sizes, splits and heterogeneity, what was left out, and who has which classes."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=18, no_wrap=True)
    grid.add_column()
    for name, value in facts(federation, measured).items():
        grid.add_row(name, value)
    console.print(grid)
    for note in federation.notes:
        console.print(f"note: {note}", soft_wrap=True)
    console.print()
    plain = not console.encoding.lower().startswith("utf")
    for line in draw_blocks(federation, measured, console.width, plain):
        console.print(line, soft_wrap=True)


def facts(federation: Federation, measured: Measured) -> dict[str, str]:
    """The figures by name."""
    sizes, counts, shift = measured
    shape = " x ".join(map(str, federation.x.shape[1:])) or "1"
    found = {
        "data": heading(federation),
        "clients": _clients(federation),
        "rows": f"{sizes.sum():,}, each {shape} ({str(federation.x.dtype).removeprefix('torch.')})",
        "rows of a client": f"{sizes.min():,} to {sizes.max():,}, median {np.median(sizes):,.6g}",
        "splits": ", ".join(f"{name} {federation.split(name).sizes.sum():,}" for name in SPLITS),
        "size Gini": f"{gini(sizes):.3f} (0: all equal)",
    }
    if counts is None:
        found["classes"] = "none: targets are numbers"
    else:
        distances, pool = label_distances(counts), counts.sum(0, keepdims=True)
        found |= {
            "classes": f"{counts.shape[1]}{_named(federation)}; a client has {_range((counts > 0).sum(1))}",
            "effective classes": f"{effective_classes(counts).mean():.2f} of a client on average "
                                 f"(of the pool: {effective_classes(pool).item():.2f})",
            "label distance": f"{distances.mean():.3f} on average, {distances.max():.3f} at most "
                              "(total variation from the pool; 0: alike)",
        }
    if shift is not None:
        found["feature shift"] = (f"{shift.distance.mean():.3f} standard deviations on average "
                                  f"(by chance: {shift.chance.mean():.3f})")
        spread = shift.spread[~np.isnan(shift.spread)]
        if len(spread):
            found["feature spread"] = (f"{spread.min():.2f} to {spread.max():.2f} standard deviations within "
                                       "a client")
    return found


def heading(federation: Federation) -> str:
    """What the federation was made of, as far as it is known."""
    if federation.origin is None:
        return "arrays"
    dataset = Path(federation.origin["dataset"]).name  # of a folder, not all of its path
    return f"{dataset}, partition {federation.origin['partition']}"


def _clients(federation: Federation) -> str:
    unseen = f", and {federation.unseen:,} unseen (never train)" if federation.unseen else ""
    return f"{federation.population:,}{unseen}"


def _named(federation: Federation) -> str:
    """What the classes are called, where there are names, and not too many."""
    names = federation.class_names
    return "" if names is None or len(names) > NAMED else f" ({', '.join(map(short, names))})"


def _range(numbers: np.ndarray) -> str:
    low, high = int(numbers.min()), int(numbers.max())
    return f"{low}" if low == high else f"{low} to {high}"
