"""Do the intervals of `descant compare` hold what they promise? `python benchmarks/coverage.py [--quick]`.

Simulated comparisons with a known truth: how often the 95 % interval holds it, with every source of noise
switched on and off, for each population; how often one of several equal methods is called better; and how
often a real difference is found. All by the functions that the command uses, `descant.comparison.statistics`.
"""

from __future__ import annotations

import itertools
import sys
from typing import NamedTuple

import numpy as np
from scipy import stats

from descant.comparison import statistics
from descant.comparison.statistics import Units

POPULATIONS = ("rows", "clients", "new clients")
EDGE = -0.3  # a row is right with a method if it favours it by more
SOURCES = ("seeds", "splits", "clients", "rows")


class World(NamedTuple):
    """Methods on a federation: standard deviations of what moves each of them, zero for nothing."""

    methods: int = 2
    repetitions: int = 5
    clients: int = 20
    rows: int = 60  # of a client; a quarter of them is tested
    seeds: float = 0.01  # a repetition moves all clients,
    own: float = 0.02  # and each by itself
    clients_differ: float = 0.05
    rows_differ: float = 0.3  # rows favour a method, in every repetition,
    luck: float = 0.2  # and besides in this one
    splits: str = "repeated"
    binary: bool = False  # a row is right or wrong


class Drawn(NamedTuple):
    """One simulated comparison, and the scores [M] that are true of each population."""

    scores: np.ndarray  # [R, M]
    units: dict[str, Units | None]
    truth: dict[str, np.ndarray]


def drawn(world: World, rng: np.random.Generator) -> Drawn:
    count, clients, methods, tested = world.repetitions, world.clients, world.methods, world.rows // 4
    order = np.argsort(rng.random((count, clients, world.rows)), -1)
    if world.splits == "fixed":
        order[:] = order[:1]
    elif world.splits == "folds":
        order = np.stack([np.roll(order[0], -r * tested, -1) for r in range(count)])
    chosen = order[..., :tested, None]
    of_client = world.clients_differ * rng.normal(size=(clients, 1, methods))
    favour = of_client + world.rows_differ * rng.normal(size=(clients, world.rows, methods))
    moved = (world.seeds * rng.normal(size=(count, 1, 1, methods))
             + world.own * rng.normal(size=(count, clients, 1, methods))
             + world.luck * rng.normal(size=(count, clients, tested, methods)))
    values = np.take_along_axis(favour[None], chosen, 2) + moved
    if world.binary:
        values = (values > EDGE).astype(float)
    figures = values.mean(2)
    influence = np.zeros((count, clients, world.rows, methods))
    np.put_along_axis(influence, chosen, (values - figures[:, :, None]) / (
        clients * np.sqrt(tested * (tested - 1))), 2)
    if world.splits == "fixed":
        favour = np.take_along_axis(favour, chosen[0], 1)
    by_chance = np.hypot(np.hypot(world.seeds, world.own), world.luck)
    rows = Units(influence.reshape(count, -1, methods), clients * (tested - 1))
    units = {"rows": None, "clients": rows, "new clients": statistics.of_clients(figures)}
    return Drawn(figures.mean(1), units,
                 {"rows": _expected(world, favour, by_chance),
                  "clients": _expected(world, of_client, np.hypot(by_chance, world.rows_differ)),
                  "new clients": np.zeros(methods)})


def _expected(world: World, favour: np.ndarray, by_chance: float) -> np.ndarray:
    """The mean score of rows with this mean, give or take."""
    if world.binary:
        favour = stats.norm.sf((EDGE - favour) / by_chance)
    return np.asarray(favour.mean((0, 1)))


def coverage(world: World, comparisons: int, rng: np.random.Generator) -> dict[str, float]:
    """How often the intervals of all pairs hold what is true of each population."""
    held = dict.fromkeys(POPULATIONS, 0)
    for _ in range(comparisons):
        found = drawn(world, rng)
        for population, truth in found.truth.items():
            analysis = statistics.compare(found.scores, found.units[population])
            held[population] += all(pair.low <= truth[a] - truth[b] <= pair.high  # type: ignore[operator]
                                    for (a, b), pair in analysis.pairs.items())
    return {population: count / comparisons for population, count in held.items()}


def switched(world: World, on: tuple[str, ...]) -> World:
    """With some sources of noise only."""
    off = World(seeds=0.0, own=0.0, clients_differ=0.0, rows_differ=0.0, luck=0.0)
    wanted = {"seeds": ("seeds", "own"), "clients": ("clients_differ",), "rows": ("rows_differ", "luck")}
    kept = {name: getattr(world, name) for source in on for name in wanted.get(source, ())}
    return world._replace(**(off._asdict() | kept | {
        name: getattr(world, name) for name in ("methods", "repetitions", "clients", "rows", "binary")}
        | {"splits": "repeated" if "splits" in on else "fixed"}))


KINDS = ("alike", "one noisy", "half noisy", "spread", "groups", "one factor", "heavy tails")


