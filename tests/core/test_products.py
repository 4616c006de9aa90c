"""Products of the clients' matrices: a client's does not depend on its place in the chunk."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from descant.core.kernels.products import COLUMNS, add_product_, in_lines, room, some_rows, taken_rows

CLIENTS = 9
SHAPES = [(13, 33, 1), (100, 4, 1), (10, 784, 20), (1, 28, 20), (3, 1, 33), (33, 20, 1), (16, 7, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_the_same_in_every_place(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    p, q, r = shape
    a, b, into = (placed(torch.randn(CLIENTS, *sides, dtype=dtype)) for sides in ((p, q), (q, r), (p, r)))
    added = placed(into)
    add_product_(added, a, b, 0.5, -2.0)
    torch.testing.assert_close(added, 0.5 * into - 2.0 * torch.einsum("cpq,cqr->cpr", a, b))
    for start in range(CLIENTS - 1):
        some = slice(start, start + 2)
        two = placed(into[some])
        add_product_(two, placed(a[some]), placed(b[some]), 0.5, -2.0)
        assert torch.equal(two, added[some])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_does_not_depend_on_its_alignment(dtype: torch.dtype) -> None:
    """On AMD processors it would, but for what descant sets when it is imported."""
    x, W = torch.randn(7, 64, dtype=dtype), torch.randn(10, 64, dtype=dtype)
    expected = x @ W.T, W @ x.T
    for start in range(1, 8):
        moved = [torch.cat([each.new_zeros(start), each.flatten()])[start:].view_as(each) for each in (x, W)]
        assert torch.equal(moved[0] @ moved[1].T, expected[0])
        assert torch.equal(moved[1] @ moved[0].T, expected[1])


def test_what_there_was_is_forgotten_if_nothing_of_it_is_kept() -> None:
    for sides in ((16, 16), (3, 5)):  # with and without room between the clients
        into = room(torch.zeros(0), (4, *sides)).fill_(torch.nan)
        add_product_(into, torch.ones(4, sides[0], 2), torch.ones(4, 2, sides[1]), 0.0, 3.0)
        assert torch.equal(into, torch.full_like(into, 6.0))


def test_in_a_room_every_client_begins_with_a_line() -> None:
    for dtype in (torch.float32, torch.float64):
        found = room(torch.zeros(0), (3, 5, 7), dtype)
        assert (found.shape, found.dtype) == ((3, 5, 7), dtype)
        assert in_lines(found)
    assert not in_lines(torch.zeros(3, 5, 7))
    assert not in_lines(torch.zeros(2, 16)[:, 1:])


def placed(given: torch.Tensor) -> torch.Tensor:
    return room(given, given.shape).copy_(given)


def test_rows_of_a_product_do_not_depend_on_which_are_wanted() -> None:
    blocks, right = torch.randn(30, 21).split(12), torch.randn(21, 2 * COLUMNS + 7)
    bias = torch.randn(right.shape[1])
    everything = some_rows([(block, torch.arange(len(block))) for block in blocks], right, bias)
    torch.testing.assert_close(everything, torch.cat(blocks) @ right + bias)
    some = some_rows([(blocks[0], torch.tensor([3])), (blocks[2], torch.tensor([0, 5]))], right, bias)
    assert torch.equal(some, everything[[3, 24, 29]])


def test_rows_are_taken_in_the_order_of_their_places() -> None:
    rows, places = torch.randn(9, 4), torch.arange(2 * COLUMNS + 6).view(-1, 2) % 7
    assert torch.equal(taken_rows(rows, places), rows[places])


SHARES = """
import time, torch
from descant.core.threads import on_all_cores

a = torch.randn(1000, 1000)

def shares(_):
    whole, own = time.process_time(), time.thread_time()
    a @ a
    return (time.process_time() - whole) / (time.thread_time() - own)

print(min(on_all_cores(shares, [0])[0] for _ in range(3)))
"""


@pytest.mark.thorough
def test_what_a_core_is_given_is_computed_by_one_thread() -> None:
    """torch's number of threads holds in the thread that sets it: a product would take the others, too. In a
    process that may have two; the tests themselves have one."""
    told = subprocess.run([sys.executable, "-c", SHARES], env=os.environ | {"OMP_NUM_THREADS": "2"},
                          capture_output=True, text=True, check=True)
    assert float(told.stdout) < 1.3  # of processor time: others wait, and it would be 1.8 on two cores
