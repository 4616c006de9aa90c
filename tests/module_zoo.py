"""Networks as people write them, one for each thing that a module can do. All take [B, 6] and give [B, 3]."""

from __future__ import annotations

import math
import random as python_random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

IN, OUT = 6, 3


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return make().double()


def head(body: nn.Module, width: int = IN) -> nn.Module:
    """Something that is learned before and after, so that gradients pass through `body`."""
    return nn.Sequential(nn.Linear(IN, IN), body, nn.Flatten(), nn.Linear(width, OUT))


class Net(nn.Module):
    """A network whose forward pass is given: f(self, x)."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(IN, IN), nn.Linear(IN, OUT)
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


def net(forward: Callable[[Any, Tensor], Any], **parts: Any) -> nn.Module:
    return Net(forward, **parts)


# -- subclasses of layers that are known by type -------------------------------------------------------


class NormReLU(nn.BatchNorm1d):
    """As timm's BatchNormAct2d: torch's BatchNorm, then an activation."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class NormAct(nn.BatchNorm2d):
    """The other way to write it: the function itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training,
                         self.momentum, self.eps)
        return F.silu(x)


class NormByHand(nn.BatchNorm1d):
    """Not even that: means and variances by hand."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean, var = x.mean(0), x.var(0, unbiased=False)
            with torch.no_grad():
                self.running_mean.lerp_(mean, 0.1)
                self.running_var.lerp_(var, 0.1)
        else:
            mean, var = self.running_mean, self.running_var
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


class HalfDropout(nn.Dropout):
    """Drops in half of the columns only."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x[:, :3]), x[:, 3:]], 1)


class NoDropout(nn.Dropout):
    """Another name for something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class PlainDropout(nn.Dropout):
    """A subclass that changes nothing."""


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Leak(nn.LeakyReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * x.square()


class Flat(nn.Flatten):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(1)


class Rectified(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


class ScaledConv(nn.Conv1d):
    """Weight standardisation."""

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight - self.weight.mean((1, 2), keepdim=True)) / (
            self.weight.std((1, 2), keepdim=True) + 1e-5)
        return F.conv1d(x, weight, self.bias, self.stride, self.padding)


class MeanPool(nn.MaxPool1d):
    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool1d(x, 2)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class LastState(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0][:, -1]


class WideGRU(nn.GRU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0].flatten(1)


# -- attention, recurrence, normalisation --------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **fields)
        self.embed = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.view(len(x), 3, 2))
        return self.attention(x, x, x)[0]


class OwnAttention(nn.Module):
    """Written out, with einsum, a mask in a buffer, and the weights kept to be looked at."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(2, 12), dropout
        self.register_buffer("mask", torch.ones(3, 3).tril().bool())
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.view(len(x), 3, 2)).chunk(3, -1)
        weights = torch.einsum("btc,bsc->bts", q, k) / 2
        weights = weights.masked_fill(~self.mask, -math.inf).softmax(-1)
        self.seen = weights.detach()
        weights = F.dropout(weights, self.dropout, self.training)
        return torch.einsum("bts,bsc->btc", weights, v)


class Fused(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(2, 12), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.view(len(x), 3, 2)).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)


def transformer(batch_first: bool = True, dropout: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=dropout, batch_first=batch_first, activation="gelu")

    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.embed(x.view(len(x), 3, 2))
        x = self.layer(x) if batch_first else self.layer(x.transpose(0, 1)).transpose(0, 1)
        return self.read(x.mean(1))

    return net(forward, embed=nn.Linear(2, 4), layer=layer, read=nn.Linear(4, OUT))


def recurrent(kind: Any, **fields: Any) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.read(self.rnn(x.view(len(x), 3, 2))[0][:, -1])

    return net(forward, rnn=kind(2, 4, batch_first=True, **fields), read=nn.Linear(4, OUT))


def images(*layers: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(IN, 16), nn.Unflatten(1, (4, 2, 2)), *layers, nn.Flatten(),
                         nn.Linear(width, OUT))


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(IN, IN), nn.Tanh(), nn.Linear(IN, IN), nn.Tanh(), nn.Linear(IN, OUT))
    module[2].weight = module[0].weight
    return module


def frozen() -> nn.Module:
    module = head(nn.Tanh())
    module[0].requires_grad_(False)
    return module


def frozen_norm() -> nn.Module:
    """A BatchNorm that stays in prediction mode, and is not learned."""

    class Kept(nn.Sequential):
        def train(self, mode: bool = True) -> Kept:
            super().train(mode)
            self[1].eval()
            return self

    module = Kept(nn.Linear(IN, IN), nn.BatchNorm1d(IN), nn.Tanh(), nn.Linear(IN, OUT))
    module[1].requires_grad_(False)
    return module


def hooked(kind: str) -> nn.Module:
    module = head(nn.Tanh())
    if kind == "forward":
        module[0].register_forward_hook(lambda layer, given, out: out + 1)
    elif kind == "pre":
        module[0].register_forward_pre_hook(lambda layer, given: (2 * given[0],))
    else:
        module[3].register_full_backward_hook(lambda layer, into, out: tuple(
            None if g is None else 0.5 * g for g in into))
    return module


def replaced() -> nn.Module:
    """`forward` set on the layer itself."""
    module = head(nn.Tanh())
    module[1].forward = torch.sin
    return module


class Cubed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x ** 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * slope


class OldFunction(torch.autograd.Function):
    """In the old style, which vmap does not take."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x ** 3

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * slope


