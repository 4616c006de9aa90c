"""Clients that attack, in simulation: the [attack] section of an experiment.

A fixed part of the clients, drawn from the seed, trains as all others do and then uploads something else, or
trains on wrong labels. What they send is made of what the round's honest clients send: attackers that know
everything are the worst there are. Only honest clients are scored.

A change is the difference from what an idle client uploads (`uploads.Origins`), for each tensor by itself.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, TypeAlias

import numpy as np
from torch import Tensor

from descant.core.federation import Federation
from descant.core.fields import Checked, hyper
from descant.core.random import stream
from descant.core.units import times
from descant.errors import UsageError

Kind: TypeAlias = Literal["sign_flip", "scaled", "label_flip", "alie", "inner_product"]
_SCALES: dict[Kind, float] = {"sign_flip": 1.0, "scaled": 10.0, "inner_product": 1.0}


@dataclass(frozen=True)
class Attack(Checked):
    """What attackers do; D_i is the change of client i, and of the attacker itself where it has no index.

    sign_flip:      -scale D                     (scale 1 if absent)
    scaled:         scale D                      (scale 10 if absent)
    inner_product:  -scale mean of the honest D_i (scale 1 if absent; Xie, Koyejo, Gupta 2019,
                    arXiv:1903.03936). The plain mean turns round where scale is above honest / attackers.
    alie:           mean - scale std of the honest D_i, coordinate by coordinate ("a little is enough",
                    Baruch, Baruch, Goldberg 2019, arXiv:1902.06156). If absent, scale is the paper's largest
                    that hides among n clients with m attackers: the normal quantile of (n - m - s) / (n - m)
                    with s = floor(n/2 + 1) - m, which is zero for few attackers (2 of 10).
    label_flip:     honest work on labels c - 1 - y of c classes.
    """

    kind: Kind = hyper("sign_flip", "what attackers send, or learn from")
    share: float = hyper(0.2, "share of the clients that attack", gt=0, lt=1)
    scale: float | None = hyper(None, "how much of it; absent: as the attack has it", gt=0,
                                derived=lambda self: _SCALES.get(self.kind))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "label_flip" and self.scale is not None:
            raise UsageError("attack.scale does not fit label_flip, whose attackers send what they learn: "
                             "leave it out")

    def attackers(self, population: int, seed: int) -> np.ndarray:
        """Who attacks: the same clients in every round."""
        count = round(self.share * population)
        if not 0 < count < population:
            who = "nobody" if count == 0 else "everyone"
            raise UsageError(f"attack.share = {self.share:g} of {times(population, 'client')} is {who}: "
                             f"take a share from {1 / population:.3g} to {1 - 1 / population:.3g}")
        return np.sort(stream(seed, "attackers").choice(population, count, replace=False))

    def poisoned(self, federation: Federation, seed: int) -> Federation:
        """The federation as the attackers see it: with flipped labels in their training rows, or as it is."""
        if self.kind != "label_flip":
            return federation
        if federation.classes is None:
            raise UsageError("attack.kind = \"label_flip\" needs classes, and the targets of this federation "
                             "are real numbers: take another kind, such as sign_flip")
        rows = np.concatenate([federation.train[client]
                               for client in self.attackers(federation.population, seed)])
        y = federation.y.clone()
        y[rows] = federation.classes - 1 - y[rows]
        return dataclasses.replace(federation, y=y)

    def words(self, federation: Federation, seed: int) -> str:
        """What is told of it."""
        found = self.attackers(federation.population, seed)
        names = ", ".join(federation.names[client] for client in found[:10])
        scale = "" if self.scale is None else f", scale {self.scale:g}"
        more = f" and {len(found) - 10} more" if len(found) > 10 else ""
        return (f"{len(found)} of {times(federation.population, 'client')} attack ({self.kind}{scale}): "
                f"{names}{more}; scores are those of the others")

    def forged(self, changes: Tensor, attack: Tensor) -> Tensor:
        """What attackers send in place of their changes [n, ...], where `attack` [n] says who they are. With
        no honest client there is nobody to imitate: they send their own."""
        if self.kind in ("sign_flip", "scaled"):
            factor = _SCALES[self.kind] if self.scale is None else self.scale
            return -factor * changes if self.kind == "sign_flip" else factor * changes
        honest = changes[~attack]
        if self.kind == "label_flip" or not len(honest):
            return changes
        mean = honest.mean(0)
        if self.kind == "inner_product":
            return (-(self.scale or 1.0) * mean).expand_as(changes)
        z = hidden(len(changes), int(attack.sum())) if self.scale is None else self.scale
        return (mean - z * (honest - mean).square().mean(0).sqrt()).expand_as(changes)


def hidden(clients: int, attackers: int) -> float:
    """How many standard deviations attackers can be away from the mean, so that enough honest clients are
    farther away for the attackers to look like the majority (Baruch et al. 2019, section 3.1)."""
    honest, needed = clients - attackers, clients // 2 + 1 - attackers
    share = (honest - needed) / honest
    return max(0.0, NormalDist().inv_cdf(min(max(share, 0.5), 1 - 1e-6)))
