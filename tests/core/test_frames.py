"""Federations from tables as people have them: pandas, Hugging Face, torch, mappings."""

from __future__ import annotations

import datetime
import decimal
import fractions
from typing import Any

import numpy as np
import pytest
import torch

import descant
from descant import Federation, UsageError

pandas = pytest.importorskip("pandas")

N = 60
RNG = np.random.default_rng(0)
COLUMNS: dict[str, Any] = {
    "age": RNG.integers(20, 80, N), "weight": RNG.normal(70, 10, N), "smoker": RNG.random(N) < 0.3,
    "blood": RNG.choice(["A", "B", "0"], N), "hospital": RNG.choice(["north", "south", "east"], N),
    "patient": np.repeat(np.arange(N // 2), 2), "ill": np.where(RNG.random(N) < 0.5, "yes", "no"),
}
COLUMNS["hospital"] = np.array(["north", "south", "east"])[COLUMNS["patient"] % 3]


def frame(**changes: Any) -> Any:
    return pandas.DataFrame(COLUMNS | changes)


def made(table: Any = None, **options: Any) -> Federation:
    return Federation.from_frame(frame() if table is None else table,
                                 **{"target": "ill", "client": "hospital", "group": "patient"} | options)


def test_columns_become_numbers():
    found = made()
    assert found.column_names == ("age", "weight", "smoker", "blood=0", "blood=A", "blood=B")
    assert found.names == ("east", "north", "south")
    assert (found.classes, found.class_names) == (2, ("no", "yes"))
    assert found.x.dtype == torch.float32
    for k, blood in enumerate(["0", "A", "B"], 3):
        assert found.x[:, k].tolist() == [float(value == blood) for value in COLUMNS["blood"]]
    assert found.x[:, 2].tolist() == COLUMNS["smoker"].astype(float).tolist()
    assert found.y.tolist() == [int(value == "yes") for value in COLUMNS["ill"]]


def test_it_is_the_federation_of_the_same_arrays():
    numbers = np.stack([COLUMNS["age"], COLUMNS["weight"]], 1).astype("float32")
    found = made(columns=["age", "weight"], seed=3, test=0.3, scale="client")
    same = Federation.from_arrays(numbers, (COLUMNS["ill"] == "yes").astype(int), COLUMNS["hospital"],
                                  group=COLUMNS["patient"], seed=3, test=0.3, scale="client")
    assert found.fingerprint() == same.fingerprint()


def test_rows_of_a_group_stay_together():
    found = made()
    for client in range(3):
        sides = [{int(COLUMNS["patient"][row]) for row in found.split(name)[client]}
                 for name in ("train", "validation", "test")]
        assert sum(map(len, sides)) == len(set.union(*sides))


@pytest.mark.parametrize("column", [
    pandas.Categorical(COLUMNS["blood"], categories=["A", "B", "0", "AB"]),
    pandas.Series(COLUMNS["blood"]).astype(object), pandas.array(COLUMNS["blood"], dtype="string"),
], ids=["categorical", "object", "string"])
def test_text_of_every_kind(column):
    found = made(frame(blood=column))
    order = ["A", "B", "0", "AB"] if hasattr(column, "categories") else ["0", "A", "B"]
    assert found.column_names[3:] == tuple(f"blood={name}" for name in order)
    assert found.x[:, 3 + order.index("B")].tolist() == [float(value == "B") for value in COLUMNS["blood"]]


@pytest.mark.parametrize("column", [
    [None, *COLUMNS["weight"][1:]], pandas.array([None, *range(1, N)], dtype="Int64"),
    pandas.array([None, *[True] * (N - 1)], dtype="boolean"), [None, *["A"] * (N - 1)],
])
def test_a_missing_value_is_imputed_where_that_is_asked_for(column):
    table = frame(weight=column)
    with pytest.raises(UsageError, match="missing value in row 0, column 'weight"):
        made(table)
    found = made(table, impute="client")
    assert bool(found.x.isfinite().all())


@pytest.mark.parametrize(("target", "classes"), [
    (RNG.integers(0, 4, N), 4), (RNG.random(N) < 0.5, 2), (RNG.normal(size=N), None),
    (pandas.Categorical(COLUMNS["ill"], categories=["yes", "no", "perhaps"]), 3),
    (pandas.array(RNG.integers(0, 4, N), dtype="Int64"), 4),
])
def test_targets_of_every_kind(target, classes):
    found = made(frame(ill=target))
    assert found.classes == classes
    if classes == 3:
        assert found.class_names == ("yes", "no", "perhaps")
        assert found.y[0] == ["yes", "no"].index(COLUMNS["ill"][0])
    run = descant.run("fedavg", federation=made(frame(ill=target), scale="client"), rounds=1,
                      backend="vectorised")
    assert run.rounds == 1


def test_a_given_split():
    year = np.tile([0, 0, 0, 1, 2], N // 5)
    names = np.array(["train", "validation", "test"])[year]
    found = Federation.from_frame(frame(when=names), target="ill", client="hospital", split="when")
    assert "when" not in found.column_names
    for k, name in enumerate(("train", "validation", "test")):
        assert sorted(found.split(name).indices.tolist()) == np.flatnonzero(year == k).tolist()
    with pytest.raises(UsageError, match="group 2 of client 'east' has rows in test and in train"):
        made(frame(when=names), split="when")
    with pytest.raises(UsageError, match=r"must be one of train, validation, test, not 'later' \(row 0\)"):
        made(frame(when=["later"] * N), split="when")
    only = np.where(COLUMNS["hospital"] == "east", "test", "train")
    assert made(frame(when=only), split="when").notes[0] == (
        "client 'east' dropped: no row whose split is train")


def test_other_tables_are_the_same():
    """A mapping of columns, rows that are mappings, rows that are tuples, and a torch Dataset of them."""
    same = made().fingerprint()
    assert made(COLUMNS).fingerprint() == same
    rows = [{name: column[k] for name, column in COLUMNS.items()} for k in range(N)]
    assert made(rows).fingerprint() == same

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return N

        def __getitem__(self, k: int) -> tuple[Any, ...]:
            return tuple(rows[k].values())

    places = {name: k for k, name in enumerate(COLUMNS)}
    found = made(Rows(), **{word: places[name] for word, name in (
        ("target", "ill"), ("client", "hospital"), ("group", "patient"))})
    assert found.fingerprint() == same


@pytest.mark.slow
def test_a_dataset_of_hugging_face():
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({name: list(column) for name, column in COLUMNS.items()})
    assert made(table).fingerprint() == made().fingerprint()
    labelled = table.cast_column("ill", datasets.ClassLabel(names=["yes", "no"]))
    found = made(labelled)
    assert found.class_names == ("yes", "no")
    assert found.y.tolist() == [["yes", "no"].index(value) for value in COLUMNS["ill"]]


def test_one_column_of_arrays():
    pictures = RNG.integers(0, 256, (N, 1, 8, 8)).astype("uint8")
    rows = [{"image": pictures[k], "label": k % 2, "who": k % 3} for k in range(N)]
    found = Federation.from_frame(rows, target="label", client="who")
    assert found.x.dtype == torch.uint8
    assert np.array_equal(found.x.numpy(), pictures)
    tensors = [{**row, "image": torch.from_numpy(row["image"])} for row in rows]
    again = Federation.from_frame(tensors, target="label", client="who")
    assert again.fingerprint() == found.fingerprint()
    with pytest.raises(UsageError, match=r"choose it alone with columns=\['image'\]"):
        Federation.from_frame([{**row, "age": 3} for row in rows], target="label", client="who")
    with pytest.raises(UsageError, match="arrays of different shapes"):
        Federation.from_frame([*rows, {**rows[0], "image": pictures[0, :, :4]}], target="label", client="who")


@pytest.mark.parametrize(("options", "words"), [
    ({"target": "il"}, "unknown column 'il': did you mean 'ill'"),
    ({"columns": ["age", "ill"]}, "'ill' cannot be a feature: it says the target"),
    ({"columns": []}, "no column is left"),
    ({"table": frame(name=[f"person {k}" for k in range(N)])}, "'name' has 60 different texts in 60 rows"),
    ({"table": frame(born=pandas.date_range("2000-01-01", periods=N))}, "'born' holds times"),
    ({"table": frame(mixed=["a", 3] * (N // 2))}, "'mixed' holds int and str"),
    ({"table": frame(hospital=[None, *COLUMNS["hospital"][1:]])}, "'hospital' is missing in row 0"),
    ({"table": frame(ill=[None, *COLUMNS["ill"][1:]])}, "'ill' is missing in row 0"),
    ({"table": frame(ill=[np.nan, *range(1, N)])}, "'ill' is missing in row 0"),
    ({"table": 3}, "must be a data frame, .* not an int"), ({"table": [1, 2]}, "of the table is an int: "),
    ({"table": "rows.csv"}, r"read the file first, as in from_frame\(pandas.read_csv"),
    ({"table": frame().iloc[:0]}, "the table has no rows"),
    ({"table": {**COLUMNS, "age": [1, 2]}}, "different numbers of rows: 'age' 2, "),
    ({"table": {**COLUMNS, "age": 3}}, "the column 'age' is an int: it must have a value for every row"),
    ({"table": [*frame().to_dict("records"), {"age": 3}]}, f"row {N} of the table is not like the first"),
    ({"table": [*frame().to_dict("records"), None]}, f"row {N} of the table is not like the first"),
    ({"columns": 3}, r"columns must be a list: columns=\[3\]"),
    ({"table": frame(born=[datetime.date(2000, 1, 1)] * N)}, "'born' holds times"),
    ({"table": frame(born=pandas.date_range("2000", periods=N, tz="UTC"))}, "'born' holds times"),
    ({"table": frame(born=pandas.period_range("2000", periods=N, freq="D"))}, "'born' holds times"),
    ({"table": frame(wave=np.full(N, 1j))}, "'wave' holds complex numbers"),
    ({"table": frame(code=[b"a"] * N)}, "'code' holds a bytes in each row: make numbers or text of it"),
    ({"table": frame(hospital=[{}] * N)}, "'hospital' holds a dict in each row"),
    ({"table": frame(none=[None] * N)}, "'none' has no value in any row"),
    ({"table": pandas.concat([frame(), frame()[["age"]]], axis=1)}, "the column 'age' twice"),
])
def test_what_is_wrong_is_said(options, words):
    with pytest.raises(UsageError, match=words):
        made(**options)


# -- what people try ---------------------------------------------------------------------------------------


def test_structured_arrays_and_arrow_tables():
    pyarrow = pytest.importorskip("pyarrow")
    same = made().fingerprint()
    assert made(frame().to_records(index=False)).fingerprint() == same
    assert made(pyarrow.Table.from_pandas(frame())).fingerprint() == same


def test_numbers_of_every_kind():
    given = frame(price=[decimal.Decimal("1.5")] * N, share=[fractions.Fraction(1, 2)] * N,
                  band=pandas.cut(np.arange(N), 3))
    found = made(given, columns=["price", "share", "band"])
    assert found.x[:, :2].unique(dim=0).tolist() == [[1.5, 0.5]]
    assert found.x.shape[1] == 5


def test_clients_that_pandas_has_made_real_numbers_stay_apart():
    """A column of whole numbers with a gap, from which the gap was then dropped."""
    found = made(frame(hospital=1_234_560.0 + np.arange(N) % 3), group=None)
    assert found.names == ("1234560", "1234561", "1234562")
    assert made(frame(hospital=0.5 + np.arange(N) % 3), group=None).names == ("0.5", "1.5", "2.5")


def test_text_of_pandas_says_whose_row_it_is():
    table = frame()
    found = Federation.from_arrays(table[["age"]], table["smoker"].astype(int), table["hospital"])
    assert found.names == ("east", "north", "south")


ROWS = np.zeros((N, 2))


@pytest.mark.parametrize(("wrong", "words"), [
    (lambda: Federation.from_frame(frame(), target="ill"), "client is missing: name"),
    (lambda: Federation.from_frame(frame(), client="hospital"), "target is missing: name"),
    (lambda: made(target=["ill"]), r"\['ill'\] is not a column"),
    (lambda: made(columns="age"), r"columns must be a list: columns=\['age'\]"),
    (lambda: made(tset=0.2), "unknown option 'tset': did you mean 'test'"),
    (lambda: Federation.from_arrays(frame(), COLUMNS["age"], COLUMNS["hospital"]), r"x must be .*from_frame"),
    (lambda: Federation.from_arrays(ROWS, COLUMNS["ill"], COLUMNS["hospital"]), r"y .*from_frame"),
])
def test_mistakes(wrong, words):
    with pytest.raises(UsageError, match=words):
        wrong()


@pytest.mark.thorough
def test_datasets_that_are_several_or_streamed():
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_pandas(frame())
    with pytest.raises(UsageError, match=r"DatasetDict with train, test: .*dataset\['train'\]"):
        made(datasets.DatasetDict({"train": one, "test": one}))
    with pytest.raises(UsageError, match="is a stream"):
        made(one.to_iterable_dataset())
