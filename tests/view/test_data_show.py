"""What `descant data` shows: measures against numbers computed by hand, lists, sketches and pictures."""

import dataclasses
import json
import re
import struct
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import descant
from cli_helpers import call
from descant.core import fields
from descant.core.federation import Federation
from descant.core.preprocess import Preprocess
from descant.core.splits import SPLITS, Table
from descant.data import DATASETS, PARTITIONS, DataSpec, heterogeneity
from descant.data.cache import data_dir
from descant.data.heterogeneity import facts, measure
from descant.view.data import HEIGHT, WIDTH, Columns, by_class, draw_blocks
from descant.view.data_picture import COLUMNS, draw_federation

DOCUMENT = Path(__file__).parents[2] / "docs" / "data.md"

pytestmark = [pytest.mark.pictures, pytest.mark.thorough]


@pytest.fixture(autouse=True)
def _own_data_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("DESCANT_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


def arrays(x, y, client, **options) -> Federation:
    return Federation.from_arrays(np.array(x, np.float32)[:, None], np.array(y), np.array(client), **options)


# -- measures --------------------------------------------------------------------------------------


def test_label_measures_by_hand():
    """Client 0 has 4 rows of class 0; client 1 has 2 of each; the pool is 3/4 and 1/4."""
    counts = np.array([[4, 0], [2, 2]])
    assert heterogeneity.label_distances(counts).tolist() == pytest.approx([0.25, 0.25])
    assert heterogeneity.effective_classes(counts).tolist() == pytest.approx([1, 2])
    three = np.array([[2, 1, 1]])  # entropy 3/2 ln 2
    assert heterogeneity.effective_classes(three)[0] == pytest.approx(2**1.5)


@pytest.mark.parametrize(("sizes", "expected"), [
    ([5, 5, 5], 0), ([1, 3], 0.25), ([3, 1], 0.25), ([0, 0, 0, 8], 0.75), ([7], 0)])
def test_gini_by_hand(sizes, expected):
    assert heterogeneity.gini(np.array(sizes)) == pytest.approx(expected)


def test_all_splits_and_the_unseen_count():
    y, client = [0, 0, 1, 2, 2, 2, 0, 1, 1], [0, 0, 0, 1, 1, 1, 2, 2, 2]
    federation = arrays(y, y, client, unseen=1, test=0.4, validation=0.4)
    assert heterogeneity.sizes(federation).tolist() == [3, 3, 3]
    of_client = dict(zip(federation.names, heterogeneity.class_counts(federation).tolist(), strict=True))
    assert of_client == {"0": [2, 1, 0], "1": [0, 0, 3], "2": [1, 2, 0]}
    for name in SPLITS:
        counts, table = heterogeneity.class_counts(federation, [name]), federation.split(name)
        assert counts.tolist() == [np.bincount(federation.y[rows], minlength=3).tolist() for rows in table]


def test_rows_without_class_have_no_counts():
    federation = arrays([0, 1, 2, 3], [0.5, 1, 2, 3], [0, 0, 1, 1], test=0)
    assert heterogeneity.class_counts(federation) is None


def test_feature_shift_by_hand():
    """Clients at 0 and 2: the pool has mean 1 and deviation 1. The mean of 2 of 4 rows has the
    variance 1/2 - 1/4."""
    shift = heterogeneity.feature_shift(arrays([0, 0, 2, 2], [0.5, 1, 2, 3], [0, 0, 1, 1], test=0))
    assert shift.distance.tolist() == pytest.approx([1, 1])
    assert shift.chance.tolist() == pytest.approx([0.5, 0.5])
    assert shift.spread.tolist() == pytest.approx([0, 0])


def test_feature_shift_is_counted_within_classes():
    """Class 1 lies 10 higher, and the clients have different shares of it: labels explain that. The
    variance of a mean is (n - sum_c n_c^2 / N_c) / n^2."""
    x, y = [-1, 1, -1, 1, 9, 11, 9, 11], [0, 0, 0, 0, 1, 1, 1, 1]
    shift = heterogeneity.feature_shift(arrays(x, y, [0, 0, 0, 0, 0, 0, 1, 1], test=0))
    assert shift.distance.tolist() == pytest.approx([0, 0])
    assert np.square(shift.chance).tolist() == pytest.approx([(6 - 16 / 4 - 4 / 4) / 36, (2 - 4 / 4) / 4])
    assert np.square(shift.spread).tolist() == pytest.approx([36 / 35, 4 / 3])
    assert not shift.evident


def test_a_single_row_has_no_spread():
    shift = heterogeneity.feature_shift(arrays([0, 1, 2, 9], [0.5, 1, 2, 3], [0, 0, 0, 1], test=0))
    assert np.isnan(shift.spread).tolist() == [False, True]


@pytest.mark.parametrize("x", [torch.ones(6, 2), torch.arange(12).reshape(6, 2)])
def test_constant_features_and_tokens_have_no_shift(x):
    federation = Federation.from_arrays(x, np.arange(6) % 2, np.arange(6) // 3)
    assert heterogeneity.feature_shift(federation) is None


@pytest.mark.parametrize(("fields", "evident"), [
    ({"partition": "iid"}, False), ({"partition": "iid", "clients": 300}, False),
    ({"partition": "classes"}, False), ({"partition": "dirichlet", "alpha": 0.1}, False),
    ({"partition": "quantity"}, False), ({"partition": "feature", "strength": 0.1}, True),
    ({"partition": "feature", "change": "rotation"}, True),
    ({"partition": "feature", "change": "noise"}, True),
])
def test_a_feature_shift_is_seen_where_there_is_one(fields, evident):
    shift = heterogeneity.feature_shift(descant.federation("digits", **fields))
    assert shift.evident == evident
    if fields["partition"] != "feature":
        assert np.square(shift.distance).mean() == pytest.approx(np.square(shift.chance).mean(), rel=0.25)


def test_of_many_features_some_are_enough():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 3000)).astype(np.float32)
    x[200:] += 1
    client = np.repeat([0, 1], 200)
    everything = heterogeneity.feature_shift(Federation.from_arrays(x[:, :256], client * 1.0, client))
    some = heterogeneity.feature_shift(Federation.from_arrays(x, client * 1.0, client))
    assert some.distance == pytest.approx(everything.distance, rel=0.02)


