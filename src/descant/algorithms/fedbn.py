"""FedBN: federated averaging in which BatchNorm stays local."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from descant.algorithms.fedper import FedPer
from descant.core.fields import hyper
from descant.core.parts import Shared
from descant.core.task import Task


@dataclass(frozen=True)
class FedBN(FedPer):
    """FedAvg without the parameters and running statistics of BatchNorm: these are each client's own.

    For clients whose inputs differ (scanners, cameras). On a model without BatchNorm it is FedAvg. A newcomer
    fits its BatchNorm layers, the rest held fixed (our rule).
    """

    name: ClassVar[str] = "fedbn"
    citation: ClassVar[str] = ("Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features "
                               "via Local Batch Normalization. ICLR 2021, arXiv:2102.07623")

    shared: Shared = hyper("all but batchnorm", "the layers that are averaged; the others are private")

    def remarks(self, task: Task) -> list[str]:
        if self.split(task) is None:
            return ["the model has no BatchNorm layer that could stay with the clients: fedbn is fedavg here"]
        return []
