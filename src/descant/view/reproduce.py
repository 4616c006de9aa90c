"""Items of papers, and their claims beside ours, as tables and as an object of Python."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.console import Console

from descant.comparison.paper import NEEDS
from descant.comparison.reproduce.claims import Claim
from descant.comparison.reproduce.execute import Reproduced
from descant.comparison.reproduce.items import Item
from descant.comparison.reproduce.times import took
from descant.core.frames import pandas
from descant.core.units import duration, times
from descant.view.tables import table

HEADS = ("claim of the paper", "ours", "verdict")


def listed(items: Sequence[Item], seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """What there is to reproduce: name, source, what is there with the time that it took, and the seconds
    that the others would take on this machine, where they are known."""
    found = []
    for item in items:
        about, kept = item.about(), item.kept()
        found.append({"item": item.name, "source": about.source, "needs": about.needs, "kept": kept,
                      "seconds": None if kept is not None else seconds.get(item.name)})
    return found


def show_items(console: Console, items: Sequence[Item], seconds: Mapping[str, float]) -> None:
    rows = listed(items, seconds)
    console.print(table("lprl", ["item", "source", "time", "kept"], [
        [row["item"], row["source"], *_time_and_kept(row)] for row in rows]))
    known = [row["seconds"] for row in rows if row["seconds"] is not None and row["needs"] is None]
    left = sum(row["kept"] is None and row["needs"] is None for row in rows)
    console.print(f"\n{times(len(rows), 'item')}{_left(left, known)}", soft_wrap=True)


def _left(count: int, known: Sequence[float]) -> str:
    """How long those take that are not run, as far as it is known."""
    if not count:
        return ""
    some = "" if len(known) == count else f"{len(known)} of them "
    time = ("in which time is not known: --time measures it" if not known else
            f"{some}in about {duration(sum(known))} of one core here, at the papers' budgets")
    return f"; an ordinary machine can run {count} more, {time}"


def _time_and_kept(row: Mapping[str, Any]) -> tuple[str, str]:
    kept = row["kept"]
    if kept is not None:
        return f"took {took(kept)}", f"{kept['repetitions']} of {kept['of']} repetitions"
    return ("-" if row["seconds"] is None else f"about {duration(row['seconds'])}",
            "" if row["needs"] is None else f"needs {NEEDS[row['needs']]}")


def show_claims(console: Console, found: Reproduced) -> None:
    """The table of claims, and how many of each verdict there are."""
    matched = "" if found.budget == "rounds" else f", with the same number of gradient {found.budget}"
    console.print(table("ppl", HEADS, [claim.cells for claim in found.claims],
                        title=found.item.about().source + matched))
    console.print(_counted(found.claims), soft_wrap=True)
    for remark in found.remarks:
        console.print(remark.replace("**", ""), soft_wrap=True, markup=False)
    console.print(f"{found.directory}", soft_wrap=True)


def _counted(claims: Sequence[Claim]) -> str:
    count = Counter(claim.verdict for claim in claims)
    return f"{times(len(claims), 'claim')}: {', '.join(f'{n} {verdict}' for verdict, n in count.items())}"


@dataclasses.dataclass(frozen=True, repr=False)
class Reproduction:
    """Items of papers that were reproduced."""

    found: tuple[Reproduced, ...]

    @property
    def claims(self) -> dict[str, list[Claim]]:
        """By the name of the item, with ", same steps" after it where these are matched."""
        return {each.name: each.claims for each in self.found}

    def table(self) -> Any:
        """All claims as a pandas DataFrame."""
        rows = [[name, *claim.cells] for name, claims in self.claims.items() for claim in claims]
        return pandas("reproduction.table()").DataFrame(rows, columns=["item", *HEADS]).set_index("item")

    def __repr__(self) -> str:
        every = [claim for each in self.found for claim in each.claims]
        return f"Reproduction({times(len(self.found), 'item')}, {_counted(every)})"

    def _repr_html_(self) -> str:
        parts = []
        for each in self.found:
            rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in claim.cells) + "</tr>"
                           for claim in each.claims)
            heads = "".join(f"<th>{head}</th>" for head in HEADS)
            parts.append(f"<h4>{escape(each.item.about().source)}</h4><table><thead><tr>{heads}</tr></thead>"
                         f"<tbody>{rows}</tbody></table>")
        return "".join(parts)
