"""Pieces of HTML that several parts of a page are made of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from descant.view.looks import look


def section(key: str, heading: str, content: str) -> str:
    return (f'<section id="{key}" aria-labelledby="h-{key}"><h2 id="h-{key}">{heading}</h2>{content}'
            "</section>")


def quoted(key: str, what: str, content: str) -> str:
    return (f'<pre id="{key}" tabindex="0" role="region" aria-label="{what}"><code>{escape(content)}</code>'
            f'</pre><p class="buttons"><button type="button" id="copy-{key}" data-copy="{key}">Copy {what}'
            "</button></p>")


def scroll(key: str, label: str, content: str) -> str:
    """A box that scrolls by itself: wide tables do not widen the page. page.js shows where there is more."""
    return (f'<div class="scroller"><div class="scroll" id="scroll-{name(key)}" role="region" tabindex="0" '
            f'aria-label="{escape(label)}">{content}</div><p class="more-hint quiet" aria-hidden="true">'
            "More columns: scroll sideways →</p></div>")


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, prose: Sequence[int] = (),
           marked: int | None = None) -> str:
    """A table of cells that are HTML already; those of the columns `prose` are text that may wrap."""
    kinds = [' class="prose"' if k in prose else "" for k in range(len(heads))]
    top = "".join(f'<th scope="col"{kind}>{escape(head)}</th>'
                  for head, kind in zip(heads, kinds, strict=True))
    body = []
    for k, (first, *others) in enumerate(rows):
        cells = "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(others, kinds[1:], strict=True))
        opening = '<tr class="best">' if k == marked else "<tr>"
        body.append(f'{opening}<th scope="row">{first}</th>{cells}</tr>')
    return scroll(caption, caption, (
        f"<table><caption><span>{escape(caption)}</span></caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table>"))


def facts(of: dict[str, Any]) -> str:
    if not of:
        return ""
    items = "".join(f"<div><dt>{escape(key)}</dt><dd>{text(value)}</dd></div>"
                    for key, value in of.items())
    return f'<dl class="facts">{items}</dl>'


def swatch(place: int) -> str:
    """The line of a method, as it is in the charts."""
    colour, dash, mark = look(place)
    return (f'<svg class="swatch c{colour}" viewBox="0 0 28 12" width="28" height="12" aria-hidden="true">'
            f'<path class="line" d="M0 6h28" stroke-dasharray="{" ".join(map(str, dash))}"/>{mark.svg}</svg>')


def name(title: str) -> str:
    """What may stand in an id; by it, an element is found again after its part was replaced."""
    return "".join(sign if sign.isalnum() else "-" for sign in title)


def text(value: Any) -> str:
    """A value of any kind as HTML; numbers without noise."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
