"""The opponent: the same methods as a researcher writes them in plain PyTorch, without a framework.

One `nn.Module` per client, samples as float tensors in memory, one gradient after another in one thread.
Nothing is wasted: batches are slices of rows that are shuffled once, gradients are taken without `.grad`
buffers, and updates are made in place. Of descant it uses the networks, and the order of the batches, so
that its models can be compared with the engine's.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed.case import BATCH, SEED, Case
from benchmarks.speed.side import COMPARED, Played, Scored
from descant.algorithms.fedavg import FedAvg
from descant.algorithms.pfedbred import pFedBreD
from descant.algorithms.pfedme import pFedMe
from descant.core.task import inputs
from descant.engine.batches import LocalWork, plan_chunk
from descant.engine.pool import Pool
from descant.engine.rounds import Training


class Net(NamedTuple):
    module: nn.Module
    parameters: list[nn.Parameter]

    @classmethod
    def like(cls, module: nn.Module) -> Net:
        own = copy.deepcopy(module)
        return cls(own, list(own.parameters()))


class Batches(NamedTuple):
    """A client's batches of a round."""

    x: tuple[Tensor, ...]
    y: tuple[Tensor, ...]


class Lean:
    note = ""

    def __init__(self, case: Case) -> None:
        task, federation = case.task, case.federation
        self._case = case
        self._sampling = Training(case.work, case.train("loop"))  # knows who takes part in which round
        module = task.module(task.init()).train()
        self._shared = Net.like(module)  # the server's w
        self._work = Net.like(module)  # w_i of the client at work
        self._own = [Net.like(module) for _ in range(federation.population)]  # theta of every client
        self._memory = [[p.detach().clone() for p in net.parameters] for net in self._own] \
            if isinstance(case.algorithm, pFedBreD) else []
        self._train, self._test = (
            [(inputs(federation.x[table[k]], task.dtype), federation.y[table[k]]) for k in range(clients)]
            for table, clients in ((federation.train, federation.population),
                                   (federation.test, case.evaluated)))
        self._cohort = np.zeros(0, np.int64)
        self._steps = 0

    def round(self) -> Played:
        self._sampling.number += 1
        self._cohort, _ = self._sampling.sample()
        orders, widths = self._orders(), self._case.widths
        sizes = self._case.federation.train.sizes[self._cohort]
        weights = (sizes / sizes.sum()).tolist()
        self._steps = 0

        start = time.perf_counter()
        total = [torch.zeros_like(p) for p in self._shared.parameters]
        for client, order, weight in zip(self._cohort.tolist(), orders, weights, strict=True):
            x, y = self._train[client]
            upload = self._local(client, Batches(x[order].split(widths), y[order].split(widths)))
            with torch.no_grad():
                for into, p in zip(total, upload, strict=True):
                    into.add_(p, alpha=weight)
        _copy(total, self._shared.parameters)
        return Played(time.perf_counter() - start, self._steps)

    def _orders(self) -> list[Tensor]:
        """The rows of each client's batches, end to end, as places in its own list."""
        train = self._case.federation.train
        _, tensors = plan_chunk(
            Pool.as_it_lies(self._case.federation), self._cohort, seed=SEED, purpose="local",
            number=self._sampling.number, batch=BATCH, work=LocalWork(steps=self._case.batches), per_step=1,
            dtype=torch.float32, draws=False, splits=())
        return [torch.from_numpy(_places(train[int(client)], rows.numpy()))
                for client, rows in zip(self._cohort, tensors.rows, strict=True)]

    def _local(self, client: int, batches: Batches) -> list[nn.Parameter]:
        method = self._case.algorithm
        if isinstance(method, FedAvg):
            return self._fedavg(method, client, batches)
        if isinstance(method, pFedMe):
            return self._pfedme(method, client, batches)
        return self._mh(method, client, batches)

    def _fedavg(self, method: FedAvg, client: int, batches: Batches) -> list[nn.Parameter]:
        net = self._own[client]
        _copy(self._shared.parameters, net.parameters)
        for x, y in zip(*batches, strict=True):
            gradient = self._gradient(net, x, y)
            with torch.no_grad():
                for p, g in zip(net.parameters, gradient, strict=True):
                    p.sub_(g, alpha=method.solver.lr)
        return net.parameters

    def _pfedme(self, method: pFedMe, client: int, batches: Batches) -> list[nn.Parameter]:
        theta, work = self._own[client], self._work
        lam = float(method.lam)  # type: ignore[arg-type]  # a number, not a rule
        _copy(self._shared.parameters, work.parameters)
        _copy(self._shared.parameters, theta.parameters)
        for x, y in zip(*batches, strict=True):
            for _ in range(method.K):  # theta <- theta - alpha (gradient + lam (theta - w))
                gradient = self._gradient(theta, x, y)
                with torch.no_grad():
                    for p, w, g in zip(theta.parameters, work.parameters, gradient, strict=True):
                        p.lerp_(w, method.alpha * lam).sub_(g, alpha=method.alpha)
            with torch.no_grad():  # w <- w - eta lam (w - theta)
                for w, p in zip(work.parameters, theta.parameters, strict=True):
                    w.lerp_(p, method.eta * lam)
        return work.parameters

    def _mh(self, method: pFedBreD, client: int, batches: Batches) -> list[nn.Parameter]:
        theta, work, memory = self._own[client], self._work, self._memory[client]
        lam = float(method.lam)  # type: ignore[arg-type]  # a number, not a rule
        _copy(self._shared.parameters, work.parameters)
        for x, y in zip(*batches, strict=True):
            gradient = self._gradient(work, x, y)
            with torch.no_grad():  # mu = w - eta_a grad f(w) - eta (memory - theta)
                mu = [torch.sub(w, g, alpha=method.eta_a).sub_(m - p, alpha=method.eta) for w, g, m, p
                      in zip(work.parameters, gradient, memory, theta.parameters, strict=True)]
            for _ in range(method.K):  # theta <- theta - a (gradient + lam (theta - mu))
                gradient = self._gradient(theta, x, y)
                with torch.no_grad():
                    for p, m, g in zip(theta.parameters, mu, gradient, strict=True):
                        p.lerp_(m, method.a * lam).sub_(g, alpha=method.a)
            with torch.no_grad():  # w <- w - a_m lam (mu - theta)
                for w, m, p in zip(work.parameters, mu, theta.parameters, strict=True):
                    w.sub_(m - p, alpha=method.a_m * lam)
        _copy(work.parameters, memory)
        return work.parameters

    def _gradient(self, net: Net, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        self._steps += 1
        return torch.autograd.grad(F.cross_entropy(net.module(x), y), net.parameters)

    def evaluate(self) -> Scored:
        is_personal = not isinstance(self._case.algorithm, FedAvg)
        start = time.perf_counter()
        with torch.no_grad():
            nets = [net if is_personal else self._shared for net in self._own]
            personal = self._accuracy(nets)
            if is_personal:
                self._accuracy([self._shared] * len(nets))
        return Scored(time.perf_counter() - start, personal)

    def _accuracy(self, nets: list[Net]) -> float:
        """The mean over the clients; the losses are computed as well, because everybody reports them."""
        losses, accuracies = [], []
        for net, (x, y) in zip(nets[: self._case.evaluated], self._test, strict=True):
            outputs = net.module(x)
            losses.append(F.cross_entropy(outputs, y))
            accuracies.append((outputs.argmax(1) == y).float().mean())
        torch.stack(losses).mean()
        return float(torch.stack(accuracies).mean())

    def models(self) -> Tensor:
        """[1 + some clients, d]: w, and what some clients of the last round predict with."""
        is_personal = not isinstance(self._case.algorithm, FedAvg)
        own = [self._own[k] if is_personal else self._shared for k in self._cohort[:COMPARED]]
        return torch.stack([torch.cat([p.detach().reshape(-1) for p in net.parameters])
                            for net in (self._shared, *own)])

    def close(self) -> None:
        """Nothing is held."""


def _copy(source: Sequence[Tensor], target: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for value, into in zip(source, target, strict=True):
            into.copy_(value)


def _places(own: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Where each of the rows stands in a client's list."""
    order = np.argsort(own)
    return np.asarray(order[np.searchsorted(own, rows, sorter=order)])
