"""FedJAX: its own FedAvg on its own `for_each_client`.

    python with_fedjax.py WORK {jit,pmap}
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg
from fedjax.core.for_each_client import ForEachClientPmapBackend
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from session import Session, work_of_this_process

Layers = list[dict[str, Any]]
SHAPES = {  # of the layers, as torch has them
    "mclr": [(10, 784)], "dnn": [(100, 784), (10, 100)],
    "cnn2": [(32, 1, 5, 5), (64, 32, 5, 5), (512, 1024), (10, 512)],
}


def put_sharded(shards: list[Any], devices: list[Any]) -> Any:
    """One of the trees on each device."""
    across = NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec("device"))
    return jax.tree_util.tree_map(
        lambda *each: jax.device_put(np.stack([np.asarray(value) for value in each]), across), *shards)


# FedJAX 0.0.17 still uses names that have left jax
for name, function in {
    "tree_map": jax.tree_util.tree_map, "tree_leaves": jax.tree_util.tree_leaves,
    "device_put_sharded": put_sharded,
    "device_put_replicated": lambda tree, devices: put_sharded([tree] * len(devices), devices),
}.items():
    if not hasattr(jax, name):
        setattr(jax, name, function)


def main() -> None:
    work, session = work_of_this_process(), Session("fedjax", "jax")
    fedjax.set_for_each_client_backend(Pmap() if sys.argv[2] == "pmap" else "jit")
    algorithm = fed_avg.federated_averaging(
        jax.grad(lambda params, batch, rng: loss(work.model, params, batch)),
        fedjax.optimizers.sgd(work.lr), fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch))
    state = algorithm.init(from_torch(work.model, work.initial))
    images = work.x.reshape(*work.x.shape[:2], 28, 28, 1) if work.model == "cnn2" else work.x
    key = jax.random.PRNGKey(0)
    number = 0
    while session.begin(partial(to_torch, work.model, state.params)):
        key, *keys = jax.random.split(key, 1 + work.cohort)
        who = zip(work.cohorts[number], work.orders[number], keys, strict=True)
        clients = [(int(client), Ordered({"x": images[client][order], "y": work.y[client][order]}), own)
                   for client, order, own in who]
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)
        session.played(sum(client.steps for _, client, _ in clients))
        number += 1


class Pmap(ForEachClientPmapBackend):
    """FedJAX's backend for several devices, with a jax that leaves the axis of devices on what it takes from
    one of them."""

    def __call__(self, *functions: Any) -> Any:
        run = super().__call__(*functions)

        def each(shared: Any, clients: Any) -> Any:
            for client, output, results in run(shared, clients):
                yield client, jax.tree_util.tree_map(lambda value: value[0], output), results

        return each


class Ordered(fedjax.ClientDataset):
    """Rows in the order of a round's batches: they are not shuffled again."""

    def __init__(self, examples: dict[str, np.ndarray]) -> None:
        super().__init__(examples)
        self.steps = 0

    def shuffle_repeat_batch(self, hparams: Any) -> Any:
        self.steps = -(-len(self) // hparams.batch_size)
        return self.batch(batch_size=hparams.batch_size)


def loss(model: str, params: Layers, batch: dict[str, Any]) -> Any:
    x = batch["x"]
    if model == "cnn2":
        for layer in params[:2]:
            x = jax.lax.conv_general_dilated(x, layer["w"], (1, 1), "VALID",
                                             dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(x + layer["b"])
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = jax.nn.relu(_dense(params[2], x.reshape(len(x), -1)))
    elif model == "dnn":
        x = jax.nn.leaky_relu(_dense(params[0], x), 0.01)
    scores = jax.nn.log_softmax(_dense(params[-1], x))
    return -jnp.take_along_axis(scores, batch["y"][:, None], 1).mean()


def _dense(layer: dict[str, Any], x: Any) -> Any:
    return x @ layer["w"] + layer["b"]


def from_torch(model: str, vector: np.ndarray) -> Layers:
    """Layers as jax likes them: inputs first, and channels last."""
    layers, at = [], 0
    for shape in SHAPES[model]:
        size = int(np.prod(shape))
        w, b = vector[at : at + size].reshape(shape), vector[at + size : at + size + shape[0]]
        at += size + shape[0]
        if len(shape) == 4:
            w = w.transpose(2, 3, 1, 0)
        elif model == "cnn2" and shape[1] == 1024:  # after 64 channels of 4x4
            w = w.reshape(512, 64, 4, 4).transpose(2, 3, 1, 0).reshape(1024, 512)
        else:
            w = w.T
        layers.append({"w": jnp.array(w), "b": jnp.array(b)})
    return layers


def to_torch(model: str, layers: Layers) -> np.ndarray:
    parts = []
    for shape, layer in zip(SHAPES[model], layers, strict=True):
        w = np.asarray(layer["w"])
        if len(shape) == 4:
            w = w.transpose(3, 2, 0, 1)
        elif model == "cnn2" and shape[1] == 1024:
            w = w.reshape(4, 4, 64, 512).transpose(3, 2, 0, 1)
        else:
            w = w.T
        parts += [w.reshape(-1), np.asarray(layer["b"])]
    return np.concatenate(parts)


if __name__ == "__main__":
    main()
