"""The HTML of the page of a comparison: all that can be read without a script, and the frames of the
charts, which `page.js` fills.

A part is replaced as a whole when a page that is watched changes, so each piece of HTML is written in
one place.
"""

from __future__ import annotations

from html import escape
from typing import Any

from descant.core.units import times
from descant.view.page_differences import differences, verdict_on
from descant.view.page_pieces import facts, name, quoted, scroll, section, swatch, table, text

TO_COME = '<p class="empty">Still to come: this appears when the first runs have finished.</p>'
NOTHING = '<p class="empty">There is nothing to show here: {}.</p>'
ON_DEMAND = ("grad_steps",)  # columns that are seen with all the others, beside those of further metrics


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
        "differences": differences(
            data, _none(data, "differences need two methods with the same seeds")),
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
    rows = [[escape(run["label"]), text(run["seed"]),
             f"{_bar(run['rounds'] or 0, run['of'] or 1)} {text(run['rounds'])} of {text(run['of'])}",
             f'<span class="state {escape(run["state"])}">{escape(run["state"])}</span>',
             escape(run["note"] or "")] for run in runs if run["state"] in ("running", "failed")]
    going_on = table("Runs that are going on, and runs that failed",
                     ["method", "seed", "rounds", "state", "note"], rows, prose=[4]) if rows else ""
    return (f'<section class="progress" aria-labelledby="h-progress"><h2 id="h-progress">'
            f"{states.count('done')} of {times(len(runs), 'run')} finished</h2>"
            f'<p class="whole">{_bar(played, of or 1)} {", ".join(counts)}</p>{going_on}</section>')


def _bar(value: int, most: int) -> str:
    return f'<progress value="{value}" max="{most}" aria-label="{value} of {most} rounds"></progress>'


def _answer(data: dict[str, Any]) -> str:
    first, *others = data["answer"] or ["There is no answer yet."]
    about = [data[key] for key in ("population_words", "metric_why") if data.get(key)]
    scope = f'<p class="about">{escape(" ".join(about))}</p>' if about else ""
    rest = "".join(f"<p>{escape(sentence)}</p>" for sentence in others)
    notes = "".join(f"<li>{escape(note)}</li>" for note in data["notes"])
    cautions = f'<div class="notes"><h3>To keep in mind</h3><ul>{notes}</ul></div>' if notes else ""
    return ('<section class="answer" aria-labelledby="h-answer">'
            '<h2 id="h-answer" class="quiet">The answer</h2>'
            f'<p class="lead">{escape(first)}</p>{scope}{rest}{cautions}</section>')


def _results(data: dict[str, Any]) -> str:
    if not data["table"]:
        return section("table", "Results", TO_COME)
    columns = data["columns"]
    kinds = {column["key"]: ' class="more"' if _is_on_demand(column["key"]) else "" for column in columns}
    more = sum(map(bool, kinds.values()))
    first, *others = (_head(k, column, kinds) for k, column in enumerate(columns, 1))
    top = "".join([_head(0, {"key": "label", "title": "method", "help": ""}, {"label": ""}), first,
                   '<th scope="col" class="said">verdict</th>', *others])
    rows = "".join(_result(data, row, kinds) for row in data["table"])
    helps = {column["title"]: column["help"] for column in columns if column["help"]}
    direction = "lower is better" if data["lower_is_better"] else "higher is better"
    switch = ('<p class="controls"><label for="all-columns"><input type="checkbox" id="all-columns"> '
              f"All columns ({more} more)</label></p>" if more else "")
    return section("table", "Results", switch + scroll("results", "Results of every method", (
        f'<table id="results"><caption><span>Test {_metric(data)} on the clients’ own data; {direction}. The '
        f"best method is first. A click on a heading sorts.</span></caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{rows}</tbody></table>")) + (
        '<p class="buttons"><button type="button" id="copy-latex" data-copy-table="latex">Copy as LaTeX'
        '</button> <button type="button" id="copy-markdown" data-copy-table="markdown">Copy as Markdown'
        f'</button></p><details id="d-columns"><summary id="s-columns">What the columns mean</summary>'
        f"{facts(helps)}</details>"))


