"""A diagnostic of the study beside it: how long k-means takes on what the clients upload."""

from __future__ import annotations

import time

import torch

from descant.algorithms import CGPFL
from descant.core.tree import take
from descant.engine.diagnostics import Observed
from descant.priors.grouping import Grouped, Groups


def clustering_seconds(seen: Observed) -> float:
    """Processor seconds of the clustering that the server made in this round, made again."""
    assert isinstance(seen.algorithm, CGPFL)
    belief, before = seen.algorithm.belief, seen.before
    assert isinstance(belief, Grouped)
    assert isinstance(before, Groups)
    models = [belief.inner.model(take(before.priors, k)) for k in range(before.K)]
    start = time.process_time()
    if before.K == 1:
        belief.how.first(seen.uploaded, seen.round)
    else:
        belief.how.again(seen.uploaded, torch.stack([model.theta for model in models if model is not None]),
                         seen.round)
    return time.process_time() - start
