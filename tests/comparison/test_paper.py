"""A paper's figures beside ours: the section of the file, the agreement of the orders, what is shown."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from cli_helpers import call
from descant.comparison import agreement, conclusions, execute, finished, page, results, statistics
from descant.comparison import plan as planning
from descant.comparison.finished import FinishedRun
from descant.comparison.make import make
from descant.comparison.paper import Figure, NearClaim, Paper
from descant.comparison.rows import Row
from descant.comparison.statistics import interval
from descant.errors import UsageError
from descant.experiment.config import Experiment
from descant.view.comparison import show_comparison
from descant.view.page import render

LABELS = ("a", "b", "c", "d", "e", "f")
GOOD: dict[str, Any] = {"source": "Table 1", "metric": "accuracy", "figures": {"a": 0.9, "b": 0.8}}
NEAR: dict[str, Any] = {"says": "a is near", "method": "a", "best_of": ["b", "c"], "near": 0.01}


# -- the section -----------------------------------------------------------------------------------------


def parsed(**changes: Any) -> Paper:
    table = {key: value for key, value in (GOOD | changes).items() if value is not None}
    return Paper.parse(table, LABELS, ("accuracy", "loss"))


def test_a_figure_is_a_number_or_says_what_it_is_of() -> None:
    paper = parsed(percent=True, column="personal_pooled",
                   figures={"a": 97.6, "b": 82, "c": {"value": 50.5, "column": "global"}})
    assert paper.figures == {"a": Figure(0.976, "personal_pooled"), "b": Figure(0.82, "personal_pooled"),
                             "c": Figure(0.505, "global")}
    assert parsed().figures["a"] == Figure(0.9, "personal")
    assert parsed(metric="loss", figures={"a": 12}).figures == {"a": Figure(12.0, "personal")}


@pytest.mark.parametrize(("changes", "says"), [
    ({"figures": {"z": 0.9}}, "unknown method in paper.figures 'z': known are a, b, c, d, e, f"),
    ({"metric": "acuracy"}, "unknown paper.metric 'acuracy': did you mean 'accuracy'? known are"),
    ({"figures": {"a": "0.9"}}, "paper.figures.a must be a number, or a table"),
    ({"figures": {"a": True}}, "paper.figures.a must be a number, or a table"),
    ({"figures": {"a": math.nan}}, "paper.figures.a must be a number, or a table"),
    ({"figures": {"a": {"column": "global"}}}, "paper.figures.a must be a number, or a table"),
    ({"figures": {"a": {"value": 0.9, "off": "global"}}}, "unknown paper.figures.a field 'off'"),
    ({"figures": {"a": 0.9, "b": {"of": "a", "value": 0.9}}}, "paper.figures.b has the figure of 'a': leave "
                                                              "out all but `of`"),
    ({"figures": {"a": 0.9, "b": {"of": "z"}}}, "unknown paper.figures.b.of 'z': known are a"),
    ({"figures": {"a": 0.9, "b": {"of": "a"}, "c": {"of": "b"}}}, "unknown paper.figures.c.of 'b'"),
    ({"figures": {"a": 0.9, "b": {"of": ["a"]}}}, "unknown paper.figures.b.of ['a']"),
    ({"figures": {"a": {"value": 0.9, "column": "best"}}}, "unknown paper.figures.a.column 'best'"),
    ({"figures": {"a": 97.6}}, "paper.figures.a is 97.6, and accuracy lies between 0 and 1: for per cent, "
                               "set percent = true in [paper]"),
    ({"figures": {"a": 976}, "percent": True}, "paper.figures.a is 976, and accuracy lies between 0 and 100"),
    ({"figures": {}}, "paper.figures must be a section with a figure for each method"),
    ({"figures": [0.9]}, "paper.figures must be a section with a figure for each method"),
    ({"figures": None}, "paper.figures is missing"),
    ({"source": None}, "paper.source is missing"),
    ({"source": 1}, "paper.source must say where the figures are printed"),
    ({"source": " "}, "paper.source must say where the figures are printed"),
    ({"column": "mean"}, "unknown paper.column 'mean'"),
    ({"column": ["personal"]}, "unknown paper.column ['personal']"),
    ({"percent": "yes"}, "paper.percent must be true or false"),
    ({"percent": True, "metric": "loss"}, "paper.percent is for shares, and loss is not one"),
    ({"table": 1}, "unknown paper field 'table'"),
    ({"claims": ["a"]}, "paper.claims must be sections"),
    ({"claims": [{"better": "a", "worse": "b"}]}, "paper.claims[0].says is missing"),
    ({"claims": [{"says": "", "better": "a"}]}, "paper.claims[0].worse is missing"),
    ({"claims": [{"says": "", "better": "a", "worse": "z"}]}, "unknown method in paper.claims[0].worse 'z'"),
    ({"claims": [{"says": "", "better": "a", "worse": "a"}]}, "has 'a' ahead of itself"),
    ({"claims": [NEAR | {"near": -0.1}]}, "paper.claims[0].near must be a number from 0"),
    ({"claims": [NEAR | {"near": 1}], "percent": True},
     "paper.claims[0].near must be a number from 0, below 1, a share: 0.01 is one point"),
    ({"claims": [NEAR | {"near": None}]}, "paper.claims[0].near must be a number from 0"),
    ({"claims": [NEAR | {"best_of": []}]}, "paper.claims[0].best_of must be a list of methods"),
    ({"claims": [NEAR | {"best_of": ["b", "a"]}]}, "unknown method in paper.claims[0].best_of 'a'"),
    ({"claims": [NEAR | {"method": "z"}]}, "unknown method in paper.claims[0].method 'z'"),
    ({"claims": [NEAR | {"worse": "b"}]}, "unknown paper.claims[0] field 'worse'"),
])
def test_what_is_wrong_with_a_section_is_one_sentence(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as error:
        parsed(**changes)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_something_else_than_a_section_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\[paper\] must be a section, not 3"):
        Paper.parse(3, LABELS, ("accuracy",))


def test_a_paper_is_kept_in_the_directory() -> None:
    paper = parsed(figures={"a": {"value": 0.5, "column": "global_last"}, "b": {"of": "a"}},
                   claims=[{"says": "a is ahead", "better": "a", "worse": "b"}, NEAR])
    assert Paper.read(json.loads(json.dumps(paper.dump()))) == paper
    assert paper.figures["b"] == Figure(0.5, "global_last", "a")
    assert paper.near == (NearClaim("a is near", "a", ("b", "c"), 0.01, "personal"),)


# -- the agreement ---------------------------------------------------------------------------------------


def plan(population: str = "rows", *, lower: bool = False, ratio: bool = False) -> Any:
    return SimpleNamespace(population=population, looks=1, lower_is_better=lambda metric: lower,
                           is_ratio=lambda metric: ratio)


def run(label: str, seed: int, clients: Any, sizes: Any, metric: str = "accuracy") -> FinishedRun:
    """A run whose client c has `sizes[c]` test rows, and the figure `clients[c]`, pooled by these sizes."""
    count, numbers = len(clients), np.arange(len(clients))
    rng = np.random.default_rng([seed, ord(label)])
    pooled = float(np.average(clients, weights=sizes))
    columns: finished.Columns = {
        "which": np.repeat("best", count + 1), "model": np.repeat("personal", count + 1),
        "client": np.append(numbers, finished.POOLED), "unseen": np.zeros(count + 1, bool),
        "n_test": np.append(sizes, sum(sizes)), "loss": np.ones(count + 1),
        metric: np.append(clients, pooled)}
    rows: finished.Columns = {"row": np.arange(sum(sizes)), "client": np.repeat(numbers, sizes),
                              metric: rng.normal(size=sum(sizes)) / np.repeat(sizes, sizes)}
    return FinishedRun(label, seed, 1, Path("nowhere"), {}, columns,
                       finished.RowInfluences(rows, np.array([], int)))


def found_of(printed: dict[str, float], scores: dict[str, Any], about: Any, *, column: str = "personal",
             sizes: Any = (10, 10), metric: str = "accuracy", of: dict[str, str] | None = None
             ) -> agreement.Agreement:
    """Of scores [R] of each method, which all of its clients have."""
    paper = Paper("Table 1", metric, {label: Figure(value, column, (of or {}).get(label))
                                      for label, value in printed.items()})
    runs = {label: [run(label, seed, np.full(len(sizes), score), sizes, metric)
                    for seed, score in enumerate(values)] for label, values in scores.items()}
    rows = [Row(label, 1, len(values), {column: interval(values)}, 0) for label, values in scores.items()]
    return agreement.agreement(paper, about, metric, rows, runs)


def tau_b(x: Any, y: Any) -> float:
    """Kendall's tau-b, pair by pair."""
    signs = [(np.sign(x[a] - x[b]), np.sign(y[a] - y[b]))
             for a, b in itertools.combinations(range(len(x)), 2)]
    untied = [sum(one != 0 for one, _ in signs), sum(other != 0 for _, other in signs)]
    return sum(one * other for one, other in signs) / math.sqrt(untied[0] * untied[1])


