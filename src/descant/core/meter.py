"""Gradient steps and training loss of the clients' work.

Methods do not count: `Task.grad` reports to the meter that the engine has opened, and the engine says for how
many clients a call stands (a vectorised chunk makes one call for all).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor


class Meter:
    def __init__(self, clients: int) -> None:
        self.grad_steps = 0  # forward and backward passes, over all clients of the chunk
        self.chunk = clients
        self.stand_for(clients, None)
        self._losses: list[Tensor] = []  # of ONE client, at each call: may live inside vmap
        self._calls: Tensor | float = 0.0
        self.gathering = 0.0  # seconds for drawing and looking up batches
        self.shortened = self.rows = 0  # of the rows in private gradients, those that were clipped
        self.offered: list[Tensor] = []  # the targets of the batches of the present step
        self._passes = self._noises = 0
        self.at_step: tuple[int, Tensor] | None = None  # in a scan: its number from 0, and how many there are

    def stand_for(self, clients: int, active: Tensor | None) -> None:
        """From now on a call stands for so many clients; `active`: whether this one is among them (None:
        all)."""
        self.clients = clients
        self.active = active

    def count(self, loss: Tensor, steps: int = 1) -> None:
        """So many gradients, at losses that sum to this."""
        self.grad_steps += steps * self.clients
        self._losses.append(loss if self.active is None else loss.where(self.active, 0.0))
        self._calls = self._calls + steps * (1.0 if self.active is None else self.active.to(loss.dtype))

    def count_scan(self, loss: Tensor, steps: Tensor, of_chunk: int) -> None:
        """A gradient for each step of ONE client, at losses that sum to this; in all clients, so many."""
        self.grad_steps += of_chunk
        self._losses.append(loss)
        self._calls = self._calls + steps

    def begin_pass(self) -> None:
        """Batches are given from the first one on: in a chunk, to some clients more than to others."""
        self._passes, self._noises = self._passes + 1, 0

    def next_noise(self) -> int:
        """The number of a draw of noise, which a client has alone as it has in any chunk."""
        self._noises += 1
        return (self._passes << 20) + self._noises

    @contextmanager
    def gathers(self) -> Iterator[None]:
        """Time spent here counts as data loading."""
        start = time.perf_counter()
        yield
        self.gathering += time.perf_counter() - start

    def loss(self) -> Tensor:
        """The mean loss of one client's steps; NaN when there were none."""
        total = torch.stack(self._losses).sum() if self._losses else torch.zeros(())
        return total / torch.as_tensor(self._calls)


_current: ContextVar[Meter | None] = ContextVar("meter", default=None)


def current() -> Meter | None:
    return _current.get()


@contextmanager
def metered(clients: int) -> Iterator[Meter]:
    """Open a meter for the calls made inside, each of them for a chunk of so many clients."""
    meter = Meter(clients)
    token = _current.set(meter)
    try:
        yield meter
    finally:
        _current.reset(token)
