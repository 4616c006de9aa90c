"""The kinds of input that are tried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.fuzz import experiments, frames, messages, models, runs, tables
from benchmarks.fuzz.case import Kind

KINDS: dict[str, Callable[[Path], Kind]] = {  # each with a directory of its own
    "experiments": experiments.kind,
    "csv": tables.csv_kind,
    "parquet": tables.parquet_kind,
    "npz": tables.npz_kind,
    "damaged npz": tables.damaged_npz_kind,
    "runs": runs.kind,
    "damaged models": models.damaged_kind,
    "hostile models": models.hostile_kind,
    "requests": messages.request_kind,
    "replies": messages.reply_kind,
    "frames": frames.frame_kind,
}
