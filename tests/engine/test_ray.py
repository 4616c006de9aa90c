"""The Ray backend on a real cluster of two nodes: the same results as everywhere, whoever is killed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import descant
from cli_helpers import call
from descant import DescantError, UsageError
from descant.algorithms import ALGORITHMS, SCAFFOLD, FedAvg, pFedGT
from descant.core.algorithm import Algorithm, ClientData, Message
from descant.core.fields import hyper
from descant.core.task import Task
from descant.core.vector import Model
from descant.engine.backends.choose import templates
from descant.engine.backends.shard import Rows, Shard
from descant.engine.evaluation import evaluate
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.engine.work import Job, to_score
from helpers import Engine, assert_same, engine, make_work, ragged


def slow(test: Any) -> Any:
    return pytest.mark.slow(pytest.mark.alone(test))


FEDERATION = dataclasses.replace(ragged((9, 5, 1, 7, 3, 4, 6)), unseen=2)


# -- without Ray -----------------------------------------------------------------------------------


def test_ray_is_an_extra(monkeypatch, tmp_path):
    for name in ("ray", "ray.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("on_ray", "session"):
        monkeypatch.delitem(sys.modules, f"descant.engine.{name}", raising=False)
    result = call("run", "--set=train.backend=ray", "--out", tmp_path / "run")
    assert result.code == 2
    assert result.err == ("error: train.backend is \"ray\", and Ray is not installed: "
                          "pip install 'descant[ray]'\n")
    assert not (tmp_path / "run").exists()


def test_an_address_is_for_ray_only():
    with pytest.raises(UsageError, match='is \'auto\': set it to "ray"'):
        Train(ray_address="auto")


@pytest.mark.parametrize("job", ["local", "score", "score_newcomer", "personalize", "adapt"])
def test_a_shard_is_the_federation_for_its_clients(job: Job):
    """Bit for bit, together and alone; and it holds nobody else's rows."""
    training = Training(make_work(SCAFFOLD(), FEDERATION), Train(dtype="float64"))
    work = training.work
    templates(training)
    clients = np.array([1, 3, 5])
    rows = Rows.of(work.federation, clients)
    shard = dataclasses.replace(work, federation=Shard.frame(work.federation).holding(rows))
    assert len(rows.x) == sum(int(work.federation.split(s).sizes[clients].sum())
                              for s in ("train", "validation", "test"))
    for some in (clients[:1], clients):
        send = work.algorithm.newcomer if job in ("score_newcomer", "adapt") else work.algorithm.broadcast
        message = send(training.server, training.round_of(some))
        if job in ("score", "score_newcomer"):
            message = to_score(message, work.algorithm.global_model(training.server))
        states = training.store.read(some)
        found, expected = (w.execute(job, some, 3, message, states) for w in (shard, work))
        assert_same(found.values, expected.values)
        assert found.failed == expected.failed == {}


@pytest.fixture
def no_patience(monkeypatch) -> None:
    session = pytest.importorskip("descant.engine.backends.ray_session")
    monkeypatch.setattr(session, "ANSWER", 0.3)


