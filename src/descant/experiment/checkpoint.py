"""Checkpoints: after every round, the state from which the run continues bit for bit.

A round is committed by renaming a synced journal into place: the new server state and the changed client
rows. Then the store and the state file are written, and the journal is removed; a process that finds a
journal repeats that, which is idempotent. So a kill at any moment leaves the last committed round. The files
are in docs/run-directory.md.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from descant.core.files import sync_directory, write_atomic
from descant.core.sealed import sealed_tensors, unsealed_tensors
from descant.core.tree import Tree, leaves, rebuild
from descant.engine.personal import Snapshot
from descant.engine.rounds import Training
from descant.engine.store import ClientStore
from descant.errors import DescantError

FORMAT = 1
TOLD = "told.json"


class Checkpointer:
    """Keeps the present state and the best one, in memory or on disk."""

    def __init__(self, training: Training, directory: Path | None, identity: dict[str, Any], *,
                 read_only: bool = False) -> None:
        self._training = training
        self._read_only = read_only
        self._directory = directory
        self._identity = identity  # what a resumed run must share
        best = None if directory is None else directory / "best" / "clients"
        self._best_store = ClientStore(training.store.template, training.store.population, best,
                                       read_only=read_only)
        self.best: Snapshot | None = None
        self.best_key: tuple[float, ...] | None = None  # the validation figures of the best round

    def commit(self, key: tuple[float, ...] | None) -> None:
        """Commit the present round. `key`: its validation figures, if evaluated; the greatest is the best."""
        promote = key is not None and (self.best_key is None or key > self.best_key)
        if promote:
            self.best_key = key
        if self._directory is not None:
            staged = self._training.store.staged
            journal = self._state() | {f"rows.{name}": rows for name, rows in leaves(staged.rows)}
            journal["clients"] = torch.from_numpy(staged.clients)
            write_atomic(self._directory / "journal.safetensors", self._encode(journal, promote))
        self._apply(promote)

    def tell(self) -> None:
        """Write down that the present round's model is about to be told, before it is committed. Noise of the
        operating system is another one if the round is played again: clients are hidden in two sums then."""
        training = self._training
        mechanism, account = training.work.privacy, training.account
        if self._directory is None or account is None or mechanism is None or not (
                mechanism.secret and mechanism.unit == "client"):
            return
        write_atomic(self._directory / TOLD, json.dumps({"round": training.number, "again": account.again}
                                                        ).encode())

    def _told_again(self) -> int:
        """How many sums were told of rounds that were not committed then."""
        assert self._directory is not None
        path = self._directory / TOLD
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            return int(told["again"]) + (int(told["round"]) > self._training.number)
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DescantError(f"{path} is damaged ({error}): restore it from a copy, or start the run anew"
                               ) from None

    def resume(self) -> None:
        """Set the training to the last committed round."""
        assert self._directory is not None
        journal = self._directory / "journal.safetensors"
        tensors, facts = read(journal if journal.exists() else self._directory / "state.safetensors")
        training = self._training
        training.number = facts["round"]
        training.clip = facts.get("clip", training.clip)
        if training.account is not None:
            training.account = dataclasses.replace(training.account, again=self._told_again())
        training.server = _tree(tensors, "server", training.server)
        training.store.restore(tensors["last_round"].numpy(), tensors["check_sums"].numpy())
        self.best_key = None if facts["best_key"] is None else tuple(facts["best_key"])
        best = self._directory / "best" / "state.safetensors"
        if best.exists() or (self.best_key is not None and not facts["promote"]):
            kept, about = read(best)
            self._best_store.restore(kept["last_round"].numpy(), kept["check_sums"].numpy())
            self.best = Snapshot(about["round"], _tree(kept, "server", training.server), self._best_store)
        if journal.exists():
            rows = _tree(tensors, "rows", training.store.template)
            clients = tensors["clients"].numpy()
            training.store.stage(clients, rows, training.store.last_round[clients])
            if not self._read_only:
                self._apply(facts["promote"])
            elif facts["promote"]:
                self.best = training.snapshot

    def _apply(self, promote: bool) -> None:
        training = self._training
        training.store.write()
        if promote:
            changed = np.flatnonzero(training.store.last_round != self._best_store.last_round)
            self._best_store.follow(training.store, changed)
            self.best = Snapshot(training.number, training.server, self._best_store)
        if self._directory is None:
            return
        if promote:
            write_atomic(self._directory / "best" / "state.safetensors", self._encode(self._state(), False))
        write_atomic(self._directory / "state.safetensors", self._encode(self._state(), False))
        (self._directory / "journal.safetensors").unlink(missing_ok=True)
        sync_directory(self._directory)

    def _state(self) -> dict[str, Tensor]:
        server = {f"server.{name}": leaf for name, leaf in leaves(self._training.server)}
        store = self._training.store
        return server | {"last_round": torch.from_numpy(store.last_round),
                         "check_sums": torch.from_numpy(store.check_sums)}

    def _encode(self, tensors: dict[str, Tensor], promote: bool) -> bytes:
        facts: dict[str, Any] = {
            "format": FORMAT, "round": self._training.number, "best_key": self.best_key,
            "promote": promote, "identity": self._identity}
        if self._training.clip is not None:
            facts["clip"] = self._training.clip
        return sealed_tensors(tensors, json.dumps(facts, sort_keys=True))


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and facts of a checkpoint file, checked."""
    try:
        tensors, text = unsealed_tensors(path)
    except FileNotFoundError:
        raise DescantError(f"{path} is missing: there is no checkpoint to resume from") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise DescantError(f"the checkpoint {path} is damaged ({error}): restore it from a copy, "
                           "or start the run anew") from None
    if not text:
        raise DescantError(f"{path} is not a checkpoint of descant")
    facts: dict[str, Any] = json.loads(text)
    if facts["format"] != FORMAT:
        raise DescantError(f"{path} has format {facts['format']}, this version of descant reads {FORMAT}: "
                           "resume it with the version that wrote it")
    return tensors, facts


def identity(directory: Path) -> dict[str, Any]:
    """The identity of the run that a checkpoint belongs to."""
    journal = directory / "journal.safetensors"
    _, facts = read(journal if journal.exists() else directory / "state.safetensors")
    found: dict[str, Any] = facts["identity"]
    return found


def _tree(tensors: dict[str, Tensor], prefix: str, template: Tree) -> Tree:
    found = {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items()
             if name.startswith(f"{prefix}.")}
    missing = [name for name, _ in leaves(template) if name not in found]
    if missing:
        raise DescantError(f"the checkpoint has no {prefix}.{missing[0]}: it belongs to another method")
    return rebuild(template, found)
