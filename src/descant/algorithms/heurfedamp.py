"""HeurFedAMP: attentive message passing by the angles between models, for deep networks."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from descant.core.fields import hyper
from descant.core.ranges import Linear, Log
from descant.priors.attention import MessagePassing


@dataclass(frozen=True)
class HeurFedAMP(MessagePassing):
    """FedAMP whose attention is a softmax of cosines, so that it does not fade with the number of parameters.

    Server:  u_i = sum_j xi_ij w_j,   xi_ii = self_attention,
             xi_ij = (1 - xi_ii) exp(sigma cos(w_i, w_j)) / sum_{h != i} exp(sigma cos(w_i, w_h)).
    Client:  w_i ~ argmin f_i(w) + lam/2 ||w - u_i||^2   by one step on each batch, from u_i; uploaded.

    A newcomer is drawn to the mean of all models (the paper has no rule) and does the work of a round.
    Trap: models that share their start are nearly parallel for many rounds; sigma must be large enough to
    tell cosines of 0.99 and 1 apart. The defaults are ours.
    """

    name: ClassVar[str] = "heurfedamp"
    citation: ClassVar[str] = ("Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated "
                               "Learning on Non-IID Data. AAAI 2021, arXiv:2007.03797")

    sigma: float = hyper(25.0, "how much a cosine counts; 0: all others alike", ge=0, search=Log(1.0, 1000.0))
    self_attention: float = hyper(0.5, "xi_ii, the share of a client's own model in u_i", ge=0, le=1,
                                  search=Linear(0.0, 0.95))

    def points(self, w: Tensor) -> Tensor:
        return w

    def attention(self, products: Tensor, squares: Tensor, clients: Tensor) -> Tensor:
        norms = squares.sqrt().clamp(min=torch.finfo(squares.dtype).tiny)
        cosines = products / norms[clients] / norms
        others = torch.softmax((self.sigma * cosines).scatter(1, clients, -torch.inf), 1)
        return (1 - self.self_attention) * others.nan_to_num()  # a client without others has none
