"""FedRep: a representation for all, below a head that each client fits first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from descant.algorithms.fedper import FedPer
from descant.core.algorithm import ClientData
from descant.core.fields import hyper
from descant.core.task import Task
from descant.core.vector import Model
from descant.priors.solve import solve


@dataclass(frozen=True)
class FedRep(FedPer):
    """The head is fitted to the representation, then the representation is improved under that head.

    Client, from (w, h_i):  h_i <- h_i - lr grad_h f_i(w, h_i)      `heads` times on each batch of the round;
                            w_i <- w_i - lr grad_w f_i(w_i, h_i)    once on each, then.
    Server:                 w <- sum_{i in S} p_i w_i.

    A round takes heads + 1 times the gradient steps of FedPer. A newcomer fits its head alone, as in the
    paper.
    """

    name: ClassVar[str] = "fedrep"
    citation: ClassVar[str] = ("Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations "
                               "for Personalized Federated Learning. ICML 2021, arXiv:2102.07078")

    heads: int = hyper(4, "passes over the round's batches that fit the head, before the one for the body",
                       ge=1)

    def trained(self, task: Task, model: Model, data: ClientData) -> Model:
        if (parts := self.split(task)) is None:
            return super().trained(task, model, data)
        for _ in range(self.heads):
            model = solve(task, model, data, self.solver, only=parts.private)
        return solve(task, model, data, self.solver, only=parts.shared)
