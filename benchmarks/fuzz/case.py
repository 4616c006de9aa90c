"""What a case may do: end well, or with an error of descant's, soon, and in bounded memory."""

from __future__ import annotations

import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from descant.errors import DescantError

SECONDS = 5  # of computing in a case: on a machine that others use, the clock says little
ASLEEP = 60  # seconds for what waits and does not compute, without those in which this process is stopped
MEMORY = 2 * 10**9  # bytes that a case may map beyond what the process has


class Hang(BaseException):
    """A case takes too long. Not an Exception, lest somebody catches it."""


class Kind(NamedTuple):
    """A kind of input: how it is drawn, and what is done with it."""

    name: str
    inputs: st.SearchStrategy[Any]
    use: Callable[[Any], None]  # may raise a DescantError; everything else is a finding


@contextmanager
def held() -> Iterator[None]:
    """While a case runs: limits of time and memory, and no file that is left open is told."""
    seconds = 0

    def tick(*_: object) -> None:
        nonlocal seconds
        seconds += 1
        if seconds > ASLEEP:
            raise Hang(f"more than {ASLEEP} s")

    def rung(*_: object) -> None:
        raise Hang(f"more than {SECONDS} s of computing")

    handlers = {signal.SIGALRM: tick, signal.SIGPROF: rung}
    before = {kind: signal.signal(kind, handler) for kind, handler in handlers.items()}
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_mapped() + MEMORY, limits[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for kind, handler in before.items():
            signal.signal(kind, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _mapped() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 (no file of ours)
        return int(file.read().split()[0]) * resource.getpagesize()


def run_cases(kind: Kind, count: int, number: int) -> int:
    """Try so many cases, those of the seed `number`; the first finding is shrunk and raised. Returns how many
    were refused."""
    refused = 0

    @seed(number)
    @settings(max_examples=count, deadline=None, database=None, phases=(Phase.generate, Phase.shrink),
              suppress_health_check=list(HealthCheck))
    @given(kind.inputs)
    def case(given_input: Any) -> None:
        nonlocal refused
        with held():
            try:
                kind.use(given_input)
            except DescantError:
                refused += 1

    case()
    return refused
