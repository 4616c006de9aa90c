"""The trial of a user's module: its side effects, on a few samples.

Clients share one copy of a module, may run together, and are padded to a common shape. A forward pass that
writes buffers, draws random numbers, keeps state or mixes samples could carry one client's rows into
another's model. Buffers that training writes become statistics; other side effects are corrected (`pure.py`)
or refused with the name of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from descant.core.kernels.pure import Pure, SideEffects, copied, is_counter, outputs_of
from descant.core.random import GENERATORS, generators_used
from descant.core.vector import Layout
from descant.errors import UsageError, first_line

ROWS = 4  # samples of a trial
REAL = 2  # of these, those that count in a padded batch
KEY = 20250  # of its random numbers


class Trial(NamedTuple):
    """The result of a trial."""

    layout: Layout  # with the buffers that training writes as statistics
    effects: SideEffects
    draws: bool  # whether training needs random numbers
    alone: str | None  # why batches must not be padded: clients then run one by one


def samples(x: Tensor) -> Tensor:
    """Samples for a trial, all different: mixing equal ones would not show."""
    chosen = x[torch.linspace(0, len(x) - 1, ROWS).long()]
    if len(chosen.unique(dim=0)) == ROWS:
        return chosen
    generator = torch.Generator().manual_seed(KEY)
    if chosen.is_floating_point():
        return chosen + torch.rand(chosen.shape, generator=generator).to(chosen)
    return torch.randint(0, int(x.max()) + 1, chosen.shape, generator=generator).to(chosen)


def try_module(module: nn.Module, dtype: torch.dtype, x: Tensor) -> Trial:
    """The trial of a module on samples x [ROWS, ...]; an error if it is refused."""
    predicted = _observe(module, dtype, x, train=False)
    _require_prediction(module, dtype, x, predicted)
    trained = _observe(module, dtype, x, train=True)
    written = _written(module, trained.changed)
    if trained.drew - {"torch"}:
        _refuse_draws(module, dtype, x, trained, train=True)
    layout = Layout.of(module, written)
    pure = Pure(module, layout, dtype, train=True)
    key = torch.tensor(KEY)
    with generators_used() as drew:
        outputs, stats = _run(lambda: pure(layout.flatten(pure.module, dtype), x.clone(), None, key), True)
    draws_itself = "torch" in drew
    if not trained.drew:
        _require_same(module, dtype, layout, trained, outputs, stats)
    _require_training_to_be_over(module, dtype, x, predicted, trained)
    effects = SideEffects(known=True, calls=pure.context.asked, draws_itself=draws_itself,
                    writes_x=predicted.writes_x or trained.writes_x)
    remembers = [_remembers(module, layout, dtype, effects, x, train) for train in (False, True)]
    effects = effects._replace(remembers=any(remembers))
    return Trial(layout, effects, pure.context.draws_needed or draws_itself,
                 _why_alone(Pure(module, layout, dtype, train=True, effects=effects), dtype, x))


# -- watching ------------------------------------------------------------------------------------------


class _Observation(NamedTuple):
    """What a plain call of a copy of the module did."""

    module: nn.Module
    outputs: Any
    changed: list[str]  # parameters and buffers that it wrote
    drew: set[str]  # whose generators it used
    writes_x: bool


def _observe(module: nn.Module, dtype: torch.dtype, x: Tensor, *, train: bool) -> _Observation:
    plain = copied(module, dtype).train(train)
    before = {name: (tensor, tensor._version) for name, tensor in _tensors(plain).items()}
    origin = _tensors(module)
    given = x.clone()
    version = given._version
    with generators_used() as drew:
        outputs = _run(lambda: outputs_of(plain(given)), train)
    changed = [
        name for name, tensor in _tensors(plain).items()
        if name not in before or tensor is not before[name][0] or tensor._version != before[name][1]
        or not _same(tensor.detach(), origin[name].detach().to(tensor.dtype))]
    return _Observation(plain, outputs, changed, drew, given._version != version)


def _run(call: Callable[[], Any], train: bool) -> Any:
    try:
        with torch.set_grad_enabled(train):
            return call()
    except UsageError:
        raise
    except Exception as error:
        what = "training" if train else "prediction"
        raise UsageError(f"the model fails in {what}, on {ROWS} samples: {first_line(error)}") from None


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


# -- judging -------------------------------------------------------------------------------------------


def _require_prediction(module: nn.Module, dtype: torch.dtype, x: Tensor, seen: _Observation) -> None:
    """A prediction is a function of a sample and a model: nothing is written, drawn or mixed."""
    for name in seen.changed:
        raise UsageError(f"{_owner(module, name)} writes {name!r} also when it predicts, so that a model "
                         "would change by being scored: write it only `if self.training`")
    if seen.drew:
        _refuse_draws(module, dtype, x, seen, train=False)
    few = _run(lambda: outputs_of(copied(module, dtype).eval()(x[:REAL].clone())), False)
    if isinstance(few, Tensor) and isinstance(seen.outputs, Tensor) and not _agree(seen.outputs[:REAL], few):
        raise UsageError(f"{_mixer(module, dtype, x)} mixes the samples of a batch when it predicts, so that "
                         "predictions depend on who else is in the batch: make the outputs of a sample "
                         "depend on that sample alone (samples are the first axis: is a batch_first=True "
                         "missing?)")


def _written(module: nn.Module, changed: list[str]) -> list[str]:
    """The buffers that become statistics."""
    tensors, written = _tensors(module), []
    for name in changed:
        if name not in tensors:
            raise UsageError(f"{_owner(module, name)} makes the new parameter or buffer {name!r} in its "
                             "forward pass: make it in __init__, or call the model once beforehand")
        if isinstance(tensors[name], nn.Parameter):
            raise UsageError(f"{_owner(module, name)} writes its own parameter {name!r} in its forward pass, "
                             "outside of what is differentiated (as nn.Embedding does with max_norm): leave "
                             "that out")
        if is_counter(module, name):
            continue
        if not tensors[name].is_floating_point():
            raise UsageError(f"{_owner(module, name)} writes its buffer {name!r} of {tensors[name].dtype} in "
                             "its forward pass: each client has its own, and what the server averages must "
                             "be real numbers; make it one of real numbers, or leave it out")
        written.append(name)
    return written


def _refuse_draws(module: nn.Module, dtype: torch.dtype, x: Tensor, seen: _Observation, *, train: bool
                  ) -> NoReturn:
    whose = sorted(seen.drew - {"torch"} if train else seen.drew)[0]
    where = _drawer(copied(module, dtype).train(train), x, whose, train)
    if not train:
        raise UsageError(f"{where} draws random numbers when it predicts, so that no score could be "
                         "repeated: draw only `if self.training` (give F.dropout training=self.training)")
    raise UsageError(f"{where} draws random numbers from {whose}'s generator, which all clients would share: "
                     "draw with torch")


def _require_same(module: nn.Module, dtype: torch.dtype, layout: Layout, seen: _Observation, outputs: Any,
                  stats: Tensor) -> None:
    """Outputs and buffers are those of a plain call."""
    after = layout.flatten(seen.module, dtype).stats
    if not (isinstance(outputs, Tensor) and isinstance(seen.outputs, Tensor)
            and _agree(outputs, seen.outputs) and _agree(stats, after)):
        raise UsageError(f"in training the model {type(module).__name__} comes to other results here than by "
                         "itself: its forward pass must depend on its own parameters and buffers alone, by "
                         "their names")


def _require_training_to_be_over(module: nn.Module, dtype: torch.dtype, x: Tensor, predicted: _Observation,
                                 trained: _Observation) -> None:
    """With parameters and buffers restored, a prediction is as before the training pass."""
    with torch.no_grad():
        for name, tensor in _tensors(module).items():
            path, _, key = name.rpartition(".")
            owner = trained.module.get_submodule(path)
            getattr(owner, key).copy_(tensor)
    after = _run(lambda: outputs_of(trained.module.eval()(x.clone())), False)
    if not _agree(after, predicted.outputs):
        left = _differences(trained.module, copied(module, dtype).eval())
        where, what = (_owner(module, left[0]), repr(left[0])) if left else (_called("", module), "something")
        raise UsageError(f"{where} keeps {what} of a training pass for its predictions, which no file or "
                         "message would hold: keep it in a buffer of real numbers (register_buffer)")


def _remembers(module: nn.Module, layout: Layout, dtype: torch.dtype, effects: SideEffects, x: Tensor,
               train: bool) -> bool:
    """Whether a pass changes attributes; refused if a later pass depends on them."""
    key = torch.tensor(KEY)
    late, early, fresh = (Pure(module, layout, dtype, train=train, effects=effects) for _ in range(3))
    model = layout.flatten(fresh.module, dtype)
    _run(lambda: late(model, x.flip(0), None, key), train)  # another client's samples
    out, stats = _run(lambda: late(model, x.clone(), None, key), train)
    expected, stats_expected = _run(lambda: early(model, x.clone(), None, key), train)
    for name in _differences(late.module, early.module):
        raise UsageError(f"{_owner(module, name)} keeps {name!r} from one forward pass to the next, so that "
                         "one client's samples would reach another's model: keep it in a buffer of real "
                         "numbers (register_buffer), which each client has for itself, or not at all")
    if not (_agree(out, expected) and _agree(stats, stats_expected)):
        raise UsageError(f"the model {type(module).__name__} gives other outputs in its second forward pass "
                         "than in its first, on the same samples: what it keeps must be in a buffer "
                         "(register_buffer)")
    return bool(_differences(early.module, fresh.module))


def _why_alone(pure: Pure, dtype: torch.dtype, x: Tensor) -> str | None:
    """Why a padded batch gives other results than a short one; None if it does not."""
    if pure.effects.draws_itself:
        return "the model draws random numbers by functions of torch that cannot draw for each client"
    model, key = pure.layout.flatten(pure.module, dtype), torch.tensor(KEY)
    with torch.no_grad():
        try:
            filled, stats = pure(model, x.clone(), torch.arange(ROWS) < REAL, key)
        except Exception as error:
            return first_line(error)
        short, stats_short = _run(lambda: pure(model, x[:REAL].clone(), None, key), True)
    if _agree(filled[:REAL], short) and _agree(stats, stats_short):
        return None
    return "in training the model mixes the samples of a batch, so that batches cannot be padded"


# -- comparing -----------------------------------------------------------------------------------------


def _agree(a: Tensor, b: Tensor) -> bool:
    """Up to rounding, which depends on the size of the batch."""
    if a.shape != b.shape:
        return False
    near = 1e-3 if torch.finfo(a.dtype).bits < 64 else 1e-7
    a, b = a.detach(), b.detach()
    size = b.abs().nan_to_num(0, 0, 0).amax() if b.numel() else 0
    return torch.allclose(a, b, rtol=near, atol=float(near * size), equal_nan=True)


def _same(a: Any, b: Any, depth: int = 3) -> bool:
    """Whether two values are the same, as far as one can see into them."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(
            ((a == b) | ((a != a) & (b != b))).all())  # NaN is NaN
    if type(a) is not type(b):
        return False
    if a is None or isinstance(a, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        return bool(a == b) or a != a
    if depth == 0:
        return True
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y, depth - 1) for x, y in zip(a, b, strict=True))
    if isinstance(a, set | frozenset):
        return len(a) == len(b)
    if isinstance(a, dict):
        return list(map(str, a)) == list(map(str, b)) and all(
            _same(x, y, depth - 1) for x, y in zip(a.values(), b.values(), strict=True))
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, nn.Module) or not hasattr(a, "__dict__") or callable(a):
        return True
    return _same(vars(a), vars(b), depth - 1)


