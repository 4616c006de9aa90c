"""Who is asked in a round. It follows from the seed, which server and clients know."""

from __future__ import annotations

import numpy as np

from descant.core.federation import Federation
from descant.core.privacy.settings import Privacy
from descant.core.random import stream
from descant.engine.settings import Train


def sampled(federation: Federation, train: Train, number: int, privacy: Privacy | None = None,
            there: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The cohort of a round, and who trains; both ascending, without those who dropped out, of those who are
    `there`. Where clients are protected by coins, a cohort has as many as come up, also none."""
    population, generator = federation.population, stream(train.seed, "cohort", number)
    there = np.arange(population) if there is None else there
    size = train.cohort_size(population)
    if privacy is not None and privacy.unit == "client" and privacy.sampling == "poisson":
        cohort = np.flatnonzero(generator.random(population) < size / population)
        if train.drop:  # by coins too: of a fixed share, one client would make room for another
            cohort = cohort[generator.random(len(cohort)) >= train.drop]
        return cohort, cohort
    chances = federation.weights if train.sampling == "samples" else None
    if chances is not None and len(there) < population:
        chances = chances[there] / chances[there].sum()
    cohort = np.sort(generator.choice(there, min(size, len(there)), replace=False, p=chances))
    everyone = there if train.participation == "all" else cohort
    others = np.setdiff1d(everyone, cohort, assume_unique=True)
    if train.drop:
        cohort = _thinned(cohort, train.drop, 1, generator)
        others = _thinned(others, train.drop, 0, generator)
    return cohort, np.union1d(cohort, others)


def _thinned(clients: np.ndarray, share: float, least: int, generator: np.random.Generator) -> np.ndarray:
    """The clients without a random share of them, but no fewer than `least`."""
    stay = max(least, len(clients) - round(share * len(clients)))
    return np.sort(generator.choice(clients, stay, replace=False))
