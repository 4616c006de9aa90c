"""The picture of a comparison: how many times descant's step each library takes."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.peers.contest import DESCANT
from benchmarks.peers.results import title
from descant.core.units import times

STYLES = {"fedjax": ("#0072B2", "o"), "pfl": ("#009E73", "D"), "flower": ("#E69F00", "v")}
GREY = "#666666"


def draw(found: dict[str, Any]) -> bytes:
    """The picture as a PNG file."""
    cases, machine = found["cases"], found["machine"]
    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    figure.suptitle(f"{machine['processor']}, {times(machine['cores'], 'core')}", fontsize=10, color=GREY,
                    parse_math=False)
    axes: Any = figure.subplots()
    axes.axhline(1, color="#D55E00", linewidth=2, label=DESCANT)
    for side, (colour, marker) in STYLES.items():
        shift = 0.2 * (list(STYLES).index(side) - 1)
        points = []
        for place, case in enumerate(cases):
            figures, at = case["sides"].get(side, {}), place + shift
            if not (ratio := figures.get("times_descant")):
                continue
            points.append((at, ratio))
            every = figures.get("times_descant_all", [])  # of several runs, each
            axes.plot([at] * len(every), every, color=colour, marker="_", linestyle="")
            axes.plot([at, at], [1, ratio], color=colour, linewidth=2, alpha=0.5)
            beyond = max([ratio, *every]) if ratio >= 1 else min([ratio, *every])
            axes.annotate(f"{ratio:.1f}", (at, beyond), xytext=(0, 6 if ratio >= 1 else -6), fontsize=8,
                          color=colour, textcoords="offset points", ha="center",
                          va="bottom" if ratio >= 1 else "top")
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle="", markersize=7,
                      label=title(side))
    axes.set(yscale="log", xlim=(-0.55, len(cases) - 0.45), ylabel="times descant's time per gradient step",
             title=f"FedAvg, the same rounds in turn (medians"
                   f"{', and each of several runs' if found.get('runs', 1) > 1 else ''})")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.12)
    axes.set_xticks(range(len(cases)), [
        f"{case['model']}\n{case['parameters']:,} parameters\n"
        f"descant: {case['sides'][DESCANT]['us_per_step']:,.0f} µs" for case in cases])
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    return buffer.getvalue()
