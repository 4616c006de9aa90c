"""The verdicts of a comparison: diverged, unfinished, another metric, other clients; and what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from descant.comparison import (
    conclusions,
    convergence,
    execute,
    finished,
    outlook,
    page,
    plan,
    results,
    sample,
)
from descant.comparison.finished import FinishedRun
from descant.comparison.make import make
from descant.comparison.plan import Plan, PlannedRun
from descant.core.metric import METRICS
from descant.view.comparison import draw_comparison

pytestmark = [pytest.mark.filterwarnings("ignore:round .*diverge"),  # what some of the runs are there for
              pytest.mark.thorough]


class Silent:
    def progress(self, working: Any) -> None: ...

    def ended(self, job: Any, failure: str | None) -> None: ...

    def note(self, text: str) -> None: ...


def compared(tables: dict[str, Any], out: Path, seeds: list[int], **options: Any) -> Plan:
    """A comparison that is carried out in this process."""
    with plan.held(out):
        found, _ = make(tables, out, seeds, **{"baselines": False} | options)
    for run in found.runs():
        execute._run(run, ())
    return found


# -- of made-up figures ----------------------------------------------------------------------------------


def made_up(scores: dict[str, np.ndarray], metric: str, others: dict[str, dict[str, float]],
            lost: dict[str, list[int]]) -> dict[tuple[str, int], FinishedRun]:
    """Runs with these figures [R, C] of each method; every test row of a client says the same. `others` are
    figures by other metrics, as gaps to these; `lost` are clients whose models have diverged."""
    found = {}
    for label, values in scores.items():
        for seed, clients in enumerate(values):
            count, everyone = len(clients), np.arange(len(clients))
            columns: finished.Columns = {
                "which": np.repeat("best", count), "model": np.repeat("personal", count), "client": everyone,
                "unseen": everyone < 0, "n_test": np.full(count, 10), "loss": np.ones(count), metric: clients}
            columns |= {name: clients + gap for name, gap in others.get(label, {}).items()}
            rows: finished.Columns = {"row": np.arange(10 * count), "client": np.repeat(everyone, 10)}
            rows |= {name: np.zeros(10 * count) for name in (metric, *others.get(label, {}))}
            summary = {"best": {"personal": {"diverged": 0, "failed": 0, "clients": count}}, "last": {},
                       "seconds": 2.0, "bytes_down": 0, "bytes_up": 0, "clients": count, "grad_steps": 1}
            found[label, seed] = FinishedRun(label, seed, 1, Path("nowhere"), summary, columns,
                                          finished.RowInfluences(rows, np.array(lost.get(label, []), int)))
    return found


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Reads made-up runs as if they were there."""
    tables = {"data": {"dataset": "digits", "clients": 4}, "algorithm": {"name": "fedavg"},
              "train": {"rounds": 1, "backend": "vectorised"}}
    count = iter(range(100))

    def reading(scores: dict[str, np.ndarray], metric: str = "accuracy", *, curves: Any = (),
                others: Any = None, lost: Any = None, **fields: Any) -> results.Results:
        out = tmp_path / str(next(count))
        with plan.held(out):
            listed = ",".join(f"fedavg:label={label}" for label in scores)
            seeds = range(len(next(iter(scores.values()))))
            about, _ = make(tables, out, [*seeds], algorithms=listed, baselines=False)
        runs = made_up(scores, metric, others or {}, lost or {})
        monkeypatch.setattr("descant.comparison.plan.PlannedRun.read", lambda run: runs[run.label, run.seed])
        monkeypatch.setattr(results.layout, "read_metrics", lambda place: curves)
        return results.read(about._replace(metric=metric, metrics=METRICS, **fields))

    return reading


def noisy(mean: float, *, repetitions: int = 5, clients: int = 4, seed: int = 0, spread: float = 0.004
          ) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.asarray(mean + spread * rng.normal(size=(repetitions, 1)) + spread * rng.normal(
        size=(repetitions, clients)))


def test_better_or_worse_is_said(read: Any) -> None:
    found = read({"b": noisy(0.80, seed=1), "a": noisy(0.85, seed=2), "c": noisy(0.848, seed=3)})
    assert [row.label for row in found.rows] == ["a", "c", "b"]
    assert [(gap.against, gap.verdict) for gap in found.differences] == [
        ("c", "no difference found"), ("b", "better")]
    first, second, third, *_ = conclusions.answer(found)
    assert first.startswith("The 3 methods differ significantly (p < 0.001). a is best: its clients' own "
                            "models reach a mean test accuracy of 0.8")
    assert " (95 % interval 0.8" in first
    assert first.endswith(") on new rows of these 4 clients (5 repetitions).")
    assert second.startswith("a is significantly better than b (4.8 points, ")
    assert second.endswith(" Ranges are simultaneous 95 % intervals.")
    assert third.startswith("No significant difference from c (0.")
    assert "simultaneous" not in third  # it is said once


