"""Write down what is to be compared. Methods and seeds can be added to a directory later; a method with other
settings, or another federation, is refused."""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from descant import __version__
from descant.comparison import measure
from descant.comparison.budget import Cost, rounds_of
from descant.comparison.methods import Contender, Listed, contenders, labels, reference
from descant.comparison.paper import Paper
from descant.comparison.plan import (
    Budget,
    Method,
    Plan,
    Population,
    Splits,
    given_split,
    joined_versions,
    read,
    split_of,
)
from descant.core import fields
from descant.core.federation import Federation
from descant.core.files import write_atomic
from descant.core.import_object import marked, permit_of
from descant.core.permit import NOTHING, Permit
from descant.core.plain import plain
from descant.core.splits import SPLITS, folds_of
from descant.data import heterogeneity
from descant.data.spec import DataSpec
from descant.engine.settings import Train
from descant.errors import DescantError, UsageError, unknown
from descant.experiment import directory as layout
from descant.experiment import run as runs
from descant.experiment.config import Experiment, differences, parse_algorithm

PATIENCE = 5  # evaluations without improvement, after which a method has converged
# what may change in a directory: the results are the same, or more is measured
MAY_CHANGE = ("train.seed", "train.backend", "train.chunk", "train.workers", "eval.metrics",
              "eval.diagnostics")


def make(tables: Mapping[str, Any], out: Path, seeds: Sequence[int], *, algorithms: Listed | None = None,
         budget: Budget = "steps", splits: Splits | None = None, population: Population | None = None,
         metric: str | None = None, looks: int = 1, baselines: bool = True, command: str = "",
         permit: Permit = NOTHING) -> tuple[Plan, list[str]]:
    """The plan of a comparison, with what its directory (which is held) had before, and the labels of the
    methods that are asked for now. What is None is as before, or the default. `permit` is for code that the
    tables name; the directory may name what they name, and what is allowed by name."""
    if len(set(seeds)) != len(seeds) or not seeds or min(seeds) < 0:
        raise UsageError(f"the seeds must be distinct whole numbers, 0 or greater, not {list(seeds)}")
    # [train], for the baselines
    probe = Experiment.parse({**tables, "algorithm": {"name": "fedavg"}}, permit)
    found = contenders(tables, algorithms, probe.train, baselines=baselines, permit=permit)
    asked = marked([fields.dump(contender.algorithm) for contender in found], permit)
    there = permit_of(probe.dump() | {"algorithms": asked}, Permit(permit.allow))
    before = read(out) if (out / "comparison.json").exists() else None
    if before is None:
        layout.require_free(out)
    # methods that are added later have the budget of the first
    first = found[0].algorithm if before is None else parse_algorithm(
        fields.dump(before.experiment.algorithm), allow=there)
    base = dataclasses.replace(
        probe, algorithm=reference(marked(tables, permit), first), train=_until(probe.train, budget),
        eval=dataclasses.replace(probe.eval, metric=_metric(before, metric or probe.eval.metric, out),
                                 metrics=_metrics(before, probe.eval.metrics, there)))
    splits = _splits(before, base.data, splits)
    setup = runs.Setup.of(base)
    names = measure.names(setup.task, base.eval.metrics)
    if base.eval.metric is not None and base.eval.metric not in names:
        raise unknown("metric", base.eval.metric, names)
    why = setup.deciding.why if before is None else before.metric_why
    setup = setup.decided()
    base = dataclasses.replace(base, eval=setup.eval)
    known = {} if before is None else dict(before.methods)
    _require_same(before, base, {"budget": budget, "splits": splits}, setup.federation, out)
    metrics = {name: about for name, about in measure.described(base.eval.metrics).items() if name in names}
    counted = rounds_of(setup, [c for c in found if c.label not in known], budget)
    known = _joined(known, found, counted, out)
    commands = [] if before is None else before.commands
    every = sorted({*seeds, *([] if before is None else before.seeds)})
    plan = Plan(
        out, budget, splits, population or (before.population if before is not None else "clients"),
        base, setup.federation.pool_fingerprint(), setup.federation.population,
        known, every, setup.deciding.name, why, metrics,
        max(looks, 1 if before is None else before.looks), [] if before is None else before.looked_at,
        [*commands, command] if command and command not in commands else commands,
        _versions() if before is None else joined_versions(before.versions, _versions()),
        _paper(before, tables, {*known, *labels(tables, probe.train, permit)}, names))
    try:
        first_split = split_of(base.data, splits, every[0])
        is_made = (base.data.split_seed, base.data.fold) == (first_split.split_seed, first_split.fold)
        shown = setup.federation if is_made else first_split.federation()
        write_atomic(out / "federation.json", json.dumps(_picture(shown)).encode())
        plan.write()
    except OSError as error:
        raise DescantError(f"cannot write to {out}: {error.strerror}; choose another --out") from None
    return plan, [contender.label for contender in found]


