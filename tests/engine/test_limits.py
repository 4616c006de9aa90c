"""Machines with less than was asked for: of cores, memory, processes. The run goes on, and says how."""

from __future__ import annotations

import errno
import multiprocessing
import multiprocessing.process
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import descant
from descant.algorithms import Ditto, FedAvg
from descant.engine.backends import choose, processes
from descant.engine.backends.footprint import VECTORS, bytes_per_client
from descant.engine.backends.memory import free_memory
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.experiment import directory as layout
from descant.experiment.run import Run
from descant.priors.solve import SGD
from helpers import MODELS, assert_same, engine, make_work, ragged

pytestmark = pytest.mark.thorough

FEDERATION = ragged()
LIMITED = "there can be no worker processes"
TWO_WORKERS: dict[str, Any] = {"backend": "processes", "chunk": 2, "workers": 2}


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every machine."""
    monkeypatch.setattr(choose, "cores", lambda: 2)


def run(**settings: Any) -> Run:
    usual: dict[str, Any] = {"rounds": 2, "batch": 4, "local": {"steps": 1}, "dtype": "float64"}
    return descant.run(Ditto(), federation=FEDERATION, **usual | settings)


# -- cores ------------------------------------------------------------------------------------------------


def test_more_workers_than_cores_are_allowed_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "cores", lambda: 1)
    with pytest.warns(UserWarning, match="2 workers share 1 core: expect no speed-up"):
        found = run(**TWO_WORKERS)
    assert (found.setup.train.backend, found.setup.train.workers) == ("processes", 2)
    assert len(found.notes) == 1


def test_as_many_workers_as_cores_are_nothing_to_tell() -> None:
    assert run(**TWO_WORKERS).notes == []
    assert run(backend="processes").setup.train.workers == 2


# -- memory -----------------------------------------------------------------------------------------------


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:   5000 kB\nHugePages_Total: 0\n"}
NEW = "sys/fs/cgroup/"
OLD = "sys/fs/cgroup/memory/"


@pytest.mark.parametrize(("files", "expected"), [
    ({}, None),
    (MACHINE, 5000 * 1024),
    # a limit of the group, and what of its use are files that could be dropped
    (MACHINE | {"proc/self/cgroup": "0::/job/step\n", NEW + "job/step/memory.max": "1000000\n",
                NEW + "job/step/memory.current": "700000\n",
                NEW + "job/step/memory.stat": "anon 600000\ninactive_file 50000\n"}, 350_000),
    # the group has no limit, but the one around it does
    (MACHINE | {"proc/self/cgroup": "0::/job/step\n", NEW + "job/step/memory.max": "max\n",
                NEW + "job/step/memory.current": "700000\n", NEW + "job/memory.max": "900000",
                NEW + "job/memory.current": "700000", NEW + "job/memory.stat": "inactive_file 0"}, 200_000),
    # the first generation; in a container its path is that of the host, and the root is the own group
    (MACHINE | {"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n",
                OLD + "memory.limit_in_bytes": "800000", OLD + "memory.usage_in_bytes": "900000",
                OLD + "memory.stat": "inactive_file 1\ntotal_inactive_file 150000"}, 50_000),
    (MACHINE | {"proc/self/cgroup": "4:memory:/\n", OLD + "memory.limit_in_bytes": "9223372036854771712",
                OLD + "memory.usage_in_bytes": "900000", OLD + "memory.stat": "total_inactive_file 1"},
     5000 * 1024),
])
def test_free_memory_is_that_of_the_machine_or_of_the_group(files: dict[str, str], expected: int | None,
                                                            tmp_path: Path) -> None:
    assert free_memory(write(tmp_path, files)) == expected


def test_what_a_client_takes_is_estimated_from_model_and_batch() -> None:
    """A linear model keeps of a row only its 16 numbers (and 3 log-probabilities); so far as rows count,
    twice the batch is twice the memory, and a model with wide layers keeps more of each."""
    rows = {batch: bytes_per_client(make_work(FedAvg(), FEDERATION, "mclr", batch=batch)) for batch in (4, 8)}
    of_model = VECTORS * 51 * 8
    assert rows[8] - of_model == 2 * (rows[4] - of_model)
    assert 3 * 4 * 16 * 8 < rows[4] - of_model < 3 * 4 * 24 * 8
    wide = nn.Sequential(nn.Flatten(), nn.Linear(16, 200), nn.Tanh(), nn.Linear(200, 3))
    assert bytes_per_client(make_work(FedAvg(), FEDERATION, wide, batch=4)) > 3 * 4 * 200 * 8
    for model in MODELS.values():
        assert bytes_per_client(make_work(FedAvg(), FEDERATION, model(), batch=4)) > 0


@pytest.mark.parametrize(("settings", "clients", "chunk"), [
    ({"backend": "vectorised", "chunk": 5}, 2, 2),
    ({"backend": "vectorised"}, 4, 4),
    ({"backend": "vectorised", "chunk": 5}, 0, 1),
    ({"backend": "processes", "chunk": 3, "workers": 2}, 4, 2),
    ({"backend": "processes", "chunk": 3, "workers": 2}, 5, 3),  # there are no more than 5 at once
    ({"backend": "vectorised", "chunk": 2}, 3, 2),
])
def test_a_chunk_that_memory_does_not_hold_is_made_smaller(
        settings: dict[str, Any], clients: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    each = bytes_per_client(make_work(Ditto(), FEDERATION, "mclr", batch=4))
    whole = run(**settings)
    monkeypatch.setattr(choose, "free_memory", lambda: 2 * clients * each)  # of which half is used
    if chunk == whole.setup.train.chunk:
        found = run(**settings)
    else:
        with pytest.warns(UserWarning, match=f"of memory, and .* are free: the chunk is {chunk}"):
            found = run(**settings)
    assert found.setup.train.chunk == chunk
    assert_same(found.snapshot("last").server, whole.snapshot("last").server, 1e-10)


def test_where_free_memory_is_not_known_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (choose, processes):
        monkeypatch.setattr(module, "free_memory", lambda: None)
    assert run(backend="vectorised", chunk=5).setup.train.chunk == 5
    assert run(**TWO_WORKERS).setup.train.backend == "processes"


# -- workers ----------------------------------------------------------------------------------------------


def full(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def hamper(what: str, patch: pytest.MonkeyPatch) -> None:
    """Let there be no workers."""
    if what == "mmap":
        patch.setattr(processes, "mmap", SimpleNamespace(mmap=full))  # the store's maps are its own affair
    elif what == "memory":
        patch.setattr(processes, "free_memory", lambda: 100)
    else:
        start, started = multiprocessing.process.BaseProcess.start, []

        def second_fails(process: Any) -> None:
            if started:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            started.append(process)
            start(process)

        patch.setattr(multiprocessing.process.BaseProcess, "start", second_fails)


HAMPERED = pytest.mark.parametrize(("what", "why"), [
    ("mmap", "Cannot allocate memory"), ("memory", "their buffers would take .* 100 B of memory are free"),
    ("fork", "Resource temporarily unavailable")])


@HAMPERED
def test_without_workers_clients_are_run_here(what: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(**TWO_WORKERS)
    hamper(what, monkeypatch)
    with pytest.warns(UserWarning, match=rf"{LIMITED} \({why}\): the clients are run in this one"):
        found = run(**TWO_WORKERS)
    train = found.setup.train
    assert (train.backend, train.chunk, train.workers) == ("vectorised", 2, None)
    assert_same(found.snapshot("last").server, expected.snapshot("last").server)
    assert multiprocessing.active_children() == []


@HAMPERED
def test_auto_does_without_workers(what: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hamper(what, monkeypatch)
    with pytest.warns(UserWarning, match=rf"{LIMITED} \({why}\)"):
        found = run(backend="auto")
    assert found.setup.train.backend in ("loop", "vectorised")


def test_a_run_goes_on_where_there_can_be_no_workers(tmp_path: Path) -> None:
    """The change is written down, so that the next part of the run knows it."""
    expected = run(rounds=3, **TWO_WORKERS)
    out = tmp_path / "run"
    run(rounds=1, out=out, **TWO_WORKERS)
    with pytest.MonkeyPatch.context() as patch:
        hamper("memory", patch)
        with pytest.warns(UserWarning, match=LIMITED):
            run(rounds=2, out=out, resume=True, **TWO_WORKERS)
    assert layout.config(out)["train"]["backend"] == "vectorised"
    found = run(rounds=3, out=out, resume=True, **TWO_WORKERS)
    assert found.setup.train.backend == "vectorised"
    assert_same(found.snapshot("last").server, expected.snapshot("last").server)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere buffers have names")
def test_nothing_is_asked_of_dev_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with engine(Ditto(), FEDERATION, "mclr", **TWO_WORKERS) as e:
        e.play(1)


SMALL = """
import numpy as np, os, descant
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize < 2**20
rng = np.random.default_rng(0)
federation = descant.Federation.from_arrays(rng.random((60, 2000), dtype=np.float32), rng.integers(0, 10, 60),
                                            np.repeat(np.arange(6), 10))
