"""How many clients are scored together, and that no figure depends on it."""

from __future__ import annotations

from typing import Any

import pytest

from descant.algorithms.ditto import Ditto
from descant.engine.backends import choose
from descant.engine.evaluation import evaluate
from helpers import Engine, assert_same, engine, ragged

SIZES = (9, 5, 12, 7, 12, 6) * 25


def test_how_many_are_scored_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than would train together; fewer where rows or models are large."""
    federation = ragged(SIZES, shape=(50,))
    monkeypatch.setattr(choose, "SMALL_BYTES", 0)  # as for samples that are not small
    with engine(Ditto(), federation, backend="vectorised", chunk=4) as e:
        work, rows = e.training.work, int(federation.test.sizes.max())
        assert choose.fitted_chunk(work) < len(SIZES)
        assert (e.backend.chunk, e.backend.scored) == (4, len(SIZES))
        assert choose._scored(work, 4, len(SIZES), 2) == len(SIZES) // 2  # something for every worker
        assert choose._scored(work, 4, 10**6, 1) == choose.SMALL_CHUNK
        monkeypatch.setattr(choose, "CHUNK", 4)
        monkeypatch.setattr(choose, "SCORED_BYTES", 10 * 8 * (50 * rows + work.task.dim))  # of ten in float64
        assert choose._scored(work, 4, len(SIZES), 1) == 10


@pytest.mark.thorough
def test_figures_do_not_depend_on_who_is_scored_together() -> None:
    def figures(e: Engine, scored: int) -> object:
        e.backend.scored = scored
        found = evaluate(e.training, e.backend, e.everyone)
        assert found.shared is not None
        return (tuple(found.personal[:2]), tuple(found.shared[:2]))

    with engine(Ditto(), ragged(SIZES), backend="vectorised", chunk=4) as e:
        e.play(2)
        whole, alone = figures(e, len(SIZES)), figures(e, 7)
        assert_same(whole, alone)
        personal, shared = whole  # type: ignore[misc]
        for own, common in zip(personal, shared, strict=True):  # each model has its own, in both splits
            assert not own.nan_to_num(-1.0).equal(common.nan_to_num(-1.0))


def test_every_worker_has_as_many_to_score() -> None:
    """Also where all clients would fit into one chunk; those who train together stay together."""
    with engine(Ditto(), ragged(SIZES), backend="processes", chunk=4, workers=3) as e:
        def parts(job: Any, count: int) -> list[int]:
            return [len(e.everyone[:count][part]) for _, part in e.backend._chunks(job, e.everyone[:count])]

        e.backend.scored = 40
        assert parts("score", 20) == [7, 7, 6]
        assert parts("score_newcomer", 121) == [21] * 5 + [16]
        assert parts("score", 2) == [1, 1]
        assert parts("score", 0) == []
        assert parts("local", 9) == [4, 4, 1]
