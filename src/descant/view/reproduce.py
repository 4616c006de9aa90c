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
from descant.core.frames import pandas
from descant.core.units import duration, times
from descant.view.tables import table

HEADS = ("claim of the paper", "ours", "verdict")


def listed(items: Sequence[Item], seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """What there is to reproduce: name, source, seconds on this machine, and what is there."""
    found = []
    for item in items:
        about, kept = item.about(), item.kept()
        there = None if kept is None else f"{kept['repetitions']} of {kept['of']} repetitions"
        found.append({"item": item.name, "source": about.source, "seconds": seconds.get(item.name),
                      "needs": about.needs, "kept": there})
    return found


def show_items(console: Console, items: Sequence[Item], seconds: Mapping[str, float]) -> None:
    rows = listed(items, seconds)
    console.print(table("lprl", ["item", "source", "about", "kept"], [
        [row["item"], row["source"], "-" if row["seconds"] is None else duration(row["seconds"]),
         row["kept"] or ("" if row["needs"] is None else f"needs {NEEDS[row['needs']]}")] for row in rows]))
    known = [row["seconds"] for row in rows if row["seconds"] is not None and row["needs"] is None]
    together = "how long they take is not known: --time measures it" if not known else (
        f"{len(known)} of those that an ordinary machine carries take about {duration(sum(known))} of one "
        "core here")
    console.print(f"\n{times(len(rows), 'item')}; {together}", soft_wrap=True)


def show_claims(console: Console, found: Reproduced) -> None:
    """The table of claims, and how many of each verdict there are."""
    matched = "" if found.budget == "rounds" else f", with the same number of gradient {found.budget}"
    console.print(table("ppl", HEADS, found.claims, title=found.item.about().source + matched))
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
        rows = [[name, *claim] for name, claims in self.claims.items() for claim in claims]
        return pandas("reproduction.table()").DataFrame(rows, columns=["item", *HEADS]).set_index("item")

    def __repr__(self) -> str:
        every = [claim for each in self.found for claim in each.claims]
        return f"Reproduction({times(len(self.found), 'item')}, {_counted(every)})"

    def _repr_html_(self) -> str:
        parts = []
        for each in self.found:
            rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in claim) + "</tr>"
                           for claim in each.claims)
            heads = "".join(f"<th>{head}</th>" for head in HEADS)
            parts.append(f"<h4>{escape(each.item.about().source)}</h4><table><thead><tr>{heads}</tr></thead>"
                         f"<tbody>{rows}</tbody></table>")
        return "".join(parts)
