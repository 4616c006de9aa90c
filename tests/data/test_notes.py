"""What is told about data before anybody trains on them, and labels that are no class numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import descant
from cli_helpers import call
from descant import Federation
from descant.core.labels import as_classes, as_known
from descant.core.notes import LARGE
from descant.deploy.export.manifest import read_manifest
from descant.errors import UsageError

CLIENT = np.repeat(["north", "south"], 20)


def rows(labels: tuple[int, ...] = (0, 1)) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((40, 3)).astype("float32"), np.resize(labels, 40)


# -- labels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [(1, 2), (0, 2), (3, 7, 70)])
def test_labels_with_gaps_are_as_many_classes_as_there_are(labels: tuple[int, ...]) -> None:
    """{1, 2} used to become three classes, one of which nobody has."""
    x, y = rows(labels)
    names = tuple(map(str, labels))
    for fed in (Federation.from_arrays(x, y, CLIENT), descant.federation((x, y), clients=2)):
        assert (fed.classes, fed.class_names) == (len(labels), names)
        assert sorted(fed.y.unique().tolist()) == list(range(len(labels)))
        assert [labels[k] for k in fed.y.tolist()] == y.tolist()
        [note] = [note for note in fed.notes if "labels" in note]
        assert f"{', '.join(names[:-1])} and {names[-1]}" in note


def test_labels_without_gaps_stay_and_classes_that_are_given_are_believed() -> None:
    x, y = rows((0, 1, 2))
    fed = Federation.from_arrays(x, y, CLIENT)
    assert (fed.classes, fed.class_names, fed.notes) == (3, None, ())
    x, y = rows((1, 2))
    fed = Federation.from_arrays(x, y, CLIENT, classes=3)
    assert (fed.classes, fed.class_names, torch.equal(fed.y, torch.from_numpy(y))) == (3, None, True)


def test_names_must_fit() -> None:
    x, y = rows((1, 2))
    assert Federation.from_arrays(x, y, CLIENT, class_names=("no", "yes")).class_names == ("no", "yes")
    with pytest.raises(UsageError, match="there are 2 classes, and names for 3"):
        Federation.from_arrays(x, y, CLIENT, class_names=("a", "b", "c"))
    with pytest.raises(UsageError, match="there are 3 columns, and names for 1"):
        Federation.from_arrays(x, y, CLIENT, column_names=("age",))


def test_labels_to_classes_and_back() -> None:
    numbers, names = as_classes(np.array([5, 2, 5, 9]))
    assert (numbers.tolist(), names) == ([1, 0, 1, 2], ("2", "5", "9"))
    assert as_known(np.array([9, 2]), names, "").tolist() == [2, 0]
    with pytest.raises(UsageError, match="file: y holds the label 4, but the model knows 2, 5, 9"):
        as_known(np.array([9, 4]), names, "file: ")
    tokens = np.array([[3, 4], [5, 6]])
    assert as_classes(tokens)[0] is tokens
    y = np.array([0, 1])
    assert as_known(y, ("healthy", "ill"), "") is y
    assert as_known(y, None, "") is y


@pytest.mark.slow
def test_labels_of_files_come_back_in_predictions(tmp_path: Path) -> None:
    """Through the run, the exported model, and a client that came later."""
    folder = tmp_path / "sites"
    folder.mkdir()
    for name in ("north", "south"):
        x, y = rows((1, 2))
        x[:, 0] = 4 * (y - 1.5)
        np.savez(folder / f"{name}.npz", x=x, y=y)
    x, y = rows((2, 1))
    x[:, 0] = 4 * (y - 1.5)
    np.savez(tmp_path / "west.npz", x=x, y=y)
    (tmp_path / "e.toml").write_text('[data]\ndataset = "sites"\n[algorithm]\nname = "fedavg"\n'
                                     '[train]\nrounds = 5\nbackend = "loop"\n')
    code, out, err = call("run", tmp_path / "e.toml", "--out", tmp_path / "run")
    assert (code, err) == (0, "")
    assert "note: the labels are 1 and 2: they become 2 classes with these names" in out
    assert call("export", tmp_path / "run", "--client", "north", "--to", tmp_path / "models").code == 0
    place = tmp_path / "models" / "north"
    assert read_manifest(place).classes == ("1", "2")
    code, out, figures = call("predict", place, tmp_path / "west.npz")
    assert code == 0
    assert [line.split(",")[0] for line in out.splitlines()[1:]] == [str(label) for label in y]
    assert ["accuracy", "1.0000"] in [line.split() for line in figures.splitlines()]
    code, out, err = call("personalize", tmp_path / "run", "--data", tmp_path / "west.npz")
    assert (code, err) == (0, "")
    assert any(line.split()[:1] == ["accuracy"] and "1.0000" in line for line in out.splitlines())


# -- features and sizes -------------------------------------------------------------------------------------


def test_columns_that_are_not_scaled_are_told_with_the_remedy() -> None:
    x, y = rows()
    x[:, 1] = 41 + 15 * x[:, 1]
    fed = Federation.from_arrays(x, y, CLIENT, column_names=("a", "age", "c"))
    [note] = fed.notes
    assert note.startswith("column 'age' (mean 4")
    assert note.endswith('set scale = "client" in [data]')
    assert Federation.from_arrays(x, y, CLIENT).notes[0].startswith("column 1 (mean")
    assert Federation.from_arrays(x, y, CLIENT, scale="client").notes == ()


@pytest.mark.parametrize(("mean", "std", "told"), [(0.9 * LARGE, 1.0, False), (1.2 * LARGE, 1.0, True),
                                                   (0.0, 0.8 * LARGE, False), (0.0, 1.5 * LARGE, True)])
def test_what_counts_as_not_scaled(mean: float, std: float, told: bool) -> None:
    x, y = rows()
    x[:, 0] = mean + std * x[:, 0] / x[:, 0].std()
    assert bool(Federation.from_arrays(x, y, CLIENT).notes) is told


def test_images_and_bytes_are_left_alone() -> None:
    _, y = rows()
    assert Federation.from_arrays(np.full((40, 3), 200, np.uint8), y, CLIENT).notes == ()
    assert Federation.from_arrays(np.full((40, 1, 4, 4), 200.0), y, CLIENT).notes == ()


def test_a_column_that_is_empty_at_one_client_is_told() -> None:
    x, y = rows()
    x[20:, 2] = np.nan
    fed = Federation.from_arrays(x, y, CLIENT, impute="client", column_names=("a", "b", "chol"))
    [note] = fed.notes
    assert "'chol' at 'south'" in note
    x[3, 0] = np.nan  # one value that is missing is what imputation is for
    assert len(Federation.from_arrays(x, y, CLIENT, impute="client").notes) == 1


def test_a_client_of_two_rows_is_told() -> None:
    x, y = rows()
    [note] = Federation.from_arrays(x, y, np.array(["tiny"] * 2 + ["large"] * 38)).notes
    assert note == "client 'tiny' (2) has fewer than 5 rows: scores measured there are mostly noise"


def test_a_target_that_looks_like_classes_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "sites"
    folder.mkdir()
    for name in ("north", "south"):
        (folder / f"{name}.csv").write_text("age,ill\n" + "".join(f"0.{k},{1 + k % 2}\n" for k in range(20)))
    section = f'[data]\ndataset = "{folder}"\n[schema]\ntarget = "ill"\n'
    path = tmp_path / "e.toml"
    path.write_text(section + '[schema.columns]\nage = "number"\n')
    code, out, _ = call("data", "show", path, "--out", tmp_path / "a.png")
    assert code == 0
    assert "note: the target has only the values 1 and 2 and is treated as a real number" in out
    path.write_text(section + 'classes = ["1", "2"]\n[schema.columns]\nage = "number"\n')
    code, out, _ = call("data", "show", path, "--out", tmp_path / "a.png")
    assert (code, "note:" in out) == (0, False)
    assert "2 (1, 2); a client has 2" in out


def test_data_show_calls_clients_and_classes_by_name(tmp_path: Path) -> None:
    x, y = rows((0, 1))
    folder = tmp_path / "sites"
    folder.mkdir()
    for name in ("north", "south"):
        text = "".join(f"{v:.3f},{'ill' if k else 'well'}\n" for v, k in zip(x[:, 0], y, strict=True))
        (folder / f"{name}.csv").write_text("age,state\n" + text)
    path = tmp_path / "e.toml"
    path.write_text(f'[data]\ndataset = "{folder}"\n[schema]\ntarget = "state"\nclasses = ["well", "ill"]\n'
                    '[schema.columns]\nage = "number"\n')
    code, out, _ = call("data", "show", path, "--out", tmp_path / "a.png")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["clients:", "0", "north,", "1", "south"] in lines
    assert {"well", "ill"} <= {line[0] for line in lines if line}


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10", "emnist", "femnist", "sent140", "har",
                                  "heart_disease"])
def test_names_of_the_classes_of_known_datasets(name: str) -> None:
    """As many as there are, and no two alike."""
    cls = descant.data.DATASETS[name]
    assert cls.class_names is not None
    layout = cls.source.layout
    count = next(expected.below for key, expected in layout.items() if key.startswith("y"))
    assert len(set(cls.class_names)) == len(cls.class_names) == count
