"""The methods, one file each."""

from descant.algorithm import Algorithm
from descant.algorithms.ditto import Ditto
from descant.algorithms.fedavg import FedAvg
from descant.algorithms.fedprox import FedProx
from descant.algorithms.localtrain import LocalTrain
from descant.algorithms.pfedme import pFedMe
from descant.algorithms.scaffold import SCAFFOLD

ALGORITHMS: dict[str, type[Algorithm]] = {
    cls.name: cls for cls in (LocalTrain, FedAvg, FedProx, pFedMe, Ditto, SCAFFOLD)
}

__all__ = ["ALGORITHMS", "SCAFFOLD", "Ditto", "FedAvg", "FedProx", "LocalTrain", "pFedMe"]
