"""Schemas: what they say, what they read, and what they refuse, by file, line and column."""

from __future__ import annotations

import importlib
import math
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from descant.data import Schema, federation, tables
from descant.errors import UsageError

TABLE: dict[str, Any] = {
    "target": "disease",
    "classes": ["no", "yes"],
    "columns": {"age": "number", "sex": ["female", "male"], "note": "ignore", "weight": "number"},
}
SCHEMA = Schema.parse(TABLE)
HEADER = "age,sex,note,weight,disease\n"
NAN = math.nan


def csv_file(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "north.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def parquet_file(tmp_path: Path, columns: dict[str, Any], **options: Any) -> Path:
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / "north.parquet"
    importlib.import_module("pyarrow.parquet").write_table(arrow.table(columns), path, **options)
    return path


def refused(path: Path, schema: Schema = SCHEMA) -> str:
    with pytest.raises(UsageError) as error:
        schema.read(path)
    return str(error.value).replace(str(path), "FILE")


# -- the section -------------------------------------------------------------------------------------


def test_a_schema_survives_toml_and_json() -> None:
    assert SCHEMA.features == ("age", "sex=female", "sex=male", "weight")
    assert SCHEMA.dump() == TABLE
    assert list(SCHEMA.dump()["columns"]) == list(TABLE["columns"])
    assert Schema.parse(tomllib.loads(tomli_w.dumps(SCHEMA.dump()))) == SCHEMA
    assert Schema.from_json(SCHEMA.to_json()) == SCHEMA
    real = Schema.parse({"target": "cost", "columns": {"age": "number"}})
    assert real.classes is None
    assert Schema.parse(real.dump()) == real == Schema.from_json(real.to_json())


def test_the_order_of_the_columns_matters() -> None:
    turned = Schema.parse(TABLE | {"columns": dict(reversed(TABLE["columns"].items()))})
    assert turned != SCHEMA
    assert turned.fingerprint() != SCHEMA.fingerprint()
    assert Schema.parse(TABLE).fingerprint() == SCHEMA.fingerprint()
    others = [TABLE | {"classes": ["yes", "no"]}, TABLE | {"target": "died"}]
    assert len({Schema.parse(t).fingerprint() for t in [TABLE, *others]}) == 3


@pytest.mark.parametrize(("change", "message"), [
    ({"classess": []}, "unknown schema field 'classess': did you mean 'classes'?"),
    ({"columns": None}, "schema.columns must be a section that gives each column a type"),
    ({"columns": {}}, "schema.columns must be a section"),
    ({"columns": ["age"]}, "schema.columns must be a section"),
    ({"columns": {"age": "numbers"}},
     'schema.columns.age must be "number", "ignore" or the list of its categories, not \'numbers\' '
     "(did you mean 'number'?)"),
    ({"columns": {"age": 3}}, "schema.columns.age must be"),
    ({"columns": {"sex": []}}, "schema.columns.sex must be a list of at least 1 names, not []"),
    ({"columns": {"sex": ["m", "m"]}}, "schema.columns.sex has 'm' twice: keep one"),
    ({"columns": {"sex": ["m", ""]}}, "schema.columns.sex: the name '' must not be empty"),
    ({"columns": {"sex": ["m", " f"]}}, "schema.columns.sex: the name ' f' must not"),
    ({"columns": {"grade": [1, 2]}}, "schema.columns.grade must be text, not 1: put it in quotes"),
    ({"columns": {"age ": "number"}}, "schema.columns: the name 'age ' must not"),
    ({"columns": {"note": "ignore"}}, "schema.columns are all ignored"),
    ({"columns": {"disease": "number"}}, "schema.columns.disease is also the target"),
    ({"target": 3}, "schema.target must be text, not 3"),
    ({"classes": ["no"]}, "schema.classes must be a list of at least 2 names, not ['no']"),
    ({"classes": "no"}, "schema.classes must be a list"),
    ({"classes": [0, 1]}, "schema.classes must be text, not 0: put it in quotes"),
    ({"classes": ["a", "b", "a"]}, "schema.classes has 'a' twice"),
])
def test_bad_schemas(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        Schema.parse(TABLE | change)
    assert message in str(error.value)


def test_a_schema_needs_a_target_and_is_a_section() -> None:
    with pytest.raises(UsageError, match=r"schema\.target is missing: name the column to predict"):
        Schema.parse({"columns": {"age": "number"}})
    with pytest.raises(UsageError, match=r"\[schema\] must be a section, not 'a.json'"):
        Schema.parse("a.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"columns": 3}', '{"columns": [["a"]]}', '{"x": "a"}'])
def test_json_that_is_no_schema(text: str) -> None:
    with pytest.raises(UsageError, match="not a schema in JSON"):
        Schema.from_json(text)


# -- CSV ---------------------------------------------------------------------------------------------


def test_reading_csv(tmp_path: Path) -> None:
    """The order of the file does not matter; quotes, spaces, blank lines and empty cells do as expected."""
    path = csv_file(tmp_path, 'disease, sex ,weight,age,note\nyes,male,70.5,63,"a, ""quoted""\ntext"\n\n'
                              "no, female ,,4.1e1,\nno,,-.5, 7 ,x\n")
    x, y = SCHEMA.read(path)
    assert (x.dtype, y.dtype) == (np.float32, np.int64)
    np.testing.assert_array_equal(
        x, np.array([[63, 0, 1, 70.5], [41, 1, 0, NAN], [7, NAN, NAN, -0.5]], np.float32))
    assert y.tolist() == [1, 0, 0]


@pytest.mark.parametrize("change", [
    lambda data: b"\xef\xbb\xbf" + data,  # a byte order mark, as spreadsheets write
    lambda data: data.replace(b"\n", b"\r\n"),
    lambda data: data.removesuffix(b"\n"),
    lambda data: data.replace(b"note,", b"").replace(b",n,", b","),  # what is ignored need not be there
])
def test_ways_to_write_csv(tmp_path: Path, change: Any) -> None:
    path = csv_file(tmp_path, change(f"{HEADER}63,male,n,70,yes\n41,female,n,60,no\n".encode()))
    x, y = SCHEMA.read(path)
    assert x.tolist() == [[63, 0, 1, 70], [41, 1, 0, 60]]
    assert y.tolist() == [1, 0]


def test_real_targets(tmp_path: Path) -> None:
    schema = Schema.parse({"target": "cost", "columns": {"age": "number"}})
    x, y = schema.read(csv_file(tmp_path, "age,cost\n1,2.5\n3,-4\n"))
    assert (y.dtype, y.tolist(), x.tolist()) == (np.float32, [2.5, -4], [[1], [3]])
    assert refused(csv_file(tmp_path, "age,cost\n1,2.5\n3,\n"), schema) \
        == "FILE, line 3, column 'cost': the target is missing: fill it in, or leave the row out"


def test_files_of_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROWS", 4)
    lines = [f"{k},male,,{k / 2},yes\n" for k in range(11)]
    x, y = SCHEMA.read(csv_file(tmp_path, HEADER + "".join(lines)))
    assert x[:, 0].tolist() == list(range(11))
    assert len(y) == 11
    assert "FILE, line 12, column 'weight'" in refused(
        csv_file(tmp_path, HEADER + "".join(lines).replace("5.0", "five")))
    path = csv_file(tmp_path, HEADER + "\n".join(lines))  # with blank lines
    assert tables.place_of_row(path, 9) == f"{path}, line 20"


@pytest.mark.parametrize(("content", "message"), [
    ("", "FILE is empty: the first line must name the columns, and rows follow"),
    ("\n\n", "FILE is empty"),
    (HEADER, "FILE has a header but no rows: add some, or remove the file"),
    ("agee,sex,note,weight,disease\n", "FILE does not fit the schema: it has no column 'age' (did you mean "
     "'agee'?); its column 'agee' is not in the schema (did you mean 'age'?). Correct the names in the file "
     'or in [schema.columns], where a column to leave out is "ignore"'),
    ("age,sex,weight\n", "it has no column 'disease'. Correct"),
    ("age,sex,weight,disease,zip\n", "its column 'zip' is not in the schema. Correct"),
    (",age,sex,weight,disease\n", "its column 1 has no name (if it is an index that pandas wrote"),
    ("age,sex,weight,disease,age\n", "FILE has the column 'age' 2 times: keep one"),
    ("age;sex;note;weight;disease\n1;male;;2;no\n",
     "FILE, line 1: the columns seem to be separated by semicolons"),
    ("age\tsex\n", "separated by tabs"),
    (f"{HEADER}63,male,,70,yes\nold,male,,70,yes\n", "FILE, line 3, column 'age': 'old' is not a number: "
     "correct it, or leave the cell empty if the value is missing"),
    (f"{HEADER}NA,male,,70,yes\n", "column 'age': 'NA' is not a number"),
    (f"{HEADER}nan,male,,70,yes\n", "column 'age': 'nan' is not a number"),
    (f"{HEADER}inf,male,,70,yes\n", "column 'age': 'inf' is not a number"),
    (f"{HEADER}6_3,male,,70,yes\n", "column 'age': '6_3' is not a number"),
    (f"{HEADER}1e39,male,,70,yes\n", "column 'age': 1e+39 is too large"),
    (f'{HEADER}63,male,,"70,5",yes\n', "FILE, line 2, column 'weight': '70,5' has a comma: write numbers "
     "with a decimal point and without thousands separators"),
    (f'{HEADER}63,male,"two\nlines",70,yes\n63,male,,x,yes\n', "FILE, line 4, column 'weight': 'x'"),
    (f"{HEADER}63,femal,,70,yes\n", "FILE, line 2, column 'sex': unknown category 'femal': did you mean "
     "'female'? known are female, male"),
    (f"{HEADER}63,Male,,70,yes\n", "unknown category 'Male': did you mean 'male'?"),
    (f"{HEADER}63,male,,70,maybe\n", "FILE, line 2, column 'disease': unknown class 'maybe': "
     "did you mean 'yes'? known are no, yes"),
    (f"{HEADER}63,male,,70,\n", "FILE, line 2, column 'disease': the target is missing"),
    (f"{HEADER}63,male,,70,yes\n63,5,male,,70,yes\n", "FILE, line 3 has 6 cells, but the header names 5 "
     "columns: correct the line"),
    (f"{HEADER}63,male\n", "FILE, line 2 has 2 cells"),
    (f'{HEADER}63,male,"open,70,yes\n', "FILE, line 2: unexpected end of data; check the quotes"),
    (f"{HEADER}63,male,,70,yes\n63,m\xe4nnlich,,70,yes\n".encode("latin-1"), "FILE, line 3 is not UTF-8 "
     'text: save the file in the encoding "UTF-8"'),
    (HEADER.encode("utf-16"), "FILE, line 1 is not UTF-8 text"),
])
def test_bad_csv(tmp_path: Path, content: str | bytes, message: str) -> None:
    assert message in refused(csv_file(tmp_path, content))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert refused(tmp_path / "no.csv") == "cannot read FILE: No such file or directory"
    assert refused(tmp_path) == "FILE must end in one of .csv, .parquet, .npz"


# -- Parquet -----------------------------------------------------------------------------------------


def test_reading_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    monkeypatch.setattr(tables, "ROWS", 2)
    path = parquet_file(tmp_path, {
        "disease": arrow.array(["no", " yes", "no"]).dictionary_encode(), "age": [1, None, 3],
        "weight": [0.5, 1.5, NAN], "sex": ["male", None, "female"], "note": [b"", b"", b""]})
    x, y = SCHEMA.read(path)
    assert (x.dtype, y.dtype) == (np.float32, np.int64)
    np.testing.assert_array_equal(x, [[1, 0, 1, 0.5], [NAN, NAN, NAN, 1.5], [3, 1, 0, NAN]])
    assert y.tolist() == [0, 1, 0]
    assert tables.place_of_row(path, 2) == f"{path}, row 3"


def test_numbers_and_booleans_as_categories(tmp_path: Path) -> None:
    schema = Schema.parse({"target": "y", "classes": ["0", "1"],
                           "columns": {"grade": ["1", "2"], "flag": ["false", "true"], "smokes": "number",
                                       "unknown": "number", "half": ["0.5"]}})
    x, y = schema.read(parquet_file(tmp_path, {
        "y": [1.0, 0.0], "grade": [2, 1], "flag": [True, None], "smokes": [True, False],
        "unknown": [None, None], "half": [0.5, None]}))
    np.testing.assert_array_equal(x, [[0, 1, 0, 1, 1, NAN, 1], [1, 0, NAN, NAN, 0, NAN, NAN]])
    assert y.tolist() == [1, 0]


@pytest.mark.parametrize(("change", "message"), [
    ({"age": ["1", "old"]}, "FILE, row 1, column 'age': '1' is not a number: the column holds string"),
    ({"age": [1.0, math.inf]}, "FILE, row 2, column 'age': inf is too large"),
    ({"sex": ["male", "mael"]}, "FILE, row 2, column 'sex': unknown category 'mael': did you mean 'male'?"),
    ({"sex": [b"male", b"male"]}, "FILE, row 1, column 'sex': b'male' is neither text nor a number"),
    ({"disease": ["yes", None]}, "FILE, row 2, column 'disease': the target is missing"),
    ({"agee": [1, 2]}, "its column 'agee' is not in the schema (did you mean 'age'?)"),
    ({k: [] for k in ("age", "sex", "weight", "disease")}, "FILE has a header but no rows"),
])
def test_bad_parquet(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    good = {"age": [1, 2], "sex": ["male", "male"], "weight": [1, 2], "disease": ["no", "no"]}
    assert message in refused(parquet_file(tmp_path, good | change))


def test_text_without_a_value_is_missing_numbers(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    x, _ = SCHEMA.read(parquet_file(tmp_path, {"age": arrow.nulls(1, arrow.string()), "sex": ["male"],
                                               "weight": [1], "disease": ["no"]}))
    np.testing.assert_array_equal(x, [[NAN, 0, 1, 1]])


def test_a_damaged_parquet_file(tmp_path: Path) -> None:
    columns = {"age": np.arange(999.0), "sex": ["male"] * 999, "weight": np.arange(999.0),
               "disease": ["no"] * 999}
    path = parquet_file(tmp_path, columns, compression="none", use_dictionary=False)
    data = path.read_bytes()
    path.write_bytes(data[:100])
    assert "FILE cannot be read as Parquet: " in refused(path)
    path.write_bytes(data[:4] + b"\xff" * 60 + data[64:])  # the end, with the schema, is whole
    assert "FILE cannot be read as Parquet: " in refused(path)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert refused(tmp_path / "a.parquet") == ("FILE: reading Parquet needs the package pyarrow: pip install "
                                               "'descant[tables]', or save the file as CSV")


# -- NPZ ---------------------------------------------------------------------------------------------


def test_reading_npz(tmp_path: Path) -> None:
    path = tmp_path / "a.NPZ"
    with path.open("wb") as file:
        np.savez(file, x=np.arange(8).reshape(2, 4), y=np.array([1, 0], ">i2"))
    x, y = SCHEMA.read(path)
    assert (x.dtype, x.tolist()) == (np.float32, [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert (y.dtype, y.tolist()) == (np.int64, [1, 0])
    schema = Schema.parse({"target": "cost", "columns": dict.fromkeys("abcd", "number")})
    assert schema.read(path)[1].dtype == np.float32


@pytest.mark.parametrize(("arrays", "message"), [
    ({"x": np.zeros((2, 3)), "y": [0, 1]},
     "FILE: x has the shape (2, 3), but the schema has 4 features: age, sex=female, sex=male, weight"),
    ({"x": np.zeros((2, 4)), "y": [0, 2]},
     "FILE: y must hold the class numbers 0 to 1 (of the schema's classes no, yes), not 2"),
    ({"x": np.zeros((2, 4)), "y": [0.0, 1.0]}, "FILE: y must hold the class numbers 0 to 1"),
    ({"x": np.zeros((2, 4)), "y": [[0], [1]]}, "FILE: y has the shape (2, 1)"),
])
def test_npz_that_does_not_fit_the_schema(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    assert message in refused(path)


# -- groups, and words for what is missing -----------------------------------------------------------------


GROUPED = Schema.parse({
    "target": "disease", "classes": ["no", "yes"], "group": "patient", "missing": ["NA", "?", "-999"],
    "columns": {"age": "number", "sex": ["female", "male"]}})
CELLS = {"age": ["63", "NA", "-999", "", "41"], "sex": ["male", "?", "female", "male", "female"],
         "disease": ["yes", "no", "no", "yes", "no"], "patient": ["a", "b", "a", "", "NA"]}


def test_groups_and_missing_words_in_csv(tmp_path):
    path = csv_file(tmp_path, "\n".join([",".join(CELLS), *(",".join(row) for row in zip(
        *CELLS.values(), strict=True))]) + "\n")
    found = GROUPED.read_arrays(path)
    assert np.isnan(found.x[:, 0]).tolist() == [False, True, True, True, False]
    assert np.isnan(found.x[:, 1]).tolist() == [False, True, False, False, False]
    a, b, again, *alone = found.group.tolist()
    assert a == again
    assert len({a, b, *alone}) == 4  # rows without an id are groups of their own
    same = Schema.from_json(GROUPED.to_json())
    assert same == GROUPED
    # who predicts has no need of ids
    rows, y = GROUPED.read_rows(csv_file(tmp_path, "age,sex\n-999,male\n"))
    assert (bool(np.isnan(rows[0, 0])), y) == (True, None)


def test_groups_and_missing_words_in_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    path = parquet_file(tmp_path, CELLS | {"age": [63.0, None, -999.0, None, 41.0]})
    found = GROUPED.read_arrays(path)
    assert np.isnan(found.x[:, 0]).tolist() == [False, True, True, True, False]
    assert found.group[0] == found.group[2]
    assert len(set(found.group.tolist())) == 4


def test_a_group_of_a_file_stays_in_one_split(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("north", "south"):
        lines = [f"{rng.integers(20, 90)},male,{rng.choice(['no', 'yes'])},{k // 3}" for k in range(60)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,sex,disease,patient", *lines]) + "\n")
    found = federation(str(tmp_path), schema=GROUPED.dump())
    for client in range(2):
        sides = [{int(row) % 60 // 3 for row in found.split(name)[client]}
                 for name in ("train", "validation", "test")]
        assert all(sides)
        assert sum(map(len, sides)) == 20


def test_a_group_is_no_feature():
    with pytest.raises(UsageError, match=r"schema.group = 'age' is an id"):
        Schema.parse(GROUPED.dump() | {"group": "age"})
