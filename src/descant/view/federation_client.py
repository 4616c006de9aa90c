"""A remote federation as a client sees it: what it does, and what leaves its machine."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from descant.core.units import size, times
from descant.errors import DescantError, UsageError
from descant.view.display import JOBS, Display, line, printable
from descant.view.outcome import show_own

# what a reply repeats of the server's request
LONG, MANY = 40, 8  # characters of a text, and values of a table, that are shown whole
ECHO = ("what", "nonce", "name", "job", "number", "session", "client", "ready")
LINGER = 10.0  # seconds before leaving: Flower drops the replies of a client that has left


class ClientDisplay(Display):
    """Shows a client; also ends it after its last reply: it has its model, or cannot take part."""

    def __init__(self, console: Console, name: str, stop: threading.Event, stay: bool) -> None:
        self._name = name
        self._stop, self._stay = stop, stay
        self._address = ""
        self._doing = "connecting"
        self._rounds = 0
        self._told: dict[str, list[str]] = {}  # job -> the tensors of its replies
        self._replies, self._bytes_out, self._bytes_in = 0, 0, 0
        self._outcome: tuple[dict[str, Any], Path] | None = None
        self.code = 0  # with which the process should end
        self._leaving: threading.Timer | None = None
        super().__init__(console)

    def close(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
        super().close()

    def begin(self, address: str, data: str, directory: Path) -> None:
        self._address = address
        self.say(f"{self._name}: data {data}, which stay here; client directory {directory}")
        if (directory / "model.safetensors").exists():
            self.say(f"note: the next model replaces {directory / 'model.safetensors'}")
        self._doing = f"connecting to {address}"
        if self._live is None:
            self.say(self._doing)

    # -- the connection --------------------------------------------------------------------------

    def connected(self) -> None:
        self.say(f"connected to {self._address}")
        self._doing = "waiting for the server"

    def lost(self, reason: str) -> None:
        if self._leaving is not None:
            self._stop.set()
            return
        self.say(f"not connected: {reason}; retrying")
        self._doing = "reconnecting"

    def received(self, count: int) -> None:
        self._bytes_in += count

    def sent(self, count: int) -> None:
        self._bytes_out += count
        if self._outcome is not None:
            figures, place = self._outcome
            show_own(self._console, figures)
            self.say(f"your model: {place}; its manifest: {place.with_suffix('.json')}")
            self._outcome = None
            self._doing = "the model is saved"
            if not self._stay:
                self._leave()
        elif self.code:
            self._leave()

    def ignored(self, reason: str) -> None:
        self.say(f"ignored: {reason}; tell the server's operator")

    def _leave(self) -> None:
        if self._leaving is None:
            self._doing += "; leaving in a moment"
            self._leaving = threading.Timer(LINGER, self._stop.set)
            self._leaving.daemon = True
            self._leaving.start()

    # -- the work --------------------------------------------------------------------------------

    def joined(self, what: str, rounds: int, clients: int | None, sizes: dict[str, int]) -> None:
        self._rounds = rounds
        self.say(f"joined as {'a newcomer' if clients is None else 'one of ' + times(clients, 'client')}: "
                 f"{what}, {times(rounds, 'round')}; rows here: {sizes['train']} training, "
                 f"{sizes['validation']} validation, {sizes['test']} test")
        self._doing = "waiting for the server"

    def working(self, what: str, number: int) -> None:
        of = f" of {self._rounds}" if self._rounds else ""
        self._doing = f"round {number}{of}: {JOBS.get(what, what)}"
        if what == "finish":
            self.say(f"making the personal model, of round {number}")

    def answered(self, what: str, number: int, facts: Mapping[str, Any], shapes: Mapping[str, Sequence[int]],
                 count: int) -> None:
        """Tensors are listed when they are first sent, and again if they change."""
        self._replies += 1
        job = str(facts.get("job", what))
        kind = f"round {number}, {JOBS.get(job, job)}" if what == "work" else what
        tensors = [f"{name} {'x'.join(map(str, shape)) or 'number'}" for name, shape in shapes.items()]
        parts = [f"{times(len(tensors), 'tensor')} ({', '.join(tensors)})"] if tensors else []
        if self._told.get(job) == tensors != []:
            if self._live is not None:
                return  # counted below
            parts = [f"{times(len(tensors), 'tensor')} as before"]
        self._told[job] = tensors
        parts += [f"{key} {_short(value)}" for key, value in facts.items() if key not in ECHO]
        self.say(f"{kind}: sends {size(count + len(json.dumps(facts)))}: {', '.join(parts)}")

    def finished(self, figures: dict[str, Any], place: Path) -> None:
        self._outcome = figures, place

    def failed(self, what: str, error: Exception) -> None:
        if str(error) == "not joined":  # the server lets it join again
            return
        reason = str(error) if isinstance(error, DescantError) else f"{type(error).__name__}: {error}"
        if what in ("hello", "join", "refuse"):  # trying again does not help
            if not self.code:
                self.close()
                print(f"error: {printable(reason)}", file=sys.stderr, flush=True)
            self.code = 2 if isinstance(error, UsageError) else 1
            return
        self.say(f"failed ({what}): {reason}")

    def lines(self) -> RenderableType:
        return line(f"{self._doing}  ({times(self._replies, 'message')}: {size(self._bytes_out)} sent, "
                    f"{size(self._bytes_in)} received)")


def _short(value: Any) -> str:
    if isinstance(value, str) and len(value) > LONG:  # keys, shares and signatures of secure aggregation
        return f"{value[:8]}... ({times(len(value), 'character')})"
    if (isinstance(value, Mapping) and len(value) > MANY) or (
            isinstance(value, list) and len(str(value)) > LONG):
        return f"({times(len(value), 'value')})"
    if isinstance(value, Mapping):
        return f"({', '.join(f'{key} {_short(each)}' for key, each in value.items())})"
    return f"{value:.4g}" if isinstance(value, float) else f"{value!s:.200}"
