"""The products of a case, without its data: what every way to train these models has to compute.

Forward, weight gradient and (but for the first layer) input gradient of every layer, for several clients in
one batched product, and the SGD update. A convolution is the product of its unfolded shape, the unfolding
being free; or a real one, grouped by clients. Operands lie ready, and are the same in every step.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed.case import Case

#: batched products and then the update; real convolutions in place of unfolded ones; the update as part of
#: the product; products without any update
Kind: TypeAlias = Literal["products", "convolutions", "fused", "bare"]

ROOM = 64 * 2**20  # bytes of the operands of a chunk: larger ones are far from any cache
TEST_ROOM = 4 * 2**20  # likewise in an evaluation, whose products are large by themselves
TINY = 1e-9  # step size: the weights stay what they are


class Window(NamedTuple):
    """A convolution."""

    channels: int
    side: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    side_after: tuple[int, ...]


class Layer(NamedTuple):
    """The product of a layer for ONE client: y [n, outputs] = x [n, inputs] W'."""

    inputs: int
    outputs: int
    positions: int  # n is the number of samples times this: 1, or the places of a convolution's window
    window: Window | None

    def operations(self, samples: int) -> int:
        """Multiplications and additions of the three products."""
        return 6 * samples * self.positions * self.inputs * self.outputs

    def room(self, samples: int) -> int:
        """Bytes of the operands."""
        rows = samples * self.positions
        return 4 * (2 * self.inputs * self.outputs + 2 * rows * self.inputs + 2 * rows * self.outputs)


class Shapes(NamedTuple):
    """What a case comes to."""

    layers: tuple[Layer, ...]
    clients: int
    widths: tuple[int, ...]  # rows of a client's batches
    grads: int  # of each batch
    evaluated: int  # clients, once for each model that is tried on them
    test_rows: int

    @classmethod
    def of(cls, case: Case) -> Shapes:
        return cls(_layers(case), case.cohort, tuple(case.widths), case.grads_per_batch,
                   case.evaluated * case.passes, int(case.federation.test.sizes[0]))

    @property
    def grad_steps(self) -> int:
        return self.clients * len(self.widths) * self.grads


def _layers(case: Case) -> tuple[Layer, ...]:
    """The products of a network, as one sample meets them."""
    found: list[Layer] = []

    def note(layer: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        if isinstance(layer, nn.Linear):
            found.append(Layer(layer.in_features, layer.out_features, 1, None))
        elif isinstance(layer, nn.Conv2d):
            assert isinstance(layer.padding, tuple)
            window = Window(layer.in_channels, tuple(given[0].shape[2:]), layer.kernel_size, layer.stride,
                            layer.padding, tuple(out.shape[2:]))
            found.append(Layer(layer.weight[0].numel(), layer.out_channels, out[0, 0].numel(), window))

    module = case.task.module(case.task.init())
    for layer in module.modules():
        layer.register_forward_hook(note)
    module(torch.zeros(1, *case.federation.x.shape[1:], dtype=case.task.dtype))
    return tuple(found)


class Step(Protocol):
    """A layer of a chunk of clients."""

    def forward(self) -> None: ...

    def backward(self) -> None: ...


class Product:
    def __init__(self, layer: Layer, w: Tensor, samples: int, kind: Kind, is_first: bool) -> None:
        clients, rows = len(w), samples * layer.positions
        self._kind = kind
        self._w = w
        self._step = torch.zeros_like(w)
        self._x = torch.randn(clients, rows, layer.inputs)
        # the shorter side of a product first: that is the faster way
        self._factors = (w, self._x.mT) if layer.outputs < rows else (self._x, w.mT)
        self._y = torch.bmm(*self._factors)
        self._slope = torch.randn(clients, rows, layer.outputs)
        self._slope_transposed = self._slope.mT
        self._back = None if is_first else torch.zeros_like(self._x)

    def forward(self) -> None:
        torch.bmm(*self._factors, out=self._y)

    def backward(self) -> None:
        if self._back is not None:
            torch.bmm(self._slope, self._w, out=self._back)
        if self._kind == "fused":
            self._w.baddbmm_(self._slope_transposed, self._x, alpha=-TINY)
            return
        torch.bmm(self._slope_transposed, self._x, out=self._step)
        if self._kind != "bare":
            self._w.sub_(self._step, alpha=TINY)


class Grouped:
    """A convolution of all clients at once, each with its own window."""

    def __init__(self, layer: Layer, window: Window, w: Tensor, samples: int, is_first: bool) -> None:
        self._window, self._clients, self._is_first = window, len(w), is_first
        # channels last is the better layout on processors, by far for few channels, but not for groups
        layout = torch.channels_last if self._clients == 1 else torch.contiguous_format
        self._w, self._x, self._slope = (tensor.contiguous(memory_format=layout) for tensor in (
            w.reshape(-1, window.channels, *window.kernel),
            torch.randn(samples, self._clients * window.channels, *window.side),
            torch.randn(samples, self._clients * layer.outputs, *window.side_after)))

    def forward(self) -> None:
        F.conv2d(self._x, self._w, None, self._window.stride, self._window.padding, groups=self._clients)

    def backward(self) -> None:
        _, step, _ = torch.ops.aten.convolution_backward(
            self._slope, self._x, self._w, None, self._window.stride, self._window.padding, (1, 1), False,
            (0, 0), self._clients, (not self._is_first, True, False))
        self._w.sub_(step, alpha=TINY)


class Share:
    """The clients that one process works for, some at once."""

    def __init__(self, shapes: Shapes, kind: Kind, chunk: int, clients: int, evaluated: int) -> None:
        self._grads = shapes.grads
        self._chunks = _cut(clients, chunk)
        weights = _weights(shapes, max(self._chunks, default=0))
        self._steps = {(size, width): _steps(shapes, [w[:size] for w in weights], width, kind)
                       for size in {*self._chunks} for width in {*shapes.widths}}
        room = sum(layer.room(shapes.test_rows) for layer in shapes.layers)
        self._tested = _cut(evaluated, max(1, TEST_ROOM // room))
        weights = _weights(shapes, max(self._tested, default=0))
        self._tests = {size: _steps(shapes, [w[:size] for w in weights], shapes.test_rows, "products")
                       for size in {*self._tested}}

    def train(self, widths: tuple[int, ...]) -> None:
        for size in self._chunks:
            for width in widths:
                steps = self._steps[size, width]
                for _ in range(self._grads):
                    for step in steps:
                        step.forward()
                    for step in reversed(steps):
                        step.backward()

    def evaluate(self) -> None:
        for size in self._tested:
            for step in self._tests[size]:
                step.forward()


def _weights(shapes: Shapes, clients: int) -> list[Tensor]:
    return [torch.randn(clients, layer.outputs, layer.inputs) for layer in shapes.layers]


def _steps(shapes: Shapes, weights: list[Tensor], samples: int, kind: Kind) -> list[Step]:
    return [Grouped(layer, layer.window, w, samples, k == 0)
            if kind == "convolutions" and layer.window is not None
            else Product(layer, w, samples, kind, k == 0)
            for k, (layer, w) in enumerate(zip(shapes.layers, weights, strict=True))]


def _cut(count: int, size: int) -> list[int]:
    """The sizes of the parts of a list of that many."""
    return [size] * (count // size) + [count % size] * (count % size > 0)
