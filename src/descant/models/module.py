"""The task of an `nn.Module`: its loss, its gradient, its predictions."""

from __future__ import annotations

import copy
import hashlib
import re
import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from descant.core import scoring
from descant.core.federation import Federation
from descant.core.kernels.chain import leaves
from descant.core.kernels.chunk import ChunkGradients, as_rows
from descant.core.kernels.lift import over_clients
from descant.core.kernels.pure import Pure, SideEffects, copied
from descant.core.kernels.trial import REAL, ROWS, samples, try_module
from descant.core.losses import LOSSES, SLOPED, Loss, LossName, Weighted
from descant.core.metric import CLASSIFICATION, REGRESSION
from descant.core.task import Batch, Gradient, Pull, Task, inputs
from descant.core.tree import stack, take
from descant.core.vector import Layout, Model
from descant.errors import UsageError, first_line, one, unknown

PASSED = 1024  # rows that pass a chain at once where they are only predicted
Precision: TypeAlias = Literal["bfloat16"]
PRECISIONS: dict[Precision, torch.dtype] = {"bfloat16": torch.bfloat16}


class ModuleTask(Task):
    """The task of an `nn.Module` with a loss on its outputs.

    The module is copied; its present parameters are the initial model. `loss` is a name or a callable
    that gives one loss per sample (as torch losses do with `reduction="none"`). With `class_weights`, rows
    count in training by their classes. With `autocast`, passes compute in that precision where
    `torch.autocast` does; parameters, losses and all sums stay in `dtype`. Every experiment works with the
    task `fitted` to its data.
    """

    layout: Layout

    def __init__(self, module: nn.Module, loss: LossName | Loss, *, classes: int | None = None,
                 dtype: torch.dtype = torch.float32, class_weights: Sequence[float] | None = None,
                 autocast: Precision | None = None) -> None:
        if autocast is not None and dtype != torch.float32:
            raise UsageError(f"model.autocast = {autocast!r} shortens the passes of a model in float32, and "
                             "train.dtype is float64: leave one of them out")
        self.dtype, self.autocast = dtype, autocast
        self.loss_name = loss if isinstance(loss, str) else getattr(loss, "__name__", "custom")
        self.classes = classes
        if isinstance(loss, str) and loss not in LOSSES:
            raise unknown("loss", loss, LOSSES)
        if loss == "binary_cross_entropy" and classes is None:
            self.classes = 2  # targets 0 and 1 as real numbers
        self._given = loss
        self._loss = LOSSES[loss] if isinstance(loss, str) else loss
        self._sloped = SLOPED[loss] if isinstance(loss, str) else None
        self.class_weights = class_weights
        self._trained: Loss = self._loss  # of training; what is reported is the loss of the data
        if class_weights is not None:
            weighted = Weighted(_of_classes(loss, self.classes, class_weights), class_weights)
            self._trained, self._sloped, self.heaviest = weighted, weighted.sloped, max(class_weights)
        kind = CLASSIFICATION if self.classes is not None else REGRESSION if loss == "mse" else ()
        self.metric_names = ("loss", *kind)
        self._module = copied(module)
        for parameter in self._module.parameters():  # constants, of which all copies then share one
            if not parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        self._why_alone: str | None = None
        self._sample: Batch | None = None  # of several samples, to try things on
        self._prepare(Layout.of(module), SideEffects())

    def _prepare(self, layout: Layout, effects: SideEffects) -> None:
        """Make the functions that run the module."""
        self.layout, self.dim = layout, layout.dim
        short = None if self.autocast is None else PRECISIONS[self.autocast]
        self._train = Pure(self._module, layout, self.dtype, train=True, effects=effects, autocast=short)
        self._eval = Pure(self._module, layout, self.dtype, train=False, effects=effects, autocast=short)
        self.draws = self._train.context.draws_needed
        self._chain, self._eval_chain = self._train.chain, self._eval.chain
        self.rows_at_once = Task.rows_at_once if self._eval_chain is None else PASSED
        self.chunk_gradients = None
        # a subclass may have another objective
        is_own = type(self).losses is ModuleTask.losses and type(self).grad is Task.grad
        if is_own and self._chain is not None and self._sloped is not None:
            self.chunk_gradients = ChunkGradients(self._chain, self._train.context, layout, self._sloped)

    def of(self, module: nn.Module) -> ModuleTask:
        """The same task of another module."""
        return ModuleTask(module, self._given, classes=self.classes, dtype=self.dtype,
                          class_weights=self.class_weights, autocast=self.autocast)

    @property
    def template(self) -> nn.Module:
        """The module of which all copies are made."""
        return self._module

    @property
    def frozen(self) -> bool:
        """Whether any parameter is not trained."""
        return any(not parameter.requires_grad for parameter in self._module.parameters())

    def init(self) -> Model:
        return self.layout.flatten(self._module, self.dtype)

    def move_to(self, device: torch.device) -> None:
        self._train.to(device)
        self._eval.to(device)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.loss_name} {self._module}".encode())
        if self.class_weights is not None:
            digest.update(repr(tuple(map(float, self.class_weights))).encode())
        if self.autocast is not None:
            digest.update(self.autocast.encode())
        for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
            digest.update(name.encode())
            digest.update(tensor.detach().contiguous().numpy().data)
        return digest.hexdigest()[:16]

    @cached_property
    def is_linear(self) -> bool:
        """Whether the outputs are those of one linear layer on the flattened samples."""
        kinds = [type(leaf) for _, leaf in leaves(self._module) if type(leaf) is not nn.Identity]
        return self._chain is not None and kinds[-1:] == [nn.Linear] and {*kinds[:-1]} <= {nn.Flatten}

    def losses(self, model: Model, batch: Batch, *, train: bool = False) -> tuple[Tensor, Tensor]:
        if not train:
            return self._loss(self.predict(model, batch.x), batch.y), model.stats
        outputs, stats = self._train(model, batch.x, batch.weight, batch.key)
        return self._trained(outputs, batch.y), stats

    def _gradient(self, model: Model, batch: Batch) -> Gradient:
        if self.chunk_gradients is not None:
            stats = model.stats if self.layout.statistics else None
            found = over_clients(self.chunk_gradients.gradient, model.theta, stats, *batch)
            if found is not None:
                return Gradient(*found, *([model.stats] if stats is None else []))
        return super()._gradient(model, batch)

    def _pulled_gradient(self, model: Model, batch: Batch, pull: Pull) -> Gradient:
        if self.chunk_gradients is not None:
            stats = model.stats if self.layout.statistics else None
            found = over_clients(self.chunk_gradients.pulled_gradient, model.theta, stats, *batch, *pull)
            if found is not None:
                return Gradient(*found, *([model.stats] if stats is None else []))

        def rows(at: Model) -> tuple[Tensor, Tensor, Tensor]:
            with self._train.tapped(self.layout.last_layer) as given:
                losses, stats = self.losses(at, batch, train=True)
            return losses, stats, pull.rows(self._only(given), batch.y)

        return self._differentiated(model, batch, rows)

    @property
    def feature_width(self) -> int:
        last = self.layout.parameters[-1]
        widths = [s.shape[1] for s in self.layout.parameters
                  if s.owner == self.layout.last_layer and "Linear" in s.layer and len(s.shape) == 2]
        if len(widths) != 1:
            raise UsageError("the features of the model are not known: they are what its last layer with "
                             f"parameters is given, and that is {last.name.rpartition('.')[0]!r}, a "
                             f"{last.layer[0] if last.layer else 'module'}: it must be an nn.Linear")
        return widths[0]

    def features(self, model: Model, x: Tensor) -> Tensor:
        if self._eval_chain is not None:
            found = over_clients(self._features_by_hand, *model, x)
            if found is not None:
                return found[0]
        with self._eval.tapped(self.layout.last_layer) as given:
            self._eval(model, x)
        return self._only(given)

    def _only(self, given: list[Tensor]) -> Tensor:
        """The features, where the head was called once."""
        if len(given) != 1:
            raise UsageError("the features of the model are not known: its last layer "
                             f"{self.layout.last_layer!r} is called {len(given)} times in a pass, not once")
        return as_rows(given[0]).to(self.dtype)

    def _features_by_hand(self, theta: Tensor, stats: Tensor, x: Tensor) -> tuple[Tensor]:
        assert self._eval_chain is not None
        with self._eval.context.of_pass(None, None, self.layout.running(stats)) as context:
            return (as_rows(self._eval_chain.outputs(theta, x, context, self._eval_chain.head), 1),)

    def predict(self, model: Model, x: Tensor) -> Tensor:
        if self._eval_chain is not None:
            found = over_clients(self._predict_by_hand, *model, x)
            if found is not None:
                return found[0]
        outputs: Tensor = self._eval(model, x)[0]
        return outputs

    def _predict_by_hand(self, theta: Tensor, stats: Tensor, x: Tensor) -> tuple[Tensor]:
        assert self._eval_chain is not None
        # clients; a linear model makes nothing on the way, of which there could be too much
        at_once = len(x) if self.is_linear else max(1, PASSED // max(1, x.shape[1]))
        found = []
        for k in range(0, len(x), at_once):
            some = slice(k, k + at_once)
            with self._eval.context.of_pass(None, None, self.layout.running(stats[some])) as context:
                found.append(self._eval_chain.outputs(theta[some], x[some], context))
        return (found[0] if len(found) == 1 else torch.cat(found),)

    def module(self, model: Model) -> nn.Module:
        """An ordinary module with this model's parameters, as the user's own code expects it."""
        return self.layout.load(copied(self._module, self.dtype).to(model.theta.device), model).eval()

    def row_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self._loss(outputs, batch.y)

    def mixture(self, outputs: Tensor, shares: Tensor) -> Tensor:
        """Of probabilities, where the outputs are their logits."""
        log_shares = shares.log().view(-1, *[1] * (outputs.dim() - 1))
        if self.loss_name == "cross_entropy":
            return torch.logsumexp(log_shares + torch.log_softmax(outputs, 2), 0)
        if self.loss_name == "binary_cross_entropy":
            yes, no = (torch.logsumexp(log_shares + F.logsigmoid(sign * outputs), 0) for sign in (1, -1))
            return yes - no
        return super().mixture(outputs, shares)

    def tally(self, outputs: Tensor, batch: Batch) -> Tensor:
        # a named loss is of each row alone; one of the user's is asked for ONE client
        is_named = self._sloped is not None and type(self).row_losses is ModuleTask.row_losses
        losses = None if is_named else self.row_losses(outputs, batch)
        given = (outputs, batch.y, batch.weight, losses)
        found = over_clients(self._tallies, *given)
        if found is not None:
            return found[0]
        alone: list[Any] = [None if each is None else each[None] for each in given]
        return self._tallies(*alone)[0][0]

    def _tallies(self, outputs: Tensor, y: Tensor, weight: Tensor | None, losses: Tensor | None
                 ) -> tuple[Tensor]:
        """The tallies of clients; each tensor has a row per client."""
        if losses is None:
            losses = self._loss(outputs.flatten(0, 1), y.flatten(0, 1)).unflatten(0, y.shape[:2])
        found = [scoring.tally_losses(losses, weight)]
        if self.classes is not None:
            found.append(scoring.tally_classification(outputs, y.long(), weight, self.classes))
        elif "mse" in self.metric_names:
            found.append(scoring.tally_regression(outputs, y, weight))
        return (torch.cat(found, 1),)

    def flaw(self, tally: Tensor, rows: int) -> str | None:
        if (found := super().flaw(tally, rows)) is not None:
            return found
        if self._sloped is not None and tally[1] < 0:  # named losses are never negative
            return f"its losses add up to {tally[1]:g}"
        if self.classes is not None:
            return scoring.classification_flaw(rows, tally[2:])
        return scoring.regression_flaw(rows, tally[2:]) if "mse" in self.metric_names else None

    def auroc(self, outputs: Tensor, batch: Batch) -> Tensor:
        if self.classes is None:
            return super().auroc(outputs, batch)
        weight = torch.ones(len(batch.y), dtype=torch.bool) if batch.weight is None else batch.weight
        return scoring.auroc(outputs, batch.y, weight, self.classes)

    def figures(self, tally: Tensor) -> Tensor:
        found = [scoring.loss_figure(tally)]
        if self.classes is not None:
            found += scoring.classification_figures(tally[0], tally[2:])
        elif "mse" in self.metric_names:
            found += scoring.regression_figures(tally[0], tally[2:])
        return torch.stack(found).to(self.dtype)

    def fitted(self, federation: Federation, *, ours: bool = False) -> ModuleTask:
        """This task for the samples of a federation, or an error that says how model, loss and data disagree.

        The copy knows its metrics and what the module does besides computing outputs (`trial.py`). descant's
        own networks (`ours`) are not tried: their tests do that.
        """
        outputs, y = self._outputs(federation)
        task = copy.copy(self)
        if self.classes is None and y.is_floating_point() and outputs.numel() == y.numel():
            task.metric_names = ("loss", *REGRESSION)
        if ours:
            known = SideEffects(known=True, calls=False)
            task._train, task._eval = self._train.knowing(known), self._eval.knowing(known)
        elif self._chain is None or self._eval_chain is None:
            task._try_out(federation)
        return task

    def _outputs(self, federation: Federation) -> tuple[Tensor, Tensor]:
        """Outputs for two samples, and their targets; an error if anything does not fit."""
        if self.loss_name == "binary_cross_entropy" and federation.classes not in (None, 1, 2):
            raise UsageError(f"the loss binary_cross_entropy is for two classes, and the data has "
                             f"{federation.classes}: use cross_entropy")
        # a copy, because some modules write into their inputs
        x, y = inputs(federation.x[:2], self.dtype).clone(), federation.y[:2]
        try:
            outputs = self.predict(self.init(), x)
        except Exception as error:
            tokens = "" if x.is_floating_point() else (
                f" (integers, {federation.x.dtype}, are tokens: make them float if they are features)")
            raise UsageError(f"the model does not accept the data's samples of shape "
                             f"{tuple(federation.x.shape[1:])}{tokens}: {first_line(error)}") from None
        if not isinstance(outputs, Tensor):
            raise UsageError(f"the model returns {one(outputs)}: it must return one tensor")
        per_class = self.loss_name == "cross_entropy"
        if per_class and self.classes is not None and outputs.shape[1:2] != (self.classes,):
            raise UsageError(f"the model gives outputs of shape {tuple(outputs.shape[1:])} for data with "
                             f"{self.classes} classes: it must give {self.classes} outputs")
        if per_class and y.is_floating_point():
            raise UsageError("the loss cross_entropy is of classes, and the targets are real numbers: give "
                             "class numbers, as of y.astype(int), or take the loss mse")
        try:
            losses = self._trained(outputs, y)
        except Exception as error:
            raise UsageError(f"the loss {self.loss_name} does not fit outputs of shape "
                             f"{tuple(outputs.shape)} and targets of shape {tuple(y.shape)}: "
                             f"{first_line(error)}") from None
        if losses.shape != (len(x),):
            raise UsageError(f"the loss {self.loss_name} gives shape {tuple(losses.shape)} for {len(x)} "
                             'samples: it must give one loss per sample (reduction="none")')
        return outputs, y

    def _try_out(self, federation: Federation) -> None:
        """Adapt this task to what the module does besides computing outputs, or refuse the module."""
        x = inputs(samples(federation.x), self.dtype)
        found = try_module(self._module, self.dtype, x)
        self._prepare(found.layout, found.effects)
        self.draws, self._why_alone = found.draws, found.alone
        y = federation.y[torch.linspace(0, len(federation.y) - 1, ROWS).long()]
        counts = torch.ones(ROWS, dtype=self.dtype)
        self._sample = Batch(x, y, torch.ones(ROWS, dtype=torch.bool), torch.tensor(0), counts)
        try:
            with torch.no_grad():
                self._gradient(self.init(), self._sample)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"the model cannot be trained by gradients: {first_line(error)}") from None

    @property
    def alone(self) -> str | None:
        if self._why_alone is None and self._sample is not None:
            self._why_alone, self._sample = self._unlike_together(self._sample), None
        return self._why_alone

    def _unlike_together(self, batch: Batch) -> str | None:
        """Why two clients, one of them with fewer samples, cannot be run together."""
        other = Batch(batch.x.flip(0), batch.y, torch.arange(ROWS) < REAL, torch.tensor(1), batch.counts)
        batches = stack([batch, other])
        model = self.init()
        models = stack([model, model._replace(theta=model.theta * 1.01)])
        with torch.no_grad(), warnings.catch_warnings():
            # torch would loop over clients, no faster than we do
            warnings.filterwarnings("error", "There is a performance drop")
            try:
                together = vmap(self._gradient)(models, batches)
            except Exception as error:
                return _of_vmap(error)
            for k in range(2):
                each = self._gradient(take(models, k), take(batches, k))
                if not all(_is_near(a, b, self.autocast)
                           for a, b in zip(take(together, k), each, strict=True)):
                    return "the model comes to other results where torch's vmap runs it for several clients"
        return None


