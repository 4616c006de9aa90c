"""A diagnostic of the study beside it: how long k-means takes on what the clients upload."""

from __future__ import annotations

import time

import numpy as np

from descant.engine.diagnostics import Observed
from descant.priors.clustering import kmeans


def clustering_seconds(seen: Observed) -> float:
    """Processor seconds of k-means with 10 starts on the uploads of this round."""
    start = time.process_time()
    kmeans(seen.uploaded, 4, np.random.default_rng(0))
    return time.process_time() - start
