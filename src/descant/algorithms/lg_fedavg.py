"""LG-FedAvg: local representations, and a head for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from descant.algorithms.fedper import FedPer
from descant.core.fields import hyper
from descant.core.parts import Shared


@dataclass(frozen=True)
class LGFedAvg(FedPer):
    """FedPer the other way round: the head is averaged, and each client has a body of its own.

    The authors begin with the model of a finished FedAvg. Here both layers are trained from the start, as
    the comparisons of other papers do. A newcomer fits a body to its rows, below the server's head.
    """

    name: ClassVar[str] = "lg_fedavg"
    citation: ClassVar[str] = ("Liang, Liu, Liu, Salakhutdinov, Morency: Think Locally, Act Globally: "
                               "Federated Learning with Local and Global Representations. 2020, "
                               "arXiv:2001.01523")

    shared: Shared = hyper("head", "the layers that are averaged; the others are private")
