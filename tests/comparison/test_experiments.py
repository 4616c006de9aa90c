"""Every experiment file of the repository: its methods play a round, and its paper's figures have methods."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import descant
from descant.algorithms import CGPFL, IFCA, FedEM
from descant.comparison import methods
from descant.comparison.methods import Contender
from descant.comparison.paper import Paper
from descant.comparison.reproduce import study
from descant.comparison.reproduce.claims import Verdict
from descant.comparison.reproduce.items import Item
from descant.core.federation import Federation
from descant.core.metric import METRICS
from descant.core.permit import ran
from descant.core.splits import SPLITS, Table
from descant.engine.settings import Train
from descant.experiment.config import Experiment, read_toml
from descant.theory.oracle import oracle
from helpers import engine, require_data

ROOT = Path(__file__).parents[2] / "experiments"
FILES = sorted(ROOT.rglob("*.toml"))
PAPERS = [file for file in FILES if file.parent != ROOT]
STUDIES = sorted(file for file in ROOT.glob("*/*.py") if not file.name.startswith("_"))
SYNTHETIC = ("fedmap_shell", "fedprox_logistic", "digits")


def named(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", PAPERS, ids=named)
def test_what_a_paper_says_is_of_methods_that_are_compared(file: Path) -> None:
    tables = read_toml(file)
    Experiment.parse({**tables, "algorithm": {"name": "fedavg"}}, ran())  # its sections are valid
    labels = methods.labels(tables, Train(), ran())
    paper = Paper.parse(tables["paper"], labels, METRICS)
    spoken_of = {*paper.figures, *(label for claim in paper.claims for label in (claim.better, claim.worse)),
                 *(label for claim in paper.near for label in (claim.method, *claim.best_of))}
    assert len(spoken_of) > 1
    found = methods.contenders(tables, None, Train(), baselines=False, permit=ran())
    own = {contender.label for contender in found if contender.grid is None}
    assert own <= spoken_of or not paper.figures  # what is printed is all that is compared, but baselines
    assert (paper.repetitions, paper.needs) == (Item(file).about().repetitions, Item(file).about().needs)


@pytest.mark.parametrize("file", PAPERS, ids=named)
def test_a_file_says_how_it_is_run(file: Path) -> None:
    assert f"#     descant reproduce {named(file).removesuffix('.toml')} --jobs 2\n" in file.read_text()


@pytest.mark.parametrize("file", STUDIES, ids=named)
def test_a_study_says_what_it_repeats_and_its_points_can_be_measured(file: Path) -> None:
    module = study.load(file)
    assert Item(file).about() == (module.SOURCE, module.SEEDS, getattr(module, "NEEDS", None))
    wanted = set(inspect.signature(module.measure).parameters) - {"seed"}
    assert all(set(point) == wanted for point in module.POINTS)
    jobs = study.jobs_of(file, module.POINTS, module.SEEDS, Path())
    assert len({job.place for job in jobs}) == len(jobs)  # no two points are the same


WHAT = ("method", "how", "lam", "scenario")  # fields of points in which a study runs other code


def chosen(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first point of each method, and of what else runs other code."""
    seen: set[tuple[str, Any]] = set()
    found = []
    for point in points:
        texts = {(name, value) for name, value in point.items() if name in WHAT}
        if not found or texts - seen:
            found.append(point)
        seen |= texts
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # cautions of methods
@pytest.mark.parametrize("file", STUDIES, ids=named)
def test_every_method_of_a_study_is_measured(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With at most 20 rounds of one local step on small batches, or 3 where all rows are read in every round,
    or one of a large network; of many rows, with four of each client, or of as many as a round takes. Claims
    are made of what is measured."""
    for name in ("mnist", "fashion_mnist", "har", "cifar10"):
        if f'"{name}"' in "".join(each.read_text() for each in (file, *file.parent.glob("_*.py"))):
            require_data(name)
    module, run, whole = study.load(file), descant.run, cache(descant.federation)
    gpu = getattr(module, "NEEDS", None) == "gpu"
    most = 1 if gpu else 3 if file.parent.name == "pfedgt" else 20
    monkeypatch.setattr(study, "load", lambda path: module)
    monkeypatch.setattr(descant, "run", lambda *args, **given: run(*args, **given | {
        "local": {"steps": 1}, "batch": 4, "rounds": min(most, given["rounds"])} | (
            {"backend": "loop"} if gpu else {})))
    large, clients = file.parent.name in ("pfedbred", "pfedgt"), 7 if file.parent.name == "pfedgt" else None
    monkeypatch.setattr(descant, "federation", lambda *args, **given: (
        cut(whole(*args, **given), clients) if large else whole(*args, **given)))
    for name, value in (("ROUNDS", 20), ("SHARE", 100)):  # of the rows of a picture, a 100th
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)
    if hasattr(module, "oracle"):
        monkeypatch.setattr(module, "oracle", lambda *args, **given: oracle(*args, **given | {"steps": 2}))
    measured = [(point, study.measure(file, 0, point)) for point in chosen(module.POINTS)]
    figures = [next((found for measured_at, found in measured if measured_at == point), measured[0][1])
               for point in module.POINTS]
    rows = [point | {"seed": seed, "seconds": 0.0} | found
            for point, found in zip(module.POINTS, figures, strict=True) for seed in (0, 1)]
    judged = module.claims(rows)
    assert judged
    assert all(claim.verdict in get_args(Verdict) for claim in judged)


@cache
def plays() -> dict[Path, list[Contender]]:
    """What each file has to play: its methods, and the first point of each grid, but for those that another
    file of its paper plays with the same settings on the same dataset with the same network; at least one,
    so that its own data are tried."""
    found: dict[Path, list[Contender]] = {}
    played: set[str] = set()
    for file in FILES:
        tables = read_toml(file)
        where = f"{file.parent.name} {tables['data']['dataset']} {tables['model']}"
        own: dict[str, Contender] = {}
        grids = set()
        for each in methods.contenders(tables, None, Train(), baselines=True, permit=ran()):
            family = None if each.grid is None else each.grid.family
            if family is None or family not in grids:
                own.setdefault(f"{where} {each.algorithm!r}", each)
            grids.add(family)
        new = [each for name, each in own.items() if name not in played]
        found[file] = new or list(own.values())[:1]
        played |= set(own)
    return found


ROWS = 4  # of a client in each split


def cut(federation: Federation, clients: int | None = None) -> Federation:
    """Its first clients, with a few rows each, spread over all that they have."""
    clients = clients or federation.population
    lists = {split: [rows[np.linspace(0, len(rows) - 1, min(ROWS, len(rows))).astype(int)]
                     for rows in map(federation.split(split).__getitem__, range(clients))]
             for split in SPLITS}
    kept = np.concatenate([rows for each in lists.values() for rows in each])
    place = {row: k for k, row in enumerate(kept.tolist())}
    tables = {split: Table.of([np.array([place[row] for row in rows.tolist()], np.int64) for rows in each])
              for split, each in lists.items()}
    return dataclasses.replace(federation, x=federation.x[kept], y=federation.y[kept], **tables,
                               names=federation.names[:clients], unseen=0, truth={}, origin=None)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=named)
def test_every_method_of_a_file_plays_a_round(file: Path) -> None:
    """Of two of its clients, or as many as clusters or components, with four rows each."""
    tables = read_toml(file)
    dataset = tables["data"]["dataset"]
    if dataset not in SYNTHETIC:
        require_data(dataset)
    found = plays()[file]
    clusters = [each.algorithm.K for each in found if isinstance(each.algorithm, CGPFL | IFCA)]
    components = [each.algorithm.M for each in found if isinstance(each.algorithm, FedEM)]
    clients = max([2, *components, *(K for K in clusters if isinstance(K, int))])
    alone = {name: tables[name] for name in ("data", "model", "train")} | {"algorithm": {"name": "fedavg"}}
    experiment = Experiment.parse(alone, ran())
    train = experiment.train
    federation = cut(experiment.data.federation(), clients).to(train.torch_dtype)
    task = experiment.model.task(federation, train.torch_dtype, 0)
    steps = 1 if experiment.model.name == "resnet18" else 2  # one takes it some seconds, with two rows
    for label, method in ((each.label, each.algorithm) for each in found):
        with engine(method, federation, task, dtype=train.dtype, batch=2, local={"steps": steps},
                    backend="vectorised") as played:
            [report] = played.play()
            assert report.participants == clients, label
            assert not report.rejected, label