def _joined(known: dict[str, Method], found: Sequence[Contender], counted: Mapping[str, Cost], out: Path
            ) -> dict[str, Method]:
    """The methods of a directory with those that are asked for now; one with other settings is refused."""
    joined = dict(known)
    for contender in found:
        label = contender.label
        if label not in joined:
            joined[label] = Method(label, contender.algorithm, counted[label].rounds, sorted(contender.given),
                                  contender.grid, contender.added, counted[label].seconds)
        elif not contender.added:
            if changed := differences(*(plain(fields.dump(each)) for each in (joined[label].asked,
                                                                              contender.algorithm))):
                raise UsageError(f"{out} has {label!r} with another setting ({changed[0]}): give one of them "
                                 f"a label ({contender.algorithm.name}:label=...), or choose another --out")
            # the same; but the code that this one names is the user's, whoever made the directory
            joined[label] = joined[label]._replace(asked=contender.algorithm)
    return joined


def _until(train: Train, budget: Budget) -> Train:
    """[train] with when a run stops by itself."""
    if budget == "converge":
        return dataclasses.replace(train, patience=train.patience or PATIENCE)
    if train.patience is not None:
        raise UsageError(f"train.patience stops runs early, and --budget {budget} gives all methods the "
                         "same: leave patience out, or compare with --budget converge")
    return train


def _metric(before: Plan | None, wanted: str | None, out: Path) -> str | None:
    """The metric that selects the rounds of this directory; None: the one that fits the data."""
    if before is None:
        return wanted
    if wanted is not None and wanted != before.metric:
        raise UsageError(f"{out} holds runs whose rounds were selected by {before.metric}, not by {wanted}: "
                         f"choose another --out; results.csv has {wanted} of these runs")
    return before.metric


def _metrics(before: Plan | None, wanted: Sequence[str] | None, permit: Permit) -> tuple[str, ...] | None:
    """The user's own metrics, with those of before: all runs are measured alike."""
    places = [] if before is None else marked(list(before.experiment.eval.metrics or ()), permit)
    merged = {place: place for place in [*places, *(wanted or ())]}  # as the user names it, where both do
    return tuple(merged.values()) or None


def _paper(before: Plan | None, tables: Mapping[str, Any], known: Collection[str], metrics: Collection[str]
           ) -> Paper | None:
    """The published figures: those of the file, or else those that the directory has."""
    if "paper" in tables:
        return Paper.parse(tables["paper"], known, metrics)
    return None if before is None else before.paper


def _splits(before: Plan | None, data: DataSpec, wanted: Splits | None) -> Splits:
    given = given_split(data)
    if wanted is None:
        wanted = before.splits if before is not None else "repeated" if given is None else "fixed"
    if wanted != "fixed" and given is not None:
        raise UsageError(f"data.{given} says which rows are tested, and --splits {wanted} tests others in "
                         "each repetition: leave one of them out, or use --splits fixed")
    if wanted == "folds":
        folds_of(data.test)
    return wanted


def _require_same(before: Plan | None, base: Experiment, choices: dict[str, str], federation: Federation,
                  out: Path) -> None:
    """Refuse to put results of different federations, budgets or splits into one directory."""
    if before is None:
        return
    changed = differences(plain(before.experiment.dump()) | {name: getattr(before, name) for name in choices},
                          plain(base.dump()) | choices)
    changed = [line for line in changed if not line.startswith(MAY_CHANGE)]
    if not changed and before.fingerprint != federation.pool_fingerprint():
        changed = [f"the rows of the federation: fingerprint {before.fingerprint} became "
                   f"{federation.pool_fingerprint()}"]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UsageError(f"{out} holds another comparison ({'; '.join(changed[:3])}{more}): choose another "
                         "--out")


def _picture(federation: Federation) -> dict[str, Any]:
    """What a report shows of the federation, so that it needs no data."""
    measured = heterogeneity.measure(federation)
    return {
        "facts": heterogeneity.facts(federation, measured) | (
            {"notes": "; ".join(federation.notes)} if federation.notes else {}),
        "names": list(federation.names),
        "unseen": federation.unseen,
        "sizes": {split: federation.split(split).sizes.tolist() for split in SPLITS},
        "classes": None if measured.counts is None else measured.counts.tolist(),
        "class_names": None if federation.class_names is None else list(federation.class_names),
    }


def _versions() -> dict[str, str]:
    """Of everything that the results depend on."""
    now = {"descant": __version__, "Python": platform.python_version(), "system": platform.platform()}
    now |= {name: metadata.version(name) for name in ("torch", "numpy", "scikit-learn")}
    if (commit := source_commit()) is not None:
        now["commit"] = commit
    return now


def source_commit() -> str | None:
    """The commit of descant's sources, "+" if these differ from it; None if they are not in a repository."""
    package = Path(__file__).parents[1]

    def git(*words: str) -> str | None:
        try:
            found = subprocess.run(["git", "-C", str(package), *words], capture_output=True, text=True,
                                   timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return found.stdout.strip()

    if not git("ls-files", "__init__.py"):  # not tracked: installed inside somebody else's repository
        return None
    commit = git("rev-parse", "--short=12", "HEAD")
    return commit and commit + ("+" if git("status", "--porcelain", "--", ".") else "")