def many(clients: int, rows: int = 10) -> Federation:
    """A federation with random labels, made directly: splitting takes longer than looking."""
    rng = np.random.default_rng(0)
    total = clients * rows
    table = Table.packed(np.arange(total), np.full(clients, rows))
    nothing = Table.packed(np.zeros(0), np.zeros(clients, int))
    return Federation(torch.zeros(total, 1), torch.from_numpy(rng.integers(0, 10, total)), table, nothing,
                      nothing, 10, tuple(map(str, range(clients))))


def test_a_hundred_thousand_clients_are_measured_at_once():
    federation = many(100_000)
    start = time.process_time()  # other processes do not count
    counts = heterogeneity.class_counts(federation)
    heterogeneity.label_distances(counts), heterogeneity.effective_classes(counts)
    heterogeneity.gini(heterogeneity.sizes(federation))
    draw_blocks(federation, measure(federation), 80, plain=False)
    assert time.process_time() - start < 3


# -- sketches and pictures -------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [3, 20, 100, 1000])
@pytest.mark.parametrize("width", [40, 80, 1000])
@pytest.mark.parametrize("plain", [False, True])
def test_the_sketch_fits(clients, width, plain):
    federation = many(clients)
    *lines, legend = draw_blocks(federation, measure(federation), width, plain)
    assert max(map(len, lines)) <= min(width, WIDTH)
    assert len(lines) <= 12  # numbers, sizes, 10 classes
    assert "".join(lines).isascii() == plain
    assert ("a column is a client;" in legend) == (clients <= min(width, WIDTH) - 8)


