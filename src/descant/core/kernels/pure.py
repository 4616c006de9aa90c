"""A module as a pure function of a model, samples, the rows that count, and a random key."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from descant.core.kernels.calls import Calls
from descant.core.kernels.chain import Chain
from descant.core.kernels.layers import rewire
from descant.core.kernels.lift import is_transformed
from descant.core.random import torch_seeded
from descant.core.vector import Layout, Model, cast
from descant.errors import UsageError, first_line


class SideEffects(NamedTuple):
    """What a pass does besides computing outputs, found by `trial.py`."""

    known: bool = False  # whether it was tried
    calls: bool = True  # calls functions of torch that must be replaced
    draws_itself: bool = False  # still draws from torch's generator
    writes_x: bool = False  # writes into its samples
    remembers: bool = False  # changes attributes that no later pass needs


class Pure:
    """A private copy of a module. A call returns the new statistics and changes nothing else; any other write
    is an error."""

    def __init__(self, module: nn.Module, layout: Layout, dtype: torch.dtype, *, train: bool,
                 effects: SideEffects = SideEffects(),  # noqa: B008 - a constant
                 autocast: torch.dtype | None = None) -> None:
        self.module = copied(module, dtype, shared=True).train(train)
        self.layout = layout
        self._autocast = autocast
        # before `rewire` replaces forward passes; torch casts what it is called for, not what is by hand
        self.chain = Chain.of(self.module, layout) if autocast is None else None
        self.context = rewire(self.module)
        # a pass writes into copies of these
        self._written = [s for s in layout.statistics if train and s.name not in self.context.kept]
        self._counters = [name for name, _ in self.module.named_buffers()
                          if train and is_counter(self.module, name) and not self._is_kept(name)]
        self._constants = _constants(self.module, layout)
        self._know(effects)

    def _know(self, effects: SideEffects) -> None:
        self.effects = effects
        self._answers = (effects.calls or self._autocast is not None) and self.chain is None

    def knowing(self, effects: SideEffects) -> Pure:
        """The same function of the same copy, of which it is known what it does besides."""
        made = copy.copy(self)
        made._know(effects)
        return made

    def _is_kept(self, counter: str) -> bool:
        return counter.replace("num_batches_tracked", "running_mean") in self.context.kept

    def to(self, device: torch.device) -> None:
        self.module.to(device)
        self._constants = _constants(self.module, self.layout)

    def __call__(self, model: Model, x: Tensor, weight: Tensor | None = None, key: Tensor | None = None
                 ) -> tuple[Any, Tensor]:
        """The outputs, and the statistics after the pass."""
        effects, given = self.effects, self.layout.views(model)
        for s in self._written:
            # made from x, so that under vmap each client has its own
            given[s.name] = x.new_zeros(s.shape, dtype=model.stats.dtype).copy_(given[s.name])
        for name in self._counters:
            given[name] = x.new_zeros((), dtype=torch.int64)
        if effects.writes_x:
            x = x.clone()
        with self.context.of_pass(weight, key, self.layout.running(model.stats)) as context, \
             Calls(context) if self._answers else nullcontext(), \
             _seeded(key) if effects.draws_itself and key is not None else nullcontext(), \
             _forgotten(self.module) if effects.remembers else nullcontext(), \
             torch.autocast(x.device.type, self._autocast, cache_enabled=False) \
             if self._autocast is not None else nullcontext():
            outputs = outputs_of(functional_call(self.module, given, (x,)))
            told = context.stats
        if self._autocast is not None and isinstance(outputs, Tensor):
            outputs = outputs.to(model.theta.dtype)
        if effects.known:
            self._require_constants()
        if not self.layout.statistics:
            return outputs, model.stats
        told |= {s.name: given[s.name] for s in self._written}
        return outputs, torch.cat([told[s.name].flatten() for s in self.layout.statistics])

    @contextmanager
    def tapped(self, layer: str) -> Iterator[list[Tensor]]:
        """What a layer is given, at each of its calls while this is open."""
        given: list[Tensor] = []
        handle = self.module.get_submodule(layer).register_forward_pre_hook(
            lambda _, arguments: given.append(arguments[0]))
        try:
            yield given
        finally:
            handle.remove()

    def _require_constants(self) -> None:
        """Refuse a write that the trial did not see: the next client would find it."""
        for constant in self._constants:
            if constant.owner._buffers[constant.key] is not constant.tensor or (
                    constant.tensor._version != constant.version):
                self._constants = _constants(self.module, self.layout)
                raise UsageError(f"the forward pass wrote the buffer {constant.name!r} of the model, which "
                                 "it did not do when it was tried: write it in every training pass, or never")


class _Constant(NamedTuple):
    name: str
    owner: nn.Module
    key: str
    tensor: Tensor
    version: int


def _constants(module: nn.Module, layout: Layout) -> list[_Constant]:
    """The buffers that no pass may write."""
    statistics = {s.name for s in layout.statistics}
    found = []
    for name, tensor in module.named_buffers():
        if name not in statistics and not is_counter(module, name):
            path, _, key = name.rpartition(".")
            found.append(_Constant(name, module.get_submodule(path), key, tensor, tensor._version))
    return found


def is_counter(module: nn.Module, name: str) -> bool:
    """Whether a buffer counts the batches of a normalisation; with a momentum it is never read."""
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    return key == "num_batches_tracked" and isinstance(owner, _NormBase) and owner.momentum is not None


def outputs_of(found: Any) -> Any:
    """What a module returns, or the logits in it: models of Hugging Face's transformers return a mapping."""
    logits = None if isinstance(found, Tensor) else getattr(found, "logits", None)
    return found if logits is None else logits


def copied(module: nn.Module, dtype: torch.dtype | None = None, *, shared: bool = False) -> nn.Module:
    """A copy of a module, in some precision. With `shared`, frozen parameters that have it already are not
    copied: a backbone may be large."""
    frozen = (p for p in module.parameters() if shared and not p.requires_grad and p.dtype == dtype)
    try:
        made = copy.deepcopy(module, {id(parameter): parameter for parameter in frozen})
    except Exception as error:
        why = first_line(error).split(". ")[0]
        raise UsageError(f"the model {type(module).__name__} cannot be copied ({why}): keep no "
                         "results of a forward pass in its attributes; of weight_norm and spectral_norm use "
                         "those in torch.nn.utils.parametrizations") from None
    return made if dtype is None else cast(made, dtype)


@contextmanager
def _seeded(key: Tensor) -> Iterator[None]:
    """Seed torch's generator from a key. Under vmap torch refuses to draw."""
    if is_transformed(key):
        yield
        return
    with torch_seeded(int(key)):
        yield


@contextmanager
def _forgotten(module: nn.Module) -> Iterator[None]:
    """Restore all attributes."""
    before = [(each, dict(vars(each))) for each in module.modules()]
    try:
        yield
    finally:
        for each, attributes in before:
            vars(each).clear()
            vars(each).update(attributes)
