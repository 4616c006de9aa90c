"""Advice for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding

from descant.core import fields
from descant.experiment.advise import Advice
from descant.experiment.catalogue import as_toml
from descant.experiment.site_privacy import Site
from descant.priors.adaptive import Choice
from descant.view.tables import table


def show_advice(console: Console, advice: Advice) -> None:
    """Print the estimates, the recommendation, the reasons, what was seen elsewhere, and how to use it."""
    for title, rows in (("estimated", estimated(advice)), ("recommended", recommended(advice))):
        console.print(table("lrp", [], ((f"{name:<22}", value, note) for name, value, note in rows),
                            title=title))
        console.print()
    for title, sentences in (("why", advice.reasons), ("seen in federations like this", advice.seen)):
        console.print(title)
        for sentence in sentences:
            console.print(Padding(f"- {sentence}", (0, 0, 0, 2), expand=False))
        console.print()
    console.print("to compare it, in the experiment file" if advice.is_disputed else
                  "to use it, in the experiment file")
    for line in toml(advice).splitlines():
        console.print(f"  {line}", soft_wrap=True)
    console.print("\nor on the command line")
    console.print(f"  {options(advice)}", soft_wrap=True)


def estimated(a: Advice) -> list[tuple[str, str, str]]:
    asked = "all were asked" if a.asked == a.clients else f"{a.asked:,} were asked"
    return [
        ("clients", f"{a.clients:,}", asked),
        ("rows of a client, n", f"{a.n:.6g}", "for training, on average"),
        ("parameters, d", f"{a.d:,}", ""),
        ("smoothness L", f"{a.L:.4g}", "the largest of the clients"),
        ("convexity mu", f"{a.mu:.4g}", f"the smallest of the clients, with a ridge of {a.ridge:.3g}"),
        ("condition kappa", f"{a.kappa:.4g}", "L / mu"),
        ("gradient noise rho", f"{a.rho:.4g}", "of single rows at the clients' own solutions"),
        ("heterogeneity R", f"{a.R:.4g}", "of the clients' own models, corrected for estimation noise"),
        ("", f"{a.R_naive:.4g}", "uncorrected"),
        ("", f"{a.R_max:.4g}", "of the farthest client, corrected"),
        *([] if a.transfer is None else [
            ("transfer", f"{100 * a.transfer:+.1f}", "points by which models of other clients predict better "
                                                     "than a client's own")]),
        ("regime", a.regime, f"R against 1/sqrt(n) = {a.n ** -0.5:.3g}"),
    ]


def recommended(a: Advice) -> list[tuple[str, str, str]]:
    return [
        ("lambda", f"{a.lam:.4g}", f"by the practical rule{_cap(a.practical)}"),
        ("", f"{a.theorem.lam:.4g}", f"by Theorem 1{_cap(a.theorem)}"),
        ("local steps K", f"{a.steps.K:,}", "in each round, on all rows of the client"),
        ("local step size eta", f"{a.steps.eta:.4g}", "1 / (lambda + L)"),
        ("global step size gamma", f"{a.steps.gamma:.4g}", "1 / (2 L_g)"),
        ("rounds", f"{a.rounds:,}", f"at most, until {a.eps:.3g} of the squared error is left"),
        ("gradients", f"{a.gradients:,}", "of each client, on all its rows"),
        *([] if a.cost is None else [
            ("cost", f"{a.cost:.3g}", "times the gradient steps of the experiment" + (
                "; the settings below stay within these" if a.cost > 1 else ""))]),
    ]


def toml(advice: Advice) -> str:
    """The settings as sections of an experiment file."""
    sections: dict[str, Any] = {}
    for path, value in advice.settings.items():
        fields.put(sections, path, value)
    lines = []
    for section, settings in sections.items():
        lines += [f"[{section}]", *(f"{field} = {as_toml(value)}" for field, value in settings.items())]
    return "\n".join(lines)


def options(advice: Advice) -> str:
    """The settings as options of `descant run`."""
    return " ".join(f"--set '{path}={as_toml(value)}'" if isinstance(value, dict) else f"--set {path}={value}"
                    for path, value in advice.settings.items())


def _cap(choice: Choice) -> str:
    return f"; capped from {choice.wanted:.4g}" if choice.capped else ""


def show_privacy(console: Console, sites: Sequence[Site]) -> None:
    """What epsilon the sites can hope for by the end of the run, for several noises."""
    if not sites:
        return
    noises = list(sites[0].epsilons)
    rows = [[site.which, f"{site.rows:,}", *(f"{site.epsilons[noise]:.3g}" for noise in noises)]
            for site in sites]
    console.print(table("lr" + "r" * len(noises), ["site", "rows", *(f"noise {noise:g}" for noise in noises)],
                        rows, title="epsilon by the end of the run, by privacy.noise"))
