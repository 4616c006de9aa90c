"""The networks in PyTorch, with their parameters in the order in which the work has them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn


def network(model: str, initial: np.ndarray) -> nn.Sequential:
    """A network with given parameters. Samples come as rows of 784 pixels."""
    layers: dict[str, list[nn.Module]] = {
        "mclr": [nn.Linear(784, 10)],
        "dnn": [nn.Linear(784, 100), nn.LeakyReLU(), nn.Linear(100, 10)],
        "cnn2": [nn.Unflatten(1, (1, 28, 28)),
                 nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
                 nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
                 nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)],
    }
    made = nn.Sequential(*layers[model])
    nn.utils.vector_to_parameters(torch.from_numpy(initial.copy()), made.parameters())
    return made


def flat(parameters: list[Tensor]) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in parameters]).numpy()