def test_when_nothing_differs_that_is_said_first(read: Any) -> None:
    found = read({label: noisy(0.8 + 0.01 * k, seed=k, spread=0.02) for k, label in enumerate("abc")})
    first, second, third, *_ = conclusions.answer(found)
    assert first.startswith("No significant difference between the 3 methods (p = ")
    assert " ranks first: its clients' own models reach a mean test accuracy of 0." in first
    assert second.startswith("No significant difference from ")
    assert second.endswith(" Ranges are simultaneous 95 % intervals.")
    decided, more, _ = outlook.outlook(found)
    assert not decided
    assert more is not None
    assert more > 0
    assert third.startswith(f"{max(v for v in outlook.still_needed(found).values() if v)} more repetition")
    assert "of training" in third


def test_equal_methods_are_equivalent_and_the_comparison_is_decided(read: Any) -> None:
    base = noisy(0.9, spread=0.001)
    found = read({"a": base, "b": base + 0.0001 * noisy(0, seed=5, spread=1.0)})
    [gap] = found.differences
    assert gap.verdict == "equivalent"
    assert outlook.outlook(found).decided
    assert "It is equivalent to b: the difference is less than 1 point." in conclusions.answer(found)


def test_looking_three_times_makes_the_test_stricter(read: Any) -> None:
    scores = {"a": noisy(0.81, seed=2, spread=0.006), "b": noisy(0.80, seed=1, spread=0.006)}
    once, often = read(scores), read(scores, looks=3)
    assert once.differences[0].p == often.differences[0].p
    assert often.differences[0].low < once.differences[0].low
    assert (conclusions.confidence(once), conclusions.confidence(often)) == ("95 %", "98.3 %")
    assert any("simultaneous 98.3 % intervals" in sentence for sentence in conclusions.answer(often))


def test_an_exploded_method_is_diverged_and_not_merely_no_different(read: Any) -> None:
    """A loss of 9e17 beside 0.019: its own variance would hide any difference."""
    wild = 10.0 ** np.random.default_rng(0).uniform(2, 18, (5, 4))
    sound = {"a": noisy(0.019, spread=0.001), "b": noisy(0.1, seed=1, spread=0.005)}
    found = read(sound | {"wild": wild}, "mse", lost={"wild": [0, 1, 2, 3]})
    assert found.diverged == {"wild": (5, 5)}
    assert [(gap.against, gap.verdict) for gap in found.differences] == [
        ("b", "better"), ("wild", "diverged")]
    assert ("wild diverged in 5 of 5 repetitions and is not compared: use smaller steps, or scale the "
            "features (data.scale).") in conclusions.answer(found)
    assert found.rows[-1].label == "wild"
    assert conclusions.difference(found, found.differences[-1]) == "wild diverged in 5 of 5 repetitions"
    without = read(sound, "mse")
    assert found.differences[0] == without.differences[0]  # nor does it blur the others


def test_losses_are_told_in_percent(read: Any) -> None:
    found = read({"a": noisy(0.5, spread=0.005), "b": noisy(1.0, seed=1, spread=0.01)}, "loss")
    [gap] = found.differences
    assert gap.ratio is not None
    assert gap.mean == pytest.approx(0.5, abs=0.02)  # what the ratio means at the level of the best
    sentence = conclusions.answer(found)[1]
    assert sentence.startswith(("a is significantly better than b (4", "a is significantly better than b (5"))
    assert " %, " in sentence


def test_ends_of_shares_are_shares(read: Any) -> None:
    found = read({"a": np.clip(noisy(0.99, spread=0.03), 0, 1), "b": np.clip(noisy(0.01, spread=0.03), 0, 1)})
    for row in found.rows:
        for name in ("personal", "worst_decile"):
            assert 0 <= row.figures[name].low <= row.figures[name].high <= 1
    text = page.cell("personal", found.rows[0].figures["personal"], "accuracy")
    assert text.endswith("to 1.0000)")


