"""Loaders on small files in the official formats, written here; and what they say of bad ones."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import http.server
import io
import json
import os
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image

from descant.data import DATASETS, cache, download, har, leaf, shakespeare
from descant.data.cache import Expected, Source, data_dir, prepared
from descant.data.download import Remote
from descant.data.images import FashionMnist, Mnist
from descant.data.samples import Samples
from descant.errors import DescantError, UsageError

RNG = np.random.default_rng(0)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data directory, and no way to download."""
    monkeypatch.setenv("DESCANT_DATA", str(tmp_path))
    monkeypatch.setattr(download, "PAUSE", 0.0)

    def no_network(*_: Any, **__: Any) -> None:
        raise OSError("the network is off in tests")

    monkeypatch.setattr("socket.create_connection", no_network)
    monkeypatch.setattr(FashionMnist, "source", dataclasses.replace(FashionMnist.source, installed=None))
    return tmp_path


def unchecked(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Small archives cannot have the checksum of the official ones."""
    kind: Any = DATASETS[name]
    monkeypatch.setattr(kind, "source", dataclasses.replace(kind.source, remotes=()))


def load(name: str, **fields: Any) -> Samples:
    return DATASETS[name](**fields).load(1, 0)


def fails(name: str, message: str) -> None:
    """Loading fails with this message, and leaves nothing half-converted."""
    with pytest.raises(DescantError) as error:
        load(name)
    assert message in str(error.value)
    assert [path.name for path in data_dir().iterdir() if path.is_file()] == []


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def images(count: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, 256, (count, *shape), dtype=np.uint8)


# --- the data directory ---


def test_the_data_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DESCANT_DATA", "~/somewhere")
    assert data_dir() == Path.home() / "somewhere"
    monkeypatch.delenv("DESCANT_DATA")
    assert data_dir() == Path.home() / ".cache" / "descant"


def test_without_network_it_is_said_what_to_put_where(home: Path) -> None:
    with pytest.raises(DescantError) as error:
        load("mnist")
    message = str(error.value)
    assert f"there is no mnist.npz in {home}" in message
    assert "train-images-idx3-ubyte.gz is not in" in message
    assert "the network is off" in message
    assert f"Put into {home / 'mnist'}: the four IDX files" in message
    assert ("train-labels-idx1-ubyte.gz  from  https://storage.googleapis.com/cvdf-datasets/mnist/"
            "train-labels-idx1-ubyte.gz") in message
    assert "Dataset 'digits' needs no files." in message
    assert "--data-dir or DESCANT_DATA" in message


WITH_FILES = [name for name, dataset in DATASETS.items() if hasattr(dataset, "source")]


def test_all_but_the_embedded_and_the_synthetic_datasets_have_files() -> None:
    assert len(WITH_FILES) == 13


@pytest.mark.parametrize("name", WITH_FILES)
def test_every_dataset_with_files_explains_itself(home: Path, name: str) -> None:
    fails(name, f"Put into {home / name}: ")


def test_a_directory_that_cannot_be_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").touch()
    monkeypatch.setenv("DESCANT_DATA", str(home / "file" / "data"))
    with pytest.raises(DescantError, match=r"cannot prepare .*mnist\.npz: .*Not a directory"):
        load("mnist")


# --- prepared files ---

LAYOUT = {
    "x": Expected("float32", ("rows", 2)),
    "y": Expected("int64", ("rows",), below=3),
    "names": Expected("str", ("clients",)),
    "client": Expected("int64", ("rows",), below="clients"),
}
GOOD: dict[str, Any] = {
    "x": np.ones((4, 2), np.float32), "y": np.arange(4) % 3, "names": np.array(["a", "b"]),
    "client": np.arange(4) % 2,
}
TOY = Source("toy", LAYOUT, lambda folder: GOOD, "nothing")


def read_toy(home: Path) -> dict[str, np.ndarray]:
    arrays = prepared(TOY)
    return {name: arrays[name] for name in LAYOUT}


def test_a_prepared_file_is_read(home: Path) -> None:
    np.savez(home / "toy.npz", extra=np.zeros(3), **GOOD)
    assert all((array == GOOD[name]).all() for name, array in read_toy(home).items())
    np.savez_compressed(home / "toy.npz", **GOOD | {"x": np.asfortranarray(GOOD["x"])})
    assert all((array == GOOD[name]).all() for name, array in read_toy(home).items())
    assert np.concatenate(list(prepared(TOY).blocks("x"))).shape == (4, 2)


@pytest.mark.parametrize(("name", "array", "message"), [
    ("x", None, "has no array 'x': remove it, and it is prepared again"),
    ("x", np.ones((4, 2)), "has the type float64, not float32"),
    ("x", np.ones((4, 3), np.float32), "has the shape (4, 3), not (4, 2)"),
    ("x", np.ones(4, np.float32), "has the shape (4,), not (4, 2)"),
    ("y", np.arange(5) % 3, "has the shape (5,), not (4,)"),
    ("y", np.array([0, 1, 3, 0]), "holds 3 in row 2, outside the range 0..2"),
    ("y", np.array([0, -1, 1, 0]), "holds -1 in row 1, outside the range 0..2"),
    ("client", np.array([0, 1, 2, 0]), "holds 2 in row 2, outside the range 0..1"),
    ("names", np.array([1, 2]), "has the type int64, not str"),
    ("y", np.array([0, 1, 2, "x"], object), "cannot be read (array 'y'"),
])
def test_a_prepared_file_is_checked(home: Path, name: str, array: Any, message: str) -> None:
    arrays = GOOD | {name: array}
    np.savez(home / "toy.npz", **{name: a for name, a in arrays.items() if a is not None})
    with pytest.raises(DescantError) as error:
        read_toy(home)
    assert message in str(error.value)
    assert str(home / "toy.npz") in str(error.value)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize("damage", [lambda data: b"not a zip", lambda data: data[: len(data) // 2],
                                    lambda data: data.replace(np.ones(2, np.float32).tobytes(), b"12345678")])
def test_a_damaged_prepared_file(home: Path, damage: Any) -> None:
    np.savez(home / "toy.npz", **GOOD)
    (home / "toy.npz").write_bytes(damage((home / "toy.npz").read_bytes()))
    with pytest.raises(DescantError, match=r"toy\.npz cannot be read \(array 'x': .*remove it"):
        read_toy(home)


@pytest.mark.parametrize("step", ["savez", "replace"])
def test_conversion_is_atomic(home: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    with monkeypatch.context() as patch:
        def full(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        if step == "savez":
            def savez(file: Any, **arrays: Any) -> None:
                file.write(b"half of it")
                full()

            patch.setattr(cache.np, "savez", savez)
        else:
            patch.setattr(Path, "replace", full)
        with pytest.raises(DescantError, match=r"cannot prepare .*toy\.npz: .*No space left"):
            prepared(TOY)
    assert list(home.iterdir()) == []
    assert read_toy(home).keys() == LAYOUT.keys()


def test_two_who_want_the_same_prepare_it_once(home: Path) -> None:
    calls = []

    def parse(folder: Path) -> dict[str, Any]:
        calls.append(folder)
        return GOOD

    source = dataclasses.replace(TOY, parse=parse)
    threads = [threading.Thread(target=prepared, args=(source,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [home / "toy"]


# --- IDX ---


def write_mnist(folder: Path, packed: bool, **changed: bytes) -> tuple[np.ndarray, np.ndarray]:
    folder.mkdir(exist_ok=True)
    x, y = images(10, 28, 28), np.arange(10, dtype=np.uint8)
    parts = {"train-images-idx3": x[:6], "train-labels-idx1": y[:6], "t10k-images-idx3": x[6:],
             "t10k-labels-idx1": y[6:]}
    for name, array in parts.items():
        data = changed.get(name.replace("-", "_"), idx(array))
        path = folder / f"{name}-ubyte"
        if packed:
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(data))
        else:
            path.write_bytes(data)
    return x, y


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize("packed", [True, False])
def test_mnist(home: Path, monkeypatch: pytest.MonkeyPatch, name: str, packed: bool) -> None:
    unchecked(monkeypatch, name)
    x, y = write_mnist(home / name, packed)
    samples = load(name)
    assert samples.x.dtype == torch.uint8
    assert (samples.x.numpy() == x[:, None]).all()
    assert (samples.y.numpy() == y).all()
    assert samples.y.dtype == torch.int64
    assert samples.classes == 10
    for path in (home / name).iterdir():
        path.unlink()
    assert torch.equal(load(name).x, samples.x)  # from now on, of the prepared file
    assert set(np.load(home / f"{name}.npz").files) == {"x_train", "y_train", "x_test", "y_test"}


@pytest.mark.parametrize(("how", "over"), [("pixel", 0), ("all", None)])
def test_standardised_images(home: Path, monkeypatch: pytest.MonkeyPatch, how: Any, over: Any) -> None:
    """As the authors of pFedMe (pixel, MNIST) and pFedBreD (all, Fashion-MNIST) do it, with numpy."""
    unchecked(monkeypatch, "mnist")
    x, _ = write_mnist(home / "mnist", packed=True)
    samples = Mnist(standardise=how).load(2, 0)
    expected = (x - x.mean(over)) / (x.std(over) + 0.001)
    assert samples.x.dtype == torch.float32
    np.testing.assert_allclose(samples.x.numpy(), expected[:, None], rtol=1e-5, atol=1e-4)
    assert samples.notes == ("images are standardised by statistics of all rows, those of other clients and "
                             "of tests among them",)
    assert load("mnist").notes == ()


def test_what_debian_installed(home: Path, tmp_path_factory: pytest.TempPathFactory,
                               monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path_factory.mktemp("usr") / "fashion-mnist"
    monkeypatch.setattr(FashionMnist, "source", dataclasses.replace(FashionMnist.source, installed=installed))
    x, _ = write_mnist(installed, packed=True)
    assert (load("fashion_mnist").x.numpy() == x[:, None]).all()


def test_the_place_of_debians_package() -> None:
    assert FashionMnist.source.installed == Path("/usr/share/datasets/fashion-mnist")


@pytest.mark.parametrize(("changed", "message"), [
    ({"train_images_idx3": idx(np.zeros(6, np.uint8))},
     "train-images-idx3-ubyte is not an IDX file of images: it begins with 0x00000801, not 0x00000803"),
    ({"t10k_labels_idx1": b""}, "t10k-labels-idx1-ubyte is not an IDX file of labels"),
    ({"train_images_idx3": idx(np.zeros((6, 28, 28), np.uint8))[:-1]},
     "train-images-idx3-ubyte holds 4703 bytes of images, but its header promises 4704"),
    ({"train_images_idx3": idx(np.zeros((6, 32, 32), np.uint8))},
     "array 'x_train' made from the official files in"),
    ({"train_labels_idx1": idx(np.zeros(5, np.uint8))}, "has the shape (5,), not (6,)"),
    ({"t10k_labels_idx1": idx(np.array([1, 2, 10, 3], np.uint8))},
     "holds 10 in row 2, outside the range 0..9"),
])
def test_bad_idx_files(home: Path, changed: dict[str, bytes], message: str) -> None:
    write_mnist(home / "mnist", packed=False, **changed)
    fails("mnist", message)


def test_a_cut_off_gz(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch, "mnist")
    write_mnist(home / "mnist", packed=True)
    path = home / "mnist" / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-100])
    fails("mnist", f"{path} cannot be unpacked")


def test_a_compressed_file_that_is_not_the_official_one(home: Path) -> None:
    write_mnist(home / "mnist", packed=True)
    fails("mnist", "train-images-idx3-ubyte.gz is not the official file: it has")


def test_emnist(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch, "emnist")
    upright, y = images(6, 28, 28), np.arange(41, 47, dtype=np.uint8)
    files = {}
    for part, rows in (("train", slice(0, 4)), ("test", slice(4, 6))):
        on_their_side = np.ascontiguousarray(upright[rows].transpose(0, 2, 1))
        files[f"emnist-balanced-{part}-images-idx3-ubyte.gz"] = gzip.compress(idx(on_their_side))
        files[f"emnist-balanced-{part}-labels-idx1-ubyte.gz"] = gzip.compress(idx(y[rows]))
    folder = home / "emnist"
    folder.mkdir()
    with zipfile.ZipFile(folder / "gzip.zip", "w") as archive:
        for name, data in files.items():
            archive.writestr(f"gzip/{name}", data)

    samples = load("emnist")
    assert (samples.x.numpy() == upright[:, None]).all()
    assert (samples.y.numpy() == y).all()
    assert samples.classes == 47

    (home / "emnist.npz").unlink()
    whole = (folder / "gzip.zip").read_bytes()
    (folder / "gzip.zip").write_bytes(whole[:1000])
    fails("emnist", f"{folder / 'gzip.zip'} cannot be unpacked")
    with zipfile.ZipFile(folder / "gzip.zip", "w") as archive:
        archive.writestr("gzip/readme", "")
    fails("emnist", f"there is no gzip/emnist-balanced-train-images-idx3-ubyte.gz in {folder / 'gzip.zip'}")
    for name, data in files.items():
        (folder / name).write_bytes(data)
    assert torch.equal(load("emnist").x, samples.x)


# --- CIFAR ---


def write_cifar(folder: Path, name: str, cut: int = 0, without: str = "") -> tuple[np.ndarray, list[int]]:
    folder.mkdir(exist_ok=True)
    if name == "cifar10":
        inner, archive = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
        files = [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]
    else:
        inner, archive, files = "cifar-100-binary", "cifar-100-binary.tar.gz", ["train.bin", "test.bin"]
    pixels, y = images(2 * len(files), 3, 32, 32), list(range(2 * len(files)))
    with tarfile.open(folder / archive, "w:gz") as packed:
        for k, file in reversed(list(enumerate(files))):  # the order in the archive is not to matter
            coarse = b"\x07" if name == "cifar100" else b""
            rows = b"".join(coarse + bytes([y[r] % 10]) + pixels[r].tobytes() for r in (2 * k, 2 * k + 1))
            data = rows[: len(rows) - cut]
            info = tarfile.TarInfo(f"{inner}/{file}")
            info.size = len(data)
            if file != without:
                packed.addfile(info, io.BytesIO(data))
    return pixels, [label % 10 for label in y]


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("packed", [True, False])
def test_cifar(home: Path, monkeypatch: pytest.MonkeyPatch, name: str, packed: bool) -> None:
    unchecked(monkeypatch, name)
    pixels, y = write_cifar(home / name, name)
    if not packed:
        [archive] = (home / name).iterdir()
        with tarfile.open(archive) as content:
            content.extractall(home / name, filter="data")
        archive.unlink()
    samples = load(name)
    assert (samples.x.numpy() == pixels).all()
    assert samples.y.tolist() == y
    assert samples.classes == int(name.removeprefix("cifar"))
    assert np.load(home / f"{name}.npz")["x_train"].shape[1:] == (32, 32, 3)


def test_bad_cifar_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch, "cifar10")
    folder = home / "cifar10"
    write_cifar(folder, "cifar10", cut=1)
    fails("cifar10", "cifar-10-batches-bin/data_batch_1.bin in")
    fails("cifar10", "has 6145 bytes, which is not a number of records of 3073")
    write_cifar(folder, "cifar10", without="data_batch_4.bin")
    fails("cifar10", "there is no cifar-10-batches-bin/data_batch_4.bin in")
    write_cifar(folder, "cifar10")
    path = folder / "cifar-10-binary.tar.gz"
    path.write_bytes(path.read_bytes()[:5000])
    fails("cifar10", f"{path} cannot be unpacked")
    path.write_bytes(b"<html></html>")
    fails("cifar10", f"{path} cannot be unpacked")


def test_a_folder_of_cifar_that_lacks_a_file(home: Path) -> None:
    (home / "cifar10" / "cifar-10-batches-bin").mkdir(parents=True)
    fails("cifar10", "data_batch_1.bin is not in")


# --- downloaded when it is nowhere else ---


@pytest.fixture
def mirror(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, str]]:
    """A folder, and the address at which a server on this machine shows it."""
    folder = tmp_path_factory.mktemp("mirror")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_downloaded_checked_and_converted(mirror: tuple[Path, str], tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    folder, address = mirror
    monkeypatch.setenv("DESCANT_DATA", str(tmp_path))
    x, _ = write_mnist(folder, packed=True)
    remotes = tuple(Remote(path.name, (address + path.name,), path.stat().st_size,
                           hashlib.sha256(path.read_bytes()).hexdigest()) for path in folder.iterdir())
    kind: Any = DATASETS["mnist"]
    monkeypatch.setattr(kind, "source", dataclasses.replace(kind.source, remotes=remotes))

    path = folder / "t10k-labels-idx1-ubyte.gz"
    good = path.read_bytes()
    path.write_bytes(bytes([*good[:-1], good[-1] ^ 1]))
    fails("mnist", "its SHA-256 is")
    assert not list((tmp_path / "mnist").glob("t10k-labels*"))
    path.write_bytes(good)
    assert (load("mnist").x.numpy() == x[:, None]).all()


# --- UCI HAR ---


def write_har(folder: Path, recordings: list[tuple[str, int, int, int]]) -> np.ndarray:
    """Recordings (part, person, activity, windows) as the official folder; the windows of all."""
    rows: dict[str, list[tuple[int, int, np.ndarray]]] = {"train": [], "test": []}
    for part, person, activity, windows in recordings:
        signal = RNG.standard_normal((9, 64 * (windows + 1))).astype(np.float32)
        rows[part] += [(person, activity, signal[:, 64 * k : 64 * k + 128]) for k in range(windows)]
    for part, content in rows.items():
        inertial = folder / part / "Inertial Signals"
        inertial.mkdir(parents=True, exist_ok=True)
        (folder / part / f"subject_{part}.txt").write_text("".join(f"{person}\n" for person, _, _ in content))
        (folder / part / f"y_{part}.txt").write_text("".join(f"{activity}\n" for _, activity, _ in content))
        for k, channel in enumerate(har.CHANNELS):
            # 1.8085150e-004: the exponent has three digits in the official files
            lines = [" ".join(f" {v:.9e}".replace("e-0", "e-00").replace("e+0", "e+00") for v in x[k])
                     for _, _, x in content]
            (inertial / f"{channel}_{part}.txt").write_text("".join(f" {line}\n" for line in lines))
    return np.stack([x for part in rows.values() for _, _, x in part])


RECORDINGS = [("train", 3, 5, 3), ("train", 3, 5, 2), ("train", 3, 1, 2), ("train", 1, 5, 2),
              ("test", 2, 6, 2)]


def pack_har(root: Path, folder: Path) -> bytes:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        for path in sorted(folder.rglob("*.txt")):
            archive.write(path, path.relative_to(root))
    return inner.getvalue()


@pytest.mark.parametrize("form", ["folder", "inner", "outer"])
def test_har(home: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    unchecked(monkeypatch, "har")
    root = home / "har" if form == "folder" else home / "elsewhere"
    windows = write_har(root / har.FOLDER, RECORDINGS)
    (home / "har").mkdir(exist_ok=True)
    if form == "inner":
        (home / "har" / f"{har.FOLDER}.zip").write_bytes(pack_har(root, root / har.FOLDER))
    if form == "outer":
        with zipfile.ZipFile(home / "har" / har.OUTER, "w") as archive:
            archive.writestr(f"{har.FOLDER}.zip", pack_har(root, root / har.FOLDER))

    samples = load("har")
    assert samples.x.dtype == torch.float32
    order = [7, 8, 9, 10, 5, 6, 0, 1, 2, 3, 4]  # by person, activity, time
    assert (samples.x.numpy() == windows[order]).all()
    assert samples.y.tolist() == [4, 4, 5, 5, 0, 0, 4, 4, 4, 4, 4]
    assert samples.owner is not None
    assert samples.owner.tolist() == ["subject 01"] * 2 + ["subject 02"] * 2 + ["subject 03"] * 7
    assert samples.group is not None
    assert samples.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3, 4, 4]  # two recordings of one activity


def test_windows_that_overlap_are_one_group_in_any_order() -> None:
    signal = RNG.standard_normal((9, 64 * 40)).astype(np.float32)
    x = np.stack([signal[:, 64 * k : 64 * k + 128] for k in range(39)])
    same = np.zeros(39, int)
    order = RNG.permutation(39)
    assert set(har.overlapping(x[order], same, same)) == {0}
    other = (np.arange(39) >= 20).astype(int)  # another activity, or person
    assert har.overlapping(x, other, same).tolist() == other.tolist()
    assert har.overlapping(x, same, other).tolist() == other.tolist()
    assert har.overlapping(x[::2], same[::2], same[::2]).tolist() == list(range(20))  # nothing shared


@pytest.mark.parametrize(("file", "change", "message"), [
    ("train/y_train.txt", lambda text: text.replace("1", "7", 1),
     "y_train.txt, row 6: 7 is outside the range 1..6"),
    ("test/subject_test.txt", lambda text: "31\n2\n",
     "subject_test.txt, row 1: 31 is outside the range 1..30"),
    ("train/Inertial Signals/body_acc_y_train.txt", lambda text: text[: text.rindex("\n", 0, -1) + 1],
     "body_acc_y_train.txt has 8 rows, but there are 9 activities and 9 persons"),
    ("train/Inertial Signals/body_acc_y_train.txt", lambda text: text[:-40], "body_acc_y_train.txt: "),
    ("test/Inertial Signals/total_acc_z_test.txt", lambda text: text.replace("e", "x", 1),
     "total_acc_z_test.txt: could not convert string"),
    ("test/Inertial Signals/total_acc_z_test.txt", lambda text: "1 2\n3 4\n",
     "total_acc_z_test.txt has 2 columns, not 128"),
    ("test/Inertial Signals/total_acc_z_test.txt", None, "total_acc_z_test.txt is missing"),
])
def test_bad_har_files(home: Path, file: str, change: Any, message: str) -> None:
    write_har(home / "har" / har.FOLDER, RECORDINGS)
    path = home / "har" / har.FOLDER / file
    if change is None:
        path.unlink()
    else:
        path.write_text(change(path.read_text()))
    fails("har", message)


def test_a_cut_off_archive_of_har(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unchecked(monkeypatch, "har")
    (home / "har").mkdir()
    (home / "har" / har.OUTER).write_bytes(b"PK\x03\x04 and no more")
    fails("har", f"{har.OUTER} cannot be unpacked")
    with zipfile.ZipFile(home / "har" / har.OUTER, "w") as archive:
        archive.writestr("readme", "")
    fails("har", f"there is no 'UCI HAR Dataset.zip' in {home / 'har' / har.OUTER}")
    write_har(home / "elsewhere" / har.FOLDER, RECORDINGS)
    (home / "elsewhere" / har.FOLDER / "train" / "y_train.txt").write_text("walking\n")
    packed = home / "har" / f"{har.FOLDER}.zip"
    packed.write_bytes(pack_har(home / "elsewhere", home / "elsewhere" / har.FOLDER))
    fails("har", f"{packed}/{har.FOLDER}/train/y_train.txt: could not convert string 'walking'")


# --- heart disease ---

PATIENT = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0"
SICK = "32,1,1,95,0,?,0,127,0,.7,1,?,?,3"


def write_heart(folder: Path, **changed: str) -> None:
    folder.mkdir()
    for hospital in ("cleveland", "hungarian", "switzerland", "va"):
        text = changed.get(hospital, f"{PATIENT}\n{SICK}\n")
        (folder / f"processed.{hospital}.data").write_text(text)


def test_heart_disease(home: Path) -> None:
    write_heart(home / "heart_disease", va=f"{PATIENT}\r\n\r\n{SICK}\r\n{SICK}\r\n")
    samples = load("heart_disease")
    assert samples.x.dtype == torch.float32
    assert samples.x.shape == (9, 13)
    assert samples.x[0].tolist() == pytest.approx([63, 1, 1, 145, 233, 1, 2, 150, 0, 2.3, 3, 0, 6])
    assert samples.x[1].isnan().tolist() == [k in (4, 5, 11, 12) for k in range(13)]  # a chol of 0 is none
    assert samples.y.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 1]
    assert samples.owner is not None
    assert samples.owner.tolist() == ["cleveland"] * 2 + ["hungarian"] * 2 + ["switzerland"] * 2 + ["va"] * 3
    assert samples.classes == 2


@pytest.mark.parametrize(("text", "message"), [
    (f"{PATIENT}\n{PATIENT[:-9]}\n", "processed.hungarian.data, row 2 has 12 columns, not 14"),
    (f"{PATIENT},1\n", "processed.hungarian.data, row 1 has 15 columns, not 14"),
    (f"{PATIENT}\n{PATIENT.replace('145.0', 'high')}\n",
     "processed.hungarian.data, row 2, column 'trestbps': 'high' is neither a number nor '?'"),
    (PATIENT[:-1] + "?", "processed.hungarian.data, row 1 has no diagnosis (column 'num')"),
    ("", "processed.hungarian.data is empty"),
])
def test_bad_heart_files(home: Path, text: str, message: str) -> None:
    write_heart(home / "heart_disease", hungarian=text)
    fails("heart_disease", message)


def test_a_missing_hospital(home: Path) -> None:
    write_heart(home / "heart_disease")
    (home / "heart_disease" / "processed.va.data").unlink()
    fails("heart_disease", "processed.va.data is not in")


# --- LEAF ---


def write_leaf(path: Path, data: dict[str, tuple[list[Any], list[Any]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
        "users": list(data), "num_samples": [len(y) for _, y in data.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in data.items()},
    }))


def test_femnist(home: Path) -> None:
    pixels = images(5, 784)
    x = (pixels / 255).tolist()
    folder = home / "femnist"
    write_leaf(folder / "train" / "all_data_0.json", {"f0_2": (x[:2], [61, 0]), "f0_1": (x[2:3], [1])})
    write_leaf(folder / "test" / "all_data_0.json", {"f0_1": (x[3:], [2, 3]), "f0_3": ([], [])})
    samples = load("femnist")
    assert (samples.x.numpy() == pixels.reshape(5, 1, 28, 28)).all()
    assert samples.x.dtype == torch.uint8
    assert samples.y.tolist() == [61, 0, 1, 2, 3]
    assert samples.owner is not None
    assert samples.owner.tolist() == ["f0_2", "f0_2", "f0_1", "f0_1", "f0_1"]
    assert samples.classes == 62


@pytest.mark.parametrize(("x", "y", "message"), [
    ([[0.5] * 784], [62], "user 'f1': y[0] is 62, not a number in 0..61"),
    ([[0.5] * 784], ["a"], "user 'f1': y[0] is 'a', not a number in 0..61"),
    ([[0.5] * 783], [1], "user 'f1': x[0] has 783 pixels, not 784"),
    ([[0.5] * 783 + [1.5]], [1], "user 'f1': x has pixels outside the range 0..1"),
    ([[0.5] * 783 + ["a"]], [1], "user 'f1': x must hold numbers"),
    ([[0.5] * 784, [0.5] * 784], [1], "x and y do not hold the 1 samples that num_samples promises"),
])
def test_bad_femnist_files(home: Path, x: list[Any], y: list[Any], message: str) -> None:
    write_leaf(home / "femnist" / "all_data" / "all_data_0.json", {"f1": (x, y)})
    fails("femnist", message)


def test_what_is_not_a_file_of_leaf(home: Path) -> None:
    path = home / "femnist" / "all_data" / "all_data_0.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"users": ["f1"')
    fails("femnist", f"{path} is not JSON")
    path.write_text('{"users": ["f1"], "user_data": {}}')
    fails("femnist", f"{path} is not a file of LEAF: it lacks 'f1'")


def tweet(text: str) -> list[str]:
    return ["2087", "Sat May 16 23:58:44 UTC 2009", "NO_QUERY", "someone", text]


def test_sent140(home: Path) -> None:
    write_leaf(home / "sent140" / "all_data" / "all_data.json", {
        "zoe": ([tweet("Lyx is COOL :)"), tweet("")], [1, 0]), "abe": ([tweet("is it cool, lyx?")], [1]),
    })
    samples = load("sent140", length=4)
    assert samples.x.dtype == torch.int64
    assert samples.x.shape == (3, 4)
    lyx, is_, cool, colon = samples.x[0].tolist()
    assert len({lyx, is_, cool, colon, 0}) == 5
    assert samples.x[1].tolist() == [0, 0, 0, 0]
    assert samples.x[2, [0, 2]].tolist() == [is_, cool]
    assert samples.y.tolist() == [1, 0, 1]
    assert samples.owner is not None
    assert samples.owner.tolist() == ["zoe", "zoe", "abe"]
    assert samples.classes == 2
    longer = load("sent140", length=6, vocabulary=50)  # of the same prepared file
    assert longer.x[2].gt(0).all()
    assert longer.x.max() < 50
    # numbers do not depend on the machine or on the data
    assert lyx == leaf.tokens("lyx")[0] % 9999 + 1 == 249

    np.savez(home / "sent140.npz", **dict(np.load(home / "sent140.npz")) | {"length": np.array([1, 1, 1])})
    with pytest.raises(DescantError, match=r"sent140\.npz: 'length' and 'token' do not match"):
        load("sent140")


def test_the_tokens_of_a_tweet() -> None:
    text = "@Bob's can't #Stop!! café 2nd"
    assert leaf.TOKEN.findall(text.lower()) == ["@bob's", "can't", "#stop", "!", "!", "café", "2nd"]


def test_bad_tweets(home: Path) -> None:
    write_leaf(home / "sent140" / "all_data" / "all_data.json", {"zoe": ([tweet("a"), ["a"]], [1, 0])})
    fails("sent140", "user 'zoe': x[1] is not [id, date, query, user, text]")


# --- Shakespeare ---


def decode(numbers: torch.Tensor) -> str:
    return "".join(shakespeare.VOCABULARY[k] for k in numbers)


def write_shakespeare(home: Path, texts: dict[tuple[str, str], str], **changed: Any) -> None:
    plays = sorted({play for play, _ in texts})
    arrays = {
        "text": np.frombuffer("".join(texts.values()).encode(), np.uint8),
        "offset": np.cumsum([0, *(len(text) for text in texts.values())]),
        "play": np.array([plays.index(play) for play, _ in texts], np.uint8),
        "role": np.array([role for _, role in texts]), "play_names": np.array(plays),
    }
    np.savez(home / "shakespeare.npz", **arrays | changed)


def test_shakespeare(home: Path) -> None:
    write_shakespeare(home, {("Hamlet", "GHOST"): "Mark me.\nAdieu!", ("Lear", "FOOL"): "Nun~",
                             ("Lear", "GHOST"): "Boo"})
    samples = load("shakespeare", length=5)
    assert [decode(row) for row in samples.x] == ["Mark ", "e.\nAd", "\0\0Nun", "\0\0\0Bo"]
    assert decode(samples.y) == "mi~o"
    assert samples.classes == len(shakespeare.VOCABULARY) == 97
    assert samples.owner is not None
    assert samples.owner.tolist() == ["GHOST (Hamlet)", "GHOST (Hamlet)", "FOOL (Lear)", "GHOST (Lear)"]
    with pytest.raises(UsageError, match=r"shakespeare\.length must be at least 1"):
        load("shakespeare", length=0)


def test_shakespeare_of_leaf(home: Path) -> None:
    def windows(text: str) -> tuple[list[str], list[str]]:
        return [text[k : k + 4] for k in range(len(text) - 4)], list(text[4:])

    write_leaf(home / "shakespeare" / "train" / "a.json", {"LEAR_KING": windows("Blow, winds"),
                                                           "LEAR_FOOL": windows("Nuncle\xe9")})
    write_leaf(home / "shakespeare" / "test" / "a.json", {"LEAR_KING": windows("Howl, howl")})
    arrays = prepared(DATASETS["shakespeare"].source)  # type: ignore[attr-defined]
    assert arrays["text"].tobytes() == b"Blow, windsNuncle?Howl, howl"
    assert arrays["role"].tolist() == ["LEAR_KING", "LEAR_FOOL", "LEAR_KING"]
    samples = load("shakespeare", length=4)
    assert samples.owner is not None
    assert samples.owner.tolist() == ["LEAR_KING"] * 2 + ["LEAR_FOOL"] + ["LEAR_KING"] * 2
    assert decode(samples.y) == ",dl,l"


def test_a_gap_in_the_windows_of_leaf_is_a_gap_in_the_text() -> None:
    user = leaf.User("KING", ["abcd", "bcde", "mnop"], ["e", "f", "q"], "here")
    assert shakespeare._texts(user) == ["abcdef", "mnopq"]


def test_bad_shakespeare_files(home: Path) -> None:
    write_leaf(home / "shakespeare" / "all_data" / "a.json", {"KING": (["abcd"], ["ef"])})
    fails("shakespeare", "user 'KING': sample 0 is not a text and the character after it")
    for offset in ([0, 3], [0, 9, 4], [1, 2, 5], [0, 2, 6]):
        write_shakespeare(home, {("", "A"): "abc", ("", "B"): "de"}, offset=np.array(offset))
        with pytest.raises(DescantError, match=r"shakespeare\.npz: 'offset' does not divide 'text'"):
            load("shakespeare")


# --- Office ---


def write_office(folder: Path) -> None:
    for domain in ("amazon", "dslr", "webcam"):
        for kind, colour in (("mug", (200, 0, 0)), ("bike", (0, 100, 250))):
            path = folder / domain / "images" / kind
            path.mkdir(parents=True)
            Image.new("RGB", (40, 20), colour).save(path / "frame_0001.jpg", quality=95)


def test_office31(home: Path) -> None:
    write_office(home / "office31")
    samples = load("office31", pixels=16)
    assert samples.x.shape == (6, 3, 16, 16)
    assert samples.x.dtype == torch.uint8
    assert samples.y.tolist() == [0, 1] * 3  # classes in alphabetical order: bike, mug
    assert samples.owner is not None
    assert samples.owner.tolist() == ["amazon"] * 2 + ["dslr"] * 2 + ["webcam"] * 2
    assert (samples.x[0].float().mean((1, 2)) - torch.tensor([0.0, 100, 250])).abs().max() < 5
    assert load("office31", pixels=8).x.shape == (6, 3, 8, 8)
    assert sorted(path.name for path in home.glob("*.npz")) == ["office31_16.npz", "office31_8.npz"]


def test_bad_office31_files(home: Path) -> None:
    folder = home / "office31"
    fails("office31", "amazon/images is not in")
    write_office(folder)
    path = folder / "dslr" / "images" / "mug" / "frame_0001.jpg"
    whole = path.read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2]):
        path.write_bytes(content)
        fails("office31", f"{path} is not a readable image")
    path.unlink()
    (folder / "dslr" / "images" / "bike" / "frame_0001.jpg").unlink()
    fails("office31", f"{folder / 'dslr' / 'images'} has no folders of .jpg files")


FEATURES = {
    "office10_surf": (["amazon_SURF_L10", "Caltech10_SURF_L10", "dslr_SURF_L10", "webcam_SURF_L10"], 800),
    "office10_googlenet": (["amazon", "dslr", "webcam"], 1024),
}


@pytest.mark.parametrize("name", FEATURES)
def test_office10(home: Path, name: str) -> None:
    files, width = FEATURES[name]
    (home / name).mkdir()
    fts = RNG.integers(0, 9, (len(files), 3, width)).astype(np.uint8)
    for k, file in enumerate(files):
        content = {"fts": fts[k], "labels": np.array([[1], [10], [k + 1]])}
        scipy.io.savemat(home / name / f"{file}.mat", content)
    samples = load(name)
    assert samples.x.dtype == torch.float32
    assert (samples.x.numpy() == fts.reshape(-1, width)).all()
    assert samples.y.tolist() == [label for k in range(len(files)) for label in (0, 9, k)]
    assert samples.owner is not None
    assert np.unique(samples.owner).tolist() == sorted(file.split("_")[0].lower() for file in files)


@pytest.mark.parametrize(("content", "message"), [
    ({"fts": np.ones((2, 1024)), "labels": np.array([1, 11])},
     "dslr.mat: label 11 in row 2 is outside the range 1..10"),
    ({"fts": np.ones((3, 1024)), "labels": np.array([1, 2])},
     "dslr.mat: 'fts' has the shape (3, 1024), not (2, 1024)"),
    ({"fts": np.ones((2, 800)), "labels": np.array([1, 2])},
     "dslr.mat: 'fts' has the shape (2, 800), not (2, 1024)"),
    ({"fts": np.ones((2, 1024))}, "dslr.mat has no variable 'labels'"),
    (b"text", "dslr.mat is not a readable MATLAB file"),
    (b"", "dslr.mat is not a readable MATLAB file"),
    (None, "dslr.mat is not in"),
])
def test_bad_office10_files(home: Path, content: Any, message: str) -> None:
    folder = home / "office10_googlenet"
    folder.mkdir()
    for domain in ("amazon", "dslr", "webcam"):
        path = folder / f"{domain}.mat"
        if domain == "dslr" and isinstance(content, bytes):
            path.write_bytes(content)
        elif domain != "dslr" or content is not None:
            good = {"fts": np.ones((2, 1024)), "labels": np.array([1, 2])}
            scipy.io.savemat(path, content if domain == "dslr" else good)
    fails("office10_googlenet", message)


def test_a_file_that_may_not_be_read(home: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("everything may be read by root")
    np.savez(home / "toy.npz", **GOOD)
    (home / "toy.npz").chmod(0)
    with pytest.raises(DescantError, match=r"toy\.npz cannot be read .*Permission denied"):
        prepared(TOY)
