"""Evaluation: personal and global models on the clients' own held-out data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from descant.core.federation import Federation
from descant.core.metric import AUROC
from descant.core.random import stream
from descant.core.task import Batch, inputs
from descant.core.tree import map_tree, nbytes, take
from descant.core.vector import Model
from descant.engine.backends.base import Backend
from descant.engine.personal import STATES_AT_ONCE, personal_models
from descant.engine.rounds import Training
from descant.engine.settings import Eval
from descant.engine.work import Scores
from descant.errors import UsageError
from descant.theory.truth import identified, total_error, true_models


class Figures(NamedTuple):
    """The figures of every evaluated client; NaN where a client has no rows in a split."""

    validation: Tensor  # [n, metrics]
    test: Tensor  # [n, metrics]
    error: Tensor  # [n] squared distance from the true model; NaN if unknown


class Divergence(NamedTuple):
    """Which personal models have diverged, by the rows of each split."""

    validation: np.ndarray  # [n] bool
    test: np.ndarray  # [n] bool


class Evaluation(NamedTuple):
    """The figures of a round's models."""

    number: int
    clients: np.ndarray  # [n]
    newcomer: np.ndarray  # [n] bool: never took part
    metrics: tuple[str, ...]
    lower_is_better: frozenset[str]  # of the metrics
    personal: Figures
    shared: Figures | None  # of the global model; the error is the same for all
    pooled: Tensor | None  # of the global model on all test rows; without the AUROC
    failed: dict[int, str]  # client -> why it could not be scored
    diverged: Divergence
    everywhere: Tensor | None = None  # [n, metrics] personal models on the test rows of all clients


def evaluated_clients(clients: np.ndarray, settings: Eval, seed: int) -> np.ndarray:
    """All of these, or a sample that stays the same in every round."""
    if settings.clients is None or settings.clients >= len(clients):
        return clients
    return np.sort(stream(seed, "evaluated").choice(clients, settings.clients, replace=False))


def evaluate(training: Training, backend: Backend, clients: np.ndarray, on: Literal["own", "all"] = "own"
             ) -> Evaluation:
    """Score the present state."""
    work = training.work
    names = (*work.task.metric_names, *([AUROC] if work.ranks else []))
    model = work.algorithm.global_model(training.server)
    form = backend.work.templates["score"]
    found = map_tree(lambda t: torch.full((len(clients), *t.shape), torch.nan, dtype=t.dtype), form)
    failed: dict[int, str] = {}
    at_once = max(64, STATES_AT_ONCE // max(1, nbytes(training.store.template)))
    for at, outcome in personal_models(backend, training.snapshot, clients, at_once, score=True):
        if len(outcome.done):
            rows = torch.from_numpy(at[outcome.done])
            map_tree(lambda whole, part, rows=rows: whole.index_copy_(0, rows, part), found, outcome.values)
        failed |= {int(clients[at[k]]): why for k, why in outcome.failed.items()}

    scores = [found.personal] if model is None else [found.personal, found.shared]
    # of both models and both splits at once: what vmap costs is paid per call
    tallies = torch.cat([split for each in scores for split in (each.validation, each.test)])
    of_splits = vmap(work.task.figures)(tallies).tensor_split(2 * len(scores))
    personal, *others = [_with_areas(each, of_splits[2 * k : 2 * k + 2]) for k, each in enumerate(scores)]

    shared, pooled = None, None
    if model is not None:
        shared = others[0]._replace(error=_global_error(training, model).expand(len(clients)))
        if len(tallies := found.shared.test[found.shared.test[:, 0] > 0]):
            pooled = work.task.figures(tallies.sum(0))
    scored = ~np.isin(clients, list(failed))
    diverged = Divergence(*(scored & training.levels.diverged(getattr(personal, split), split, clients)
                          for split in ("validation", "test")))
    return Evaluation(training.number, clients, ~training.store.took_part(clients), names,
                      work.task.lower_is_better, personal, shared, pooled, failed, diverged,
                      _everywhere(training, backend, clients) if on == "all" else None)


def _with_areas(scores: Scores, of_splits: Sequence[Tensor]) -> Figures:
    """The figures of a model, from those of its tallies for each split."""
    areas = scores.auroc.to(of_splits[0].dtype).tensor_split(2, 1)  # an AUROC for each split, or none
    validation, test = (torch.cat(each, 1) for each in zip(of_splits, areas, strict=True))
    return Figures(validation, test, scores.error)


def all_test_rows(federation: Federation) -> Tensor:
    """The test rows of all clients of the population, by their numbers."""
    if federation.is_remote:
        raise UsageError('eval.rows = "all" scores models on the rows of other clients, and these are on '
                         "machines of their own: leave it out")
    parts = [federation.test[client] for client in range(federation.population)]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]))


