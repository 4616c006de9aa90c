"""FedAMP: attentive message passing between clients with similar models."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from descant.core.fields import hyper
from descant.core.kernels.products import centred
from descant.core.ranges import Log
from descant.priors.attention import MessagePassing


@dataclass(frozen=True)
class FedAMP(MessagePassing):
    """Every client is drawn to a mean of all clients' last models, in which similar ones count more.

    Server:  u_i = sum_j xi_ij w_j,   xi_ij = alpha exp(-||w_i - w_j||^2 / sigma) / sigma,   xi_ii = 1 - sum.
    Client:  w_i ~ argmin f_i(w) + lam/2 ||w - u_i||^2   by one step on each batch, from u_i; uploaded.

    A newcomer is drawn to the mean of all models (the paper has no rule) and does the work of a round.
    Trap: in the best-known library the pull has no gradient, and FedAMP is local training.
    """

    name: ClassVar[str] = "fedamp"
    citation: ClassVar[str] = ("Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated "
                               "Learning on Non-IID Data. AAAI 2021, arXiv:2007.03797")

    alpha: float = hyper(0.1, "weight of the others; above sigma / (m - 1), xi_ii may be negative", gt=0)
    sigma: float = hyper(10.0, "squared distance at which attention fades", gt=0, search=Log(0.1, 1000.0))

    def points(self, w: Tensor) -> Tensor:
        return centred(w)  # distances by products lose fewer digits near the origin

    def attention(self, products: Tensor, squares: Tensor, clients: Tensor) -> Tensor:
        distances = (squares[clients] + squares - 2 * products).clamp(min=0)
        return self.alpha / self.sigma * (-distances / self.sigma).exp()
