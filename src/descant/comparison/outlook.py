"""Whether a comparison is decided, and how many more repetitions would decide it."""

from __future__ import annotations

from typing import NamedTuple

from descant.comparison import statistics
from descant.comparison.plan import Plan
from descant.comparison.results import Results
from descant.comparison.statistics import Pair
from descant.core.units import duration

LOOKS = 3  # that --until-decided may take; the level of the tests is divided by them
MOST_SEEDS = 30  # that --until-decided takes


class Outlook(NamedTuple):
    """Whether more repetitions are worth their time."""

    decided: bool
    more: int | None  # repetitions that would probably settle what can be settled; None: none can
    why: str


class More(NamedTuple):
    """What a look at the results leads to."""

    plan: Plan  # with the look, and the seeds that it adds
    seeds: list[int]  # that it adds; none: it ends here
    words: str


def outlook(results: Results) -> Outlook:
    """Whether the best method differs from each other one significantly, or too little to matter."""
    if results.analysis is None:
        return Outlook(True, None, "there are no two methods to compare")
    if results.repetitions < 2:
        return Outlook(False, 4, "one repetition gives no interval")
    needed = still_needed(results)
    if not needed:
        return Outlook(True, None, "every difference is significant, or too small to matter")
    known = [more for more in needed.values() if more is not None]
    return Outlook(False, max(known), f"no significant difference from {', '.join(needed)} so far"
                   ) if known else Outlook(False, None, hopeless(results))


def _open(results: Results) -> dict[str, Pair]:
    """The pairs of the best method and another in which no difference is found so far."""
    if results.analysis is None:
        return {}
    return {gap.against: results.analysis.beside(0, k) for k, gap in enumerate(results.differences, 1)
            if gap.verdict == "no difference found"}


def still_needed(results: Results) -> dict[str, int | None]:
    """How many more repetitions would probably settle each open difference; None where none would."""
    found: dict[str, int | None] = {}
    for label, pair in _open(results).items():
        assert results.analysis is not None
        count = statistics.needed(pair, results.analysis, results.worth)
        found[label] = None if count is None else count - results.repetitions
    return found


def hopeless(results: Results) -> str:
    """Why more repetitions would not settle some differences."""
    if any(pair.lasting > pair.repetition / statistics.MOST_REPETITIONS for pair in _open(results).values()):
        return "there are too few clients" if results.plan.population == "new clients" else (
            "there are too few test rows")
    return f"it would take more than {statistics.MOST_REPETITIONS} repetitions"


def seconds(results: Results) -> float:
    """The training time of one repetition of all methods, one run after another."""
    return sum(row.figures["seconds"].mean for row in results.rows)


def extended(plan: Plan, found: Results) -> More:
    """Look whether the comparison is decided, and add the repetitions that would decide it. The tests are as
    strict as the plan's number of looks needs; another look at the same repetitions is the same look."""
    count = len(plan.seeds)
    looked_at = [*dict.fromkeys([*plan.looked_at, count])]
    plan = plan._replace(looked_at=looked_at)
    decided, more, why = outlook(found)
    if decided:
        return More(plan, [], f"decided after {count} repetitions: {why}")
    undecided = f"not decided after {count} repetitions"
    if more is None:
        return More(plan, [], f"{undecided}: {why}")
    adding = min(more, MOST_SEEDS - count)
    if len(looked_at) >= plan.looks or adding < 1:
        reason = f"all {plan.looks} looks are used" if adding >= 1 else f"{MOST_SEEDS} are the limit"
        return More(plan, [], f"{undecided}, and {reason}: {why}")
    first = max(plan.seeds) + 1
    seeds = [*range(first, first + adding)]
    taken = sum(run.summary["seconds"] for run in found.finished) / max(1, count) * adding
    return More(plan._replace(seeds=[*plan.seeds, *seeds]), seeds,
                f"{undecided}: {why}; adding {adding}, about {duration(taken)} of work (look "
                f"{len(looked_at)} of {plan.looks})")