def test_tau_is_kendalls_in_each_repetition_with_its_interval_over_them() -> None:
    rng = np.random.default_rng(0)
    printed = dict(zip(LABELS, (0.9, 0.8, 0.8, 0.7, 0.6, 0.5), strict=True))  # with a tie
    table = rng.random((5, 6)).round(1)  # ties in ours, too
    found = found_of(printed, dict(zip(LABELS, table.T, strict=True)), plan())
    each = [tau_b([*printed.values()], row) for row in table]
    t = stats.t.ppf(0.975, 4) * np.std(each, ddof=1) / math.sqrt(5)
    [order] = found.orders
    assert order.tau.mean == pytest.approx(np.mean(each))
    assert (order.tau.low, order.tau.high) == pytest.approx((np.mean(each) - t, np.mean(each) + t))
    assert len(found.orderings) == 15 - 1


def test_equal_orders_have_tau_one_also_where_less_is_better() -> None:
    printed = {"a": 1.0, "b": 2.0, "c": 3.0}
    found = found_of(printed, {"c": [30, 31], "a": [10, 12], "b": [20, 23]}, plan(lower=True, ratio=True),
                     metric="loss")
    assert found.orders[0].methods == ["a", "b", "c"]
    assert found.orders[0].tau == (1.0, 1.0, 1.0, 2)
    assert [(each.better, each.worse, each.paper) for each in found.orderings] == [
        ("a", "b", 1.0), ("a", "c", 2.0), ("b", "c", 1.0)]
    assert all(each.ours.mean > 0 for each in found.orderings)
    assert found.orderings[0].ours.mean == pytest.approx(np.mean(np.log([20 / 10, 23 / 12])))


