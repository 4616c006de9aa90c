"""Means that a few wrong rows cannot move far: one function each, on rows [n, d] with weights [n].

Weights need not sum to one; a row counts by its weight. What is returned is in float64. Rows must be finite:
the engine rejects the others before (`finite` says which they are).

How many wrong rows each of them bears (its breakdown point), in shares of the weight or, for Krum, of rows:
the median and the geometric median less than 1/2; the trimmed mean no more than `share`; Krum `wrong` rows of
at least 2 wrong + 3. Bounding lengths bears less than 1/2 in that the mean stays within the median length of
the origin; wrong rows still move it by their share of that.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TIE = 1e-6  # shares of the weight that differ by rounding alone, also that of float32


def finite(rows: Tensor) -> Tensor:
    """[n] which rows hold no NaN and no infinity."""
    return rows.reshape(len(rows), -1).isfinite().all(1)


def lengths(rows: Tensor) -> Tensor:
    """[n] the Euclidean lengths."""
    largest, rest = _factors(rows)
    return largest * rest


def _factors(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths [n] as products, since the squares of large entries would overflow: the largest entry, and the
    length of the row divided by that."""
    rows = rows.reshape(len(rows), -1).double()
    if not rows.shape[1]:
        return rows.new_zeros(len(rows)), rows.new_zeros(len(rows))
    largest = rows.abs().amax(1)
    return largest, (rows / torch.where(largest > 0, largest, 1.0)[:, None]).norm(dim=1)


def middle_length(of: Tensor) -> float:
    """The median of lengths, of two middle ones the longer, so that a client that has little left to learn
    does not hold back the others. Zeros do not count; zero, if there are no others."""
    some = of[of > 0].sort().values
    return float(some[len(some) // 2]) if len(some) else 0.0


def bounded(rows: Tensor, limit: float) -> Tensor:
    """Rows of at most this length: longer ones are shortened and keep their direction."""
    flat = rows.reshape(len(rows), -1).double()
    largest, rest = (part[:, None] for part in _factors(rows))
    shortened = limit * (flat / largest / rest)
    return torch.where(largest * rest > limit, shortened, flat).reshape(rows.shape)


def median(rows: Tensor, weights: Tensor) -> Tensor:
    """In every coordinate the middle of the values x that minimise sum_i w_i |x - x_i|: with equal weights,
    the middle value, or the mean of the two middle ones."""
    values, upto = _sorted(rows, weights)
    lower = values.gather(0, (upto < 0.5 - _TIE).sum(0, keepdim=True))
    upper = values.gather(0, (upto <= 0.5 + _TIE).sum(0, keepdim=True).clamp(max=len(values) - 1))
    return _halfway(lower, upper)[0]


def trimmed_mean(rows: Tensor, weights: Tensor, share: float) -> Tensor:
    """In every coordinate the mean of what is left when this share of the weight is cut off at either end; a
    row at the edge is cut in part. Of n equal weights, share n values are cut off at each end."""
    if not 0 <= share < 0.5:
        raise ValueError(f"the share that is cut off must be in [0, 0.5), not {share}")
    values, upto = _sorted(rows, weights)
    before = torch.cat([torch.zeros_like(upto[:1]), upto[:-1]])
    left = (upto.clamp(max=1 - share) - before.clamp(min=share)).clamp(min=0)
    left = torch.where(left > _TIE, left, 0.0)
    # an infinite sum of what is cut off must not come in as 0 times a large number
    return (torch.where(left > 0, values, 0.0) * (left / left.sum(0))).sum(0)


def geometric_median(rows: Tensor, weights: Tensor, *, rounds: int = 200, tolerance: float = 1e-9) -> Tensor:
    """The point z that minimises sum_i w_i ||z - x_i||, by Weiszfeld's steps: the mean of the rows, each
    weighted by w_i over its distance from z.

    Distances are taken as at least 1e-6 times their median, where the plain step would divide by zero; that
    is the step for a loss that is quadratic so near to a row (Pillutla et al. 2022, arXiv:1912.13445). It
    starts at the coordinate-wise median, which is as robust and near by.
    """
    rows, shares = rows.double(), weights.double() / weights.double().sum()
    z = median(rows, weights)
    for _ in range(rounds):
        away = lengths(rows - z)
        near = 1e-6 * float(away.median())
        if near == 0:  # z is at least half of the rows
            near = 1e-6 * float(away.max())
        if near == 0:  # all are equal
            return z
        pull = shares / away.clamp(min=near)
        after = (pull / pull.sum()) @ rows
        moved, z = float(lengths((after - z)[None])), after
        if moved <= tolerance * max(near * 1e6, float(lengths(z[None]))):
            break
    return z


def krum(rows: Tensor, wrong: int, chosen: int = 1) -> Tensor:
    """The numbers [chosen] of the rows, ascending, with the least sum of squared distances from their
    n - wrong - 2 nearest others (at least one), where so many may be wrong. The first of equal ones.

    Krum takes one row; multi-Krum several, whose mean is taken (Blanchard et al. 2017, arXiv:1703.02757).
    """
    n = len(rows)
    if not 1 <= chosen <= n:
        raise ValueError(f"{chosen} of {n} rows cannot be chosen")
    if n == 1:
        return torch.zeros(1, dtype=torch.int64)
    flat = rows.reshape(n, -1).double()
    largest = max(float(flat.abs().max()), 1e-300) if flat.numel() else 1.0
    apart = torch.cdist(flat / largest, flat / largest, compute_mode="donot_use_mm_for_euclid_dist").square()
    apart.fill_diagonal_(torch.inf)
    nearest = apart.sort(1).values[:, : max(1, n - wrong - 2)]
    return nearest.sum(1).sort(stable=True).indices[:chosen].sort().values


def _sorted(rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """In every coordinate the values upwards [n, d], and the share of the weight up to and with each."""
    if bool((weights < 0).any()) or not float(weights.sum()) > 0:
        raise ValueError("weights must not be negative, nor all zero")
    rows = rows.double()[weights > 0]  # a row that does not count is no middle
    weights = weights.double()[weights > 0]
    values, order = rows.sort(0)
    upto = (weights / weights.sum())[order].cumsum(0)
    return values, upto


def _halfway(a: Tensor, b: Tensor) -> Tensor:
    """The mean of two, without their sum, which may overflow."""
    return a + (b / 2 - a / 2)