def _is_near(a: Tensor, b: Tensor, autocast: Precision | None) -> bool:
    """Up to the rounding of a pass."""
    if autocast is None:
        return torch.allclose(a, b, rtol=1e-2, atol=1e-4, equal_nan=True)
    size = float(b.abs().nan_to_num(0, 0, 0).amax()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=0.1, atol=1e-4 + 0.05 * size, equal_nan=True)


def _of_classes(loss: Any, classes: int | None, weights: Sequence[float]) -> LossName:
    """The loss, if its rows can be weighted in this way."""
    if loss not in ("cross_entropy", "binary_cross_entropy"):
        raise UsageError("model.class_weights is for the losses cross_entropy and binary_cross_entropy, not "
                         f"for {loss!r}: a loss of your own can weight its rows itself")
    if len(weights) != classes:
        raise UsageError(f"model.class_weights has {len(weights)} weights for {classes} classes: give each "
                         "its own, in the order of their numbers")
    named: LossName = loss
    return named


def _of_vmap(error: Exception) -> str:
    """Why vmap cannot run clients together."""
    text = first_line(error)
    if "data-dependent control flow" in text:
        return "the forward pass branches by the values of tensors (if, .item()), and torch's vmap cannot"
    if rule := re.search(r"batching rule for (\S+?)\.? ", f"{text} "):
        return f"torch's vmap has no rule for {rule[1]}, which the model uses"
    return f"torch's vmap: {text.split('. ')[0]}"