def test_an_ordering_appears_is_reversed_or_open() -> None:
    noise = 0.001 * np.random.default_rng(1).normal(size=(4, 6))
    ours = dict(zip("abcd", np.array([[0.8], [0.9], [0.7], [0.7]]) + noise, strict=True))
    found = found_of({"a": 0.9, "b": 0.8, "c": 0.7, "d": 0.7}, ours, plan())
    assert {(each.better, each.worse): each.appearance for each in found.orderings} == {
        ("a", "b"): "reversed", ("a", "c"): "appears", ("a", "d"): "appears", ("b", "c"): "appears",
        ("b", "d"): "appears"}  # and nothing of c and d, which are equal there
    equal = found_of({"c": 0.7, "d": 0.6}, ours, plan())
    assert [each.appearance for each in equal.orderings] == ["open"]
    p = stats.ttest_rel(ours["c"], ours["d"]).pvalue
    assert equal.orderings[0].ours.p == pytest.approx(p)


def test_a_printed_figure_counts_once_in_an_order_whoever_reads_it() -> None:
    """Of b there are two readings, e of which is the worst in ours: an order with b, and one with e."""
    printed = {"a": 0.9, "b": 0.8, "c": 0.7, "e": 0.8}
    noise = 0.001 * np.random.default_rng(1).normal(size=(4, 4))
    ours = dict(zip("abce", np.array([[0.9], [0.8], [0.7], [0.6]]) + noise, strict=True))
    found = found_of(printed, ours, plan(), of={"e": "b"})
    assert [(order.variant, order.methods) for order in found.orders] == [
        (None, ["a", "b", "c"]), ("e", ["a", "e", "c"])]
    assert [order.tau.mean for order in found.orders] == pytest.approx([1, 1 / 3])
    assert [[(each.better, each.worse) for each in order.orderings] for order in found.orders] == [
        [("a", "b"), ("a", "c"), ("b", "c")], [("a", "e"), ("a", "c"), ("e", "c")]]
    assert len(found.orderings) == 5  # none of b and e
    assert found.gap("e").mean == pytest.approx(-0.2, abs=0.01)  # which stands beside the figure, too
    alone = found_of({"b": 0.8, "e": 0.8}, {"b": [0.8, 0.7], "e": [0.6, 0.7]}, plan(), of={"e": "b"})
    assert (alone.orders, alone.orderings) == ([], [])
    assert set(alone.ours) == {"b", "e"}


@pytest.mark.parametrize(("metric", "lower", "level", "holds"), [
    ("accuracy", False, 0.785, True), ("accuracy", False, 0.79, True), ("accuracy", False, 0.95, True),
    ("accuracy", False, 0.775, False), ("loss", True, 0.715, False), ("loss", True, 0.705, True),
    ("loss", True, 0.1, True)])
