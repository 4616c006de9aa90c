"""The answer of a comparison in plain words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from descant.algorithms import LocalTrain
from descant.comparison.budget import spent
from descant.comparison.execute import MOST_SEEDS
from descant.comparison.results import (
    Difference,
    Results,
    Row,
    hopeless,
    missing_seeds,
    seconds,
    still_needed,
)
from descant.comparison.statistics import ENOUGH_CLIENTS
from descant.core.units import duration, figure, is_share, times

MISMATCH = 0.05  # a share of the budget that is worth telling


def answer(results: Results) -> list[str]:
    """What came out, the main thing first."""
    if not results.rows:
        return ["No run has finished yet."]
    troubles = [*_diverged(results), *_unfinished(results)]
    if results.level is None:
        return [*troubles, f"No client has a finite test {_name(results)} with all methods: nothing can be "
                           "compared."]
    if results.best is None:
        return [f"{results.compared[0]} has {_level(results)}: there is no other method to compare it with"
                f"{'' if len(results.rows) == len(results.plan.methods) else ' yet'}.", *troubles]
    best = next(row for row in results.rows if row.label == results.best)
    return [_headline(results), *_others(results), *troubles, *_open(results), *_elsewhere(results),
            *_other_metrics(results), *_alone(results, best), *_untuned(results)]


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
              if methods[label].grid is None and label not in results.diverged]
    found += [f"{label} gives {count:g} of its clients a model that has diverged, on average over the "
              "repetitions: that counts before any other figure."
              for label, count in results.lost.items() if count]
    if results.population == "clients" and results.level is not None and not results.has_rows:
        found.append(f"The intervals leave out the noise of the test rows: {_name(results)} has no value for "
                     "each row, or an older version measured it (the same command again measures it anew).")
    if results.population == "new clients" and 1 < results.people < ENOUGH_CLIENTS:
        found.append(f"{results.people} clients say little about others: their intervals rest on the "
                     "assumption that clients are spread like a normal distribution.")
    if results.best in results.unfinished:
        found.append(f"{results.best} was still improving at the last round: with more training, its lead "
                     "may grow.")
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


def population(results: Results) -> str:
    """Of what the answer speaks."""
    people = times(results.people, "client")
    return {"rows": f"these test rows of {people}", "clients": f"new rows of these {people}",
            "new clients": f"clients like these {results.people:,}"}[results.population]


def metric_why(results: Results) -> str | None:
    """Why another metric than accuracy decides, if the plan says so."""
    why = results.plan.metric_why
    return None if why is None or results.metric != results.plan.metric else (
        f"{_name(results).capitalize()} decides, since {why}.")


def difference(results: Results, gap: Difference) -> str:
    """Whether the best method differs from another, in one line."""
    if gap.verdict == "diverged":
        share = results.diverged[gap.against]
        return f"{gap.against} diverged in {share.some} of {times(share.of, 'repetition')}"
    if gap.p is None:
        return (f"{gap.against} is {_size(results, gap)} behind in one repetition, which says nothing about "
                "another")
    size = f"by {_size(results, gap)}, {_range(results, gap)}; p {_p(gap.p)}"
    if gap.mean < 0:
        return f"{gap.against} has the better figures ({size}), but fails more clients"
    if gap.verdict == "withheld":
        share = results.unfinished[gap.against]
        return (f"no verdict: {gap.against} is behind ({size}), but was still improving at the last round "
                f"({share.some} of {times(share.of, 'repetition')})")
    if gap.verdict == "better":
        return f"{gap.label} is significantly better than {gap.against} ({size})"
    if gap.verdict == "equivalent":
        return f"{gap.label} and {gap.against} are as good as each other ({size})"
    return f"no significant difference between {gap.label} and {gap.against} (ahead {size})"


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
    mean, low, high, repetitions = results.level
    ends = ""
    if low is not None and high is not None:
        ends = f", 95 % interval {figure(results.metric, low)} to {figure(results.metric, high)}"
    return (f"test {_name(results)} {figure(results.metric, mean)} of the clients' own models "
            f"on {population(results)} ({times(repetitions, 'repetition')}{ends})")


def _headline(results: Results) -> str:
    analysis = results.analysis
    assert analysis is not None
    count, p = len(results.compared), analysis.p
    if p is None:
        return f"{results.best} is best: {_level(results)}."
    if p >= analysis.level:
        return (f"No significant difference between the {count} methods (p {_p(p)}); {results.best} is "
                f"ahead: {_level(results)}.")
    overall = f"The {count} methods differ (p {_p(p)}); " if count > 2 else ""
    is_best = any(gap.verdict == "better" for gap in results.differences)
    return f"{overall}{results.best} is {'best' if is_best else 'ahead'}: {_level(results)}."


def _others(results: Results) -> list[str]:
    gaps = [gap for gap in results.differences if gap.verdict != "diverged"]
    if results.repetitions == 1:
        return [f"The next is {gaps[0].against}, {_size(results, gaps[0])} behind. One repetition cannot say "
                "whether that would hold in another, and gives no intervals: repeat with --seeds 0,1,2,3,4."]
    found = []
    if better := [gap for gap in gaps if gap.verdict == "better"]:
        found.append(f"{results.best} is significantly better than " + _and(
            [f"{gap.against} (by {_size(results, gap)}, {_range(results, gap)})" for gap in better]) + ".")
    if equal := [gap.against for gap in gaps if gap.verdict == "equivalent"]:
        least = "1 point" if is_share(results.metric) else "1 %"
        found.append(f"It is as good as {_and(equal)}: the difference is less than {least}.")
    if close := [gap for gap in gaps if gap.verdict == "no difference found"]:
        lead = "No significant difference from" if better or equal else "It is ahead of"
        found.append(f"{lead} " + _and(
            [f"{gap.against} (by {_size(results, gap)}, {_range(results, gap)})" for gap in close]) + ".")
    failed = [gap.against for gap in gaps if gap.mean < 0 and gap.verdict == "withheld"]
    if failed:
        found.append(f"{_and(failed)} {'has' if len(failed) == 1 else 'have'} better figures, but "
                     f"{'fails' if len(failed) == 1 else 'fail'} more clients.")
    return found


def _diverged(results: Results) -> list[str]:
    return [f"{label} diverged in {share.some} of {times(share.of, 'repetition')} and is not compared: try "
            "smaller steps, or scale the features (data.scale)." for label, share in results.diverged.items()]


def _unfinished(results: Results) -> list[str]:
    """Methods that are behind because they have not been trained to their end."""
    behind = [label for label in results.compared[1:] if label in results.unfinished]
    told = [f"{label} (in {share.some} of {times(share.of, 'repetition')})" for label in behind
            for share in [results.unfinished[label]]]
    if not told:
        return []
    was = "it was" if len(told) == 1 else "they were"
    return [f"No verdict about {_and(told)}: {was} still improving at the last round. Train longer, or use "
            "--budget converge."]


def _open(results: Results) -> list[str]:
    """What it would take to settle the rest."""
    needed = still_needed(results)
    hopeful = {label: more for label, more in needed.items() if more is not None}
    never = [label for label in needed if label not in hopeful]
    found = []
    if hopeful:
        more = max(hopeful.values())
        how = "; --until-decided adds them" if results.repetitions + more <= MOST_SEEDS else ""
        found.append(f"{times(more, 'more repetition')} would probably settle the difference from "
                     f"{_and([*hopeful])} (about {duration(more * seconds(results))} of training{how}).")
    if never:
        found.append(f"No number of repetitions is likely to settle that from {_and(never)}: "
                     f"{hopeless(results)}." if hopeful else
                     f"More repetitions are not likely to settle this: {hopeless(results)}.")
    return found


def _elsewhere(results: Results) -> list[str]:
    """Whether the answer would hold for other clients."""
    better = [gap.against for gap in results.differences if gap.verdict == "better"]
    if results.population != "clients" or not better:
        return []
    if results.beyond is None:
        return [f"{times(results.people, 'client')} {'is' if results.people == 1 else 'are'} too few to say "
                f"whether it would hold for others (it takes {ENOUGH_CLIENTS})."]
    beyond = results.beyond
    still = [label for k, label in enumerate(results.compared[1:], 1) if label in better
             and (p := beyond.beside(0, k).p) is not None and p < beyond.level]
    whom = f"clients like these {results.people:,}"
    if still == better:
        return [f"The same holds for other {whom}."]
    if not still:
        return [f"For other {whom}, none of this is significant."]
    return [f"For other {whom}, only the difference from {_and(still)} is significant."]


def _other_metrics(results: Results) -> list[str]:
    return [f"By {other.metric.replace('_', ' ')}, {other.best} would be best "
            f"({figure(other.metric, other.levels[0])} against {figure(other.metric, other.levels[1])}, "
            f"{'a' if other.significant else 'no'} significant difference)." for other in results.others]


def _alone(results: Results, best: Row) -> list[str]:
    if results.reference is None or results.repetitions < 1:
        return []
    if isinstance(results.plan.methods[best.label].algorithm, LocalTrain):
        return ["No method did better than training alone."]
    gain, worse = best.figures.get("gain"), best.figures.get("worse_off")
    if gain is None or worse is None or math.isnan(gain.mean):
        return []
    worse_off = round(worse.mean * best.beside_alone)
    verb = "is" if worse_off == 1 else "are"
    return [f"A client gains {_points(results, gain.mean)} over training alone on average; "
            f"{worse_off:,} of {times(best.beside_alone, 'client')} {verb} worse off than alone."]


def _untuned(results: Results) -> list[str]:
    untuned = [label for label in results.compared if not results.plan.methods[label].tuned]
    if not untuned:
        return []
    if len(untuned) == len(results.compared):
        return ["All methods have the settings they were given, untuned: --tune might change the order."]
    return [f"Not tuned: {_and(untuned)}."]


# -- numbers ---------------------------------------------------------------------------------------------


def _points(results: Results, value: float) -> str:
    return f"{100 * value:.1f} points" if is_share(results.metric) else figure(results.metric, value)


def _size(results: Results, gap: Difference) -> str:
    """How far apart two methods are: in points, or in percent of a loss."""
    if gap.ratio is not None:
        return f"{_percent(abs(gap.ratio.mean))} %"
    return _points(results, abs(gap.mean))


def _range(results: Results, gap: Difference) -> str:
    """The simultaneous interval, in the same unit, as seen by who is ahead."""
    low, high = (gap.low, gap.high) if gap.ratio is None else (gap.ratio.low, gap.ratio.high)
    assert low is not None
    assert high is not None
    if (gap.mean if gap.ratio is None else gap.ratio.mean) < 0:
        low, high = -high, -low
    if gap.ratio is not None:
        return f"{_percent(low)} to {_percent(high)}"
    if is_share(results.metric):
        return f"{100 * max(low, -1.0):.1f} to {100 * min(high, 1.0):.1f}"
    return f"{figure(results.metric, low)} to {figure(results.metric, high)}"


def _percent(log_ratio: float) -> str:
    """By how many percent a loss is lower."""
    return f"{-100 * math.expm1(-log_ratio):.3g}"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}"
