"""docs/results/PAPER.md, written from what is kept of its items: nothing in it is written by hand."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from descant.comparison.paper import NEEDS
from descant.comparison.reproduce import baselines, claims, orderings
from descant.comparison.reproduce.claims import Claim
from descant.comparison.reproduce.items import Item, find
from descant.comparison.reproduce.times import measured_in, took
from descant.core.files import write_atomic
from descant.core.units import duration, times

STEPS = "steps"  # what is kept with matched gradient steps, beside what is kept with the paper's budget

HEAD = """# {paper}: its tables and figures, repeated

Written by `descant reproduce` from `experiments/{paper}/results`; do not edit. Figures are those of the
paper's budget (rounds) unless a section says otherwise. Verdicts are computed:

- A figure *agrees* if it is within one point of the paper's (10 % where it is no share). Otherwise *ours is
  higher* or *lower*; by more than 10 points (where it is no share, a factor of two) it is *not reproduced*.
- An ordering of two *appears* or is *reversed* if it is significant at 5 % in ours, corrected for the number
  of tests, and is *open* otherwise.
- An order of several methods *holds* if all of its pairs appear; *in part* if some do, some are open and none
  is reversed; it is *open* if all pairs are, and *does not hold* if one is reversed. Where a method was read
  in two ways, both stand beside the printed figure, and the order is judged with one of them at a time. Tau
  is a mean over the repetitions; it is missing where an order was judged anew when its runs were gone.
- What is simply so or not *holds* or *does not hold*, without a test. A method that has *diverged* in a
  repetition has no figure; *missing* is a method or a claim that the item has gained since it was run.

Of LocalTrain and FedAvg with fine-tuning it is said which methods are significantly ahead of them and behind,
by the mean over the clients of their own models; methods that the paper scores by their model for all have no
part in it. Computing is that of all runs of a table, also of those that it shares with others. The time of
what was not run is estimated from a round of each method (`--time`), for the paper's budget.
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
    parts = [HEAD.format(paper=paper.name), f"{_how_far(done, left)}\n"]
    for item in done:
        parts += _section(item, place)
    if left:
        parts.append("## Not run\n")
        expected = measured_in(paper.parent)
        parts += [_left(item, expected.get(item.name)) for item in left]
        parts.append("")
    return "\n".join(parts)


def _how_far(done: list[Item], left: list[Item]) -> str:
    """How many items have been run, and what became of their claims."""
    count, needing = len(done) + len(left), sum(item.about().needs is not None for item in left)
    told = f"{len(done)} of {times(count, 'item')} {'has' if len(done) == 1 else 'have'} been run"
    if needing:
        others = "the others need" if 1 < needing == len(left) else (
            f"{needing} of the others need{'s' if needing == 1 else ''}")
        told += f"; {others} a GPU or other data"
    found = [claim for item in done for claim in claims.read(item.results / "claims.csv")]
    return f"{told}. Verdicts, with the paper's budget: {_verdicts(found)}." if found else f"{told}."


def _verdicts(found: list[Claim]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(
        claim.verdict for claim in found).most_common())


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
    pairs = orderings.sentences(orderings.read(where),
                                f"[{orderings.FILE}]({_relative(where / orderings.FILE, place)})")
    return [
        f"```\n{kept['command']}\n```\n",
        f"{times(kept['repetitions'], 'repetition')}{fewer}, {took(kept)}, "
        f"commit {kept['commit']}; [results.csv]({_relative(where / 'results.csv', place)}). "
        f"Verdicts: {_verdicts(found)}.\n",
        "| claim of the paper | ours | verdict |\n|---|---|---|",
        *(f"| {' | '.join(map(_plain, claim.cells))} |" for claim in found), "",
        *(f"{_plain(said)}\n" for said in (*pairs, *baselines.sentences(baselines.read(where))))]


def _plain(text: str) -> str:
    return text.replace("|", "/")


def _relative(path: Path, place: Path) -> str:
    return Path(os.path.relpath(path.resolve(), place.resolve())).as_posix()
