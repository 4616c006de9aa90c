"""A federation as one of its clients sees it: what it does, and what of it leaves the machine."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

from descant.core.units import size, times
from descant.errors import DescantError, UsageError
from descant.view.display import JOBS, Display, line, method, printable
from descant.view.outcome import show_own

if TYPE_CHECKING:
    from descant.deploy.letters import Letter
    from descant.deploy.plan import Plan

# what an answer repeats of the server's order
ECHO = ("what", "nonce", "name", "job", "number", "session", "client", "ready")


# Flower drops the answers of a node that has left: it stays until the server has gone, or at least so long
# (in seconds) that a busy server has fetched the last one
LINGER = 10.0


class ClientDisplay(Display):
    """Watches a node and its connection. It also ends them, after the answer that says so has been sent: when
    the model is there, or when the client cannot take part."""

    def __init__(self, console: Console, name: str, stop: threading.Event, stay: bool) -> None:
        self._name = name
        self._stop, self._stay = stop, stay
        self._address = ""
        self._doing = "connecting"
        self._rounds = 0
        self._told: dict[str, list[str]] = {}  # of what tensors the answers to an order consist
        self._answers, self._bytes_out, self._bytes_in = 0, 0, 0
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
        self.say(f"{self._name}: data {data}, which stay here; state and model in {directory}")
        if (directory / "model.safetensors").exists():
            self.say(f"note: a model is there from before, and makes room for the next: "
                     f"{directory / 'model.safetensors'}")
        self._doing = f"looking for the server at {address}"
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
        self.say(f"not connected: {reason}; trying on")
        self._doing = "trying to connect"

    def received(self, count: int) -> None:
        self._bytes_in += count

    def sent(self, count: int) -> None:
        self._bytes_out += count
        if self._outcome is not None:
            figures, place = self._outcome
            show_own(self._console, figures)
            self.say(f"your model: {place}; what it is: {place.with_suffix('.json')}")
            self._outcome = None
            self._doing = "the model is there"
            if not self._stay:
                self._leave()
        elif self.code:
            self._leave()

    def _leave(self) -> None:
        if self._leaving is None:
            self._doing += "; leaving in a moment"
            self._leaving = threading.Timer(LINGER, self._stop.set)
            self._leaving.daemon = True
            self._leaving.start()

    # -- the work --------------------------------------------------------------------------------

    def joined(self, plan: Plan, client: int, sizes: dict[str, int]) -> None:
        self._rounds = plan.train.rounds
        is_new = client >= plan.clients - plan.unseen
        self.say(f"joined as {'a newcomer' if is_new else 'one of ' + times(plan.clients, 'client')}: "
                 f"{method(plan)}, {times(self._rounds, 'round')}; of the rows here, {sizes['train']} are to "
                 f"train on, {sizes['validation']} to choose by, {sizes['test']} to test on")
        self._doing = "waiting for the server"

    def working(self, what: str, number: int) -> None:
        of = f" of {self._rounds}" if self._rounds else ""
        self._doing = f"round {number}{of}: {JOBS.get(what, what)}"
        if what == "finish":
            self.say(f"making the personal model, of round {number}")

    def answered(self, what: str, number: int, letter: Letter) -> None:
        """Tensors are listed when they are first sent, and again if they change."""
        self._answers += 1
        job = str(letter.facts.get("job", what))
        kind = f"round {number}, {JOBS.get(job, job)}" if what == "work" else what
        tensors = [f"{name} {_shape(array.shape)}" for name, array in letter.tensors.items()]
        parts = [f"{times(len(tensors), 'tensor')} ({', '.join(tensors)})"] if tensors else []
        if self._told.get(job) == tensors != []:
            if self._live is not None:
                return  # counted below
            parts = [f"{times(len(tensors), 'tensor')} as before"]
        self._told[job] = tensors
        parts += [f"{key} {_short(value)}" for key, value in letter.facts.items() if key not in ECHO]
        self.say(f"{kind}: sends {size(letter.nbytes() + len(json.dumps(letter.facts)))}: {', '.join(parts)}")

    def finished(self, figures: dict[str, Any], place: Path) -> None:
        self._outcome = figures, place

    def failed(self, what: str, error: Exception) -> None:
        if str(error) == "not joined":  # the server lets it join again
            return
        reason = str(error) if isinstance(error, DescantError) else f"{type(error).__name__}: {error}"
        if what in ("hello", "join"):  # that will not get better by itself
            if not self.code:
                self.close()
                print(f"error: {printable(reason)}", file=sys.stderr, flush=True)
            self.code = 2 if isinstance(error, UsageError) else 1
            return
        self.say(f"failed ({what}): {reason}")

    # -- on a terminal ---------------------------------------------------------------------------

    def lines(self) -> RenderableType:
        return line(f"{self._doing}  ({times(self._answers, 'answer')}: {size(self._bytes_out)} sent, "
                    f"{size(self._bytes_in)} received)")


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "number"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({', '.join(f'{key} {_short(each)}' for key, each in value.items())})"
    return f"{value:.4g}" if isinstance(value, float) else f"{value!s:.200}"
