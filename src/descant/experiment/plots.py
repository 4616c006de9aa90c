"""The pictures of a run: its curve, and its clusters (CGPFL, Figures 4 and 5)."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from descant.core.files import write_atomic
from descant.core.metric import figure as written

if TYPE_CHECKING:  # slow to import: only when there is something to draw
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, distinguishable with any colour vision; then tints and shades of them
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"
CLUSTERS = (BLUE, "#E69F00", "#009E73", "#CC79A7", "#56B4E9", ORANGE, "#F0E442", "#4D4D4D",
            "#8CBCE0", "#F5CF80", "#7FCEB9", "#E5BCD3", "#003B5C", "#7A5500", "#004F3A", "#7D2F5A",
            "#B9E1F5", "#EBA886", "#8A8200", "#A6A6A6")
NOWHERE = "#FFFFFF"  # clients without a cluster yet
PAIRS = 15  # the most pairs of clusters that are drawn as single lines; more become a band
DPI = 130
DECADES = 3  # a loss that spans more is drawn on a log axis


def png(figure: Figure) -> bytes:
    """A figure as a PNG file; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # a client's name may have letters that the font lacks: a box in their place is no failure
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def tidy(every: Iterable[Any]) -> None:
    """What all charts share: a light grid, no frame."""
    for axes in every:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)


def draw_curve(history: list[dict[str, Any]], best_round: int | None, path: Path, metric: str, title: str
               ) -> None:
    write_atomic(path, png(curve(history, best_round, metric, title)))


def curve(history: list[dict[str, Any]], best_round: int | None, metric: str, title: str) -> Figure:
    """The deciding metric on test rows, with the worst decile, and the training loss."""
    from matplotlib.figure import Figure

    rows = [row for row in history if "personal" in row]
    if rows and metric not in rows[0]["personal"]["test"]:  # rounds from before the metric was set
        metric = "loss"
    name = metric.replace("_", " ")
    canvas = Figure(figsize=(9, 4.1), layout="constrained")  # no pyplot: no global state, no display
    canvas.suptitle(f"{title}: test {name}", fontsize=11, parse_math=False)
    left, right = canvas.subplots(1, 2)

    numbers, drawn = [row["round"] for row in rows], []
    for key, label, colour in (("personal", "personal models", BLUE), ("global", "global model", ORANGE)):
        if not rows or key not in rows[0]:
            continue
        figures = [row[key]["test"][metric] for row in rows]
        mean, worst = (np.array([each[end] for each in figures], float) for end in ("mean", "worst_decile"))
        drawn += [*mean]
        left.plot(numbers, mean, color=colour, label=label, marker="o", markersize=3)
        if key == "personal":
            drawn += [*worst]
            left.plot(numbers, worst, color=colour, linestyle=":", label="worst decile of clients")
            _mark_best(left, numbers, mean, best_round, metric)
    left.set(xlabel="round", ylabel=f"test {name}")
    left.set_title("on the clients' own test rows", fontsize=10)
    if left.lines:
        left.legend(fontsize=8)

    losses = np.array([row["loss"] for row in history], float)
    right.plot([row["round"] for row in history], losses, color=BLUE)
    right.set(xlabel="round", ylabel="training loss")
    right.set_title("training loss, mean over the cohort", fontsize=10)
    for axes, values, is_loss in ((left, drawn, metric in ("loss", "mse")), (right, losses, True)):
        if is_loss and spans_decades(values):
            axes.set_yscale("log")
            axes.set_ylabel(f"{axes.get_ylabel()} (log scale)")
        if not any(map(math.isfinite, values)):
            axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", color=GREY)

    tidy((left, right))
    return canvas


def _mark_best(axes: Any, numbers: list[int], mean: np.ndarray, best_round: int | None, metric: str) -> None:
    """Mark the round that is best on validation rows, with its test score."""
    if best_round is None:
        return
    axes.axvline(best_round, color=GREY, linewidth=0.8, linestyle="--")
    value = mean[numbers.index(best_round)] if best_round in numbers else float("nan")
    if math.isfinite(value):
        axes.plot([best_round], [value], marker="*", markersize=13, color=BLUE, linestyle="",
                  label=f"best on validation: round {best_round}, {written(metric, value)}")


# -- clusters ------------------------------------------------------------------------------------------


def draw_clusters(history: list[dict[str, Any]], path: Path) -> None:
    """Who is in which cluster, how far apart they are, who moves. Without clusters: no picture."""
    rows = [row for row in history if "clusters" in row.get("info", {})]
    if not rows:
        return
    from matplotlib.figure import Figure

    choices = [row for row in history if "choice" in row.get("info", {})]
    panels = [_draw_distances, _draw_work] + ([_draw_choice] if choices else [])
    figure = Figure(figsize=(11, 1.2 + 2.1 * len(panels)), layout="constrained")
    grid = figure.add_gridspec(len(panels), 2, width_ratios=(1.25, 1))
    _draw_history(figure.add_subplot(grid[:, 0]), rows)
    for k, draw in enumerate(panels):
        axes = figure.add_subplot(grid[k, 1])
        draw(axes, choices if draw is _draw_choice else rows)
        tidy([axes])
    for axes in figure.axes:
        axes.tick_params(labelsize=8)
        axes.title.set_fontsize(10)
        axes.xaxis.label.set_fontsize(9)
        axes.yaxis.label.set_fontsize(9)
        axes.xaxis.set_major_locator(_whole(8))
    write_atomic(path, png(figure))