def test_the_sketch_shows_who_has_what():
    y, client = [0] * 4 + [1] * 4 + [0, 0, 1, 1] * 2, [0] * 4 + [1] * 4 + [2] * 8
    federation = arrays(y, y, client, test=0, unseen=1, seed=1)
    assert federation.names == ("1", "2", "0")
    assert draw_blocks(federation, measure(federation), 80, plain=True) == [
        "client  0  1  2",
        "  rows  5  9  5",
        "     0     ++ ##",
        "     1  ## ++",
        "              ^^^ unseen",
        "a column is a client; highest: 8 rows; darkest: 100% of the client's rows",
    ]


def named() -> Federation:
    federation = arrays([0, 0, 1, 1, 0, 1], [0, 0, 1, 1, 0, 1], ["Basel"] * 3 + ["Aarau"] * 3, test=0)
    return dataclasses.replace(federation, class_names=("healthy", "ill $x$ and more than that"))


@pytest.mark.parametrize(("clients", "expected"), [
    (2, ["Aarau", "Basel"]), (45, ["c0", "c10", "c20", "c30", "c40"])])
def test_the_picture_has_the_names_of_clients_and_classes(clients, expected, monkeypatch):
    federation = named() if clients == 2 else dataclasses.replace(
        many(clients), names=tuple(f"c{k}" for k in range(clients)),
        class_names=tuple(f"kind {k}" for k in range(10)))
    figures = []
    monkeypatch.setattr("descant.view.data_picture.png", figures.append)
    draw_federation(federation, measure(federation))
    _, classes, *_ = figures[0].axes
    assert [text.get_text() for text in figures[0].axes[-1].get_xticklabels()] == expected
    assert [text.get_text() for text in classes.get_yticklabels()] == (
        ["healthy", "ill $x$ and m…"] if clients == 2 else [f"kind {k}" for k in range(10)])


def test_many_classes_are_put_together():
    y = np.arange(400) % 100
    federation = Federation.from_arrays(y[:, None].astype(np.float32), y, np.arange(400) // 100)
    lines = draw_blocks(federation, measure(federation), 80, plain=False)
    assert len(lines) == HEIGHT + 3
    assert [line.split()[0] for line in lines[2:4]] == ["0-3", "4-7"]


def test_columns_put_like_clients_together_and_the_unseen_last():
    counts = np.array([[0, 4], [3, 1], [4, 0], [1, 3], [0, 4], [4, 0]])
    y = np.concatenate([np.repeat([0, 1], row) for row in counts])
    federation = arrays(y, y, np.repeat(np.arange(6), 4), test=0, unseen=2)
    counts = heterogeneity.class_counts(federation)
    columns = Columns.of(federation, 3, by_class(counts))
    assert set(columns.order[4:]) == {4, 5}
    assert counts[columns.order[:4]].argmax(1).tolist() == sorted(counts[:4].argmax(1))
    assert (len(columns), columns.merged, columns.seen) == (3, 2, 2)
    assert columns.mean(heterogeneity.sizes(federation)).tolist() == [4, 4, 4]
    assert Columns.of(federation, 10).order.tolist() == list(range(6))


def png_size(picture: bytes) -> tuple[int, int]:
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", picture[16:24])
    return width, height


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"partition": "classes", "clients": 20}, {"partition": "iid", "clients": 100, "unseen": 10},
    {"partition": "shards", "clients": 400, "unseen": 40}, {"partition": "feature", "clients": 6},
])
def test_pictures(options):
    federation = descant.federation("digits", **options)
    measured = measure(federation)
    picture = draw_federation(federation, measured)
    width, height = png_size(picture)
    assert 1000 < width < 1500
    assert 500 < height < 1200
    assert picture == draw_federation(federation, measured)


@pytest.mark.slow
def test_pictures_of_more_clients_than_columns_and_of_no_classes():
    federation = many(COLUMNS + 500, rows=3)
    png_size(draw_federation(federation, measure(federation)))
    federation = descant.federation("fedmap_linear", test=0.0)
    png_size(draw_federation(federation, measure(federation)))


