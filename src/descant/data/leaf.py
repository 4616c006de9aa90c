"""Datasets of LEAF, a benchmark of federations as they occur: handwriting by writer, tweets by user.

S. Caldas et al.: LEAF: A Benchmark for Federated Settings, arXiv:1812.01097,
https://github.com/TalwalkarLab/leaf. It publishes scripts that make JSON files, not the files.
"""

from __future__ import annotations

import json
import re
import string
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from descant.core.fields import hyper
from descant.data import owned
from descant.data.cache import Absent, Arrays, Expected, Source, prepared
from descant.data.owned import Owned
from descant.data.samples import Dataset, Samples
from descant.errors import DescantError


class User(NamedTuple):
    """The data of one user in one LEAF file."""

    name: str
    x: list[Any]
    y: list[Any]
    where: str  # for errors


def read(folder: Path) -> Iterator[User]:
    """The users in train/*.json and then test/*.json, or in all_data/*.json."""
    for parts in (("train", "test"), ("all_data",)):
        found = [sorted((folder / part).glob("*.json")) for part in parts]
        if all(found):
            for paths in found:
                for path in paths:
                    yield from _read_file(path)
            return
    raise Absent(f"LEAF's train/*.json and test/*.json are not in {folder}, nor is all_data/*.json")


def _read_file(path: Path) -> Iterator[User]:
    try:
        with path.open(encoding="utf-8") as file:
            content = json.load(file)
    except ValueError as error:
        raise DescantError(f"{path} is not JSON ({error}): it was cut off or changed; create it again"
                           ) from None
    try:
        users = [(str(user), content["user_data"][user]) for user in content["users"]]
        counts = content["num_samples"]
    except (KeyError, TypeError) as error:
        raise DescantError(f"{path} is not a file of LEAF: it lacks {error}") from None
    for (user, data), count in zip(users, counts, strict=True):
        where = f"{path}, user {user!r}"
        if not isinstance(data, dict) or not len(data.get("x", ())) == len(data.get("y", ())) == count:
            raise DescantError(f"{where}: x and y do not hold the {count} samples that num_samples promises")
        if count:
            yield User(user, data["x"], data["y"], where)


def obtain(name: str, options: str) -> str:
    """How to create LEAF's files of a dataset."""
    return (f"the folders train and test that `./preprocess.sh {options}` makes in data/{name}/data of "
            "https://github.com/TalwalkarLab/leaf")


def owners(names: Sequence[str], counts: Sequence[int]) -> dict[str, np.ndarray]:
    """`client` and `client_names` for users that come in any order, perhaps in several parts."""
    unique, number = np.unique(np.array(names), return_inverse=True)
    return {"client": np.repeat(number, counts), "client_names": unique}


def labels(user: User, classes: int) -> np.ndarray:
    """The user's labels, which must be class numbers."""
    for row, label in enumerate(user.y):
        if not isinstance(label, int) or not 0 <= label < classes:
            raise DescantError(f"{user.where}: y[{row}] is {label!r}, not a number in 0..{classes - 1}")
    return np.array(user.y, np.int64)


def parse_femnist(folder: Path) -> Arrays:
    x, y, names = [], [], []
    for user in read(folder):
        for row, image in enumerate(user.x):
            if len(image) != 784:
                raise DescantError(f"{user.where}: x[{row}] has {len(image)} pixels, not 784")
        try:
            images = np.array(user.x, np.float64)
        except (TypeError, ValueError) as error:
            raise DescantError(f"{user.where}: x must hold numbers ({error})") from None
        if not ((images >= 0) & (images <= 1)).all():
            raise DescantError(f"{user.where}: x has pixels outside the range 0..1")
        x.append(np.rint(images * 255).astype(np.uint8).reshape(-1, 1, 28, 28))
        y.append(labels(user, 62))
        names.append(user.name)
    return {"x": np.concatenate(x), "y": np.concatenate(y), **owners(names, [len(rows) for rows in y])}


