"""The page of a comparison as a person meets it: in a browser, with a pointer, keys, paper or a phone."""

from __future__ import annotations

import json
import re
import statistics
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_page import EVIL, evil_data

from descant.view import watch
from descant.view.page import render
from page_helpers import CHROMIUM, browser_page, draw_all, nothing_yet, one_browser, page_data

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")]
Page = Any
CELLS = "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.innerText))"
METHODS = "(name) => [...new Set(document.getElementById(name).data.flatMap((trace) => trace.meta))]"


@pytest.fixture(scope="module", autouse=True)
def _one_browser() -> Iterator[None]:
    with one_browser():
        yield


@pytest.fixture
def trouble() -> Iterator[list[str]]:
    """What the browser complained about, and what it asked for beyond the page; there must be nothing."""
    found: list[str] = []
    yield found
    assert found == []


def open_page(page: Page, data: dict[str, Any], tmp_path: Path, trouble: list[str]) -> None:
    """The report as a file, with its first chart."""
    place = tmp_path / "report.html"
    place.write_bytes(render(data))
    page.on("console", lambda message: trouble.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
    page.on("dialog", lambda dialog: trouble.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: trouble.append(request.url) if request.url != place.as_uri() else None)
    page.goto(place.as_uri())
    page.locator(".chart svg.main-svg").first.wait_for()


def methods(page: Page, chart: str) -> list[str]:
    found: list[str] = page.evaluate(METHODS, chart)
    return found


def test_the_big_page_is_complete_and_quiet(tmp_path: Path, trouble: list[str]) -> None:
    data = page_data(10, 5, 200, 100, 10, 41)
    with browser_page() as page:
        open_page(page, data, tmp_path, trouble)
        assert page.locator(".answer .lead").inner_text() == data["answer"][0]
        drawn = "document.querySelectorAll('.chart.js-plotly-plot').length"
        assert page.evaluate(drawn) < page.locator(".chart").count() == 6  # others wait until they are seen
        draw_all(page)
        assert page.evaluate(drawn) == 6
        for chart in page.locator(".chart").all():
            assert re.search(r"\d", chart.get_attribute("aria-label"))
        assert set(methods(page, "chart-curves")) == {method["label"] for method in data["methods"]}
        label = page.locator("#chart-curves").get_attribute("aria-label")
        assert f"fedavg {data['curves']['fedavg']['personal']['mean'][-1]:.4f}" in label


def test_the_table_has_the_figures_and_sorts(tmp_path: Path, trouble: list[str]) -> None:
    data = page_data()

    def rows(page: Page) -> list[list[str]]:
        found: list[list[str]] = page.locator("#results tbody tr").evaluate_all(CELLS)
        return found

    given = [[row["label"], *(row["cells"][column["key"]]["text"] for column in data["columns"])]
             for row in data["table"]]
    with browser_page() as page:
        open_page(page, data, tmp_path, trouble)
        found = rows(page)
        assert found[0][0] == f"★ {given[0][0]}"
        assert found[0][2] == "★ best"
        assert [[row[0].removeprefix("★ "), row[1], *row[3:]] for row in found] == given
        assert page.locator("#results tr.best").count() == 1
        page.locator("#results th button", has_text="global").click()
        assert page.locator("#results th[aria-sort=descending]").inner_text().startswith("global")
        found = [row[3] for row in rows(page)]
        assert found == [*sorted(found[:-1], reverse=True), "-"]
        page.locator("#results th button", has_text="global").press("Enter")
        assert [row[3] for row in rows(page)] == [*sorted(found[:-1]), "-"]


@pytest.mark.parametrize(("count", "width", "dark"), [  # any two values meet
    (3, 390, False), (3, 768, True), (3, 1280, False), (20, 390, True), (20, 768, False), (20, 1280, True)])
def test_a_page_of_any_width_shows_all_that_it_has(tmp_path: Path, trouble: list[str], count: int, width: int,
                                                   dark: bool) -> None:
    data = page_data(count)
    box = "document.getElementById('scroll-results')"
    with browser_page(width, 900, dark) as page:
        open_page(page, data, tmp_path, trouble)
        draw_all(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # the legend: every name is whole and in sight
        for button in page.locator(".legend button").all():
            found = button.evaluate("""(each) => {
                const name = each.querySelector("span"), {left, right, width} = name.getBoundingClientRect();
                return left >= 0 && right <= innerWidth && width > 0
                    && getComputedStyle(name).overflow === "visible";
            }""")
            assert found
        # the table: it fits, or it shows that there is more, until that has been seen
        wide = page.evaluate(f"{box}.scrollWidth - {box}.clientWidth")
        edge = page.locator(".scroller:has(#results)")
        assert (wide > 1) == (edge.get_attribute("data-right") is not None)
        assert page.locator(".scroller:has(#results) .more-hint").is_visible() == (wide > 1)
        assert wide <= 1 or width < 1280
        if wide > 1:
            page.evaluate(f"{box}.scrollLeft = {wide}")
            page.locator(".scroller[data-left]:has(#results):not([data-right])").wait_for()
            first = page.locator("#results tbody th").first.bounding_box()
            assert first["x"] == pytest.approx(edge.bounding_box()["x"], abs=1)  # stays in sight
        # the differences: a mark for every method, inside the page
        marks = page.locator(".forest tbody tr").evaluate_all("""(rows) => rows.map((row) => {
            const {left, right, width, height} = row.querySelector(".spot svg, .off").getBoundingClientRect();
            return left >= 0 && right <= innerWidth && width > 3 && height > 3;
        })""")
        assert marks == [True] * (count - 1)
        whiskers = page.locator(".whisker").evaluate_all("(all) => all.map((each) => each.offsetWidth)")
        assert min(whiskers) > 5
        assert page.locator(".forest").bounding_box()["height"] < 220 + 90 * count  # as high as it has rows


def test_all_columns_come_when_asked_for(tmp_path: Path, trouble: list[str]) -> None:
    with browser_page() as page:
        open_page(page, page_data(), tmp_path, trouble)
        assert not page.locator("#results th", has_text="auroc").is_visible()
        page.locator("#all-columns").press("Space")
        assert page.locator("#results th", has_text="auroc").is_visible()
        page.locator(".scroller[data-right]:has(#results)").wait_for()  # now it is too wide, and says so


def test_of_twenty_methods_some_are_in_colour(tmp_path: Path, trouble: list[str]) -> None:
    looks = """() => {
        const lines = document.getElementById("chart-curves").data.filter((trace) => trace.hovertext);
        return lines.map((line) => [line.line.color, line.line.dash, line.marker.symbol, line.line.width]);
    }"""
    names = "document.getElementById('chart-curves').layout.annotations.length"
    with browser_page() as page:
        open_page(page, page_data(20), tmp_path, trouble)
        found = page.evaluate(looks)
        coloured = [look for look in found if look[3] > 2]
        assert len(found) == 20
        assert 5 <= len(coloured) <= 8
        assert page.evaluate(names) == len(coloured)  # each has its name beside it
        page.locator("#pick-all").click()
        found = page.evaluate(looks)
        assert len({tuple(look) for look in found}) == 20
        assert all(look[3] > 2 for look in found)
        page.locator("#pick-front").click()
        page.locator("#grey").click()
        assert len(page.evaluate(looks)) == len(coloured)


def test_a_method_that_is_pointed_at_stands_out(tmp_path: Path, trouble: list[str]) -> None:
    faint = """() => {
        const div = document.getElementById("chart-curves");
        const layers = div.querySelectorAll(".scatterlayer > .trace");
        const faint = div.data.filter((_, k) => layers[k].style.opacity !== "");
        return [...new Set(faint.map((trace) => trace.meta))];
    }"""
    with browser_page() as page:
        open_page(page, page_data(3), tmp_path, trouble)
        draw_all(page)
        page.locator(".legend button", has_text="fedavg").hover()
        assert set(page.evaluate(faint)) == {"localtrain", "fedprox"}
        page.mouse.move(2, 2)
        assert page.evaluate(faint) == []


def test_a_loss_that_explodes_is_drawn_on_a_log_axis(tmp_path: Path, trouble: list[str]) -> None:
    data = page_data(3) | {"metric": "loss", "curve_metric": "loss", "lower_is_better": True}
    data["curves"]["fedprox"]["personal"]["mean"] = [0.7 * 10.0**k for k in range(13)]
    with browser_page() as page:
        open_page(page, data, tmp_path, trouble)
        assert page.evaluate("document.getElementById('chart-curves')._fullLayout.yaxis.type") == "log"
        page.locator("#logY").click()
        assert page.evaluate("document.getElementById('chart-curves')._fullLayout.yaxis.type") == "linear"


def test_clients_that_are_served_alike_are_not_listed(tmp_path: Path, trouble: list[str]) -> None:
    data = page_data(3)
    best = data["table"][0]["label"]
    values = data["clients"]["methods"][best]
    for given, said, listed in [
        ([1.0] * 20, "All 20 clients have the same accuracy, 1.0000.", 0),
        ([1.0] * 19 + [0.9], "The median client has 1.0000. One of 20 clients is worse off.", 1),
        ([0.5] * 15 + [0.6] * 5, "No client is worse off than the median, 0.5000", 0),
        ([0.8] * 5 + [0.9] * 4 + [0.95] * 11, "9 of 20 clients are worse off.", 9),
    ]:
        values[:] = given
        with browser_page() as page:
            open_page(page, data, tmp_path, trouble)
            assert said in page.locator("#worst-says").inner_text()
            assert page.locator("#worst tbody tr").count() == listed
            assert page.locator("#worst-box").is_visible() == (listed > 0)


def test_a_pointer_sees_the_value_of_a_method(tmp_path: Path, trouble: list[str]) -> None:
    data = page_data(3)
    with browser_page() as page:
        open_page(page, data, tmp_path, trouble)
        chart = page.locator("#chart-curves")
        chart.scroll_into_view_if_needed()
        x, y = page.evaluate("""() => {
            const div = document.getElementById("chart-curves"), {left, top} = div.getBoundingClientRect();
            const {xaxis: x, yaxis: y, _size: size} = div._fullLayout;
            const trace = div.data.find((trace) => trace.meta === "fedavg" && trace.hovertext);
            return [left + size.l + x.d2p(trace.x[4]), top + size.t + y.d2p(trace.y[4])];
        }""")
        page.mouse.move(x - 3, y)
        page.mouse.move(x, y)
        tip = chart.locator(".hoverlayer .hovertext")
        tip.wait_for()
        figures = data["curves"]["fedavg"]
        assert "fedavg" in tip.text_content()
        assert f"accuracy {figures['personal']['mean'][4]:.4f}" in tip.text_content()
        assert f"round {figures['round'][4]}" in tip.text_content()


def test_keys_hide_a_method_in_every_chart(tmp_path: Path, trouble: list[str]) -> None:
    with browser_page() as page:
        open_page(page, page_data(), tmp_path, trouble)
        draw_all(page)
        best = page.locator("#method").input_value()  # to begin with
        assert best == page_data()["table"][0]["label"]
        button = page.locator(".legend button", has_text="ditto")
        button.press("Enter")
        assert button.get_attribute("aria-pressed") == "false"
        for chart in ("chart-curves", "chart-grid-lam"):
            assert "ditto" not in methods(page, chart)
            assert "pfedme" in methods(page, chart)
        assert methods(page, "chart-gains") == [best]
        page.locator("#grey").press("Enter")
        assert "ditto" in methods(page, "chart-curves")  # behind the others
        page.locator("#grey").press("Enter")
        assert "ditto" not in page.locator("#chart-curves").get_attribute("aria-label")
        button.press("Space")
        assert button.get_attribute("aria-pressed") == "true"
        assert "ditto" in methods(page, "chart-curves")
        for each in page.locator(".legend button").all():
            each.click()
        assert methods(page, "chart-curves") == []


def test_axes_models_and_seeds_can_be_chosen(tmp_path: Path, trouble: list[str]) -> None:
    def axis(page: Page, path: str) -> Any:
        return page.evaluate(f"document.getElementById('chart-curves')._fullLayout.{path}")

    data = page_data()
    with browser_page() as page:
        open_page(page, data, tmp_path, trouble)
        assert (axis(page, "xaxis.type"), axis(page, "yaxis.type")) == ("linear", "linear")
        page.locator("#logX").press("Enter")
        page.locator("#logY").press("Space")
        assert page.locator("#logX").get_attribute("aria-pressed") == "true"
        assert (axis(page, "xaxis.type"), axis(page, "yaxis.type")) == ("log", "log")
        page.locator("#x-bytes").press("Enter")
        assert axis(page, "xaxis.title.text") == "bytes per client"
        level = page.locator("#chart-curves").evaluate(
            "(div) => div.data.find((trace) => trace.meta === 'localtrain' && trace.hovertext)")
        assert level["y"] == [data["curves"]["localtrain"]["personal"]["mean"][-1]] * 2  # sends nothing
        page.locator("#logX").click()
        page.locator("#x-steps").click()
        assert axis(page, "xaxis.title.text") == "gradient steps"
        page.locator("#model-global").press("Enter")
        assert methods(page, "chart-curves") == ["fedavg", "fedprox", "pfedme", "ditto"]
        label = page.locator("#chart-curves").get_attribute("aria-label")
        assert "Without a global model: localtrain" in label
        page.locator("#model-personal").click()
        few = page.evaluate("document.getElementById('chart-curves').data.length")
        page.locator("#seeds").click()
        assert page.evaluate("document.getElementById('chart-curves').data.length") == few + 5 * 3 * 2
        page.locator("#half").click()
        assert axis(page, "xaxis.range[0]") == pytest.approx(60 * 2000 / 2, rel=0.02)


def test_the_clients_of_a_method_can_be_chosen(tmp_path: Path, trouble: list[str]) -> None:
    data = page_data()
    with browser_page() as page:
        open_page(page, data, tmp_path, trouble)
        draw_all(page)
        page.locator("#method").select_option("fedprox")
        alone, own = (data["clients"]["methods"][label] for label in ("localtrain", "fedprox"))
        gains = sorted((a - b for a, b in zip(own, alone, strict=True)), reverse=True)
        assert page.evaluate("document.getElementById('chart-gains').data[0].y") == pytest.approx(gains)
        up = sum(gain > 0 for gain in gains)
        assert f"Of 20 clients, {up} do better with fedprox" in page.locator("#gain-says").inner_text()
        worst = page.locator("#worst tbody tr").evaluate_all(CELLS)
        order = sorted(range(20), key=lambda k: own[k])[:10]
        middle = statistics.median(own)
        assert [row[0] for row in worst] == [data["clients"]["names"][k] for k in order]
        assert [row[1] for row in worst] == [f"{own[k]:.4f}" for k in order]
        assert [float(row[2]) for row in worst] == pytest.approx([middle - own[k] for k in order], abs=1e-4)
        assert [row[3] for row in worst] == [str(data["clients"]["n_test"][k]) for k in order]


def test_keys_walk_the_points_of_a_chart(tmp_path: Path, trouble: list[str]) -> None:
    data = page_data(7)
    with browser_page() as page:
        open_page(page, data, tmp_path, trouble)
        draw_all(page)
        chart = page.locator("#chart-curves")
        for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
            chart.press(key)
        assert page.locator("#point").inner_text().startswith("fedavg, accuracy ")
        assert f"round {data['curves']['fedavg']['round'][1]}," in page.locator("#point").inner_text()
        chart.locator(".hoverlayer .hovertext", has_text="fedavg").wait_for()
        for name in ("gains", "scatter", "grid-lam", "clusters-cgpfl", "federation"):
            page.locator(f"#chart-{name}").press("ArrowRight")
            page.locator(f"#chart-{name} .hoverlayer .hovertext").wait_for()


def test_keys_reach_every_control(tmp_path: Path, trouble: list[str]) -> None:
    """By Tab alone, from the beginning of the page, and one sees where one is."""
    with browser_page() as page:
        open_page(page, page_data(8), tmp_path, trouble)
        wanted = set(page.locator("button, select, input, summary, a, .chart, .scroll, pre").evaluate_all(
            "(all) => all.filter((each) => each.checkVisibility()).map((each) => each.id || each.className)"))
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        page.evaluate("document.activeElement.blur()")
        page.reload()
        page.locator(".chart svg.main-svg").first.wait_for()
        reached: list[str] = []
        for _ in range(len(wanted) + 5):
            page.keyboard.press("Tab")
            name, seen = page.evaluate("""() => {
                const each = document.activeElement, style = getComputedStyle(each);
                return [each.id || each.className, style.outlineStyle !== "none"];
            }""")
            if name in reached or not name:
                break
            assert seen, name
            reached.append(name)
        assert wanted - set(reached) == set()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("make", [lambda: page_data(10, 5, 200, 100, 10, 41), evil_data, nothing_yet])
def test_a_phone_has_no_need_to_scroll_sideways(tmp_path: Path, dark: bool, make: Any) -> None:
    data = make()
    data["methods"][1]["settings"]["long"] = "x" * 300
    data["federation"]["facts"]["long"] = "y" * 300
    with browser_page(390, 844, dark, has_touch=True, is_mobile=True) as page:
        place = tmp_path / "report.html"
        place.write_bytes(render(data))
        page.goto(place.as_uri())
        draw_all(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        widths = page.evaluate("[...document.querySelectorAll('.chart')].map((chart) => chart.layout.width)")
        assert max(widths) <= 358


def test_day_and_night(tmp_path: Path, trouble: list[str]) -> None:
    def looks(page: Page) -> list[str]:
        found: list[str] = page.evaluate("""() => {
            const chart = document.getElementById("chart-curves");
            return [getComputedStyle(document.body).backgroundColor, chart._fullLayout.font.color,
                    chart.data.filter((trace) => trace.hovertext)[6].line.color];
        }""")
        return found

    day = ["rgb(252, 252, 251)", "rgb(27, 31, 36)", "rgb(0, 0, 0)"]
    night = ["rgb(20, 23, 27)", "rgb(232, 234, 237)", "rgb(244, 244, 244)"]
    with browser_page(dark=True) as page:
        open_page(page, page_data(7), tmp_path, trouble)
        assert looks(page) == night
        assert page.locator("#theme").get_attribute("aria-pressed") == "true"
        page.locator("#theme").press("Enter")
        assert looks(page) == day
        page.reload()
        page.locator(".chart svg.main-svg").first.wait_for()
        assert looks(page) == day  # it was chosen
        page.locator("#theme").click()
        assert looks(page) == night
    with browser_page() as page:
        open_page(page, page_data(7), tmp_path, trouble)
        assert looks(page) == day
        page.emulate_media(color_scheme="dark")
        page.locator("#theme[aria-pressed=true]").wait_for()
        assert looks(page) == night


def test_words_can_be_read_on_their_ground(tmp_path: Path, trouble: list[str]) -> None:
    """A contrast of 4.5 at least, as WCAG AA wants it, in both modes."""
    contrast = """() => {
        const light = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
            .map((part) => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4)
            .reduce((sum, part, k) => sum + part * [.2126, .7152, .0722][k], 0);
        const ground = (each) => { for (; each; each = each.parentElement) {
            const found = getComputedStyle(each).backgroundColor;
            if (!found.endsWith(", 0)")) return found; } };
        return [...document.querySelectorAll("main *, header *")]
            .filter((each) => !each.closest("svg, .chart"))
            .filter((each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
            .map((each) => {
                const [a, b] = [light(getComputedStyle(each).color), light(ground(each))];
                return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), each.outerHTML.slice(0, 80)];
            })
            .filter(([ratio]) => ratio < 4.5);
    }"""
    data = page_data()
    data["progress"][3].update(state="failed", note="no", rounds=12)
    for dark in (False, True):
        with browser_page(dark=dark) as page:
            open_page(page, data | {"finished": False}, tmp_path, [])
            page.locator(".legend button").first.click()
            assert page.evaluate(contrast) == []


def test_the_table_is_copied_as_text(tmp_path: Path, trouble: list[str]) -> None:
    data = page_data(2)
    data["table"][0]["label"] = data["methods"][1]["label"] = "a_b & 50% | <i>"
    with browser_page(permissions=["clipboard-read", "clipboard-write"]) as page:
        open_page(page, data, tmp_path, trouble)

        def copied(button: str) -> str:
            page.locator(button).press("Enter")
            page.locator("#status", has_text="Copied").wait_for()
            found: str = page.evaluate("navigator.clipboard.readText()")
            page.evaluate("document.getElementById('status').textContent = ''")
            return found

        seen = ("personal", "global", "worst_decile", "gain", "worse_off", "bytes_per_client", "seconds")
        cells = [[row["cells"][key]["text"] for key in seen] for row in data["table"]]
        assert copied("#copy-markdown").splitlines() == [
            "| method | personal | global | worst 10% | gain | worse off | per client | time |",
            "|:--|--:|--:|--:|--:|--:|--:|--:|",
            f"| a\\_b & 50% \\| \\<i\\> | {' | '.join(cells[0])} |",
            f"| localtrain | {' | '.join(cells[1])} |"]
        figures = [" & ".join(row).replace("±", "$\\pm$").replace("%", "\\%") for row in cells]
        assert copied("#copy-latex").splitlines() == [
            "\\begin{tabular}{lrrrrrrr} % needs \\usepackage{booktabs}", "\\toprule",
            "method & personal & global & worst 10\\% & gain & worse off & per client & time \\\\",
            "\\midrule",
            f"a\\_b \\& 50\\% \\textbar{{}} \\textless{{}}i\\textgreater{{}} & {figures[0]} \\\\",
            f"localtrain & {figures[1]} \\\\",
            "\\bottomrule", "\\end{tabular}"]
        page.locator("#all-columns").check()
        assert "| auroc | loss | per client | steps | time |" in copied("#copy-markdown")
        page.locator("#results th button", has_text="method").click()
        page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('no')); }")
        assert copied("#copy-markdown").splitlines()[2].startswith("| a\\_b")  # sorted, and by the old way
        assert copied("#copy-commands") == "\n".join(data["commands"])


def test_on_paper_all_charts_are_drawn_on_white(tmp_path: Path, trouble: list[str]) -> None:
    with browser_page(dark=True) as page:
        open_page(page, page_data(10, 5, 200, 100, 10, 41), tmp_path, trouble)
        assert len(page.pdf(path=tmp_path / "report.pdf")) > 100_000
        page.emulate_media(media="print")
        page.locator(":root[data-printing]").wait_for(state="attached")
        for chart in page.locator(".chart").all():
            assert chart.locator("svg.main-svg").count() >= 1
            assert chart.evaluate("(div) => div._fullLayout.width") == 660
            assert chart.evaluate("(div) => div._fullLayout.font.color") == "rgb(27, 31, 36)"
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not page.locator("#theme, #copy-latex, .controls, #method").first.is_visible()
        assert page.locator("#experiment").is_visible()
        page.emulate_media(media="screen")
        page.locator(":root:not([data-printing])").wait_for(state="attached")
        assert not page.locator("#experiment").is_visible()
        assert page.locator("#chart-curves").evaluate("(div) => div._fullLayout.width") > 900


def test_names_that_are_code_do_nothing(tmp_path: Path, trouble: list[str]) -> None:
    with browser_page() as page:
        open_page(page, evil_data(), tmp_path, trouble)
        draw_all(page)
        assert page.locator("#results tbody th", has_text=EVIL).count() == 1
        assert page.locator(".legend button", has_text=EVIL).count() == 1
        page.locator("#method").select_option(EVIL)
        for chart in page.locator(".chart").all():
            chart.press("ArrowRight")
            chart.press("ArrowDown")
        assert page.locator(".forest tbody th", has_text=EVIL).count() == 1
        page.locator("#pick-all").click()
        name = page.locator("#chart-curves .annotation", has_text=EVIL[:17])
        assert name.count() == 1  # shown as it is written
        page.locator(".legend button", has_text=EVIL).click()
        assert name.count() == 0
        assert page.evaluate("document.querySelectorAll('script').length") == 4  # three, and the library


def test_a_chart_is_saved_as_a_picture(tmp_path: Path) -> None:
    with browser_page() as page:
        open_page(page, page_data(), tmp_path, [])
        with page.expect_download() as download:
            page.locator("#save-chart-curves").press("Enter")
        assert download.value.suggested_filename == "chart-curves.svg"
        download.value.save_as(tmp_path / "chart.svg")
        assert "personal models" in (tmp_path / "chart.svg").read_text()


def test_a_page_with_nothing_yet_is_quiet(tmp_path: Path, trouble: list[str]) -> None:
    with browser_page() as page:
        open_page(page, nothing_yet(), tmp_path, trouble)
        assert page.locator(".progress progress").count() == 2
        page.locator(".legend button").first.click()
        assert page.locator(".empty").count() == 4


@pytest.mark.parametrize("change", [
    {"lower_is_better": True, "metric": "rmse"},
    {"reference": None},
    {"federation": {"facts": {}, "names": [], "sizes": {}, "classes": None, "class_names": None}},
    {"clusters": {"cgpfl": {"seed": 0, "rounds": [1, 2], "of_client": [[None, 0], [3, 0]]}}},
    {"grids": [{"label": "a", "field": "split", "values": ["half", "all"], "mean": [None, 0.5],
                "low": [None, None], "high": [None, None]}]},
])
def test_other_comparisons_are_drawn_too(tmp_path: Path, trouble: list[str], change: dict[str, Any]) -> None:
    with browser_page() as page:
        open_page(page, page_data(2, 1, 10, 3, 30, 2) | change, tmp_path, trouble)
        draw_all(page)
        for chart in page.locator(".chart").all():
            assert "undefined" not in chart.get_attribute("aria-label")
            assert "NaN" not in chart.get_attribute("aria-label")


# -- watching ----------------------------------------------------------------------------------------


def test_a_watched_page_brings_itself_up_to_date(tmp_path: Path) -> None:
    now = {"data": nothing_yet()}
    asked: list[str] = []
    with watch.Watch(watch.Latest(lambda: json.loads(json.dumps(now["data"]))), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            with browser_page() as page:
                trouble: list[str] = []
                page.on("console", lambda message: trouble.append(message.text))
                page.on("pageerror", lambda error: trouble.append(str(error)))
                page.on("request", lambda request: asked.append(request.url))
                page.goto(server.address)
                page.locator("#chart-federation").scroll_into_view_if_needed()
                page.locator("#chart-federation svg.main-svg").first.wait_for()
                page.locator(".legend button", has_text="ditto").click()
                page.locator("#theme").click()

                now["data"] = page_data()
                page.locator("#results tbody tr").first.wait_for()
                page.locator("#chart-curves svg.main-svg").first.wait_for()
                assert page.locator(".answer .lead").inner_text() == page_data()["answer"][0]
                assert page.locator(".progress").count() == 0
                assert "ditto" not in methods(page, "chart-curves")  # still hidden
                assert page.evaluate("document.documentElement.dataset.theme") == "dark"

                page.locator("#results th button", has_text="time").click()
                page.locator("#x-bytes").click()
                page.locator("#method").select_option("fedprox")
                page.locator("#method").focus()
                page.locator("#d-columns summary").click()
                changed = page_data()
                changed["table"][0]["cells"]["personal"]["text"] = "0.1234"
                changed["curves"]["fedavg"]["personal"]["mean"][-1] = 0.5
                page.evaluate("window.scrollTo(0, 500)")
                now["data"] = changed
                page.locator("#results td", has_text="0.1234").wait_for()
                assert page.evaluate("window.scrollY") == 500
                assert page.locator("th[aria-sort=descending]").inner_text().startswith("time")
                assert page.locator("#method").input_value() == "fedprox"
                assert page.locator("#d-columns").get_attribute("open") is not None
                assert page.locator("#x-bytes").get_attribute("aria-pressed") == "true"
                assert "fedavg 0.5000" in page.locator("#chart-curves").get_attribute("aria-label")
                assert trouble == []
                assert set(asked) == {server.address, f"{server.address}data.json"}

                server.shutdown()
                server.server_close()
                page.locator("#link", has_text="descant watch does not answer").wait_for()
        finally:
            server.shutdown()
            thread.join()
