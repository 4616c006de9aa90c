"""The HTML of the page of a comparison: all that can be read without a script, and the frames of the
charts, which `page.js` fills.

A part is replaced as a whole when a page that is watched changes, so each piece of HTML is written in
one place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from descant.report.comparison import COLOURS
from descant.units import figure, times

# of the first seven methods, the second seven and so on; page.js has the same for its lines
DASHES = ("", "6 3", "2 3", "8 3 2 3")
SHAPES = ('<circle cx="14" cy="6" r="3.5"/>', '<path d="M10.5 2.5h7v7h-7z"/>',
          '<path d="M14 1.5l4.5 4.5-4.5 4.5-4.5-4.5z"/>', '<path d="M14 2l4 7.5h-8z"/>')
TO_COME = '<p class="empty">Still to come: this appears when the first runs have finished.</p>'
NOTHING = '<p class="empty">There is nothing to show here: {}.</p>'


def page_parts(data: dict[str, Any]) -> dict[str, str]:
    """The pieces of the page by the names that they have in the template."""
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
    states = [run["state"] for run in runs]
    if data["finished"] and "failed" not in states:
        return ""
    counts = [f"{states.count(state)} {state}" for state in ("running", "waiting", "failed")
              if state in states]
    played, of = (sum(run[key] or 0 for run in runs) for key in ("rounds", "of"))
    rows = [[escape(run["label"]), _text(run["seed"]),
             f"{_bar(run['rounds'] or 0, run['of'] or 1)} {_text(run['rounds'])} of {_text(run['of'])}",
             f'<span class="state {escape(run["state"])}">{escape(run["state"])}</span>',
             escape(run["note"] or "")] for run in runs if run["state"] in ("running", "failed")]
    table = _table("Runs that are going on, and runs that failed",
                   ["method", "seed", "rounds", "state", "note"], rows, prose=[4]) if rows else ""
    return (f'<section class="progress" aria-labelledby="h-progress"><h2 id="h-progress">'
            f"{states.count('done')} of {times(len(runs), 'run')} finished</h2>"
            f'<p class="whole">{_bar(played, of or 1)} {", ".join(counts)}</p>{table}</section>')


def _bar(value: int, most: int) -> str:
    return f'<progress value="{value}" max="{most}" aria-label="{value} of {most} rounds"></progress>'


def _answer(data: dict[str, Any]) -> str:
    first, *others = data["answer"] or ["There is no answer yet."]
    rest = "".join(f"<p>{escape(sentence)}</p>" for sentence in others)
    notes = "".join(f"<li>{escape(note)}</li>" for note in data["notes"])
    cautions = f'<div class="notes"><h3>To keep in mind</h3><ul>{notes}</ul></div>' if notes else ""
    return ('<section class="answer" aria-labelledby="h-answer">'
            '<h2 id="h-answer" class="quiet">The answer</h2>'
            f'<p class="lead">{escape(first)}</p>{rest}{cautions}</section>')


def _results(data: dict[str, Any]) -> str:
    if not data["table"]:
        return _section("table", "Results", TO_COME)
    columns = data["columns"]
    heads = "".join(
        f'<th scope="col" title="{escape(column["help"] or "")}"><button type="button" class="sort" '
        f'id="sort-{k}" data-sort="{escape(column["key"])}">{escape(column["title"])}</button></th>'
        for k, column in enumerate([{"key": "label", "title": "method", "help": ""}, *columns]))
    places = {method["label"]: k for k, method in enumerate(data["methods"])}
    rows = []
    for row in data["table"]:
        cells = (row["cells"].get(column["key"]) for column in columns)
        figures = "".join(f"<td>{escape(cell['text']) if cell else '-'}</td>" for cell in cells)
        swatch = _swatch(places[row["label"]]) if row["label"] in places else ""
        rows.append(f'<tr data-label="{escape(row["label"])}"><th scope="row">{swatch}{escape(row["label"])}'
                    f"</th>{figures}</tr>")
    helps = {column["title"]: column["help"] for column in columns if column["help"]}
    direction = "lower is better" if data["lower_is_better"] else "higher is better"
    return _section("table", "Results", (
        f'{_scroll("results", "Results of every method")}<table id="results"><caption><span>Test '
        f'{escape(data["metric"])} on the clients’ own data; {direction}. A click on a heading sorts.'
        f'</span></caption><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        '<p class="buttons"><button type="button" id="copy-latex" data-copy-table="latex">Copy as LaTeX'
        '</button> <button type="button" id="copy-markdown" data-copy-table="markdown">Copy as Markdown'
        f'</button></p><details id="d-columns"><summary id="s-columns">What the columns mean</summary>'
        f"{_facts(helps)}</details>"))


# -- charts ------------------------------------------------------------------------------------------


def _legend(data: dict[str, Any]) -> str:
    buttons = "".join(
        f'<button type="button" id="show-{k}" aria-pressed="true" data-method="{escape(method["label"])}" '
        f'title="{escape(method["label"])}">{_swatch(k)}<span>{escape(method["label"])}</span></button>'
        for k, method in enumerate(data["methods"]))
    return f'<div class="legend" role="group" aria-label="Methods shown in the charts">{buttons}</div>'


def _curves(data: dict[str, Any]) -> str:
    curves = data["curves"].values()
    if not curves:
        return _section("curves", "Learning", TO_COME)
    seeds = max(len((curve.get("personal") or {}).get("seeds") or {}) for curve in curves)
    has_global = any(curve.get("global") for curve in curves)
    controls = "".join([
        _choice("x", "Against", {"round": "rounds", "bytes": "bytes", "steps": "gradient steps"}),
        _choice("model", "Model", {"personal": "personal", "global": "global"}) if has_global else "",
        '<div class="choice" role="group" aria-label="Axes and seeds">',
        _toggle("logX", "log x"), _toggle("logY", "log y"), _toggle("half", "second half"),
        _toggle("seeds", "each seed") if seeds > 1 else "",
        "</div>"])
    bands = ("Lines are means over the seeds, bands reach from the lowest seed to the highest; with “each "
             "seed”, rings are the rounds with the best validation figure. " if seeds > 1
             else "One seed has no bands. ")
    return _section("curves", "Learning", (
        f'<div class="controls">{controls}</div>{_chart("curves")}<p class="about">Test '
        f"{escape(data['metric'])} on the clients’ own data while the methods learn. {bands}Bytes are those "
        "of one client; a method that sends nothing is a level line at its last figure.</p>"))


def _clients(data: dict[str, Any]) -> str:
    known = data["clients"].get("methods", {})
    reference = data["reference"]
    labels = [label for label in known if label != reference] or list(known)
    if not labels:
        return _section("clients", "Clients", TO_COME)
    options = "".join(f'<option value="{escape(label)}">{escape(label)}</option>' for label in labels)
    if reference in known and reference not in labels:
        alone = escape(reference)
        charts = (
            '<p class="says" id="gain-says"></p><div class="pair">'
            f'<div><h3>Gain of each client</h3>{_chart("gains")}<p class="about">A bar is a client: how '
            f"much better it does with the method than with {alone}, sorted. Bars below zero are clients "
            "that would do better alone.</p></div>"
            f'<div><h3>Alone and together</h3>{_chart("scatter")}<p class="about">A point is a client: with '
            f"{alone} to the right, with the method upwards. Points on the diagonal gain nothing.</p></div>"
            "</div>")
    else:
        charts = NOTHING.format("gains are measured against a method that trains alone, and no such method, "
                                "or no other, has finished")
    return _section("clients", "Clients", (
        f'<div class="controls"><label for="method">Method <select id="method">{options}</select></label>'
        f'</div>{charts}<h3>The clients served worst</h3>{_scroll("worst", "The clients served worst")}'
        f'<table id="worst"></table></div><p class="about">The clients with the worst test '
        f"{escape(data['metric'])} of their personal models under the method chosen above, mean over the "
        "seeds. With few test rows a figure is rough.</p>"))


def _differences(data: dict[str, Any]) -> str:
    differences = data["differences"]
    if not differences:
        return _section("differences", "Differences", NOTHING.format(
            "differences need two methods with the same seeds") if data["finished"] else TO_COME)
    rows = []
    for each in differences:
        words = escape(each["words"] or "")
        if each["clients_words"]:
            words += f'<br><span class="quiet">{escape(each["clients_words"])}</span>'
        ends = (_signed(data, each[end]) for end in ("low", "high"))
        interval = "-" if each["low"] is None else " to ".join(ends)
        rows.append([escape(each["label"]), escape(each["against"]), _signed(data, each["mean"]), interval,
                     _chance(each["p_holm"]), "yes" if each["real"] else "no", words])
    direction = "left" if data["lower_is_better"] else "right"
    table = _table("Paired differences over the seeds",
                   ["method", "against", "difference", "interval", "p (Holm)", "real", "in words"], rows,
                   prose=[6])
    return _section("differences", "Differences", (
        f'{_chart("differences", height=90 + 38 * len(rows))}<p class="about">Mean difference in '
        f"{escape(data['metric'])} over the same seeds, with its interval; to the {direction} of zero is "
        "better. A filled point is a difference that is real by the corrected test, a hollow one may be "
        f"chance.</p>{table}"))


def _grids(data: dict[str, Any]) -> str:
    fields = dict.fromkeys(grid["field"] for grid in data["grids"])
    if not fields:
        return ""
    charts = "".join(f'<div><h3><code>{escape(field)}</code></h3>{_chart("grid", key=field)}</div>'
                     for field in fields)
    return _section("grids", "Hyper-parameters tried", (
        f'<div class="pair">{charts}</div><p class="about">Test {escape(data["metric"])} of the personal '
        "models for each value of a hyper-parameter; the bars are intervals over the seeds.</p>"))


def _clusters(data: dict[str, Any]) -> str:
    if not data["clusters"]:
        return ""
    charts = "".join(f'<h3>{escape(label)}, seed {_text(found["seed"])}</h3>{_chart("clusters", key=label)}'
                     for label, found in data["clusters"].items())
    return _section("clusters", "Clusters", (
        f'{charts}<p class="about">A row is a client, a colour the cluster that it belongs to in that round. '
        "Rows are sorted by the last cluster.</p>"))


def _federation(data: dict[str, Any]) -> str:
    federation = data["federation"]
    facts = _facts(federation.get("facts", {}))
    if not federation.get("names"):
        return _section("federation", "The federation", facts or TO_COME)
    controls, order = "", "sorted from the largest to the smallest"
    if federation.get("classes"):
        choice = _choice("picture", "Show", {"classes": "classes", "sizes": "sizes"})
        controls = f'<div class="controls">{choice}</div>'
        order = "sorted by the class it has most rows of; by size, from the largest to the smallest"
    return _section("federation", "The federation", (
        f'{facts}{controls}{_chart("federation")}<p class="about">A column is a client, {order}.</p>'))


def _chart(kind: str, key: str = "", height: int | None = None) -> str:
    """A frame that page.js fills when it comes into view; what it shows is said in `aria-label`."""
    style = f' style="height:{height}px"' if height else ""
    name = _name(f"chart-{kind}-{key}" if key else f"chart-{kind}")
    return (f'<figure><div class="chart" id="{name}" role="img" tabindex="0" data-chart="{kind}" '
            f'data-key="{escape(key)}" aria-label="A chart that is being made."{style}></div>'
            f'<div class="save"><button type="button" class="link" id="save-{name}" data-save="">Save as SVG'
            "</button></div></figure>")


def _choice(name: str, label: str, options: dict[str, str]) -> str:
    buttons = "".join(f'<button type="button" id="{name}-{value}" data-set="{name}" data-value="{value}" '
                      f'aria-pressed="{"false" if k else "true"}">{text}</button>'
                      for k, (value, text) in enumerate(options.items()))
    return (f'<div class="choice" role="group" aria-label="{label}"><span aria-hidden="true">{label}</span>'
            f"{buttons}</div>")


def _toggle(name: str, text: str) -> str:
    return f'<button type="button" id="{name}" data-toggle="{name}" aria-pressed="false">{text}</button>'


# -- how it came about -------------------------------------------------------------------------------


def _tuning(data: dict[str, Any]) -> str:
    tables = []
    for label, record in data["tuning"].items():
        chosen = "" if record["best"] is None else "; the chosen one is marked"
        rows = [[_text(value) for value in row] for row in record["rows"]]
        tables.append(_table(f"Trials of {label}{chosen}", record["columns"], rows, marked=record["best"]))
    if not tables:
        return ""
    return _section("tuning", "Tuning", "".join(tables) + (
        '<p class="about">Hyper-parameters are chosen by figures on validation rows; the test rows have no '
        "say.</p>"))


def _methods(data: dict[str, Any]) -> str:
    rows = []
    for k, method in enumerate(data["methods"]):
        settings = _settings(method["settings"]) or "-"
        if method["added"]:
            settings += '<br><span class="quiet">Added, to measure the others against.</span>'
        if method["tuned"]:
            settings += f'<br><span class="quiet">Found by tuning:</span> {_settings(method["tuned"])}'
        rows.append([f"{_swatch(k)}{escape(method['label'])}", f"<code>{escape(method['name'])}</code>",
                     _text(method["rounds"]), settings])
    return _section("methods", "Methods", _table(
        "Every method with its hyper-parameters", ["method", "algorithm", "rounds", "settings"], rows,
        prose=[3]))


def _settings(settings: dict[str, Any], within: str = "") -> str:
    """Those of a part, such as a solver, are named as on the command line: solver.lr."""
    return " ".join(
        _settings(value, f"{within}{key}.") if isinstance(value, dict) and value
        else f"<code>{escape(within + key)} = {_text(value)}</code>" for key, value in settings.items())


def _origin(data: dict[str, Any]) -> str:
    return _section("repeat", "To repeat this", (
        _quoted("commands", "the commands", "\n".join(data["commands"]))
        + '<details id="d-experiment"><summary id="s-experiment">The experiment as TOML</summary>'
        + _quoted("experiment", "the experiment", data["experiment"]) + "</details>"
    )) + _section("versions", "Versions", _facts(data["versions"]))


# -- pieces ------------------------------------------------------------------------------------------


def _section(name: str, heading: str, content: str) -> str:
    return (f'<section id="{name}" aria-labelledby="h-{name}"><h2 id="h-{name}">{heading}</h2>{content}'
            "</section>")


def _quoted(name: str, what: str, text: str) -> str:
    return (f'<pre id="{name}" tabindex="0" role="region" aria-label="{what}"><code>{escape(text)}</code>'
            f'</pre><p class="buttons"><button type="button" id="copy-{name}" data-copy="{name}">Copy {what}'
            "</button></p>")


def _scroll(name: str, label: str) -> str:
    """Opens a box that scrolls by itself: wide tables do not widen the page."""
    return (f'<div class="scroll" id="scroll-{_name(name)}" role="region" tabindex="0" '
            f'aria-label="{escape(label)}">')


def _table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, prose: Sequence[int] = (),
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
    return (f"{_scroll(caption, caption)}<table><caption><span>{escape(caption)}</span></caption>"
            f'<thead><tr>{top}</tr></thead><tbody>{"".join(body)}</tbody></table></div>')


def _facts(facts: dict[str, Any]) -> str:
    if not facts:
        return ""
    items = "".join(f"<div><dt>{escape(key)}</dt><dd>{_text(value)}</dd></div>"
                    for key, value in facts.items())
    return f'<dl class="facts">{items}</dl>'


def _swatch(place: int) -> str:
    """The line of a method, as it is in the charts."""
    turn, colour = divmod(place, len(COLOURS))
    turn %= len(DASHES)
    return (f'<svg class="swatch c{colour}" viewBox="0 0 28 12" width="28" height="12" aria-hidden="true">'
            f'<path class="line" d="M0 6h28" stroke-dasharray="{DASHES[turn]}"/>{SHAPES[turn]}</svg>')


def _name(text: str) -> str:
    """What may stand in an id; by it, an element is found again after its part was replaced."""
    return "".join(sign if sign.isalnum() else "-" for sign in text)


def _text(value: Any) -> str:
    """A value of any kind as HTML; numbers without noise."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _chance(p: float | None) -> str:
    return "-" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _signed(data: dict[str, Any], value: float | None) -> str:
    sign = "" if not value else "+" if value > 0 else "−"
    return sign + figure(data["metric"], None if value is None else abs(value))
