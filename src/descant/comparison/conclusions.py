"""The conclusions of a comparison in words: the answer, and notes on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

from descant.algorithms import LocalTrain
from descant.comparison import budget, protection
from descant.comparison.agreement import Agreement, Appearance, Order, Ordering
from descant.comparison.outlook import MOST_SEEDS, hopeless, seconds, still_needed
from descant.comparison.results import Difference, Results, Share, missing_seeds
from descant.comparison.rows import Row
from descant.comparison.statistics import CONFIDENCE, ENOUGH_CLIENTS
from descant.core.metric import figure, is_share, title
from descant.core.units import duration, times

CLAIMED: dict[Appearance, str] = {
    "appears": "it appears in ours, significantly", "reversed": "in ours it is significantly the other way "
    "round", "open": "no significant difference in ours"}
MOST_NAMED = 15  # orderings of a kind that the answer names; all are in orderings.csv


def answer(results: Results) -> list[str]:
    """The answer, its main sentence first."""
    if not results.rows:
        return ["No run has finished yet."]
    troubles = [f"{label} diverged in {_in(share)} and is not compared: use smaller steps, or scale the "
                "features (data.scale)." for label, share in results.diverged.items()]
    troubles += _unfinished(results)
    if results.level is None:
        return [*troubles, f"Nothing can be compared: no client has a finite test {title(results.metric)} "
                           "with all methods."]
    if results.best is None:
        so_far = "" if len(results.rows) == len(results.plan.methods) else " so far"
        return [f"There is no other method to compare {results.compared[0]} with{so_far}. Its "
                f"{_level(results)}.", *troubles]
    best = next(row for row in results.rows if row.label == results.best)
    return [_headline(results), *_others(results), *troubles, *_open(results), *_elsewhere(results),
            *_other_metrics(results), *_alone(results, best), *_untuned(results)]


def notes(results: Results) -> list[str]:
    """What limits the answer."""
    methods, found = results.plan.methods, []
    if results.rows and (missing := missing_seeds(results)):
        lacking = "; ".join(f"{label} lacks seed {', '.join(map(str, seeds))}"
                            for label, seeds in missing.items())
        found.append(f"Runs are missing: {lacking}. Methods are compared over the seeds that all of them "
                     "have.")
    if (attack := results.plan.experiment.attack) is not None:
        found.append(f"{attack.share:.0%} of the clients attack ({attack.kind}), others in every repetition. "
                     "All figures are those of the honest ones.")
    found += protection.notes(results.finished)
    found += [f"{run} failed: {why}." for run, why in results.failures.items()]
    found += [f"In the grid of {family}, {label} is best on validation data and is compared with the other "
              "methods." for family, label in results.chosen.items()]
    found += [f"{label} is not compared: {why}." for label, why in results.left_out.items()
              if methods[label].grid is None and label not in results.diverged]
    found += [f"{label} leaves {count:.2g} client{'' if count == 1 else 's'} with a diverged model (mean "
              "over the repetitions). Methods are ranked by this number first."
              for label, count in results.lost.items() if count]
    if results.plan.population == "clients" and results.level is not None and not results.has_rows:
        found.append(f"The intervals exclude the noise of the test rows: {title(results.metric)} has no "
                     "value per row, or an older version measured it (rerun the same command to measure it "
                     "again).")
    if results.plan.population == "new clients" and 1 < results.people < ENOUGH_CLIENTS:
        found.append(f"{results.people} clients are few: the intervals assume that clients are normally "
                     "distributed.")
    if results.best in results.unfinished:
        found.append(f"{results.best} was still improving at the last round: its lead may grow with more "
                     "training.")
    found += [f"{run.label}, seed {run.seed}, has {run.rounds} rounds instead of "
              f"{methods[run.label].rounds}: it was extended beyond its budget."
              for run in results.finished if run.rounds > methods[run.label].rounds]
    found += [*results.plan.remarks(), *budget.notes(results.plan, results.finished)]
    found += [f"{label}: {caution}." for label, method in methods.items()
              for caution in method.algorithm.cautions()]
    if added := [method for method in methods.values() if method.added and not method.tuned]:
        names, solver = _and([method.label for method in added]), getattr(added[0].asked, "solver", None)
        rate = "" if solver is None else f" with {solver.name} at {solver.lr:g}"
        found.append(f"{names} {'was' if len(added) == 1 else 'were'} added{rate}, since every comparison "
                     "needs these baselines. To use other settings, name them yourself or use --tune.")
    return found


def paper(results: Results) -> list[str]:
    """What is published beside ours."""
    found = results.paper
    if found is None or not results.rows:
        return []
    source, metric = found.paper.source, found.paper.metric
    claims = [f"{source}, {each.claim.says}: {CLAIMED[each.appearance]} (in ours {each.claim.better} "
              f"{figure(metric, each.levels[0])}, {each.claim.worse} {figure(metric, each.levels[1])})."
              for each in found.claims]
    claims += [f"{source}, {each.claim.says}: this {'holds' if each.holds else 'does not hold'} in ours "
               f"({each.claim.method} {figure(metric, each.level)}, {each.best} "
               f"{figure(metric, each.level_of_best)})." for each in found.near]
    if not found.ours:
        return claims or [f"{source}: none of its methods has a figure in ours yet."]
    return [*_figures_beside(found, source, metric), *claims]


def _figures_beside(found: Agreement, source: str, metric: str) -> list[str]:
    """How far figures and orders are those of the paper."""
    gaps = sorted((found.gap(label).mean, label) for label in found.ours)
    said = [f"{source}: {title(metric)} in ours less the paper's is {_signed(metric, gaps[0][0])} "
            f"({gaps[0][1]}) to {_signed(metric, gaps[-1][0])} ({gaps[-1][1]})."]
    orders = [order for order in found.orders if not math.isnan(order.tau.mean)]
    if not orders:
        return said
    said += [_tau(order, found) for order in orders]
    if found.repetitions < 2:
        return [*said, "Which of the paper's orderings appear takes several repetitions."]
    of = {kind: found.with_appearance(kind) for kind in get_args(Appearance)}
    said.append(f"Of the paper's {times(len(found.orderings), 'ordering')}, {len(of['appears'])} "
                f"{'appears' if len(of['appears']) == 1 else 'appear'} significantly in ours, "
                f"{len(of['reversed'])} significantly the other way round, and {len(of['open'])} not "
                f"significantly in either way ({_covered(found)}).")
    heads = {"appears": "In ours too", "reversed": "The other way round", "open": "Not significant"}
    return said + [f"{heads[kind]}: {_orderings(some)}." for kind, some in of.items()
                   if 0 < len(some) <= MOST_NAMED]


def _tau(order: Order, found: Agreement) -> str:
    tau = order.tau
    ends = "" if tau.low is None or tau.high is None else (
        f" ({100 * CONFIDENCE:.0f} % interval {tau.low:.2f} to {tau.high:.2f} over "
        f"{times(found.repetitions, 'repetition')})")
    instead = "" if order.variant is None else (
        f", with {order.variant} in the place of {found.paper.figures[order.variant].of},")
    return (f"Kendall's tau of the paper's order of {len(order.methods)} methods and ours{instead} is "
            f"{tau.mean:.2f}{ends}.")


def _covered(found: Agreement) -> str:
    """What the tests of the orderings speak of."""
    covered = {each.covers_rows for each in found.orderings}
    alone = "other repetitions of these rows and clients"
    if covered == {True, False}:
        return f"for new rows of these clients; beside models for all, for {alone}"
    return f"for {'new rows of these clients' if True in covered else alone}"


def _orderings(some: Sequence[Ordering]) -> str:
    behind: dict[str, list[str]] = {}
    for each in some:
        behind.setdefault(each.better, []).append(each.worse)
    return "; ".join(f"{better} above {_and(worse)}" for better, worse in behind.items())


def _signed(metric: str, gap: float) -> str:
    return f"{100 * gap:+.1f} points" if is_share(metric) else f"{gap:+.4g}"


def population(results: Results) -> str:
    """What the answer is about."""
    people = times(results.people, "client")
    return {"rows": f"these test rows of {people}", "clients": f"new rows of these {people}",
            "new clients": f"clients like these {results.people:,}"}[results.plan.population]


def metric_why(results: Results) -> str | None:
    """Why another metric than the usual one decides."""
    why = results.plan.metric_why
    return None if why is None or results.metric != results.plan.metric else (
        f"{title(results.metric).capitalize()} decides because {why}.")


def confidence(results: Results) -> str:
    """Of the simultaneous intervals; several looks at the results make them wider."""
    return f"{100 * (1 - results.analysis.level) if results.analysis else 100 * CONFIDENCE:.3g} %"


def difference(results: Results, gap: Difference) -> str:
    """Whether the best method differs from another, in one line."""
    if gap.verdict == "diverged":
        return f"{gap.against} diverged in {_in(results.diverged[gap.against])}"
    if gap.p is None:
        return f"{gap.against} is {_size(results, gap)} behind in one repetition, which gives no interval"
    size = f"{_size(results, gap)}, {_range(results, gap)}; p {_p(gap.p)}"
    if gap.mean < 0:
        return f"{gap.against} has the better mean ({size}), but more clients with a diverged model"
    if gap.verdict == "withheld":
        return (f"no verdict on {gap.against} ({size}): it was still improving at the last round in "
                f"{_in(results.unfinished[gap.against])}")
    both = f"{gap.label} and {gap.against}"
    return {"better": f"{gap.label} is significantly better than {gap.against} ({size})",
            "equivalent": f"{both} are equivalent ({size})",
            "no difference found": f"no significant difference between {both} ({size})"}[gap.verdict]


def clients(gap: Difference) -> str | None:
    """How these clients fare; it decides nothing."""
    if gap.clients_p is None:
        return None
    return (f"{gap.clients_better} of these clients do better with {gap.label}, {gap.clients_worse} with "
            f"{gap.against} (Wilcoxon p {_p(gap.clients_p)}; describes these clients only)")


def _level(results: Results) -> str:
    assert results.level is not None
    mean, low, high, repetitions = results.level
    ends = ""
    if low is not None and high is not None:
        ends = (f" ({100 * CONFIDENCE:.0f} % interval {figure(results.metric, low)} to "
                f"{figure(results.metric, high)})")
    return (f"clients' own models reach a mean test {title(results.metric)} of "
            f"{figure(results.metric, mean)}{ends} on {population(results)} "
            f"({times(repetitions, 'repetition')})")


def _headline(results: Results) -> str:
    analysis = results.analysis
    assert analysis is not None
    count, p = len(results.compared), analysis.p
    if p is None:
        return f"{results.best} ranks first: its {_level(results)}."
    if p >= analysis.level:
        return (f"No significant difference between the {count} methods (p {_p(p)}). {results.best} ranks "
                f"first: its {_level(results)}.")
    overall = f"The {count} methods differ significantly (p {_p(p)}). " if count > 2 else ""
    is_best = any(gap.verdict == "better" for gap in results.differences)
    return f"{overall}{results.best} {'is best' if is_best else 'ranks first'}: its {_level(results)}."


def _others(results: Results) -> list[str]:
    gaps = [gap for gap in results.differences if gap.verdict != "diverged"]
    if results.repetitions == 1:
        return [f"{gaps[0].against} is next, {_size(results, gaps[0])} behind. One repetition gives no "
                "intervals and no verdict: repeat with --seeds 0,1,2,3,4."]
    found, ranges = [], f"Ranges are simultaneous {confidence(results)} intervals."
    better = [gap for gap in gaps if gap.verdict == "better"]
    close = [gap for gap in gaps if gap.verdict == "no difference found"]
    if better:
        found.append(f"{results.best} is significantly better than {_sizes(results, better)}. {ranges}")
    if equal := [gap.against for gap in gaps if gap.verdict == "equivalent"]:
        least = "1 point" if is_share(results.metric) else "1 %"
        found.append(f"It is equivalent to {_and(equal)}: the difference is less than {least}.")
    if close:
        found.append(f"No significant difference from {_sizes(results, close)}."
                     f"{'' if better else f' {ranges}'}")
    if failed := [gap.against for gap in gaps if gap.mean < 0 and gap.verdict == "withheld"]:
        means = "has a better mean" if len(failed) == 1 else "have better means"
        found.append(f"{_and(failed)} {means}, but more clients with a diverged model.")
    return found


def _unfinished(results: Results) -> list[str]:
    """Methods that are behind because their training was too short."""
    behind = [f"{label} (in {_in(results.unfinished[label])})" for label in results.compared[1:]
              if label in results.unfinished]
    return [f"No verdict on {_and(behind)}: still improving at the last round. Train longer, or use --budget "
            "converge."] if behind else []


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
        which = f" the difference from {_and(never)}" if hopeful else " this"
        found.append(f"More repetitions are unlikely to settle{which}: {hopeless(results)}.")
    return found


def _elsewhere(results: Results) -> list[str]:
    """Whether the answer holds for other clients."""
    better = [gap.against for gap in results.differences if gap.verdict == "better"]
    if results.plan.population != "clients" or not better:
        return []
    beyond = results.beyond
    if beyond is None:
        return [f"Whether this holds for other clients is unknown: that takes {ENOUGH_CLIENTS} clients, and "
                f"there {'is' if results.people == 1 else 'are'} {results.people}."]
    still = [label for k, label in enumerate(results.compared[1:], 1) if label in better
             and (p := beyond.beside(0, k).p) is not None and p < beyond.level]
    whom = f"clients like these {results.people:,}"
    if still == better:
        return [f"The same holds for other {whom}."]
    if not still:
        return [f"For other {whom}, none of these differences is significant."]
    return [f"For other {whom}, only the difference from {_and(still)} is significant."]


def _other_metrics(results: Results) -> list[str]:
    return [f"By {title(other.metric)}, {other.best} would be best "
            f"({figure(other.metric, other.levels[0])} against {figure(other.metric, other.levels[1])}; the "
            f"difference is {'' if other.significant else 'not '}significant)." for other in results.others]


def gained(results: Results) -> str:
    """What the best method's clients have over training alone, with the figures of both."""
    rows = {row.label: row for row in results.rows}
    if results.best is None or results.reference not in rows:
        return "What is gained over training alone is not known: there is no LocalTrain beside a method."
    own, alone = (figure(results.metric, rows[label].figures["personal"].mean)
                  for label in (results.best, results.reference))
    words = f"Alone, clients reach a test {title(results.metric)} of {alone}; with {results.best}, {own}."
    return " ".join([words, *_alone(results, rows[results.best])])


