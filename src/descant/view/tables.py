"""Tables for the terminal: how every table looks, and the two that follow a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from descant.core.metric import figure
from descant.core.privacy.settings import idle_clip
from descant.core.stopwatch import PARTS, Stopwatch
from descant.core.units import duration, size, times
from descant.engine.pool import BUDGET, SHARE

SPREAD = {"mean": "mean", "weighted": "weighted", "std": "std", "worst_decile": "worst 10%"}
BAR = 24  # characters of a share of 100 %
STOPPED = {"converged": "the validation metric no longer improves", "asked": "asked to",
           "budget": "another round would exceed the budget of privacy",
           "diverged": "the next one diverged"}


def table(columns: str, heads: Sequence[str], rows: Iterable[Sequence[RenderableType] | None], *,
          title: str | None = None, bold: int | None = None) -> Table:
    """A table whose columns are described as in LaTeX: `l` and `r` are aligned and never wrapped, `p` is a
    paragraph. A row that is None is a line across. No heads: no header."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, show_header=bool(heads),
                 title=title, title_style="", title_justify="left")
    for kind, head in zip(columns, heads or [""] * len(columns), strict=True):
        made.add_column(head, justify="right" if kind == "r" else "left", no_wrap=kind != "p")
    for k, row in enumerate(rows):
        if row is None:
            made.add_section()
        else:
            made.add_row(*row, style="bold" if k == bold else None)
    return made


