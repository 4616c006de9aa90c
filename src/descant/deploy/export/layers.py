"""A network as a description of its layers: with the tensors, all that is needed to make it again.

Known are torch's usual layers, sequences of them, and the parts of descant's networks. A description names no
code, so that reading one runs none. What it announces is compared with the tensors of the file, and tried
without memory, before anything is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from descant.core.kernels.network import Network, Shaped
from descant.core.sample import SampleFormat
from descant.errors import UsageError, first_line
from descant.models.lstm import Reader, Recurrence
from descant.models.resnet import Block

DEPTH = 50  # of parts in parts
LARGEST = 2**22  # numbers that a layer may make of one row

_CONV = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias",
         "padding_mode")
_BATCH = ("num_features", "eps", "momentum", "affine", "track_running_stats")
_WINDOW = ("kernel_size", "stride", "padding")
LAYERS: dict[type[nn.Module], tuple[str, ...]] = {  # and the arguments that make one
    nn.Linear: ("in_features", "out_features", "bias"),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _CONV),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d),
                    _BATCH),
    nn.GroupNorm: ("num_groups", "num_channels", "eps", "affine"),
    nn.LayerNorm: ("normalized_shape", "eps", "elementwise_affine", "bias"),
    nn.Embedding: ("num_embeddings", "embedding_dim", "padding_idx"),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d), (*_WINDOW, "dilation", "return_indices", "ceil_mode")),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d), (*_WINDOW, "ceil_mode", "count_include_pad")),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
                    ("output_size",)),
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.Hardswish, nn.Identity), ()),
    nn.LeakyReLU: ("negative_slope",),
    nn.ELU: ("alpha",),
    nn.GELU: ("approximate",),
    nn.Softplus: ("beta", "threshold"),
    nn.PReLU: ("num_parameters",),
    **dict.fromkeys((nn.Softmax, nn.LogSoftmax), ("dim",)),
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d), ("p",)),
    nn.Flatten: ("start_dim", "end_dim"),
    nn.Unflatten: ("dim", "unflattened_size"),
    Shaped: ("shape",),
    Recurrence: ("input_size", "hidden_size", "num_layers", "bias", "batch_first"),
}


class Container(NamedTuple):
    """A module of parts: their names (None: any), and the attributes besides them."""

    parts: tuple[str, ...] | None
    attributes: tuple[str, ...] = ()


CONTAINERS: dict[type[nn.Module], Container] = {
    nn.Sequential: Container(None),
    Network: Container(("body", "head")),
    Block: Container(("conv1", "norm1", "conv2", "norm2", "shortcut")),
    Reader: Container(("embedding", "lstm", "dense"), ("pad",)),
}
_KINDS = {kind.__name__: kind for kind in (*LAYERS, *CONTAINERS)}


def described(module: nn.Module) -> dict[str, Any] | None:
    """The description of a network; None if it has a part that is not known, or that was changed."""
    kind = type(module)
    is_changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    if is_changed or kind not in (*LAYERS, *CONTAINERS):
        return None
    if kind in LAYERS:
        return {"layer": kind.__name__} | {name: _argument(module, name) for name in LAYERS[kind]}
    parts = [[name, described(part)] for name, part in module.named_children()]
    known = CONTAINERS[kind]
    if any(part is None for _, part in parts) or len(parts) != len(module._modules):
        return None
    own = {name: getattr(module, name) for name in known.attributes}
    return {"layer": kind.__name__, **own, "parts": parts}


def _argument(module: nn.Module, name: str) -> Any:
    value = getattr(module, name)
    if name == "bias" and not isinstance(value, bool):  # the parameter itself
        return value is not None
    return list(value) if isinstance(value, tuple) else value


def rebuilt_layers(description: Any, tensors: Mapping[str, Tensor], sample: SampleFormat, dtype: torch.dtype,
                   where: str) -> nn.Module:
    """The network of a description, of the tensors' shapes and not yet with their values; `where` begins the
    message if they do not fit."""
    try:
        with torch.device("meta"), torch.no_grad():  # nothing is allocated
            network = _built(description).to(dtype).eval()
            check_tensors(network, tensors, "")
            if Reader not in map(type, network.modules()):
                _try(network, sample, dtype)
    except UsageError as error:
        raise UsageError(f"{where}{error}") from None
    except Exception as error:  # torch raises anything for arguments that it does not like
        raise UsageError(f"{where}its layers cannot be made ({first_line(error):.200})") from None
    return network.to_empty(device="cpu")


def _built(description: Any, depth: int = 0) -> nn.Module:
    if not isinstance(description, Mapping) or description.get("layer") not in _KINDS or depth > DEPTH:
        raise UsageError(f"{description!r:.100} describes no layer that is known")
    kind = _KINDS[description["layer"]]
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in description.items()
             if name not in ("layer", "parts")}
    names = CONTAINERS[kind].attributes if kind in CONTAINERS else LAYERS[kind]
    if given.keys() != {*names}:
        raise UsageError(f"the layer {kind.__name__} is described by {', '.join(names) or 'nothing'}, not by "
                         f"{', '.join(map(str, given)) or 'nothing'}")
    if kind in LAYERS:
        return Shaped(*given["shape"]) if kind is Shaped else kind(**given)
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, value in given.items():
        setattr(module, name, value)
    parts = [(str(name), part) for name, part in description["parts"]]
    wanted = CONTAINERS[kind].parts
    found = tuple(name for name, _ in parts)
    if (wanted is not None and found != wanted) or len(set(found)) < len(found):
        raise UsageError(f"the layer {kind.__name__} has the parts {', '.join(found)}")
    for name, part in parts:
        module.add_module(name, _built(part, depth + 1))
    return module


def check_tensors(network: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """UsageError if a network does not have the tensors of these names and shapes."""
    announced = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    names = sorted(announced.keys() | found.keys())
    if wrong := [name for name in names if announced.get(name) != found.get(name)]:
        raise UsageError(f"{where}its layers are not those of its tensors: {wrong[0]:.80} has the shape "
                         f"{found.get(wrong[0])}, expected {announced.get(wrong[0])}")


def _try(network: nn.Module, sample: SampleFormat, dtype: torch.dtype) -> None:
    """Pass two rows without memory: no layer may make more numbers of a row than a machine holds."""

    def limited(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.numel() > 2 * LARGEST:
            raise UsageError(f"its layer {type(module).__name__} makes {output.numel() // 2:,} numbers of a "
                             f"row, and {LARGEST:,} are allowed")

    hooks = [module.register_forward_hook(limited) for module in network.modules()]
    try:
        kind = sample.torch_dtype() if sample.tokens is not None else dtype
        network(torch.zeros(2, *sample.shape, dtype=kind))
    finally:
        for hook in hooks:
            hook.remove()
