"""Data files that are hostile or damaged: a sentence with the file, and no memory beyond what it may take."""

from __future__ import annotations

import importlib
import io
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import descant
from descant.core import npz, unpack
from descant.core.splits import Division
from descant.data.schema import Schema
from descant.data.tables import read_npz
from descant.errors import UsageError

SCHEMA = Schema.parse({"target": "y", "columns": {"a": "number", "b": ["p", "q", "1"]}})
X, Y = np.ones((4, 4)), np.array([0, 1, 0, 1])


def npy(array: np.ndarray, header: str | None = None) -> bytes:
    """The bytes of an array; `header` takes the place of what numpy writes."""
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=False)
    if header is None:
        return file.getvalue()
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + array.tobytes()


def archive(path: Path, compression: int = zipfile.ZIP_STORED, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)
    return path


def refused(path: Path) -> str:
    """What is said of an NPZ file; that takes neither time nor memory."""
    tracemalloc.start()
    try:
        with pytest.raises(UsageError) as error:
            read_npz(path)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    text = str(error.value)
    assert str(path) in text
    assert "\n" not in text
    return text


# -- arrays ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(10**9, 4), (10**12, 4), (10**30, 4), (10**9, 0), (10**30, 0), (-1, 4),
                                   (2**63, 2**63), (4,) * 70, (True, 4)])
def test_an_array_is_not_larger_than_its_file(tmp_path: Path, shape: tuple[int, ...]) -> None:
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}"
    path = archive(tmp_path / "a.npz", x=npy(X, header.ljust(300) if len(header) > 117 else header), y=npy(Y))
    assert "x.npy" in refused(path)


def test_a_shape_is_told_with_what_the_file_holds(tmp_path: Path) -> None:
    header = "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000000000000000000, 4), }"
    assert refused(archive(tmp_path / "a.npz", x=npy(X, header), y=npy(Y))) == (
        f"{tmp_path}/a.npz cannot be read as NPZ: x.npy announces the shape (1e+30, 4) of float64, and holds "
        "128 B of numbers; write it again, with numpy.savez")


@pytest.mark.parametrize("header", [
    "{'descr': '<U99999999', 'fortran_order': False, 'shape': (4, 4), }",
    "{'descr': '|V0', 'fortran_order': False, 'shape': (99999999999, 4), }",
    "{'descr': [('a', '<f8'), ('b', '<f8')], 'fortran_order': False, 'shape': (2, 4), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (4, 4), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': 16, }",
    "{'descr': '<f8', 'fortran_order': False}",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (__import__('os'), 4), }",
    "[" * 100, "{", "'" * 3, "\t\n  1\n 2",
])
def test_headers_that_are_none(tmp_path: Path, header: str) -> None:
    assert "x.npy" in refused(archive(tmp_path / "a.npz", x=npy(X, header), y=npy(Y)))


def test_a_version_of_npy_that_does_not_exist(tmp_path: Path) -> None:
    data = b"\x93NUMPY\x09\x00" + npy(X)[8:]
    assert "x.npy has the npy format (9, 0), which is unknown" in refused(
        archive(tmp_path / "a.npz", x=data, y=npy(Y)))


def changed(path: Path, offset: int, value: int) -> Path:
    """The archive with another number of two bytes in the entries of its list, and before the data."""
    data = bytearray(path.read_bytes())
    for mark, at in ((b"PK\x01\x02", offset), (b"PK\x03\x04", offset - 2)):
        start = data.find(mark)
        struct.pack_into("<H", data, start + at, value)
    path.write_bytes(data)
    return path


def test_a_member_that_is_encrypted(tmp_path: Path) -> None:
    path = changed(archive(tmp_path / "a.npz", x=npy(X), y=npy(Y)), 8, 1)
    assert "x.npy is encrypted: write it without a password" in refused(path)


@pytest.mark.parametrize("method", [12, 14, 99])
def test_a_member_of_another_compression(tmp_path: Path, method: int) -> None:
    path = changed(archive(tmp_path / "a.npz", x=npy(X), y=npy(Y)), 10, method)
    assert f"x.npy is compressed by method {method}, which numpy does not write" in refused(path)


