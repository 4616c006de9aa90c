"""pFedHN: a hypernetwork on the server makes every client's model from an embedding of the client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from descant.core.algorithm import Algorithm, ClientData, Message, Round
from descant.core.fields import hyper
from descant.core.kernels.products import some_rows
from descant.core.ranges import Step
from descant.core.task import Batch, Task
from descant.core.tree import Tree, leaves, rebuild
from descant.core.vector import Model
from descant.priors.quadratic import Flat
from descant.priors.solve import SGD, Solver, solve

BLOCK = 64  # clients whose models are made together


class Layer(NamedTuple):
    weight: Tensor  # [outputs, inputs]
    bias: Tensor  # [outputs]


class Server(NamedTuple):
    phi: tuple[Layer, ...]  # the hypernetwork
    v: Tensor  # [m, e] the embeddings of all clients
    stats: Tensor  # [s] the mean of the statistics of the last cohort
    memory: Tree  # of the server's optimizer, for each tensor of phi and v


class Upload(NamedTuple):
    delta: Tensor  # [d] how far the client moved from theta_i
    stats: Tensor  # [s]


class Newcomer(NamedTuple):
    phi: tuple[Layer, ...]
    v: Tensor  # [e]
    stats: Tensor  # [s]


@dataclass(frozen=True)
class pFedHN(Algorithm):
    """Personalized federated learning by a hypernetwork h(v; phi), which never leaves the server.

    Server:  theta_i = h(v_i; phi) is sent to client i alone.
    Client:  theta <- theta - lr grad f_i(theta)   from theta_i;  uploads delta_i = theta - theta_i.
    Server:  one step of its optimizer on (phi, v), for the gradient
                 g_phi = -mean_{i in S} (dh/dphi)' delta_i,    g_{v_i} = -(1/|S|) (dh/dv_i)' delta_i,
             which is shortened where its norm is above `clip`.

    h has `layers` hidden layers of `hidden` units with ReLU, and a linear layer that gives all d parameters.
    The client predicts with theta_i: what it trained in a round serves the server alone.
    Ours: the last layer of h begins with weights of zero and the common initial model as its bias, so that
    all clients begin there; the authors begin at random models. Their server asks one client a round, for
    5000 rounds; a larger cohort gives the mean gradient. With momentum, absent clients' embeddings move too.
    A newcomer is sent the hypernetwork, which is `hidden` + 1 times as large as a model, and the mean
    embedding, and fits the embedding alone, v <- v - lr_v (dh/dv)' grad f(h(v)), on its own batches.
    Statistics of BatchNorm are averaged.
    """

    name: ClassVar[str] = "pfedhn"
    citation: ClassVar[str] = ("Shamsian, Navon, Fetaya, Chechik: Personalized Federated Learning using "
                               "Hypernetworks. ICML 2021, arXiv:2103.04628")
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {
        "solver": SGD(lr=0.005, momentum=0.9, weight_decay=5e-5),
        "server": SGD(lr=0.01, momentum=0.9, weight_decay=1e-3)}}

    embedding: int | None = hyper(None, "length of an embedding; absent: 1 + m / 4 for m clients", ge=1)
    hidden: int = hyper(100, "width of the hidden layers of the hypernetwork", ge=1)
    layers: int = hyper(3, "hidden layers of the hypernetwork; 0: it is linear", ge=0)
    solver: Solver = hyper(SGD(lr=0.05), "local optimizer")
    server: Solver = hyper(SGD(lr=0.03, momentum=0.9), "optimizer of hypernetwork and embeddings")
    clip: float = hyper(50.0, "largest norm of the server's gradient", gt=0)
    lr_v: float = hyper(0.1, "step size with which a newcomer fits its embedding", gt=0,
                        search=Step(0.001, 1.0))

    def init_server(self, task: Task, model: Model, round: Round) -> Server:
        generator = round.generator("hypernetwork")

        def drawn(*shape: int, scale: float) -> Tensor:
            return scale * torch.from_numpy(generator.standard_normal(shape)).to(model.theta.dtype)

        e = self.embedding or 1 + round.population // 4
        v = drawn(round.population, e, scale=1.0)
        widths = [e, *[self.hidden] * self.layers]
        phi = [Layer(drawn(n, k, scale=(2 / k) ** 0.5), v.new_zeros(n))
               for k, n in pairwise(widths)]
        phi.append(Layer(v.new_zeros(task.dim, widths[-1]), model.theta.clone()))
        memory = tuple(self.server.init(each) for _, each in leaves((tuple(phi), v)))
        return Server(tuple(phi), v, model.stats, memory)

    def broadcast(self, server: Server, round: Round) -> Message:
        blocks = []
        for k in (round.cohort // BLOCK).unique().tolist():  # always the same: no bit depends on the cohort
            rows = round.cohort[round.cohort // BLOCK == k] - k * BLOCK
            blocks.append((_inputs(server.phi, server.v[k * BLOCK : (k + 1) * BLOCK])[-1], rows))
        thetas = some_rows(blocks, server.phi[-1].weight.T, server.phi[-1].bias)
        return Message(each=Model(thetas, server.stats.expand(len(round.cohort), -1)))

    def local(self, task: Task, message: Message, state: tuple[()], data: ClientData
              ) -> tuple[Upload, tuple[()]]:
        theta_i: Model = message.each
        moved = solve(task, theta_i, data, self.solver)
        return Upload(moved.theta - theta_i.theta, moved.stats), ()

    def aggregate(self, server: Server, uploads: Upload, round: Round) -> tuple[Server, dict[str, Any]]:
        slopes, inputs = pulled_back(server.phi, server.v[round.cohort], -uploads.delta / len(uploads.delta))
        g_v = torch.zeros_like(server.v).index_copy(0, round.cohort, slopes[0])
        g_phi = tuple(Layer(g.T @ x, g.sum(0)) for g, x in zip(slopes[1:], inputs, strict=True))
        gradients = dict(leaves((g_phi, g_v)))
        norms = torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()])
        norm = torch.linalg.vector_norm(norms)
        if norm > self.clip:
            gradients = {name: self.clip / norm * g for name, g in gradients.items()}
        moved, memory = {}, []
        for (name, old), state in zip(leaves((server.phi, server.v)), server.memory, strict=True):
            moved[name], kept = self.server.step(old, gradients[name], Flat(), state)
            memory.append(kept)
        phi, v = rebuild((server.phi, server.v), moved)
        return Server(phi, v, uploads.stats.mean(0), tuple(memory)), {"gradient": norm}

    def personalize(self, task: Task, message: Message, state: tuple[()], data: ClientData) -> Model:
        theta_i: Model = message.each
        return theta_i

    def newcomer(self, server: Server, round: Round) -> Message:
        return Message(Newcomer(server.phi, server.v.mean(0), server.stats))

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        phi, v, stats = message.shared

        def step(carry: tuple[Tensor, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
            v, stats = carry
            gradient = task.grad(Model(generated(phi, v), stats), batch)
            slopes, _ = pulled_back(phi, v, gradient.theta)
            return v - self.lr_v * slopes[0], gradient.stats

        v, stats = data.scan(step, (v, stats))
        return Model(generated(phi, v), stats)


def generated(phi: tuple[Layer, ...], v: Tensor) -> Tensor:
    """h(v; phi): parameters [..., d] from embeddings [..., e]."""
    return F.linear(_inputs(phi, v)[-1], *phi[-1])


def pulled_back(phi: tuple[Layer, ...], v: Tensor, slope: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The slopes for v and for what each layer gives, from those [..., d] for h(v; phi); and the layers'
    inputs. Written out: torch.func.vjp takes seconds to import what it needs."""
    inputs, slopes = _inputs(phi, v), [slope]
    for layer, x in zip(phi[:0:-1], inputs[:0:-1], strict=True):
        slopes.insert(0, (slopes[0] @ layer.weight).where(x > 0, 0.0))  # x is of a ReLU
    return [slopes[0] @ phi[0].weight, *slopes], inputs


def _inputs(phi: tuple[Layer, ...], v: Tensor) -> list[Tensor]:
    """What each layer is given."""
    given = [v]
    for layer in phi[:-1]:
        given.append(F.relu(F.linear(given[-1], *layer)))
    return given
