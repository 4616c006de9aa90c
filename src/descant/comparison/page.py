"""Everything that the report shows, as one plain value (room: view)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from descant.comparison import conclusions, trials
from descant.comparison.paper import COLUMNS
from descant.comparison.plan import Method, Plan, PlannedRun, read
from descant.comparison.results import Results
from descant.comparison.results import read as read_results
from descant.comparison.rows import mean_over_seeds
from descant.comparison.statistics import Interval
from descant.comparison.table import cell, columns
from descant.core import fields
from descant.core.files import locked
from descant.core.metric import figure
from descant.core.plain import plain
from descant.core.units import times
from descant.errors import DescantError
from descant.experiment import directory as layout

MOST_POINTS = 400  # of a curve; a longer one is thinned


def page_data(out: Path, metric: str | None = None, plan: Plan | None = None) -> dict[str, Any]:
    """What is known of the comparison in a directory at the moment. The plan is read from there, where nobody
    has it: then the methods of the user's own are not imported, and say no cautions."""
    plan = plan or read(out)
    results = read_results(plan, metric)
    progress = [_progress(run, results.failures) for run in plan.runs()]
    shown = columns(results, all_metrics=True)
    curve_metric, curves = _curves(plan, results)
    found: dict[str, Any] = plain({
        "title": _title(plan),
        "live": False,
        "finished": all(run["state"] == "done" for run in progress),
        "progress": progress,
        "answer": conclusions.answer(results),
        "notes": conclusions.notes(results),
        "metric": results.metric,
        "lower_is_better": results.lower_is_better,
        "confidence": conclusions.confidence(results),
        "columns": [column._asdict() for column in shown],
        "metric_why": conclusions.metric_why(results),
        "population_words": (f"The answer applies to {conclusions.population(results)}."
                             if results.people else None),
        "table": [{"label": row.label, "best": row.label in results.compared[:1], "cells": {
            column.key: {"text": cell(column.key, value, results.metric)} | dict(zip(
                ("mean", "low", "high"), value or (None, None, None), strict=False))
            for column in shown for value in [row.figures.get(column.key)]}} for row in results.rows],
        "methods": [_method(method) for method in plan.methods.values()],
        "curves": curves,
        "curve_metric": curve_metric,
        "reference": results.reference,
        "clients": _clients(results),
        "differences": [{
            "label": gap.label, "against": gap.against, "mean": gap.mean, "low": gap.low, "high": gap.high,
            "p": gap.p, "verdict": gap.verdict, "words": conclusions.difference(results, gap),
            "clients_words": conclusions.clients(gap)} for gap in results.differences],
        "paper": _paper(results),
        "grids": _grids(results),
        "clusters": _clusters(plan),
        "federation": _federation(out),
        "tuning": {label: record for label in plan.methods if (record := trials.read(plan.record(label)))},
        "versions": plan.versions,
        "commands": plan.commands,
        "experiment": tomli_w.dumps({name: table for name, table in plan.experiment.dump().items()
                                     if name != "algorithm"}),
    })
    return found


def _title(plan: Plan) -> str:
    data, model = plan.experiment.data.dump(), plan.experiment.model.dump()
    return (f"{Path(str(data['dataset'])).name}, {model['name']}: {times(len(plan.methods), 'method')}, "
            f"{times(len(plan.seeds), 'seed')}")


def _progress(run: PlannedRun, failures: dict[str, str]) -> dict[str, Any]:
    done = run.size_done
    failure = failures.get(run.title)
    note = ""
    if run.is_finished:
        state = "done"
    elif _is_held(run.place):
        state = "running"
    elif failure is not None:
        state, note = "failed", failure
    else:
        state, note = "waiting", f"stopped after round {done}" if done else ""
    return {"label": run.label, "seed": run.seed, "rounds": done, "of": run.size, "state": state,
            "note": note}


def _is_held(place: Path) -> bool:
    """Whether some process works on a run."""
    try:
        with locked(place, shared=True):
            return False
    except FileNotFoundError:
        return False
    except DescantError:
        return True


def _method(method: Method) -> dict[str, Any]:
    settings = {key: value for key, value in fields.dump(method.algorithm).items() if key != "name"}
    return {"label": method.label, "name": method.asked.name, "settings": settings,
            "rounds": method.rounds, "added": method.added, "tuned": method.tuned}


# -- curves --------------------------------------------------------------------------------------------


