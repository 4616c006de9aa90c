"""The synthetic logistic regression of one-stage FedProx, and exact minimisers of its objectives.

Two classes: u is the difference of their weights. Labels are drawn from the model (the authors' argmax
labels are separable, and no minimiser exists); all objectives have a ridge of strength RIDGE, so that
clients whose rows happen to be separable have a minimiser too. Neither is in the paper. `curve` trains an
intercept for each class besides, with the ridge on it; the paper's model has none, nor has `Problem`.

`Problem` has lambda and ridge on u, `curve` on the weights of both classes, where the same pull is half as
strong in u: |w_0|^2 + |w_1|^2 = (|w_0 + w_1|^2 + |u|^2) / 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

import descant
from descant.algorithms import OneStageFedProx

RIDGE = 0.01
LAMS = {"small": 0.02, "medium": 0.1, "large": 0.5}


class Problem:
    """The clients' rows, with the signs of their labels, and the true u_i."""

    def __init__(self, R: float, seed: int, clients: int = 10, rows: int = 200) -> None:
        made = descant.federation("fedprox_logistic", clients=clients, heterogeneity=R, rows=rows, seed=seed,
                                  test=0.0, validation=0.0)
        own = [made.train[client] for client in range(clients)]
        self.x = torch.stack([made.x[each] for each in own]).double()  # [m, n, d]
        self.sign = torch.stack([made.y[each] for each in own]).double() * 2 - 1
        weights = made.truth["models"].double()[:, :-2].unflatten(1, (2, -1))
        self.truth = weights[:, 1] - weights[:, 0]  # [m, d]

    @property
    def smoothness(self) -> float:
        """L: a quarter of the largest eigenvalue of X'X / n of a client, with the ridge."""
        return float(torch.linalg.eigvalsh(self.x.mT @ self.x / self.x.shape[1]).max()) / 4 + RIDGE

    @property
    def distances(self) -> Tensor:
        """Those of the true u_i from their mean, [m]."""
        return (self.truth - self.truth.mean(0)).norm(dim=1)

    def local(self, u: Tensor) -> Tensor:
        """L_i(u_i) with the ridge, [m]."""
        loss = softplus(-self.sign * (self.x @ u[..., None])[..., 0]).mean(1)
        return loss + RIDGE / 2 * u.square().sum(1)

    def _slopes(self, u: Tensor) -> tuple[Tensor, Tensor]:
        share = torch.sigmoid(-self.sign * (self.x @ u[..., None])[..., 0])
        n, d = self.x.shape[1:]
        gradient = -((share * self.sign)[:, None] @ self.x)[:, 0] / n + RIDGE * u
        hessian = (self.x * (share * (1 - share))[..., None]).mT @ self.x / n
        return gradient, hessian + RIDGE * torch.eye(d, dtype=torch.float64)

    def alone(self) -> Tensor:
        return self.personal(0.0)[0]

    def together(self) -> Tensor:
        """One u for all: the minimiser of the mean of the L_i."""
        u = torch.zeros_like(self.truth[0])
        for _ in range(100):
            gradient, hessian = (each.mean(0) for each in self._slopes(u.expand_as(self.truth)))
            step = torch.linalg.solve(hessian, gradient)
            size = 1.0
            while self.local((u - size * step).expand_as(self.truth)).mean() > self.local(
                    u.expand_as(self.truth)).mean() and size > 1e-8:
                size /= 2
            u = u - size * step
            if step.norm() < 1e-12:
                break
        return u

    def personal(self, lam: float) -> tuple[Tensor, Tensor]:
        """The minimisers u_i, and u_g, of sum_i L_i(u_i) + lam/2 ||u_i - u_g||^2, by Newton's method."""
        m, d = self.truth.shape
        u, g, eye = torch.zeros_like(self.truth), torch.zeros(d, dtype=torch.float64), torch.eye(
            d, dtype=torch.float64)

        def objective(u: Tensor, g: Tensor) -> Tensor:
            return (self.local(u) + lam / 2 * (u - g).square().sum(1)).sum()

        for _ in range(200):
            gradient, hessian = self._slopes(u)
            gradient = gradient + lam * (u - g)
            inverse = torch.linalg.inv(hessian + lam * eye)
            move_g = torch.zeros_like(g)
            if lam:
                right = -lam * (g - u).sum(0) - lam * (inverse @ gradient[..., None])[..., 0].sum(0)
                move_g = torch.linalg.solve(m * lam * eye - lam**2 * inverse.sum(0), right)
            move_u = (inverse @ (lam * move_g - gradient)[..., None])[..., 0]
            size = 1.0
            while objective(u + size * move_u, g + size * move_g) > objective(u, g) and size > 1e-8:
                size /= 2
            u, g = u + size * move_u, g + size * move_g
            if max(float(move_u.abs().max()), float(move_g.abs().max())) < 1e-11:
                break
        return u, g

    def error(self, u: Tensor) -> float:
        """mean_i ||w_i - w*_i||^2, in the weights of both classes: half of that in u."""
        return float((u - self.truth).square().sum(1).mean()) / 2


def curve(seed: int, R: float, lam: float, K: int, rounds: int, clients: int = 10, cohort: Any = "all"
          ) -> list[float]:
    """The total error of the local models in every round, with the step sizes of the paper."""
    L = 2 * Problem(R, seed, clients).smoothness  # of the weights of both classes
    federation = descant.federation("fedprox_logistic", clients=clients, heterogeneity=R, rows=200, seed=seed,
                                    test=0.0, validation=0.0)
    method = OneStageFedProx(lam=lam, eta=1 / (lam + L), gamma=(lam + L) / (lam * L), weight_decay=RIDGE)
    run = descant.run(method, federation=federation, model="mclr", rounds=rounds, batch="full", cohort=cohort,
                      local={"steps": K}, dtype="float64", backend="vectorised", seed=seed,
                      eval={"every": 1})
    return [row["personal"]["truth_error"] for row in run.history]


def rounds_to(errors: list[float], share: float = 0.001) -> int:
    """The round from which on the error stays within a share of its range around its last value, above or
    below: with a large lambda it falls below its limit first, and comes back."""
    near = share * (max(errors) - min(errors))
    return 1 + max((k for k, error in enumerate(errors) if abs(error - errors[-1]) > near), default=-1)


def rounds_above(errors: list[float], share: float = 0.001) -> int:
    """The round from which on the error is not above its last value by more than a share of what it fell."""
    near = share * (max(errors) - errors[-1])
    return 1 + max((k for k, error in enumerate(errors) if error > errors[-1] + near), default=-1)
