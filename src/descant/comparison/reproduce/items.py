"""Which tables and figures of papers there are to reproduce.

An item is a file of a repository: experiments/PAPER/ITEM.toml, a comparison with a [paper]; or ITEM.py, a
study (`study.py`). Wheels have none of them: they come with the sources.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import descant
from descant.comparison.paper import NEEDS, REPETITIONS
from descant.comparison.reproduce import study
from descant.errors import UsageError, unknown
from descant.experiment.config import read_toml

KINDS = (".toml", ".py")
RESULTS = "results"  # beside the items of a paper


class Item(NamedTuple):
    """A table or a figure of a paper."""

    path: Path

    @property
    def paper(self) -> str:
        return self.path.parent.name

    @property
    def name(self) -> str:
        return f"{self.paper}/{self.path.stem}"

    @property
    def is_study(self) -> bool:
        return self.path.suffix == ".py"

    @property
    def results(self) -> Path:
        """Where what is kept of it lies, in the repository."""
        return self.path.parent / RESULTS / self.path.stem

    def about(self) -> About:
        """What the file says of the item. A study is read, not run: that is for whoever reproduces it."""
        if self.is_study:
            said = study.read_facts(self.path)
            return About(said.source, said.seeds, said.needs)
        table = read_toml(self.path).get("paper")
        if not isinstance(table, dict) or not isinstance(table.get("source"), str):
            raise UsageError(f"{self.path} has no [paper] with a source: an item says what it repeats")
        needs = table.get("needs")
        if needs is not None and needs not in NEEDS:
            raise unknown(f"{self.path}: paper.needs", needs, NEEDS)
        return About(table["source"], table.get("repetitions", REPETITIONS), needs)

    def kept(self) -> dict[str, Any] | None:
        """What is known of the last time that it was reproduced."""
        try:
            found: dict[str, Any] = json.loads((self.results / "about.json").read_text(encoding="utf-8"))
            return found
        except (OSError, ValueError):
            return None


class About(NamedTuple):
    """What an item is."""

    source: str  # as "pFedBreD, Table 1, FMNIST-MCLR"
    repetitions: int
    needs: str | None  # of NEEDS; None: an ordinary machine


def place(given: Path | None = None) -> Path:
    """The directory of the experiments: the one that is named, `experiments` where one stands, or that of the
    sources that descant runs from."""
    if given is not None:
        if not _papers(given):
            raise UsageError(f"{given} holds no items: these are PAPER/ITEM.toml and PAPER/ITEM.py")
        return given
    source = Path(descant.__file__).parents[2] / "experiments"
    for known in (Path("experiments"), source):
        if _papers(known):
            return known
    raise UsageError("the experiments of the papers are in descant's repository, not in the installed "
                     "package: go to a copy of the repository, or name its directory with --experiments")


def _papers(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted({path.parent for kind in KINDS for path in directory.glob(f"*/*{kind}")})


def find(directory: Path) -> list[Item]:
    """All items, by paper and name."""
    return [Item(path) for paper in _papers(directory) for path in sorted(paper.iterdir(), key=_natural)
            if path.suffix in KINDS and not path.name.startswith("_")]


def _natural(path: Path) -> list[tuple[int, str]]:
    """table_2 before table_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.stem.split("_")]


def chosen(items: Sequence[Item], wanted: str | None) -> list[Item]:
    """The items of PAPER, or PAPER/ITEM; all without either."""
    if wanted is None:
        return list(items)
    found = [item for item in items if wanted in (item.paper, item.name)]
    if not found:
        papers = list(dict.fromkeys(item.paper for item in items))
        known = [item.name for item in items if item.paper == wanted.partition("/")[0]] or papers
        raise unknown("paper or item", wanted, known)
    return found


def runnable(items: Sequence[Item], budget: str = "both") -> list[Item]:
    """Those that an ordinary machine can carry; with matched steps alone, comparisons only."""
    return [item for item in items
            if item.about().needs is None and not (item.is_study and budget == "steps")]
