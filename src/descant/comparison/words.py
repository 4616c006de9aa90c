"""The answer of a comparison in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from descant.algorithms import LocalTrain
from descant.comparison.budget import spent
from descant.comparison.results import Results, Row, missing_seeds
from descant.comparison.statistics import ENOUGH_SEEDS, Difference
from descant.units import figure, is_share, times

MISMATCH = 0.05  # a share of the budget that is worth telling


def answer(results: Results) -> list[str]:
    """What came out, the main thing first."""
    if not results.rows:
        return ["No run has finished yet."]
    if results.level is None:
        return [f"No client has a finite test {_name(results)} with all methods: nothing can be compared."]
    if results.best is None:
        [only] = [row.label for row in results.rows if row.label not in results.left_out]
        return [f"{only} has {_level(results)}: there is no other method to compare it with"
                f"{'' if len(results.rows) == len(results.plan.methods) else ' yet'}."]
    best = next(row for row in results.rows if row.label == results.best)
    return [f"{results.best} is best: {_level(results)}.", *_others(results), *_alone(results, best)]


def notes(results: Results) -> list[str]:
    """What whoever reads the answer should bear in mind."""
    methods, found = results.plan.methods, []
    if results.rows and (missing := missing_seeds(results)):
        found.append("Not all runs are there: " + "; ".join(
            f"{label} lacks seed {', '.join(map(str, seeds))}" for label, seeds in missing.items())
            + ". Methods are compared over seeds that all of them have.")
    found += [f"{run} failed: {why}." for run, why in results.failures.items()]
    found += [f"Of the grid of {family}, {label} is best on validation data: it is the one that is compared "
              "with the other methods." for family, label in results.chosen.items()]
    found += [f"{label} is left out of the comparison: {why}." for label, why in results.left_out.items()
              if methods[label].grid is None]
    found += [f"{label} gives {count:g} of its clients a model without a finite loss, on average over the "
              "seeds: that counts before any other figure." for label, count in results.lost.items() if count]
    found += [f"{run.label}, seed {run.seed}, has {run.rounds} rounds in place of "
              f"{methods[run.label].rounds}: it was extended, and has had more than its share."
              for run in results.finished if run.rounds > methods[run.label].rounds]
    found += results.plan.remarks()
    found += _budgets(results)
    found += [f"{label}: {caution}." for label, method in methods.items()
              for caution in method.algorithm.cautions()]
    added = [label for label, method in methods.items() if method.added and not method.tuned]
    if added:
        solver = methods[added[0]].asked["solver"]
        found.append(f"{_and(added)} {'was' if len(added) == 1 else 'were'} added, as the baselines that "
                     f"every comparison needs, with {solver['name']} at {solver['lr']:g}: for others, "
                     "name them with yours, or use --tune.")
    untuned = [label for label, method in methods.items() if not method.tuned]
    if untuned and len(untuned) < len(methods):
        found.append(f"Not tuned: {_and(untuned)}.")
    return found


def _budgets(results: Results) -> list[str]:
    """Methods whose rounds are too long to fit the budget well."""
    if results.plan.budget == "converge":
        return [*spent(results.plan, results.finished)]
    steps = {row.label: row.figures["grad_steps"].mean for row in results.rows
             if row.rounds == results.plan.methods[row.label].rounds}
    if results.plan.budget == "rounds" or not steps:
        return []
    usual = median(steps.values())
    return [f"{label} has made {100 * count / usual:.0f} % of the gradient steps of the others: its rounds "
            "are too long for a closer match." for label, count in steps.items()
            if abs(count / usual - 1) > MISMATCH]


def difference(results: Results, gap: Difference) -> str:
    """Whether the best method differs from another."""
    seeds, behind = gap.interval.seeds, f"{gap.against} is {_behind(results, gap)}"
    if gap.p is None or gap.p_holm is None:
        return f"{behind} with one seed, which says nothing about another"
    corrected = f"p {_p(gap.p_holm)} after Holm's correction"
    if gap.is_real:
        return f"{behind}: a real difference ({corrected}, {seeds} seeds)"
    if gap.holds:
        return f"{behind}: suggestive ({corrected}, but only {seeds} seeds)"
    return f"{behind}: not told apart ({corrected}, {seeds} seeds)"


def clients(gap: Difference) -> str | None:
    """What these clients would say; it decides nothing."""
    if gap.clients_p is None:
        return None
    return (f"{gap.clients_better} of these clients are better off with {gap.label}, {gap.clients_worse} "
            f"with {gap.against} (Wilcoxon p {_p(gap.clients_p)}, describes these clients)")


def _name(results: Results) -> str:
    return results.metric.replace("_", " ")


def _level(results: Results) -> str:
    assert results.level is not None
    mean, low, high, seeds = results.level
    ends = ""
    if low is not None and high is not None:
        low, high = (max(0.0, low), min(1.0, high)) if is_share(results.metric) else (low, high)
        ends = f", 95 % interval {figure(results.metric, low)} to {figure(results.metric, high)}"
    return (f"test {_name(results)} {figure(results.metric, mean)} of the clients' own models on average "
            f"({times(seeds, 'seed')}{ends})")


def _others(results: Results) -> list[str]:
    gaps = results.differences
    seeds = gaps[0].interval.seeds
    if seeds == 1:
        return [f"The next is {gaps[0].against}, {_behind(results, gaps[0])}. One seed cannot say whether "
                "that would hold with another: repeat with --seeds 0,1,2,3,4."]
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


def _behind(results: Results, gap: Difference) -> str:
    size = figure(results.metric, abs(gap.interval.mean))
    return f"{size} behind" if gap.interval.mean >= 0 else f"{size} better, but with more clients failed"


def _alone(results: Results, best: Row) -> list[str]:
    if results.reference is None:
        return []
    if isinstance(results.plan.methods[best.label].algorithm, LocalTrain):
        return ["No method serves the clients better than training alone."]
    gain, worse = best.figures.get("gain"), best.figures.get("worse_off")
    if gain is None or worse is None:
        return []
    worse_off = round(worse.mean * best.beside_alone)
    verb = "is" if worse_off == 1 else "are"
    return [f"A client gains {figure(results.metric, gain.mean)} over training alone on average; "
            f"{worse_off:,} of {times(best.beside_alone, 'client')} {verb} worse off than alone."]


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}"
