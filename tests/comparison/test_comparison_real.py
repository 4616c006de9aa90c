"""A comparison from the command line to the browser, in real processes."""

from __future__ import annotations

import csv
import json
import re
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cli_helpers import finish, start
from page_helpers import CHROMIUM, browser_page

pytestmark = pytest.mark.slow

EXPERIMENT = """
[data]
dataset = "digits"
partition = "classes"
clients = 8
[algorithm]
name = "pfedme"
K = 2
[train]
rounds = 10
cohort = 4
local = { steps = 5 }
backend = "vectorised"
[eval]
every = 2
"""
METHODS = "pfedme:lam=[5,15],cgpfl:K=2,S=2,ditto"
COMPARE = ("compare", "e.toml", "--algorithms", METHODS, "--seeds", "0,1", "--jobs", "2", "--out", "out")
LABELS = ["pfedme lam=5", "pfedme lam=15", "cgpfl", "ditto", "localtrain", "fedavg + fine-tuning"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a comparison that was made while it was watched, and what was printed."""
    place = tmp_path_factory.mktemp("real")
    (place / "e.toml").write_text(EXPERIMENT)
    code, out, err = finish(*COMPARE, "--tune", "2", cwd=place)
    assert (code, err) == (0, "")
    return place, out


def rows(place: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((place / "out" / "results.csv").read_text().splitlines()))


def test_all_methods_have_the_same_budget(compared: tuple[Path, str]) -> None:
    place, _ = compared
    steps = {}
    for label in LABELS:
        for seed in (0, 1):
            run = place / "out" / "runs" / label / f"seed-{seed}"
            rounds = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            steps[label, seed] = sum(row["grad_steps"] for row in rounds)
    assert set(steps.values()) == {10 * 4 * 5 * 2}


def test_what_is_printed_is_what_is_kept(compared: tuple[Path, str]) -> None:
    place, out = compared
    table = rows(place)
    assert sorted(row["method"] for row in table) == sorted(LABELS)
    means = [float(row["personal"]) for row in table]
    for row, mean in zip(table, means, strict=True):
        assert re.search(rf"^{re.escape(row['method'])} +{mean:.4f} ", out, re.M)
    compared = [row["method"] for row in table if not row["method"].startswith("pfedme")]
    assert re.search(rf"({'|'.join(map(re.escape, ['pfedme lam=5', 'pfedme lam=15', *compared]))}) "
                     rf"(is best|ranks first): its clients' own models reach a mean test accuracy of\s+"
                     rf"{means[0]:.4f}", out)
    assert means[1:] == sorted(means[1:], reverse=True)
    for name in ("results.csv", "comparison.png", "report.html"):
        assert str(Path("out") / name) in out.splitlines()
    for label in LABELS:
        record = (place / "out" / "tuning" / label / "trials.csv").read_text().splitlines()
        assert len(record) == 1 + 2


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
def test_the_page_has_the_table_of_results(compared: tuple[Path, str]) -> None:
    place, out = compared
    table = {row["method"]: row for row in rows(place)}
    trouble: list[str] = []
    with browser_page() as page:
        report = place / "out" / "report.html"
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("request", lambda request: request.url == report.as_uri() or trouble.append(request.url))
        page.goto(report.as_uri())
        page.locator(".chart svg.main-svg").first.wait_for()
        assert page.locator(".answer .lead").inner_text() in out
        page.locator("#all-columns").check()
        heads = page.locator("#results thead th").all_inner_texts()
        shown = {row.get_attribute("data-label"): dict(zip(heads[1:], row.locator("td").all_inner_texts(),
                                                           strict=True))
                 for row in page.locator("#results tbody tr").all()}
        assert page.locator("#results tr.best").get_attribute("data-label") == next(iter(table))
        for chart in page.locator(".chart").all():  # also the clusters and the grid
            chart.scroll_into_view_if_needed()
            chart.locator("svg.main-svg").first.wait_for()
        assert page.locator("#chart-curves").get_attribute("aria-label")
    assert trouble == []
    assert list(shown) == list(table)  # the best first, in both
    assert set(shown) == set(LABELS)
    columns = {"personal": "personal", "global": "global", "worst 10%": "worst_decile", "gain": "gain",
               "auroc": "personal_auroc", "calibration error": "personal_calibration_error"}
    for label, cells in shown.items():
        for title, key in columns.items():
            value = table[label][key]
            if not value:
                assert cells[title] == "-"
                continue
            numbers = [float(part) for part in re.findall(r"-?[0-9.]+", cells[title])]
            low, high = (float(table[label][f"{key}_{end}"]) for end in ("low", "high"))
            ends = [high - float(value)] if "±" in cells[title] else [low, high]
            assert numbers == pytest.approx([float(value), *ends], rel=1e-3, abs=6e-5)
        assert int(cells["steps"].replace(",", "")) == float(table[label]["grad_steps"])


def test_a_comparison_is_watched_while_it_goes_on(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(EXPERIMENT.replace("rounds = 10", "rounds = 40"))
    with start(*COMPARE, cwd=tmp_path) as comparing:
        deadline = time.monotonic() + 60
        while not (tmp_path / "out" / "comparison.json").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        with start("watch", "out", "--port", "0", cwd=tmp_path) as watching:
            try:
                address = re.search(r"http://127\.0\.0\.1:\d+", watching.stdout.readline())
                assert address is not None

                def data() -> dict[str, Any]:
                    with urllib.request.urlopen(f"{address[0]}/data.json", timeout=60) as answer:
                        found: dict[str, Any] = json.loads(answer.read())
                        return found

                states = []
                while comparing.poll() is None:
                    states.append({run["state"] for run in data()["progress"]})
                    time.sleep(0.5)
                assert any("running" in seen for seen in states)
                assert comparing.returncode == 0
                time.sleep(2.5)  # data are read again only after some time
                last = data()
                assert last["finished"]
                assert {row["label"] for row in last["table"]} == set(LABELS)
                assert [row["best"] for row in last["table"]].index(True) == 0
            finally:
                comparing.kill()
                watching.send_signal(signal.SIGINT)
                _, err = watching.communicate(timeout=60)
            assert watching.returncode == 130
            assert "stopped watching" in err
