"""The best method beside each of the others, on the page: every interval drawn to one scale, its verdict as a
sign and as words.

It is a table and no chart of page.js: it is there without a script, on paper and on a phone, and it is as
high as it has rows.
"""

from __future__ import annotations

import math
from html import escape
from typing import Any, NamedTuple

from descant.core.units import figure, is_share
from descant.view.page_pieces import section, swatch


class Verdict(NamedTuple):
    """On a method that is compared with the best."""

    kind: str  # for the style sheet
    sign: str
    words: str


VERDICTS = {
    "better": Verdict("worse", "▼", "worse"),
    "equivalent": Verdict("equal", "≡", "equivalent"),
    "no difference found": Verdict("open", "○", "no difference found"),
    "withheld": Verdict("withheld", "…", "verdict withheld"),
    "diverged": Verdict("diverged", "✕", "diverged"),
}
BEST = Verdict("lead", "★", "best")
ROOM = 0.04  # of the scale, on either side
TICKS = 4  # about as many


class Scale(NamedTuple):
    """From values to places, in per cent of the width."""

    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Scale:
        low, high = min([0.0, *values]), max([0.0, *values])
        room = ROOM * (high - low) or 1.0
        return cls(low - room, high + room)

    def at(self, value: float) -> float:
        return 100 * (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        raw = (self.high - self.low) / TICKS
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
        return [k * step for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def verdict_on(data: dict[str, Any], label: str) -> str:
    """What a method's row in the table of results says: how it stands to the best."""
    if any(row["label"] == label and row.get("best") for row in data["table"]):
        return _said(BEST)
    found = [VERDICTS[each["verdict"]] for each in data["differences"] if each["against"] == label]
    return _said(found[0]) if found else "-"


def _said(verdict: Verdict) -> str:
    kind, sign, words = verdict
    return f'<span class="verdict {kind}"><span aria-hidden="true">{sign}</span> {words}</span>'


def differences(data: dict[str, Any], nothing: str) -> str:
    """The whole part; `nothing` stands where there are none."""
    every = data["differences"]
    if not every:
        return section("differences", "Differences", nothing)
    scale = Scale.of([each[end] for each in every if each["verdict"] != "diverged"
                      for end in ("mean", "low", "high") if each[end] is not None])
    best = every[0]["label"]
    unit = ", in points" if is_share(data["metric"]) else ""
    zero = f'<span class="zero" style="left:{scale.at(0):.2f}%"></span>'
    ticks = "".join(f'<span class="tick" style="left:{scale.at(tick):.2f}%">{_tick(data, tick)}</span>'
                    for tick in scale.ticks())
    places = {method["label"]: k for k, method in enumerate(data["methods"])}
    rows = "".join(_row(data, each, scale, zero, places) for each in every)
    words = "".join(f"<li>{escape(each['words'])}"
                    + (f'<br><span class="quiet">{escape(each["clients_words"])}</span>'
                       if each["clients_words"] else "") + "</li>" for each in every)
    return section("differences", "Differences", (
        f'<table class="forest"><caption><span>How far {escape(best)} is ahead of each other method in test '
        f"{escape(data['metric'].replace('_', ' '))}{unit}. To the right of zero {escape(best)} is better. "
        "The bars are the simultaneous 95 % intervals that decide."
        '</span></caption><thead><tr><th scope="col">ahead of</th><th scope="col" class="drawn"><span '
        f'class="hidden">interval</span><span class="axis" aria-hidden="true">{zero}{ticks}</span></th>'
        f'<th scope="col">by</th><th scope="col">verdict</th></tr></thead><tbody>{rows}</tbody></table>'
        '<details id="d-words"><summary id="s-words">In words</summary>'
        f'<ul class="words">{words}</ul></details>'))


def _row(data: dict[str, Any], each: dict[str, Any], scale: Scale, zero: str, places: dict[str, int]) -> str:
    against, mean, low, high = (each[key] for key in ("against", "mean", "low", "high"))
    if each["verdict"] == "diverged" or mean is None:
        drawn, amounts = '<span class="off">off the scale ›</span>', "-"
    else:
        place = places.get(against, 0)
        drawn = f'<span class="spot" style="left:{scale.at(mean):.2f}%">{swatch(place)}</span>'
        amounts = f"<b>{amount(data, mean)}</b>"
        if low is not None and high is not None:
            start, end = scale.at(low), scale.at(high)
            drawn = f'<span class="whisker" style="left:{start:.2f}%;width:{end - start:.2f}%"></span>{drawn}'
            amounts += f" ({amount(data, low, plus='')} to {amount(data, high, plus='')})"
        if each["p"] is not None:
            amounts += f' <span class="quiet">p {_chance(each["p"])}</span>'
    mark = swatch(places[against]) if against in places else ""
    return (f'<tr data-label="{escape(against)}"><th scope="row">{mark}{escape(against)}</th>'
            f'<td class="drawn" aria-hidden="true"><span class="axis">{zero}{drawn}</span></td>'
            f"<td>{amounts}</td>"
            f"<td>{_said(VERDICTS[each['verdict']])}</td></tr>")


def amount(data: dict[str, Any], value: float, plus: str = "+") -> str:
    """A difference: of shares in points, of anything else in its own unit."""
    size = f"{100 * abs(value):.1f}" if is_share(data["metric"]) else figure(data["metric"], abs(value))
    return size if not float(size) else f"{plus}{size}" if value > 0 else f"−{size}"


def _tick(data: dict[str, Any], value: float) -> str:
    size = f"{abs(value) * (100 if is_share(data['metric']) else 1):.4g}"
    return f"−{size}" if value < 0 else size


def _chance(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"
