"""A client's personal model.

A client that took part gets `participant` and runs `personalize`; any other gets `newcomer` and runs `adapt`.
The server makes the message. The job is done where the client's rows are: by a backend, or on a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from descant.core.algorithm import Algorithm, Message, Round
from descant.core.tree import Tree
from descant.engine.backends.base import Backend, Planned
from descant.engine.outcome import Outcome
from descant.engine.store import ClientStore
from descant.engine.work import Job, Work, to_score

STATES_AT_ONCE = 256 * 2**20  # bytes of client states that are read at a time


class Snapshot(NamedTuple):
    """The state of a run after one round: what its models are made of."""

    number: int
    server: Tree
    store: ClientStore


def job_for(is_newcomer: bool, *, score: bool = False) -> Job:
    """The job that makes a client's personal model, or makes and scores it."""
    if score:
        return "score_newcomer" if is_newcomer else "score"
    return "adapt" if is_newcomer else "personalize"


def message_for(algorithm: Algorithm, server: Tree, round: Round, is_newcomer: bool, *, score: bool = False
                ) -> Message:
    """What the server sends for that job."""
    message = (algorithm.newcomer if is_newcomer else algorithm.participant)(server, round)
    return to_score(message, algorithm.global_model(server)) if score else message


def personal_model(work: Work, snapshot: Snapshot, client: int, *, score: bool = False) -> Tree:
    """What ONE client predicts with, or its scores. A DescantError says why it cannot be made."""
    number, server, store = snapshot
    clients = np.array([client])
    is_newcomer = not store.took_part(clients)[0]
    message = message_for(work.algorithm, server, work.round_of(clients, number), is_newcomer, score=score)
    value, _ = work.execute_one(job_for(is_newcomer, score=score), client, number, message,
                                store.read(clients))
    return value


def personal_models(backend: Backend, snapshot: Snapshot, clients: np.ndarray, at_once: int, *,
                    score: bool = False) -> Iterator[tuple[np.ndarray, Outcome]]:
    """The personal models of clients, or their scores, in groups of `at_once`: positions in `clients`, and
    what came of them."""
    groups = _groups(backend.work, snapshot, clients, at_once, score)
    if backend.asks:
        groups = iter(found := list(groups))
        backend.announce([planned for _, planned in found])
    for at, planned in groups:
        job, group, number, message, _ = planned
        yield at, backend.run(job, group, number, message, snapshot.store.read(group))


def _groups(work: Work, snapshot: Snapshot, clients: np.ndarray, at_once: int, score: bool
            ) -> Iterator[tuple[np.ndarray, Planned]]:
    number, server, store = snapshot
    newcomer = ~store.took_part(clients)
    for is_newcomer in (False, True):
        positions = np.flatnonzero(newcomer == is_newcomer)
        for start in range(0, len(positions), at_once):
            at = positions[start : start + at_once]
            message = message_for(work.algorithm, server, work.round_of(clients[at], number), is_newcomer,
                                  score=score)
            yield at, Planned(job_for(is_newcomer, score=score), clients[at], number, message)
