"""What a run spends of its clients' privacy, round by round.

Who takes part when follows from the seed, so that the account of any round can be drawn up at any time, also
before the run: that is how noise is fitted to a budget, and how a run stops before it exceeds one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from descant.core.privacy.settings import Privacy
from descant.engine.settings import Train
from descant.errors import UsageError
from descant.theory.accountant import Event, epsilon, least_noise, renyi_epsilon

DISTINCT = 12  # sizes of clients whose epsilons are all computed


@dataclass(frozen=True)
class Queries:
    """What a method asks of a client's rows in a local step."""

    per_batch: tuple[int, ...] = (1,)  # private gradients on each of the batches that a step takes
    disjoint: bool = False  # whether these are of different rows

    @property
    def most(self) -> int:
        return max(1, *self.per_batch)

    def of(self, train: Train, size: int) -> tuple[float, int, int]:
        """Of a client with so many rows: the share of the rows that a batch has, how many batches a round
        has in which any of them may be, and in how many each of them is, if epochs are shuffled."""
        count = len(self.per_batch)
        if self.disjoint and size >= count:  # each batch of a step is of a share of the rows
            least, most = size // count, -(-size // count)
            batch = least if train.batch == "full" else min(train.batch, least)
            steps = len(train.local.lengths(most, most if train.batch == "full" else min(train.batch, most)))
            return batch / least, steps, -(-steps * batch // least)
        batch = size if train.batch == "full" else min(train.batch, size)
        lengths = train.local.lengths(size, batch, count)
        looked_at = sum(asked > 0 for asked in self.per_batch)
        return batch / size, len(lengths) // count * looked_at, -(-int(lengths.sum()) // size)

    @property
    def nothing(self) -> bool:
        """Whether nothing leaves a client, so that nothing needs protection."""
        return not any(self.per_batch)


@dataclass(frozen=True)
class Account:
    """What is spent, by the clients' sizes and by who trains when."""

    privacy: Privacy
    train: Train
    sizes: np.ndarray  # training rows of every client
    queries: Queries
    trained: Callable[[int], np.ndarray]  # round -> who trains
    again: int = 0  # unit client: sums that were told besides, of rounds that were played once more

    @cached_property
    def cohort(self) -> int:
        return self.train.cohort_size(len(self.sizes))

    def times(self, number: int) -> np.ndarray:
        """In how many of the first rounds each client trains."""
        found = np.zeros(len(self.sizes), np.int64)
        for k in range(1, number + 1):
            found[self._who(k)] += 1
        return found

    @cached_property
    def _who(self) -> Callable[[int], np.ndarray]:
        known: dict[int, np.ndarray] = {}

        def of(number: int) -> np.ndarray:
            if number not in known:
                known[number] = self.trained(number)
            return known[number]

        return of

    def events(self, number: int, noise: float) -> list[Event]:
        """What each client has lent itself to after so many rounds; unit client: what any of them has."""
        times = self.times(number)
        if self.privacy.unit == "client":
            rate = self.cohort / len(self.sizes)
            return [Event(noise, rate, number) if self.privacy.sampling == "poisson" and rate < 1
                    else Event(noise, 1.0, int(times.max(initial=0)) + self.again)]
        noise = noise / math.sqrt(self.queries.most)  # several looks at a batch are one with less noise
        return [self._of_rows(int(n), int(m), noise) for n, m in zip(self.sizes, times, strict=True)]

    def _of_rows(self, size: int, rounds: int, noise: float) -> Event:
        """What any row of a client has lent itself to in so many rounds."""
        if self.queries.nothing:
            return Event(noise, 1.0, 0)
        rate, batches, passes = self.queries.of(self.train, size)
        return Event(noise, rate, rounds * batches) if self.privacy.sampling == "poisson" else Event(
            noise, 1.0, rounds * passes)

    def each(self, number: int) -> np.ndarray:
        """Every client's epsilon after so many rounds [clients]; unit client: the one that holds for all.
        Where sizes are many, a rate counts as the next of a few: epsilon is a little larger then."""
        assert self.privacy.noise is not None
        events = self.events(number, self.privacy.noise)
        if len({*events}) > DISTINCT:
            events = [event._replace(rate=min(1.0, 2.0 ** (math.ceil(8 * math.log2(event.rate)) / 8)))
                      for event in events]
        return np.array([epsilon(event, self.privacy.delta) for event in events])

    def largest(self, number: int, noise: float) -> float:
        """The largest epsilon of all clients."""
        delta, found = self.privacy.delta, 0.0
        for event in front(self.events(number, noise)):
            if event.rate >= 1 or renyi_epsilon(event, delta) > found:
                found = max(found, epsilon(event, delta))
        return found

    def settled(self) -> Privacy:
        """With the least noise that keeps the whole run within the budget, where none is given."""
        if self.privacy.noise is not None:
            return self.privacy
        assert self.privacy.epsilon is not None
        if self.queries.nothing:
            return dataclasses.replace(self.privacy, noise=1.0)
        rounds = self.train.rounds
        noise = least_noise(lambda noise: self.largest(rounds, noise), self.privacy.epsilon)
        return dataclasses.replace(self.privacy, noise=noise)

    def spent(self, number: int) -> float:
        """The largest epsilon after so many rounds; the noise is settled."""
        assert self.privacy.noise is not None
        return self.largest(number, self.privacy.noise)

    def allows(self, number: int) -> bool:
        """Whether the budget is kept after so many rounds."""
        return self.privacy.epsilon is None or self.spent(number) <= self.privacy.epsilon

    def cautions(self) -> list[str]:
        """What is allowed, and protects hardly anybody."""
        clients, delta = len(self.sizes), self.privacy.delta
        units = clients if self.privacy.unit == "client" else int(self.sizes.max())
        words = "clients" if self.privacy.unit == "client" else "rows of the largest client"
        said = []
        if delta > 1 / units:
            said.append(f"privacy.delta = {delta:g} is more than 1 / {units} ({words}): a mechanism that "
                        f"publishes one of them whole could have it; take at most {0.1 / units:.1g}")
        if self.privacy.unit == "client" and self.cohort < 10:
            said.append(f"each sum is of about {self.cohort} clients, and its noise hides one of them: it is "
                        "as large as what it hides, and little is learned with fewer than some hundreds")
        return said


def front(events: Iterable[Event]) -> list[Event]:
    """Those events that no other one exceeds in both rate and times, the worst first: epsilon grows with
    both."""
    found: list[Event] = []
    for event in sorted({*events}, key=lambda e: (-e.times, -e.rate)):
        if event.times and all(event.rate > other.rate for other in found):
            found.append(event)
    return sorted(found, key=lambda e: -e.times * e.rate**2)


def require_fit(privacy: Privacy, train: Train, clients: int) -> None:
    """Refuse settings that no account is kept of."""
    if privacy.unit != "client":
        return
    if clients < 2:
        raise UsageError('privacy.unit = "client" hides one client among others, and there is one alone: '
                         'use unit = "record"')
    if train.participation == "all" and train.cohort_size(clients) < clients:
        raise UsageError('privacy.unit = "client" is for the clients whose contributions are summed: set '
                         'train.participation = "cohort"')
    if train.sampling != "uniform" and privacy.sampling == "poisson":
        raise UsageError('privacy.sampling = "poisson" samples all clients alike: set train.sampling = '
                         '"uniform", or privacy.sampling = "known"')