def _whole(ticks: int) -> MaxNLocator:
    """Ticks at integers; at round ones if there are many."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(ticks, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def _numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [row["round"] for row in rows]


def _draw_history(axes: Any, rows: list[dict[str, Any]]) -> None:
    """A pixel for every client and round, in the colour of the client's cluster (Figure 4)."""
    from matplotlib.colors import ListedColormap

    cluster = np.array([row["info"]["clusters"] for row in rows])  # [rounds, clients]
    K = rows[-1]["info"]["K"]
    order = np.lexsort((np.arange(cluster.shape[1]), cluster[-1]))
    first, last = rows[0]["round"], rows[-1]["round"]
    colours = ListedColormap([NOWHERE, *(CLUSTERS[k % len(CLUSTERS)] for k in range(K))])
    axes.imshow(cluster[:, order].T, aspect="auto", interpolation="nearest", cmap=colours, vmin=-1.5,
                vmax=K - 0.5, extent=(first - 0.5, last + 0.5, cluster.shape[1], 0))
    size = np.bincount(cluster[-1][cluster[-1] >= 0], minlength=K)
    edge = (cluster[-1] < 0).sum() + np.cumsum(size)
    for k in np.flatnonzero(size):
        axes.annotate(f"{k}", (1.008, edge[k] - size[k] / 2), xycoords=("axes fraction", "data"),
                      fontsize=8, color=GREY, va="center")
        axes.axhline(edge[k], color="white", linewidth=0.8)
    waiting = "; white: none yet" if (cluster < 0).any() else ""
    sizes = ", ".join(map(str, size[:8])) + (", …" if K > 8 else "")
    axes.set(xlabel="round", ylabel=f"clients, sorted by their last cluster{waiting}",
             title=f"clusters over time (K = {K}; sizes {sizes})")
    axes.yaxis.set_major_locator(_whole(8))


def _draw_distances(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Between the clusters' models, pair by pair (Figure 5a)."""
    every = np.array([row["info"]["distances"] for row in rows])  # [rounds, K, K]
    one, other = np.triu_indices(every.shape[1], 1)
    pairs = every[:, one, other]
    mark = {"marker": "o", "markersize": 3} if len(rows) == 1 else {}
    if len(one) <= PAIRS:
        for k, (i, j) in enumerate(zip(one, other, strict=True)):
            axes.plot(_numbers(rows), pairs[:, k], color=CLUSTERS[k % len(CLUSTERS)], linewidth=1.2,
                      label=f"{i}–{j}", **mark)
        axes.legend(fontsize=7, ncols=-(-len(one) // 6), handlelength=1.2, frameon=False,
                    loc="center left", bbox_to_anchor=(1.0, 0.5), title="clusters", title_fontsize=7)
    else:
        low, middle, high = np.quantile(pairs, (0, 0.5, 1), axis=1)
        axes.fill_between(_numbers(rows), low, high, color=BLUE, alpha=0.2, linewidth=0,
                          label="range over pairs")
        axes.plot(_numbers(rows), middle, color=BLUE, label="median pair", **mark)
        axes.legend(fontsize=7, frameon=False)
    axes.set(xlabel="round", ylabel="distance", title="distances between cluster models")
    axes.set_ylim(bottom=0)


def _draw_work(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Iterations of k-means (Figure 5b), where clusters are found by it, and how many clients moved."""
    right = axes
    axes.set(xlabel="round", title="moving clients")
    if "kmeans_iterations" in rows[0]["info"]:
        axes.plot(_numbers(rows), [row["info"]["kmeans_iterations"] for row in rows], color=BLUE, marker="o",
                  markersize=2.5, linewidth=1)
        axes.set_title("k-means iterations and moving clients")
        axes.set_ylabel("iterations", color=BLUE)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(_whole(5))
        right = axes.twinx()
    share = 100 * np.array([row["info"]["moved"] for row in rows], float)
    right.plot(_numbers(rows), share, color=ORANGE, linewidth=1.5, clip_on=False)  # zero is worth seeing
    right.set_ylabel("clients that moved, %", color=ORANGE)
    right.set_ylim(0, max(5.0, 1.1 * np.nanmax([0.0, *share])))
    right.spines["top"].set_visible(False)


def _draw_choice(axes: Any, rows: list[dict[str, Any]]) -> None:
    """The bound e(K) by which K was chosen, and its two parts."""
    choice = rows[-1]["info"]["choice"]
    K = np.arange(1, len(choice["e"]) + 1)
    axes.plot(K, choice["complexity"], color=GREY, linestyle=":", label="complexity")
    axes.plot(K, choice["mu"] * np.array(choice["cost"]), color=GREY, linestyle="--",
              label=f"{choice['mu']:g} × cost")
    axes.plot(K, choice["e"], color=BLUE, marker="o", markersize=3, label="e(K)")
    axes.plot(choice["K"], choice["e"][choice["K"] - 1], color=ORANGE, marker="*", markersize=12)
    axes.set(xlabel="K", ylabel="bound", title=f"round {rows[-1]['round']} chose K = {choice['K']}")
    axes.set_ylim(0, 1.35 * max(choice["e"]))  # room for the legend
    axes.legend(fontsize=7, frameon=False, ncols=3, loc="upper center")


def spans_decades(values: Iterable[float | None]) -> bool:
    """Whether a linear axis would show little more than the largest of some losses."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return bool(known) and min(known) > 0 and max(known) > min(known) * 10**DECADES
