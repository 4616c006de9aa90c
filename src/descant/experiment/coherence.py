"""Two analyses of pFedBreD's paper (Section 6.2): how much the clients' envelope gradients say the same, and
how personal their models are. Both look at finished runs; the figures themselves are functions of tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.algorithms.pfedbred import pFedBreD
from descant.core.algorithm import Message, Round
from descant.core.task import BLOCK, Batch, inputs
from descant.core.tree import take
from descant.core.vector import Model
from descant.errors import UsageError
from descant.experiment.run import Run, Which
from descant.priors.belief import PriorMethod
from descant.priors.quadratic import Gaussian
from descant.theory.coherence import Coherence, generalized_coherence

__all__ = ["Coherence", "Deviations", "deviations", "envelope_gradients", "generalized_coherence",
           "loss_deviations"]


def envelope_gradients(run: Run, which: Which = "best") -> Tensor:
    """lam_i Hess g*(w) (w - theta_i) for every client of the population, at the server's w: [clients, d].

    theta_i is what the client predicts with, which stands for the proximal map. The paper measures from the
    client's own w_i; the server's w is what all methods have. Where there is no Gaussian prior, lam is 1.
    """
    algorithm, server = run.setup.algorithm, run.snapshot(which).server
    shared = algorithm.global_model(server)
    if shared is None:
        raise UsageError(f"{algorithm.name} has no global model that envelopes could be around")
    message = (algorithm.belief.send(server, _everyone(run, which)) if isinstance(algorithm, PriorMethod)
               else Message())

    def gradient(client: int) -> Tensor:
        personal = run.personal(client, which)
        if not isinstance(personal, Model):
            raise UsageError(f"the clients of {algorithm.name} do not predict with one model")
        gap = shared.theta - personal.theta
        if isinstance(algorithm, pFedBreD):
            gap = algorithm.family.hessian_g_star(shared.theta, gap)
        if not isinstance(algorithm, PriorMethod):
            return gap
        prior = algorithm.belief.prior(Message(message.shared, take(message.each, client)))
        return prior.precision * gap if isinstance(prior, Gaussian) else gap

    return torch.stack([gradient(client) for client in range(run.setup.federation.population)])


def _everyone(run: Run, which: Which) -> Round:
    federation = run.setup.federation
    clients = torch.arange(federation.population)
    sizes = torch.from_numpy(federation.train.sizes[clients.numpy()]).to(run.setup.task.dtype)
    return Round(run.setup.train.seed, run.snapshot(which).number, clients, sizes, federation.population)


class Deviations(NamedTuple):
    """How much larger a client's loss on a class is than the clients' mean: [clients, classes], NaN for a
    class without test rows. Appendix B.4 of the paper."""

    everyone: Tensor  # on the test rows of all clients ("global test")
    own: Tensor  # on the client's own test rows ("local test")


def deviations(everyone: Tensor, own: Tensor, counts: Tensor) -> Deviations:
    """The deviations of losses [clients, classes]: `everyone` on the rows of all, `own` on the client's own,
    of which there are `counts`. Among the latter a client counts as its number of rows of the class; where it
    has none, its loss is 0, so that it shows the others' mean, negated."""
    n = counts.sum(0)
    own = own.where(counts > 0, 0.0)
    mean = (own * counts).sum(0) / n
    return Deviations(everyone - everyone.mean(0), own - mean)


def loss_deviations(run: Run, which: Which = "best") -> Deviations:
    """The deviations of the losses of what the clients of the population predict with."""
    task, federation, algorithm = run.setup.task, run.setup.federation, run.setup.algorithm
    classes, y = federation.classes, federation.y
    if classes is None or y.dim() != 1:
        raise UsageError("deviations of the loss on each class need data with one class per sample")
    clients = range(federation.population)
    rows = np.concatenate([np.zeros(0, np.int64), *(federation.test[client] for client in clients)])
    owner = np.repeat(np.arange(len(clients)), federation.test.sizes[: len(clients)])
    if not len(rows):
        raise UsageError("deviations of the loss need test rows, and nobody has any")
    target = y[torch.from_numpy(rows)]
    of_class = [target == c for c in range(classes)]

    def losses(client: int) -> tuple[Tensor, Tensor]:
        personal = run.personal(client, which)
        with torch.no_grad():
            outputs = torch.cat([algorithm.predict(task, personal, inputs(federation.x[block], task.dtype))
                                 for block in np.split(rows, range(BLOCK, len(rows), BLOCK))])

        def per_class(chosen: Tensor) -> Tensor:
            return torch.stack([task.metrics(outputs, Batch(outputs, target, chosen & c))[0]
                                for c in of_class])

        return per_class(torch.ones_like(of_class[0])), per_class(torch.from_numpy(owner == client))

    everyone, own = (torch.stack(each) for each in zip(*map(losses, clients), strict=True))
    counts = torch.stack([torch.from_numpy(np.bincount(owner[c.numpy()], minlength=len(clients)))
                          for c in of_class], 1)
    return deviations(everyone, own, counts.to(own.dtype))