def branch(self: Any, x: Tensor) -> Tensor:
    """Control flow by a value, sample by sample."""
    rows = [self.first(row) if row.sum() > 0 else -self.first(row) for row in x]
    return self.last(torch.stack(rows))


def in_place(self: Any, x: Tensor) -> Tensor:
    x.sub_(0.5).mul_(2)
    return self.last(F.relu_(self.first(x)))


def ema(self: Any, x: Tensor) -> Tensor:
    """The issue's: an exponential mean of what is seen, in a buffer."""
    if self.training:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
    return self.last(self.first(x - self.mean))


def ema_anew(self: Any, x: Tensor) -> Tensor:
    """The same with a new tensor in the buffer's place."""
    if self.training:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
    return self.last(self.first(x - self.mean))


def plus(part: str) -> Callable[[Any, Tensor], Tensor]:
    return lambda self, x: self.last(torch.tanh(getattr(self, part)(self.first(x))))


def lazy() -> nn.Module:
    module = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyBatchNorm1d(), nn.LazyLinear(OUT))
    module.double()(torch.randn(4, IN, dtype=torch.float64))
    return module


def listed() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + scale * torch.tanh(layer(x))
        return self.named["last"](self.named["norm"](x))

    return net(forward, layers=nn.ModuleList(nn.Linear(IN, IN) for _ in range(2)),
               scales=nn.ParameterList([nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(IN))]),
               named=nn.ModuleDict({"norm": nn.LayerNorm(IN), "last": nn.Linear(IN, OUT)}))


def embedding(**fields: Any) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.last(self.table((x > 0).long()).sum(2) + self.first(x))

    return net(forward, table=nn.Embedding(2, 4, **fields))


def spectrum(self: Any, x: Tensor) -> Tensor:
    """Complex numbers in a buffer."""
    return self.last(torch.fft.irfft(torch.fft.rfft(self.first(x)) * self.filter, n=IN))


