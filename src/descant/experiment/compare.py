"""Several methods on the same federation: the [[algorithms]] of a TOML file beside its [algorithm].

Every method and seed is an ordinary run in a directory of its own, DIR/<label>/seed-<n>; what is there
is not done again, what is half done is resumed. A seed stands for the federation (unless [data] fixes
one), the initial model, the cohorts and the batches: with the same seed, all methods see the same.
Budgets are gradient steps of training: what a method does before it predicts (fine-tuning) does not
count, since it happens only when a model is asked for.
"""

from __future__ import annotations

import concurrent.futures
import csv
import dataclasses
import io
import json
import math
import multiprocessing
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from descant.algorithm import Algorithm
from descant.engine.backend import InProcess, one_thread
from descant.engine.rounds import Training
from descant.engine.work import Work
from descant.errors import DescantError, UsageError, unknown
from descant.experiment import directory as layout
from descant.experiment import run as runs
from descant.experiment.config import Experiment, parse_algorithm
from descant.files import write_atomic
from descant.report.comparison import draw_comparison

Match = Literal["steps", "rounds"]


class Planned(NamedTuple):
    """One run of a comparison."""

    label: str
    seed: int
    tables: dict[str, Any]  # of its experiment
    place: Path

    @property
    def rounds(self) -> int:
        return int(self.tables["train"]["rounds"])

    @property
    def done(self) -> bool:
        """Whether the run is there, as planned, to its last round."""
        return (self.place / "summary.json").exists() and layout.rounds(self.place) >= self.rounds


class Row(NamedTuple):
    """What a method came to: means over the seeds, and their standard deviations."""

    label: str
    seeds: int
    rounds: int
    grad_steps: float
    bytes_per_client: float
    seconds: float
    metric: str
    figures: dict[str, tuple[float, float]]  # "personal", "personal_best", "worst_decile", "global", ...


def methods(tables: Mapping[str, Any]) -> dict[str, Algorithm]:
    """The methods of a file by their labels: [algorithm] first, then [[algorithms]]."""
    listed = [tables.get("algorithm", {}), *tables.get("algorithms", [])]
    found: dict[str, Algorithm] = {}
    for k, table in enumerate(listed):
        where = "algorithm" if k == 0 else f"algorithms[{k - 1}]"
        if not isinstance(table, Mapping):
            raise UsageError(f"{where} must be a section, not {table!r}")
        method = parse_algorithm(table, where)
        label = table.get("label", method.name)
        if not isinstance(label, str) or not label or "/" in label or label.startswith("."):
            raise UsageError(f"{where}.label must be a name for a directory, not {label!r}")
        if label in found:
            raise UsageError(f"{where}: two methods are called {label!r}: give one of them a label")
        found[label] = method
    return found


def plan(tables: Mapping[str, Any], seeds: list[int], out: Path, match: Match = "steps", jobs: int = 1
         ) -> list[Planned]:
    """The runs of a comparison, all with the budget of the file's [algorithm]."""
    if len(set(seeds)) != len(seeds) or not seeds:
        raise UsageError(f"the seeds must differ from each other, and there must be one: not {seeds}")
    fixed = "seed" in tables.get("data", {})
    base = Experiment.parse(tables)
    setup = runs.Setup.of(base)
    rounds: dict[str, int] = {}
    per_round = 0.0
    for label, method in methods(tables).items():
        steps = _steps_of_a_round(dataclasses.replace(setup, algorithm=method))
        per_round = per_round or steps  # the file's [algorithm] comes first
        ratio = per_round / steps if match == "steps" else 1.0
        rounds[label] = max(1, round(base.train.rounds * ratio))
    found = []
    for seed in seeds:
        for label, method in methods(tables).items():
            # evaluated as often as the file's own method, whatever the number of rounds
            every = max(1, round(base.eval.every * rounds[label] / base.train.rounds))
            train = dataclasses.replace(base.train, seed=seed, rounds=rounds[label])
            if jobs > 1 and train.backend == "auto":
                train = dataclasses.replace(train, workers=1)  # the cores belong to the other runs
            experiment = dataclasses.replace(
                base, algorithm=method, train=train, eval=dataclasses.replace(base.eval, every=every),
                data=base.data if fixed else dataclasses.replace(base.data, seed=seed))
            found.append(Planned(label, seed, experiment.dump(), out / label / f"seed-{seed}"))
    return found


def _steps_of_a_round(setup: runs.Setup) -> int:
    """How many gradients a round takes: by playing one, after the opening if there is one."""
    work = Work(setup.algorithm, setup.task, setup.federation, setup.train.seed, setup.train.batch,
                setup.train.local)
    with one_thread():
        training = Training(work, setup.train)
        reports = [training.play(InProcess(work, 16)) for _ in range(1 + setup.algorithm.opens())]
        return reports[-1].grad_steps