def test_a_method_is_near_the_best_of_others(metric: str, lower: bool, level: float, holds: bool) -> None:
    """Of b and c, by their means over the repetitions that all have: seed 2 of b is not among them."""
    scores = {"a": [level, level], "b": [0.7, 0.9, 1000.0], "c": [0.6, 0.8]}
    claim = NearClaim("a is near", "a", ("b", "c"), 0.015 if not lower else 0.01, "personal")
    runs = {label: [run(label, seed, [value, value], (10, 10), metric) for seed, value in enumerate(values)]
            for label, values in scores.items()}
    paper = Paper("Figure 3", metric, {}, near=(claim,))
    [found] = agreement.agreement(paper, plan(lower=lower, ratio=lower), metric, [], runs).near
    assert (found.best, found.holds) == ("c" if lower else "b", holds)
    assert (found.level, found.level_of_best) == pytest.approx((level, 0.7 if lower else 0.8))
    assert agreement.agreement(paper, plan(), metric, [], {"a": runs["a"]}).near == []


def test_one_repetition_decides_no_ordering() -> None:
    found = found_of({"a": 0.9, "b": 0.8}, {"a": [0.9], "b": [0.1]}, plan())
    assert [each.appearance for each in found.orderings] == ["open"]
    assert found.orders[0].tau[:2] == (1.0, None)


def test_methods_without_runs_or_with_few_seeds_have_no_part_in_the_orders() -> None:
    found = found_of({"a": 0.9, "b": 0.8, "c": 0.7, "d": 0.6},
                     {"a": [0.9, 0.9, 0.9, 0.8], "b": [0.1, 0.2, 0.3, 0.3], "c": [0.5]}, plan())
    assert found.orders[0].methods == ["a", "b"]
    assert found.repetitions == 4
    assert set(found.ours) == {"a", "b", "c"}  # but what is known of a method stands beside the paper
    assert found.gap("c").mean == pytest.approx(-0.2)


def test_the_noise_of_rows_counts_where_it_is_known() -> None:
    noise = 0.001 * np.random.default_rng(1).normal(size=(2, 5))
    scores = {"a": 0.8 + noise[0], "b": 0.75 + noise[1]}
    ours = {"a": 0.9, "b": 0.8}
    of_seeds = found_of(ours, scores, plan("rows")).orderings[0]
    of_rows = found_of(ours, scores, plan("clients")).orderings[0]
    pooled = found_of(ours, scores, plan("clients"), column="personal_pooled").orderings[0]
    assert (of_seeds.covers_rows, of_rows.covers_rows) == (False, True)
    assert of_seeds.ours.p is not None
    assert of_rows.ours.p is not None
    assert of_rows.ours.p > 10 * of_seeds.ours.p
    assert pooled.ours == pytest.approx(of_rows.ours)  # with clients of one size
    # of pooled rows it does not matter whose they are; in a mean over clients few rows count much
    by_row, by_client = (found_of(ours, scores, plan("clients"), column=column, sizes=(2, 18)).orderings[0]
                         for column in ("personal_pooled", "personal"))
    assert by_row.ours == pytest.approx(of_rows.ours)
    assert by_client.ours.p is not None
    assert by_client.ours.p > of_rows.ours.p
    last = found_of(ours, scores, plan("clients"), column="personal_last").orderings
    assert last == []  # these runs have no such figures


def test_rows_count_in_a_pooled_figure_by_the_sizes_of_their_clients() -> None:
    sizes = np.array([2, 18])
    runs = [[run("a", seed, [0.5, 0.9], sizes), run("b", seed, [0.4, 0.8], sizes)] for seed in range(3)]
    weights = agreement._weights(runs, "accuracy", ["personal_pooled", "personal"], [True, True])
    np.testing.assert_allclose(weights[..., 0], np.tile([0.1, 0.9], (3, 1)))
    np.testing.assert_allclose(weights[..., 1], 0.5)
    first = runs[0][0]
    assert agreement.figure_of(first, "accuracy", "personal_pooled") == pytest.approx(
        float(weights[0, :, 0] @ [0.5, 0.9]))
    assert agreement.figure_of(first, "accuracy", "personal") == pytest.approx(0.7)
    assert math.isnan(agreement.figure_of(first, "auroc", "personal_pooled"))


def test_what_rows_do_is_not_known_of_the_model_for_all() -> None:
    paper = Paper("Table 1", "accuracy", {"a": Figure(0.9, "personal"), "b": Figure(0.8, "personal"),
                                          "c": Figure(0.7, "global")})
    rng = np.random.default_rng(0)
    runs = [[run(label, seed, 0.5 + 0.1 * rng.random(2), (10, 10)) for label in "abc"] for seed in range(3)]
    table = np.array([[agreement.figure_of(each, "accuracy", "personal") for each in some] for some in runs])
    found = agreement._orderings(paper, plan("clients"), ["a", "b", "c"], table, runs)
    assert [each.covers_rows for each in found] == [True, False, False]
    plain = statistics.compare(table)
    assert found[1].ours == plain.beside(0, 2)
    assert found[0].ours != plain.beside(0, 1)


