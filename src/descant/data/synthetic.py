"""Synthetic federations with a known ground truth.

The data of client i depend on the seed and on i alone: adding clients changes no other client.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from descant.core.fields import hyper
from descant.core.random import stream
from descant.data.samples import Dataset, Samples
from descant.errors import UsageError

_LEAST_ROWS = 8  # the smallest client can still be split into training, validation and test


@dataclass(frozen=True)
class Quadratics(Dataset):
    """Quadratic losses (theta - a_i)' H_i (theta - a_i) / 2 with known optima.

    Every row of client i is x = H_i and y = a_i. H_i has eigenvalues from 1/kappa to 1, evenly spaced
    in the logarithm, in a random basis of the client's own. Known: "H" [clients, dim, dim], "optima"
    [clients, dim] (the a_i) and "global" [dim], the minimiser of the unweighted mean loss of all clients
    (with the unseen).
    """

    name: ClassVar[str] = "quadratics"
    natural: ClassVar[bool] = True

    dim: int = hyper(10, "number of parameters", ge=1)
    rows: int = hyper(20, "rows per client", ge=1)
    kappa: float = hyper(10.0, "condition number of every H_i", ge=1)
    spread: float = hyper(1.0, "standard deviation of the optima around their centre", ge=0)
    noise: float = hyper(0.0, "standard deviation of y around the optimum", ge=0)

    def load(self, clients: int, seed: int) -> Samples:
        centre = stream(seed, "quadratics centre").standard_normal(self.dim)
        eigenvalues = np.geomspace(1, 1 / self.kappa, self.dim)
        curvatures, optima, targets = [], [], []
        for client in range(clients):
            rng = stream(seed, "quadratics", client)
            basis = np.linalg.qr(rng.standard_normal((self.dim, self.dim))).Q
            curvature = (basis * eigenvalues) @ basis.T
            optimum = centre + self.spread * rng.standard_normal(self.dim)
            curvatures.append((curvature + curvature.T) / 2)  # symmetric to the last bit
            optima.append(optimum)
            targets.append(optimum + self.noise * rng.standard_normal((self.rows, self.dim)))

        h = torch.from_numpy(np.stack(curvatures))  # [clients, dim, dim]
        a = torch.from_numpy(np.stack(optima))  # [clients, dim]
        centroid = torch.linalg.solve(h.sum(0), torch.einsum("ijk,ik->j", h, a))
        return Samples(
            x=h.repeat_interleave(self.rows, 0),
            y=torch.from_numpy(np.concatenate(targets)),
            classes=None,
            owner=np.repeat(np.arange(clients), self.rows),
            truth={"H": h, "optima": a},
            common={"global": centroid},
        )


@dataclass(frozen=True)
class Logistic(Dataset):
    """Multinomial logistic regression with sampled labels, around one or several centres.

    Client i (of cluster i mod clusters) has the model centre + heterogeneity * N(0, I), a centre is
    common + separation * N(0, I) (less the mean over clusters), and common is N(0, I). Features are
    N(0, diag(j^-1.2)), as in Li et al., Federated Optimization in Heterogeneous Networks (FedProx),
    MLSys 2020, arXiv:1812.06127; labels are drawn from the model's probabilities: the most probable
    label, as taken there, makes separable data, on which the loss has no minimiser. Known: "models"
    [clients, classes * (dim + 1)], a torch `nn.Linear`'s weight and bias end to end, and "cluster"
    [clients].
    """

    name: ClassVar[str] = "logistic"
    natural: ClassVar[bool] = True

    dim: int = hyper(20, "number of features", ge=1)
    classes: int = hyper(5, "number of classes", ge=2)
    rows: int = hyper(100, "rows per client, on average", ge=_LEAST_ROWS)
    heterogeneity: float = hyper(0.5, "size of a client's deviation from its centre (common model: 1)", ge=0)
    clusters: int = hyper(1, "number of centres", ge=1)
    separation: float = hyper(1.0, "size of a centre's deviation from the common model (which has 1)", ge=0)
    imbalance: float = hyper(0.0, "sigma of the log-normal that scales the clients' sizes (0: all equal)",
                             ge=0, le=3)

    def load(self, clients: int, seed: int) -> Samples:
        if self.clusters > clients:
            raise UsageError(f"clusters = {self.clusters} with clients = {clients} leaves clusters "
                             "empty: use more clients or fewer clusters")
        shape = (self.classes, self.dim + 1)  # the bias is the last column
        rng = stream(seed, "logistic centres")
        common = rng.standard_normal(shape)
        shifts = rng.standard_normal((self.clusters, *shape))
        centres = common + self.separation * (shifts - shifts.mean(0))  # a single centre is not shifted
        cluster = np.arange(clients) % self.clusters
        scale = np.arange(1, self.dim + 1) ** -0.6

        xs, ys, models = [], [], []
        for client in range(clients):
            rng = stream(seed, "logistic", client)
            model = centres[cluster[client]] + self.heterogeneity * rng.standard_normal(shape)
            weight, bias = model[:, :-1], model[:, -1]
            # exp(-sigma^2/2 + sigma N) has mean 1
            size = self.rows * math.exp(self.imbalance * (rng.standard_normal() - self.imbalance / 2))
            x = scale * rng.standard_normal((max(round(size), _LEAST_ROWS), self.dim))
            # logits + Gumbel noise are largest at k with the probability that softmax gives to k
            logits = x @ weight.T + bias
            ys.append((logits + rng.gumbel(size=logits.shape)).argmax(1))
            xs.append(x)
            models.append(np.concatenate([weight.ravel(), bias]))

        return Samples.of_clients(xs, ys, self.classes, truth={
            "models": torch.from_numpy(np.stack(models)).float(), "cluster": torch.from_numpy(cluster)})


# -- of papers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FedProxLogistic(Dataset):
    """Logistic regression with heterogeneity R, as in the analysis of one-stage FedProx.

    The entries of client i's weights [classes, dim] are N(0, R^2), without a bias; its features are
    N(v_i, diag(j^-1.2)) with v_i from N(0, I). Defaults are those of its simulations, which vary R in
    [0, 3]. There labels are the most probable ones ("argmax"), which makes the data separable: the loss
    has no minimiser, and no estimate converges to the true model. Labels "sampled" from the model's
    probabilities, the default, avoid this. Known: "models" [clients, classes * (dim + 1)], a torch
    `nn.Linear`'s weight and bias (0) end to end, and "global", their mean over all clients.
    """

    name: ClassVar[str] = "fedprox_logistic"
    natural: ClassVar[bool] = True
    default_clients: ClassVar[int] = 10

    dim: int = hyper(10, "number of features", ge=1)
    classes: int = hyper(2, "number of classes", ge=2)
    rows: int = hyper(200, "rows per client", ge=1)
    heterogeneity: float = hyper(0.5, "R, the standard deviation of a client's weights", ge=0)
    labels: Literal["sampled", "argmax"] = hyper("sampled", "drawn from the model, or the most probable")

    def load(self, clients: int, seed: int) -> Samples:
        scale = np.arange(1, self.dim + 1) ** -0.6  # of which the variance is the square
        xs, ys, models = [], [], []
        for client in range(clients):
            rng = stream(seed, "fedprox_logistic", client)
            weight = self.heterogeneity * rng.standard_normal((self.classes, self.dim))
            x = rng.standard_normal(self.dim) + scale * rng.standard_normal((self.rows, self.dim))
            logits = x @ weight.T
            if self.labels == "sampled":
                # logits + Gumbel noise are largest at k with the probability that softmax gives to k
                logits += rng.gumbel(size=logits.shape)
            xs.append(x)
            ys.append(logits.argmax(1))
            models.append(np.concatenate([weight.ravel(), np.zeros(self.classes)]))
        known = torch.from_numpy(np.stack(models)).float()
        return Samples.of_clients(xs, ys, self.classes, truth={"models": known},
                                  common={"global": known.mean(0)})


@dataclass(frozen=True)
class FedMAPShell(Dataset):
    """Two classes, a ball and a shell in 4 of 30 dimensions, with an affine map per client.

    FedMAP, appendix B.1: the projection on a random 4-dimensional subspace is N(0, 2 I) for class 0; for
    class 1 its direction is uniform and its length N(8, 2). What is orthogonal to it is noise, N(0, 9 I);
    client k (from 1) sees x A_k + b_k, where A_k has entries N(0, 1) and b_k is 5 k N(0, I) (the paper does
    not give these three; they are those of its published code). Scenarios: "feature", the maps alone;
    "quantity", and the last half of the clients has a quarter of the rows (500 of 2000); "label", and 85 % of
    the rows of the last half are of class 0. The classes are balanced otherwise. Known: "matrix" [clients,
    30, 30] and "shift" [clients, 30], the maps, and "basis" [30, 4], the subspace before them.
    """

    name: ClassVar[str] = "fedmap_shell"
    natural: ClassVar[bool] = True
    default_clients: ClassVar[int] = 10
    features: ClassVar[int] = 30
    intrinsic: ClassVar[int] = 4

    scenario: Literal["feature", "quantity", "label"] = hyper("feature", "what the clients differ in")
    rows: int = hyper(2000, "rows of a client that is not small", ge=8)

    def load(self, clients: int, seed: int) -> Samples:
        square = (self.features, self.features)
        basis = np.linalg.qr(stream(seed, "fedmap_shell").standard_normal(square)).Q
        xs, ys, matrices, shifts = [], [], [], []
        for client in range(clients):
            rng = stream(seed, "fedmap_shell", client)
            special = client >= clients - clients // 2
            rows = self.rows // 4 if special and self.scenario == "quantity" else self.rows
            zeros = round((0.85 if special and self.scenario == "label" else 0.5) * rows)
            y = np.repeat([0, 1], [zeros, rows - zeros])
            z = rng.standard_normal((rows, self.features)) * 3
            z[:, : self.intrinsic] = np.concatenate([
                math.sqrt(2) * rng.standard_normal((zeros, self.intrinsic)),
                self._shell(rows - zeros, rng)])
            matrix = rng.standard_normal(square)
            shift = 5 * (client + 1) * rng.standard_normal(self.features)
            xs.append(z @ basis.T @ matrix + shift)
            ys.append(y)
            matrices.append(matrix)
            shifts.append(shift)
        return Samples.of_clients(
            xs, ys, classes=2, common={"basis": torch.from_numpy(basis[:, : self.intrinsic])},
            truth={"matrix": torch.from_numpy(np.stack(matrices)),
                   "shift": torch.from_numpy(np.stack(shifts))})

    def _shell(self, rows: int, rng: np.random.Generator) -> np.ndarray:
        direction = rng.standard_normal((rows, self.intrinsic))
        direction /= np.linalg.norm(direction, axis=1, keepdims=True)
        radius = 8 + math.sqrt(2) * rng.standard_normal((rows, 1))
        return direction * radius


@dataclass(frozen=True)
class FedMAPLinear(Dataset):
    """Five lines of slope -1 that together look like one that rises.

    FedMAP, appendix A.4: client k (from 1) has y = a x + b_k + N(0, 0.8) with a = -1, b_k = 4 (k - 1) and x
    from N(k - 1, 1), and 60, 1, 2, 3 and 50 rows. With a test share, the client of one row is left out: the
    paper trains on all rows (`test = 0`, `validation = 0`). Known: "models" [5, 2], the pairs (a, b_k).
    """

    name: ClassVar[str] = "fedmap_linear"
    natural: ClassVar[bool] = True
    default_clients: ClassVar[int] = 5
    sizes: ClassVar[tuple[int, ...]] = (60, 1, 2, 3, 50)

    def load(self, clients: int, seed: int) -> Samples:
        xs, ys = [], []
        for k, rows in enumerate(self.sizes):
            rng = stream(seed, "fedmap_linear", k)
            x = k + rng.standard_normal(rows)
            xs.append(x[:, None])
            ys.append(-x + 4 * k + math.sqrt(0.8) * rng.standard_normal(rows))
        shifts = 4.0 * np.arange(len(self.sizes))
        return Samples.of_clients(xs, ys, classes=None, truth={
            "models": torch.from_numpy(np.stack([np.full_like(shifts, -1.0), shifts], 1)).float()})
