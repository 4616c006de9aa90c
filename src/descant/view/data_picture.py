"""The picture of a federation: sizes, classes and feature shift of its clients."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from descant.core.federation import Federation
from descant.core.splits import SPLITS
from descant.core.units import times
from descant.data.heterogeneity import FeatureShift, Measured, shares
from descant.experiment.plots import BLUE, GREY, ORANGE, png
from descant.view.data import Columns, by_class

# Okabe and Ito's colours, distinguishable with any colour vision
COLOURS = {"train": BLUE, "validation": "#56B4E9", "test": "#E69F00"}
BUBBLES = 120  # the most clients that are drawn as bubbles; more become a heat map
BUBBLE_CLASSES = 40  # the most classes
COLUMNS = 1000  # the most columns of a heat map
NAMED = 30  # the most clients (or classes) whose names are written out
LONGEST = 14  # letters of the name of a client or class
MANY_TICKS = 10  # a tick per this many clients, if they are not named


def draw_federation(federation: Federation, measured: Measured) -> bytes:
    """The picture as a PNG file."""
    size, counts, shift = measured
    # the panels: how high they are (in inches), and what many clients are ordered by in each
    panels: dict[str, tuple[float, tuple[np.ndarray, ...]]] = {"size": (1.5, (-size,))}
    if counts is not None:
        height = float(np.clip(0.3 * counts.shape[1], 1.2, 4.5))
        panels["most frequent class"] = height, by_class(counts)
    if shift is not None and shift.evident:
        panels["distance"] = 1.7, (-shift.distance,)
    heights = [height for height, _ in panels.values()]
    many = federation.everyone > BUBBLES
    width = 9 if federation.everyone <= NAMED else 11

    figure = Figure(figsize=(width, sum(heights) + 1.1), layout="constrained")
    figure.suptitle(f"{federation.heading}: {times(federation.everyone, 'client')}, "
                    f"{times(int(size.sum()), 'row')}", fontsize=11, parse_math=False)
    every = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (order, (height, keys)) in zip(every, panels.items(), strict=True):
        columns = Columns.of(federation, COLUMNS, keys if many else ())
        if order == "size":
            _draw_sizes(axes, federation, columns)
        elif order == "distance":
            assert shift is not None
            _draw_shift(axes, shift, columns)
        elif counts is not None and (many or counts.shape[1] > BUBBLE_CLASSES):
            _draw_heat(axes, counts, columns)
            _name_classes(axes, federation, counts.shape[1])
        elif counts is not None:
            _draw_bubbles(axes, counts, width, height)
            _name_classes(axes, federation, counts.shape[1])
        _finish(axes, federation, columns)
        if many:
            merged = "" if columns.merged is None else f"; a column is the mean of {columns.merged:.3g}"
            axes.set_xlabel(f"clients, sorted by {order}{merged}", fontsize=9)
    if not many:
        _name_clients(every[-1], federation)
    return png(figure)


def _draw_sizes(axes: Any, federation: Federation, columns: Columns) -> None:
    """Rows of each client, stacked by split."""
    below = np.zeros(len(columns))
    edges = np.arange(len(columns) + 1) - 0.5
    if federation.unseen:
        axes.axvspan(columns.seen - 0.5, edges[-1], color=GREY, alpha=0.15, linewidth=0, label="unseen")
    for name in SPLITS:
        size = columns.mean(federation.split(name).sizes)
        if len(columns) > BUBBLES:  # bars would be slow, and their gaps flicker
            axes.stairs(below + size, edges, baseline=below, fill=True, color=COLOURS[name], label=name)
        else:
            axes.bar(np.arange(len(columns)), size, bottom=below, width=0.8, color=COLOURS[name], label=name)
        below = below + size
    axes.set(ylabel="rows", ylim=(0, 1.05 * below.max()))
    _legend(axes)


def _draw_bubbles(axes: Any, counts: np.ndarray, width: float, height: float) -> None:
    """A disc per client and class whose area is the number of rows."""
    clients, classes = counts.shape
    client, label = np.nonzero(counts)
    rows = counts[client, label]
    # the largest disc fills its cell, or somewhat more where cells are narrow: most others are smaller
    diameter = 72 * min(2.2 * (width - 1) / clients, 0.95 * height / classes)
    axes.scatter(client, label, s=rows / counts.max() * diameter**2, color=BLUE, alpha=0.8, linewidths=0)
    axes.set(ylabel="class", ylim=(classes - 0.4, -0.6))
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_title(f"area: rows of a class (largest: {counts.max():,})", fontsize=8, color=GREY, loc="right")


def _draw_heat(axes: Any, counts: np.ndarray, columns: Columns) -> None:
    """The share of each class among a client's rows, as darkness."""
    share = columns.mean(shares(counts))
    image = axes.imshow(share.T, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    axes.set_ylabel("class")
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01)
    bar.set_label("share of the client's rows", fontsize=8)
    bar.ax.tick_params(labelsize=8)


def _draw_shift(axes: Any, shift: FeatureShift, columns: Columns) -> None:
    """Distance and spread of the clients' features."""
    place, mark = np.arange(len(columns)), 5 if len(columns) <= BUBBLES else 2
    axes.plot(place, columns.mean(shift.distance), "o", color=BLUE, markersize=mark,
              label="distance of the mean from the pool's")
    axes.plot(place, columns.mean(shift.chance), "_", color=GREY, markersize=mark, label="expected by chance")
    axes.plot(place, columns.mean(shift.spread), "x", color=ORANGE, markersize=mark,
              label="standard deviation within the client")
    axes.set_ylabel("features, in the\npool's std")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _legend(axes: Any) -> None:
    """Above the panel, where there is room."""
    axes.legend(fontsize=8, ncols=4, loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False,
                borderaxespad=0.1)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _name_classes(axes: Any, federation: Federation, classes: int) -> None:
    names = federation.class_names or tuple(map(str, range(classes)))
    at = np.arange(0, classes, -(-classes // NAMED))
    axes.set_yticks(at, [_short(names[k]) for k in at], parse_math=False)


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[:LONGEST - 1]}…"


def _finish(axes: Any, federation: Federation, columns: Columns) -> None:
    """What all panels share."""
    axes.set_xlim(-0.6, len(columns) - 0.4)
    if columns.merged is not None:
        axes.set_xticks([])
    elif len(columns) <= BUBBLES:
        axes.set_xticks(np.arange(0, len(columns), 1 if len(columns) <= NAMED else MANY_TICKS))
        axes.tick_params(labelbottom=False)
    axes.tick_params(labelsize=8)
    axes.yaxis.label.set_size(9)
    axes.spines[["top", "right"]].set_visible(False)
    if federation.unseen:
        axes.axvline(columns.seen - 0.5, color=GREY, linewidth=1, linestyle="--")


def _name_clients(axes: Any, federation: Federation) -> None:
    """Below the last panel: the clients' names, of many only some."""
    axes.set_xlabel("client", fontsize=9)
    axes.tick_params(labelbottom=True)
    at = np.arange(0, federation.everyone, 1 if federation.everyone <= NAMED else MANY_TICKS)
    names = [_short(federation.names[k]) for k in at]
    slanted = max(map(len, names)) > 90 / len(names)
    axes.set_xticks(at, names, rotation=45 if slanted else 0, ha="right" if slanted else "center",
                    parse_math=False)
