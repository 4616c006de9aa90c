"""What all commands share: reading an experiment, and how an error or a signal ends a command."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from descant.errors import DescantError, UsageError
from descant.view.terminal import make_console

if TYPE_CHECKING:
    from rich.console import Console


def show_imports() -> None:
    """Print whose code a command imports."""
    log = logging.getLogger("descant.core.import_object")
    log.setLevel(logging.INFO)
    log.handlers = [logging.StreamHandler()]  # to stderr: the output of a command may be for programs


def read_tables(file: Path | None, settings: Sequence[str] | None, *, with_algorithm: bool = False
                ) -> dict[str, Any]:
    """The sections of an experiment file, or of the demo; `with_algorithm` adds the demo's where the file
    has none."""
    from descant.experiment import config

    tables: Mapping[str, Any] = config.DEMO if file is None else config.read_toml(file)
    if with_algorithm:
        tables = {"algorithm": config.DEMO["algorithm"], **tables}
    return config.override(tables, settings or ())


def say_demo(console: Console, file: Path | None) -> None:
    if file is None:
        console.print("no FILE given: this is the demo experiment", soft_wrap=True)


class Terminated(KeyboardInterrupt):
    """SIGTERM: what a service manager sends in place of a Ctrl-C."""


@contextmanager
def terminable(begin: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does. `begin` is called first, for either."""
    def end(number: int, frame: object) -> NoReturn:
        begin()
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    previous = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def restated(interrupt: KeyboardInterrupt, message: str) -> KeyboardInterrupt:
    """The same interrupt, with what the user should know."""
    is_terminated = isinstance(interrupt, Terminated) or isinstance(interrupt.__context__, Terminated)
    return (Terminated if is_terminated else KeyboardInterrupt)(message)


@contextmanager
def reporting(stopped: str) -> Iterator[Console]:
    """The console of a command. An error is reported in one message; only a bug shows a traceback. `stopped`
    is the message for a Ctrl-C before a run has started."""
    try:
        yield make_console()
    except BrokenPipeError:
        raise  # the reader has closed the pipe: Typer ends quietly
    except KeyboardInterrupt as interrupt:  # a run's says how far it got
        end(str(interrupt) or stopped, 143 if isinstance(interrupt, Terminated) else 130)
    except UsageError as error:
        end(f"error: {error}", 2)
    except DescantError as error:
        end(f"error: {error}", 1)
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        end(f"error: {where}{error.strerror or error}", 1)


def warn(message: str) -> None:
    typer.echo(f"warning: {message}", err=True)


def end(message: str, code: int) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)
