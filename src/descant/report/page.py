"""A comparison as one HTML file that needs nothing else: no network, no other file.

Here everything is made that can be read without a script: the answer, the tables, and the frames of
the charts; `page.js` fills the frames. A part is replaced as a whole when a page that is watched
changes, so each piece of HTML has one place where it is written.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
import math
from collections.abc import Iterable
from html import escape
from importlib import resources
from string import Template
from typing import Any, NamedTuple

from descant.report.comparison import COLOURS
from descant.units import figure, times

NIGHT = {"#000000": "#F2F2F2"}  # black would not be seen on a dark page
# of the lines beyond the first, second and third seven; page.js has the same
DASHES = ("", "6 3", "2 3", "8 3 2 3")
SHAPES = ('<circle cx="14" cy="6" r="3.5"/>', '<path d="M10.5 2.5h7v7h-7z"/>',
          '<path d="M14 1.5l4.5 4.5-4.5 4.5-4.5-4.5z"/>', '<path d="M14 2l4 7.5h-8z"/>')
TO_COME = '<p class="empty">Still to come: this appears when the first runs have finished.</p>'
NOTHING = '<p class="empty">There is nothing to show here: {}.</p>'


def render(data: dict[str, Any]) -> bytes:
    """The complete document of a comparison's page data."""
    data = _plain(data)
    parts = page_parts(data)
    text = Template(_asset("page.html")).substitute(
        parts,
        heading=escape(data["title"]),
        policy=content_policy(live=data["live"]),
        palette=_palette(),
        style=_asset("page.css"),
        script=_asset("page.js"),
        data=_packed(json.dumps({**data, "parts": parts} if data["live"] else data).encode()),
        plotly=_plotly().packed,
    )
    return text.encode()


def render_json(data: dict[str, Any]) -> bytes:
    """The page data and the parts of the page that follow from them, for a page that is watched."""
    data = _plain(data)
    return json.dumps({**data, "parts": page_parts(data)}).encode()


def content_policy(*, live: bool) -> str:
    """What a browser lets the page do: run its two scripts, and ask nobody but who served it."""
    scripts = " ".join(f"'sha256-{digest}'" for digest in (_digest(_asset("page.js")), _plotly().digest))
    return (f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
            f"connect-src {SELF if live else NOBODY}; base-uri 'none'; form-action 'none'")


SELF, NOBODY = "'self'", "'none'"


def page_parts(data: dict[str, Any]) -> dict[str, str]:
    """The pieces of the page by name, as the template has them."""
    return {
        "title": f"<h1>{escape(data['title'])}</h1>",
        "progress": _progress(data),
        "answer": _answer(data),
        "table": _results(data),
        "legend": _legend(data),
        "curves": _curves(data),
        "clients": _clients(data),
        "differences": _differences(data),
        "grids": _grids(data),
        "clusters": _clusters(data),
        "federation": _federation(data),
        "tuning": _tuning(data),
        "methods": _methods(data),
        "origin": _origin(data),
    }


# -- what one reads first ----------------------------------------------------------------------------


def _progress(data: dict[str, Any]) -> str:
    runs = data["progress"]
    count = {state: sum(run["state"] == state for run in runs) for state in ("done", "running", "waiting", "failed")}
    if data["finished"] and not count["failed"]:
        return ""
    shown = [run for run in runs if run["state"] in ("running", "failed")]
    heading = (f"{count['done']} of {times(len(runs), 'run')} finished" if not data["finished"]
               else f"{count['failed']} of {times(len(runs), 'run')} failed")
    others = ", ".join(f"{count[state]} {state}" for state in ("running", "waiting", "failed") if count[state])
    played, of = (sum(run[key] or 0 for run in runs) for key in ("rounds", "of"))
    rows = [_row([escape(run["label"]), _text(run["seed"]),
                  f"{_bar(run['rounds'] or 0, run['of'] or 1)} {_text(run['rounds'])} of {_text(run['of'])}",
                  f'<span class="state {escape(run["state"])}">{escape(run["state"])}</span>',
                  escape(run["note"] or "")]) for run in shown]
    table = _table("Runs that are going on, and runs that failed", ["method", "seed", "rounds", "state", "note"],
                   rows) if rows else ""
    bar = "" if data["finished"] else f'<p class="whole">{_bar(played, max(of, 1))} {escape(others)}</p>'
    return f'<section class="progress" aria-labelledby="h-progress"><h2 id="h-progress">{heading}</h2>{bar}{table}</section>'