def _head(k: int, column: dict[str, Any], kinds: dict[str, str]) -> str:
    key = column["key"]
    return (f'<th scope="col"{kinds[key]} title="{escape(column["help"] or "")}"><button type="button" '
            f'class="sort" id="sort-{k}" data-sort="{escape(key)}">{escape(column["title"])}</button></th>')


def _result(data: dict[str, Any], row: dict[str, Any], kinds: dict[str, str]) -> str:
    """A row of the table of results; the best is marked in its first cell too, which stays in sight."""
    label = row["label"]
    cells = ((row["cells"].get(key), kind) for key, kind in kinds.items())
    first, *others = (f"<td{kind}>{escape(cell['text']) if cell else '-'}</td>" for cell, kind in cells)
    places = {method["label"]: k for k, method in enumerate(data["methods"])}
    mark = swatch(places[label]) if label in places else ""
    is_best = row.get("best", False)
    best = ' class="best"' if is_best else ""
    star = '<span class="star" aria-hidden="true">★ </span>' if is_best else ""
    return (f'<tr data-label="{escape(label)}"{best}><th scope="row">{mark}{star}{escape(label)}</th>{first}'
            f'<td class="said">{verdict_on(data, label)}</td>{"".join(others)}</tr>')


def _is_on_demand(key: str) -> bool:
    return key in ON_DEMAND or (key.startswith("personal_") and key != "personal_truth_error")


def _metric(data: dict[str, Any]) -> str:
    return escape(data["metric"].replace("_", " "))


def _none(data: dict[str, Any], why: str) -> str:
    """In place of a part that has nothing in it."""
    return NOTHING.format(why) if data["finished"] else TO_COME


# -- charts ------------------------------------------------------------------------------------------


def _legend(data: dict[str, Any]) -> str:
    buttons = "".join(
        f'<button type="button" id="show-{k}" aria-pressed="true" data-method="{escape(method["label"])}">'
        f'{swatch(k)}<span>{escape(method["label"])}</span></button>'
        for k, method in enumerate(data["methods"]))
    choices = {"front": "best and baselines", "all": "all", "none": "none"}
    if len(data["in_front"]) == len(data["methods"]):
        del choices["front"]
    picks = "".join(f'<button type="button" class="link" id="pick-{key}" data-pick="{key}">{words}</button>'
                    for key, words in choices.items())
    return (f'<div class="legend" role="group" aria-label="Methods in colour in the charts">{buttons}</div>'
            f'<div class="picks" role="group" aria-label="Methods in colour">In colour: {picks}'
            f"{_toggle('grey', 'others in grey')}</div>")


def _curves(data: dict[str, Any]) -> str:
    curves = data["curves"].values()
    if not curves:
        return section("curves", "Learning", _none(data, "no round has been evaluated"))
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
    drawn = data["curve_metric"]
    instead = "" if drawn == data["metric"] else (
        f'<p class="says">The rounds do not record {_metric(data)}: the {escape(drawn.replace("_", " "))} is '
        "drawn in its place.</p>")
    return section("curves", "Learning", (
        f'{instead}<div class="controls">{controls}</div>{_chart("curves")}<p class="about">Test '
        f"{escape(drawn.replace('_', ' '))} on the clients’ own data while the methods learn. {bands}Bytes "
        "are those of one client; a method that sends nothing is a level line at its last figure.</p>"))


def _clients(data: dict[str, Any]) -> str:
    known = data["clients"].get("methods", {})
    reference = data["reference"]
    labels = [label for label in known if label != reference] or list(known)
    if not labels:
        return section("clients", "Clients", _none(data, "no client has a figure"))
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
    worst = scroll("worst", "The clients served worst", '<table id="worst"></table>')
    return section("clients", "Clients", (
        f'<div class="controls"><label for="method">Method <select id="method">{options}</select></label>'
        f'</div>{charts}<h3>The clients served worst</h3><p class="says" id="worst-says"></p>'
        f'<div id="worst-box">{worst}<p class="about">The clients whose personal models have the worst test '
        f"{_metric(data)} under the method chosen above, mean over the seeds: at most ten, and none that is "
        "as good as the median. With few test rows a figure is rough.</p></div>"))


