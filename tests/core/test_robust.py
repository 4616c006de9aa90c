"""Robust means against their definitions, by brute force; and where they break."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from descant.core import robust


def drawn(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)))


def ragged(n: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(1, 30, n).astype(float))


def repeated(rows: Tensor, weights: Tensor) -> Tensor:
    """Rows as often as their whole weights say: what a weighted rule must give without weights."""
    return rows.repeat_interleave(weights.long(), 0)


# -- against the definitions ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9, 10])
def test_median_is_numpy_s(n: int) -> None:
    rows = drawn(n, 7)
    np.testing.assert_allclose(robust.median(rows, torch.ones(n)), np.median(rows.numpy(), 0), rtol=1e-15)


@pytest.mark.parametrize("seed", range(5))
def test_weights_count_as_repeated_rows(seed: int) -> None:
    rows, weights = drawn(8, 5, seed), ragged(8, seed)
    many = repeated(rows, weights)
    alike = torch.ones(len(many))
    np.testing.assert_allclose(robust.median(rows, weights), np.median(many.numpy(), 0), rtol=1e-14)
    np.testing.assert_allclose(robust.trimmed_mean(rows, weights, 0.2),
                               robust.trimmed_mean(many, alike, 0.2), rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(robust.geometric_median(rows, weights), robust.geometric_median(many, alike),
                               atol=1e-5)


def test_weighted_median_minimises_the_absolute_distance() -> None:
    rows, weights = drawn(9, 4), ragged(9)
    found = robust.median(rows, weights)

    def cost(x: Tensor) -> Tensor:
        return weights @ (rows - x).abs()

    for candidate in rows:  # a minimum is at a row in every coordinate
        assert bool((cost(found) <= cost(candidate) + 1e-12).all())


def test_middle_of_two_is_halfway_also_by_weight() -> None:
    rows = torch.tensor([[0.0], [1.0], [10.0]])
    assert float(robust.median(rows, torch.tensor([1.0, 1.0, 2.0]))) == 5.5  # half of the weight is at 10
    assert float(robust.median(rows, torch.tensor([0.1, 0.2, 0.3]))) == 5.5  # also where shares are rounded
    assert float(robust.median(rows, torch.tensor([1.0, 1.0, 0.0]))) == 0.5  # zero counts nothing


@pytest.mark.parametrize(("n", "cut"), [(5, 1), (10, 2), (10, 0), (7, 3)])
def test_trimmed_mean_leaves_out_so_many_at_each_end(n: int, cut: int) -> None:
    rows = drawn(n, 6)
    inner = np.sort(rows.numpy(), 0)[cut : n - cut]
    np.testing.assert_allclose(robust.trimmed_mean(rows, torch.ones(n), cut / n), inner.mean(0), rtol=1e-12)


def test_trimmed_mean_is_the_mean_of_the_quantiles_between() -> None:
    rows, weights, share = drawn(6, 1), ragged(6), 0.13
    order = rows[:, 0].argsort()
    upto = (weights[order] / weights.sum()).cumsum(0).numpy()
    q = (np.arange(200_000) + 0.5) / 200_000 * (1 - 2 * share) + share
    quantiles = rows[order, 0].numpy()[np.searchsorted(upto, q)]
    assert float(robust.trimmed_mean(rows, weights, share)) == pytest.approx(quantiles.mean(), abs=1e-4)


def test_trimming_almost_half_is_the_median() -> None:
    rows = drawn(9, 5)
    np.testing.assert_allclose(robust.trimmed_mean(rows, torch.ones(9), 0.4999),
                               robust.median(rows, torch.ones(9)), rtol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_geometric_median_is_where_nothing_pulls(seed: int) -> None:
    rows, weights = drawn(11, 3, seed), ragged(11, seed)
    z = robust.geometric_median(rows, weights)

    def cost(z: Tensor) -> float:
        return float(weights @ (rows - z).norm(dim=1))

    pulls = weights[:, None] * (rows - z) / (rows - z).norm(dim=1, keepdim=True)
    if float((rows - z).norm(dim=1).min()) > 1e-3:
        assert float(pulls.sum(0).norm()) < 1e-4 * float(weights.sum())
    for step in 1e-3 * drawn(50, 3, seed + 1):  # convex: no better point near by is the minimum
        assert cost(z) <= cost(z + step) + 1e-9


def test_geometric_median_may_be_a_row() -> None:
    rows = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    z = robust.geometric_median(rows, torch.tensor([5.0, 1.0, 1.0, 1.0]))
    assert float(z.norm()) < 1e-5  # more than half of the weight is there


def test_geometric_median_of_a_line_is_its_median() -> None:
    rows = torch.tensor([0.0, 1.0, 2.0, 5.0, 100.0])[:, None] * torch.tensor([[3.0, 4.0]])
    np.testing.assert_allclose(robust.geometric_median(rows, torch.ones(5)), [6.0, 8.0], atol=1e-4)


@pytest.mark.parametrize(("n", "wrong", "chosen"), [(7, 2, 1), (7, 2, 5), (9, 3, 1), (5, 1, 4), (4, 0, 2)])
def test_krum_by_its_definition(n: int, wrong: int, chosen: int) -> None:
    rows = drawn(n, 3, seed=n)
    scores = []
    for i in range(n):
        others = [float((rows[i] - rows[j]).square().sum()) for j in range(n) if j != i]
        scores.append(min(sum(some) for some in itertools.combinations(others, n - wrong - 2)))
    best = sorted(sorted(range(n), key=lambda i: scores[i])[:chosen])
    assert robust.krum(rows, wrong, chosen).tolist() == best


def test_bound_shortens_and_keeps_the_direction() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    np.testing.assert_allclose(robust.bounded(rows, 1.0), [[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]], rtol=1e-6)
    assert robust.middle_length(robust.lengths(rows)) == pytest.approx(5.0)  # of two the longer; no zeros
    assert robust.middle_length(torch.zeros(3)) == 0


# -- where they break ----------------------------------------------------------------------------------

HONEST, FAR = 11, 1e30


def attacked(share_wrong: int, total: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    honest = drawn(total - share_wrong, 4, seed)
    return honest, torch.cat([honest, torch.full((share_wrong, 4), FAR, dtype=torch.float64)])


@pytest.mark.parametrize("wrong", range(5))
def test_medians_bear_less_than_half(wrong: int) -> None:
    honest, rows = attacked(wrong, 2 * wrong + 1)
    for rule in (robust.median, robust.geometric_median):
        assert float(rule(rows, torch.ones(len(rows))).abs().max()) <= 10 * float(honest.abs().max())


def test_medians_break_at_half() -> None:
    _, rows = attacked(5, 10)
    assert float(robust.median(rows, torch.ones(10)).abs().max()) > 1e20
    _, rows = attacked(6, 11)
    assert float(robust.geometric_median(rows, torch.ones(11)).abs().max()) > 1e20


def test_medians_break_by_weight_not_by_number() -> None:
    rows = torch.cat([drawn(9, 4), torch.full((1, 4), FAR, dtype=torch.float64)])
    weights = torch.tensor([1.0] * 9 + [8.9])
    for rule in (robust.median, robust.geometric_median):
        assert float(rule(rows, weights).abs().max()) < 100
        assert float(rule(rows, weights + torch.tensor([0.0] * 9 + [0.3])).abs().max()) > 1e20


def test_trimmed_mean_bears_its_share() -> None:
    honest, rows = attacked(2, 10)
    within = robust.trimmed_mean(rows, torch.ones(10), 0.2)
    assert bool((within <= honest.amax(0)).all())
    assert bool((within >= honest.amin(0)).all())
    assert float(robust.trimmed_mean(rows, torch.ones(10), 0.19).abs().max()) > 1e20


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_krum_bears_colluding_rows(wrong: int) -> None:
    n = 2 * wrong + 3
    honest = drawn(n - wrong, 4)
    rows = torch.cat([torch.full((wrong, 4), 50.0, dtype=torch.float64), honest])  # equal: near each other
    assert int(robust.krum(rows, wrong)) >= wrong
    assert robust.krum(rows, wrong, n - wrong).tolist() == list(range(wrong, n))


def test_krum_breaks_where_wrong_rows_have_company_enough() -> None:
    rows = torch.cat([torch.full((4, 4), 50.0, dtype=torch.float64), drawn(3, 4)])
    assert int(robust.krum(rows, 1)) < 4


def test_bounded_mean_stays_within_the_median_length() -> None:
    _, rows = attacked(5, 11)
    limit = robust.middle_length(robust.lengths(rows))
    assert limit < 10
    assert float(robust.bounded(rows, limit).mean(0).norm()) <= limit + 1e-12


# -- edges ---------------------------------------------------------------------------------------------

RULES = {"median": robust.median, "geometric": robust.geometric_median,
         "trimmed": lambda rows, weights: robust.trimmed_mean(rows, weights, 0.2),
         "krum": lambda rows, weights: rows[robust.krum(rows, 1)][0].double()}


@pytest.mark.parametrize("name", RULES)
def test_one_row_and_equal_rows_are_themselves(name: str) -> None:
    row = drawn(1, 5)
    for n in (1, 2, 3, 8):
        np.testing.assert_allclose(RULES[name](row.expand(n, 5), ragged(n)), row[0], rtol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_rules_follow_a_shift_and_a_scale(name: str) -> None:
    rows, weights = drawn(9, 4), ragged(9)
    plain = RULES[name](rows, weights)
    np.testing.assert_allclose(RULES[name](3 * rows + 7, weights), 3 * plain + 7, atol=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_order_and_size_of_weights_do_not_matter(name: str) -> None:
    rows, weights, order = drawn(9, 4), ragged(9), torch.tensor([3, 1, 8, 0, 2, 7, 6, 5, 4])
    plain = RULES[name](rows, weights)
    np.testing.assert_allclose(RULES[name](rows[order], weights[order]), plain, atol=1e-6)
    np.testing.assert_allclose(RULES[name](rows, 1e-3 * weights), plain, atol=1e-9)


@pytest.mark.parametrize("name", RULES)
def test_no_columns_and_the_largest_numbers(name: str) -> None:
    assert RULES[name](torch.zeros(4, 0), torch.ones(4)).shape == (0,)
    rows = torch.cat([drawn(6, 3), torch.full((1, 3), 1e308, dtype=torch.float64)])
    found = RULES[name](rows, torch.ones(7))
    assert bool(found.isfinite().all())
    assert float(found.abs().max()) < 100


def test_lengths_do_not_overflow() -> None:
    rows = torch.tensor([[1e200, 1e200], [3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    np.testing.assert_allclose(robust.lengths(rows), [math.sqrt(2) * 1e200, 5.0, 0.0], rtol=1e-14)


def test_rows_that_are_no_numbers_are_found() -> None:
    rows = drawn(4, 3)
    rows[1, 2], rows[3, 0] = torch.nan, torch.inf
    assert robust.finite(rows).tolist() == [True, False, True, False]


def test_ties_take_the_first() -> None:
    rows = torch.tensor([[0.0], [1.0], [2.0], [3.0]])  # the two inner ones have the same score
    assert robust.krum(rows, 0).tolist() == [1]
    assert robust.krum(torch.zeros(5, 2), 1, 3).tolist() == [0, 1, 2]


def test_what_cannot_be_asked() -> None:
    rows = drawn(3, 2)
    with pytest.raises(ValueError, match=r"0\.5"):
        robust.trimmed_mean(rows, torch.ones(3), 0.5)
    with pytest.raises(ValueError, match="negative"):
        robust.median(rows, torch.tensor([1.0, -1.0, 1.0]))
    with pytest.raises(ValueError, match="4 of 3"):
        robust.krum(rows, 0, 4)
