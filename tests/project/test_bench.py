"""The benchmark: that all sides do the same work, that it says so when they do not, and what it writes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from benchmarks import methods, passes, small_tables, workers
from benchmarks.bench import app
from benchmarks.speed import command, growth
from benchmarks.speed.apart import Apart
from benchmarks.speed.case import METHODS, MODELS, Case, random_federation
from benchmarks.speed.command import chosen, plan
from benchmarks.speed.contest import FLOOR, LEAN, First, compete, require_equal_work
from benchmarks.speed.engine import Engine
from benchmarks.speed.lean import Lean
from benchmarks.speed.products import Layer, Shapes, Share
from benchmarks.speed.table import show_summary
from descant.errors import DescantError, UsageError
from descant.models import DNN

pytestmark = pytest.mark.thorough

SMALL = {"mclr": "mclr", "dnn": DNN(hidden=7), "cnn2": "cnn2"}


def small(method: str = "fedavg", model: str = "mclr", **facts) -> Case:
    """Three of five clients, with two batches and a short one; the fourth begins another epoch."""
    federation = random_federation(5, 22 if model == "cnn2" else 45, 6)
    return Case(method, SMALL[model], federation,
                **{"cohort": 3, "batches": 2 if model == "cnn2" else 4, "evaluated": 5} | facts)


def first(side) -> First:
    return First(side.round(), side.models(), side.evaluate())


@pytest.mark.parametrize("model", [pytest.param(name, marks=pytest.mark.slow if name == "cnn2" else ())
                                   for name in MODELS])
@pytest.mark.parametrize("method", METHODS)
def test_the_lean_loop_and_the_engine_do_the_same(method, model):
    """In float64, after two rounds: the same models to rounding, from the same number of gradient steps."""
    case = small(method, model, dtype="float64", cohort=2 if model == "cnn2" else 3)
    sides = {LEAN: Lean(case), "loop": Engine(case, "loop"), "vectorised": Engine(case, "vectorised")}
    require_equal_work(case, {name: first(side) for name, side in sides.items()}, close=1e-12)
    again = {name: first(side) for name, side in sides.items()}
    require_equal_work(case, again, close=1e-11)
    each = {"fedavg": 1, "pfedme": 5, "mh": 6}[method]
    assert {found.played.grad_steps for found in again.values()} == {case.cohort * case.batches * each}
    assert len({round(found.scored.accuracy, 6) for found in again.values()}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_floor_has_the_products_of_the_lean_loop(model):
    """As many multiplications and additions, in training and in evaluation, whatever the arrangement.
    (torch's counter knows neither updates inside products nor, in backward passes, groups.)"""
    case = small("mh", model)
    lean, shapes = Lean(case), Shapes.of(case)
    lean.round()
    with FlopCounterMode(display=False) as expected:
        lean.round()
    with FlopCounterMode(display=False) as expected_scores:
        lean.evaluate()
    for kind, chunk in (("products", 2), ("products", 1), ("bare", 2), ("convolutions", 1)):
        share = Share(shapes, kind, chunk, case.cohort, shapes.evaluated)
        with FlopCounterMode(display=False) as found:
            share.train(shapes.widths)
        assert found.get_total_flops() == expected.get_total_flops(), kind
        with FlopCounterMode(display=False) as found:
            share.evaluate()
        assert found.get_total_flops() == expected_scores.get_total_flops(), kind
    assert shapes.grad_steps == case.grad_steps


def test_the_shapes_of_cnn2():
    """5x5 windows, 32 and 64 channels, on 28x28 pixels: 24x24 and 8x8 places."""
    layers = [layer[:3] for layer in Shapes.of(small(model="cnn2")).layers]
    assert layers == [(25, 32, 576), (800, 64, 64), (1024, 512, 1), (512, 10, 1)]
    assert Layer(3, 5, 1, None).operations(2) == 2 * (3 * 5 * 2) * 3  # three products


def test_a_side_that_does_something_else_is_told():
    case = small("pfedme")
    lean, engine = first(Lean(case)), first(Engine(case, "loop"))
    require_equal_work(case, {LEAN: lean, "loop": engine})
    fewer = engine._replace(played=engine.played._replace(grad_steps=59))
    with pytest.raises(DescantError, match="loop has 59 gradient steps in place of 60"):
        require_equal_work(case, {LEAN: lean, "loop": fewer})
    start = case.task.init().theta
    longer = engine._replace(models=start + 1.01 * (engine.models - start))
    with pytest.raises(DescantError, match=r"models that are 1\.0e-02 of their way"):
        require_equal_work(case, {LEAN: lean, "loop": longer})
    with pytest.raises(DescantError, match="models"):
        require_equal_work(case, {LEAN: lean, "loop": engine._replace(models=engine.models * torch.nan)})
    better = engine._replace(scored=engine.scored._replace(accuracy=engine.scored.accuracy + 0.05))
    with pytest.raises(DescantError, match="accuracy"):
        require_equal_work(case, {LEAN: lean, "loop": better})


@pytest.mark.slow
def test_sides_take_turns_in_processes_of_their_own():
    said = []
    outcome = compete(small("pfedme"), ("loop", "processes"), 2, told=said.append)
    assert list(outcome.sides) == [LEAN, "loop", "processes"]
    turns = [text.partition(":")[0] for text in said if "repetition" in text]
    assert turns == [LEAN, "loop", "processes", "loop", "processes", LEAN]
    for figures in outcome.sides.values():
        assert len(figures.step) == len(figures.evaluation) == 2
        assert min(figures.step) > 0
        assert figures.memory > 50e6
    assert outcome.sides["processes"].memory > outcome.sides["loop"].memory  # its workers count
    assert outcome.speed(LEAN) == 1
    assert outcome.above_floor("loop") is None


class Failing:
    note = ""

    def round(self):
        raise ValueError("no way")

    def end(self):
        raise SystemExit(3)

    def close(self):
        pass


def test_what_fails_in_a_process_is_told():
    side = Apart("fork", Failing)
    with pytest.raises(DescantError, match="ValueError: no way"):
        side.ask("round")
    with pytest.raises(DescantError, match="exit code 3"):
        side.ask("end")
    side.close()


def test_names_are_checked():
    assert chosen("model", None, ("a", "b"), "abc") == ("a", "b")
    assert chosen("model", "c, a,c", ("a",), "abc") == ("c", "a")
    with pytest.raises(UsageError, match="did you mean 'dnn'"):
        chosen("model", "mclr,dnnn", MODELS, MODELS)
    with pytest.raises(UsageError, match="names nothing"):
        chosen("model", ",", MODELS, MODELS)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--models", "resnet"], "unknown model 'resnet'"),
    (["--methods", "pfedm"], "did you mean 'pfedme'"),
    (["--backends", "vectorized"], "did you mean 'vectorised'"),
    (["--out", "/dev/null"], "--out /dev/null"),
])
def test_wrong_requests_are_told_in_a_line(arguments, message):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_the_plan():
    federation = random_federation(100, 525, 1)
    whole = {(case.model, case.method): case for case in plan(federation, tuple(METHODS), MODELS, False)}
    assert len(whole) == 9
    assert whole["dnn", "pfedme"].widths == [20] * 26 + [5]
    assert whole["dnn", "pfedme"].grad_steps == 2700
    assert whole["cnn2", "mh"].batches == 2
    quick = [(case.model, case.method) for case in plan(federation, tuple(METHODS), MODELS, True)]
    assert quick == [("mclr", "fedavg"), ("mclr", "pfedme"), ("mclr", "mh"), ("dnn", "fedavg"),
                     ("dnn", "pfedme"), ("cnn2", "fedavg")]