def test_a_member_that_is_there_twice(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        for name, array in (("x.npy", X), ("x", 2 * X), ("y.npy", Y)):
            file.writestr(name, npy(array))
    assert "it has the array 'x' more than once" in refused(tmp_path / "a.npz")


def bomb(path: Path) -> Path:
    header = "{'descr': '|u1', 'fortran_order': False, 'shape': (2000000, 10), }"
    return archive(path, zipfile.ZIP_DEFLATED, x=npy(np.zeros(20_000_000, np.uint8), header), y=npy(Y))


@pytest.mark.thorough
def test_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack, "USUAL", 10_000_000)  # a small bomb takes less time
    path = bomb(tmp_path / "a.npz")
    assert path.stat().st_size < 1e6
    assert "x.npy unpacks from 19.5 kB to 20.0 MB, and 10.0 MB are allowed: if it is right, set " \
        "DESCANT_UNPACK=20000128 in the environment" in refused(path)
    monkeypatch.setenv(unpack.LIMIT, "20000128")  # now it is what it says, and y does not fit
    with pytest.raises(UsageError, match="x has 2000000 rows, but y has the shape"):
        read_npz(path)
    monkeypatch.setenv(unpack.LIMIT, "much")
    with pytest.raises(UsageError, match="DESCANT_UNPACK must be a number of bytes, such as 10000000"):
        read_npz(path)


def test_compressed_arrays_are_read_as_they_were_written(tmp_path: Path) -> None:
    x = np.asfortranarray(np.random.default_rng(0).standard_normal((50, 3, 2)))
    np.savez_compressed(tmp_path / "a.npz", x=x, y=np.arange(50), group=np.array(["a", "é"] * 25))
    found = read_npz(tmp_path / "a.npz")
    assert np.array_equal(found.x, x)
    assert found.group is not None
    assert found.group.tolist() == ["a", "é"] * 25


