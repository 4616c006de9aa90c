"""Sums are exact on their grids: no order and no grouping of the clients shows in any bit."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from descant.core import sums
from descant.core.sums import Total, added, weighted_mean
from descant.core.tree import take
from descant.errors import DescantError


class Parts(NamedTuple):
    wide: Tensor  # [n, 5] numbers of very different sizes
    one: Tensor  # [n]
    none: Tensor  # [n, 0]


def rows(n: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Parts, Tensor]:
    rng = np.random.default_rng(seed)
    wide = rng.standard_normal((n, 5)) * 10.0 ** rng.uniform(-18, 12, (n, 5))
    return (Parts(torch.from_numpy(wide).to(dtype), torch.from_numpy(rng.standard_normal(n)).to(dtype),
                  torch.zeros(n, 0, dtype=dtype)), torch.from_numpy(rng.integers(1, 1000, n)))


def bits(total: Total, form: Parts) -> list[bytes]:
    return [leaf.numpy().tobytes() for leaf in total.mean(form)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(20))
def test_any_order_and_any_grouping_give_the_same_bits(seed: int, dtype: torch.dtype) -> None:
    n = 37
    parts, weights = rows(n, seed, dtype)
    form, rng = take(parts, 0), np.random.default_rng(seed)
    expected = bits(Total.of(parts, weights), form)
    plain = (weights[:, None] * parts.wide.double()).sum(0).numpy().tobytes()
    differs = plain != (weights[:, None] * parts.wide.double()).flip(0).sum(0).numpy().tobytes()
    assert differs or seed > 0  # floating point alone would not do (seen with the first numbers)
    for _ in range(5):
        order = torch.from_numpy(rng.permutation(n))
        cuts = np.sort(rng.choice(np.arange(1, n), rng.integers(0, 12), replace=False)).tolist()
        groups = [order[a:b] for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
        chunks = [Total.of(take(parts, group), weights[group]) for group in groups]
        assert bits(added(chunks), form) == expected
        running = None
        for group in groups:
            running = Total.of(take(parts, group), weights[group], running)
        assert running is not None
        assert running.clients == n
        assert bits(running, form) == expected
        while len(chunks) > 1:  # a tree of any shape
            a, b = (chunks.pop(rng.integers(len(chunks))) for _ in range(2))
            chunks.append(a.plus(b))
        assert bits(chunks[0], form) == expected


@pytest.mark.parametrize("scale", [1.0, 2.0**31, 2.0**32, 2.0**-33, 1e-200, 1e200])
def test_the_sum_is_that_of_the_numbers(scale: float) -> None:
    """Held against whole-number arithmetic: off by less than 2^-63 of the largest number for each client, and
    by half a unit in the last place."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((50, 4)) * 10.0 ** rng.uniform(-6, 0, (50, 4)) * scale)
    weights = torch.ones(50)
    found = Total.of((x,), weights).parts["0"].value()
    for k in range(4):
        exact = sum(Fraction(v) for v in x[:, k].tolist())
        room = 50 * Fraction(float(x.abs().max())) / 2**63 + Fraction(math.ulp(float(found[k])))
        assert abs(Fraction(float(found[k])) - exact) <= room


def test_clients_count_by_their_weights() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, -4.0], [5.0, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(weighted_mean(x, torch.tensor([1.0, 2.0, 5.0])),
                               torch.tensor([32.0, -3.5], dtype=torch.float64) / 8, rtol=1e-15, atol=0)
    assert weighted_mean(x.float(), torch.ones(3)).dtype == torch.float32  # the type of a contribution


def test_nothing_is_added_by_nobody() -> None:
    parts, weights = rows(3, 0)
    total = Total.of(parts, weights)
    assert added([Total(), total, Total()]) is total
    zeros = Total.of(parts._replace(wide=torch.zeros_like(parts.wide)), weights)
    assert not zeros.mean(take(parts, 0)).wide.any()


def test_more_clients_than_can_be_added_without_rounding_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "MOST", 5)
    parts, weights = rows(3, 0)
    with pytest.raises(DescantError, match=r"a round can add up 5 clients.*train\.cohort"):
        added([Total.of(parts, weights), Total.of(parts, weights)])


@pytest.mark.parametrize("number", [2.0**31 - 1, 2.0**31, 2.0**31 + 1, 2.0**32 - 1, 2.0**63 + 2.0**20, 3e-20])
def test_a_piece_is_at_most_half_a_unit_of_the_grid_above(number: float) -> None:
    top, pieces = Total.of((torch.tensor([[number]], dtype=torch.float64),), torch.ones(1)).parts["0"]
    for k, piece in enumerate(pieces.flatten().tolist()):
        assert abs(piece) <= 2.0 ** (sums.WIDTH * (top - k + 1) - 1)
    assert float(pieces.sum()) == number


def test_the_pieces_of_a_full_grid_add_up_without_rounding() -> None:
    """2^20 times the largest piece that there can be: half a unit of the grid above."""
    most = torch.full((4,), 2.0**31, dtype=torch.float64)
    total = Total.of((most[:, None],), torch.ones(4))
    for _ in range(18):
        total = total.plus(total)
    assert total.clients == sums.MOST
    assert float(total.parts["0"].value()) == 2.0**51


@pytest.mark.parametrize("size", [1.0, 2.0**511, 2.0**513, 2.0**899])
def test_what_is_huge_is_shortened_like_anything_else(size: float) -> None:
    """Squares of numbers above 2^512 are infinite; beside such a client the others are what they were."""
    near = torch.tensor([[0.25, -0.5, 0.125]], dtype=torch.float64)
    far = size * torch.tensor([[3.0, -4.0, 12.0]], dtype=torch.float64) / 13
    origin = {"0": torch.zeros(2, dtype=torch.float64), "1": torch.zeros(1, dtype=torch.float64)}

    def shortened(rows: Tensor) -> tuple[Tensor, list[bool]]:
        total, is_long = Total.shortened((rows[:, :2], rows[:, 2]), origin, 0.75)
        return torch.cat([total.parts["0"].value(), total.parts["1"].value().reshape(1)]), is_long.tolist()

    alone, is_long = shortened(far)
    assert is_long == [True]
    torch.testing.assert_close(alone, 0.75 * far[0] / size, rtol=1e-14, atol=0)
    both, is_long = shortened(torch.cat([near, far]))
    assert is_long == [False, True]
    torch.testing.assert_close(both, near[0] + alone, rtol=1e-15, atol=0)
