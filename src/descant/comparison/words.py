"""The answer of a comparison in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from descant.comparison.results import Results, Row, missing_seeds
from descant.comparison.statistics import ENOUGH_SEEDS, Difference
from descant.units import figure, times


def answer(results: Results) -> list[str]:
    """What came out, the main thing first."""
    rows = {row.label: row for row in results.rows}
    if not rows:
        return ["No run has finished yet."]
    if results.best is None:
        [(label, row), *_] = rows.items()
        return [f"Only {label} has finished so far, with {_level(results, row)}: there is nothing to compare "
                "it with yet."]
    best = rows[results.best]
    sentences = [f"{results.best} is best: {_level(results, best)}."]
    sentences += _others(results)
    sentences += _alone(results, best)
    return sentences


def notes(results: Results) -> list[str]:
    """What whoever reads the answer should bear in mind."""
    found = []
    if results.rows and (missing := missing_seeds(results)):
        found.append("Not all runs are there: " + "; ".join(
            f"{label} lacks seed {', '.join(map(str, seeds))}" for label, seeds in missing.items())
            + ". Methods are compared over the seeds that both have.")
    for family, label in results.chosen.items():
        found.append(f"Of the grid of {family}, {label} is best on validation data: it is the one that is "
                     "compared with the other methods.")
    found += [f"{label}: {caution}." for label, method in results.plan.methods.items()
              for caution in method.algorithm.cautions()]
    added = [label for label, method in results.plan.methods.items() if method.added and not method.tuned]
    if added:
        solver = results.plan.methods[added[0]].asked["solver"]
        found.append(f"{_and(added)} {'was' if len(added) == 1 else 'were'} added, as the baselines that "
                     f"every comparison needs, with {solver['name']} at {solver['lr']:g}: for others, "
                     "name them with yours, or use --tune.")
    if any(method.tuned for method in results.plan.methods.values()):
        untuned = [label for label, method in results.plan.methods.items() if not method.tuned]
        if untuned:
            found.append(f"Not tuned: {_and(untuned)}.")
    return found


def difference(results: Results, gap: Difference) -> str:
    """Whether the best method differs from another."""
    size = figure(results.metric, abs(gap.interval.mean))
    seeds = gap.interval.seeds
    if gap.p is None or gap.p_holm is None:
        return f"ahead by {size} with one seed, which says nothing about another"
    corrected = f"p {_p(gap.p_holm)} after Holm's correction"
    if gap.is_real:
        return f"ahead by {size}: a real difference ({corrected}, {seeds} seeds)"
    if gap.holds:
        return f"ahead by {size}: suggestive ({corrected}, but only {seeds} seeds)"
    return f"ahead by {size}: not told apart ({corrected}, {seeds} seeds)"


def clients(gap: Difference) -> str | None:
    """What these clients would say; it decides nothing."""
    if gap.clients_p is None:
        return None
    return (f"{gap.clients_better} of these clients are better off with {gap.label}, {gap.clients_worse} "
            f"with {gap.against} (Wilcoxon p {_p(gap.clients_p)}, describes these clients)")


def _level(results: Results, row: Row) -> str:
    value = row.figures["personal"]
    seeds = times(value.seeds, "seed")
    ends = "" if value.low is None else (f", 95 % interval {figure(results.metric, value.low)} to "
                                         f"{figure(results.metric, value.high)}")
    return (f"test {results.metric.replace('_', ' ')} {figure(results.metric, value.mean)} of the clients' "
            f"own models on average ({seeds}{ends})")


def _others(results: Results) -> list[str]:
    gaps = results.differences
    seeds = min(gap.interval.seeds for gap in gaps)
    if any(gap.p is None for gap in gaps):
        return [f"The next is {gaps[0].against}, {figure(results.metric, abs(gaps[0].interval.mean))} behind."
                " One seed cannot say whether that would hold with another: repeat with --seeds 0,1,2,3,4."]
    apart = [gap.against for gap in gaps if gap.holds]
    close = [gap.against for gap in gaps if not gap.holds]
    found = []
    if apart:
        lead = "The difference is real" if seeds >= ENOUGH_SEEDS else "The difference is suggestive"
        found.append(f"{lead} for {_and(apart)} (paired over {seeds} seeds, Holm's correction over all pairs)"
                     + ("." if seeds >= ENOUGH_SEEDS else
                        f"; it takes {ENOUGH_SEEDS} seeds to call it real."))
    if close:
        found.append(f"It is not told apart from {_and(close)}: what it is ahead by may be chance.")
    return found


def _alone(results: Results, best: Row) -> list[str]:
    if results.reference is None:
        return []
    if results.best == results.reference:
        return ["No method serves the clients better than training alone."]
    gain, worse = best.figures.get("gain"), best.figures.get("worse_off")
    if gain is None or worse is None:
        return []
    count = int(sum(value == value for value in results.clients[best.label]))
    worse_off = round(worse.mean * count)
    return [f"A client gains {figure(results.metric, gain.mean)} over training alone on average; "
            f"{worse_off:,} of {times(count, 'client')} {'is' if worse_off == 1 else 'are'} worse off than "
            "alone."]


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}"
