"""Normal numbers for noise on all parameters: what they are, and that they are the same however drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm

from descant.core import random
from descant.core.kernels.products import room

KEYS = torch.tensor([5, -7, 2**62 + 11, 0, -(2**63)])


@pytest.mark.thorough
def test_quantiles_tails_and_independence() -> None:
    """2^16 values in equal shares, none beyond 4.4, and no further from a normal distribution than half a
    share; of clients, of steps (their keys follow from one by `fold`) and of parts of the vector."""
    table = random._quantiles(torch.float64)
    assert len(table.unique()) == 2**16
    assert 4.3 < float(table.max()) < 4.4
    assert float(table.mean()) == pytest.approx(0, abs=1e-12)
    assert float(table.square().mean()) == pytest.approx(1, abs=1e-12)
    steps = random.fold(random.fold(torch.arange(4)[:, None], 2**21), torch.arange(5))
    drawn = torch.empty(20, 79_510, dtype=torch.float64)
    random.draw_coarse_normal_(drawn, steps.flatten())
    found = drawn.flatten().numpy()
    assert kstest(found, "norm").pvalue > 1e-3
    for tail in (2.0, 3.0, 4.0):  # within five deviations of the expected number, on either side
        expected = len(found) * norm.sf(tail)
        for beyond in (found > tail, found < -tail):
            assert abs(beyond.sum() - expected) < 5 * np.sqrt(expected)
    assert np.unique(found).size > 2**15
    off = torch.corrcoef(torch.cat([drawn[:, :39_755], drawn[:, 39_755:]])) - torch.eye(40)
    assert float(off.abs().max()) < 5.5 / np.sqrt(39_755)


def test_the_key_of_a_sub_stream_is_the_same_by_numpy() -> None:
    for number in (0, 1, 2**21, 2**40 + 3):
        assert torch.equal(random.fold_rows(KEYS, number), random.fold(KEYS, number))
        two = torch.stack([KEYS, KEYS + 1], 1)
        assert torch.equal(random.fold_rows(two[:, 1], number), random.fold(KEYS + 1, number))


@pytest.mark.parametrize("drawn", [1, 2, 5, 2**16])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 64), (1, 6), (3, 9), (6, 21), (40, 7)])
def test_a_part_of_the_numbers_is_that_part_in_whatever_pieces(
        start: int, count: int, drawn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "DRAWN", drawn)
    for dtype in (torch.float32, torch.float64):
        whole = random.coarse_normal(KEYS, start + count, dtype)[:, start:]
        rows = torch.empty(len(KEYS), count, dtype=dtype)
        random.draw_coarse_normal_(rows, KEYS, start)
        assert torch.equal(rows, whole)
        scale = torch.linspace(0.1, 3, len(KEYS), dtype=dtype)
        for into in (torch.ones(len(KEYS), count, dtype=dtype),
                     room(rows, rows.shape).fill_(1)):  # also with room between the clients
            random.add_coarse_normal_(into, KEYS, scale, start)
            assert torch.equal(into, 1 + whole * scale[:, None])
        alone = torch.ones(1, count, dtype=dtype)
        random.add_coarse_normal_(alone, KEYS[2:3], scale[2:3], start)
        assert torch.equal(alone[0], into[2])  # no bit depends on who else is there
