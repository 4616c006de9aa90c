"""[privacy] in a real federation: what must be agreed on, and a client's own account of what it has given.

A client need not trust the server to keep a budget: it counts its own replies, in a ledger that outlives its
process, and every reply has noise of its own, also one to a request that is repeated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from descant.core.privacy.settings import Privacy
from descant.engine.account import Account
from descant.engine.protect import LEARNED, account_of
from descant.engine.settings import Train
from descant.engine.work import LocalResult, Work
from descant.errors import UsageError
from descant.experiment.config import Experiment
from descant.theory.accountant import Event, epsilon


def require_agreed(experiment: Experiment) -> None:
    """Refuse privacy that clients could not check, or that would promise too much."""
    privacy, train = experiment.privacy, experiment.train
    if privacy is None:
        return
    if privacy.noise is None:
        raise UsageError("in a real federation privacy.noise is a part of what is agreed on: give it beside "
                         "privacy.epsilon; a simulation with epsilon alone writes the noise into its "
                         "config.toml")
    if privacy.unit == "client" and privacy.sampling == "poisson" and train.cohort != "all":
        raise UsageError("privacy.sampling: in a real federation everybody can work out the cohorts from the "
                         'seed, so that they hide nobody: set privacy.sampling = "known", or train.cohort = '
                         '"all"')
    if privacy.unit == "record" and experiment.data.preprocess.learns:
        raise UsageError(LEARNED)
    if privacy.figures == "off" and train.patience is not None:
        raise UsageError('train.patience stops by figures of held-out rows, which privacy.figures = "off" '
                         'keeps with the clients: leave patience out, or set privacy.figures = "told"')


def tells_nothing(privacy: Privacy | None) -> bool:
    """Whether clients keep their losses and figures to themselves."""
    return privacy is not None and privacy.figures == "off"


def without_loss(result: LocalResult) -> LocalResult:
    return result._replace(loss=torch.full_like(result.loss, math.nan))


@dataclass(frozen=True)
class OwnAccount:
    """What the rows of ONE client have lent themselves to."""

    account: Account
    size: int

    @classmethod
    def of(cls, work: Work, train: Train, privacy: Privacy, client: int) -> OwnAccount:
        return cls(account_of(work, train, privacy), int(work.federation.train.sizes[client]))

    def spent(self, replies: int) -> float:
        """Epsilon after so many replies."""
        alone = Account(self.account.privacy, self.account.train, np.array([self.size]), self.account.queries,
                        lambda number: np.zeros(1, np.int64))
        return alone.spent(replies)

    def require(self, replies: int, rounds: int) -> None:
        """Refuse a reply that exceeds the budget. Of rows every reply tells, also one that is repeated. A
        client is hidden in sums, of which a round has one, whether or not it saw that one to its end."""
        privacy = self.account.privacy
        budget, noise = privacy.epsilon, privacy.noise
        if budget is None or noise is None:
            return
        if privacy.unit == "record" and self.spent(replies) > budget:
            raise Spent(f"this client has trained {replies - 1} times, and once more would exceed "
                        f"privacy.epsilon = {budget:g} for its rows")
        if privacy.unit == "client" and epsilon(Event(noise, 1.0, rounds), privacy.delta) > budget:
            raise Spent(f"this client may be in {rounds - 1} sums, and one more would exceed privacy.epsilon "
                        f"= {budget:g}")


class Spent(UsageError):
    """A client has nothing left of its budget; both sides may know."""
