"""A model's module rebuilt from its files, with or without its preprocessing."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from descant.core import random
from descant.core.import_object import require_permitted
from descant.core.permit import Allowed, Permit, opened
from descant.core.vector import cast
from descant.deploy.export.layers import check_tensors, rebuilt_layers
from descant.deploy.export.manifest import Manifest, read_manifest, read_tensors
from descant.errors import DescantError, UsageError, first_line, one
from descant.models import ModelSpec, NetworkSpec, OwnModel


class OnRows(nn.Module):
    """A network that takes raw rows: it imputes, scales, and turns bytes into numbers in [0, 1]. Exports
    include its constants."""

    def __init__(self, network: nn.Module, manifest: Manifest) -> None:
        super().__init__()
        self.network = network
        self._dtype, self._bytes = manifest.torch_dtype, manifest.input.dtype == "uint8"
        self._real = manifest.input.is_real
        sides = len(manifest.input.shape)
        for name in ("fill", "mean", "std"):
            values = (manifest.preprocess or {}).get(name)
            # a column is the first dimension of a sample
            column = None if values is None else torch.tensor(
                values, dtype=torch.float64).to(manifest.input.torch_dtype()).view([-1, *[1] * (sides - 1)])
            self.register_buffer(name, column)

    fill: Tensor | None
    mean: Tensor | None
    std: Tensor | None

    def forward(self, rows: Tensor) -> Tensor:
        if self._bytes:
            rows = rows.to(self._dtype) * (1 / 255)
        if self.fill is not None:
            rows = torch.where(rows.isnan(), self.fill, rows)
        if self.mean is not None and self.std is not None:
            rows = (rows - self.mean) / self.std
        out: Tensor = self.network(rows.to(self._dtype) if self._real else rows)
        return out

    def single(self) -> OnRows:
        """The same with the network in single precision."""
        if self._dtype == torch.float32:
            return self
        made = copy.deepcopy(self)
        cast(made.network, torch.float32)
        made._dtype = torch.float32
        return made

    def inverse(self, x: Tensor) -> Tensor:
        """Raw rows for these samples, approximately."""
        if self.mean is None or self.std is None:
            return x.to(self.fill.dtype) if self.fill is not None else x
        return x.to(self.mean.dtype) * self.std + self.mean


def load_model(place: str | Path, module: nn.Module | None = None, *, on_rows: bool = False,
               allow: Allowed = ()) -> nn.Module:
    """A model's module, ready to predict. It takes preprocessed samples; with `on_rows`, raw rows.

    A network of usual layers is rebuilt from their description. Another one that is named
    "package.module:function" is rebuilt by running its code, so its package must be in `allow` or in the
    user's settings. Another one that was a Python object must be passed as `module`, which is copied.
    """
    if not isinstance(place, str | Path):
        raise UsageError(f"load_model needs the path of a model's directory, not {one(place)}")
    place = Path(place)
    manifest = read_manifest(place)
    network = rebuilt(manifest, read_tensors(place, manifest), module, f"{place}: ", allow)
    if not on_rows:
        return network
    if manifest.preprocess is None:
        raise UsageError(f"{place}: this model was trained on rows that were scaled or imputed with every "
                         "client's own constants, so the global model has none for yours: use a client's own "
                         "model, or make one for your rows with `descant personalize`")
    return OnRows(network, manifest).eval()


def rebuilt(manifest: Manifest, tensors: dict[str, Tensor], module: nn.Module | None, where: str,
            allow: Allowed) -> nn.Module:
    """The module of a manifest with these tensors; `where` prefixes the messages."""
    if manifest.tensors != "state_dict":
        raise UsageError(f"{where}this is not one module: {manifest.algorithm.get('name')} predicts with "
                         "several parts, which are in the file under their names")
    if module is not None:
        network = copy.deepcopy(module)
    elif manifest.layers is not None:
        network = rebuilt_layers(manifest.layers, tensors, manifest.input, manifest.torch_dtype, where)
    else:
        network = _made(manifest, tensors, where, opened(allow))
    network = cast(network, manifest.torch_dtype)
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{where}the module does not have the tensors of this model: {reason}") from None
    return network.eval()


def _made(manifest: Manifest, tensors: dict[str, Tensor], where: str, permit: Permit) -> nn.Module:
    if manifest.model is None:
        raise UsageError(f"{where}the model was a Python object, which is not in the file: pass it again, "
                         "descant.deploy.export.load_model(DIR, module=...)")
    require_permitted({"model": manifest.model}, permit, where)
    spec = ModelSpec.parse(manifest.model, allow=permit).model
    if not isinstance(spec, NetworkSpec):
        raise DescantError(f"{where}the model {spec.name!r} is not a network")
    if not isinstance(spec, OwnModel):  # before memory is taken for what the manifest announces
        try:
            with torch.device("meta"):
                announced = spec.network(manifest.input)
        except (RuntimeError, OverflowError) as error:
            raise UsageError(f"{where}the model cannot be made ({first_line(error)})") from None
        check_tensors(announced, tensors, where)
    with random.torch_seeded(random.key(manifest.seed, "init")):  # as in training
        return spec.network(manifest.input)
