"""AlexNet with BatchNorm: `fedbn_alexnet`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from descant.core.kernels.network import Network, dense
from descant.core.sample import SampleFormat
from descant.models.base import NetworkSpec
from descant.models.convolution import Conv, Plan, Pool, convolutions


def alexnet(sample: SampleFormat, model: str, channels: tuple[int, int, int, int, int], hidden: int
            ) -> Network:
    """The network at any width."""
    one, two, three, four, five = channels
    plan: Plan = [
        Conv(one, 11, 2, stride=4, norm=True), Pool(3), Conv(two, 5, 2, norm=True), Pool(3),
        Conv(three, 3, 1, norm=True), Conv(four, 3, 1, norm=True), Conv(five, 3, 1, norm=True), Pool(3),
    ]
    layers, _ = convolutions(sample, model, plan)
    top = dense((five * 6 * 6, hidden, hidden), norm=True)
    body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d((6, 6)), nn.Flatten(), *top)
    return Network(body, nn.Linear(hidden, sample.outputs))


@dataclass(frozen=True)
class FedBNAlexNet(NetworkSpec):
    """AlexNet with BatchNorm after every layer: FedMAP on Office-31 (Table 4), from FedBN.

    All sizes are the paper's. Images must be 63x63 pixels at least, and are 256x256 there. It has 57
    million parameters, so that every model in memory takes 230 MB.
    """

    name: ClassVar[str] = "fedbn_alexnet"

    def network(self, sample: SampleFormat) -> nn.Module:
        return alexnet(sample, self.name, (64, 192, 384, 256, 256), 4096)
