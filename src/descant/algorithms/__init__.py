"""The methods, one file each. A new one is its file and a line here.

Imports theory, priors and core.
"""

from descant.algorithms.cgpfl import CGPFL
from descant.algorithms.dichotomous import Dichotomous
from descant.algorithms.ditto import Ditto
from descant.algorithms.fedamp import FedAMP
from descant.algorithms.fedavg import FedAvg
from descant.algorithms.fedmap import FedMAP
from descant.algorithms.fedprox import FedProx
from descant.algorithms.globaltrain import GlobalTrain
from descant.algorithms.localtrain import LocalTrain
from descant.algorithms.one_stage_fedprox import OneStageFedProx
from descant.algorithms.pfedbred import pFedBreD
from descant.algorithms.pfedgt import pFedGT
from descant.algorithms.pfedme import pFedMe
from descant.algorithms.scaffold import SCAFFOLD
from descant.core.algorithm import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {
    cls.name: cls for cls in (LocalTrain, GlobalTrain, Dichotomous, FedAvg, FedProx, OneStageFedProx, pFedMe,
                              Ditto, SCAFFOLD, pFedBreD, FedMAP, pFedGT, CGPFL, FedAMP)
}

__all__ = [
    "ALGORITHMS",
    "CGPFL",
    "SCAFFOLD",
    "Dichotomous",
    "Ditto",
    "FedAMP",
    "FedAvg",
    "FedMAP",
    "FedProx",
    "GlobalTrain",
    "LocalTrain",
    "OneStageFedProx",
    "pFedBreD",
    "pFedGT",
    "pFedMe",
]
