"""Models in formats that do not need descant: `model.pt2` (torch.export) and `model.onnx`, for raw rows.

Each file is run on rows and must give the module's outputs.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from descant.deploy.export.network import OnRows
from descant.errors import DescantError, UsageError, first_line

Format: TypeAlias = Literal["pt2", "onnx"]
NAMES: dict[Format, str] = {"pt2": "model.pt2", "onnx": "model.onnx"}
TOLERANCE: dict[Format, float] = {"pt2": 1e-6, "onnx": 1e-5}  # relative to the largest output, above one


class Converted(NamedTuple):
    """A file of a format, and how far its outputs were from the module's."""

    data: bytes
    about: dict[str, Any]


def require_formats(formats: Sequence[Format]) -> None:
    """Raise with what to install, before anything is written."""
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if "onnx" in formats and missing:
        raise UsageError(f"--onnx needs {' and '.join(missing)}, which is not installed: "
                         "pip install 'descant[onnx]'")


def convert(network: OnRows, rows: Tensor, formats: Sequence[Format]) -> dict[Format, Converted | str]:
    """The network in these formats, for any number of rows, or the reason for a failure. ONNX is in single
    precision: runtimes have few operations in double."""
    found: dict[Format, Converted | str] = {}
    for name in formats:
        try:
            with _quiet():
                program = _traced(network.single() if name == "onnx" else network, rows[:2])
                data, run = _WRITERS[name](program)
                found[name] = _tried(name, data, run, network, rows)
        except Exception as error:  # converters raise anything
            found[name] = first_line(error)[:300]
    return found


def _traced(network: nn.Module, rows: Tensor) -> Any:
    batch = ({0: torch.export.Dim("batch")},)
    try:
        return torch.export.export(network, (rows,), dynamic_shapes=batch, strict=True)
    except Exception:  # strict mode reads the code; the other traces it
        return torch.export.export(network, (rows,), dynamic_shapes=batch, strict=False)


def _as_pt2(program: Any) -> tuple[bytes, Callable[[Tensor], Tensor]]:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded: Any = torch.export.load(file).module()
    return file.getvalue(), loaded


def _as_onnx(program: Any) -> tuple[bytes, Callable[[Tensor], Tensor] | None]:
    made: Any = torch.onnx.export(program, dynamo=True, verbose=False, input_names=["rows"],
                                  output_names=["outputs"])
    data: bytes = made.model_proto.SerializeToString()
    if importlib.util.find_spec("onnxruntime") is None:
        return data, None
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    [given] = session.get_inputs()
    return data, lambda rows: torch.from_numpy(session.run(None, {given.name: rows.numpy()})[0])


_WRITERS: dict[Format, Callable[[Any], tuple[bytes, Callable[[Tensor], Tensor] | None]]] = {
    "pt2": _as_pt2, "onnx": _as_onnx}


def _tried(name: Format, data: bytes, run: Callable[[Tensor], Tensor] | None, network: nn.Module, rows: Tensor
           ) -> Converted:
    """Compare a file's outputs with the module's, on all rows and on one alone."""
    about: dict[str, Any] = {"sha256": hashlib.sha256(data).hexdigest()}
    if run is None:
        return Converted(data, about | {"difference": None, "note": "not tried: onnxruntime is missing"})
    difference, size = 0.0, 1.0
    for some in (rows, rows[:1]):
        with torch.no_grad():
            expected = network(some)
            found = run(some)
        difference = max(difference, float((found - expected).abs().max()))
        size = max(size, float(expected.abs().max()))
    if not difference <= TOLERANCE[name] * size:
        raise DescantError(f"its outputs differ from the model's by {difference:.2g}")
    return Converted(data, about | {"difference": difference, "rows": len(rows)})


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the converters' logs."""
    loud = logging.getLogger("torch.onnx._internal.exporter._registration")  # its errors are none
    before = logging.root.manager.disable, loud.disabled
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        loud.disabled = True
        try:
            yield
        finally:
            logging.root.manager.disable, loud.disabled = before
