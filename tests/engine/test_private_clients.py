"""Clients that are hidden in a sum: no contribution is longer than the bound, the noise is what it is said to
be, and a simulation repeats it where a real server could not."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from descant.algorithms import CGPFL, SCAFFOLD, Ditto, FedAvg, FedMAP
from descant.core.algorithm import Algorithm
from descant.core.privacy.settings import Mechanism, Privacy
from descant.core.sums import COLUMNS, Total, added
from descant.core.tree import take
from descant.engine.adding import Bound, noised_mean
from descant.engine.protect import protected, settled
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.errors import UsageError
from descant.priors.solve import SGD
from helpers import Engine, batchnorm_net, engine, make_work, ragged

FEDERATION = ragged()
CLIENTS = FEDERATION.population
PRIVACY = Privacy(unit="client", clip=0.5, noise=1.0, sampling="known")


def played(method: Algorithm, privacy: Privacy | None, rounds: int = 2, *, secret: bool = False, **train: Any
           ) -> tuple[Engine, list[Any]]:
    with engine(method, FEDERATION, **{"backend": "loop"} | train) as e:
        training = e.training
        if privacy is not None:
            work = protected(training.work, training.train, privacy, secret=secret)
            training = Training(work, training.train)
        playing = Engine(training, e.backend)
        return playing, playing.play(rounds)


def model(e: Engine) -> torch.Tensor:
    return e.model.theta


# -- one contribution ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_contribution_is_one_vector_of_at_most_the_bound(dtype: torch.dtype) -> None:
    """By definition, client by client, with a part that is longer than a block of the measuring."""
    rng = np.random.default_rng(0)
    wide = COLUMNS + 7
    rows = (torch.from_numpy(rng.standard_normal((6, wide, 2))).to(dtype),
            torch.from_numpy(rng.standard_normal(6)).to(dtype))
    origin = {"0": rng.standard_normal((wide, 2)), "1": np.array(0.3)}
    norms = [np.sqrt(np.square(rows[0][k].double().numpy() - origin["0"]).sum()
                     + (float(rows[1][k]) - 0.3) ** 2) for k in range(6)]
    bound = Bound(origin, float(np.median(norms)))
    expected = np.zeros((wide, 2)), 0.0
    for k in range(6):
        one, long = Total.shortened(take(rows, torch.tensor([k])), bound.tensors, bound.norm)
        scale = min(1, bound.norm / norms[k])
        parts = (rows[0][k].double().numpy() - origin["0"]) * scale, (float(rows[1][k]) - 0.3) * scale
        np.testing.assert_allclose(one.parts["0"].value().numpy(), parts[0], rtol=1e-13, atol=1e-15)
        assert float(one.parts["1"].value()) == pytest.approx(parts[1], rel=1e-13)
        assert bool(long[0]) == (norms[k] > bound.norm)
        expected = expected[0] + parts[0], expected[1] + parts[1]
    total, long = Total.shortened(rows, bound.tensors, bound.norm)
    np.testing.assert_allclose(total.parts["0"].value().numpy(), expected[0], rtol=1e-12, atol=1e-14)
    assert (total.clients, int(long.sum())) == (6, 3)


def test_with_whom_a_contribution_is_shortened_changes_no_bit() -> None:
    rows = torch.from_numpy(np.random.default_rng(0).standard_normal((9, 3 * COLUMNS + 5))).float()
    origin = {"0": torch.full((rows.shape[1],), 0.1, dtype=torch.float64)}
    whole, _ = Total.shortened((rows,), origin, 75.0)
    for groups in ([range(9)], [[k] for k in (4, 8, 1, 0, 2, 7, 3, 6, 5)], [[8, 0], [3, 1, 2, 7], [5, 4, 6]]):
        apart = added(Total.shortened((rows[list(group)],), origin, 75.0)[0] for group in groups)
        assert torch.equal(apart.parts["0"].value(), whole.parts["0"].value())


def test_a_client_that_learns_nothing_adds_nothing() -> None:
    total, long = Total.shortened((torch.ones(2, 3),), {"0": torch.ones(3, dtype=torch.float64)}, 1.0)
    assert not total.parts["0"].value().any()
    assert not long.any()


# -- the noise -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [False, True])
def test_the_noise_has_the_deviation_that_is_accounted_for(secret: bool) -> None:
    """Planted: three clients add 0.3 each in every coordinate; sigma C = 0.8, divided by the 4 expected. Of
    40,000 coordinates the mean is off by more than 5 deviations once in two million times."""
    n, bound = 40_000, Bound({"0": np.full(40_000, 2.0)}, 0.4)
    total = Total.of((torch.full((3, n), 0.3, dtype=torch.float64),), torch.ones(3))
    mechanism = Mechanism(dataclasses.replace(PRIVACY, noise=2.0), 2.0, cohort=4.0, secret=secret)
    generator = None if secret else np.random.default_rng(0)
    [mean] = noised_mean(total, (torch.zeros(n, dtype=torch.float64),), bound, mechanism, generator)
    noise = (mean - (2.0 + 0.9 / 4)) * 4 / 0.8
    assert abs(float(noise.mean())) < 5 / n**0.5
    assert abs(float(noise.var()) - 1) < 5 * (2 / n) ** 0.5
    for z, share in ((0.0, 0.5), (1.0, 0.841345), (2.0, 0.977250)):
        assert abs(float((noise < z).double().mean()) - share) < 5 * (share * (1 - share) / n) ** 0.5


def test_a_round_without_clients_is_noise_alone() -> None:
    mechanism = Mechanism(PRIVACY, 1.0, cohort=2.0)
    [mean] = noised_mean(Total(), (torch.zeros(1000),), Bound({"0": np.zeros(1000)}, 0.5), mechanism,
                         np.random.default_rng(0))
    assert float(mean.std()) == pytest.approx(0.25, rel=0.1)


def test_a_simulation_repeats_its_noise_and_a_real_server_cannot() -> None:
    first, again = (model(played(FedAvg(), PRIVACY)[0]) for _ in range(2))
    assert torch.equal(first, again)
    one, other = (model(played(FedAvg(), PRIVACY, secret=True)[0]) for _ in range(2))
    assert not torch.isclose(one, other).any()
    assert not torch.isclose(one, first).any()


# -- rounds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FedAvg(weights="uniform"), Ditto(weights="uniform"),
                                    FedMAP(weights="uniform", solver=SGD(lr=0.05))], ids=lambda m: m.name)
def test_without_noise_and_within_the_bound_it_is_the_method(method: Algorithm) -> None:
    """Everybody takes part, so that the expected number is the actual one."""
    free = dataclasses.replace(PRIVACY, clip=1e6, noise=1e-18)
    private, reports = played(method, free)
    plain, expected = played(method, None)
    torch.testing.assert_close(model(private), model(plain), rtol=1e-9, atol=1e-9)
    assert [r.clipped for r in reports] == [0.0, 0.0]
    assert [r.bytes_up for r in reports] == [r.bytes_up for r in expected]


def test_the_server_moves_no_further_than_the_bound() -> None:
    tight = dataclasses.replace(PRIVACY, clip=1e-3, noise=1e-18)
    e, [report] = played(FedAvg(), tight, 1)
    assert report.clipped == 1.0
    assert 0 < float((model(e) - e.training.initial.theta).norm()) <= 1e-3 * (1 + 1e-9)


def test_one_client_changes_the_sum_by_no_more_than_the_bound() -> None:
    """The same noise with and without client 3, whatever it uploads: the means lie C / expected apart."""

    class Extreme(FedAvg):
        """Client 3 uploads something huge."""

        def local(self, task: Any, message: Any, state: Any, data: Any) -> Any:
            upload, state = super().local(task, message, state, data)
            return upload._replace(theta=torch.where(data.size == SIZE, 1e9, upload.theta)), state

    SIZE = int(FEDERATION.train.sizes[3])
    with_it, without = (model(played(method, PRIVACY, 1)[0]) for method in (Extreme(), FedAvg()))
    assert 0 < float((with_it - without).norm()) <= 2 * 0.5 / CLIENTS * (1 + 1e-9)


def test_a_cohort_of_coins_may_be_empty() -> None:
    coins = dataclasses.replace(PRIVACY, sampling="poisson")
    e, reports = played(FedAvg(), coins, 12, cohort=1)
    assert 0 in {report.participants for report in reports}
    assert bool(model(e).isfinite().all())


@pytest.mark.parametrize(("method", "words"), [
    (CGPFL(K=2), "looks at the uploads one by one"), (FedMAP(), "looks at the uploads one by one"),
    (SCAFFOLD(), "what its clients keep must be what the server was told")])
def test_what_noise_on_a_sum_cannot_protect_is_refused(method: Algorithm, words: str) -> None:
    with pytest.raises(UsageError, match=f'privacy.unit = "client" does not fit {method.name}.*{words}'):
        settled(make_work(method, FEDERATION), Train(), PRIVACY)


def test_running_statistics_are_refused() -> None:
    with pytest.raises(UsageError, match=r"running statistics.*GroupNorm"):
        settled(make_work(FedAvg(), FEDERATION, batchnorm_net()), Train(), PRIVACY)
