"""What a client keeps on its own disk: its states and its personal model.

With every request the server says which of the client's states counts. A state from a round whose reply came
too late, or was lost with the server, does not. So a new state is written beside the one it came from, and
the old one is removed when a later round builds on the new. Files are replaced atomically.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from descant.core.files import private_directory, write_atomic
from descant.core.sealed import sealed_table, sealed_tensors, unsealed_table, unsealed_tensors
from descant.core.tree import Tree, leaves, rebuild
from descant.errors import DescantError

FILES = ("federation.json", "node_id", "model.safetensors", "model.json")
LEDGER = "ledger.json"
EXPERIMENT = "experiment"  # in the ledger: which it is
STATE = re.compile(rf"\.?(state-?\d+\.safetensors|{re.escape(LEDGER)})(\.tmp)?")
SESSION = re.compile("[0-9a-f]{16}")


def open_directory(directory: Path) -> None:
    """Make the client directory, for this user alone. Whoever needs it first makes it by this."""
    private_directory(directory, lambda name: name.removeprefix(".").removesuffix(".tmp") in FILES
                      or SESSION.fullmatch(name) is not None)


class ClientDirectory:
    """Each federation has its own folder in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        open_directory(directory)

    def joined(self) -> dict[str, Any] | None:
        """The federation that the client joined last."""
        path = self.directory / "federation.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(found, dict) or not isinstance(found.get("session"), str):
                raise ValueError("it names no federation")
            return unsealed_table(found)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise DescantError(f"{path} is damaged ({error}): remove it, and the client joins again"
                               ) from None

    def join(self, facts: dict[str, Any]) -> None:
        write_atomic(self.directory / "federation.json", json.dumps(sealed_table(facts), indent=1).encode(),
                     private=True)

    def states(self, session: str) -> ClientStates:
        return ClientStates(self.directory / session)

    def ledger(self, session: str) -> Ledger:
        return Ledger(self.directory / session / LEDGER)

    def kin(self, ledger: Ledger, experiment: str) -> list[Ledger]:
        """The ledgers of all federations with this experiment, also of other clients or with other rules;
        the given one is one of them from now on. A server cannot begin a new count with a new federation."""
        if not ledger.times(EXPERIMENT, experiment):
            ledger.enter(EXPERIMENT, experiment)
        found = (Ledger(path) for path in sorted(self.directory.glob(f"*/{LEDGER}")) if path != ledger.path)
        return [ledger, *(other for other in found if other.times(EXPERIMENT, experiment))]


class Ledger:
    """How often the server has asked for what, in one federation. It outlives the process: a server gains
    nothing by waiting for a restart."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            self._times = {str(key): int(times) for key, times in unsealed_table(found).items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise DescantError(f"{path} is damaged ({error}): restore it from a backup, or remove it if you "
                               "trust the server") from None

    def times(self, what: str, number: int | str) -> int:
        """How many requests there were."""
        return self._times.get(f"{what} {number}", 0)

    def enter(self, what: str, number: int | str) -> int:
        """Count a request; returns how many there were, with this one."""
        key = f"{what} {number}"
        self._times[key] = self._times.get(key, 0) + 1
        write_atomic(self.path, json.dumps(sealed_table(self._times)).encode(), private=True)
        return self._times[key]

    def total(self, whats: Collection[str]) -> int:
        """How many requests there were in all for any of these."""
        return sum(times for key, times in self._times.items() if key.rpartition(" ")[0] in whats)

    def rounds(self, whats: Collection[str]) -> int:
        """In how many rounds there were any."""
        return len({number for what, _, number in (key.rpartition(" ") for key in self._times)
                    if what in whats})


class ClientStates:
    """The states of one client in one federation, by round."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        private_directory(directory, STATE.fullmatch)

    def rounds(self) -> list[int]:
        found = (path.stem.removeprefix("state") for path in self._directory.glob("state*.safetensors"))
        return sorted(int(number) for number in found if number.lstrip("-").isdecimal())

    def read(self, number: int, template: Tree) -> Tree:
        """The state of a round; round 0 has the initial state."""
        if number == 0:
            return template
        path = self._path(number)
        try:
            found, text = unsealed_tensors(path)  # of older versions: without a checksum and a text
            if text not in ("", str(number)):
                raise ValueError(f"it is the state of round {text:.20}")
            _require_form(found, template)
            return rebuild(template, found)
        except FileNotFoundError:
            known = ", ".join(map(str, self.rounds())) or "none"
            raise DescantError(f"the state of round {number} is not in {self._directory} (there: {known}): "
                               "restore it from a backup") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise DescantError(f"{path} is damaged ({error}): restore it from a backup") from None

    def write(self, number: int, state: Tree, keep: Collection[int]) -> None:
        """Write a new state, and remove the others that can no longer count."""
        for other in self.rounds():
            if other not in keep:
                self._path(other).unlink()
        # safetensors has no empty files
        tensors = {name: leaf.contiguous() for name, leaf in leaves(state)} or {"nothing": torch.zeros(1)}
        write_atomic(self._path(number), sealed_tensors(tensors, str(number)), private=True)

    def _path(self, number: int) -> Path:
        return self._directory / f"state{number}.safetensors"


def _require_form(found: dict[str, torch.Tensor], template: Tree) -> None:
    """ValueError if tensors are not of the names, types and shapes of a state."""
    for name, leaf in leaves(template):
        if name not in found:
            raise ValueError(f"it has no {name}")
        if (found[name].dtype, found[name].shape) != (leaf.dtype, leaf.shape):
            raise ValueError(f"its {name} has another shape or type")
