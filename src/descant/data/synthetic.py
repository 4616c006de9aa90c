"""Synthetic federations with a known ground truth.

The data of client i depend on the seed and on i alone: adding clients changes no other client.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

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