def _bar(value: int, most: int) -> str:
    return f'<progress value="{value}" max="{most}" aria-label="{value} of {most} rounds"></progress>'


def _answer(data: dict[str, Any]) -> str:
    first, *others = data["answer"] or ["There is no answer yet."]
    rest = "".join(f"<p>{escape(sentence)}</p>" for sentence in others)
    notes = "".join(f"<li>{escape(note)}</li>" for note in data["notes"])
    cautions = f'<div class="notes"><h3>To keep in mind</h3><ul>{notes}</ul></div>' if notes else ""
    return (f'<section class="answer" aria-labelledby="h-answer"><h2 id="h-answer" class="quiet">The answer</h2>'
            f'<p class="lead">{escape(first)}</p>{rest}{cautions}</section>')


def _results(data: dict[str, Any]) -> str:
    if not data["table"]:
        return _section("table", "Results", TO_COME)
    heads = ['<th scope="col"><button type="button" class="sort" data-sort="label">method</button></th>']
    heads += [f'<th scope="col" title="{escape(column["help"])}"><button type="button" class="sort" '
              f'data-sort="{escape(column["key"])}">{escape(column["title"])}</button></th>'
              for column in data["columns"]]
    places = _places(data)
    rows = []
    for row in data["table"]:
        cells = (row["cells"].get(column["key"]) for column in data["columns"])
        shown = "".join(f"<td>{escape(cell['text']) if cell else '-'}</td>" for cell in cells)
        swatch = _swatch(places[row["label"]]) if row["label"] in places else ""
        rows.append(f'<tr data-label="{escape(row["label"])}"><th scope="row">{swatch}'
                    f'{escape(row["label"])}</th>{shown}</tr>')
    helps = "".join(f"<div><dt>{escape(column['title'])}</dt><dd>{escape(column['help'])}</dd></div>"
                    for column in data["columns"])
    direction = "lower is better" if data["lower_is_better"] else "higher is better"
    return _section("table", "Results", (
        f'{_scroll("results", "Results of every method")}<table id="results"><caption>Test '
        f'{escape(data["metric"])} on the clients’ own data; {direction}. A click on a heading sorts.</caption>'
        f'<thead><tr>{"".join(heads)}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        '<p class="buttons"><button type="button" id="copy-latex" data-copy-table="latex">Copy as LaTeX</button> '
        '<button type="button" id="copy-markdown" data-copy-table="markdown">Copy as Markdown</button></p>'
        f'<details id="d-columns"><summary>What the columns mean</summary><dl class="facts">{helps}</dl></details>'))


# -- charts ------------------------------------------------------------------------------------------


def _legend(data: dict[str, Any]) -> str:
    buttons = "".join(
        f'<button type="button" id="show-{k}" aria-pressed="true" data-method="{escape(method["label"])}" '
        f'title="{escape(method["label"])}">{_swatch(k)}<span>{escape(method["label"])}</span></button>'
        for k, method in enumerate(data["methods"]))
    return f'<div class="legend" role="group" aria-label="Methods shown in the charts">{buttons}</div>'


def _curves(data: dict[str, Any]) -> str:
    curves = data["curves"]
    if not curves:
        return _section("curves", "Learning", TO_COME)
    both = any(curve.get("global") for curve in curves.values())
    seeds = max(len((curve.get("personal") or {}).get("seeds") or {}) for curve in curves.values())
    models = _choice("model", "Model", {"personal": "personal", "global": "global"}) if both else ""
    band = (f"A line is the mean over the seeds, its band goes from the interval’s lower to its upper end. "
            if seeds > 1 else "There is one seed, so there are no bands. ")
    controls = (_choice("x", "Against", {"round": "rounds", "bytes": "bytes", "steps": "gradient steps"}) + models
                + '<div class="choice" role="group" aria-label="Axes">' + _toggle("logX", "log x")
                + _toggle("logY", "log y") + _toggle("seeds", "each seed") + "</div>")
    return _section("curves", "Learning", (
        f'<div class="controls">{controls}</div>{_chart("curves")}'
        f'<p class="about">Test {escape(data["metric"])} on the clients’ own data while the methods learn. {band}'
        "Against bytes, which are those of one client, a method that sends nothing is a level line at its last "
        "figure. With “each seed”, rings are the rounds with the best validation figure.</p>"))


