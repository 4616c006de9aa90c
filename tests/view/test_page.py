"""The page of a comparison as a file, and the two commands that show it."""

from __future__ import annotations

import base64
import gzip
import http.client
import itertools
import json
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from descant import cli
from descant.errors import DescantError, UsageError
from descant.view import charts, watch
from descant.view.comparison import draw_comparison
from descant.view.page import render, render_json
from page_helpers import nothing_yet, page_data

EVIL = "<script>alert(1)</script>"
EMPTY_TAGS = {"meta", "link", "br", "path", "circle", "input"}
PARTS = ("title", "progress", "answer", "table", "paper", "legend", "curves", "clients", "differences",
         "grids", "clusters", "federation", "tuning", "methods", "origin")


class Reader(HTMLParser):
    """Tags with their attributes, in order; fails where one is closed that was not open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY_TAGS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in EMPTY_TAGS:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def carried(html: str, name: str) -> str:
    """What the document carries packed."""
    found = re.search(f'<script type="text/plain" id="{name}">([^<]*)</script>', html)
    assert found is not None
    return gzip.decompress(base64.b64decode(found[1])).decode()


@pytest.fixture(scope="module")
def big() -> str:
    return render(page_data(10, 5, 200, 100, 10, 41)).decode()


def test_a_large_comparison_is_one_file_of_less_than_three_megabytes(big: str) -> None:
    assert len(big.encode()) < 3_000_000
    assert "plotly" in carried(big, "plotly")[:100]
    assert json.loads(carried(big, "data"))["curves"] == page_data(10, 5, 200, 100, 10, 41)["curves"]


def test_nothing_is_asked_of_the_network(big: str) -> None:
    for tag, attributes in Reader(big).tags:
        for name in ("src", "srcset", "action", "data", "poster"):
            assert name not in attributes, tag
        if "href" in attributes:
            assert (attributes["href"] or "")[:1] == "#" or attributes["href"] == "data:,"
    assert "connect-src 'none'" in big
    assert "@import" not in big
    assert "url(" not in big


def test_it_is_whole_html_with_names_for_what_is_shown(big: str) -> None:
    page = Reader(big)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all(name and " " not in name for name in ids)
    charts = [attributes for _, attributes in page.tags if attributes.get("class") == "chart"]
    assert len(charts) == 6
    assert all(chart["role"] == "img" and chart["aria-label"] for chart in charts)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("h1") == tags.count("main") == 1
    assert tags.count("caption") == tags.count("table") - 1  # the worst clients are filled in by the script
    assert all("scope" in attributes for tag, attributes in page.tags if tag == "th")


def test_the_parts_come_in_the_order_of_reading(big: str) -> None:
    places = [big.index(f'data-part="{name}"') for name in PARTS]
    assert places == sorted(places)


def test_the_answer_and_the_table_stand_in_the_file_itself() -> None:
    data = page_data()
    text = Reader(render(data).decode()).text
    assert all(sentence in text for sentence in (*data["answer"], *data["notes"], *data["commands"]))
    assert all(cell["text"] in text for row in data["table"] for cell in row["cells"].values())
    assert all(each["words"] in text for each in data["differences"])
    assert data["experiment"] in text


def evil_data() -> dict[str, Any]:
    """Everything that people or their data name is code."""
    text = json.dumps(page_data(10, 2, 20, 6)).replace('"ditto"', json.dumps(EVIL))
    data: dict[str, Any] = json.loads(text)
    data.update(title=EVIL, answer=[EVIL, EVIL], notes=[EVIL], commands=[EVIL], experiment=EVIL + "${x}$y",
                versions={EVIL: EVIL}, finished=False)
    data["progress"][0].update(state="failed", note=EVIL)
    data["methods"][2].update(settings={EVIL: EVIL}, tuned={EVIL: [EVIL]})
    data["clients"]["names"][0] = data["federation"]["names"][0] = EVIL
    data["federation"].update(facts={EVIL: EVIL}, class_names=[EVIL] * 10)
    data["grids"][0]["field"] = data["grids"][1]["field"] = EVIL
    data["tuning"] = {EVIL: {"columns": [EVIL], "rows": [[EVIL]], "best": 0}}
    data["columns"][0].update(title=EVIL, help=EVIL)
    return data


def test_names_that_are_code_are_only_text() -> None:
    html = render(evil_data()).decode()
    assert EVIL not in html
    assert "alert(1)" in Reader(html).text
    assert [tag for tag, _ in Reader(html).tags].count("script") == 3


def test_a_comparison_that_has_just_begun_says_what_is_to_come() -> None:
    page = Reader(render(nothing_yet()).decode())
    assert page.text.count("Still to come") == 4  # the table, the curves, the clients, the differences
    assert "0 of 15 runs finished" in page.text
    assert "7 of 60" in page.text
    charts = [attributes["data-chart"] for _, attributes in page.tags if attributes.get("class") == "chart"]
    assert charts == ["federation"]


def test_a_finished_comparison_waits_for_nothing() -> None:
    text = Reader(render(nothing_yet(finished=True)).decode()).text
    assert "no round has been evaluated" in text
    assert "no client has a score" in text
    assert "differences need two methods" in text


def test_a_metric_without_curves_has_the_loss_in_its_place() -> None:
    data = page_data() | {"metric": "balanced_accuracy", "curve_metric": "loss",
                          "metric_why": "Classes are unbalanced."}
    text = Reader(render(data).decode()).text
    assert "The rounds do not record balanced accuracy: the loss is drawn in its place." in text
    assert text.index(data["answer"][0]) < text.index("This speaks of new rows") < text.index(
        "Classes are unbalanced.") < text.index(data["answer"][1])
    assert "do not record" not in Reader(render(page_data()).decode()).text


def rows_of(html: str, table: str) -> list[str]:
    """The rows of the body of a table, as HTML."""
    body = html[html.index(f'<table {table}'):]
    return re.findall("<tr.*?</tr>", body[body.index("<tbody>"):body.index("</tbody>")])


def test_the_best_method_is_first_and_marked_and_a_diverged_one_is_told() -> None:
    data = page_data(10)
    html = render(data).decode()
    rows = rows_of(html, 'id="results"')
    assert [re.search('data-label="([^"]*)"', row)[1] for row in rows] == [  # type: ignore[index]
        row["label"] for row in data["table"]]
    assert ['class="best"' in row for row in rows] == [True] + [False] * 9
    assert "★ </span>" in rows[0]
    assert "best</span>" in rows[0]
    verdicts = {each["against"]: each["verdict"] for each in data["differences"]}
    assert set(verdicts.values()) >= {"better", "withheld", "diverged"}
    words = {"better": "▼</span> worse", "equivalent": "≡</span> equivalent", "diverged": "✕</span> diverged",
             "no difference found": "○</span> no difference found", "withheld": "…</span> verdict withheld"}
    for row, label in zip(rows[1:], (row["label"] for row in data["table"][1:]), strict=True):
        assert words[verdicts[label]] in row


def test_every_difference_has_a_mark_an_interval_and_a_verdict() -> None:
    data = page_data(20)
    rows = rows_of(render(data).decode(), 'class="forest"')
    assert len(rows) == 19
    ends = []
    for row, each in zip(rows, data["differences"], strict=True):
        if each["verdict"] == "diverged":
            assert "off the scale" in row
            assert "whisker" not in row
            continue
        assert row.count('class="spot"') == row.count('class="whisker"') == row.count('class="zero"') == 1
        start, width = map(float, re.search("whisker\" style=\"left:(.*?)%;width:(.*?)%", row).groups())  # type: ignore[union-attr]
        spot = float(re.search("spot\" style=\"left:(.*?)%", row)[1])  # type: ignore[index]
        assert 0 <= start < spot < start + width <= 100
        ends.append((each["low"], start))
        mean, low, high = (f"{'−' if each[end] < 0 else ''}{100 * abs(each[end]):.1f}"
                           for end in ("mean", "low", "high"))
        assert f"<b>+{mean}</b> ({low} to {high})" in row
    by_value = sorted(ends)
    assert by_value == sorted(ends, key=lambda end: end[1])  # one scale for all


def test_a_difference_of_one_seed_or_of_nothing_is_drawn_too() -> None:
    data = page_data(2)
    data["differences"][0].update(mean=0.0, low=None, high=None, p=None)
    [row] = rows_of(render(data).decode(), 'class="forest"')
    assert "<b>0.0</b></td>" in row
    data["differences"][0].update(mean=None)
    assert "off the scale" in rows_of(render(data).decode(), 'class="forest"')[0]


def test_further_metrics_are_seen_on_demand() -> None:
    html = render(page_data()).decode()
    assert "All columns (3 more)" in html  # auroc, loss, and gradient steps
    assert all(row.count('class="more"') == 3 for row in rows_of(html, 'id="results"'))


# -- looks ---------------------------------------------------------------------------------------------


def light(colour: str) -> list[float]:
    parts = [int(colour[k:k + 2], 16) / 255 for k in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(one: str, other: str) -> float:
    weights = (0.2126, 0.7152, 0.0722)
    low, high = sorted(sum(map(float.__mul__, light(each), weights)) for each in (one, other))
    return (high + 0.05) / (low + 0.05)


# what people see who lack a kind of cones (Machado, Oliveira and Fernandes 2009, severity 1)
VISION = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
               (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
                 (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
                (0.004733, 0.691367, 0.303900))}


def lab(colour: str, vision: str) -> tuple[float, float, float]:
    """CIE L*a*b* of what is seen of a colour."""
    seen = [min(1.0, max(0.0, sum(a * b for a, b in zip(row, light(colour), strict=True))))
            for row in VISION[vision]]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(a * b for a, b in zip(row, seen, strict=True)) / white
           for row, white in zip(to_xyz, (0.95047, 1, 1.08883), strict=True)]
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize(("colours", "ground"), [(charts.DAY, "#fcfcfb"), (charts.NIGHT, "#14171b")])
def test_colours_are_seen_and_told_apart(colours: tuple[str, ...], ground: str, vision: str) -> None:
    assert min(contrast(colour, ground) for colour in colours) >= 3  # WCAG AA of what is no text
    assert min(math.dist(lab(a, vision), lab(b, vision)) for a, b in itertools.combinations(colours, 2)) > 20


def test_fifty_methods_look_different() -> None:
    assert len({charts.look(place) for place in range(50)}) == 50
    assert len({charts.look(place)[:2] for place in range(28)}) == 28  # also where no marks are drawn


def test_of_many_methods_the_best_and_the_baselines_are_in_front() -> None:
    assert charts.in_front(page_data(8)) == [method["label"] for method in page_data(8)["methods"]]
    data = page_data(20)
    front = charts.in_front(data)
    assert {row["label"] for row in data["table"][:5]} | {"localtrain", "fedavg"} <= set(front)
    assert len(front) <= 8


@pytest.mark.pictures
@pytest.mark.parametrize("methods", [1, 3, 20])
@pytest.mark.parametrize("change", [
    {}, {"curves": {}, "grids": []}, {"curve_metric": "loss", "metric": "auroc", "grids": []}])
def test_the_picture_of_a_comparison_has_every_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      methods: int, change: dict[str, Any]) -> None:
    data = page_data(methods) | change
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: (
        figures.append(figure), file.write(b"a picture")))
    draw_comparison(data, tmp_path / "comparison.png")
    [figure] = figures
    labels = [method["label"] for method in data["methods"]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == labels
    left, right, *more = figure.axes
    if data["curves"]:
        assert len(left.lines) == len(right.lines) == methods
        assert left.get_ylabel() == f"test {data['curve_metric']}, personal models"
        assert ("auroc" in left.get_title()) == (data["metric"] == "auroc")
    else:
        assert [text.get_text() for text in left.texts] == ["no round has been evaluated"]
    if methods > 1:
        forest = more[0]
        assert [text.get_text() for text in forest.get_yticklabels()] == [
            each["against"] for each in data["differences"]]
        drawn = [tuple(line.get_xdata()) for line in forest.lines]
        for each in data["differences"]:
            interval = (100 * each["low"], 100 * each["high"])
            assert (interval in drawn) == (each["verdict"] != "diverged")


@pytest.mark.pictures
@pytest.mark.thorough
def test_page_and_picture_draw_the_same_prepared_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                        ) -> None:
    data = page_data(12) | {"lower_is_better": True, "metric": "loss", "curve_metric": "loss",
                            "confidence": "98.3 %"}
    data["curves"]["fedprox"]["personal"]["mean"][-1] = 1e6
    prepared = charts.prepare(data)
    carried_data = json.loads(carried(render(data).decode(), "data"))
    assert carried_data["log_y"] == prepared["log_y"] == {"personal": True, "global": False}
    assert carried_data["in_front"] == prepared["in_front"]
    assert "simultaneous 98.3 % intervals" in Reader(render(data).decode()).text
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: (
        figures.append(figure), file.write(b"a picture")))
    draw_comparison(data, tmp_path / "comparison.png")
    [figure] = figures
    left, _, forest, *_ = figure.axes
    assert (left.get_yscale(), left.get_ylabel()) == ("log", prepared["y_title"]["personal"])
    assert "simultaneous 98.3 % intervals" in forest.get_title()
    coloured = [label for label, line in zip(data["curves"], left.lines, strict=True) if line.get_marker()]
    assert coloured == prepared["in_front"]
    assert [line.get_color() for line in left.lines if line.get_marker()] == [
        charts.DAY[look.colour] for look, method in zip(prepared["looks"], data["methods"], strict=True)
        if method["label"] in coloured]


def test_failed_runs_are_told_at_the_top() -> None:
    data = page_data()
    data["progress"][3].update(state="failed", note="the loss is not finite in round 12", rounds=12)
    text = Reader(render(data | {"finished": False}).decode()).text
    assert text.index("14 of 15 runs finished") < text.index(data["answer"][0])
    assert "the loss is not finite in round 12" in text


def test_without_a_method_that_trains_alone_no_gains_are_shown() -> None:
    page = Reader(render(page_data() | {"reference": None}).decode())
    assert "gains are measured against a method that trains alone" in page.text
    assert not {"gains", "scatter"} & {attributes.get("data-chart") for _, attributes in page.tags}


def test_numbers_that_are_none_are_left_out() -> None:
    data = page_data()
    data["clients"]["methods"]["fedavg"][0] = float("nan")
    data["curves"]["fedavg"]["personal"]["mean"][2] = float("inf")
    found = json.loads(carried(render(data).decode(), "data"))
    assert found["clients"]["methods"]["fedavg"][0] is None
    assert found["curves"]["fedavg"]["personal"]["mean"][2] is None


def test_what_is_polled_has_the_parts_of_the_page() -> None:
    data = page_data() | {"live": True}
    found = json.loads(render_json(data))
    assert found["curves"] == data["curves"]
    assert set(found["parts"]) == set(PARTS)
    assert len(found["looks"]) == len(data["methods"])
    html = render(data).decode()
    assert found["parts"] == json.loads(carried(html, "data"))["parts"]
    assert all(part in html for part in found["parts"].values())


# -- the commands ------------------------------------------------------------------------------------


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    def plan_of(out: Path) -> None:
        if not (out / "comparison.json").exists():
            raise UsageError(f"{out} is no comparison")

    monkeypatch.setattr("descant.view.comparison.read_plan", plan_of)
    monkeypatch.setattr("descant.comparison.page.page_data", lambda out, **options: page_data())
    return cli.app


def test_report_writes_the_page_and_says_where(app: typer.Typer, tmp_path: Path) -> None:
    (tmp_path / "comparison.json").touch()
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert done.output == f"{tmp_path / 'report.html'} (2.0 MB)\n"
    assert (tmp_path / "report.html").read_bytes() == render(page_data())


@pytest.mark.parametrize(("options", "message"), [
    (["-o", "none/x.html"], "there is no directory"), (["-o", "."], "is a directory"),
    ([], "is no comparison")])
def test_report_refuses_what_cannot_be(app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                       options: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    if options:
        (tmp_path / "comparison.json").touch()
    before = list(tmp_path.iterdir())
    done = CliRunner().invoke(app, ["report", str(tmp_path), *options])
    assert done.exit_code == 2
    assert message in done.output
    assert list(tmp_path.iterdir()) == before


# -- watching ----------------------------------------------------------------------------------------


class Source:
    """Page data that change or fail as a test wants it."""

    def __init__(self) -> None:
        self.now, self.reads = 0.0, 0
        self.error: Exception | None = None

    def read(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        self.reads += 1
        return page_data() | {"title": f"reading {self.reads}"}

    def latest(self) -> watch.Latest:
        return watch.Latest(self.read, lambda: self.now)


def test_data_are_read_again_only_after_some_time() -> None:
    source = Source()
    latest = source.latest()
    assert latest.data()["title"] == "reading 1"
    source.now = watch.EVERY
    assert latest.data()["title"] == "reading 2"
    assert latest.data()["title"] == "reading 2"


@pytest.mark.parametrize(("error", "told"), [
    (DescantError("half a line"), "half a line"), (KeyError("rounds"), "KeyError: 'rounds'")])
def test_data_that_cannot_be_read_leave_the_old_ones_with_a_note(error: Exception, told: str) -> None:
    source = Source()
    latest = source.latest()
    source.error, source.now = error, watch.EVERY
    old = latest.data()
    assert old["title"] == "reading 1"
    assert old["notes"][:-1] == page_data()["notes"]
    assert old["notes"][-1] == f"This page may be out of date: {told}"
    source.error, source.now = None, 2 * watch.EVERY
    assert latest.data()["notes"] == page_data()["notes"]


def test_what_is_wrong_from_the_beginning_is_told_at_once() -> None:
    source = Source()
    source.error = UsageError("no comparison")
    with pytest.raises(UsageError, match="no comparison"):
        source.latest()


@contextmanager
def serving(port: int | None = 0) -> Iterator[watch.Watch]:
    with watch.Watch(Source().latest(), port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: watch.Watch, path: str, host: str | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    try:
        connection.request("GET", path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        answer.body = answer.read()  # type: ignore[attr-defined]
        return answer
    finally:
        connection.close()


def test_the_page_and_its_data_are_served_and_nothing_else() -> None:
    with serving() as server:
        page = ask(server, "/")
        assert (page.status, page.getheader("Content-Type")) == (200, "text/html; charset=utf-8")
        assert page.body == render(page_data() | {"title": "reading 1", "live": True})  # type: ignore[attr-defined]
        data = ask(server, "/data.json")
        assert json.loads(data.body)["live"] is True  # type: ignore[attr-defined]
        for answer in (page, data):
            assert answer.getheader("Cache-Control") == "no-store"
            assert answer.getheader("X-Content-Type-Options") == "nosniff"
            assert "connect-src 'self'" in answer.getheader("Content-Security-Policy", "")
        for path in ("/report.html", "/../comparison.json", "/data.json/", "/?x"):
            assert ask(server, path).status == 404


def test_only_names_of_this_machine_are_answered() -> None:
    with serving() as server:
        assert server.server_address[0] == "127.0.0.1"
        port = server.server_port
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
            assert ask(server, "/data.json", host).status == 200
        for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", ""):
            assert ask(server, "/data.json", host).status == 403


def test_a_port_that_is_taken_is_told_or_avoided() -> None:
    with serving() as first, pytest.raises(DescantError, match=f"port {first.server_port} is taken"):
        watch.Watch(first.latest, first.server_port)
    with serving(None) as first, serving(None) as second:
        assert first.server_port != second.server_port