def _alone(results: Results, best: Row) -> list[str]:
    if results.reference is None or results.repetitions < 1:
        return []
    if isinstance(results.plan.methods[best.label].algorithm, LocalTrain):
        return ["No method is better than training alone."]
    gain, worse = best.figures.get("gain"), best.figures.get("worse_off")
    if gain is None or worse is None or math.isnan(gain.mean):
        return []
    worse_off = round(worse.mean * best.beside_alone)
    amount, verb = _points(results, abs(gain.mean)), "is" if worse_off == 1 else "are"
    change = f"gains {amount} over" if gain.mean >= 0 else f"loses {amount} against"
    return [f"A client {change} training alone on average; {worse_off:,} of "
            f"{times(best.beside_alone, 'client')} {verb} worse off."]


def _untuned(results: Results) -> list[str]:
    untuned = [label for label in results.compared if not results.plan.methods[label].tuned]
    if not untuned:
        return []
    if len(untuned) == len(results.compared):
        return ["No method was tuned: --tune may change the ranking."]
    return [f"Not tuned: {_and(untuned)}."]


# -- numbers ---------------------------------------------------------------------------------------------


def _in(share: Share) -> str:
    return f"{share.some} of {times(share.of, 'repetition')}"


def _points(results: Results, value: float) -> str:
    return f"{100 * value:.1f} points" if is_share(results.metric) else figure(results.metric, value)


def _sizes(results: Results, gaps: Sequence[Difference]) -> str:
    return _and([f"{gap.against} ({_size(results, gap)}, {_range(results, gap)})" for gap in gaps])


def _size(results: Results, gap: Difference) -> str:
    """How far apart two methods are: in points, or in percent of a loss."""
    if gap.ratio is not None:
        return f"{_percent(abs(gap.ratio.mean))} %"
    return _points(results, abs(gap.mean))


def _range(results: Results, gap: Difference) -> str:
    """The simultaneous interval in the same unit, as seen by the method that is ahead."""
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