def _clients(data: dict[str, Any]) -> str:
    clients = data["clients"]
    labels = [method["label"] for method in data["methods"]
              if method["label"] in clients.get("methods", {}) and method["label"] != data["reference"]]
    labels = labels or [label for label in clients.get("methods", {})]
    if not labels:
        return _section("clients", "Clients", TO_COME)
    reference = data["reference"]
    options = "".join(f'<option value="{escape(label)}">{escape(label)}</option>' for label in labels)
    pick = (f'<div class="controls"><label for="method">Method <select id="method">{options}</select></label>'
            '</div>')
    if reference in clients["methods"]:
        alone = escape(reference)
        charts = (
            '<p class="says" id="gain-says"></p><div class="pair"><div><h3>Gain of each client</h3>'
            f'{_chart("gains")}<p class="about">A bar is a client: how much better it does with the method than '
            f'with {alone}, sorted. Bars below zero are clients that would do better alone.</p></div>'
            f'<div><h3>Alone and together</h3>{_chart("scatter")}<p class="about">A point is a client: with '
            f'{alone} to the right, with the method upwards. Points on the diagonal gain nothing.</p></div></div>')
    else:
        charts = NOTHING.format("gains are measured against a method that trains alone, such as localtrain, and "
                                "none is in this comparison or has finished")
    return _section("clients", "Clients", (
        f'{pick}{charts}<h3 id="h-worst">The clients served worst</h3>'
        f'{_scroll("worst", "The clients served worst")}<table id="worst"></table></div>'
        f'<p class="about">The ten clients with the worst test {escape(data["metric"])} of their personal models '
        "under the method chosen above, mean over the seeds. With few test rows a figure is rough.</p>"))


def _differences(data: dict[str, Any]) -> str:
    differences = data["differences"]
    if not differences:
        return _section("differences", "Differences", TO_COME if not data["finished"] else NOTHING.format(
            "differences need two methods with the same seeds"))
    rows = []
    for each in differences:
        interval = ("-" if each["low"] is None else
                    f"{_signed(data, each['low'])} to {_signed(data, each['high'])}")
        words = escape(each["words"] or "")
        if each.get("clients_words"):
            words += f'<br><span class="quiet">Over clients: {escape(each["clients_words"])}' + (
                "" if each["clients_p"] is None else f" (p = {_text(each['clients_p'])})") + "</span>"
        rows.append(_row([f"{escape(each['label'])} <span class=\"quiet\">against {escape(each['against'])}</span>",
                          _signed(data, each["mean"]), interval, _text(each["p_holm"]),
                          "yes" if each["real"] else "no", words], prose=5))
    height = 90 + 38 * len(differences)
    table = _table("Paired differences over the seeds", ["method", "difference", "interval", "p (Holm)", "real",
                                                         "in words"], rows, prose=5)
    direction = "left" if data["lower_is_better"] else "right"
    return _section("differences", "Differences", (
        f'{_chart("differences", height=height)}<p class="about">Mean difference in {escape(data["metric"])} over '
        f"the same seeds, with its interval; to the {direction} of zero is better. A filled point is a difference "
        f"that is real by the corrected test, a hollow one may be chance.</p>{table}"))


def _grids(data: dict[str, Any]) -> str:
    fields = dict.fromkeys(grid["field"] for grid in data["grids"])
    if not fields:
        return ""
    charts = "".join(f'<div><h3><code>{escape(field)}</code></h3>{_chart("grid", key=field)}</div>'
                     for field in fields)
    return _section("grids", "Hyper-parameters tried", (
        f'<div class="pair">{charts}</div><p class="about">Test {escape(data["metric"])} of the personal models '
        "for each value of a hyper-parameter; bars are intervals over the seeds.</p>"))


