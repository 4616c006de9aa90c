"""Page data as a comparison would give them, made from random numbers, and a browser to look at pages."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LABELS = ("localtrain", "fedavg", "fedprox", "pfedme", "ditto", "perfedavg", "cgpfl", "pfedbred", "fedmap",
          "fedavg, tuned after")
CHROMIUM = shutil.which("chromium")
COLUMNS = [
    {"key": "personal", "title": "personal", "help": "test accuracy of the personal models, mean of clients"},
    {"key": "global", "title": "global", "help": "test accuracy of the one global model"},
    {"key": "worst_decile", "title": "worst 10%", "help": "mean of the tenth of clients served worst"},
    {"key": "gain", "title": "gain", "help": "how much better a client is served than by training alone"},
    {"key": "worse_off", "title": "worse off", "help": "share of the clients served worse than alone"},
    {"key": "personal_auroc", "title": "auroc", "help": "of the clients' own models: area under the curve"},
    {"key": "personal_loss", "title": "loss", "help": "of the clients' own models: mean loss"},
    {"key": "bytes_per_client", "title": "per client", "help": "bytes sent and received by a client"},
    {"key": "grad_steps", "title": "steps", "help": "gradient steps of training"},
    {"key": "seconds", "title": "time", "help": "time of one run"},
]


def page_data(methods: int = 5, seeds: int = 3, rounds: int = 60, clients: int = 20, classes: int = 10,
              points: int = 13) -> dict[str, Any]:
    """A finished comparison; the first method trains alone and is what gains are measured against."""
    rng = np.random.default_rng(7)
    labels = [LABELS[k] if k < len(LABELS) else f"method {k}" for k in range(methods)]
    sizes = np.sort(rng.lognormal(4.5, 0.6, clients).astype(int) + 12)[::-1]
    names = [f"client {k}" for k in range(clients)]
    ability = rng.normal(0, 0.035, clients)
    curves, scores, table = {}, {}, []
    for k, label in enumerate(labels):
        final = 0.83 + 0.11 * math.sin(k * 1.3 + 0.4) ** 2 * (k > 0)
        curves[label] = _curve(rng, final, k, seeds, rounds, points)
        gain = rng.normal(0, 0.03, clients) + 0.4 * np.abs(ability) * (k > 0)
        scores[label] = [round(float(v), 4) for v in np.clip(final + ability + gain, 0, 1)]
        table.append({"label": label, "cells": _cells(curves[label], scores[label], rounds, k)})
    table.sort(key=lambda row: -row["cells"]["personal"]["mean"])
    for k, row in enumerate(table):
        row["best"] = k == 0
    ranked = [row["label"] for row in table]
    return {
        "title": f"digits, mclr: {methods} methods, {seeds} seeds", "live": False, "finished": True,
        "progress": [{"label": label, "seed": seed, "rounds": rounds, "of": rounds, "state": "done",
                      "note": ""} for label in labels for seed in range(seeds)],
        "answer": [
            f"{ranked[0]} is best: test accuracy 0.9364 of the clients' own models on average.",
            f"It is significantly better than {ranked[-1]} (by 10.1 points, 7.9 to 12.2).",
            f"No significant difference from {', '.join(ranked[1:2])}."],
        "notes": ["Three seeds tell large differences only; five or more are better."],
        "population_words": "This speaks of new rows of these clients.", "metric_why": None,
        "metric": "accuracy", "curve_metric": "accuracy", "lower_is_better": False, "confidence": "95 %",
        "columns": COLUMNS, "table": table, "paper": None,
        "methods": [{"label": label, "name": label.split(",")[0],
                     "settings": {"lam": 15.0 - k, "eta": 0.005, "local": {"steps": 20}},
                     "rounds": rounds, "added": k == 0, "tuned": {"lam": 15.0 - k} if k == 3 else None}
                    for k, label in enumerate(labels)],
        "curves": curves, "reference": labels[0],
        "clients": {"names": names, "n_train": (sizes * 0.75).astype(int).tolist(),
                    "n_test": (sizes * 0.25).astype(int).tolist(), "methods": scores},
        "differences": [_difference(rng, table[0], row, k) for k, row in enumerate(table) if k],
        "grids": [{"label": "pfedme", "field": "lam", "values": [0.1, 1.0, 10.0, 100.0],
                   "mean": [0.86, 0.9, 0.93, 0.89], "low": [0.85, 0.89, 0.925, 0.87],
                   "high": [0.87, 0.91, 0.935, 0.905]},
                  {"label": "ditto", "field": "lam", "values": [0.1, 1.0, 10.0, 100.0],
                   "mean": [0.88, 0.91, 0.9, 0.85], "low": [0.87, 0.905, 0.89, 0.83],
                   "high": [0.89, 0.915, 0.91, 0.87]}],
        "clusters": {"cgpfl": _clusters(rng, clients, rounds, points)} if methods > 6 else {},
        "federation": {
            "facts": {"dataset": "digits", "clients": f"{clients}", "partition": "classes, 2 per client",
                      "rows": f"{int(sizes.sum()):,}", "model": "mclr, 650 parameters"},
            "names": names,
            "sizes": {"train": (sizes * 0.6).astype(int).tolist(),
                      "validation": (sizes * 0.15).astype(int).tolist(),
                      "test": (sizes * 0.25).astype(int).tolist()},
            "classes": [rng.multinomial(n, rng.dirichlet(np.full(classes, 0.2))).tolist() for n in sizes],
            "class_names": [str(k) for k in range(classes)]},
        "tuning": {"pfedme": {"columns": ["trial", "lam", "eta", "validation accuracy"],
                              "rows": [[0, 1.0, 0.005, 0.9012], [1, 15.0, 0.005, 0.9310],
                                       [2, 30.0, 0.01, None]],
                              "best": 1}} if methods > 3 else {},
        "versions": {"descant": "0.3.0", "python": "3.11.2", "torch": "2.9.0", "numpy": "2.3.1"},
        "commands": ["descant compare experiment.toml --seeds 0,1,2 --out runs/digits",
                     "descant report runs/digits"],
        "experiment": '[data]\ndataset = "digits"\npartition = "classes"\n\n[train]\nrounds = 60\n',
    }


def nothing_yet(**changes: Any) -> dict[str, Any]:
    """A comparison that has just begun."""
    data = page_data()
    for run in data["progress"]:
        run.update(rounds=0, state="waiting")
    data["progress"][0].update(rounds=7, state="running")
    empty = {"finished": False, "answer": ["Nothing has finished yet."], "notes": [], "table": [],
             "curves": {}, "clients": {"names": [], "n_train": [], "n_test": [], "methods": {}},
             "differences": [], "grids": [], "clusters": {}, "tuning": {}}
    return {**data, **empty, **changes}


def _curve(rng: np.random.Generator, final: float, k: int, seeds: int, rounds: int, points: int
           ) -> dict[str, Any]:
    at = np.linspace(0, rounds, points).astype(int)

    def over_seeds(height: float) -> dict[str, Any]:
        rise = height - (height - 0.1) * np.exp(-at / rounds * (4 + k % 4))
        values = np.array([rise + rng.normal(0, 0.004) + rng.normal(0, 0.004, points) * (at > 0)
                           for _ in range(seeds)]).round(4)
        return {"mean": values.mean(0).round(4).tolist(), "low": values.min(0).tolist(),
                "high": values.max(0).tolist(),
                "seeds": {str(seed): values[seed].tolist() for seed in range(seeds)}}

    return {"round": at.tolist(), "steps": (at * 2000.0).tolist(),
            "bytes": (at * (5200.0 if k else 0.0)).tolist(), "personal": over_seeds(final),
            "global": over_seeds(final - 0.07) if k else None,
            "best_round": [int(at[-1 - seed % 3]) for seed in range(seeds)]}


def _cells(curve: dict[str, Any], scores: list[float], rounds: int, k: int) -> dict[str, Any]:
    def last(model: dict[str, Any] | None) -> dict[str, Any]:
        if model is None:
            return {"text": "-", "mean": None, "low": None, "high": None}
        mean, low, high = (model[key][-1] for key in ("mean", "low", "high"))
        return {"text": f"{mean:.4f} ± {(high - low) / 2:.4f}", "mean": mean, "low": low, "high": high}

    def plain(text: str, value: float) -> dict[str, Any]:
        return {"text": text, "mean": value, "low": None, "high": None}

    worst = float(np.mean(np.sort(scores)[:max(1, len(scores) // 10)]))
    loss, sent = 1.2 - curve["personal"]["mean"][-1], curve["bytes"][-1]
    return {"personal": last(curve["personal"]), "global": last(curve["global"]),
            "worst_decile": plain(f"{worst:.4f}", worst),
            "gain": plain(f"+{0.01 * k:.4f} ± 0.0031", 0.01 * k) if k else last(None),
            "worse_off": plain(f"{3 * k % 40} %", 3 * k % 40 / 100) if k else last(None),
            "personal_auroc": plain(f"{0.9 + 0.004 * k:.4f} ± 0.0040", 0.9 + 0.004 * k),
            "personal_loss": plain(f"{loss:.4g} ± 0.011", loss),
            "bytes_per_client": plain(f"{sent / 1e3:.1f} kB", sent),
            "grad_steps": plain(f"{rounds * 2000:,}", rounds * 2000.0),
            "seconds": plain(f"{4 + k * 1.7:.1f} s", 4 + k * 1.7)}


def _difference(rng: np.random.Generator, best: dict[str, Any], row: dict[str, Any], k: int
                ) -> dict[str, Any]:
    """The best beside the one that has the place `k`; the eighth has diverged, the sixth is not finished."""
    mean = best["cells"]["personal"]["mean"] - row["cells"]["personal"]["mean"]
    half = float(rng.uniform(0.008, 0.02))
    verdict = ("diverged" if k == 8 else "withheld" if k == 6 else "better" if mean > half
               else "equivalent" if mean + half < 0.01 else "no difference found")
    against = row["label"]
    return {"label": best["label"], "against": against, "mean": round(mean, 4), "low": round(mean - half, 4),
            "high": round(mean + half, 4), "p": 0.0004 if mean > half else 0.3, "verdict": verdict,
            "words": f"{against} is behind by {100 * mean:.1f} points: {verdict}.",
            "clients_words": f"17 of these clients are better off with {best['label']}." if k < 3 else None}


def _clusters(rng: np.random.Generator, clients: int, rounds: int, points: int) -> dict[str, Any]:
    at = np.linspace(0, rounds, points).astype(int)
    home = rng.integers(0, 4, clients)
    settle = rng.integers(0, rounds // 2 + 1, clients)
    return {"seed": 0, "rounds": at.tolist(),
            "of_client": [[int(home[c]) if r >= settle[c] else int(rng.integers(0, 4))
                           for c in range(clients)] for r in at]}


# -- a browser ---------------------------------------------------------------------------------------


_open: list[Browser] = []  # the browser that all pages share, while there is one


@contextmanager
def _launched() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def one_browser() -> Iterator[None]:
    """Until this ends, pages are opened in one browser."""
    with _launched() as browser:
        _open.append(browser)
        try:
            yield
        finally:
            _open.remove(browser)


@contextmanager
def browser_page(width: int = 1280, height: int = 900, dark: bool = False, **context: Any) -> Iterator[Page]:
    """A page that shares nothing with others; touches and clicks as on a desk."""
    with nullcontext(_open[0]) if _open else _launched() as browser:
        page = browser.new_page(viewport={"width": width, "height": height},
                                color_scheme="dark" if dark else "light", **context)
        try:
            yield page
        finally:
            page.close()


def draw_all(page: Page) -> None:
    """Scroll through the page until every chart of it is drawn, and back to its beginning."""
    for chart in page.locator(".chart").all():
        chart.scroll_into_view_if_needed()
        chart.locator("svg.main-svg").first.wait_for()
    page.evaluate("window.scrollTo(0, 0)")


def screenshot(html: Path, png: Path, width: int = 1280, height: int = 900, dark: bool = False,
               full_page: bool = False) -> None:
    """What a person sees of a report."""
    with browser_page(width, height, dark) as page:
        page.goto(html.resolve().as_uri())
        draw_all(page)
        page.screenshot(path=png, full_page=full_page)
