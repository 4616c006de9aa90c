"""Image classification: the standard datasets, whose rows have no owners.

The training and test parts of the official split are pooled, training first: clients make their own
splits. Pixels stay bytes, channels first, unless they are standardised.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from descant.core.fields import hyper
from descant.data.cache import Expected, Prepared, Source, prepared
from descant.data.download import Remote
from descant.data.image_files import PARTS, parse_cifar10, parse_cifar100, parse_emnist, parse_mnist
from descant.data.samples import Dataset, Samples

ROUNDING = 0.001  # what the authors of pFedMe and pFedBreD add to a deviation, in 0..255
BLOCK = 4096  # images that are real numbers at once while their statistics are taken


@dataclass(frozen=True)
class _Images(Dataset):
    source: ClassVar[Source]
    classes: ClassVar[int]

    standardise: Literal["none", "pixel", "all"] = hyper(
        "none", "subtract the mean and divide by the deviation over all rows: of each pixel, or one of all "
                "pixels")

    def load(self, clients: int, seed: int) -> Samples:
        arrays = prepared(self.source)
        y = np.concatenate([arrays[f"y_{part}"] for part in PARTS])
        x, notes = _pooled(arrays), tuple[str, ...]()
        if self.standardise != "none":
            x = _standardised(x, (0,) if self.standardise == "pixel" else tuple(range(x.dim())))
            notes = ("images are standardised by statistics of all rows, those of other clients and of tests "
                     "among them",)
        return Samples(x, torch.from_numpy(y), self.classes, notes=notes)


def _standardised(images: Tensor, over: tuple[int, ...]) -> Tensor:
    """(x - mean) / (deviation + 0.001), with both over these dimensions, in float32."""
    means, squares = (torch.stack([block.double().pow(power).sum(0) for block in images.split(BLOCK)]).sum(0)
                      / len(images) for power in (1, 2))
    others = tuple(dimension - 1 for dimension in over if dimension)
    if others:
        means, squares = (moment.mean(others, keepdim=True) for moment in (means, squares))
    deviation = (squares - means**2).clamp(min=0.0).sqrt()
    return images.float().sub_(means.float()).div_((deviation + ROUNDING).float())


def _pooled(arrays: Prepared) -> Tensor:
    """The images of both parts, channels first; never in memory twice."""
    train, test = (arrays.shape(f"x_{part}") for part in PARTS)
    channels = train[3:] or (1,)
    pool = torch.empty((train[0] + test[0], *channels, *train[1:3]), dtype=torch.uint8)
    row = 0
    for part in PARTS:
        for block in arrays.blocks(f"x_{part}"):
            images = torch.from_numpy(block.copy()).reshape(len(block), *train[1:3], *channels)
            pool[row : row + len(block)] = images.permute(0, 3, 1, 2)
            row += len(block)
    return pool


def _layout(shape: tuple[int, ...], classes: int) -> dict[str, Expected]:
    layout = {}
    for part in PARTS:
        layout[f"x_{part}"] = Expected("uint8", (part, *shape))
        layout[f"y_{part}"] = Expected("int64", (part,), below=classes)
    return layout


def _mnist_files(addresses: tuple[str, ...], *facts: tuple[int, str]) -> tuple[Remote, ...]:
    """The size and checksum of each: training images and labels, test images and labels."""
    names = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k")
             for kind in ("images-idx3", "labels-idx1")]
    return tuple(Remote(name, tuple(address + name for address in addresses), size, sha256)
                 for name, (size, sha256) in zip(names, facts, strict=True))


@dataclass(frozen=True)
class Mnist(_Images):
    """70,000 handwritten digits of 28x28 pixels, 10 classes (MNIST).

    Y. LeCun, L. Bottou, Y. Bengio, P. Haffner: Gradient-based learning applied to document
    recognition, Proceedings of the IEEE 86(11), 1998. CC BY-SA 3.0, http://yann.lecun.com/exdb/mnist/
    """

    name: ClassVar[str] = "mnist"
    classes: ClassVar[int] = 10
    source: ClassVar[Source] = Source(
        "mnist", _layout((28, 28), 10), parse_mnist, "the four IDX files of MNIST, with or without .gz",
        _mnist_files(
            # the author's own server often refuses: the mirror of the Common Visual Data Foundation is first
            ("https://storage.googleapis.com/cvdf-datasets/mnist/", "http://yann.lecun.com/exdb/mnist/"),
            (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
    )


@dataclass(frozen=True)
class FashionMnist(_Images):
    """70,000 articles of clothing of 28x28 pixels, 10 classes (Fashion-MNIST).

    H. Xiao, K. Rasul, R. Vollgraf: Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine
    Learning Algorithms, arXiv:1708.07747. MIT licence, https://github.com/zalandoresearch/fashion-mnist;
    also Debian's package dataset-fashion-mnist.
    """

    name: ClassVar[str] = "fashion_mnist"
    classes: ClassVar[int] = 10
    class_names: ClassVar[tuple[str, ...] | None] = (
        "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
    source: ClassVar[Source] = Source(
        "fashion_mnist", _layout((28, 28), 10), parse_mnist,
        "the four IDX files of Fashion-MNIST, with or without .gz (or install Debian's package "
        "dataset-fashion-mnist)",
        _mnist_files(
            ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
             "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"),
            (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ),
        installed=Path("/usr/share/datasets/fashion-mnist"),
    )


@dataclass(frozen=True)
class Emnist(_Images):
    """131,600 handwritten characters of 28x28 pixels, 47 balanced classes (EMNIST), upright.

    G. Cohen, S. Afshar, J. Tapson, A. van Schaik: EMNIST: an extension of MNIST to handwritten
    letters, arXiv:1702.05373. Made of NIST Special Database 19, a work of the US government, in the
    public domain; https://www.nist.gov/itl/products-and-services/emnist-dataset. Letters whose upper
    and lower case look alike share a class.
    """

    name: ClassVar[str] = "emnist"
    classes: ClassVar[int] = 47
    class_names: ClassVar[tuple[str, ...] | None] = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt")
    source: ClassVar[Source] = Source(
        "emnist", _layout((28, 28), 47), parse_emnist,
        "the archive of EMNIST in IDX format, or its four files emnist-balanced-*-ubyte.gz",
        (Remote("gzip.zip", ("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",), 561753746,
                "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e"),),
    )


@dataclass(frozen=True)
class Cifar10(_Images):
    """60,000 colour photographs of 32x32 pixels, 10 classes (CIFAR-10).

    A. Krizhevsky: Learning Multiple Layers of Features from Tiny Images, technical report, University
    of Toronto, 2009. No formal licence; cite the report. https://www.cs.toronto.edu/~kriz/cifar.html
    """

    name: ClassVar[str] = "cifar10"
    classes: ClassVar[int] = 10
    class_names: ClassVar[tuple[str, ...] | None] = (
        "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    source: ClassVar[Source] = Source(
        "cifar10", _layout((32, 32, 3), 10), parse_cifar10,
        "the binary version of CIFAR-10, packed or as the folder cifar-10-batches-bin",
        (Remote("cifar-10-binary.tar.gz", ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
                170052171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),),
    )


@dataclass(frozen=True)
class Cifar100(_Images):
    """60,000 colour photographs of 32x32 pixels, 100 classes (CIFAR-100, fine labels).

    A. Krizhevsky: Learning Multiple Layers of Features from Tiny Images, technical report, University
    of Toronto, 2009. No formal licence; cite the report. https://www.cs.toronto.edu/~kriz/cifar.html
    """

    name: ClassVar[str] = "cifar100"
    classes: ClassVar[int] = 100
    source: ClassVar[Source] = Source(
        "cifar100", _layout((32, 32, 3), 100), parse_cifar100,
        "the binary version of CIFAR-100, packed or as the folder cifar-100-binary",
        (Remote("cifar-100-binary.tar.gz", ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
                168513733, "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"),),
    )
