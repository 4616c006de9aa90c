"""The frozen layers with which a network begins: what they make of a sample never changes.

They are found by watching a pass. A layer belongs to the front if it is frozen, is given the samples
themselves and nothing else, once, and if nobody else looks at the samples. It then becomes an identity, and
the search goes on with what it returned. It ends where training changes what a layer does (BatchNorm,
Dropout).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from descant.core.kernels.pure import copied, outputs_of
from descant.core.random import generators_used


class Front(NamedTuple):
    """The front of a network, and the network without it."""

    layers: tuple[nn.Module, ...]
    rest: nn.Module  # with identities in their place, so that parameters keep their names

    def features(self, x: Tensor, autocast: torch.dtype | None) -> Tensor:
        """What the front makes of samples, in their own precision."""
        with torch.no_grad(), torch.autocast(x.device.type, autocast, enabled=autocast is not None):
            found = x.clone()  # layers may write into what they are given
            for layer in self.layers:
                found = layer(found)
        return found.to(x.dtype) if x.is_floating_point() and found.is_floating_point() else found


def front_of(module: nn.Module, dtype: torch.dtype, x: Tensor) -> Front | None:
    """The front of a module, by a trial on samples x; None where there is nothing to gain."""
    rest = copied(module, dtype, shared=True).eval()
    layers: list[nn.Module] = []
    refused: set[str] = set()
    with torch.no_grad():
        expected = outputs_of(rest(x.clone()))
        while (name := _first(rest, x, refused)) is not None:
            layer = rest.get_submodule(name)
            if (found := _constant(layer, x)) is None:
                refused.add(name)  # its own first layers may do
                continue
            path, _, key = name.rpartition(".")
            setattr(rest.get_submodule(path), key, nn.Identity())
            layers.append(layer)
            x = found
        if not any(_is_costly(layer) for layer in layers) or not torch.allclose(
                outputs_of(rest(x.clone())), expected, rtol=1e-3, atol=1e-5):
            return None
    return Front(tuple(layers), rest)


def _is_costly(layer: nn.Module) -> bool:
    """Whether a layer has frozen parameters, other than of tables that are only looked up."""
    return any(True for part in layer.modules() if not isinstance(part, nn.Embedding)
               for _ in part.parameters(recurse=False))


def _first(module: nn.Module, x: Tensor, refused: set[str]) -> str | None:
    """The outermost frozen layer that is given the samples, if nobody else looks at them."""
    calls: dict[str, int] = {}
    x = x.clone()
    watch = _Watch(x)
    handles = []
    for name, layer in module.named_modules():
        if not name or name in refused or isinstance(layer, nn.Identity) or (
                any(p.requires_grad for p in layer.parameters())):
            continue

        def opened(_: Any, given: tuple[Any, ...], named: dict[str, Any], name: str = name) -> None:
            if watch.looks:
                if len(given) == 1 and given[0] is x and not named:
                    calls[name] = calls.get(name, 0) + 1
                elif any(leaf is x for leaf in tree_leaves((given, named))):
                    watch.elsewhere = True
            watch.inside += 1

        def closed(_: Any, given: Any, found: Any) -> None:
            watch.inside -= 1
            watch.is_over |= found is x and not watch.inside  # written in place: from here on it is a feature

        handles += [layer.register_forward_pre_hook(opened, with_kwargs=True, prepend=True),
                    layer.register_forward_hook(closed, always_call=True)]
    try:
        with watch:
            module(x)
    except Exception:  # what comes next does not take features for samples
        return None
    finally:
        for handle in handles:
            handle.remove()
    return next(iter(calls)) if not watch.elsewhere and [*calls.values()] == [1] else None


class _Watch(TorchFunctionMode):
    """Whether the samples are looked at outside of frozen layers."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x, self.inside, self.elsewhere, self.is_over = x, 0, False, False

    @property
    def looks(self) -> bool:
        return not self.inside and not self.is_over

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
                           ) -> Any:
        if self.looks and any(leaf is self.x for leaf in tree_leaves((args, kwargs))):
            self.elsewhere = True
        return func(*args, **kwargs or {})


def _constant(layer: nn.Module, x: Tensor) -> Tensor | None:
    """What a layer returns, if it is the same in training, for each sample by itself; else None."""
    if any(isinstance(part, _NormBase) for part in layer.modules()):
        return None
    with generators_used() as drew:
        found, again, few = layer(x.clone()), layer.train()(x.clone()), layer(x[:1].clone())
        layer.eval()
    is_constant = (not drew and all(isinstance(each, Tensor) for each in (found, again))
                   and torch.equal(found, again) and found.dim() > 1 and len(found) == len(x)
                   and torch.allclose(found[:1], few, rtol=1e-3, atol=1e-5))
    return found if is_constant else None
