"""The picture of one run: how the clients fared, round by round."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from descant.files import write_atomic

# Okabe and Ito's colours, told apart by people with any colour vision
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"


def draw_curve(history: list[dict[str, Any]], best_round: int | None, path: Path, metric: str) -> None:
    """Test figures of the personal and the global models by the metric that decides, with the worst decile,
    and the training loss."""
    from matplotlib.figure import Figure  # slow: only when there is something to draw

    rows = [row for row in history if "personal" in row]
    figure = Figure(figsize=(9, 3.8), layout="constrained")  # no pyplot: no global state, no display
    left, right = figure.subplots(1, 2)

    numbers = [row["round"] for row in rows]
    for key, label, colour in (("personal", "personal models", BLUE), ("global", "global model", ORANGE)):
        if rows and key in rows[0]:
            figures = [row[key]["test"][metric] for row in rows]
            left.plot(numbers, _values(figures, "mean"), color=colour, label=label, marker="o", markersize=3)
            if key == "personal":
                left.plot(numbers, _values(figures, "worst_decile"), color=colour, linestyle=":",
                          label="worst decile of clients")
    if best_round is not None:
        left.axvline(best_round, color=GREY, linewidth=0.8, linestyle="--")
        left.annotate("best on validation", (best_round, 0.02), xycoords=("data", "axes fraction"),
                      rotation=90, fontsize=8, color=GREY, ha="right", va="bottom")
    left.set(xlabel="round", ylabel=f"test {metric}", title="on the clients' own test data")
    left.legend(fontsize=8)

    right.plot([row["round"] for row in history], [_number(row["loss"]) for row in history], color=BLUE)
    right.set(xlabel="round", ylabel="training loss", title="on the way, mean over the cohort")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    write_atomic(path, buffer.getvalue())


def _values(figures: list[dict[str, float | None]], key: str) -> list[float]:
    return [_number(each[key]) for each in figures]


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