EXACT: dict[str, Callable[[], nn.Module]] = {
    # subclasses of layers that are known by type
    "norm with relu": lambda: head(NormReLU(IN)),
    "norm with silu": lambda: images(NormAct(4), width=16),
    "norm by hand": lambda: head(NormByHand(IN)),
    "dropout that is none": lambda: head(NoDropout(0.5)),
    "linear": lambda: nn.Sequential(Doubled(IN, IN), nn.Tanh(), nn.Linear(IN, OUT)),
    "leaky relu": lambda: head(Leak()),
    "flatten": lambda: nn.Sequential(nn.Linear(IN, IN), Flat(), nn.Tanh(), nn.Linear(IN, OUT)),
    "relu": lambda: head(Rectified()),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), ScaledConv(2, 3, 2), nn.Flatten(),
                                         nn.Linear(6, OUT)),
    "pooling": lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 1), MeanPool(2), nn.Flatten(),
                                     nn.Linear(6, OUT)),
    "residual": lambda: nn.Sequential(Residual(nn.Linear(IN, IN), nn.Tanh()), nn.Linear(IN, OUT)),
    "lstm": lambda: nn.Sequential(nn.Unflatten(1, (3, 2)), LastState(2, 4, batch_first=True),
                                  nn.Linear(4, OUT)),
    "gru": lambda: nn.Sequential(nn.Unflatten(1, (3, 2)), WideGRU(2, 4, batch_first=True),
                                 nn.Linear(12, OUT)),
    # attention and recurrence
    "multi-head attention": lambda: head(Attention(), 12),
    "attention by hand": lambda: head(OwnAttention(), 12),
    "fused attention": lambda: head(Fused(), 12),
    "transformer": lambda: transformer(),
    "transformer, time first": lambda: transformer(batch_first=False),
    "torch's lstm": lambda: recurrent(nn.LSTM),
    "torch's gru": lambda: recurrent(nn.GRU, num_layers=2),
    "torch's rnn": lambda: recurrent(nn.RNN, nonlinearity="relu", bias=False),
    # normalisation
    "batch norm": lambda: net(plus("norm"), norm=nn.BatchNorm1d(IN)),
    "batch norm 3d": lambda: nn.Sequential(nn.Linear(IN, 16), nn.Unflatten(1, (2, 2, 2, 2)),
                                           nn.Conv3d(2, 2, 1), nn.BatchNorm3d(2), nn.Flatten(),
                                           nn.Linear(16, OUT)),
    "batch norm over steps": lambda: net(
        lambda self, x: self.last(self.norm(self.first(x).reshape(-1, 2)).view(len(x), IN)),
        norm=nn.BatchNorm1d(2)),
    "sync batch norm": lambda: head(nn.SyncBatchNorm(IN)),
    "frozen batch norm": frozen_norm,
    "layer norm": lambda: head(nn.LayerNorm(IN)),
    "rms norm": lambda: head(nn.RMSNorm(IN)),
    "group norm": lambda: images(nn.GroupNorm(2, 4), width=16),
    "instance norm": lambda: images(nn.InstanceNorm2d(4, affine=True), width=16),
    "instance norm with statistics": lambda: images(nn.InstanceNorm2d(4, track_running_stats=True), width=16),
    "local response norm": lambda: images(nn.LocalResponseNorm(2), width=16),
    "weight norm": lambda: head(parametrizations.weight_norm(nn.Linear(IN, IN))),
    "spectral norm": lambda: head(parametrizations.spectral_norm(nn.Linear(IN, IN))),
    "old spectral norm": lambda: head(nn.utils.spectral_norm(nn.Linear(IN, IN))),
    "orthogonal": lambda: head(parametrizations.orthogonal(nn.Linear(IN, IN, bias=False))),
    # parameters
    "tied": tied,
    "frozen": frozen,
    "lists of parts": listed,
    "lazy, called": lazy,
    "embedding": embedding,
    "bilinear": lambda: net(lambda self, x: self.both(self.first(x), x), both=nn.Bilinear(IN, IN, OUT)),
    "prelu": lambda: head(nn.PReLU(IN)),
    "convolution 2d": lambda: images(nn.Conv2d(4, 3, 3, padding="same"), nn.AdaptiveAvgPool2d(1), width=3),
    "convolution 3d": lambda: nn.Sequential(nn.Linear(IN, 8), nn.Unflatten(1, (1, 2, 2, 2)),
                                            nn.Conv3d(1, 2, 2), nn.Flatten(), nn.Linear(2, OUT)),
    "transposed convolution": lambda: images(nn.ConvTranspose2d(4, 2, 2), nn.GELU(), width=18),
    "softmax": lambda: nn.Sequential(nn.Linear(IN, OUT), nn.LogSoftmax(1)),
    # buffers and hooks
    "complex buffer": lambda: net(spectrum, filter=torch.tensor([1, 1j, 2, 1 - 1j], dtype=torch.complex64)),
    "index buffer": lambda: net(lambda self, x: self.last(self.first(x)[:, self.order]),
                                order=torch.tensor([5, 3, 1, 0, 2, 4])),
    "mean in a buffer": lambda: net(ema, mean=torch.zeros(IN)),
    "mean in a new buffer": lambda: net(ema_anew, mean=torch.zeros(IN)),
    "forward hook": lambda: hooked("forward"),
    "pre hook": lambda: hooked("pre"),
    "backward hook": lambda: hooked("backward"),
    "forward replaced": replaced,
    # code
    "autograd function": lambda: net(lambda self, x: self.last(Cubed.apply(self.first(x)))),
    "old autograd function": lambda: net(lambda self, x: self.last(OldFunction.apply(self.first(x)))),
    "control flow": lambda: net(branch),
    "in place": lambda: net(in_place),
    "in place layers": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(IN, IN), nn.ELU(inplace=True),
                                             nn.Linear(IN, OUT)),
    "size of the batch": lambda: net(lambda self, x: self.last(self.first(x).view(x.size(0), -1))),
    "otherwise in training": lambda: net(
        lambda self, x: self.last(self.first(x) * (2 if self.training else 1))),
}


