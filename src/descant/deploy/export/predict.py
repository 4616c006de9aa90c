"""The predictions of an exported model."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from descant.core import scoring
from descant.core.cast import cast_real
from descant.core.labels import as_known
from descant.core.losses import LOSSES
from descant.core.metric import CLASSIFICATION, REGRESSION
from descant.core.permit import Allowed
from descant.core.threads import one_thread
from descant.data import tables
from descant.deploy.export.manifest import Manifest, find_model, read_manifest
from descant.deploy.export.network import load_model
from descant.errors import UsageError, first_line

BLOCK = 1024  # rows at once: the last bit of a product can depend on it


class Predictions(NamedTuple):
    """The outputs for every row, and what they mean."""

    manifest: Manifest
    outputs: Tensor  # [rows, ...]
    y: Tensor | None
    ids: list[str] | None = None  # of the rows, from the column `id`
    id: str = ""

    @property
    def probabilities(self) -> Tensor | None:
        """[rows, classes]; None if the loss does not define them."""
        outputs, loss = self.outputs, self.manifest.loss
        if self.manifest.classes is None or loss not in ("cross_entropy", "binary_cross_entropy"):
            return None
        if loss == "cross_entropy":
            return torch.softmax(outputs, 1)
        one = torch.sigmoid(outputs.reshape(len(outputs), 1))
        return torch.cat([1 - one, one], 1)

    @property
    def classes(self) -> Tensor | None:
        """[rows] class numbers; None for a real target."""
        if self.manifest.classes is None:
            return None
        if self.outputs.dim() == 1 or self.outputs.shape[1] == 1:
            return (self.outputs.reshape(-1) > 0).long()
        return self.outputs.argmax(1)

    def figures(self) -> dict[str, float]:
        """The metrics, if the targets are known."""
        if self.y is None:
            return {}
        try:
            return self._figures(self.y)
        except (RuntimeError, IndexError, ValueError) as error:
            raise UsageError(f"the targets y of shape {tuple(self.y.shape)} do not fit the model's outputs "
                             f"of shape {tuple(self.outputs.shape)}: correct them, or leave y out") from error

    def _figures(self, y: Tensor) -> dict[str, float]:
        found: dict[str, float] = {}
        outputs, rows = self.outputs, torch.tensor(float(len(y)), dtype=torch.float64)
        if self.manifest.loss in LOSSES:
            found["loss"] = float(LOSSES[self.manifest.loss](outputs, y).double().mean())
        if self.manifest.classes is not None:
            classes = len(self.manifest.classes)
            tally = scoring.tally_classification(outputs[None], y.long()[None], None, classes)
            figures = scoring.classification_figures(rows, tally[0])
            found |= zip(CLASSIFICATION, map(float, figures), strict=True)
        elif outputs.numel() == y.numel():
            tally = scoring.tally_regression(outputs[None], y[None], None)
            figures = scoring.regression_figures(rows, tally[0])
            found |= zip(REGRESSION, map(float, figures), strict=True)
        return found

    def table(self, probabilities: bool = False) -> str:
        """One line of CSV for each row, and a header."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        lines = self._lines(probabilities)
        if self.ids is not None:
            lines = ([own, *line] for own, line in zip([self.id, *self.ids], lines, strict=True))
        writer.writerows(lines)
        return text.getvalue()

    def _lines(self, probabilities: bool) -> Iterator[list[str]]:
        names, chosen = self.manifest.classes, self.classes
        if names is None or chosen is None:
            values = self.outputs.reshape(len(self.outputs), -1).numpy()
            width = values.shape[1]
            yield ["predicted"] if width == 1 else [f"predicted_{k}" for k in range(width)]
            yield from (list(map(str, row)) for row in values)
            return
        shares = self.probabilities
        width = 0 if shares is None or not probabilities else shares.shape[1]
        if max([width - 1, *chosen.tolist()]) >= len(names):
            raise UsageError("the model has outputs for more classes than it has names for "
                             f"({', '.join(names)}): use descant.deploy.export.load_model")
        if shares is None:
            if probabilities:
                raise UsageError(f"this model was trained with the loss {self.manifest.loss!r}, which does "
                                 "not define probabilities: leave --probabilities out")
            yield ["predicted"]
            yield from ([names[k]] for k in chosen.tolist())
            return
        yield ["predicted", "probability", *(f"probability_{name}" for name in names if probabilities)]
        # numpy writes the shortest text that reads back exactly
        for k, row in zip(chosen.tolist(), shares.numpy(), strict=True):
            yield [names[k], str(row[k]), *(map(str, row) if probabilities else ())]