def carry_out(planned: list[Planned], jobs: int, progress: Callable[[int], None] = lambda rounds: None
              ) -> list[tuple[Planned, str]]:
    """Do what is missing, `jobs` runs at a time. A run that fails does not stop the others: what went
    wrong is returned. `progress` is told now and then how many rounds are done in all."""
    missing = [run for run in planned if not run.done]
    failed: list[tuple[Planned, str]] = []
    context = multiprocessing.get_context("spawn")  # a progress bar's thread forbids forking
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context, initializer=_quiet,
                                                initargs=(os.getpid(),)) as pool:
        try:
            waiting = {pool.submit(_play, run): run for run in missing}
            while waiting:
                ready, _ = concurrent.futures.wait(waiting, timeout=1,
                                                   return_when=concurrent.futures.FIRST_COMPLETED)
                progress(sum(_rounds_done(run) for run in planned))
                for future in ready:
                    run = waiting.pop(future)
                    if (error := future.exception()) is not None:
                        failed.append((run, str(error) or type(error).__name__))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()  # at most the current round of each is lost
            raise
    return failed


def _quiet(parent: int) -> None:
    """Workers are stopped by their parent: a Ctrl-C is its business. If it is killed, perhaps before a worker
    has come this far, they end by themselves, lest they hold their runs' directories."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)  # as a kill would: at most the current round is lost


def _play(planned: Planned) -> None:
    place = planned.place
    try:
        if (place / "config.toml").exists():
            runs.resume(place, rounds=max(planned.rounds, layout.rounds(place)))
        else:
            runs.start(runs.Setup.of(Experiment.parse(planned.tables)), place)
    except DescantError as error:  # with nothing that cannot travel between processes
        raise RuntimeError(str(error)) from None


def _rounds_done(planned: Planned) -> int:
    try:
        with (planned.place / "metrics.jsonl").open("rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def collect(planned: list[Planned], metric: str | None = None) -> list[Row]:
    """The table of a comparison, from what the finished runs wrote. `metric` is the one that comes first;
    without it, accuracy, or whatever there is."""
    rows = []
    for label in dict.fromkeys(run.label for run in planned):
        summaries = [json.loads((run.place / "summary.json").read_text())
                     for run in planned if run.label == label and run.done]
        if summaries:
            rows.append(_row(label, summaries, metric))
    return rows


def _row(label: str, summaries: list[dict[str, Any]], metric: str | None) -> Row:
    metrics = list(summaries[0]["last"]["personal"]["test"])
    if metric is None:
        metric = "accuracy" if "accuracy" in metrics else metrics[0]
    elif metric not in metrics:
        raise unknown("metric", metric, metrics)
    values: dict[str, list[float | None]] = {}
    for summary in summaries:
        for which, suffix in (("last", ""), ("best", "_best")):
            for model in ("personal", "global"):
                if (figures := (summary[which] or {}).get(model)) is None:
                    continue
                for name, spread in figures["test"].items():
                    of = "" if name == metric else f"_{name}"
                    values.setdefault(f"{model}{of}{suffix}", []).append(spread["mean"])
                    if model == "personal":
                        values.setdefault(f"worst_decile{of}{suffix}", []).append(spread["worst_decile"])
                if "truth_error" in figures:
                    values.setdefault(f"{model}_truth_error{suffix}", []).append(figures["truth_error"])

    def mean(key: str) -> float:
        return statistics.fmean(summary[key] for summary in summaries)

    traffic = statistics.fmean((s["bytes_down"] + s["bytes_up"]) / s["clients"] for s in summaries)
    return Row(label, len(summaries), summaries[0]["rounds"], mean("grad_steps"), traffic, mean("seconds"),
               metric, {key: _spread(each) for key, each in values.items()})


def _spread(values: list[float | None]) -> tuple[float, float]:
    known = [v if v is not None else math.nan for v in values]
    return statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else 0.0


def write(rows: list[Row], planned: list[Planned], out: Path) -> None:
    """results.csv and comparison.png."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    writer.writerow(["method", "seeds", "rounds", "grad_steps", "bytes_per_client", "seconds", "metric",
                     *(f"{name}_{part}" for name in names for part in ("mean", "std"))])
    for row in rows:
        cells = [repr(v) for name in names for v in row.figures.get(name, (math.nan, math.nan))]
        writer.writerow([*row[:7], *("" if cell == "nan" else cell for cell in cells)])
    write_atomic(out / "results.csv", text.getvalue().encode())
    histories = {row.label: [layout.read_metrics(run.place) for run in planned
                             if run.label == row.label and run.done] for row in rows}
    draw_comparison(histories, rows[0].metric, out / "comparison.png")


def prepare(out: Path, tables: Mapping[str, Any], match: Match) -> None:
    """Make the directory, or see that it holds the same comparison; other seeds may be added."""
    note = out / "comparison.json"
    plain = json.dumps({"match": match, **tables}, sort_keys=True, default=str)
    if note.exists():
        if note.read_text() != plain:
            raise UsageError(f"{out} holds another comparison: choose another --out")
        return
    layout.require_free(out)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(note, plain.encode())
