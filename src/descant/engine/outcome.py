"""What comes of a job for some clients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from descant.core.sums import Total
from descant.core.tree import Tree, concat


class Outcome(NamedTuple):
    """The results of some clients: `values` has a row for each of `done`."""

    done: np.ndarray  # positions in the list of clients that was asked for
    values: Tree
    failed: dict[int, str]  # position -> reason
    grad_steps: int
    note: str | None = None  # for the user, such as why clients were run one by one
    seconds: float = 0.0  # of work, summed over workers
    gathering: float = 0.0  # of these, to draw and look up batches
    rows: int = 0  # in private gradients; or clients, where these are protected
    shortened: int = 0  # of these, how many were clipped
    total: Total | None = None  # of the uploads, where these were added up: the values have none
    wrong: tuple[tuple[int, str], ...] = ()  # positions of results that are not in it, with the reasons
    uploaded: int = 0  # bytes of one upload that is
    lost: bool = False  # whether the round comes to nothing, as `note` says
    noised: bool = False  # whether the clients have added the noise that protects them
    votes: float | None = None  # then, where it was asked for: +-1/2 of who is within the bound, noised


def gather(arriving: Iterable[tuple[int, Outcome]]) -> Outcome:
    """The outcome of all chunks; each comes with the position of its first client. Totals are added up as
    they come, so that there is never more than one beside."""
    outcomes, total = [], None
    for start, outcome in arriving:
        if outcome.total is not None:
            total = outcome.total if total is None else total.plus(outcome.total)
        outcomes.append((start, outcome._replace(total=None)))
    outcomes.sort(key=lambda pair: pair[0])
    parts = [outcome.values for _, outcome in outcomes if len(outcome.done)]
    return Outcome(
        np.concatenate([np.zeros(0, np.int64), *(start + o.done for start, o in outcomes)]),
        concat(parts) if parts else (),
        {start + k: reason for start, o in outcomes for k, reason in o.failed.items()},
        sum(o.grad_steps for _, o in outcomes),
        next((o.note for _, o in outcomes if o.note is not None), None),
        sum(o.seconds for _, o in outcomes),
        sum(o.gathering for _, o in outcomes),
        sum(o.rows for _, o in outcomes),
        sum(o.shortened for _, o in outcomes),
        total,
        tuple((start + k, reason) for start, o in outcomes for k, reason in o.wrong),
        max((o.uploaded for _, o in outcomes), default=0),
    )