run = descant.run("pfedme", federation=federation, rounds=2, backend="processes", workers=2, chunk=3)
print(run.setup.train.backend)
"""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="mounts a file system")
def test_a_dev_shm_of_64_kilobytes_is_enough() -> None:
    """As in a container that was given next to none: buffers of 3 x 80 kB do not go there."""
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    own = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*own, mount], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount anything")
    result = subprocess.run([*own, f'{mount} && exec "$0" -c "$1"', sys.executable, SMALL],
                            capture_output=True, text=True, timeout=120, check=False)
    assert (result.stdout, result.returncode) == ("processes\n", 0), result.stderr


@pytest.mark.parametrize("lr", [0.01, 3.0, 1e30])
def test_steps_that_are_too_large_are_no_reason_to_run_clients_one_by_one(lr: float) -> None:
    """What diverges differs by rounding that grows with it, and may overflow."""
    federation = ragged((40, 25, 13, 40, 40, 9), shape=(28,), classes=None)
    work = make_work(FedAvg(SGD(lr=lr)), federation, nn.Linear(28, 1), dtype="float32", batch=10)
    training = Training(work, Train(backend="auto", workers=1, dtype="float32"))
    _, _, measured = choose.make_backend(training)
    assert [each.backend for each in measured] == ["loop", "vectorised"]
