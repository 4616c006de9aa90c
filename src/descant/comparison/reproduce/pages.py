"""docs/results/PAPER.md, written from what is kept of its items: nothing in it is written by hand."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from descant.comparison.paper import NEEDS
from descant.comparison.reproduce import baselines, claims
from descant.comparison.reproduce.items import Item, find
from descant.comparison.reproduce.times import measured_in
from descant.core.files import write_atomic
from descant.core.units import duration, times

STEPS = "steps"  # what is kept with matched gradient steps, beside what is kept with the paper's budget

HEAD = """# {paper}: its tables and figures, repeated

Written by `descant reproduce` from `experiments/{paper}/results`; do not edit. Figures are those of the
paper's budget (rounds) unless a section says otherwise. A figure *agrees* if it is within one point of the
paper's (10 % where it is no share); an ordering *appears* or is *reversed* if it is significant at 5 % in
ours, and is *open* otherwise. Of LocalTrain and FedAvg with fine-tuning it is said which methods are
significantly ahead of them and behind, by the mean over the clients of their own models. Computing is that of
all runs of a table, also of those that it shares with others. The time of what was not run was estimated from
a round of each method (`--time`), at the paper's budget.
"""


def write(paper: Path) -> None:
    """Write the page of a paper's directory, if the repository has a place for it."""
    place = paper.parent.parent / "docs" / "results"
    if place.is_dir():
        write_atomic(place / f"{paper.name}.md", page(paper, place).encode())


def page(paper: Path, place: Path) -> str:
    """The page of a paper, as it lies in a directory."""
    items = [item for item in find(paper.parent) if item.paper == paper.name]
    done = [item for item in items if item.kept() is not None]
    left = [item for item in items if item.kept() is None]
    parts = [HEAD.format(paper=paper.name),
             f"{len(done)} of {times(len(items), 'item')} {'has' if len(done) == 1 else 'have'} been run.\n"]
    for item in done:
        parts += _section(item, place)
    if left:
        parts.append("## Not run\n")
        expected = measured_in(paper.parent)
        parts += [_left(item, expected.get(item.name)) for item in left]
        parts.append("")
    return "\n".join(parts)


def _left(item: Item, seconds: float | None) -> str:
    about = item.about()
    why = f" (needs {NEEDS[about.needs]})" if about.needs is not None else "" if seconds is None else (
        f" (about {duration(seconds)} of one core)")
    return f"- {about.source}: `descant reproduce {item.name}`{why}"


def _section(item: Item, place: Path) -> list[str]:
    kept = item.kept()
    assert kept is not None
    lines = [f"## {kept['source']}\n", *_account(kept, item.results, place)]
    picture = item.results / "figure.png"
    if picture.exists():
        lines.append(f"![{kept['source']}]({_relative(picture, place)})\n")
    return lines + _steps(item, place)


def _steps(item: Item, place: Path) -> list[str]:
    """The same with matched gradient steps, and which verdicts change."""
    if item.is_study:
        return []
    head = "### With the same number of gradient steps\n"
    matched = item.results / STEPS
    try:
        kept = json.loads((matched / "about.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [head, f"Not run: `descant reproduce {item.name} --budget steps`\n"]
    told = [head, f"{_plain(what_changes(item))}\n"]
    return told if _same_runs(item) else [*told, *_account(kept, matched, place)]


def _same_runs(item: Item) -> bool:
    """Whether both budgets have the same runs; then the figures are the same to the last digit."""
    both = [place / "results.csv" for place in (item.results, item.results / STEPS)]
    return all(path.exists() for path in both) and both[0].read_bytes() == both[1].read_bytes()


def what_changes(item: Item) -> str:
    """What is otherwise with matched gradient steps than with the paper's rounds."""
    matched = item.results / STEPS
    if not (item.results / "claims.csv").exists():
        return "What changes is not known: the paper's budget has not been run."
    if _same_runs(item):
        return ("Nothing changes: all methods take as many gradient steps in a round, so that the runs are "
                "the same.")
    before = {claim.paper: claim.verdict for claim in claims.read(item.results / "claims.csv")}
    changed = [f"{claim.paper} ({before[claim.paper]}, then {claim.verdict})"
               for claim in claims.read(matched / "claims.csv")
               if before.get(claim.paper, claim.verdict) != claim.verdict]
    moved = baselines.changes(baselines.read(item.results), baselines.read(matched))
    return " ".join([
        "No verdict changes." if not changed else f"Verdicts that change: {'; '.join(changed)}.",
        *([f"What stands otherwise beside the baselines: {'; '.join(moved)}."] if moved else [])])


def _account(kept: dict[str, Any], where: Path, place: Path) -> list[str]:
    """Command, commit and the table of claims."""
    found = claims.read(where / "claims.csv")
    fewer = "" if kept["repetitions"] == kept["of"] else f" of the {kept['of']} that are planned"
    counted = Counter(claim.verdict for claim in found)
    return [
        f"```\n{kept['command']}\n```\n",
        f"{times(kept['repetitions'], 'repetition')}{fewer}, {duration(kept['seconds'])} of computing, "
        f"commit {kept['commit']}; [results.csv]({_relative(where / 'results.csv', place)}). "
        f"Verdicts: {', '.join(f'{count} {verdict}' for verdict, count in counted.items())}.\n",
        "| claim of the paper | ours | verdict |\n|---|---|---|",
        *(f"| {_plain(claim.paper)} | {_plain(claim.ours)} | {claim.verdict} |" for claim in found), "",
        *(f"{_plain(said)}\n" for said in baselines.sentences(baselines.read(where)))]


def _plain(text: str) -> str:
    return text.replace("|", "/")


def _relative(path: Path, place: Path) -> str:
    return Path(os.path.relpath(path.resolve(), place.resolve())).as_posix()
