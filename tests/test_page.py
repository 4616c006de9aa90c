"""The page of a comparison as a file, and the two commands that show it."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
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

from descant.errors import DescantError, UsageError
from descant.report import commands, watch
from descant.report.page import render, render_json
from page_helpers import nothing_yet, page_data

EVIL = "<script>alert(1)</script>"
EMPTY_TAGS = {"meta", "link", "br", "path", "circle"}
PARTS = ("title", "progress", "answer", "table", "legend", "curves", "clients", "differences", "grids",
         "clusters", "federation", "tuning", "methods", "origin")


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
    assert len(charts) == 7
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
    html = render(data).decode()
    assert found["parts"] == json.loads(carried(html, "data"))["parts"]
    assert all(part in html for part in found["parts"].values())


# -- the commands ------------------------------------------------------------------------------------


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    def page_of(out: Path, **options: Any) -> dict[str, Any]:
        if not (out / "comparison.json").exists():
            raise UsageError(f"{out} is no comparison")
        return page_data()

    monkeypatch.setattr("descant.comparison.page.page_data", page_of)
    made = typer.Typer()
    commands.register(made)
    return made


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
    done = CliRunner().invoke(app, ["report", str(tmp_path), *options])
    assert done.exit_code == 2
    assert message in done.output
    assert list(tmp_path.iterdir()) == []


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
    assert old["notes"][-1] == f"What you see may be old: {told}"
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
