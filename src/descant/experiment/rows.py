"""A round's line of metrics.jsonl."""

from __future__ import annotations

import math
from typing import Any

from descant.core.plain import plain
from descant.engine.divergence import symptom
from descant.engine.evaluation import Evaluation, summarise
from descant.engine.rounds import RoundReport, Training


def row_of(training: Training, report: RoundReport, seconds: float, evaluations: list[Evaluation],
           eval_seconds: float, history: list[dict[str, Any]]) -> dict[str, Any]:
    """The line of a round; `history` has those before it."""
    federation = training.work.federation
    row: dict[str, Any] = {
        "round": report.number, "seconds": round(seconds, 6), "grad_steps": report.grad_steps,
        "bytes_down": report.bytes_down, "bytes_up": report.bytes_up,
        "participants": report.participants, "rejected": len(report.rejected), "loss": report.loss,
    }
    if training.account is not None:
        row["epsilon"] = training.account.spent(report.number)
        if report.clipped is not None:
            row["clipped"] = report.clipped
        if report.clip is not None:
            row["clip"] = report.clip
    counts = {"away": report.away, "late": report.late}
    row |= {name: count for name, count in counts.items() if count is not None}
    if report.rejected:
        row["rejections"] = {federation.names[client]: why for client, why in report.rejected.items()}
    if report.info:
        row["info"] = {key: value for key, value in report.info.items() if key != "note"}
    if report.diagnostics:
        row["diagnostics"] = dict(report.diagnostics)
    note = report.info.get("note") if report.note is None else report.note
    if note is not None:
        row["note"] = note
    if evaluations:
        figures = [summarise(evaluation, federation) for evaluation in evaluations]
        row |= {"eval_seconds": round(eval_seconds, 6)} | figures[0]
        if len(figures) > 1:
            row["unseen"] = figures[1]
    if not any("divergence" in earlier for earlier in history):  # reported once, with a remedy
        first = history[0]["loss"] if history else report.loss
        found = symptom(report.loss, row.get("personal"), training.levels,
                        math.nan if first is None else first)
        if found is not None:
            row["divergence"] = f"{found}; {training.remedy()}"
    return plain(row)  # type: ignore[no-any-return]
