"""Methods that need a mean alone come to what they came to before sums were exact: the mean as it was written
then, of uploads one by one, in float64, gives the same servers to 1e-12."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from descant.algorithms import ALGORITHMS
from descant.core import algorithm as module
from descant.core.algorithm import Algorithm
from descant.core.tree import Tree, leaves, map_tree
from descant.engine.rounds import Training
from descant.priors import gaussian
from helpers import engine, on_any_model, ragged

METHODS = ("fedavg", "scaffold", "pfedme", "fedprox", "ditto", "pfedbred", "one_stage_fedprox", "pfedgt",
           "fedmap", "perfedavg", "apfl", "l2gd", "fedem", "globaltrain", "dichotomous", "localtrain")
CHANGES: dict[str, dict[str, Any]] = {"fedmap": {"weights": "samples"}}


def former_mean(rows: Tree, weights: Tensor) -> Tree:
    """sum_i w_i rows_i / sum_i w_i as a matrix product."""
    shares = (weights / weights.sum()).double()
    return map_tree(lambda leaf: torch.tensordot(shares.to(leaf.dtype), leaf, 1), rows)


def server(method: Algorithm, *, one_by_one: bool) -> Tree:
    with engine(method, ragged(), backend="loop", dtype="float64", cohort=4) as e:
        if one_by_one:
            e.training.adding = lambda *_: None  # type: ignore[method-assign]
        assert isinstance(e.training, Training)
        e.play(4)
        return e.training.server


@pytest.mark.parametrize("name", [*METHODS[:3], *(pytest.param(name, marks=pytest.mark.slow)
                                                  for name in METHODS[3:])])
def test_a_method_comes_to_what_it_came_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = ALGORITHMS[name](**on_any_model(name) | CHANGES.get(name, {}))
    assert not method.needs_rows
    found = server(method, one_by_one=False)
    for place in (module, gaussian):
        monkeypatch.setattr(place, "weighted_mean", former_mean)
    expected = server(method, one_by_one=True)
    for (_, mine), (_, theirs) in zip(leaves(found), leaves(expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
