"""How methods look, the same on the page and in pictures: no two of them share colour, dash and mark."""

from __future__ import annotations

from typing import Any, NamedTuple

# Seven colours, with a contrast of 3 at least to a white and to a dark ground, that people with any colour
# vision tell apart: `tests/test_page.py` measures it.
DAY = ("#1C5DC0", "#A81E04", "#054B32", "#D25E8F", "#B8860B", "#0B9BD8", "#000000")
NIGHT = ("#2967DD", "#E56A19", "#2CA761", "#CD68A4", "#FCCC24", "#1FDBFF", "#F4F4F4")
DASHES = ((), (7, 3), (2, 3), (9, 3, 2, 3))  # drawn and left out, in pixels: of the first seven methods, ...
FEW = 8  # methods that can be told apart at a glance; of more, some are drawn in grey
BEST = 5  # that many of the best are in colour then, and the baselines
BASELINES = ("localtrain", "fedavg")


class Mark(NamedTuple):
    """A sign for points, as text, Plotly, SVG (around 14, 6) and Matplotlib have it."""

    sign: str
    plotly: str
    svg: str
    matplotlib: str


MARKS = (
    Mark("●", "circle", '<circle cx="14" cy="6" r="3.5"/>', "o"),
    Mark("■", "square", '<path d="M10.5 2.5h7v7h-7z"/>', "s"),
    Mark("◆", "diamond", '<path d="M14 1.5l4.5 4.5-4.5 4.5-4.5-4.5z"/>', "D"),
    Mark("▲", "triangle-up", '<path d="M14 1.5l4.5 8h-9z"/>', "^"),
    Mark("✚", "cross", '<path d="M12.7 1.5h2.6v3.2h3.2v2.6h-3.2v3.2h-2.6v-3.2h-3.2v-2.6h3.2z"/>', "P"),
    Mark("▼", "triangle-down", '<path d="M14 10.5l4.5-8h-9z"/>', "v"),
    Mark("✖", "x", '<path d="M14 4.2l2.4-2.4 1.8 1.8L15.8 6l2.4 2.4-1.8 1.8L14 7.8l-2.4 2.4-1.8-1.8L12.2 6 '
         '9.8 3.6l1.8-1.8z"/>', "X"),
    Mark("★", "star", '<path d="M14 .8l1.3 3.6 3.8.1-3 2.4 1.1 3.7-3.2-2.2-3.2 2.2 1.1-3.7-3-2.4 3.8-.1z"/>',
         "*"),
)


class Look(NamedTuple):
    """Of the method with some number in the plan."""

    colour: int  # of `DAY` and `NIGHT`
    dash: tuple[int, ...]
    mark: Mark


def look(place: int) -> Look:
    turn, colour = divmod(place, len(DAY))
    return Look(colour, DASHES[turn % len(DASHES)], MARKS[place % len(MARKS)])


def in_front(data: dict[str, Any]) -> list[str]:
    """The methods that are drawn in colour at first: all, or of many the best few and the baselines."""
    methods = data["methods"]
    if len(methods) <= FEW:
        return [method["label"] for method in methods]
    best = [row["label"] for row in data["table"]][:BEST]
    baselines = [method["label"] for method in methods
                 if method["label"] == data["reference"] or method["name"].lower() in BASELINES]
    chosen = {*best, *baselines[:FEW - BEST]}
    return [method["label"] for method in methods if method["label"] in chosen]