def test_names_may_hold_anything():
    names = ["$x_1$", "日本", "a" * 99, "[red]"]
    federation = arrays(range(16), [0, 1] * 8, np.repeat(np.arange(4), 4), names=names)
    png_size(draw_federation(federation, measure(federation)))


def test_facts():
    federation = descant.federation("digits", partition="classes", clients=10, unseen=2)
    found = facts(federation, measure(federation))
    assert found["data"] == "digits, partition classes"
    assert found["clients"] == "8, and 2 unseen (never train)"
    assert found["rows"] == "1,797, each 64 (float32)"
    assert found["classes"] == "10; a client has 2"
    assert found["effective classes"].startswith("2.00 per client")
    assert found["label distance"].startswith("0.80")
    assert sum(int(n.replace(",", "")) for n in re.findall(r" ([\d,]+\d)", found["splits"])) == 1797


# -- descant data list -----------------------------------------------------------------------------


def heart_disease(folder: Path) -> Path:
    """A small prepared file."""
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    path = folder / "heart_disease.npz"
    np.savez(path, x=rng.standard_normal((40, 13)).astype(np.float32), y=np.arange(40) % 2,
             client=np.arange(40) // 20, client_names=np.array(["north", "south"]))
    return path


def test_list(monkeypatch):
    heart_disease(data_dir())
    (data_dir() / "har").mkdir()
    (data_dir() / "har" / "something.zip").touch()
    (data_dir() / "cifar10").mkdir()
    (data_dir() / "cifar10" / "cifar-10-binary.tar.gz.part").touch()
    (data_dir() / "mnist.npz").write_bytes(b"no archive")
    monkeypatch.setattr(np.lib.format, "read_array", None)  # nothing is loaded
    code, out, err = call("data", "list", "--json")
    assert (code, err) == (0, "")
    found = {entry["name"]: entry for entry in json.loads(out)}
    assert list(found) == list(DATASETS)
    where = {name: entry["where"] for name, entry in found.items()}
    assert where["digits"] == "embedded"
    assert where["logistic"] == "synthetic"
    assert where["heart_disease"] == "present"
    assert where["har"] == "official files, to be prepared"
    assert where["cifar10"] == "to be downloaded (170.1 MB)"
    assert where["mnist"] == "damaged: mnist.npz"
    assert where["femnist"] == "to be fetched by hand"
    assert {name for name, entry in found.items() if entry["rows"] is not None} == {"heart_disease"}
    assert found["heart_disease"]["rows"] == 40
    assert found["har"]["clients"] == 30

    code, out, err = call("data", "list")
    assert (code, err) == (0, "")
    [line] = [line for line in out.splitlines() if line.startswith("heart_disease ")]
    assert line.split()[1:4] == ["4", "40", "present"]
    [line] = [line for line in out.splitlines() if line.startswith("digits ")]
    assert line.split()[1:3] == ["any", "embedded"]
    assert f"data directory: {data_dir()}" in out


# -- descant data show -----------------------------------------------------------------------------


@pytest.mark.slow
def test_show_the_demo(tmp_path):
    code, out, err = call("data", "show")
    assert (code, err) == (0, "")
    for words in ("demo experiment", "clients             20", "size Gini", "effective classes   2.00",
                  "a column is a client", "picture: data.png"):
        assert words in out
    first = (tmp_path / "data.png").read_bytes()
    png_size(first)
    assert "picture: data-2.png" in call("data", "show", "--set", "data.partition=iid").out
    assert (tmp_path / "data.png").read_bytes() == first
    assert (tmp_path / "data-2.png").read_bytes() != first
    assert "picture: data.png" in call("data", "show", "--set", "data.partition=iid", "--out", "data.png").out
    assert (tmp_path / "data.png").read_bytes() == (tmp_path / "data-2.png").read_bytes()


def test_show_a_file(tmp_path):
    folder = tmp_path / "experiments"
    folder.mkdir()
    path = folder / "small.toml"
    path.write_text('[data]\ndataset = "fedmap_linear"\n')
    code, out, err = call("data", "show", path)
    assert (code, err) == (0, "")
    assert "note: client '1' dropped: 1 row" in out
    assert "classes             none" in out
    assert f"picture: {folder / 'data.png'}" in out
    assert sorted(p.name for p in folder.iterdir()) == ["data.png", "small.toml"]
    assert not (tmp_path / "data.png").exists()


@pytest.mark.parametrize(("args", "words"), [
    (("--out", "picture.pdf"), "ends in .png"),
    (("--out", "nowhere/picture.png"), "in a directory that exists"),
    (("missing.toml",), "cannot read missing.toml"),
    (("--set", "data.alpha=1"), "unknown data field 'alpha'"),
])
def test_show_refuses(args, words, tmp_path):
    code, out, err = call("data", "show", *args)
    assert (code, out) == (2, "")
    assert words in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["run", "data"])