def _clusters(data: dict[str, Any]) -> str:
    if not data["clusters"]:
        return ""
    charts = "".join(f'<h3>{escape(label)}, seed {_text(found["seed"])}</h3>{_chart("clusters", key=label)}'
                     for label, found in data["clusters"].items())
    return _section("clusters", "Clusters", (
        f'{charts}<p class="about">A row is a client, a colour the cluster it belongs to in that round. Rows are '
        "sorted by the last cluster: stripes that change at the left settle to the right.</p>"))


def _federation(data: dict[str, Any]) -> str:
    federation = data["federation"]
    facts = _facts(federation.get("facts", {}))
    if not federation.get("names"):
        return _section("federation", "The federation", facts or TO_COME)
    which = (_choice("picture", "Show", {"classes": "classes", "sizes": "sizes"})
             if federation.get("classes") else "")
    about = ("A column is a client. By class, clients are sorted by the class they have most of; by size, from "
             "the largest to the smallest." if federation.get("classes") else
             "A column is a client, sorted from the largest to the smallest.")
    return _section("federation", "The federation", (
        f'{facts}<div class="controls">{which}</div>{_chart("federation")}<p class="about">{about}</p>'))


def _chart(kind: str, key: str = "", height: int | None = None) -> str:
    """A frame that page.js fills when it comes into view; it says what it shows in `aria-label`."""
    style = f' style="height:{height}px"' if height else ""
    return (f'<figure><div class="chart" id="chart-{escape(kind)}{"-" + escape(key) if key else ""}" role="img" '
            f'tabindex="0" data-chart="{escape(kind)}" data-key="{escape(key)}" aria-label="A chart that is being '
            f'made."{style}></div><div class="save"><button type="button" class="link" data-save>Save as SVG'
            "</button></div></figure>")


def _choice(name: str, label: str, options: dict[str, str]) -> str:
    buttons = "".join(f'<button type="button" id="{name}-{value}" data-set="{name}" data-value="{value}" '
                      f'aria-pressed="{"true" if k == 0 else "false"}">{text}</button>'
                      for k, (value, text) in enumerate(options.items()))
    return (f'<div class="choice" role="group" aria-label="{label}"><span aria-hidden="true">{label}</span>{buttons}'
            "</div>")


def _toggle(name: str, text: str) -> str:
    return f'<button type="button" id="{name}" data-toggle="{name}" aria-pressed="false">{text}</button>'


# -- how it came about -------------------------------------------------------------------------------


def _tuning(data: dict[str, Any]) -> str:
    tables = []
    for label, record in data["tuning"].items():
        rows = [_row([_text(value) for value in row], mark="best" if k == record["best"] else "")
                for k, row in enumerate(record["rows"])]
        tables.append(_table(f"Trials of {label}" + ("" if record["best"] is None else "; the chosen one is marked"),
                             record["columns"], rows))
    if not tables:
        return ""
    return _section("tuning", "Tuning", "".join(tables) + (
        '<p class="about">Hyper-parameters were chosen by figures on validation rows; the test rows had no say.'
        "</p>"))


def _methods(data: dict[str, Any]) -> str:
    rows = []
    for k, method in enumerate(data["methods"]):
        settings = " ".join(f"<code>{escape(key)} = {_text(value)}</code>"
                            for key, value in method["settings"].items()) or "-"
        remarks = []
        if method["added"]:
            remarks.append("added, to measure the others against")
        if method["tuned"]:
            remarks.append("tuned: " + ", ".join(f"{escape(key)} = {_text(value)}"
                                                 for key, value in method["tuned"].items()))
        rows.append(_row([f"{_swatch(k)}{escape(method['label'])}", f"<code>{escape(method['name'])}</code>",
                          _text(method["rounds"]), settings, "; ".join(remarks)], prose=3))
    table = _table("Every method with its hyper-parameters", ["method", "algorithm", "rounds", "settings", ""],
                   rows, prose=3)
    return _section("methods", "Methods", table)