@contextlib.contextmanager
def listening(answer: bytes = b"") -> Iterator[str]:
    """The address of somebody who is not Ray."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                connection.sendall(answer)
                time.sleep(1)
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(("address", "code", "hint"), [
    ("head", 2, 'must be "auto", or host:port'),
    ("ray://head:10001", 2, 'must be "auto", or host:port'),
    ("head:port", 2, 'must be "auto", or host:port'),
    ("127.0.0.1:1", 1, "no Ray cluster can be reached at 127.0.0.1:1: Connection refused"),
    ("nowhere.invalid:6379", 1, "no Ray cluster can be reached at nowhere.invalid:6379: "),
    ("silent", 1, "timed out"),
    ("another", 1, "what answers there is not Ray"),
])
def test_wrong_addresses_are_told_at_once(address, code, hint, tmp_path, no_patience):
    with contextlib.ExitStack() as stack:
        if address in ("silent", "another"):
            address = stack.enter_context(listening(b"HTTP/1.1 400 Bad Request" * (address == "another")))
        start = time.monotonic()
        result = call("run", "--set=train.backend=ray", f"--set=train.ray_address={address}",
                      "--out", tmp_path / "run")
    assert result.code == code
    assert hint in result.err
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert not (tmp_path / "run").exists()
    assert time.monotonic() - start < 10


def test_auto_finds_what_is_there(tmp_path, monkeypatch, no_patience):
    """Also the traces of a cluster that is no more."""
    from ray._private import services

    monkeypatch.setattr(services, "find_gcs_addresses", functools.cache(frozenset))  # whatever else runs here
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(DescantError, match="no Ray runs on this machine"):
        play_once(backend="ray", ray_address="auto")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(DescantError, match=r"can be reached at .*:1: Connection refused"):
        play_once(backend="ray", ray_address="auto")


def test_the_driver_must_be_on_a_machine_of_the_cluster(monkeypatch, no_patience):
    from ray._private import services

    monkeypatch.setattr(services, "find_node_ids", set, raising=False)
    with (listening(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])) as address,
          pytest.raises(DescantError, match="this machine is not part of the Ray cluster")):
        play_once(backend="ray", ray_address=address)


def play_once(**train: Any) -> None:
    with engine(FedAvg(), FEDERATION, **train) as e:
        e.play()


def test_scarce_shared_memory_is_told(monkeypatch, tmp_path):
    """Ray then keeps in files what it would share; here it is not started at all."""
    session = pytest.importorskip("descant.engine.backends.ray_session")
    import ray

    monkeypatch.setattr(session, "_shared_memory", lambda: 64_000_000)
    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(session.Session, "store", 10**9)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    opened = session.Session(None, 1)
    opened.close()
    assert opened.notes == ["/dev/shm has only 64.0 MB free, of 1.0 GB that Ray wants: what travels goes "
                            "through files, which is slower (in Docker, --shm-size gives more)"]
    assert not list(tmp_path.iterdir())


# -- on a cluster ----------------------------------------------------------------------------------


NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
# the head notices within seconds that a node is gone, where it would take half a minute
ATTENTIVE = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with a core each. This process is connected, as a notebook would be."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    place = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, for the names of sockets
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HOME": place, "RAY_TMPDIR": place, "RAY_AUTH_MODE": "disabled",
                            "PYTHONPATH": str(Path(descant.__file__).parents[1])}.items():
            patch.setenv(name, value)
        (Path(place) / "ray").mkdir()
        nodes = Cluster(initialize_head=True, head_node_args=NODE | {"_system_config": ATTENTIVE})
        nodes.add_node(**NODE)
        ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
        yield nodes
        ray.shutdown()
        nodes.shutdown()
    for process in marked(place):  # agents that look for their head for another minute
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    shutil.rmtree(place, ignore_errors=True)


def on_ray(algorithm: Algorithm, **train: Any) -> contextlib.AbstractContextManager[Engine]:
    return engine(algorithm, FEDERATION, **{"backend": "ray", "workers": 2} | train)


METHODS = {name: ALGORITHMS[name]() for name in ("fedavg", "scaffold", "pfedbred", "cgpfl", "fedmap")}
METHODS["pfedgt"] = pFedGT(init="gradient")  # which opens


@slow
@pytest.mark.parametrize("method", METHODS)
def test_ray_agrees_with_the_loop(method, cluster):
    algorithm = METHODS[method]
    workers = 2 if method in ("scaffold", "pfedgt") else 1  # starting them takes all the time
    with (on_ray(algorithm, workers=workers, chunk=2, cohort=4) as e,
          engine(algorithm, FEDERATION, cohort=4) as loop):
        for found, expected in zip(e.play(3), loop.play(3), strict=True):
            assert (found.grad_steps, found.rejected, found.note) == (expected.grad_steps, {}, None)
            assert found.loss == pytest.approx(expected.loss, rel=1e-10, nan_ok=True)
        assert_same(e.server, loop.server, 1e-10)
        assert_same(e.states(), loop.states(), 1e-10)
        assert_same(e.personal(), loop.personal(), 1e-10)
        everyone = np.arange(FEDERATION.everyone)
        scores, expected = (evaluate(each.training, each.backend, everyone) for each in (e, loop))
        assert scores.newcomer.tolist() == expected.newcomer.tolist()
        assert scores.newcomer.any()
        assert not scores.newcomer.all()
        assert_same(scores.personal, expected.personal, 1e-10)
        message = algorithm.newcomer(e.server, e.training.round_of(everyone))
        states = loop.training.store.read(everyone)
        adapted, expected = (each.backend.run("adapt", everyone, 3, message, states) for each in (e, loop))
        assert_same(adapted.values, expected.values, 1e-10)


@dataclass(frozen=True)
class Watched(FedAvg):
    """FedAvg whose clients leave a mark when they begin, and take their time; some fail, or worse."""

    name: ClassVar[str] = "watched"
    marks: str = hyper("", "where the marks are left")
    pause: float = hyper(0.0, "seconds that a client takes")
    failing: int = hyper(0, "training rows of the client that raises")
    deadly: int = hyper(0, "training rows of the client that ends its process")

    def local(self, task: Task, message: Message, state: tuple[()], data: ClientData
              ) -> tuple[Model, tuple[()]]:
        if self.marks:
            (Path(self.marks) / str(os.getpid())).touch()
            time.sleep(self.pause)
        if data.size == self.failing:
            raise ValueError("not today")
        if data.size == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().local(task, message, state, data)


def seen(marks: Path) -> list[int]:
    """The processes that have left a mark."""
    return sorted(int(path.name) for path in marks.iterdir())


def forget(marks: Path) -> None:
    for path in marks.iterdir():
        path.unlink()


def eventually(condition: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.05)


def kill_one_actor(cluster: Any, marks: Path) -> None:
    os.kill(seen(marks)[0], signal.SIGKILL)


def kill_one_node(cluster: Any, marks: Path) -> None:
    """All processes of the second node at once, as when a machine is switched off."""
    node, = cluster.worker_nodes
    raylet = node.all_processes["raylet"][0].process.pid
    for process in seen(marks):
        if parent(process) == raylet:
            os.kill(process, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@slow
@pytest.mark.parametrize("kill", [kill_one_actor, kill_one_node])
def test_who_is_killed_in_the_middle_of_a_round_is_replaced(kill, cluster, tmp_path):
    """And the result is that of the loop, bit for bit."""
    def strike() -> None:
        eventually(lambda: len(seen(tmp_path)) == 2)  # both are at work
        kill(cluster, tmp_path)

    with (on_ray(Watched(marks=str(tmp_path), pause=0.25), chunk=1) as e,
          engine(Watched(), FEDERATION) as undisturbed):
        e.play()
        forget(tmp_path)
        thread = threading.Thread(target=strike)
        thread.start()
        report, = e.play()
        thread.join()
        assert "a worker was lost" in report.note
        assert "what it had not finished was done again" in report.note
        assert report.rejected == {}
        if not cluster.worker_nodes:
            cluster.add_node(**NODE)

        def both_are_back() -> bool:
            forget(tmp_path)
            report, = e.play()
            assert report.note is None
            return len(seen(tmp_path)) == 2

        eventually(both_are_back, 60)
        undisturbed.play(e.training.number)
        assert_same(e.server, undisturbed.server)
        assert_same(e.states(), undisturbed.states())


@slow
def test_a_chunk_that_ends_its_worker_again_and_again(cluster, monkeypatch):
    from descant.engine.backends import ray as backend

    monkeypatch.setattr(backend, "LIVES", 2)
    with (on_ray(Watched(deadly=7), chunk=1, workers=1) as e,
          pytest.raises(DescantError, match="2 workers were lost over the same chunk of clients")):
        e.play()


@slow
def test_more_workers_than_cores_are_shards_of_fewer_actors(cluster, monkeypatch):
    """In which a client that raises is left out: that is no death. What the user should know is told once."""
    from descant.engine.backends.ray_session import Session

    monkeypatch.setattr(Session, "store", 1000)
    algorithm = Watched(failing=7)
    with on_ray(algorithm, workers=4, chunk=1) as e, engine(algorithm, FEDERATION) as loop:
        first, second = e.play(2)
        cores, store = first.note.split("; ")
        assert cores == "train.workers is 4, but Ray has only 2 cores: fewer workers do the work of all"
        assert re.search(r"travel at a time, and Ray's object store has only 1.0 kB: the rest goes", store)
        assert second.note is None
        assert second.rejected == {3: "ValueError: not today"}
        loop.play(2)
        assert_same(e.server, loop.server)


@slow
def test_nothing_waits_for_cores_that_others_use(cluster, monkeypatch, tmp_path):
    import ray

    from descant.engine.backends import ray as backend

    class Other:
        def works(self) -> bool:
            return True

    others = [ray.remote(num_cpus=1)(Other).remote() for _ in range(2)]
    assert ray.get([other.works.remote() for other in others]) == [True, True]
    monkeypatch.setattr(backend, "PATIENCE", 2.0)
    with pytest.raises(DescantError, match=r"no worker could be started .* in use by others"):
        play_once(backend="ray")
    # and now there is one, on a machine without descant
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['descant'] = None\n")
    node = cluster.add_node(**NODE, env_vars={"PYTHONPATH": str(tmp_path)})
    monkeypatch.setattr(backend, "PATIENCE", 60.0)
    with pytest.raises(DescantError, match=r"has no module 'descant.*': install the same packages on all "):
        play_once(backend="ray")
    cluster.remove_node(node)
    for other in others:
        ray.kill(other)


@slow
def test_versions_must_be_the_same(cluster, monkeypatch):
    from descant.engine.backends import ray as backend

    monkeypatch.setattr(backend, "__version__", "9.9")
    with pytest.raises(DescantError, match=r"has descant .*, and this one descant 9\.9, .*: install"):
        play_once(backend="ray", workers=1)


# -- from the command line, and from scripts ---------------------------------------------------------


EXPERIMENT = """
[data]
dataset = "digits"
partition = "dirichlet"
clients = 8
[model]
name = "dnn"
hidden = 20
[algorithm]
name = "scaffold"
[train]
rounds = 40
cohort = 5
local = { steps = 4 }
backend = "ray"
workers = 2
[eval]
every = 5
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.toml"
    path.write_text(EXPERIMENT)
    return path


