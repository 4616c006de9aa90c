"""The other libraries: what each needs, and in which ways it can use this machine."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.speed.results import cores
from descant.errors import DescantError

HERE = Path(__file__).parent
ENVIRONMENTS = Path("runs/peers/environments")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Arrangement:
    """A way to use the cores of this machine."""

    name: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Library:
    """A peer, with the arrangements among which the fastest is taken."""

    name: str
    title: str
    requirements: tuple[str, ...]
    arrangements: tuple[Arrangement, ...]

    @property
    def environment(self) -> Path:
        return ENVIRONMENTS / self.name

    @property
    def python(self) -> Path:
        return self.environment / "bin" / "python"

    @property
    def script(self) -> Path:
        return HERE / "sides" / f"with_{self.name}.py"

    @property
    def is_installed(self) -> bool:
        return (self.environment / "installed").exists()

    def install(self) -> None:
        """An environment of its own, with the versions in constraints.txt."""
        subprocess.run([sys.executable, "-m", "venv", "--clear", self.environment], check=True)
        done = subprocess.run([self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                               "-c", HERE / "constraints.txt", *self.requirements])
        if done.returncode:
            raise DescantError(f"{self.title} could not be installed: pip says why above")
        (self.environment / "installed").touch()


LIBRARIES = {library.name: library for library in (
    Library("fedjax", "FedJAX", ("fedjax", "jax"), (
        Arrangement("jit, one thread", ("jit",), {
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}),
        Arrangement("jit, all threads", ("jit",)),
        Arrangement("pmap, a device a core", ("pmap",), {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={cores()}"}))),
    Library("pfl", "pfl-research", ("pfl", "torch"), (
        Arrangement("one process, one thread", ("1",), ONE_THREAD),
        Arrangement("one process, all threads", ("1",)),
        Arrangement("two processes", ("2",), ONE_THREAD))),
    Library("flower", "Flower", ("flwr[simulation]", "torch"), (
        # Ray's workers would otherwise stand back behind whatever else runs
        Arrangement("an actor a core", (str(cores()),), ONE_THREAD | {"RAY_worker_niceness": "0"}),)),
)}