class DropPath(nn.Module):
    """Stochastic depth, as in timm; `empty`: as in torchvision."""

    def __init__(self, keep: float, how: str) -> None:
        super().__init__()
        self.keep, self.how = keep, how

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        shape = (len(x), 1)
        if self.how == "new":
            mask = x.new_empty(shape).bernoulli_(self.keep)
        elif self.how == "empty":
            mask = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(self.keep)
        elif self.how == "rand":
            mask = (self.keep + torch.rand(shape, dtype=x.dtype)).floor_()
        else:
            mask = torch.bernoulli(torch.full(shape, self.keep, dtype=x.dtype))
        return x * mask / self.keep


def noise(self: Any, x: Tensor) -> Tensor:
    """The reparametrisation of a variational layer."""
    x = self.first(x)
    return self.last(x + torch.randn_like(x) if self.training else x)


def functional(f: Callable[..., Tensor]) -> nn.Module:
    return net(lambda self, x: self.last(f(self.first(x).view(len(x), 3, 2), 0.3, self.training).flatten(1)))


RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout subclass": lambda: head(HalfDropout(0.4)),
    "dropout subclass as it is": lambda: head(PlainDropout(0.4)),
    "functional dropout": lambda: functional(F.dropout),
    "functional dropout of channels": lambda: functional(F.dropout1d),
    "dropout in place": lambda: net(lambda self, x: self.last(self.drop(y := self.first(x)) + y),
                                    drop=nn.Dropout(0.3, inplace=True)),
    "norm and dropout": lambda: nn.Sequential(nn.Linear(IN, IN), NormReLU(IN), HalfDropout(0.3),
                                              nn.Linear(IN, OUT)),
    "drop path": lambda: head(DropPath(0.6, "new")),
    "drop path, empty": lambda: head(DropPath(0.6, "empty")),
    "drop path, rand": lambda: head(DropPath(0.6, "rand")),
    "drop path, bernoulli": lambda: head(DropPath(0.6, "bernoulli")),
    "noise": lambda: net(noise),
    "alpha dropout": lambda: head(nn.AlphaDropout(0.3)),
    "random relu": lambda: head(nn.RReLU()),
    "attention with dropout": lambda: head(Attention(dropout=0.3), 12),
    "attention by hand with dropout": lambda: head(OwnAttention(0.3), 12),
    "fused attention with dropout": lambda: head(Fused(0.3), 12),
    "transformer with dropout": lambda: transformer(dropout=0.3),
    "transformer with dropout, time first": lambda: transformer(False, dropout=0.3),
    "lstm with dropout": lambda: recurrent(nn.LSTM, num_layers=2, dropout=0.3),
    "gru with dropout": lambda: recurrent(nn.GRU, num_layers=2, dropout=0.3),
    "gumbel": lambda: net(lambda self, x: self.last(
        F.gumbel_softmax(self.first(x)) if self.training else self.first(x).softmax(1))),
}


