"""An attacker who looks for one client in the sums of a run: what it measures is below what is claimed. And
what is told of settings that protect hardly anybody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from audit import lower_bound
from descant.comparison.protection import notes
from descant.core.privacy.settings import Mechanism, Privacy, Quantile
from descant.core.sums import Total
from descant.engine import adding, quantile
from descant.engine.account import Account, Queries
from descant.engine.adding import Bound, noised_mean
from descant.engine.quantile import noised_votes
from descant.engine.settings import Train
from descant.theory.accountant import Event, epsilon
from descant.view.tables import privacy_words

TRIALS, DELTA, NOISE = 8_000, 1e-2, 1.0


def seen(present: bool, clip: float | Quantile) -> list[np.ndarray]:
    """What an attacker makes of what the server publishes of a sum of three clients [trials], if a fourth is
    there that would add far more than it may, or not: of all of it by its likelihood, and of the votes alone.
    Each trial is a coordinate: all are noised alike, and the votes have noise of their own."""
    mechanism = Mechanism(Privacy(unit="client", clip=clip, noise=NOISE), NOISE, cohort=4.0, secret=True)
    bound = Bound({"0": np.zeros(TRIALS)}, 0.7)
    rows = torch.tensor([[0.05], [0.05], [0.05], [50.0]], dtype=torch.float64)[: 4 if present else 3]
    one, is_long = Total.shortened((rows,), {"0": torch.zeros(1, dtype=torch.float64)}, bound.norm)
    wide = Total.of((one.parts["0"].value().expand(1, TRIALS),), torch.ones(1))
    [mean] = noised_mean(wide, (torch.zeros(TRIALS, dtype=torch.float64),), bound, mechanism, None)
    found: np.ndarray = (4 * mean.numpy() - 0.15) / (0.7 * mechanism.sum_noise**2)
    if mechanism.count_noise is None:
        return [found]
    votes = np.array([noised_votes(mechanism, one.clients, int(is_long.sum()), 0, k) for k in range(TRIALS)])
    return [found - 0.5 * (votes - 1.5) / mechanism.count_noise**2, -votes]  # it votes -1/2


def measured(clip: float | Quantile) -> float:
    return max(lower_bound(*both, DELTA) for both in zip(seen(True, clip), seen(False, clip), strict=True))


CLAIMED = epsilon(Event(NOISE, 1.0, 1), DELTA)


@pytest.mark.parametrize("clip", [0.7, pytest.param(Quantile(count_noise=0.8), marks=pytest.mark.slow)],
                         ids=["number", "quantile"])
def test_an_audit_never_measures_more_than_is_claimed(clip: float | Quantile) -> None:
    """And more than 1.8 times the noise would allow: that was not there."""
    assert epsilon(Event(1.8 * NOISE, 1.0, 1), DELTA) < measured(clip) <= CLAIMED


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["no noise", "half the noise", "no bound", "votes without noise"])
def test_an_audit_notices_what_is_missing(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, shortened = adding.normals, Total.shortened
    if fault == "no bound":
        monkeypatch.setattr(Total, "shortened", lambda rows, origin, bound: shortened(rows, origin, 1e9))
    elif fault == "votes without noise":
        monkeypatch.setattr(quantile, "normals", lambda *given: 0.0 * plain(*given))
    else:
        left = 0.0 if fault == "no noise" else 0.5
        monkeypatch.setattr(adding, "normals", lambda *given: left * plain(*given))
    assert measured(Quantile(count_noise=0.8) if fault.startswith("votes") else 0.7) > CLAIMED


def test_a_delta_above_one_over_the_clients_is_told() -> None:
    for delta, is_told in ((0.06, True), (0.04, False)):
        account = Account(Privacy(unit="client", noise=1.0, delta=delta), Train(), np.full(20, 30), Queries(),
                          lambda number: np.arange(20))
        found = [text for text in account.cautions() if "is more than 1 / 20 (clients)" in text]
        assert len(found) == is_told


@pytest.mark.parametrize(("share", "words"), [(0.0, "clip never binds"), (1.0, "clip always binds"),
                                              (0.4, "clip binds for 40% of the clients")])
def test_a_bound_that_does_nothing_is_told(share: float, words: str) -> None:
    spent = {"unit": "client", "epsilon": 1.0, "delta": 1e-5, "noise": 1.0, "clip": 1.0, "clipped": share}
    assert words in privacy_words(spent)
    runs: list[Any] = [SimpleNamespace(label="fedavg", summary={"privacy": spent}),
                       SimpleNamespace(label="fedavg", summary={"privacy": spent}),
                       SimpleNamespace(label="alone", summary={})]
    told = notes(runs)  # in the page of a comparison
    assert [words in text for text in told] == ([True] if share in (0.0, 1.0) else [])
