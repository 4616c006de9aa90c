"""The datasets there are, and whether their files are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from descant.core.units import size
from descant.data import DATASETS
from descant.data.cache import Prepared, Source, data_dir
from descant.data.samples import Dataset
from descant.errors import DescantError
from descant.experiment.catalogue import entries


def list_datasets() -> list[dict[str, Any]]:
    """Every dataset with its clients, rows (None where they would have to be loaded), place and meaning."""
    described = {entry["name"]: entry["description"] for entry in entries("dataset")}
    found = []
    for name, cls in DATASETS.items():
        rows, where = _state(cls())
        found.append({"name": name, "clients": cls.default_clients, "owners": cls.natural, "rows": rows,
                      "where": where, "description": described[name]})
    return found


def show_datasets(console: Console, found: list[dict[str, Any]]) -> None:
    """Print the list for people."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("name", no_wrap=True)
    table.add_column("clients", no_wrap=True, justify="right")
    table.add_column("rows", no_wrap=True, justify="right")
    table.add_column("where")
    table.add_column("description")
    for entry in found:
        clients = f"{entry['clients']:,}" if entry["owners"] else "any"
        rows = "" if entry["rows"] is None else f"{entry['rows']:,}"
        table.add_row(entry["name"], clients, rows, entry["where"], entry["description"])
    console.print(table)
    console.print(f"\ndata directory: {data_dir()}", soft_wrap=True)
    console.print("clients: how many there are unless data.clients or data.partition say otherwise; any: "
                  "rows without owners are dealt to as many as are asked for", soft_wrap=True)


def _state(dataset: Dataset) -> tuple[int | None, str]:
    """How many rows there are, and where."""
    source: Source | None = getattr(dataset, "source", None)
    if source is None:
        # what is drawn is drawn for its clients, what comes with a library is dealt to them
        return None, "synthetic" if dataset.natural else "embedded"
    path = data_dir() / f"{source.name}.npz"
    if path.exists():
        try:
            return _rows(source, path), "present"
        except DescantError:
            return None, f"damaged: {path.name}"
    if _has_files(path.parent / (source.folder or source.name)):
        return None, "official files, to be prepared"
    if source.installed is not None and source.installed.is_dir():
        return None, "installed, to be prepared"
    if source.remotes:
        return None, f"to be downloaded ({size(sum(remote.size for remote in source.remotes))})"
    return None, "to be fetched by hand"


def _rows(source: Source, path: Path) -> int | None:
    """The number of labels, by the headers of the file; None where rows are made when it is loaded."""
    prepared = Prepared(path, source.layout)
    labels = [name for name in source.layout if name == "y" or name.startswith("y_")]
    return sum(prepared.shape(name)[0] for name in labels) if labels else None


def _has_files(folder: Path) -> bool:
    return folder.is_dir() and any(path.suffix != ".part" for path in folder.iterdir())
