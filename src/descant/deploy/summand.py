"""What ONE client adds to the sum of a round, as a vector: its weighted contribution, and its loss."""

from __future__ import annotations

import dataclasses
import hashlib
import math

import torch
from torch import Tensor

from descant.core.algorithm import Algorithm, Message
from descant.core.sums import Total
from descant.core.tree import Tree, leaves, rebuild
from descant.deploy.messages import WireMessage
from descant.deploy.protocol import Shapes
from descant.deploy.secure.encoding import Numbers
from descant.engine.work import Job, LocalResult

LOSSES = 2  # entries after the contribution: the mean training loss, and whether there is one


class Summand:
    """The form of the vectors of a job."""

    def __init__(self, method: Algorithm, shapes: Shapes, job: Job) -> None:
        message, result = shapes.messages[job], shapes.results[job]
        self.form: Tree = method.contribution(Message(message.shared, message.each), result.upload)
        self.length = sum(leaf.numel() for _, leaf in leaves(self.form)) + LOSSES

    def vector(self, method: Algorithm, message: Message, value: LocalResult, share: float) -> Numbers:
        """Of a client that counts `share`. `message` is what this client was sent."""
        own = dict(leaves(method.contribution(message, value.upload)))
        parts = [share * own[name].double().flatten() for name, _ in leaves(self.form)]
        loss = float(value.loss)
        has_loss = math.isfinite(loss)
        end = torch.tensor([loss if has_loss else 0.0, float(has_loss)], dtype=torch.float64)
        return torch.cat([*parts, end]).numpy()

    def total(self, vector: Numbers, shares: Tensor) -> Total:
        """The sum over clients with these shares, as the engine takes it."""
        found, start = {}, 0
        for name, leaf in leaves(self.form):
            found[name] = torch.from_numpy(vector[start : start + leaf.numel()].reshape(1, *leaf.shape))
            start += leaf.numel()
        one = Total.of(rebuild(self.form, found), torch.ones(1, dtype=torch.float64))
        weight = Total.of((), shares).weight
        return dataclasses.replace(one, clients=len(shares), weight=weight)

    def loss(self, vector: Numbers) -> float:
        """The mean over the clients that have one."""
        return float(vector[-2] / vector[-1]) if vector[-1] > 0.5 else math.nan


def share_of(method: Algorithm, size: float, cap: float) -> float:
    """What a client with so many rows counts, beside one with the most that count."""
    counts = method.counts(torch.tensor([min(size, cap), cap], dtype=torch.float64))
    return float(counts[0] / counts[1])


def digest_of(message: WireMessage) -> str:
    """Of the tensors that all clients are sent alike."""
    whole = hashlib.sha256()
    for name, packed in sorted(message.tensors.items()):
        if name.split(".")[0] == "shared":
            whole.update(hashlib.sha256(f"{name} {packed.dtype} {packed.shape}".encode()).digest())
            whole.update(hashlib.sha256(packed.data).digest())
    return whole.hexdigest()
