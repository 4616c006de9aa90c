"""The picture of a benchmark: speed beside the lean loop, and how cost grows."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.speed.contest import FLOOR, LEAN
from descant.core.units import size, times

# Okabe and Ito's colours, told apart by people with any colour vision; and markers, for those with none
STYLES: dict[str, tuple[str, str, str]] = {  # side: colour, marker, what the legend says
    LEAN: ("#666666", "s", "lean PyTorch loop"),
    "loop": ("#E69F00", "v", "descant: loop"),
    "vectorised": ("#0072B2", "o", "descant: vectorised"),
    "processes": ("#009E73", "D", "descant: processes"),
    "auto": ("#D55E00", "*", "descant: auto"),
    FLOOR: ("#000000", "_", "bare products on all cores"),
}
OTHER = ("#CC79A7", "P")  # of a backend that is not among these
METHODS = {"fedavg": "FedAvg", "pfedme": "pFedMe", "mh": "pFedBreD (mh)"}
GREY = "#666666"
MANY = 100  # times from the least to the largest value: decades are ticks enough


def draw(found: dict[str, Any]) -> bytes:
    """The picture as a PNG file."""
    cases, growth, machine = found["cases"], found["growth"], found["machine"]
    methods = Counter(case["method"] for case in cases)
    heights = [4.0, 3.6] if growth else [4.0]
    width = 13 if growth else max(7, 1.6 * len(cases))
    figure = Figure(figsize=(width, sum(heights) + 0.6), layout="constrained")
    figure.suptitle(f"descant on {machine['processor']}, {times(machine['cores'], 'core')}, torch "
                    f"{machine['torch']}", fontsize=10, color=GREY, parse_math=False)
    parts: Any = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    parts[0].suptitle("Training: how many times as fast as a lean PyTorch loop (medians of "
                      f"{found['repetitions']})", fontsize=12)
    panels = parts[0].subplots(1, len(methods), sharey=True, squeeze=False,
                               width_ratios=list(methods.values()))[0]
    for axes, method in zip(panels, methods, strict=True):
        _draw_speed(axes, [case for case in cases if case["method"] == method])
        axes.set_title(METHODS.get(method, method), fontsize=10)
    panels[0].set_ylabel("times as fast as the lean loop", fontsize=9)
    if growth:
        parts[1].suptitle("How cost grows: pFedMe on softmax regression, and on wider and wider networks",
                          fontsize=12)
        _draw_growth(parts[1].subplots(1, 4), growth)
    sides = dict.fromkeys(side for case in cases for side in case["sides"])
    figure.legend(handles=[_handle(side) for side in sides], loc="outside lower center",
                  ncols=len(sides) if width > 9 else 3, fontsize=9, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    return buffer.getvalue()


def _draw_speed(axes: Any, cases: list[dict[str, Any]]) -> None:
    """Each backend beside the lean loop, and how far it could go."""
    axes.axhline(1, color=GREY, linewidth=2)
    for place, case in enumerate(cases):
        sides = [side for side in case["sides"] if side not in (LEAN, FLOOR)]
        for k, side in enumerate(sides):
            ratio, (colour, marker, _) = case["sides"][side]["times_as_fast_as_lean_loop"], _style(side)
            at, up = place + 0.19 * (k - (len(sides) - 1) / 2), ratio >= 1
            axes.plot([at, at], [1, ratio], color=colour, linewidth=2, alpha=0.5, solid_capstyle="butt")
            axes.plot(at, ratio, color=colour, marker=marker, markersize=11 if marker == "*" else 7)
            axes.annotate(f"{ratio:.1f}", (at, ratio), xytext=(0, 6 if up else -6), fontsize=8, color=colour,
                          textcoords="offset points", ha="center", va="bottom" if up else "top")
        if FLOOR in case["sides"]:
            limit = case["sides"][FLOOR]["times_as_fast_as_lean_loop"]
            axes.plot([place - 0.4, place + 0.4], [limit, limit], color="black", linewidth=2)
            axes.annotate(f"{limit:.1f}", (place, limit), xytext=(0, 3), textcoords="offset points",
                          ha="center", va="bottom", fontsize=8)
    axes.set_yscale("log")
    _tick(axes.yaxis, lambda value: f"{value:g}", (1, 2, 5))
    axes.margins(y=0.12)
    axes.set_xlim(-0.55, len(cases) - 0.45)
    axes.set_xticks(range(len(cases)), [
        f"{case['model']}\n{case['parameters']:,} parameters\n"
        f"lean step {_microseconds(case['sides'][LEAN]['us_per_step'])}" for case in cases])
    _finish(axes, "y")


def _draw_growth(panels: Iterable[Any], growth: dict[str, list[dict[str, Any]]]) -> None:
    """Time and memory against what grows."""
    wanted = (
        ("clients", "us_per_step", "more clients, 10 of them in a round", "clients"),
        ("clients", "peak_memory_bytes", "memory for more clients", "clients"),
        ("cohort", "us_per_step", "more clients in a round, of 1,000", "clients in a round"),
        ("parameters", "us_per_step", "larger models, 10 clients", "parameters of the model"),
    )
    for axes, (curve, what, title, label) in zip(panels, wanted, strict=True):
        points, is_time = growth[curve], what == "us_per_step"
        every = []
        for side in points[0]["sides"]:
            values = [point["sides"][side][what] for point in points]
            if None in values:
                continue
            colour, marker, _ = _style(side)
            axes.plot([point["at"] for point in points], values, color=colour, markersize=5,
                      linewidth=2 if side == FLOOR else 1.5, marker="" if side == FLOOR else marker)
            every += values
        axes.set(xscale="log", yscale="log", title=title, xlabel=label,
                 ylabel="time per gradient step" if is_time else "peak memory, all processes")
        _spread(axes, min(every), max(every))
        many = max(every) / min(every) > MANY
        _tick(axes.xaxis, _count, (1,))
        _tick(axes.yaxis, _microseconds if is_time else _bytes, (1,) if many else (1, 2, 5))
        _finish(axes, "both")


def _spread(axes: Any, low: float, high: float) -> None:
    """At least a decade: small differences shall look small."""
    room = max(1.3, (10 * low / high) ** 0.5)
    axes.set_ylim(low / room, high * room)


def _tick(axis: Any, told: Callable[[float], str], subs: tuple[int, ...]) -> None:
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: told(value)))
    axis.set_minor_formatter(NullFormatter())


def _style(side: str) -> tuple[str, str, str]:
    return STYLES.get(side, (*OTHER, f"descant: {side}"))


def _handle(side: str) -> Line2D:
    colour, marker, label = _style(side)
    if side in (LEAN, FLOOR):
        return Line2D([], [], color=colour, linewidth=2, label=label,
                      marker="s" if side == LEAN else None, markersize=6)
    return Line2D([], [], color=colour, marker=marker, markersize=10 if marker == "*" else 7, linewidth=2,
                  label=label)


def _finish(axes: Any, grid: str) -> None:
    axes.tick_params(labelsize=8)
    axes.title.set_size(10)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_size(9)
    axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _microseconds(value: float) -> str:
    for unit in ("µs", "ms"):
        if value < 1000:
            return f"{value:.2g} {unit}" if value < 100 else f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.2g} s"


def _bytes(value: float) -> str:
    return size(round(value)).replace(".0 ", " ")


def _count(value: float) -> str:
    for unit in ("", "k"):
        if value < 1000:
            return f"{value:g}{unit}"
        value /= 1000
    return f"{value:g}M"
