"""Exported models: damage is told or changes nothing; what a manifest announces is bounded by its tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

import descant
from benchmarks.fuzz.case import Kind
from benchmarks.fuzz.draw import CHANGES, INTEGERS, VALUES, Change, changed_tables
from descant.core.sealed import sealed_table, unsealed_table
from descant.deploy.export import export_model, predictions

ROWS = 5


def make_models(home: Path) -> dict[str, Path]:
    """A model of the registry, one of images, and one that Python made."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((24, 1, 6, 6)).astype(np.float32)
    fed = descant.Federation.from_arrays(x, np.arange(24) % 3, np.repeat(np.arange(3), 8))
    np.savez(home / "rows.npz", x=x[:ROWS])
    networks = {"dnn": "dnn", "images": nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))}
    return {name: export_model(descant.run("fedavg", federation=fed, model=network, rounds=1, batch=4,
                                           local={"steps": 1}, backend="loop"), 0, home / name)
            for name, network in networks.items()}


def damaged_kind(home: Path) -> Kind:
    models = make_models(home)
    expected = {name: predictions(place, home / "rows.npz").outputs for name, place in models.items()}

    def use(given: tuple[str, str, Change]) -> None:
        name, file, change = given
        place = home / "damaged"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(models[name], place)
        (place / file).write_bytes(change.of((place / file).read_bytes()))
        assert torch.equal(predictions(place, home / "rows.npz").outputs, expected[name])

    return Kind("damaged models", st.tuples(
        st.sampled_from(sorted(models)), st.sampled_from(["model.json", "model.safetensors"]), CHANGES), use)


def hostile_kind(home: Path) -> Kind:
    """Manifests whose check sum fits."""
    models = make_models(home)
    tables = [unsealed_table(json.loads((place / "model.json").read_text())) for place in models.values()]
    places = {table["files"]["model.safetensors"]["sha256"]: place
              for table, place in zip(tables, models.values(), strict=True)}

    def use(table: dict[str, Any]) -> None:
        files = table.get("files")
        about = files.get("model.safetensors") if isinstance(files, dict) else None
        known = about.get("sha256") if isinstance(about, dict) else None
        place = home / "hostile"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(places.get(str(known), models["dnn"]), place)
        (place / "model.json").write_text(json.dumps(sealed_table(table)))
        found = predictions(place, home / "rows.npz")
        assert len(found.outputs) == ROWS
        found.table()

    return Kind("hostile models", changed_tables(tables, st.one_of(INTEGERS, VALUES)), use)
