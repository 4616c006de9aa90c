"""What the sides of a comparison have in common."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

COMPARED = 3  # clients of a round whose models are compared


class Played(NamedTuple):
    """A round of training."""

    seconds: float
    grad_steps: int


class Scored(NamedTuple):
    """An evaluation of the personal models (and of the global one, where it is another)."""

    seconds: float
    accuracy: float  # mean over the clients, of the personal models


class Side(Protocol):
    """Somebody who does the work of a case. All play the same rounds."""

    note: str  # how the work is arranged

    def round(self) -> Played:
        """The next round."""

    def evaluate(self) -> Scored:
        """Score the clients of the case."""

    def models(self) -> Tensor:
        """[1 + COMPARED, d]: the global model, and those of the first clients of the last round."""

    def close(self) -> None:
        """Give back what is held."""
