"""A comparison as one HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
import math
from html import escape
from importlib import resources
from string import Template
from typing import Any, NamedTuple

from descant.view import looks
from descant.view.page_parts import page_parts


def render(data: dict[str, Any]) -> bytes:
    """The complete document of a comparison's page data."""
    data = _whole(data)
    parts = page_parts(data)
    text = Template(_asset("page.html")).substitute(
        parts,
        heading=escape(data["title"]),
        policy=content_policy(live=data["live"]),
        palette=_palette(),
        style=_asset("page.css"),
        script=_asset("page.js"),
        data=_packed(json.dumps({**data, "parts": parts} if data["live"] else data)),
        plotly=_plotly().packed,
    )
    return text.encode()


def render_json(data: dict[str, Any]) -> bytes:
    """The page data and the parts of the page that follow from them, for a page that is watched."""
    data = _whole(data)
    return json.dumps({**data, "parts": page_parts(data)}).encode()


def content_policy(*, live: bool) -> str:
    """What a browser lets the page do: run its two scripts, and ask nobody but who served it."""
    scripts = " ".join(f"'sha256-{digest}'" for digest in (_digest(_asset("page.js")), _plotly().digest))
    asked = "'self'" if live else "'none'"
    return (f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
            f"connect-src {asked}; base-uri 'none'; form-action 'none'")


class Library(NamedTuple):
    packed: str
    digest: str


@functools.cache
def _plotly() -> Library:
    """What draws the charts, compressed: as it is, it would be larger than the page may be."""
    text = (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    opening, closing = "self : this, () => {", "}));"
    if text.count(opening) == 1 and text.endswith(closing):
        # a function in brackets is read once and not twice: charts come a fifth sooner
        text = text.replace(opening, "self : this, (() => {").removesuffix(closing) + "})));"
    return Library(_packed(text), _digest(text))


@functools.cache
def _asset(name: str) -> str:
    return (resources.files("descant.view") / "assets" / name).read_text(encoding="utf-8")


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _palette() -> str:
    colours = "".join(f"--c{k}:light-dark({day},{night});"
                      for k, (day, night) in enumerate(zip(looks.DAY, looks.NIGHT, strict=True)))
    return f":root{{{colours}}}" + "".join(f".c{k}{{--c:var(--c{k})}}" for k in range(len(looks.DAY)))


def _whole(data: dict[str, Any]) -> dict[str, Any]:
    """The page data with how the methods look, for the script."""
    drawn = [looks.look(place) for place in range(len(data["methods"]))]
    plain: dict[str, Any] = _plain(data)
    return plain | {
        "looks": [{"colour": f"c{look.colour}", "symbol": look.mark.plotly, "sign": look.mark.sign,
                   "dash": ",".join(f"{length}px" for length in look.dash) or "solid"} for look in drawn],
        "in_front": looks.in_front(data)}


def _plain(value: Any) -> Any:
    """The same with six digits, which is more than a chart shows, and nothing that is no JSON."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