# -- a comparison ----------------------------------------------------------------------------------------


TOML = """
[data]
dataset = "digits"
clients = 6
[algorithm]
name = "pfedme"
[train]
rounds = 2
local = { steps = 2 }
backend = "vectorised"
[[algorithms]]
name = "localtrain"
[[algorithms]]
name = "fedavg"
[paper]
source = "Table 7 of a paper"
metric = "accuracy"
percent = true
[paper.figures]
pfedme = 93.2
localtrain = { value = 91.0, column = "personal_pooled" }
fedavg = { value = 80.0, column = "global" }
"fedavg + fine-tuning" = 90
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> results.Results:
    out = tmp_path_factory.mktemp("paper") / "out"
    with planning.held(out):
        about, _ = make(tomllib.loads(TOML), out, [0, 1], baselines=False)
    for each in about.runs():
        execute._run(each, ())
    return results.read(planning.read(out))


@pytest.mark.slow
def test_the_paper_is_in_the_table_the_file_and_the_report(compared: results.Results) -> None:
    out = compared.plan.out
    results.write(compared, out / "results.csv")
    table = {row["method"]: row for row in csv.DictReader((out / "results.csv").read_text().splitlines())}
    for label, column, printed in (("pfedme", "personal", 0.932), ("localtrain", "personal_pooled", 0.91),
                                   ("fedavg", "global", 0.8)):
        row = table[label]
        assert float(row["paper_accuracy"]) == printed
        for end in ("", "_low", "_high"):
            assert float(row[f"paper_difference_accuracy{end}"]) == pytest.approx(
                float(row[f"{column}{end}"]) - printed)
    orderings = list(csv.DictReader((out / "orderings.csv").read_text().splitlines()))
    assert [(row["better"], row["worse"]) for row in orderings] == [
        ("pfedme", "localtrain"), ("pfedme", "fedavg"), ("localtrain", "fedavg")]
    assert {row["source"] for row in orderings} == {"Table 7 of a paper"}
    said = conclusions.paper(compared)
    assert said[0].startswith("Table 7 of a paper: accuracy in ours less the paper's is ")
    assert "Kendall's tau of the paper's order of 3 methods and ours is " in said[1]
    assert "Of the paper's 3 orderings, " in said[2]
    console = Console(width=250, record=True, file=io.StringIO())
    show_comparison(console, compared)
    shown = console.export_text()
    assert "difference" in shown.splitlines()[1]
    assert "0.9320" in shown
    assert said[2] in shown
    html = render(page.page_data(out)).decode()
    assert "Beside the paper" in html
    assert "Table 7 of a paper" in html
    assert "pfedme above localtrain" in html


def test_the_paper_stays_with_the_directory_when_the_file_says_nothing(
        compared: results.Results) -> None:
    tables = {name: table for name, table in tomllib.loads(TOML).items() if name != "paper"}
    out = compared.plan.out
    with planning.held(out):
        again, _ = make(tables, out, [0], algorithms="pfedme", baselines=False)
    assert again.paper == compared.plan.paper
    Experiment.parse(tomllib.loads(TOML))  # a single run of the file leaves the paper alone


def test_a_comparison_without_a_paper_says_nothing_of_one(compared: results.Results) -> None:
    bare = results.read(compared.plan._replace(paper=None))
    assert bare.paper is None
    assert conclusions.paper(bare) == []
    assert not any("paper" in key for row in bare.rows for key in row.figures)


def test_a_figure_of_no_method_of_the_file_is_told_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(TOML.replace("localtrain = {", "localtrian = {"))
    code, _, said = call("compare", tmp_path / "e.toml", "--out", tmp_path / "out")
    assert code == 2
    expected = "unknown method in paper.figures 'localtrian': did you mean 'localtrain'?"
    assert expected in " ".join(said.split())
    assert not (tmp_path / "out").exists()


def test_a_list_of_some_methods_leaves_the_figures_of_the_others(tmp_path: Path) -> None:
    with planning.held(tmp_path / "out"):
        about, labels = make(tomllib.loads(TOML), tmp_path / "out", [0], algorithms="fedavg")
    assert labels == ["fedavg", "localtrain", "fedavg + fine-tuning"]
    assert about.paper is not None
    assert set(about.paper.figures) == {"pfedme", "localtrain", "fedavg", "fedavg + fine-tuning"}
