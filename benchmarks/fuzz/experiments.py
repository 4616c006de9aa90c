"""Experiment files: tables with values that no field expects, and text that is no TOML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w
from hypothesis import strategies as st

from benchmarks.fuzz.case import Kind
from benchmarks.fuzz.draw import CHANGES, FLOATS, HUGE, INTEGERS, VALUES, WORDS, Change, changed_tables
from descant.experiment.config import DEMO, Experiment, read_toml

BASES: list[dict[str, Any]] = [
    DEMO,
    {"data": {"dataset": "logistic", "clients": 3, "dim": 4, "scale": "constants", "mean": [0.0],
              "std": [1.0]},
     "model": {"name": "dnn", "hidden": 5, "loss": "cross_entropy"},
     "algorithm": {"name": "ditto", "lam": 1.0, "solver": {"name": "sgd", "lr": 0.1}, "groups": {"K": 2}},
     "train": {"rounds": 2, "cohort": 2, "local": {"epochs": 1}, "seed": 3}, "eval": {"every": 1}},
    {"data": {"dataset": "./hospitals", "impute": "client"},
     "schema": {"target": "y", "classes": ["no", "yes"], "columns": {"age": "number", "sex": ["f", "m"]}},
     "algorithm": {"name": "fedmap", "preset": "paper"}, "model": {"name": "mclr"}, "train": {"rounds": 2}},
]
_SCALARS = st.one_of(INTEGERS, HUGE, FLOATS, WORDS, st.booleans())


def toml(table: dict[str, Any]) -> bytes:
    """A file of the table; what TOML has no words for is left out."""
    def without_none(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_none(item) for key, item in value.items() if item is not None}
        if isinstance(value, list):
            return [without_none(item) for item in value if item is not None]
        return value

    return tomli_w.dumps(without_none(table)).encode("utf-8", "surrogatepass")


def kind(home: Path) -> Kind:
    def use(given: tuple[dict[str, Any], list[Change]]) -> None:
        table, changes = given
        data = toml(table)
        for change in changes:
            data = change.of(data)
        path = home / "experiment.toml"
        path.write_bytes(data)
        experiment = Experiment.parse(read_toml(path))
        again = Experiment.parse(experiment.dump())
        assert again.dump() == experiment.dump()

    inputs = st.tuples(changed_tables(BASES, st.one_of(_SCALARS, VALUES)),
                       st.one_of(st.just([]), st.lists(CHANGES, max_size=2)))
    return Kind("experiment files", inputs, use)
