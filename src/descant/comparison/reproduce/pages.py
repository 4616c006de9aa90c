"""docs/results/PAPER.md, written from what is kept of its items: nothing in it is written by hand."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from descant.comparison.paper import NEEDS
from descant.comparison.reproduce import claims
from descant.comparison.reproduce.items import Item, find
from descant.core.files import write_atomic
from descant.core.units import duration, times

HEAD = """# {paper}: its tables and figures, repeated

Written by `descant reproduce` from `experiments/{paper}/results`; do not edit. Figures are those of the
paper's budget (rounds) unless a section says otherwise. A figure *agrees* if it is within one point of the
paper's (10 % where it is no share); an ordering *appears* or is *reversed* if it is significant at 5 % in
ours, and is *open* otherwise.
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
        parts += [_left(item) for item in left]
        parts.append("")
    return "\n".join(parts)


def _left(item: Item) -> str:
    about = item.about()
    why = "" if about.needs is None else f" (needs {NEEDS[about.needs]})"
    return f"- {about.source}: `descant reproduce {item.name}`{why}"


def _section(item: Item, place: Path) -> list[str]:
    kept = item.kept()
    assert kept is not None
    lines = [f"## {kept['source']}\n", *_account(kept, item.results, place)]
    picture = item.results / "figure.png"
    if picture.exists():
        lines.append(f"![{kept['source']}]({_relative(picture, place)})\n")
    matched = item.results / "steps"
    if (matched / "about.json").exists():
        lines += _steps(item, matched, place)
    return lines


def _steps(item: Item, matched: Path, place: Path) -> list[str]:
    """The same with matched gradient steps, and which verdicts change."""
    kept = json.loads((matched / "about.json").read_text(encoding="utf-8"))
    before = {claim.paper: claim.verdict for claim in claims.read(item.results / "claims.csv")}
    changed = [f"{claim.paper} ({before[claim.paper]}, then {claim.verdict})"
               for claim in claims.read(matched / "claims.csv") if before.get(claim.paper) != claim.verdict]
    said = "No verdict changes." if not changed else f"Verdicts that change: {'; '.join(changed)}."
    return [f"### With the same number of gradient steps\n\n{said}\n", *_account(kept, matched, place)]


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
        *(f"| {_plain(claim.paper)} | {_plain(claim.ours)} | {claim.verdict} |" for claim in found), ""]


def _plain(text: str) -> str:
    return text.replace("|", "/")


def _relative(path: Path, place: Path) -> str:
    return Path(os.path.relpath(path.resolve(), place.resolve())).as_posix()