def program(*words: object, **options: Any) -> subprocess.Popen[str]:
    source = str(Path(descant.__file__).parents[1])
    return subprocess.Popen([sys.executable, *map(str, words)], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": source}
                            | options.pop("env", {}), **options)


def lines(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def fingerprint(out: Path) -> dict[str, str]:
    kept = out / "checkpoint"
    return {str(p.relative_to(kept)): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(kept.rglob("*")) if p.is_file()}


@slow
def test_a_killed_run_is_resumed_bit_for_bit(cluster, experiment, tmp_path):
    """With what it held on the cluster given back."""
    import ray

    joined = f"--set=train.ray_address={cluster.address}"
    with program("-m", "descant", "run", experiment, joined, "--out", tmp_path / "killed") as process:
        eventually(lambda: lines(tmp_path / "killed") >= 3 or process.poll() is not None, 60)
        process.kill()
        _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    assert lines(tmp_path / "killed") < 40
    eventually(lambda: ray.available_resources().get("CPU") == 2)
    result = call("run", experiment, joined, "--out", tmp_path / "whole")
    assert (result.code, result.err) == (0, "")
    config = tmp_path / "killed" / "config.toml"  # the cluster may have moved in between
    config.write_text(config.read_text().replace(cluster.address, "auto"))
    result = call("resume", tmp_path / "killed")
    assert (result.code, result.err) == (0, "")
    assert "backend: ray, 2 workers, chunk 3" in result.out
    assert fingerprint(tmp_path / "killed") == fingerprint(tmp_path / "whole")


SCRIPT = """
import sys
from dataclasses import dataclass
import torch, descant
from descant.algorithms import FedAvg

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
    def forward(self, x):
        return self.layer(x.flatten(1)).tanh()

@dataclass(frozen=True)
class Mine(FedAvg):
    name = "mine"
    def aggregate(self, server, uploads, round):
        return super().aggregate(server, uploads, round)
    def local(self, task, message, state, data):
        return super().local(task, message, state, data)

federation = descant.federation("digits", partition="dirichlet", clients=6, alpha=0.3)
torch.manual_seed(0)
net = Net()
a, b = (descant.run(Mine(), model=net, federation=federation, rounds=2, local={"steps": 2}, dtype="float64",
                    **how).global_model("last").layer.weight.detach()
        for how in ({"backend": "loop"}, {"backend": "ray", "ray_address": sys.argv[1], "workers": 1}))
print(float((a - b).abs().max()) < 1e-10)
"""


@slow
def test_what_a_script_defines_works_on_the_cluster(cluster, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    with program("-W", "error", tmp_path / "script.py", cluster.address) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "True\n", "")


@slow
def test_ctrl_c_ends_a_local_ray(experiment, tmp_path):
    """All of it, without a word, and nothing is left behind."""
    place = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    mark = f"{tmp_path}/mark"
    with program("-m", "descant", "run", experiment, "--set=train.rounds=5000",
                 "--set=train.workers=1", "--out", tmp_path / "run",
                 env={"RAY_TMPDIR": str(place), "HOME": str(tmp_path), "MARK": mark},
                 start_new_session=True) as process:
        eventually(lambda: lines(tmp_path / "run") >= 2 or process.poll() is not None, 240)
        assert len(marked(mark)) > 3
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert err.startswith("stopped after round ")
    assert err.count("\n") == 1
    assert "(raylet)" not in out
    eventually(lambda: not marked(mark), 10)
    assert list(place.iterdir()) == []
    place.rmdir()


def marked(mark: str) -> list[int]:
    """The processes that have inherited this mark and still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


@slow
def test_a_cluster_that_is_gone(cluster, monkeypatch, tmp_path):
    """The last test: there is no cluster after it."""
    from descant.engine.backends import ray_session as session

    monkeypatch.setattr(session, "LOST", 2.0)
    with on_ray(Watched(marks=str(tmp_path), pause=0.25), workers=1, chunk=1) as e:
        e.play()
        cluster.head_node.all_processes["gcs_server"][0].process.kill()
        with pytest.raises(DescantError, match=r"the Ray cluster at .* no longer answers; all committed "
                                               "rounds are saved: resume the run"):
            e.play(100)