def predictions(model: str | Path, data: str | Path, module: nn.Module | None = None, *,
                allow: Allowed = (), id: str | None = None) -> Predictions:
    """The predictions of a model in a directory for the rows of a CSV, Parquet or NPZ file. `module` and
    `allow` as for `load_model`; `id` is a column of a table that is written beside the predictions."""
    place, path = find_model(Path(model)), Path(data)
    manifest = read_manifest(place)
    network = load_model(place, module, on_rows=True, allow=allow)
    if id is not None and path.suffix.lower() not in tables.TABLES:
        raise UsageError(f"--id {id}: {path} has no columns with names: only tables (CSV, Parquet) have ids")
    ids = None if id is None else tables.read_texts(path, id)
    x, y = _read_rows(path, manifest, [] if id is None else [id])
    outputs = _outputs(network, x, f"{path}: ")
    if outputs.dim() > 2:
        raise UsageError(f"{place}: the model gives outputs of shape {tuple(outputs.shape[1:])} for a row, "
                         "which do not fit a table: use descant.deploy.export.load_model")
    return Predictions(manifest, outputs, y, ids, id or "")


def _outputs(network: nn.Module, x: Tensor, where: str) -> Tensor:
    """The outputs for rows, in blocks and in one thread: the last bit depends on both."""
    blocks = []
    with torch.no_grad(), one_thread():
        for start in range(0, len(x), BLOCK):
            try:
                # a copy: the last bit depends on the alignment
                blocks.append(network(x[start : start + BLOCK].clone()))
            except Exception as error:
                raise UsageError(f"{where}the model does not take these rows: {first_line(error)}") from None
    return torch.cat(blocks)


def _read_rows(path: Path, manifest: Manifest, besides: list[str]) -> tuple[Tensor, Tensor | None]:
    """The raw rows of a file, checked against the model's input, and the targets if it has them."""
    if path.suffix.lower() not in tables.ENDINGS:
        raise UsageError(f"{path} must end in one of {', '.join(tables.ENDINGS)}")
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    if manifest.schema is not None:
        x, y = manifest.schema.read_rows(path, besides)
    elif path.suffix.lower() == ".npz":
        x, y = tables.read_npz_rows(path)
    else:
        sides = ", ".join(map(str, manifest.input.shape))
        raise UsageError(f"{path} is a table, and this model has no schema for its columns: "
                         f"give an NPZ file with x of shape (rows, {sides})")
    _check(x, y, path, manifest)
    rows = cast_real(torch.from_numpy(x), manifest.input.torch_dtype(), lambda row: f"{path}: x[{row}]",
                     "correct it, or leave the row out")
    return rows, _targets(y, path, manifest)


def _check(x: np.ndarray, y: np.ndarray | None, path: Path, manifest: Manifest) -> None:
    wanted = manifest.input
    if x.shape[1:] != wanted.shape:
        raise UsageError(f"{path}: x has rows of shape {x.shape[1:]}, but the model takes {wanted.shape}")
    kind = "real" if x.dtype.kind == "f" else str(x.dtype)
    if kind != ("real" if wanted.is_real else wanted.dtype):
        raise UsageError(f"{path}: x holds {x.dtype}, but the model takes {wanted.dtype}: convert it")
    if wanted.tokens is not None and (x.min() < 0 or x.max() >= wanted.tokens):
        raise UsageError(f"{path}: x holds tokens from {x.min()} to {x.max()}, but the model knows 0 to "
                         f"{wanted.tokens - 1}")
    if kind == "real" and "fill" not in (manifest.preprocess or {}) and (missing := np.isnan(x)).any():
        row, *place = np.argwhere(missing)[0].tolist()
        what = f"{path}: x[{', '.join(map(str, (row, *place)))}]"
        if manifest.schema is not None and path.suffix.lower() in tables.TABLES:
            column = [column.name for column in manifest.schema.columns for _ in column.features][place[0]]
            what = f"{tables.place_of_row(path, row)}, column {column!r}: the value"
        raise UsageError(f"{what} is missing, and this model does not impute: complete the row, or leave "
                         "it out")


def _targets(y: np.ndarray | None, path: Path, manifest: Manifest) -> Tensor | None:
    if y is None:
        return None
    if manifest.classes is None:
        return torch.from_numpy(y).to(manifest.torch_dtype)
    if y.dtype.kind == "f" and manifest.loss != "binary_cross_entropy":
        raise UsageError(f"{path}: y holds real numbers, but the model knows the classes "
                         f"{', '.join(manifest.classes)}: give their numbers from 0, or leave y out")
    if manifest.schema is None:
        y = as_known(y, manifest.classes, f"{path}: ")
    if y.min() < 0 or y.max() >= len(manifest.classes):
        raise UsageError(f"{path}: y holds {y.max()}, but the model knows the classes 0 to "
                         f"{len(manifest.classes) - 1}")
    return torch.from_numpy(y)