def test_the_other_metric_would_say_something_else(read: Any) -> None:
    found = read({"a": noisy(0.80, seed=1), "b": noisy(0.75, seed=2)}, "balanced_accuracy",
                 others={"a": {"accuracy": 0.0}, "b": {"accuracy": 0.2}})
    assert found.compared == ["a", "b"]
    [sentence] = [each for each in conclusions.answer(found) if each.startswith("By accuracy")]
    assert sentence.startswith("By accuracy, b would be best (0.9")
    assert sentence.endswith("; the difference is significant).")
    same = read({"a": noisy(0.80, seed=1), "b": noisy(0.75, seed=2)}, "balanced_accuracy",
                others={"a": {"accuracy": 0.0}, "b": {"accuracy": 0.0}})
    assert same.others == []


def test_other_clients_are_another_question(read: Any) -> None:
    rng = np.random.default_rng(0)
    steady = noisy(0.8, clients=40, seed=1)
    mixed = steady - 0.02 - 0.2 * rng.normal(size=40)  # in the mean worse, but who knows for others
    mixed -= mixed.mean() - 0.77
    found = read({"a": steady, "mixed": mixed + noisy(0, clients=40, seed=3, spread=0.001),
                  "worse": noisy(0.7, clients=40, seed=2)})
    assert [gap.verdict for gap in found.differences] == ["better", "better"]
    assert "For other clients like these 40, only the difference from worse is significant." in (
        conclusions.answer(found))
    assert conclusions.clients(found.differences[-1]) == (
        "40 of these clients do better with a, 0 with worse (Wilcoxon p < 0.001; describes these clients "
        "only)")
    wide = read({"a": steady, "mixed": mixed}, population="new clients")
    assert wide.differences[0].verdict == "no difference found"
    assert "on clients like these 40 (" in conclusions.answer(wide)[0]
    assert any("too few clients" in sentence for sentence in conclusions.answer(wide))