def test_the_summary_has_a_line_for_each_case_as_it_comes():
    side = {"times_as_fast_as_lean_loop": 4.5, "times_the_floor": 2.5}
    cases = [{"method": "fedavg", "model": "mclr", "sides": {"auto": side}},
             {"method": "mh", "model": "dnn", "sides": {"loop": side}}]
    console = Console(file=io.StringIO(), width=80)
    show_summary(console, cases)
    text = console.file.getvalue()
    assert re.search(r"fedavg +mclr +4\.50 +2\.50", text)
    assert "dnn" not in text


@pytest.mark.pictures
@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch):
    """Small data and short curves, but all the rest as it is."""
    monkeypatch.setattr(command, "fashion_mnist", lambda: (random_federation(25, 45, 5), False))
    monkeypatch.setattr("benchmarks.speed.command.plan", lambda federation, methods, models, quick: [
        Case(method, "mclr", federation, batches=3, evaluated=25) for method in methods])
    for name, sizes in (("CLIENTS", (10, 12)), ("COHORTS", (10, 12)), ("HIDDEN", (1, 2))):
        monkeypatch.setattr(growth, name, sizes)
    out = tmp_path / "bench"
    result = CliRunner().invoke(app, ["--methods", "fedavg,mh", "--repetitions", "2",
                                      "--backends", "vectorised,auto", "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads((out / "bench.json").read_text())
    assert found["machine"]["torch"] == torch.__version__
    assert found["machine"]["cores"] > 0
    assert [case["method"] for case in found["cases"]] == ["fedavg", "mh"]
    for case in found["cases"]:
        assert list(case["sides"]) == [LEAN, "vectorised", "auto", FLOOR]
        for name, side in case["sides"].items():
            assert len(side["us_per_step_all"]) == len(side["evaluation_ms_all"]) == 2
            assert side["times_the_floor"] >= 1 or name != FLOOR
        assert {tried["kind"] for tried in case["floor_tried"]} == {"products", "fused", "bare"}
    assert {curve: [point["at"] for point in found["growth"][curve]] for curve in found["growth"]} == {
        "clients": [10, 12], "cohort": [10, 12], "parameters": [805, 1600]}
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "fedavg on mclr" in result.output


def test_what_methods_cost_beside_pfedme(monkeypatch):
    """A few methods on few clients: every figure is there, and a method that a model refuses has none."""
    monkeypatch.setattr(methods, "COHORT", 2)
    monkeypatch.setattr(methods, "STEPS", 2)
    federation = methods.validated(random_federation(4, 40, 4))
    assert federation.train.sizes.tolist() == [15] * 4
    assert federation.validation.sizes.tolist() == [25] * 4
    names = (*methods.MEASURES, "fedper", "fedfomo")
    found = methods.costs(names, "mclr", federation, 2)
    assert list(found) == [*methods.MEASURES, "fedfomo"]  # softmax regression is nothing but a head
    for method in found.values():
        assert len(method.clients) == len(method.server) == 2
        assert min(method.clients) > 0
        assert method.cost[1] > method.cost[0]
    console = Console(file=io.StringIO(), width=120)
    methods.show(console, names, {"mclr": found})
    assert re.search(r"pfedme +\d+ +\d+ +1\.00 +\d+\.\d+ +\d+\.\d+", console.file.getvalue())
    assert re.search(r"pfedme plain +\d+ +\d+ +\d+\.\d+ +1\.00 +1\.00", console.file.getvalue())
    assert re.search(r"fedper +\n", console.file.getvalue())


@pytest.mark.slow
def test_what_parts_cost_at_least(monkeypatch, capsys):
    """The benchmarks of parts run, on little: every cell of their tables is a number."""
    monkeypatch.setattr(passes, "REPEATED", 5)
    monkeypatch.setattr(passes, "SHAPES", {"mclr": passes.SHAPES["mclr"]})
    passes.main()
    lines = re.findall(r"^ +mclr .*", capsys.readouterr().out, re.MULTILINE)
    assert [len(line.split()) for line in lines] == [11, 12]
    monkeypatch.setattr(small_tables, "REPEATED", 1)
    small_tables.main()
    assert len(re.findall(r"\d \(\d+\.\d\)", capsys.readouterr().out)) == 7
    assert workers.together(1, workers.copying) > 0


@pytest.mark.parametrize("name", methods.SERVERS)
def test_what_servers_cost(name, monkeypatch):
    monkeypatch.setattr(methods, "POPULATION", 8)
    monkeypatch.setattr(methods, "PARAMETERS", 5)
    assert min(methods.served(methods.SERVERS[name])) > 0
