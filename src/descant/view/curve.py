"""The picture of one run: how the clients fared, round by round."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from descant.core.files import write_atomic
from descant.core.units import figure as written

# Okabe and Ito's colours, told apart by people with any colour vision
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"
DECADES = 3  # a loss that spans more of them has exploded or come down from far: a log axis shows all of it


def draw_curve(history: list[dict[str, Any]], best_round: int | None, path: Path, metric: str, title: str
               ) -> None:
    """Test figures of the personal and the global models by the metric that decides, with the worst decile,
    and the training loss. `title` says what was trained on what."""
    from matplotlib.figure import Figure  # slow: only when there is something to draw

    rows = [row for row in history if "personal" in row]
    if rows and metric not in rows[0]["personal"]["test"]:  # rounds that were played before it was asked for
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
        mean = _values(figures, "mean")
        drawn += mean
        left.plot(numbers, mean, color=colour, label=label, marker="o", markersize=3)
        if key == "personal":
            worst = _values(figures, "worst_decile")
            drawn += worst
            left.plot(numbers, worst, color=colour, linestyle=":", label="worst decile of clients")
            _mark_best(left, numbers, mean, best_round, metric)
    left.set(xlabel="round", ylabel=f"test {name}")
    left.set_title("on the clients' own test rows", fontsize=10)
    if left.lines:
        left.legend(fontsize=8)

    losses = [_number(row["loss"]) for row in history]
    right.plot([row["round"] for row in history], losses, color=BLUE)
    right.set(xlabel="round", ylabel="training loss")
    right.set_title("training loss, mean over the cohort", fontsize=10)
    for axes, values, is_loss in ((left, drawn, metric in ("loss", "mse")), (right, losses, True)):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if is_loss and spans_decades(values):
            axes.set_yscale("log")
            axes.set_ylabel(f"{axes.get_ylabel()} (log scale)")
        if not any(map(math.isfinite, values)):
            axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", color=GREY)

    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    write_atomic(path, buffer.getvalue())


def spans_decades(values: list[float]) -> bool:
    """Whether a linear axis would show little more than the largest of some losses."""
    known = [value for value in values if math.isfinite(value)]
    return bool(known) and min(known) > 0 and max(known) > min(known) * 10**DECADES


def _mark_best(axes: Any, numbers: list[int], mean: list[float], best_round: int | None, metric: str) -> None:
    """The round that is best on validation rows, with its figure on test rows."""
    if best_round is None:
        return
    axes.axvline(best_round, color=GREY, linewidth=0.8, linestyle="--")
    value = mean[numbers.index(best_round)] if best_round in numbers else float("nan")
    if math.isfinite(value):
        axes.plot([best_round], [value], marker="*", markersize=13, color=BLUE, linestyle="",
                  label=f"best on validation: round {best_round}, {written(metric, value)}")


def _values(figures: list[dict[str, float | None]], key: str) -> list[float]:
    return [_number(each[key]) for each in figures]


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
