"""The charts of a comparison, prepared once for report.html and comparison.png: which methods are in colour,
how each looks (no two share colour, dash and mark), axes and their titles, verdicts."""

from __future__ import annotations

from typing import Any, NamedTuple

from descant.core.metric import is_share
from descant.experiment.plots import spans_decades

# Seven colours with a contrast of at least 3 to the background, distinguishable with any colour vision:
# `tests/view/test_page.py` measures it.
DAY = ("#1C5DC0", "#A81E04", "#054B32", "#D25E8F", "#B8860B", "#0B9BD8", "#000000")
NIGHT = ("#2967DD", "#E56A19", "#2CA761", "#CD68A4", "#FCCC24", "#1FDBFF", "#F4F4F4")
DASHES = ((), (7, 3), (2, 3), (9, 3, 2, 3))  # pixels on and off; one entry per seven methods
FEW = 8  # the most methods that are all in colour; of more, some are grey
BEST = 5  # how many of the best are in colour then, besides the baselines
BASELINES = ("localtrain", "fedavg")
CONFIDENCE = "95 %"  # of the intervals, unless the data say otherwise


class Mark(NamedTuple):
    """A marker as text, and for Plotly, SVG (centred at 14, 6) and Matplotlib."""

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
    colour: int  # index into `DAY` and `NIGHT`
    dash: tuple[int, ...]
    mark: Mark


class Verdict(NamedTuple):
    """On a method that is compared with the best."""

    kind: str  # its class in the style sheet
    sign: str
    words: str


VERDICTS = {
    "better": Verdict("worse", "▼", "worse"),
    "equivalent": Verdict("equal", "≡", "equivalent"),
    "no difference found": Verdict("open", "○", "no difference found"),
    "withheld": Verdict("withheld", "…", "verdict withheld"),
    "diverged": Verdict("diverged", "✕", "diverged"),
}


def prepare(data: dict[str, Any]) -> dict[str, Any]:
    """The page data of a comparison, with everything that both renderers need to draw its charts."""
    metric = data["curve_metric"].replace("_", " ")
    is_loss = data["lower_is_better"] or data["curve_metric"] != data["metric"]  # the loss replaces a metric
    instead = "" if data["curve_metric"] == data["metric"] else (
        f"The rounds do not record {data['metric'].replace('_', ' ')}: the {metric} is drawn in its place.")
    means = {model: [value for curve in data["curves"].values() if curve.get(model)
                     for value in curve[model]["mean"]] for model in ("personal", "global")}
    return data | {
        "looks": [look(place) for place in range(len(data["methods"]))],
        "in_front": in_front(data),
        "log_y": {model: is_loss and spans_decades(values) for model, values in means.items()},
        "y_title": {"personal": f"test {metric}, personal models", "global": f"test {metric}, global model"},
        "instead": instead,
        "is_share": {name: is_share(name) for name in (data["metric"], data["curve_metric"])},
        "confidence": data.get("confidence", CONFIDENCE),
    }


def look(place: int) -> Look:
    """Of the method with this number in the plan."""
    turn, colour = divmod(place, len(DAY))
    return Look(colour, DASHES[turn % len(DASHES)], MARKS[place % len(MARKS)])


def in_front(data: dict[str, Any]) -> list[str]:
    """The methods that are in colour: all, or of many the best few and the baselines."""
    methods = data["methods"]
    if len(methods) <= FEW:
        return [method["label"] for method in methods]
    best = [row["label"] for row in data["table"]][:BEST]
    baselines = [method["label"] for method in methods
                 if method["label"] == data["reference"] or method["name"].lower() in BASELINES]
    chosen = {*best, *baselines[:FEW - BEST]}
    return [method["label"] for method in methods if method["label"] in chosen]