def _differences(one: nn.Module, other: nn.Module) -> list[str]:
    """The attributes in which two copies of a module differ, other than registered tensors."""
    found = []
    for (name, a), (_, b) in zip(one.named_modules(), other.named_modules(), strict=True):
        own, others = (_attributes(each) for each in (a, b))
        found += [f"{name}.{key}" if name else key for key in sorted(own.keys() | others.keys())
                  if key not in own or key not in others or not _same(own[key], others[key])]
    return found


def _attributes(layer: nn.Module) -> dict[str, Any]:
    plain = vars(nn.Module()).keys()
    return {key: value for key, value in vars(layer).items() if key not in plain and key != "forward"}


# -- naming --------------------------------------------------------------------------------------------


def _called(name: str, layer: nn.Module) -> str:
    return f"layer {name!r} ({type(layer).__name__})" if name else f"the model {type(layer).__name__}"


def _owner(module: nn.Module, name: str) -> str:
    """The layer that a tensor or attribute belongs to."""
    path = name.rpartition(".")[0]
    return _called(path, module.get_submodule(path))


def _drawer(plain: nn.Module, x: Tensor, whose: str, train: bool) -> str:
    """The innermost layer that moves a generator."""
    state, before, found = GENERATORS[whose], [], []
    for name, layer in plain.named_modules():
        layer.register_forward_pre_hook(lambda *_: before.append(state()))
        layer.register_forward_hook(lambda layer, *_, name=name: found.append(_called(name, layer))
                                    if before.pop() != state() else None)
    with generators_used():
        _run(lambda: plain(x.clone()), train)
    return found[0] if found else _called("", plain)


def _mixer(module: nn.Module, dtype: torch.dtype, x: Tensor) -> str:
    """The first layer whose outputs for a sample depend on the others."""
    for many, few in zip(_calls(module, dtype, x), _calls(module, dtype, x[:REAL]), strict=False):
        if all(isinstance(t, Tensor) and t.dim() and len(t) == n
               for call, n in ((many, ROWS), (few, REAL)) for t in (call.given, call.out)) and (
                _agree(many.given[:REAL], few.given) and not _agree(many.out[:REAL], few.out)):
            return many.where
    return _called("", module)


class _Call(NamedTuple):
    """A call of a layer."""

    where: str
    given: Any
    out: Any


def _calls(module: nn.Module, dtype: torch.dtype, x: Tensor) -> list[_Call]:
    """The calls of the layers of a module in prediction, as they come to their ends."""
    plain = copied(module, dtype).eval()
    found: list[_Call] = []
    for name, layer in plain.named_modules():
        def done(layer: nn.Module, given: Any, out: Any, name: str = name) -> None:
            found.append(_Call(_called(name, layer), given[0] if given else None, out))
        layer.register_forward_hook(done)
    _run(lambda: plain(x.clone()), False)
    return found
