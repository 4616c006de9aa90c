"""What all commands share: options, the console, and how a failure or a signal ends a command."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from descant.errors import DescantError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

Settings = Annotated[list[str] | None, typer.Option(
    "--set", metavar="SECTION.FIELD=VALUE", show_default=False,
    help="Change a field of the experiment; may be given more than once.")]


def _use_data_dir(directory: Path | None) -> None:
    """Through the environment, which loaders read and worker processes inherit."""
    if directory is not None:
        os.environ["DESCANT_DATA"] = str(directory)


DataDir = Annotated[Path | None, typer.Option(
    "--data-dir", metavar="DIR", show_default=False, callback=_use_data_dir,
    help="Where datasets are kept. Without it: $DESCANT_DATA, or ~/.cache/descant.")]


Allow = Annotated[list[str] | None, typer.Option(
    "--allow", metavar="PACKAGE", show_default=False,
    help="Code that may be imported where a file names it (a model, prior or metric by its place "
         "package.module:name): a package or module that you trust; may be given more than once. For always: "
         "allow = [...] in ~/.config/descant/settings.toml.")]


class _Shown(logging.Handler):
    """For stderr: what a command prints may be for programs."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(record.getMessage(), err=True)


def show_imports() -> None:
    """Let commands say whose code they import."""
    log = logging.getLogger("descant.core.import_object")
    log.setLevel(logging.INFO)
    log.handlers = [_Shown()]


def make_console() -> Console:
    from rich.console import Console

    # Nothing that is printed is markup: names and paths are the user's. Where no terminal sets a
    # width, nothing is wrapped or cut.
    console = Console(markup=False, highlight=False, emoji=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, emoji=False, width=1000)


class Terminated(KeyboardInterrupt):
    """SIGTERM: what a service manager sends in place of a Ctrl-C."""


@contextmanager
def terminable(begin: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let SIGTERM end what is done here as Ctrl-C does. `begin` is called first, for either."""
    def end(number: int, frame: object) -> NoReturn:
        begin()
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    previous = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def failures_told(stopped: str) -> Iterator[None]:
    """Tell what went wrong in one message; only a bug shows a traceback. `stopped` is what to say about
    a Ctrl-C that came before there was a run to stop."""
    try:
        yield
    except BrokenPipeError:
        raise  # whoever read this has heard enough: Typer ends quietly
    except KeyboardInterrupt as interrupt:  # of a run, it says where that stands
        end(str(interrupt) or stopped, 143 if isinstance(interrupt, Terminated) else 130)
    except UsageError as error:
        end(f"error: {error}", 2)
    except DescantError as error:
        end(f"error: {error}", 1)
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        end(f"error: {where}{error.strerror or error}", 1)


def end(message: str, code: int) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)
