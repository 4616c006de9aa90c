"""The official files of image sets: IDX (MNIST and its successors) and CIFAR's binary version."""

from __future__ import annotations

import gzip
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from descant.data.cache import Absent, Arrays, official, unpacking
from descant.errors import DescantError

PARTS = ("train", "test")


def decode_idx(data: bytes, dims: int, where: str) -> np.ndarray:
    """The array of an IDX file: a header of big-endian numbers, then bytes. `dims`: images 3, labels 1."""
    kind = {1: "labels", 3: "images"}[dims]
    if len(data) < 4 + 4 * dims or data[:4] != bytes((0, 0, 8, dims)):
        raise DescantError(f"{where} is not an IDX file of {kind}: it begins with 0x{data[:4].hex()}, "
                           f"not 0x0000080{dims}")
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", count=dims, offset=4))
    expected, found = int(np.prod(shape)), len(data) - 4 - 4 * dims
    if found != expected:
        raise DescantError(f"{where} holds {found} bytes of {kind}, but its header promises {expected}: "
                           "it was cut off or changed; download it again")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(shape)


def _read_idx(folder: Path, name: str, dims: int) -> np.ndarray:
    """An IDX file of that name, plain or with `.gz`."""
    plain = folder / name
    if plain.exists():
        return decode_idx(plain.read_bytes(), dims, str(plain))
    packed = official(folder, f"{name}.gz")
    with unpacking(packed):
        data = gzip.decompress(packed.read_bytes())
    return decode_idx(data, dims, str(packed))


def parse_mnist(folder: Path) -> Arrays:
    """The four files of MNIST or of a dataset in its format."""
    arrays = {}
    for part, prefix in zip(PARTS, ("train", "t10k"), strict=True):
        arrays[f"x_{part}"] = _read_idx(folder, f"{prefix}-images-idx3-ubyte", 3)
        arrays[f"y_{part}"] = _read_idx(folder, f"{prefix}-labels-idx1-ubyte", 1).astype(np.int64)
    return arrays


def parse_emnist(folder: Path) -> Arrays:
    """EMNIST's official archive, or the IDX files of the balanced set in it."""
    arrays = {}
    for part in PARTS:
        images = _read_emnist(folder, f"emnist-balanced-{part}-images-idx3-ubyte", 3)
        labels = _read_emnist(folder, f"emnist-balanced-{part}-labels-idx1-ubyte", 1)
        arrays[f"x_{part}"] = np.ascontiguousarray(images.transpose(0, 2, 1))  # stored by column
        arrays[f"y_{part}"] = labels.astype(np.int64)
    return arrays


def _read_emnist(folder: Path, name: str, dims: int) -> np.ndarray:
    archive = folder / "gzip.zip"
    for place in (folder, folder / "gzip"):
        if (place / name).exists() or (place / f"{name}.gz").exists():
            return _read_idx(place, name, dims)
    if not archive.exists():
        raise Absent(f"{archive.name} is not in {folder}, nor is {name}.gz")
    where = f"gzip/{name}.gz in {archive}"
    with unpacking(archive), zipfile.ZipFile(archive) as files:
        if f"gzip/{name}.gz" not in files.namelist():
            raise DescantError(f"there is no {where}: download the official archive again")
        data = gzip.decompress(files.read(f"gzip/{name}.gz"))
    return decode_idx(data, dims, where)


def decode_cifar(data: bytes, labels: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 32, 32, 3] and their classes.

    A record has `labels` bytes, the last of which is the class, and 3 x 32 x 32 pixels.
    """
    width = labels + 3 * 32 * 32
    if not data or len(data) % width:
        raise DescantError(f"{where} has {len(data)} bytes, which is not a number of records of {width}: "
                           "it was cut off or is another version; download the binary version again")
    records = np.frombuffer(data, np.uint8).reshape(-1, width)
    images = records[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), records[:, labels - 1].astype(np.int64)


def _parse_cifar(folder: Path, archive: str, inner: str, parts: dict[str, list[str]], labels: int) -> Arrays:
    wanted = [name for names in parts.values() for name in names]
    found = dict(_cifar_files(folder, archive, inner, wanted))
    arrays = {}
    for part, names in parts.items():
        for name in names:
            if name not in found:
                raise DescantError(f"there is no {inner}/{name} in {folder / archive}: download it again")
        pairs = [decode_cifar(found.pop(name), labels, f"{inner}/{name} in {folder}") for name in names]
        arrays[f"x_{part}"], arrays[f"y_{part}"] = (np.concatenate(a) for a in zip(*pairs, strict=True))
    return arrays


def _cifar_files(folder: Path, archive: str, inner: str, wanted: list[str]) -> Iterator[tuple[str, bytes]]:
    if (folder / inner).is_dir():
        for name in wanted:
            yield name, official(folder / inner, name).read_bytes()
        return
    packed = official(folder, archive)
    with unpacking(packed), tarfile.open(packed, "r:gz") as files:
        for member in files:
            name = Path(member.name).name
            content = files.extractfile(member) if name in wanted else None
            if content is not None:
                yield name, content.read()


def parse_cifar10(folder: Path) -> Arrays:
    parts = {"train": [f"data_batch_{k}.bin" for k in range(1, 6)], "test": ["test_batch.bin"]}
    return _parse_cifar(folder, "cifar-10-binary.tar.gz", "cifar-10-batches-bin", parts, labels=1)


def parse_cifar100(folder: Path) -> Arrays:
    parts = {"train": ["train.bin"], "test": ["test.bin"]}
    # of the two label bytes, the first is the coarse class
    return _parse_cifar(folder, "cifar-100-binary.tar.gz", "cifar-100-binary", parts, labels=2)