def _grids(data: dict[str, Any]) -> str:
    fields = dict.fromkeys(grid["field"] for grid in data["grids"])
    if not fields:
        return ""
    charts = "".join(f'<div><h3><code>{escape(field)}</code></h3>{_chart("grid", key=field)}</div>'
                     for field in fields)
    return section("grids", "Hyper-parameters tried", (
        f'<div class="pair">{charts}</div><p class="about">Test {_metric(data)} of the personal '
        "models for each value of a hyper-parameter; the bars are intervals over the seeds.</p>"))


def _clusters(data: dict[str, Any]) -> str:
    if not data["clusters"]:
        return ""
    charts = "".join(f'<h3>{escape(label)}, seed {text(found["seed"])}</h3>{_chart("clusters", key=label)}'
                     for label, found in data["clusters"].items())
    return section("clusters", "Clusters", (
        f'{charts}<p class="about">A row is a client, a colour the cluster that it belongs to in that round. '
        "Rows are sorted by the last cluster.</p>"))


def _federation(data: dict[str, Any]) -> str:
    federation = data["federation"]
    known = facts(federation.get("facts", {}))
    if not federation.get("names"):
        return section("federation", "The federation", known or TO_COME)
    controls, order = "", "sorted from the largest to the smallest"
    if federation.get("classes"):
        choice = _choice("picture", "Show", {"classes": "classes", "sizes": "sizes"})
        controls = f'<div class="controls">{choice}</div>'
        order = "sorted by the class it has most rows of; by size, from the largest to the smallest"
    return section("federation", "The federation", (
        f'{known}{controls}{_chart("federation")}<p class="about">A column is a client, {order}.</p>'))


def _chart(kind: str, key: str = "") -> str:
    """A frame that page.js fills when it comes into view; what it shows is said in `aria-label`."""
    place = name(f"chart-{kind}-{key}" if key else f"chart-{kind}")
    return (f'<figure><div class="chart" id="{place}" role="img" tabindex="0" data-chart="{kind}" '
            f'data-key="{escape(key)}" aria-label="A chart that is being made."></div>'
            f'<div class="save"><button type="button" class="link" id="save-{place}" data-save="">Save as SVG'
            "</button></div></figure>")


def _choice(key: str, label: str, options: dict[str, str]) -> str:
    buttons = "".join(f'<button type="button" id="{key}-{value}" data-set="{key}" data-value="{value}" '
                      f'aria-pressed="{"false" if k else "true"}">{words}</button>'
                      for k, (value, words) in enumerate(options.items()))
    return (f'<div class="choice" role="group" aria-label="{label}"><span aria-hidden="true">{label}</span>'
            f"{buttons}</div>")


def _toggle(key: str, words: str) -> str:
    return f'<button type="button" id="{key}" data-toggle="{key}" aria-pressed="false">{words}</button>'


# -- how it came about -------------------------------------------------------------------------------


def _tuning(data: dict[str, Any]) -> str:
    tables = []
    for label, record in data["tuning"].items():
        chosen = "" if record["best"] is None else "; the chosen one is marked"
        rows = [[text(value) for value in row] for row in record["rows"]]
        tables.append(table(f"Trials of {label}{chosen}", record["columns"], rows, marked=record["best"]))
    if not tables:
        return ""
    return section("tuning", "Tuning", "".join(tables) + (
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
        rows.append([f"{swatch(k)}{escape(method['label'])}", f"<code>{escape(method['name'])}</code>",
                     text(method["rounds"]), settings])
    return section("methods", "Methods", table(
        "Every method with its hyper-parameters", ["method", "algorithm", "rounds", "settings"], rows,
        prose=[3]))


def _settings(settings: dict[str, Any], within: str = "") -> str:
    """Those of a part, such as a solver, are named as on the command line: solver.lr."""
    return " ".join(
        _settings(value, f"{within}{key}.") if isinstance(value, dict) and value
        else f"<code>{escape(within + key)} = {text(value)}</code>" for key, value in settings.items())


def _origin(data: dict[str, Any]) -> str:
    return section("repeat", "To repeat this", (
        quoted("commands", "the commands", "\n".join(data["commands"]))
        + '<details id="d-experiment"><summary id="s-experiment">The experiment as TOML</summary>'
        + quoted("experiment", "the experiment", data["experiment"]) + "</details>"
    )) + section("versions", "Versions", facts(data["versions"]))
