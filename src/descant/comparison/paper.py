"""What a paper has published for the methods of an experiment: the [paper] of its file.

    [paper]
    source = "Table 1, FMNIST-MCLR"
    metric = "accuracy"
    column = "personal_pooled"
    percent = true

    [paper.figures]
    pfedme = 97.60
    fedavg = { value = 82.75, column = "global_pooled" }
    "pfedme (code)" = { of = "pfedme" }  # another reading of the method, beside the same printed figure

    [[paper.claims]]  # what is said in words, or drawn: one method ahead of another
    says = "mh is ahead of pFedMe (Figure 2)"
    better = "mh"
    worse = "pfedme"

    [[paper.claims]]  # or one method near the best of others
    says = "CGPFL-Heur is within one point of the best K (Figure 3)"
    method = "CGPFL-Heur"
    best_of = ["K = 1", "K = 4", "K = 10"]
    near = 0.01
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from descant.core.metric import is_share, title
from descant.errors import UsageError, unknown

COLUMNS = {  # of results.csv, with what they are for people; a figure is compared with one of them
    "personal": "the clients' own models, mean over the clients",
    "personal_last": "the clients' own models after the last round, mean over the clients",
    "personal_pooled": "the clients' own models, all test rows together",
    "global": "the model for all, mean over the clients",
    "global_last": "the model for all after the last round, mean over the clients",
    "global_pooled": "the model for all, all test rows together",
    "everywhere": "the clients' own models on all clients' test rows (eval.rows), mean over the clients",
    "everywhere_last": "the same after the last round",
}
FIELDS = ("source", "metric", "column", "percent", "figures", "claims", "repetitions", "needs")
NEEDS = {  # what an item takes that a plain machine does not have
    "gpu": "a GPU",
    "data": "data that cannot be downloaded freely, or must be prepared by hand",
}
REPETITIONS = 5


class Figure(NamedTuple):
    """What is printed for a method."""

    value: float  # a share where the metric is one, also where per cent are printed
    column: str  # what of ours it is compared with
    of: str | None = None  # the label whose printed figure this is, where a method is read in two ways


class PaperClaim(NamedTuple):
    """What a paper says of two methods without a figure."""

    says: str
    better: str
    worse: str
    column: str


class NearClaim(NamedTuple):
    """What a paper says of a method that is nearly as good as the best of others, or better."""

    says: str
    method: str
    best_of: tuple[str, ...]
    near: float  # in the unit of the metric
    column: str


class Paper(NamedTuple):
    """Published figures."""

    source: str
    metric: str
    figures: dict[str, Figure]  # by label
    claims: tuple[PaperClaim, ...] = ()
    repetitions: int = REPETITIONS  # of which the paper's figures are means; ours where it does not say
    needs: str | None = None  # of NEEDS
    near: tuple[NearClaim, ...] = ()

    @classmethod
    def parse(cls, table: Any, labels: Collection[str], metrics: Collection[str]) -> Paper:
        """The figures of a [paper] for methods of these labels, by one of the metrics that can be had."""
        if not isinstance(table, Mapping):
            raise UsageError(f"[paper] must be a section, not {table!r}")
        for field in table:
            if field not in FIELDS:
                raise unknown("paper field", field, FIELDS)
        for field in ("source", "metric"):
            if field not in table:
                raise UsageError(f"paper.{field} is missing: it has no default")
        if "figures" not in table and "claims" not in table:
            raise UsageError("paper.figures is missing: it has no default; where a paper prints no figures, "
                             "[[paper.claims]] say which method it has ahead of which")
        source, metric, figures = table["source"], table["metric"], table.get("figures", {})
        if not isinstance(source, str) or not source.strip():
            raise UsageError("paper.source must say where the figures are printed, such as "
                             f'"Table 1, FMNIST-MCLR", not {source!r}')
        if metric not in metrics:
            raise unknown("paper.metric", metric, metrics)
        percent = table.get("percent", False)
        if not isinstance(percent, bool):
            raise UsageError(f"paper.percent must be true or false, not {percent!r}")
        if percent and not is_share(metric):
            raise UsageError(f"paper.percent is for shares, and {title(metric)} is not one: leave it out")
        if not isinstance(figures, Mapping) or ("figures" in table and not figures):
            raise UsageError("paper.figures must be a section with a figure for each method, such as "
                             f"pfedme = 0.976, not {figures!r}")
        for label in figures:
            if label not in labels:
                raise unknown("method in paper.figures", label, labels)
        usual = _column(table.get("column", "personal"), "paper.column")
        found = _figures(figures, usual, metric, percent=percent)
        repetitions, needs = table.get("repetitions", REPETITIONS), table.get("needs")
        if isinstance(repetitions, bool) or not isinstance(repetitions, int) or repetitions < 1:
            raise UsageError(f"paper.repetitions must be a whole number from 1, not {repetitions!r}")
        if needs is not None and needs not in NEEDS:
            raise unknown("paper.needs", needs, NEEDS)
        orders, near = _claims(table.get("claims", []), labels, usual, metric)
        return cls(source.strip(), metric, found, orders, repetitions, needs, near)

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Paper:
        """What `dump` wrote."""
        return cls(table["source"], table["metric"],
                   {label: Figure(*figure) for label, figure in table["figures"].items()},
                   tuple(PaperClaim(*claim) for claim in table.get("claims", ())),
                   table.get("repetitions", REPETITIONS), table.get("needs"),
                   tuple(NearClaim(says, method, tuple(best_of), near, column)
                         for says, method, best_of, near, column in table.get("near", ())))

    def dump(self) -> dict[str, Any]:
        return self._asdict()


def _column(name: Any, where: str) -> str:
    if not isinstance(name, str) or name not in COLUMNS:
        raise unknown(where, name, COLUMNS)
    return name


def _claims(listed: Any, labels: Collection[str], usual: str, metric: str
            ) -> tuple[tuple[PaperClaim, ...], tuple[NearClaim, ...]]:
    if not isinstance(listed, list) or not all(isinstance(claim, Mapping) for claim in listed):
        raise UsageError("paper.claims must be sections, each [[paper.claims]] with says, better and worse")
    orders, near = [], []
    for k, claim in enumerate(listed):
        where = f"paper.claims[{k}]"
        if "best_of" in claim:
            near.append(_near(claim, where, labels, usual, 1.0 if is_share(metric) else math.inf))
            continue
        column = _claim(claim, where, PaperClaim._fields, usual)
        better, worse = (_method(claim, where, field, labels) for field in ("better", "worse"))
        if better == worse:
            raise UsageError(f"{where} has {better!r} ahead of itself: name two methods")
        orders.append(PaperClaim(claim["says"], better, worse, column))
    return tuple(orders), tuple(near)


def _near(claim: Mapping[str, Any], where: str, labels: Collection[str], usual: str, most: float
          ) -> NearClaim:
    column = _claim(claim, where, NearClaim._fields, usual)
    method, others, near = _method(claim, where, "method", labels), claim["best_of"], claim.get("near")
    if not isinstance(others, list) or not others:
        raise UsageError(f"{where}.best_of must be a list of methods, not {others!r}")
    for other in others:
        if other not in labels or other == method:
            raise unknown(f"method in {where}.best_of", other, [label for label in labels if label != method])
    if isinstance(near, bool) or not isinstance(near, int | float) or not 0 <= near < most:
        unit = "in the unit of the metric" if most == math.inf else "below 1, a share: 0.01 is one point"
        raise UsageError(f"{where}.near must be a number from 0, {unit}, not {near!r}")
    return NearClaim(claim["says"], method, tuple(others), float(near), column)


def _claim(claim: Mapping[str, Any], where: str, fields: Collection[str], usual: str) -> str:
    """Its column, once its fields are known and it says something."""
    for field in claim:
        if field not in fields:
            raise unknown(f"{where} field", field, fields)
    if not isinstance(claim.get("says"), str):
        raise UsageError(f"{where}.says is missing, or no text")
    return _column(claim.get("column", usual), f"{where}.column")


def _method(claim: Mapping[str, Any], where: str, field: str, labels: Collection[str]) -> str:
    label = claim.get(field)
    if not isinstance(label, str):
        raise UsageError(f"{where}.{field} is missing, or no text")
    if label not in labels:
        raise unknown(f"method in {where}.{field}", label, labels)
    return label


def _figures(given: Mapping[str, Any], usual: str, metric: str, *, percent: bool) -> dict[str, Figure]:
    """By label; those that are `of` another label have its figure."""
    others = {label: figure["of"] for label, figure in given.items()
              if isinstance(figure, Mapping) and "of" in figure}
    printed = {label: _figure(label, figure, usual, metric, percent=percent)
               for label, figure in given.items() if label not in others}
    for label, of in others.items():
        if len(given[label]) > 1:
            raise UsageError(f"paper.figures.{label} has the figure of {of!r}: leave out all but `of`")
        if not isinstance(of, str) or of not in printed:
            raise unknown(f"paper.figures.{label}.of", of, printed)
    return {label: printed[others[label]]._replace(of=others[label]) if label in others else printed[label]
            for label in given}


def _figure(label: str, given: Any, usual: str, metric: str, *, percent: bool) -> Figure:
    where = f"paper.figures.{label}"
    column = usual
    if isinstance(given, Mapping):
        for field in given:
            if field not in Figure._fields:
                raise unknown(f"{where} field", field, Figure._fields)
        column = _column(given.get("column", usual), f"{where}.column")
        given = given.get("value")
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise UsageError(f"{where} must be a number, or a table such as "
                         f'{{ value = 0.976, column = "global" }}, not {given!r}')
    value = given / 100 if percent else float(given)
    if is_share(metric) and not 0 <= value <= 1:
        most, remedy = (100, "correct it") if percent else (1, "for per cent, set percent = true in [paper]")
        raise UsageError(f"{where} is {given:g}, and {title(metric)} lies between 0 and {most}: {remedy}")
    return Figure(value, column)