def noise(kind: str, repetitions: int, methods: int, rng: np.random.Generator) -> np.ndarray:
    """Scores of equal methods, with noise of several kinds."""
    z = rng.normal(size=(repetitions, methods)) + 3 * rng.normal(size=(repetitions, 1))
    own = z - z.mean(1, keepdims=True)
    if kind == "one noisy":
        own[:, 0] += 3 * rng.normal(size=repetitions)
    elif kind == "half noisy":
        own[:, : methods // 2] *= 5
    elif kind == "spread":
        own *= np.exp(np.linspace(-1.2, 1.2, methods))
    elif kind == "groups":  # methods that do nearly the same
        own = 0.3 * own + rng.normal(size=(repetitions, 3))[:, np.arange(methods) % 3]
    elif kind == "one factor":
        own += 3 * rng.normal(size=(repetitions, 1)) * np.linspace(0, 1, methods)
    elif kind == "heavy tails":
        own = rng.standard_t(3, size=(repetitions, methods))
    return np.asarray(own)


def false_alarms(kind: str, repetitions: int, methods: int, comparisons: int, rng: np.random.Generator
                 ) -> float:
    """How often any of several equal methods is called better than another."""
    alarms = 0
    for _ in range(comparisons):
        p = statistics.compare(noise(kind, repetitions, methods, rng)).p
        alarms += p is not None and p < statistics.LEVEL
    return alarms / comparisons


def power(spread: float, comparisons: int, rng: np.random.Generator) -> tuple[float, float]:
    """How often 0.869 is found better than 0.602, with 10 methods and 5 repetitions; before and now. The
    others lie between; a repetition moves a method by `spread`."""
    levels, found = np.linspace(0.869, 0.602, 10), np.zeros(2)
    for _ in range(comparisons):
        scores = levels + spread * rng.normal(size=(5, 10))
        gaps = scores[:, 0] - scores[:, -1]
        before = 45 * 2 * stats.t.sf(abs(gaps.mean()) / gaps.std(ddof=1) * 5**0.5, 4)  # Holm's first step
        pair = statistics.compare(scores).beside(0, 9)
        found += before < statistics.LEVEL, pair.p is not None and pair.p < statistics.LEVEL
    before, now = found / comparisons
    return float(before), float(now)


def main() -> None:
    comparisons = 500 if "--quick" in sys.argv else 2000
    rng = np.random.default_rng(0)
    print("coverage of 95 % intervals\n\n| sources of noise | " + " | ".join(POPULATIONS) + " |")
    print("|---|---|---|---|")
    for on in every_source():
        world = switched(World(), on)
        found = coverage(world, comparisons, rng)
        cells = [f"{found[population]:.1%}" if is_defined(world, population) else "-"
                 for population in POPULATIONS]
        print(f"| {', '.join(on)} | {' | '.join(cells)} |", flush=True)
    print("\n| federation | " + " | ".join(POPULATIONS) + " |\n|---|---|---|---|")
    for name, world in WORLDS.items():
        cells = [f"{share:.1%}" for share in coverage(world, comparisons, rng).values()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print("\nfalse alarms\n\n| methods | repetitions | " + " | ".join(KINDS) + " |")
    print("|---|---|" + "---|" * len(KINDS))
    for methods, repetitions in itertools.product((2, 3, 5, 10), (3, 5, 10)):
        cells = [f"{false_alarms(kind, repetitions, methods, comparisons, rng):.1%}" for kind in KINDS]
        print(f"| {methods} | {repetitions} | {' | '.join(cells)} |", flush=True)
    print("\n0.869 against 0.602, 10 methods, 5 repetitions")
    print("\n| a repetition moves a method by | before | now |\n|---|---|---|")
    for spread in (0.03, 0.05, 0.07, 0.1):
        before, now = power(spread, comparisons, rng)
        print(f"| {spread} | {before:.0%} | {now:.0%} |", flush=True)


WORLDS = {
    "3 repetitions": World(repetitions=3),
    "10 repetitions": World(repetitions=10),
    "4 clients with 240 rows": World(clients=4, rows=240),
    "100 clients with 40 rows": World(clients=100, rows=40),
    "fixed split": World(splits="fixed"),
    "folds": World(repetitions=4, splits="folds"),
    "rows right or wrong": World(binary=True),
    "5 methods": World(methods=5),
    "10 methods": World(methods=10, rows=40),
}


def every_source() -> list[tuple[str, ...]]:
    """All ways to switch the sources on and off, but for those without any noise in the scores."""
    ways = [on for count in range(1, 5) for on in itertools.combinations(SOURCES, count)]
    return [on for on in ways if {*on} & {"seeds", "rows", "clients"}]


def is_defined(world: World, population: str) -> bool:
    """Whether anything varies for a population: an interval without width is right or wrong, and no more."""
    by_seed = world.seeds > 0 or world.luck > 0 or (world.rows_differ > 0 and world.splits != "fixed")
    more = {"rows": 0.0, "clients": world.rows_differ,
            "new clients": world.rows_differ + world.clients_differ}
    return by_seed or more[population] > 0


if __name__ == "__main__":
    main()
