"""What a client keeps on its own disk: its states and its personal model.

With every request the server says which of the client's states counts. A state from a round whose reply came
too late, or was lost with the server, does not. So a new state is written beside the one it came from, and
the old one is removed when a later round builds on the new. Files are replaced atomically.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from descant.core.files import write_atomic
from descant.core.tree import Tree, leaves, rebuild
from descant.errors import DescantError


class ClientDirectory:
    """Each federation has its own folder in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # private to this user

    def joined(self) -> dict[str, Any] | None:
        """The federation that the client joined last."""
        path = self.directory / "federation.json"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise DescantError(f"{path} is damaged ({error}): remove it, and the client joins again"
                               ) from None
        return found if isinstance(found, dict) else None

    def join(self, facts: dict[str, Any]) -> None:
        write_atomic(self.directory / "federation.json", json.dumps(facts, indent=1).encode())

    def states(self, session: str) -> ClientStates:
        return ClientStates(self.directory / session)


class ClientStates:
    """The states of one client in one federation, by round."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def rounds(self) -> list[int]:
        found = (path.stem.removeprefix("state") for path in self._directory.glob("state*.safetensors"))
        return sorted(int(number) for number in found if number.lstrip("-").isdecimal())

    def read(self, number: int, template: Tree) -> Tree:
        """The state of a round; round 0 has the initial state."""
        if number == 0:
            return template
        path = self._path(number)
        try:
            with safe_open(path, "pt") as file:
                found = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return rebuild(template, found)
        except FileNotFoundError:
            known = ", ".join(map(str, self.rounds())) or "none"
            raise DescantError(f"the state of round {number} is not in {self._directory} (there: {known}): "
                               "restore it from a backup") from None
        except (SafetensorError, OSError, KeyError) as error:
            raise DescantError(f"{path} is damaged ({error}): restore it from a backup") from None

    def write(self, number: int, state: Tree, keep: Collection[int]) -> None:
        """Write a new state, and remove the others that can no longer count."""
        for other in self.rounds():
            if other not in keep:
                self._path(other).unlink()
        # safetensors has no empty files
        tensors = {name: leaf.contiguous() for name, leaf in leaves(state)} or {"nothing": torch.zeros(1)}
        write_atomic(self._path(number), save(tensors))

    def _path(self, number: int) -> Path:
        return self._directory / f"state{number}.safetensors"
