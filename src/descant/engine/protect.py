"""How [privacy] becomes a part of the work: methods are tried out, and refused where they look at rows
otherwise than by private gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from descant.core.algorithm import Message
from descant.core.federation import Federation
from descant.core.privacy.settings import Mechanism, Privacy
from descant.core.privacy.task import CountingTask, NotPrivate, PrivateTask
from descant.core.splits import Table
from descant.core.tree import leaves, take
from descant.engine.account import Account, Queries, require_fit
from descant.engine.backends.shard import Shard
from descant.engine.batches import LocalWork
from descant.engine.cohort import sampled
from descant.engine.pool import Pools
from descant.engine.settings import Train
from descant.engine.work import Work
from descant.errors import UsageError

#: Why methods whose `local` asks for nothing but gradients do not fit all the same.
UNFIT: dict[str, tuple[Callable[..., bool], str]] = {
    "globaltrain": (lambda method, privacy: privacy.sampling == "poisson",
                    "it weights gradients by the numbers of rows in its batches, which are a secret with "
                    'privacy.sampling = "poisson": use fedavg, or privacy.sampling = "known"'),
    "perfedavg": (lambda method, privacy: method.variant == "hf",
                  "hf takes the difference of two gradients that are close to each other, of which noise "
                  'leaves nothing: set algorithm.variant = "fo"'),
}


STEPS = 2  # of a dry run: the first may be another than those that follow
LEARNED = ('privacy.unit = "record": data.scale or data.impute = "client" changes every row by statistics of '
           'all rows of its client, so that one row is in what all others add; use "constants" with numbers '
           "that are known without these rows")


def account_of(work: Work, train: Train, privacy: Privacy) -> Account:
    """The account of a run; an error where the method or the settings do not fit."""
    federation = work.federation
    require_fit(privacy, train, federation.population)
    if privacy.unit == "client":
        _require_sum(work)
    queries = _queries(work, privacy) if privacy.unit == "record" else Queries()
    treatment = federation.treatment
    if privacy.unit == "record" and not queries.nothing and treatment is not None and treatment.is_learned:
        raise UsageError(LEARNED)
    return Account(privacy, train, federation.train.sizes[: federation.population], queries,
                   lambda number: sampled(federation, train, number, privacy)[1])


def settled(work: Work, train: Train, privacy: Privacy) -> Privacy:
    """With the noise that the budget asks for; errors come before a run begins."""
    found = account_of(work, train, privacy).settled()
    _mechanism(work, train, found, secret=False)
    return found


def protected(work: Work, train: Train, privacy: Privacy, *, secret: bool = False) -> Work:
    """The work with its rows or clients protected; the noise is settled. `secret`: by random numbers of the
    operating system."""
    mechanism, private = _mechanism(work, train, privacy, secret=secret), None
    if privacy.unit == "record" and not _queries(work, privacy).nothing:
        private = PrivateTask(work.task, mechanism, _axes(work))
    return dataclasses.replace(work, privacy=mechanism, private=private)


def _mechanism(work: Work, train: Train, privacy: Privacy, *, secret: bool) -> Mechanism:
    assert privacy.noise is not None
    cohort = train.cohort_size(work.federation.population)
    found = Mechanism(privacy, privacy.noise, float(cohort), secret)
    assert found.sum_noise > 0  # raises where a count would tell more than all is to
    return found


def _require_sum(work: Work) -> None:
    """Refuse what noise on a sum of the clients' contributions cannot protect."""
    name, found = work.algorithm.name, 'privacy.unit = "client" does not fit'
    if work.algorithm.needs_rows:
        raise UsageError(f"{found} {name} as it is set: its server looks at the uploads one by one, and "
                         "noise hides a client in a sum; docs/privacy.md tells which methods need one alone")
    if work.algorithm.opens():
        raise UsageError(f"{found} {name} as it is set: its first round asks every client, whoever is in "
                         "the cohort")
    if work.algorithm.tracking:
        raise UsageError(f"{found} {name}: what its clients keep must be what the server was told, and that "
                         "is shortened and noised")
    if work.task.init().stats.numel():
        raise UsageError(f"{found} models with running statistics: noise would make variances negative; use "
                         "GroupNorm in place of BatchNorm")


def _axes(work: Work) -> int:
    """How many axes a sample has."""
    return work.federation.x.dim() - 1


def _queries(work: Work, privacy: Privacy) -> Queries:
    """What the method asks of a client's rows in a step, from a dry run."""
    method = work.algorithm
    is_unfit, why = UNFIT.get(method.name, (None, ""))
    if is_unfit is not None and is_unfit(method, privacy):
        raise UsageError(f'privacy.unit = "record" does not fit {method.name}: {why}')
    if method.opens():
        raise _refused(work, "its first round asks every client about all its rows")
    counting = CountingTask(work.task, Mechanism(privacy, 1.0), _axes(work), method.batches_per_step())
    trial = dataclasses.replace(work, federation=_tiny(work.federation), local=LocalWork(steps=STEPS),
                                private=counting, privacy=None, templates={}, pools=Pools())
    first = work.round_of(np.zeros(1, np.int64), 0)
    model = work.task.init()
    message = method.broadcast(method.init_server(work.task, model, work.round_of(
        np.arange(work.federation.population), 0)), first)
    try:
        result = trial.tried("local", Message(message.shared, take(message.each, 0)),
                             method.init_client(work.task, model))
    except NotPrivate as error:
        raise _refused(work, str(error)) from None
    if not any(True for _ in leaves(result.upload)):  # it trains alone
        return Queries((0,))
    return Queries(counting.counts, method.disjoint_batches)


def _tiny(federation: Federation) -> Federation:
    """Clients of one row each: what a method asks for does not depend on the rows, and a server has none."""
    everyone = federation.everyone
    rows = Table(np.zeros(everyone, np.int64), np.arange(everyone + 1))
    whole = {field.name: getattr(federation, field.name) for field in dataclasses.fields(Federation)}
    return Shard(**whole | {"x": federation.x[:2], "y": federation.y[:2], "train": rows, "validation": rows,
                            "test": rows})


def _refused(work: Work, why: str) -> UsageError:
    return UsageError(f'privacy.unit = "record" does not fit {work.algorithm.name} as it is set: {why}; '
                      "docs/privacy.md has a table of what fits")
