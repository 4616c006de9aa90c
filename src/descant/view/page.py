"""A comparison as one HTML file that needs nothing else: no network, no other file.

The words stand in templates (`assets/*.html`); `assets/*.js` draw the charts. The answer and all tables
are plain HTML, readable before any script has run.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
import math
from importlib import resources
from typing import Any, NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined

from descant.core.fields import dotted
from descant.core.metric import figure, is_share
from descant.core.units import times
from descant.view import charts
from descant.view.charts import VERDICTS, Verdict

PARTS = ("title", "progress", "answer", "table", "paper", "legend", "curves", "clients", "differences",
         "grids", "clusters", "federation", "tuning", "methods", "origin")
ON_DEMAND = ("grad_steps",)  # columns that are hidden at first, like those of further metrics
BEST = Verdict("lead", "★", "best")
ROOM = 0.04  # of the scale, on either side
TICKS = 4  # about as many


def render(data: dict[str, Any]) -> bytes:
    """The complete document of a comparison's page data."""
    data = charts.prepare(data)
    parts = _parts(data)
    text = _templates().get_template("page.html").render(
        parts=parts,
        title=data["title"],
        policy=content_policy(live=data["live"]),
        palette=_palette(),
        style=_asset("page.css"),
        script=_script(),
        data=_packed(_json(data | {"parts": parts} if data["live"] else data)),
        plotly=_plotly().packed,
    )
    return text.encode()


def render_json(data: dict[str, Any]) -> bytes:
    """The page data and the parts of the page, for a page that is watched."""
    data = charts.prepare(data)
    return _json(data | {"parts": _parts(data)}).encode()


def content_policy(*, live: bool) -> str:
    """What a browser lets the page do: run its two scripts, and connect to nobody but its own server."""
    scripts = " ".join(f"'sha256-{digest}'" for digest in (_digest(_script()), _plotly().digest))
    connect = "'self'" if live else "'none'"
    return (f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
            f"connect-src {connect}; base-uri 'none'; form-action 'none'")


class Library(NamedTuple):
    packed: str
    digest: str


@functools.cache
def _plotly() -> Library:
    """What draws the charts. It is compressed, and page.js unpacks it: 1.9 MB in place of 4.7."""
    from plotly.offline import get_plotlyjs

    text = get_plotlyjs()
    return Library(_packed(text), _digest(text))


@functools.cache
def _script() -> str:
    """The page's own script; a function keeps its names apart from Plotly's."""
    parts = "\n".join(_asset(name) for name in ("charts.js", "copy.js", "page.js"))
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


@functools.cache
def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _palette() -> str:
    colours = "".join(f"--c{k}:light-dark({day},{night});"
                      for k, (day, night) in enumerate(zip(charts.DAY, charts.NIGHT, strict=True)))
    return f":root{{{colours}}}" + "".join(f".c{k}{{--c:var(--c{k})}}" for k in range(len(charts.DAY)))


def _json(data: dict[str, Any]) -> str:
    looks = [{"colour": f"c{look.colour}", "symbol": look.mark.plotly, "sign": look.mark.sign,
              "dash": ",".join(f"{length}px" for length in look.dash) or "solid"} for look in data["looks"]]
    # with six digits, more than a chart shows, and without NaN, which JSON lacks
    return json.dumps(json.loads(json.dumps(data | {"looks": looks}), parse_constant=lambda name: None,
                                 parse_float=lambda digits: float(f"{float(digits):.6g}")))


# -- the templates -------------------------------------------------------------------------------------


@functools.cache
def _templates() -> Environment:
    made = Environment(loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined,
                       trim_blocks=True, lstrip_blocks=True)
    made.filters |= {"text": _text, "spoken": lambda metric: metric.replace("_", " "),
                     "times": times, "flat": lambda settings: dotted(settings).items()}
    # elements are found by their id after their part was replaced
    made.filters["id"] = lambda title: "".join(sign if sign.isalnum() else "-" for sign in title)
    made.tests["on_demand"] = lambda key: key in ON_DEMAND or (
        key.startswith("personal_") and key != "personal_truth_error")
    return made


def _parts(data: dict[str, Any]) -> dict[str, str]:
    """The HTML of each part of the page."""
    differences = data["differences"]
    verdicts = {each["against"]: VERDICTS[each["verdict"]] for each in differences} | {
        row["label"]: BEST for row in data["table"] if row.get("best")}
    module = _templates().get_template("parts.html").make_module({
        "data": data, "verdicts": verdicts, "forest": _forest(data),
        "looks": {method["label"]: look
                  for method, look in zip(data["methods"], data["looks"], strict=True)},
        "several_seeds": any(len(curve["personal"].get("seeds") or {}) > 1
                             for curve in data["curves"].values())})
    return {name: getattr(module, f"part_{name}")() for name in PARTS}


def _text(value: Any) -> str:
    """A value of any kind; numbers without noise."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# -- differences ---------------------------------------------------------------------------------------


class Scale(NamedTuple):
    """From values to positions, in per cent of the width."""

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


def _forest(data: dict[str, Any]) -> dict[str, Any]:
    """The best method against each of the others: positions on one scale, and the amounts as text."""
    metric, every = data["metric"], data["differences"]
    drawn = [each for each in every if each["verdict"] != "diverged"]
    scale = Scale.of([each[end] for each in drawn for end in ("mean", "low", "high")
                      if each[end] is not None])

    def row(each: dict[str, Any]) -> dict[str, Any]:
        mean, low, high, p = (each[key] for key in ("mean", "low", "high", "p"))
        found = {"against": each["against"], "verdict": VERDICTS[each["verdict"]], "spot": None,
                 "interval": ""}
        if each not in drawn or mean is None:
            return found
        found |= {"spot": f"{scale.at(mean):.2f}", "lead": _amount(metric, mean, plus="+"),
                  "p": "" if p is None else "< 0.001" if p < 0.001 else f"= {p:.3f}"}
        if low is not None and high is not None:
            found |= {"interval": f"{_amount(metric, low)} to {_amount(metric, high)}",
                      "start": f"{scale.at(low):.2f}", "width": f"{scale.at(high) - scale.at(low):.2f}"}
        return found

    factor = 100 if is_share(metric) else 1
    return {"rows": [row(each) for each in every], "best": every[0]["label"] if every else "",
            "unit": ", in points" if is_share(metric) else "", "zero": f"{scale.at(0):.2f}",
            "ticks": [(f"{scale.at(tick):.2f}", f"{factor * tick:.4g}".replace("-", "−"))
                      for tick in scale.ticks()]}


def _amount(metric: str, value: float, plus: str = "") -> str:
    """A difference: of shares in points, of anything else in its own unit."""
    size = f"{100 * abs(value):.1f}" if is_share(metric) else figure(metric, abs(value))
    return size if not float(size) else f"{plus}{size}" if value > 0 else f"−{size}"