def test_data_dir_is_where_data_are_looked_for(command, tmp_path):
    args = ("data", "show") if command == "data" else ("run",)
    choose = ("--set", "data.dataset=femnist", "--set", "data.partition=iid", "--data-dir", tmp_path / "here")
    code, _, err = call(*args, *choose)
    assert code == 1
    assert f"there is no femnist.npz in {tmp_path / 'here'}" in err


def test_a_run_resumes_from_another_data_dir(tmp_path):
    heart_disease(tmp_path / "here")
    small = [f"--set={setting}" for setting in (
        "data.dataset=heart_disease", "data.partition=natural", "data.clients=2", "train.rounds=1",
        "train.cohort=2", "train.local={steps=1}", "train.backend=vectorised")]
    code, _, err = call("run", *small, "--data-dir", tmp_path / "here", "--out", "run")
    assert (code, err) == (0, "")
    (tmp_path / "here").rename(tmp_path / "there")
    code, out, err = call("resume", "run", "--rounds", 2, "--data-dir", tmp_path / "there")
    assert (code, err) == (0, "")
    assert "round 2/2" in out


@pytest.mark.parametrize(("args", "words"), [
    (("data",), ["list", "show"]), (("data", "list"), ["--json", "--data-dir"]),
    (("data", "show"), ["FILE", "--set", "--out", "--data-dir", "data.png"]),
    (("run",), ["--data-dir"]), (("resume",), ["--data-dir"])])
def test_help(args, words):
    code, out, err = call(*args, "--help")
    assert (code, err) == (0, "")
    assert [word for word in words if word not in out] == []


# -- docs/data.md ----------------------------------------------------------------------------------


def test_the_document_is_complete():
    text = DOCUMENT.read_text(encoding="utf-8")
    for part in (*PARTITIONS.values(), *DATASETS.values()):
        assert f"`{part.name}`" in text, part.name
    with_files = [cls for cls in DATASETS.values() if hasattr(cls, "source")]
    for part in (*PARTITIONS.values(), *with_files, Preprocess):
        for field in fields.describe(part):
            assert f"`{field.name}`" in text, field.name
    for name in re.findall(r"\]\(([\w-]+\.(?:png|md))\)", text):
        assert (DOCUMENT.parent / name).exists(), name
    for picture in DOCUMENT.parent.glob("partition-*.png"):
        assert picture.name in text
        assert picture.stat().st_size < 120_000


def test_the_defaults_in_the_document_are_right():
    text = DOCUMENT.read_text(encoding="utf-8")
    for partition in PARTITIONS.values():
        [row] = [line for line in text.splitlines() if line.startswith(f"| `{partition.name}` ")]
        for field in fields.describe(partition):
            if isinstance(field.default, int | float):
                assert re.search(rf"`{field.name}` \({field.default}\b", row), (partition.name, field.name)


def test_the_example_of_the_document_is_valid():
    [block] = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    spec = DataSpec.parse(tomllib.loads(block)["data"])
    assert (spec.dataset.name, spec.partition.name, spec.unseen) == ("fashion_mnist", "dirichlet", 4)