def _everywhere(training: Training, backend: Backend, clients: np.ndarray) -> Tensor:
    """The figures of each client's own model on the test rows of all; NaN where there is no model."""
    work = training.work
    task, federation = work.task, work.federation
    rows = all_test_rows(federation)
    found = torch.full((len(clients), len(task.metric_names)), torch.nan, dtype=task.dtype)
    for at, outcome in personal_models(backend, training.snapshot, clients, 64):
        for k, position in enumerate(at[outcome.done].tolist()):
            model, tally = take(outcome.values, k), None
            for part in rows.split(task.rows_at_once):
                batch = Batch(inputs(federation.x[part], task.dtype), federation.y[part])
                with torch.no_grad():
                    seen = task.tally(work.algorithm.predict(task, model, batch.x), batch)
                tally = seen if tally is None else tally + seen
            if tally is not None:
                found[position] = task.figures(tally)
    return found


def _global_error(training: Training, model: Model) -> Tensor:
    """||w_g - sum_i p_i w*_i||^2 with the method's weights p_i; NaN if the truth is unknown.

    They are over all clients; weights that depend on the uploads (FedMAP's omega) are the last round's.
    """
    work = training.work
    truth = true_models(work.task, work.federation)
    if truth is None:
        return torch.full((), torch.nan, dtype=work.task.dtype)
    clients = np.arange(work.federation.population)
    weights = work.algorithm.client_weights(training.round_of(clients))
    if weights is None:
        if training.averaged is None:
            return torch.full((), torch.nan, dtype=work.task.dtype)
        clients, weights = training.averaged
    return total_error(identified(work.task, model.theta), weights.to(truth.dtype) @ truth[clients])


def summarise(evaluation: Evaluation, federation: Federation) -> dict[str, Any]:
    """The figures of a round as a plain table: {"personal": ..., "global": ...}."""
    n_of = {"validation": federation.validation.sizes[evaluation.clients],
            "test": federation.test.sizes[evaluation.clients]}

    def figures(scores: Figures) -> dict[str, Any]:
        known = scores.error[scores.error.isfinite()]
        error = {"truth_error": float(known.mean())} if len(known) else {}
        return error | {
            short: {
                name: _spread(getattr(scores, split)[:, k].double().numpy(), n_of[split],
                              name in evaluation.lower_is_better)
                for k, name in enumerate(evaluation.metrics)
            }
            for short, split in (("test", "test"), ("val", "validation"))
        }

    summary: dict[str, Any] = {"personal": figures(evaluation.personal) | {
        "clients": len(evaluation.clients), "newcomers": int(evaluation.newcomer.sum()),
        "failed": len(evaluation.failed),  # could not be scored
        "diverged": int(np.any(evaluation.diverged, axis=0).sum()),  # see engine/divergence.py
        "without_val": int((n_of["validation"] == 0).sum())}}
    if evaluation.everywhere is not None:
        summary["everywhere"] = {
            name: float(np.nanmean(column)) if np.isfinite(column).any() else None for name, column in zip(
                evaluation.metrics, evaluation.everywhere.double().numpy().T, strict=False)}
    if evaluation.shared is not None:
        summary["global"] = figures(evaluation.shared)
        if evaluation.pooled is not None:
            summary["global"]["pooled"] = dict(
                zip(evaluation.metrics, evaluation.pooled.double().tolist(), strict=False))
    return summary


def _spread(values: np.ndarray, sizes: np.ndarray, lower_is_better: bool) -> dict[str, float | None]:
    """Mean, sample-weighted mean, standard deviation and worst decile over the clients that have it."""
    known = np.isfinite(values) & (sizes > 0)
    if not known.any():
        return dict.fromkeys(("mean", "weighted", "std", "worst_decile"))
    values, sizes = values[known], sizes[known]
    worst_first = np.sort(values)[::-1] if lower_is_better else np.sort(values)
    return {
        "mean": float(values.mean()),
        "weighted": float((values * sizes).sum() / sizes.sum()),
        "std": float(values.std()),
        "worst_decile": float(worst_first[: -(-len(values) // 10)].mean()),
    }


def selection_key(evaluation: Evaluation, federation: Federation, metric: str) -> tuple[float, ...] | None:
    """What the best round maximises, on validation rows of the personal models: as few clients as possible
    that failed or diverged; then the mean of the deciding metric where it is defined; then the loss. None
    without validation data."""
    has_rows = federation.validation.sizes[evaluation.clients] > 0
    if not has_rows.any():
        return None
    values = evaluation.personal.validation.double().numpy()[has_rows]
    figures = dict(zip(evaluation.metrics, values.T, strict=True))
    finite = np.isfinite(figures["loss"])  # a client that could not be scored has NaN
    sound = finite & ~evaluation.diverged.validation[has_rows]
    lost = float((~sound).sum())
    if not finite.any():
        return (-lost,)
    loss = -float(figures["loss"][finite].mean())
    if metric == "loss":
        return (-lost, loss)
    defined = figures[metric][finite & np.isfinite(figures[metric])]
    sign = -1.0 if metric in evaluation.lower_is_better else 1.0
    # defined for no client (an AUROC where each has one class): the loss decides
    return (-lost, sign * float(defined.mean()) if len(defined) else 0.0, loss)