class Counts(nn.Module):
    """Keeps something of every pass in a plain attribute."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.seen, self.log = how, 0, []

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "counter":
            self.seen += 1
        elif self.how == "list":
            self.log.append(len(x))
        elif self.training:
            mean = x.mean(0).detach()
            self.seen = mean if self.how == "last" else 0.9 * self.seen + 0.1 * mean
        return x if self.how in ("counter", "list") else x - self.seen


def _counting(self: Any, x: Tensor) -> Tensor:
    if self.training:
        self.step += 1
    return self.last(self.first(x) / (1 + self.step))


def _written_always(self: Any, x: Tensor) -> Tensor:
    self.mean.lerp_(x.mean(0).detach(), 0.1)
    return self.last(self.first(x - self.mean))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "'0.weight' of the model is not initialised"),
    "tuple": (lambda: net(lambda self, x: (self.last(x), x)), "returns a tuple"),
    "whole-number buffer": (lambda: net(_counting, step=torch.zeros((), dtype=torch.long)),
                            r"Net writes its buffer 'step' of torch.int64"),
    "writes in prediction": (lambda: net(_written_always, mean=torch.zeros(IN)),
                             "Net writes 'mean' also when it predicts"),
    "draws in prediction": (lambda: net(lambda self, x: self.last(F.dropout(self.first(x)))),
                            "draws random numbers when it predicts"),
    "draws in a layer's prediction": (lambda: head(net(lambda self, x: x + torch.rand_like(x)), IN),
                                      r"layer '1' \(Net\) draws random numbers when it predicts"),
    "numpy's generator": (lambda: net(lambda self, x: self.last(
        x * np.random.rand() if self.training else x)), "from numpy's generator"),
    "Python's generator": (lambda: net(lambda self, x: self.last(
        x * python_random.random() if self.training else x)), "from Python's generator"),
    "counter": (lambda: head(Counts("counter")), r"layer '1' \(Counts\) keeps '1.seen'"),
    "list": (lambda: head(Counts("list")), r"layer '1' \(Counts\) keeps '1.log'"),
    "mean in an attribute": (lambda: head(Counts("mean")), r"layer '1' \(Counts\) keeps '1.seen'"),
    "last batch in an attribute": (lambda: head(Counts("last")),
                                   r"layer '1' \(Counts\) keeps '1.seen' of a training pass"),
    "attention over the batch": (lambda: net(lambda self, x: self.last(self.embed(
        self.layer(self.first(x)[:, None])[:, 0])), layer=nn.TransformerEncoderLayer(IN, 2, 8, dropout=0.0),
        embed=nn.Identity()), r"layer 'layer\b.*mixes the samples of a batch when it predicts"),
    "mean over the batch": (lambda: net(lambda self, x: self.last(self.first(x - x.mean(0)))),
                            "Net mixes the samples of a batch when it predicts"),
    "batch norm without statistics": (lambda: head(nn.BatchNorm1d(IN, track_running_stats=False)),
                                      "layer '1': BatchNorm needs track_running_stats"),
    "renormed embedding": (lambda: embedding(max_norm=0.1),
                           r"layer 'table' \(Embedding\) writes 'table.weight'"),
    "complex parameter": (lambda: net(spectrum, filter=nn.Parameter(torch.ones(4, dtype=torch.complex64))),
                          "'filter' of the model is of torch.complex"),
    "not differentiable": (lambda: net(lambda self, x: self.last(x).detach()),
                           "cannot be trained by gradients"),
    "fails in training": (lambda: net(lambda self, x: self.last(x) if not self.training else self.none(x)),
                          "fails in training.*none"),
    "not to be copied": (lambda: head(nn.utils.weight_norm(nn.Linear(IN, IN))), "cannot be copied"),
}
