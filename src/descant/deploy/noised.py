"""What ONE client adds to a sum that hides clients (`privacy.unit = "client"`): shortened by the client
itself, with its share of the noise. So not even the server sees a sum without noise.

Everything is in units of the round's bound. A contribution is rounded towards zero on the grid of the
encoding, so that it is no longer than the bound there either. The noise is Gaussian numbers of the operating
system, rounded to whole units of the grid and added as whole numbers: nothing of it depends on the
contribution. The grid is finer than the noise by a factor of 2^14 at least (up to 1000 clients), so that sums
of such numbers are Gaussian for every purpose: tests/deploy/test_noised.py has the divergence.

The shares are such that those of all clients but one in the smallest sum that is allowed suffice: one client
may watch, and knows its own share. It is assumed that the others add theirs, and keep them to themselves.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from descant.core.algorithm import Algorithm
from descant.core.privacy.noise import secret_normals
from descant.core.privacy.settings import Mechanism
from descant.core.sums import Total
from descant.core.tree import Tree, leaves, map_tree
from descant.deploy.protocol import Shapes
from descant.deploy.secure.encoding import FixedPoint, Numbers, OutOfRange, Words
from descant.deploy.summand import Summand
from descant.engine.adding import Bound
from descant.engine.work import Job
from descant.errors import UsageError

LEAST, MOST = 2.0**-10, 2.0**12  # of noise multipliers: the grid is neither too coarse nor too narrow


class NoisedSummand:
    """The form of the vectors of a job."""

    def __init__(self, method: Algorithm, shapes: Shapes, job: Job, mechanism: Mechanism) -> None:
        self._plain = Summand(method, shapes, job)
        self._mechanism = mechanism
        sizes = [leaf.numel() for _, leaf in leaves(self._plain.form)]
        self._deviations = np.full(sum(sizes), mechanism.sum_noise)
        if mechanism.count_noise is not None:  # and a vote
            self._deviations = np.append(self._deviations, mechanism.count_noise)
        self.length = len(self._deviations)

    def words(self, contribution: Tree, bound: Bound, encoding: FixedPoint, least: int) -> Words:
        """Of a client, for a sum of so many clients at least."""
        rows = map_tree(lambda leaf: leaf[None], contribution)
        if any(not bool(leaf.isfinite().all()) for _, leaf in leaves(rows)):
            raise OutOfRange("what is to be summed is not finite")
        moved, is_long = Total.shortened(rows, bound.tensors, bound.norm)
        parts = [moved.parts[name].value().flatten() for name, _ in leaves(rows)]
        own = torch.cat(parts).numpy() / bound.norm
        if self._mechanism.count_noise is not None:
            own = np.append(own, -0.5 if bool(is_long) else 0.5)
        return noised(own, self._deviations / math.sqrt(least - 1), encoding)

    def total(self, vector: Numbers, bound: Bound, clients: int) -> Total:
        """The sum over so many clients, as the engine takes it."""
        return self._plain.total(bound.norm * vector, torch.ones(clients, dtype=torch.float64))

    def votes(self, vector: Numbers) -> float | None:
        return None if self._mechanism.count_noise is None else float(vector[-1])


def noised(values: Numbers, deviations: Numbers, encoding: FixedPoint) -> Words:
    """The values on the encoding's grid, no larger than they are, with noise of these deviations."""
    whole = np.trunc(np.ldexp(values, encoding.fraction))
    noise = np.rint(np.ldexp(deviations * secret_normals(len(values)), encoding.fraction))
    if float(np.abs(whole).max() + np.abs(noise).max()) > math.ldexp(encoding.bound, encoding.fraction):
        raise OutOfRange(f"noise of deviation {float(deviations.max()):.4g} does not fit the agreed bound of "
                         f"{encoding.bound:g}")
    found: Words = (whole.astype(np.int64) + noise.astype(np.int64)).view(np.uint64)
    return found


def require_grid(mechanism: Mechanism) -> None:
    """Refuse noise that the encoding cannot hold."""
    names = {"privacy.noise": mechanism.sum_noise, "privacy.clip.count_noise": mechanism.count_noise}
    for name, deviation in names.items():
        if deviation is not None and not LEAST <= deviation <= MOST:
            raise UsageError(f"{name} comes to {deviation:.3g}, and noise that clients add to a secure sum "
                             f"must be between {LEAST:.1g} and {MOST:g}: change it, or leave one out")


def require_alike(shapes: Shapes) -> None:
    """Refuse methods whose server sends every client something of its own: what a client would contribute
    that learns nothing, from which all measure, must be the same for all."""
    if any(True for job in ("local", "opening") for _, _ in leaves(
            shapes.messages[job].each if job in shapes.messages else ())):
        raise UsageError('privacy.unit = "client" goes together with secure aggregation where all clients '
                         "are sent the same: give one value for all, such as one lam, or leave one out")