def test_numbers_of_other_widths(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([[1.5], [2.5]], np.longdouble), y=np.array([1, 0], np.uint64))
    assert read_npz(tmp_path / "a.npz").x.dtype == np.float64
    fed = descant.federation(tmp_path, test=0.0, validation=0.0)
    assert fed.x.tolist() == [[1.5], [2.5]]
    np.savez(tmp_path / "a.npz", x=np.array([[np.longdouble("1e4000")], [1]]), y=[1, 0])
    assert "x[0, 0] is not a finite number" in refused(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", x=X, y=np.array([0, 1, 2, 2**64 - 1], np.uint64))
    assert "y holds 18446744073709551615, which is too large" in refused(tmp_path / "a.npz")


def test_numbers_beyond_single_precision(tmp_path: Path) -> None:
    x = X.copy()
    x[2, 1] = 1e39
    np.savez(tmp_path / "north.npz", x=x, y=Y)
    with pytest.raises(UsageError, match=r"north\.npz: x\[2, 1\]: 1e\+39 is too large: correct it"):
        SCHEMA.read(tmp_path / "north.npz")
    fed = descant.federation(tmp_path)
    with pytest.raises(UsageError, match=r"x of client 'north': 1e\+39 is too large for float32: correct it, "
                                         r'or set dtype = "float64" in \[train\]'):
        descant.run("fedavg", federation=fed, rounds=1)
    assert float(fed.to(torch.float64).x.max()) == 1e39
    np.savez(tmp_path / "north.npz", x=np.array([[3e38], [-3e38], [3e38], [-3e38]], np.float32), y=Y)
    with pytest.raises(UsageError, match=r"x\[\d, 0\] is too large to be scaled"):
        descant.federation(tmp_path, scale="constants", mean=[3e38], std=[1.0])


def test_a_partition_that_was_changed(tmp_path: Path) -> None:
    fed = descant.Federation.from_arrays(np.ones((8, 1)), np.arange(8) % 2, np.arange(8) % 2)
    fed.save_partition(tmp_path / "p.npz")
    good = dict(np.load(tmp_path / "p.npz"))
    for name, value, words in (("train_indices", good["train_indices"] + 8, "a row that is not there"),
                               ("train_indices", good["train_indices"] * 0, "given twice"),
                               ("train_offsets", good["train_offsets"][::-1], "which rows are whose"),
                               ("test_offsets", good["test_offsets"][:-1], "other types or lengths"),
                               ("unseen", np.array(9), "unseen = 9"), ("unseen", X, "not a partition")):
        np.savez(tmp_path / "p.npz", **good | {name: value})
        with pytest.raises(UsageError, match=words):
            Division.read(tmp_path / "p.npz", str(good["fingerprint"]), 8)
    archive(tmp_path / "p.npz", train_indices=b"")
    with pytest.raises(UsageError, match=r"p\.npz is not a partition that descant saved: train_indices\.npy"):
        Division.read(tmp_path / "p.npz", "", 8)


def test_a_file_that_is_no_archive(tmp_path: Path) -> None:
    for data in (b"", b"PK\x05\x06" + bytes(18), b"PK\x05\x06" + b"\xff" * 18, bytes(1000)):
        (tmp_path / "a.npz").write_bytes(data)
        with pytest.raises((npz.BadArchive, UsageError)):
            read_npz(tmp_path / "a.npz")


# -- tables ------------------------------------------------------------------------------------------


def parquet(path: Path, **columns: Any) -> Path:
    arrow = pytest.importorskip("pyarrow")
    importlib.import_module("pyarrow.parquet").write_table(arrow.table(columns), path)
    return path


def test_infinity_is_no_category(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", a=[1.0, 2.0], b=[1.0, float("inf")], y=[0.0, 1.0])
    with pytest.raises(UsageError, match=r"a\.parquet, row 2, column 'b': infinity is not a category"):
        SCHEMA.read(path)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    raw = arrow.array([b"p", b"\xff\xfe"], arrow.binary())
    text = arrow.StringArray.from_buffers(2, raw.buffers()[1], raw.buffers()[2])
    path = parquet(tmp_path / "a.parquet", a=[1.0, 2.0], b=text, y=[0.0, 1.0])
    with pytest.raises(UsageError, match=r"a\.parquet, row 2, column 'b': the text is not UTF-8"):
        SCHEMA.read(path)
    path = parquet(tmp_path / "a.parquet", a=text, b=["p", "q"], y=[0.0, 1.0])
    with pytest.raises(UsageError, match=r"a\.parquet, row 2, column 'a': the text is not UTF-8"):
        SCHEMA.read(path)


def test_a_value_that_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parquet writes a value that repeats once, so that a small file can hold any number of rows."""
    rows = 200_000
    path = parquet(tmp_path / "a.parquet", a=np.zeros(rows), b=["p"] * rows, y=np.zeros(rows))
    assert len(SCHEMA.read(path)[0]) == rows
    monkeypatch.setenv(unpack.LIMIT, "1000000")
    with pytest.raises(UsageError, match=r"a\.parquet unpacks from .* kB to .* MB, and 1\.0 MB are allowed"):
        SCHEMA.read(path)


def wide(columns: int, path: Path) -> float:
    """Seconds to read a table of so many columns, to refuse one with other names, and to make the schema."""
    names = [f"g{k}" for k in range(columns)]
    rows = ",".join(["1.5"] * columns + ["2"]) + "\n"
    start = time.process_time()
    schema = Schema.parse({"target": "y", "columns": dict.fromkeys(names, "number")})
    path.write_text(",".join([*names, "y"]) + "\n" + rows)
    schema.read(path)
    path.write_text(",".join([*(f"{name}x" for name in names), "y"]) + "\n" + rows)
    with pytest.raises(UsageError, match=r"it has no column 'g0' .*; and [\d,]+ more\. Correct"):
        schema.read(path)
    return time.process_time() - start


@pytest.mark.thorough
def test_headers_take_linear_time(tmp_path: Path) -> None:
    assert wide(20_000, tmp_path / "a.csv") < 5  # 14 s and more where every name is compared with every other
    categories = [str(k) for k in range(20_000)]
    schema = Schema.parse({"target": "y", "columns": {"b": categories}})
    (tmp_path / "a.csv").write_text("b,y\n7,1\n,2\n")
    x, _ = schema.read(tmp_path / "a.csv")
    assert np.flatnonzero(x[0]).tolist() == [7]
    assert np.isnan(x[1]).all()


def test_a_long_cell_takes_linear_time(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"a,b,y\n{'1' * 100_000}x,p,1\n")
    start = time.process_time()
    with pytest.raises(UsageError, match=r"line 2, column 'a': '1{79} is not a number"):
        SCHEMA.read(tmp_path / "a.csv")
    assert time.process_time() - start < 2