TOKEN = re.compile(r"[#@]?[\w']+|[^\w\s]")


def tokens(text: str) -> list[int]:
    """The CRC-32 of each token: of lower-case words (with their # or @) and of single other signs."""
    return [zlib.crc32(token.encode()) for token in TOKEN.findall(text.lower())]


def parse_sent140(folder: Path) -> Arrays:
    crcs: list[int] = []
    lengths, y, names = [], [], []
    for user in read(folder):
        for row, fields in enumerate(user.x):
            if len(fields) != 5 or not isinstance(fields[4], str):
                raise DescantError(f"{user.where}: x[{row}] is not [id, date, query, user, text]")
            found = tokens(fields[4])
            crcs += found
            lengths.append(len(found))
        y.append(labels(user, 2))
        names.append(user.name)
    return {"token": np.array(crcs, np.uint32), "length": np.array(lengths, np.int64),
            "y": np.concatenate(y), **owners(names, [len(rows) for rows in y])}


@dataclass(frozen=True)
class Femnist(Owned):
    """805,263 handwritten characters of 28x28 pixels by 3550 writers, 62 classes (LEAF's FEMNIST).

    Digits, upper case, lower case, in this order; dark on light (255 is white), as LEAF has them. Made
    of NIST Special Database 19, in the public domain. S. Caldas et al., LEAF, arXiv:1812.01097.
    """

    name: ClassVar[str] = "femnist"
    class_names: ClassVar[tuple[str, ...] | None] = tuple(
        string.digits + string.ascii_uppercase + string.ascii_lowercase)
    classes: ClassVar[int] = 62
    default_clients: ClassVar[int] = 3550
    source: ClassVar[Source] = Source(
        "femnist", owned.layout("uint8", (1, 28, 28), 62), parse_femnist,
        obtain("femnist", "-s niid --sf 1.0 -k 0 -t sample"),
    )


@dataclass(frozen=True)
class Sent140(Dataset):
    """1,600,498 tweets of 660,120 users, negative or positive (LEAF's Sentiment140).

    x holds the first `length` tokens, padded with 0 on the right. A token is a lower-case word (with
    its # or @) or a single other sign, and its number is 1 + CRC-32 modulo (`vocabulary` - 1): nothing
    is fitted to the data, so nothing can leak, and all clients agree. A. Go, R. Bhayani, L. Huang:
    Twitter Sentiment Classification using Distant Supervision, Stanford, 2009; S. Caldas et al., LEAF,
    arXiv:1812.01097. No formal licence.
    """

    name: ClassVar[str] = "sent140"
    class_names: ClassVar[tuple[str, ...] | None] = ("negative", "positive")
    natural: ClassVar[bool] = True
    default_clients: ClassVar[int] = 660120
    source: ClassVar[Source] = Source(
        "sent140",
        owned.rows(2) | {"token": Expected("uint32", ("tokens",)), "length": Expected("int64", ("rows",))},
        parse_sent140, obtain("sent140", "-s niid --sf 1.0 -k 0 -t sample"),
    )

    length: int = hyper(25, "tokens of a tweet that are kept", ge=1)
    vocabulary: int = hyper(10000, "number of different tokens, with the padding", ge=2)

    def load(self, clients: int, seed: int) -> Samples:
        arrays = prepared(self.source)
        token, lengths = arrays["token"], arrays["length"]
        if lengths.min() < 0 or lengths.sum() != len(token):
            raise DescantError(f"{arrays.path}: 'length' and 'token' do not match: remove it, and "
                               "it is prepared again from the official files")
        number = token.astype(np.int64) % (self.vocabulary - 1) + 1
        row = np.repeat(np.arange(len(lengths)), lengths)
        place = np.arange(len(token)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        kept = place < self.length
        x = np.zeros((len(lengths), self.length), np.int64)
        x[row[kept], place[kept]] = number[kept]
        owner = arrays["client_names"][arrays["client"]]
        return Samples(torch.from_numpy(x), torch.from_numpy(arrays["y"]), classes=2, owner=owner)