def test_too_few_rows_are_told(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fixed split and few rows, no number of seeds settles it."""
    scores = {"a": noisy(0.80, seed=1, spread=0.001), "b": noisy(0.79, seed=2, spread=0.001)}
    certain = read(scores, population="rows")
    assert certain.differences[0].verdict == "better"

    def influence(runs: Any, metric: str, weights: np.ndarray) -> Any:
        rng = np.random.default_rng(0)
        once = 0.01 * rng.normal(size=(1, 100, weights.shape[2]))
        return sample.Units(np.repeat(once, len(runs), 0), 96)

    monkeypatch.setattr(sample, "units_of", influence)
    found = read(scores)
    assert found.differences[0].verdict == "no difference found"
    assert outlook.outlook(found) == (False, None, "there are too few test rows")
    assert "More repetitions are unlikely to settle this: there are too few test rows." in (
        conclusions.answer(found))


# -- still improving -------------------------------------------------------------------------------------


def curve(values: np.ndarray, metric: str = "accuracy") -> list[dict[str, Any]]:
    return [{"round": k + 1, "personal": {"val": {"loss": {"mean": 1.0}, metric: {"mean": float(value)}}}}
            for k, value in enumerate(values)]


def gain(values: np.ndarray, metric: str = "accuracy", *, lower: bool = False) -> float | None:
    return convergence.last_gain(curve(values, metric), metric, lower=lower)


def test_who_is_still_improving() -> None:
    rng = np.random.default_rng(0)
    assert gain(np.linspace(0.5, 0.8, 20)) > convergence.WORTH
    assert gain(1 - np.exp(-np.arange(20.0))) < convergence.WORTH
    assert gain(np.array([0.1, 0.5, 0.9])) is None  # too few to tell
    assert gain(np.array([0.1, np.nan, 0.9, 0.9])) is None
    assert gain(np.exp(-np.linspace(0, 3, 20)), "loss", lower=True) > convergence.WORTH
    plateaus = [[gain(0.8 + 0.02 * rng.normal(size=20)) for _ in range(5)] for _ in range(200)]
    assert sum(convergence.still_improving(gains) is not None for gains in plateaus) <= 10
    few = [[gain(0.8 + 0.02 * rng.normal(size=4)) for _ in range(5)] for _ in range(200)]
    assert sum(convergence.still_improving(gains) is not None for gains in few) <= 20
    assert convergence.still_improving([0.1, 0.1, 0.1, 0.0, 0.1]) == 4
    assert convergence.still_improving([0.1, 0.0, 0.0]) is None
    assert convergence.still_improving([None, None]) is None
    assert convergence.still_improving([]) is None


def test_the_verdict_on_an_unfinished_method_is_withheld(read: Any) -> None:
    scores = {"a": noisy(0.85, seed=2), "b": noisy(0.70, seed=1)}
    assert read(scores).differences[0].verdict == "better"
    found = read(scores, curves=curve(np.linspace(0.4, 0.7, 16)))
    [gap] = found.differences
    assert (gap.verdict, found.unfinished["b"]) == ("withheld", (5, 5))
    answer = conclusions.answer(found)
    assert ("No verdict on b (in 5 of 5 repetitions): still improving at the last round. Train longer, or "
            "use --budget converge.") in answer
    assert not any("significantly better" in sentence for sentence in answer)
    assert conclusions.difference(found, gap).startswith("no verdict on b (1")
    assert outlook.outlook(found).decided  # more repetitions would not help


# -- of real runs ----------------------------------------------------------------------------------------


def regression(folder: Path, scale: float) -> dict[str, Any]:
    """Sites with a column of mean 41 and deviation 15 (times a scale), which makes steps diverge."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for site in range(4):
        x = np.stack([rng.normal(41, 15, 60) * scale, rng.normal(size=60)], 1)
        np.savez(folder / f"{site}.npz", x=x, y=x @ [0.02 / scale, 1.0] + 0.1 * rng.normal(size=60))
    return {"data": {"dataset": str(folder)}, "algorithm": {"name": "fedavg", "solver": {"lr": 0.2}},
            "train": {"rounds": 4, "backend": "vectorised", "local": {"steps": 4}, "cohort": "all"},
            "eval": {"every": 1}}


@pytest.mark.slow
def test_a_method_that_diverges_is_told_and_the_others_are_compared(tmp_path: Path, drawing: Any) -> None:
    tables = regression(tmp_path / "sites", 0.02)
    found = results.read(compared(tables, tmp_path / "out", [0, 1], algorithms=(
        "fedavg:solver.lr=0.1,localtrain:solver.lr=0.05,ditto:label=hot,solver.lr=3.0,lam=0.1")))
    assert found.diverged == {"hot": (2, 2)}
    assert found.rows[-1].label == "hot"
    assert "hot diverged in 2 of 2 repetitions" in " ".join(conclusions.answer(found))
    data = page.page_data(tmp_path / "out")
    json.dumps(data, allow_nan=False)
    assert [each["verdict"] for each in data["differences"]][-1] == "diverged"
    with drawing():
        draw_comparison(data, tmp_path / "out" / "picture.png")


def test_what_each_row_does_adds_up_to_what_is_compared(tmp_path: Path) -> None:
    tables = {"data": {"dataset": "digits", "partition": "dirichlet", "alpha": 0.5, "clients": 5},
              "algorithm": {"name": "fedavg"},
              "train": {"rounds": 3, "backend": "vectorised", "local": {"steps": 3}}}
    about = compared(tables, tmp_path / "out", [0, 1, 2], algorithms="fedavg,localtrain")
    found = results.read(about)
    assert found.has_rows
    runs = [[run for run in found.finished if run.label == label] for label in about.methods]
    side = sample.sample_of(runs, "accuracy")
    assert side is not None
    assert side.rows is not None
    np.testing.assert_allclose(side.rows.influence.sum(1), 0, atol=1e-6)
    for r, seed in enumerate(about.seeds):  # of shares, the variance is known
        expected = np.zeros(2)
        for m, label in enumerate(about.methods):
            [run] = [run for run in found.finished if (run.label, run.seed) == (label, seed)]
            for client, share in run.values("accuracy").items():
                at = (run.columns["client"] == client) & (run.columns["which"] == "best")
                n = run.columns["n_test"][at & (run.columns["model"] == "personal")][0]
                expected[m] += share * (1 - share) / (n - 1) / side.people**2
        np.testing.assert_allclose(np.square(side.rows.influence[r]).sum(0), expected, rtol=1e-4)
    few = results.read(about._replace(population="rows")).rows[0].figures["personal"]
    more = found.rows[0].figures["personal"]
    assert few.mean == more.mean


def test_figures_of_an_older_version_are_read_without_the_noise_of_rows(tmp_path: Path) -> None:
    tables = {"data": {"dataset": "digits", "clients": 3}, "algorithm": {"name": "fedavg"},
              "train": {"rounds": 1, "backend": "vectorised", "local": {"steps": 1}}}
    about = compared(tables, tmp_path / "out", [0, 1], algorithms="fedavg,localtrain")
    run: PlannedRun = about.runs()[0]
    assert run.done
    (run.place / finished.ROWS).unlink()
    assert run.is_finished
    assert not run.done  # the same command measures it again
    found = results.read(about)
    assert not found.has_rows
    assert any("exclude the noise of the test rows" in note for note in conclusions.notes(found))
    (run.place / finished.ROWS).write_bytes(b"damaged")
    assert not run.done
    execute._run(run, ())
    assert run.done
