"""Every experiment file of the repository: its methods play a round, and its paper's figures have methods."""

from __future__ import annotations

from pathlib import Path

import pytest

from descant.algorithms import CGPFL, IFCA, FedEM
from descant.comparison import methods
from descant.comparison.paper import Paper
from descant.core.metric import METRICS
from descant.core.permit import ran
from descant.engine.settings import Train
from descant.experiment.config import Experiment, override, read_toml
from helpers import engine, require_data

ROOT = Path(__file__).parents[2] / "experiments"
FILES = sorted(ROOT.rglob("*.toml"))
PAPERS = [file for file in FILES if file.parent != ROOT]


def named(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", PAPERS, ids=named)
def test_the_figures_of_a_paper_have_methods(file: Path) -> None:
    tables = read_toml(file)
    labels = methods.labels(tables, Train(), ran())
    paper = Paper.parse(tables["paper"], labels, METRICS)
    assert len(paper.figures) > 1
    own = {contender.label for contender in methods.contenders(tables, None, Train(), baselines=False,
                                                               permit=ran())}
    assert own == set(paper.figures)  # nothing is compared that the paper has not, but the baselines


@pytest.mark.parametrize("file", PAPERS, ids=named)
def test_a_file_says_how_it_is_run(file: Path) -> None:
    item = named(file).removesuffix(".toml")
    comment = " ".join(line.removeprefix("#").strip(" \\") for line in file.read_text().splitlines()
                       if line.startswith("#"))
    command = f"descant compare experiments/{item}.toml --budget rounds "
    assert command in comment
    assert f"--out results/{item}" in comment


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=named)
def test_every_method_of_a_file_plays_a_round(file: Path) -> None:
    """Of two clients, as many as clusters or components, or all where the data have owners."""
    tables = read_toml(file)
    dataset = tables["data"]["dataset"]
    if dataset in ("mnist", "fashion_mnist", "har"):
        require_data(dataset)
    found = methods.contenders(tables, None, Train(), baselines=True, permit=ran())
    clusters = [each.algorithm.K for each in found if isinstance(each.algorithm, CGPFL | IFCA)]
    components = [each.algorithm.M for each in found if isinstance(each.algorithm, FedEM)]
    clients = max([2, *components, *(K for K in clusters if isinstance(K, int))])
    alone = {name: tables[name] for name in ("data", "model", "train")} | {"algorithm": {"name": "fedavg"}}
    small = ["train.cohort=all"]
    if dataset not in ("har", "fedmap_shell", "fedprox_logistic"):
        small.append(f"data.clients={clients}")
    experiment = Experiment.parse(override(alone, small), ran())
    federation, train = experiment.data.federation(), experiment.train
    for label, method in ((each.label, each.algorithm) for each in found):
        with engine(method, federation, experiment.model.model, dtype=train.dtype, batch=train.batch,
                    local={"steps": 2}, backend="vectorised") as played:
            [report] = played.play()
            assert report.participants == federation.population, label
            assert not report.rejected, label
