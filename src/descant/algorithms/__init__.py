"""The methods, one file each. A new one is its file and a line here.

Imports theory, priors and core.
"""

from descant.algorithms.apfl import APFL
from descant.algorithms.cgpfl import CGPFL
from descant.algorithms.dichotomous import Dichotomous
from descant.algorithms.ditto import Ditto
from descant.algorithms.fedamp import FedAMP
from descant.algorithms.fedavg import FedAvg
from descant.algorithms.fedbabu import FedBABU
from descant.algorithms.fedbn import FedBN
from descant.algorithms.fedem import FedEM
from descant.algorithms.fedfomo import FedFomo
from descant.algorithms.fedmap import FedMAP
from descant.algorithms.fedpac import FedPAC
from descant.algorithms.fedper import FedPer
from descant.algorithms.fedprox import FedProx
from descant.algorithms.fedrep import FedRep
from descant.algorithms.globaltrain import GlobalTrain
from descant.algorithms.heurfedamp import HeurFedAMP
from descant.algorithms.ifca import IFCA
from descant.algorithms.l2gd import L2GD
from descant.algorithms.lg_fedavg import LGFedAvg
from descant.algorithms.localtrain import LocalTrain
from descant.algorithms.one_stage_fedprox import OneStageFedProx
from descant.algorithms.perfedavg import PerFedAvg
from descant.algorithms.pfedbayes import pFedBayes
from descant.algorithms.pfedbred import pFedBreD
from descant.algorithms.pfedgt import pFedGT
from descant.algorithms.pfedhn import pFedHN
from descant.algorithms.pfedme import pFedMe
from descant.algorithms.scaffold import SCAFFOLD
from descant.core.algorithm import Algorithm

#: In the order in which they are listed: baselines, then what personalizes, by family.
ALGORITHMS: dict[str, type[Algorithm]] = {
    cls.name: cls for cls in (LocalTrain, GlobalTrain, Dichotomous, FedAvg, FedProx, SCAFFOLD, pFedMe, Ditto,
                              PerFedAvg, APFL, L2GD, pFedBreD, OneStageFedProx, CGPFL, FedMAP, pFedGT,
                              FedPer, LGFedAvg, FedBN, FedRep, FedBABU, IFCA, FedAMP, HeurFedAMP, FedFomo,
                              FedEM, pFedBayes, FedPAC, pFedHN)
}

__all__ = [
    "ALGORITHMS",
    "APFL",
    "CGPFL",
    "IFCA",
    "L2GD",
    "SCAFFOLD",
    "Dichotomous",
    "Ditto",
    "FedAMP",
    "FedAvg",
    "FedBABU",
    "FedBN",
    "FedEM",
    "FedFomo",
    "FedMAP",
    "FedPAC",
    "FedPer",
    "FedProx",
    "FedRep",
    "GlobalTrain",
    "HeurFedAMP",
    "LGFedAvg",
    "LocalTrain",
    "OneStageFedProx",
    "PerFedAvg",
    "pFedBayes",
    "pFedBreD",
    "pFedGT",
    "pFedHN",
    "pFedMe",
]