def _origin(data: dict[str, Any]) -> str:
    commands = escape("\n".join(data["commands"]))
    return (
        _section("repeat", "To repeat this", (
            f'<pre id="commands" tabindex="0" aria-label="Commands"><code>{commands}</code></pre><p class="buttons">'
            '<button type="button" id="copy-commands" data-copy="commands">Copy the commands</button></p>'
            '<details id="d-experiment"><summary>The experiment as TOML</summary><pre id="experiment" tabindex="0" '
            f'aria-label="The experiment as TOML"><code>{escape(data["experiment"])}</code></pre><p class="buttons">'
            '<button type="button" id="copy-experiment" data-copy="experiment">Copy the experiment</button></p>'
            "</details>"))
        + _section("versions", "Versions", _facts(data["versions"])))


# -- pieces ------------------------------------------------------------------------------------------


def _section(name: str, heading: str, content: str) -> str:
    return f'<section id="{name}" aria-labelledby="h-{name}"><h2 id="h-{name}">{heading}</h2>{content}</section>'


def _scroll(name: str, label: str) -> str:
    """Opens a box that scrolls by itself: wide tables do not widen the page."""
    return f'<div class="scroll" id="scroll-{name}" role="region" tabindex="0" aria-label="{escape(label)}">'


def _table(caption: str, heads: Iterable[str], rows: Iterable[str], prose: int = -1) -> str:
    cells = "".join(f'<th scope="col"{PROSE if k == prose else ""}>{escape(head)}</th>'
                    for k, head in enumerate(heads))
    return (f'{_scroll(_name(caption), caption)}<table><caption>{escape(caption)}</caption><thead><tr>{cells}</tr>'
            f'</thead><tbody>{"".join(rows)}</tbody></table></div>')


PROSE = ' class="prose"'


def _row(cells: list[str], prose: int = -1, mark: str = "") -> str:
    """A row of cells that are HTML already; the one of number `prose` is text that may wrap."""
    first, *others = cells
    shown = "".join(f"<td{PROSE if k == prose else ''}>{cell}</td>" for k, cell in enumerate(others, 1))
    return f'<tr{f" class={chr(34)}{mark}{chr(34)}" if mark else ""}><th scope="row">{first}</th>{shown}</tr>'


def _facts(facts: dict[str, str]) -> str:
    if not facts:
        return ""
    items = "".join(f"<div><dt>{escape(key)}</dt><dd>{escape(str(value))}</dd></div>" for key, value in facts.items())
    return f'<dl class="facts">{items}</dl>'


def _swatch(place: int) -> str:
    """The line of a method, as it is in the charts."""
    colour, turn = place % len(COLOURS), place // len(COLOURS) % len(DASHES)
    return (f'<svg class="swatch c{colour}" viewBox="0 0 28 12" width="28" height="12" aria-hidden="true">'
            f'<path class="line" d="M0 6h28" stroke-dasharray="{DASHES[turn]}"/>{SHAPES[turn]}</svg>')


def _places(data: dict[str, Any]) -> dict[str, int]:
    return {method["label"]: k for k, method in enumerate(data["methods"])}


def _name(text: str) -> str:
    """Of a caption, what may stand in an id: elements that are replaced are found again by it."""
    return "".join(sign if sign.isalnum() else "-" for sign in text.lower())


def _text(value: Any) -> str:
    """A value of any kind as HTML; numbers without noise."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _signed(data: dict[str, Any], value: float | None) -> str:
    if value is None:
        return "-"
    return ("+" if value > 0 else "−" if value < 0 else "") + figure(data["metric"], abs(value))


# -- what the document carries -----------------------------------------------------------------------


class Packed(NamedTuple):
    packed: str
    digest: str


@functools.cache
def _plotly() -> Packed:
    """The library that draws, compressed: as it is, it alone would be larger than the page may be."""
    text = (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    return Packed(_packed(text.encode()), _digest(text))


@functools.cache
def _asset(name: str) -> str:
    return (resources.files("descant.report") / "assets" / name).read_text(encoding="utf-8")


def _packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _palette() -> str:
    colours = "".join(f"--c{k}:light-dark({colour},{NIGHT.get(colour, colour)});"
                      for k, colour in enumerate(COLOURS))
    return f":root{{{colours}}}" + "".join(f".c{k}{{--c:var(--c{k})}}" for k in range(len(COLOURS)))


def _plain(value: Any) -> Any:
    """The same with six digits, which is more than a chart shows, and nothing that is no JSON."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
