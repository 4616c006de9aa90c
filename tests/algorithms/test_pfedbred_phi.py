"""pFedBreD with a Phi of one's own (Eq. 11): mu = w - eta grad Phi(w), with the printed ones as cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import descant
from descant import UsageError
from descant.algorithms import pFedBreD
from descant.core import meter

FEDERATION = descant.federation("digits", partition="classes", clients=4, classes_per_client=2)
SMALL: dict[str, Any] = {"federation": FEDERATION, "rounds": 3, "batch": 10, "local": {"steps": 3},
                         "dtype": "float64"}
STEPS = {"lam": 10.0, "a": 0.02, "a_m": 0.03, "K": 3}


def the_loss(f, w, theta, memory):
    return f(w)


def the_envelope(f, w, theta, memory):
    return (w * (memory - theta)).sum()


def both(f, w, theta, memory):
    return 0.2 * f(w) + (w * (memory - theta)).sum()


def models(method: pFedBreD, backend: str = "vectorised") -> torch.Tensor:
    run = descant.run(method, backend=backend, **SMALL)
    return torch.stack([run.personal(client, "last").theta for client in range(4)])


@pytest.mark.parametrize("order", ["first", "exact"])
@pytest.mark.thorough
def test_the_printed_strategies_are_cases_of_it(order: Any) -> None:
    for phi, eta, name in ((the_loss, 0.01, "lg"), (the_envelope, 0.05, "meg"), (both, 0.05, "mh")):
        printed = pFedBreD(strategy=name, eta=0.05, eta_a=0.01, order=order, **STEPS)
        own = pFedBreD(strategy="own", phi=phi, eta=eta, order=order, **STEPS)
        torch.testing.assert_close(models(own), models(printed), rtol=1e-9, atol=1e-12)


@pytest.mark.thorough
def test_one_by_one_and_together_agree() -> None:
    own = pFedBreD(strategy="own", phi=both, order="exact", **STEPS)
    torch.testing.assert_close(models(own, "loop"), models(own), rtol=1e-9, atol=1e-12)


def test_it_is_named_by_its_place_and_counts_its_gradient() -> None:
    own = pFedBreD(strategy="own", phi=both, **STEPS)
    assert own.phi == "test_pfedbred_phi:both"
    assert own == pFedBreD(strategy="own", phi="test_pfedbred_phi:both", **STEPS)
    run = descant.run(own, backend="vectorised", **SMALL)
    assert run.history[0]["grad_steps"] == 4 * 3 * (3 + 1)  # clients, batches, K and one for Phi
    assert meter.current() is None


def test_it_goes_with_its_strategy() -> None:
    for wrong in ({"strategy": "own"}, {"phi": both}, {"strategy": "own", "phi": "nowhere"}):
        with pytest.raises(UsageError, match="phi"):
            pFedBreD(**wrong)
    with pytest.raises(UsageError, match="function of a module"):
        pFedBreD(strategy="own", phi=lambda f, w, theta, memory: f(w))