def facts_table(facts: Mapping[str, str], width: int) -> Table:
    """Two columns, names and values; the names take at least `width` characters."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=width, no_wrap=True)
    grid.add_column()
    for name, value in facts.items():
        grid.add_row(name, value)
    return grid


# -- a run ---------------------------------------------------------------------------------------------


def show_summary(console: Console, summary: dict[str, Any], directory: Path | None) -> None:
    """Print the metrics of the last and the best round, and what the run cost."""
    console.print(Group("", _scores(summary), "", facts_table(_costs(summary), 14)))
    if directory is not None:  # printed separately and unwrapped: people copy paths
        clusters = directory / "clusters.png"
        drawn = {"curve": directory / "curve.png"} | ({"clusters": clusters} if clusters.exists() else {})
        for label, path in (drawn | {"directory": directory}).items():
            console.print(f"{label:<16}{path}", soft_wrap=True)


def _scores(summary: dict[str, Any]) -> Table:
    rows: list[list[str] | None] = []
    for which in ("last", "best"):
        row = summary[which]
        if row is None:
            continue
        label = f"{which}, {row['round']}"
        for model in (model for model in ("personal", "global") if model in row):
            pooled, test = row[model].get("pooled") or {}, row[model]["test"]
            others = ["accuracy"] if "accuracy" in test else test  # without accuracy, all that was measured
            for metric in dict.fromkeys([summary["metric"], *others]):
                spread = test[metric]
                rows.append([label, model, metric, *(figure(metric, spread[key]) for key in SPREAD),
                             figure(metric, pooled[metric]) if metric in pooled else ""])
                label = ""
        rows.append(None)
    heads = ["round", "model", "metric", *SPREAD.values(), "pooled"]
    return table("lll" + "r" * (len(SPREAD) + 1), heads, rows,
                 title=f"on the clients' own test data (best: by {summary['metric'].replace('_', ' ')} on "
                       "validation data)")


def _costs(summary: dict[str, Any]) -> dict[str, str]:
    facts = {"clients": _clients(summary)}
    if summary["last"] is not None and (failed := summary["last"]["personal"]["failed"]):
        facts["not scored"] = f"{times(failed, 'client')} in the last round"
    if "attackers" in summary:
        facts["attackers"] = f"{times(len(summary['attackers']), 'client')}, not among those that are scored"
    if diverged := _diverged(summary):
        facts["diverged"] = diverged
    facts |= {
        "rejected": times(summary["rejected"], "upload"),
        "gradient steps": f"{summary['grad_steps']:,}",
        "traffic": f"{size(summary['bytes_down'])} down, {size(summary['bytes_up'])} up",
        "time": duration(summary["seconds"]),
    }
    if "privacy" in summary:
        facts["privacy"] = privacy_words(summary["privacy"])
    if summary["stopped"] is not None:
        facts["stopped"] = f"after round {summary['rounds']}: {STOPPED[summary['stopped']]}"
    if words := _choice(summary):
        facts["best round"] = words
    return facts


def _choice(summary: dict[str, Any]) -> str:
    """What there is to know about how the best round was chosen."""
    is_silent = summary.get("privacy", {}).get("figures") == "off"
    if summary["best"] is None:
        if is_silent and summary["last"] is None:
            return "none: privacy.figures = \"off\" keeps the figures that select it with the clients"
        return "none: there is no validation data to select it"
    if is_silent and summary["best"]["round"] != summary["last"]["round"]:
        return ("by validation figures, which no noise protects: a real federation with privacy.figures = "
                "\"off\" has the last round")
    return ""


def privacy_words(spent: dict[str, Any]) -> str:
    """What a run spent of the privacy of its rows or clients, and whether its clip does anything."""
    whose = "of every row" if spent["unit"] == "record" else "of every client"
    clip = spent["clip"]
    if not isinstance(clip, float):
        last = "" if (found := spent.get("last_clip")) is None else f", {found:.3g} in the last round"
        clip = f"at quantile {clip['quantile']:g}{last}"
    words = (f"epsilon {spent['epsilon']:.3g} {whose} (delta {spent['delta']:g}, noise {spent['noise']:g}, "
             f"clip {clip})")
    share = spent["clipped"]
    if share is None:
        return words
    unit = "rows" if spent["unit"] == "record" else "clients"
    if (idle := idle_clip(share, spent["unit"])) is not None:
        return f"{words}; {idle}"
    return f"{words}; clip binds for {share:.0%} of the {unit}"


def _diverged(summary: dict[str, Any]) -> str:
    """How many models diverged in the last and in the best round."""
    found = {which: summary[which]["personal"]["diverged"] for which in ("last", "best")
             if summary[which] is not None}
    if not any(found.values()):
        return ""
    words = ", ".join(f"{times(count, 'client')} in the {which} round" for which, count in found.items())
    first = summary["divergence"]
    return words if first is None else f"{words}; first seen in round {first['round']}"


def _clients(summary: dict[str, Any]) -> str:
    if summary["last"] is None:
        return f"{summary['clients']:,}"
    scored = summary["last"]["personal"]
    newcomers = f"{times(scored['newcomers'], 'newcomer')} (never took part)"
    if scored["clients"] == summary["clients"]:
        return f"{summary['clients']:,}, of them {newcomers}"
    return f"{summary['clients']:,}; {scored['clients']:,} evaluated, of them {newcomers}"


def show_profile(console: Console, watch: Stopwatch, copied: int) -> None:
    """Print the seconds per round of every part, and their shares; and the bytes of samples that were copied
    for it."""
    if not watch.rounds:
        console.print("no round was trained: there is nothing to profile")
        return
    total = max(sum(watch.seconds.values()), 1e-9)
    shares = {part: watch.seconds[part] / total for part in PARTS}
    rows = [[part, duration(watch.seconds[part] / watch.rounds), f"{shares[part]:.1%}",
             "█" * round(shares[part] * BAR), what] for part, what in PARTS.items()]
    console.print(Group("", table("lrrpp", ["part", "per round", "share", "", "description"], rows,
                                  title=f"where the time went: {duration(total)} in "
                                        f"{times(watch.rounds, 'round')}")))
    console.print(f"samples: {size(copied)} copied so that each client's lie together; a copy takes at most "
                  f"{size(BUDGET)}, and {SHARE:.0%} of the free memory" if copied else
                  "samples: used where they lie, without a copy")
