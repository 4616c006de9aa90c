"""The generalized coherence estimate of pFedBreD's paper (Section 6.2): how much vectors say the same."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.errors import UsageError


class Coherence(NamedTuple):
    """`gce` is 1 - det C, where C holds the cosines between vectors: 0 if they are orthogonal, 1 if they are
    linearly dependent. With many vectors it comes close to 1, where `log_det` still tells sets apart."""

    gce: float
    log_det: float


def generalized_coherence(vectors: Tensor) -> Coherence:
    """The generalized coherence estimate (Gish and Cochran 1988) of the rows of `vectors` [n, d]:
    1 - det(G) / prod_i G_ii with the Gram matrix G. Their lengths do not count."""
    if vectors.dim() != 2 or len(vectors) < 2:
        raise UsageError(f"coherence is that of two vectors or more, rows of a matrix; this one has shape "
                         f"{tuple(vectors.shape)}")
    vectors = vectors.double()
    lengths = vectors.norm(dim=1)
    wrong = torch.nonzero(~((lengths > 0) & torch.isfinite(lengths))).flatten().tolist()
    if wrong:
        raise UsageError(f"vector {wrong[0]} is zero or not finite and has no direction: leave it out")
    if len(vectors) > vectors.shape[1]:
        return Coherence(1.0, -torch.inf)  # more vectors than dimensions
    # |det| of the triangular factor is the volume; the Gram matrix would square its condition
    factor = torch.linalg.qr((vectors / lengths[:, None]).T, mode="r").R
    log_det = 2 * float(factor.diagonal().abs().log().sum())
    return Coherence(float(-np.expm1(log_det)), log_det)
