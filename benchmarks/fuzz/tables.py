"""Tables and arrays: cells and headers that do not fit, archives that announce too much, and damage."""

from __future__ import annotations

import importlib
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from benchmarks.fuzz.case import Kind
from benchmarks.fuzz.draw import CHANGES, FLOATS, INTEGERS, WORDS, Change
from descant.data.schema import Schema
from descant.data.tables import read_npz

SCHEMA = Schema.parse({"target": "y", "classes": ["no", "yes"],
                       "columns": {"a": "number", "b": ["p", "q"], "c": "ignore"}})
CELLS = st.one_of(st.sampled_from(["1", "2.5", "p", "q", "no", "yes", ""]),
                  st.sampled_from(["1", "yes", "p"]), WORDS, INTEGERS.map(str), FLOATS.map(repr),
                  st.sampled_from(['"', "'", ",", ";", "\r", "1_000", "1,5", "0x1", "٣"]))
HEADERS = st.one_of(st.just(["a", "b", "c", "y"]), st.permutations(["a", "b", "c", "y"]),
                    st.lists(st.one_of(st.sampled_from(["a", "b", "y"]), WORDS), max_size=5))
DESCRIPTIONS = st.sampled_from(["<f8", "<f4", "<f2", ">f8", "<i8", "|u1", "|b1", "<u8", "<U3", "|S2", "|O",
                                "|V0", "<U999999999", "<c16", "<M8[s]", "<f16", "nonsense", "[('a', '<f8')]"])
SIDES = st.one_of(st.integers(0, 6), st.sampled_from([-1, 10**9, 10**12, 10**30, 2**63, 2**31]))
ARRAYS = {"x": np.arange(12.0).reshape(4, 3), "y": np.array([0, 1, 0, 1]),
          "group": np.array(["a", "a", "b", "é"])}


def check_samples(x: np.ndarray, y: np.ndarray) -> None:
    assert x.dtype == np.float32
    assert x.shape[1:] == (3,)
    assert len(x) == len(y) > 0
    assert not np.isinf(x).any()
    assert set(y.tolist()) <= {0, 1}


def csv_kind(home: Path) -> Kind:
    def use(given: tuple[list[str], list[list[str]], str, list[Change]]) -> None:
        header, rows, end, changes = given
        data = end.join(",".join(row) for row in (header, *rows)).encode("utf-8", "surrogatepass")
        for change in changes:
            data = change.of(data)
        (home / "a.csv").write_bytes(data)
        check_samples(*SCHEMA.read(home / "a.csv"))

    row = st.lists(CELLS, min_size=4, max_size=4)
    good = st.tuples(st.just("1.5"), st.just("q"), CELLS, st.just("no")).map(list)
    rows = st.lists(st.one_of(good, row, st.lists(CELLS, max_size=6)), max_size=6)
    inputs = st.tuples(HEADERS, rows, st.sampled_from(["\n", "\r\n", "\r"]),
                       st.one_of(st.just([]), st.lists(CHANGES, max_size=2)))
    return Kind("CSV tables", inputs, use)


def parquet_kind(home: Path) -> Kind:
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    texts = st.lists(st.one_of(st.none(), WORDS, st.sampled_from(["p", "q", "yes"])), min_size=3, max_size=3)
    columns = st.one_of(
        texts, st.lists(st.one_of(st.none(), FLOATS), min_size=3, max_size=3),
        st.lists(st.one_of(st.none(), st.integers(-2**63, 2**63 - 1)), min_size=3, max_size=3),
        st.lists(st.booleans(), min_size=3, max_size=3),
        st.lists(st.binary(max_size=4), min_size=3, max_size=3),
        st.lists(st.lists(st.integers(0, 3), max_size=2), min_size=3, max_size=3))

    def use(given: tuple[dict[str, list[Any]], list[Change], bool]) -> None:
        table, changes, raw_text = given
        cells = {name: arrow.array(values) for name, values in table.items()}
        if raw_text:  # bytes that are called text, whatever they are
            cells = {name: arrow.StringArray.from_buffers(len(a), *a.buffers()[1:], a.buffers()[0])
                     if arrow.types.is_binary(a.type) else a for name, a in cells.items()}
        file = io.BytesIO()
        parquet.write_table(arrow.table(cells), file)
        data = file.getvalue()
        for change in changes:
            data = change.of(data)
        (home / "a.parquet").write_bytes(data)
        check_samples(*SCHEMA.read(home / "a.parquet"))

    good = {"a": st.just([1.0, None, 2.0]), "b": st.just(["p", None, "q"]), "y": st.just(["no", "yes", "no"])}
    tables = st.one_of(*(st.fixed_dictionaries({**good, name: columns}) for name in good),
                       st.dictionaries(st.sampled_from(["a", "b", "y", "z"]), columns))
    return Kind("Parquet tables", st.tuples(tables, st.one_of(st.just([]), st.lists(CHANGES, max_size=1)),
                                            st.booleans()), use)


def npz_kind(home: Path) -> Kind:
    """Archives with other headers, whose content is what it is."""
    def use(given: tuple[dict[str, tuple[str, list[int], bool, bytes]], int]) -> None:
        members, method = given
        with zipfile.ZipFile(home / "a.npz", "w", method) as file:
            for name, (description, shape, by_column, data) in members.items():
                quoted = description if description.startswith("[") else repr(description)
                text = f"{{'descr': {quoted}, 'fortran_order': {by_column}, 'shape': {tuple(shape)}}}\n"
                length = len(text).to_bytes(2, "little")
                file.writestr(name, b"\x93NUMPY\x01\x00" + length + text.encode() + data)
        arrays = read_npz(home / "a.npz")
        assert arrays.x.nbytes < 10**6
        assert arrays.x.ndim > 1

    sizes = st.sampled_from([0, 8, 16, 32, 64, 96, 100])
    member = st.tuples(DESCRIPTIONS, st.lists(SIDES, max_size=4), st.booleans(),
                       sizes.flatmap(lambda size: st.binary(min_size=size, max_size=size)))
    fitting = st.just(("<f8", [4, 3], False, bytes(96)))
    labels = st.just(("<i8", [4], False, bytes(32)))
    members = st.one_of(
        st.fixed_dictionaries({"x.npy": st.one_of(fitting, member), "y.npy": st.one_of(labels, member)}),
        st.dictionaries(st.sampled_from(["x.npy", "y.npy", "group.npy", "x", "../x.npy", "z.npy"]), member))
    methods = st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    return Kind("NPZ arrays", st.tuples(members, methods), use)


def damaged_npz_kind(home: Path) -> Kind:
    """Damage is noticed, since an archive has check sums: what is read is what was written."""
    files = []
    for save in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        save(file, **ARRAYS)  # type: ignore[arg-type]
        files.append(file.getvalue())

    def use(given: tuple[int, list[Change]]) -> None:
        which, changes = given
        data = files[which]
        for change in changes:
            data = change.of(data)
        (home / "a.npz").write_bytes(data)
        found = read_npz(home / "a.npz")
        assert np.array_equal(found.x, ARRAYS["x"])
        assert np.array_equal(found.y, ARRAYS["y"])
        assert found.group is None or np.array_equal(found.group, ARRAYS["group"])

    changes = st.lists(CHANGES, min_size=1, max_size=2)
    return Kind("damaged NPZ arrays", st.tuples(st.integers(0, 1), changes), use)
