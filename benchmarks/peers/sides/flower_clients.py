"""Flower's clients: a module of its own, so that actors import it and keep what it has loaded."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from networks import network
from session import Work

app = ClientApp()


class Loaded(NamedTuple):
    work: Work
    x: torch.Tensor
    y: torch.Tensor
    orders: torch.Tensor
    net: torch.nn.Module


@functools.cache
def loaded() -> Loaded:
    """Once in every actor."""
    torch.set_num_threads(1)
    work = Work(os.environ["PEERS_WORK"])
    return Loaded(work, torch.from_numpy(work.x), torch.from_numpy(work.y), torch.from_numpy(work.orders),
                  network(work.model, work.initial))


@app.train()
def train(message: Message, context: Context) -> Message:
    work, x, y, orders, net = loaded()
    config = message.content["config"]
    client, order = config["client"], orders[config["round"], config["place"]]
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=work.lr)
    steps = 0
    for rows, targets in zip(x[client][order].split(work.batch), y[client][order].split(work.batch),
                             strict=True):
        optimizer.zero_grad()
        F.cross_entropy(net(rows), targets).backward()
        optimizer.step()
        steps += 1
    told = MetricRecord({"num-examples": len(order), "steps": steps})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": told}), reply_to=message)