def _curves(plan: Plan, results: Results) -> tuple[str, dict[str, Any]]:
    """The test figures of each method at its evaluated rounds, also of unfinished runs: of the metric that
    decides, or of the loss where the rounds do not record that metric."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for run in plan.runs():
        if rows := layout.read_metrics(run.place):
            found.setdefault(run.label, {})[run.seed] = rows
    known = [row["personal"]["test"].get(results.metric) for seeds in found.values()
             for rows in seeds.values() for row in rows if "personal" in row]
    is_recorded = all(each is not None for each in known) and any(each["mean"] is not None for each in known)
    metric = results.metric if is_recorded or not known else "loss"
    return metric, {label: curve for label in plan.methods if label in found
                    and (curve := _curve(found[label], results, label, metric)) is not None}


def _curve(seeds: dict[int, list[dict[str, Any]]], results: Results, label: str, metric: str
           ) -> dict[str, Any] | None:
    evaluated = {seed: {row["round"]: row for row in rows if "personal" in row}
                 for seed, rows in seeds.items()}
    numbers = sorted({number for rows in evaluated.values() for number in rows})
    if not numbers:
        return None
    numbers = numbers[:: -(-len(numbers) // MOST_POINTS)]

    def at(*keys: str) -> np.ndarray:
        """What a seed has spent up to each round, mean over the seeds."""
        totals = []
        for rows in seeds.values():
            spent = np.cumsum([sum(row[name] for name in keys) for row in rows])
            totals.append([spent[number - 1] if number <= len(spent) else np.nan for number in numbers])
        return mean_over_seeds(np.array(totals, float))

    def band(model: str) -> dict[str, Any] | None:
        values = {seed: [(rows.get(number, {}).get(model) or {}).get("test", {}).get(metric, {}).get("mean")
                         for number in numbers] for seed, rows in evaluated.items()}
        table = np.ma.masked_invalid(np.array([*values.values()], float))
        return None if not table.count() else {
            "mean": table.mean(0).filled(np.nan), "low": table.min(0).filled(np.nan),
            "high": table.max(0).filled(np.nan), "seeds": values}

    about = _federation(results.plan.out)
    population = len(about["names"]) - about["unseen"]
    best = {run.seed: (run.summary["best"] or {}).get("round")
            for run in results.finished if run.label == label}
    if (personal := band("personal")) is None:
        return None
    return {"round": numbers, "steps": at("grad_steps"), "bytes": at("bytes_down", "bytes_up") / population,
            "personal": personal, "global": band("global"),
            "best_round": [best.get(seed) for seed in seeds]}


def _clients(results: Results) -> dict[str, Any]:
    about = _federation(results.plan.out)
    count = max((len(values) for values in results.clients.values()), default=0)
    return {"names": about["names"][:count], "n_train": about["sizes"]["train"][:count],
            "n_test": about["sizes"]["test"][:count],
            "methods": {label: values.tolist() for label, values in results.clients.items()}}


def _paper(results: Results) -> dict[str, Any] | None:
    """What is published, beside ours."""
    found = results.paper
    if found is None:
        return None
    metric, ratio = found.paper.metric, results.plan.is_ratio(found.paper.metric)
    return {
        "source": found.paper.source, "metric": metric, "words": conclusions.paper(results),
        "figures": [[label, COLUMNS[printed.column], cell(f"personal_{metric}", found.ours[label], metric),
                     figure(metric, printed.value),
                     cell(f"paper_difference_{metric}", found.gap(label), metric)]
                    for label, printed in found.paper.figures.items() if label in found.ours],
        "orderings": [[f"{each.better} above {each.worse}", figure(metric, each.paper),
                       f"{each.ours.mean:+.4g}" + (" (log ratio)" if ratio else ""),
                       "-" if each.ours.p is None else f"{each.ours.p:.3g}", each.appearance]
                      for each in found.orderings]}


def _grids(results: Results) -> list[dict[str, Any]]:
    """The figure against each field of a grid; other fields of it make lines of their own."""
    rows = {row.label: row for row in results.rows}
    lines: dict[tuple[str, str, str], list[tuple[Any, Interval]]] = {}
    for label, method in results.plan.methods.items():
        if method.grid is None or label not in rows:
            continue
        for field, value in method.grid.values.items():
            others = " ".join(f"{name}={v}" for name, v in method.grid.values.items() if name != field)
            name = f"{method.grid.family} {others}".strip()
            lines.setdefault((name, field, method.grid.family), []).append(
                (value, rows[label].figures["personal"]))
    return [{"label": name, "field": field, "values": [value for value, _ in points]} | {
                end: [getattr(figure, end) for _, figure in points] for end in ("mean", "low", "high")}
            for (name, field, _), points in lines.items()]


def _clusters(plan: Plan) -> dict[str, Any]:
    """Who was in which cluster, of the first seed that there is."""
    found: dict[str, Any] = {}
    for run in plan.runs():
        if run.label in found:
            continue
        rows = [row for row in layout.read_metrics(run.place) if "clusters" in row.get("info", {})]
        rows = rows[:: max(1, -(-len(rows) // MOST_POINTS))]
        if rows:
            of_client = [[None if k < 0 else k for k in row["info"]["clusters"]] for row in rows]
            found[run.label] = {"seed": run.seed, "rounds": [row["round"] for row in rows],
                                "of_client": of_client}
    return found


def _federation(out: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((out / "federation.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DescantError(f"{out / 'federation.json'} is missing or damaged ({error}): run the same "
                           "`descant compare` again, which writes it") from None
    classes = found["classes"]
    numbers = None if not classes else [str(k) for k in range(len(classes[0]))]
    return found | {"class_names": found.get("class_names") or numbers}
