"""What all commands share: options, and how an error or a signal ends a command."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

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
    help="Where datasets are kept. Default: $DESCANT_DATA, or ~/.cache/descant.")]
Allow = Annotated[list[str] | None, typer.Option(
    "--allow", metavar="PACKAGE", show_default=False,
    help="A trusted package or module whose code may be imported where a file names it (a model, prior or "
         "metric as package.module:name); may be given more than once. To allow it always: allow = [...] in "
         "~/.config/descant/settings.toml.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Profiled = Annotated[bool, typer.Option(
    "--profile", help="Show where the time of the rounds went: sampling, batches, local work and so on.")]


class _ToStderr(logging.Handler):
    """The output of a command may be for programs."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(record.getMessage(), err=True)


def show_imports() -> None:
    """Print whose code a command imports."""
    log = logging.getLogger("descant.core.import_object")
    log.setLevel(logging.INFO)
    log.handlers = [_ToStderr()]


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


@contextmanager
def reporting_errors(stopped: str) -> Iterator[None]:
    """Report an error in one message; only a bug shows a traceback. `stopped` is the message for a Ctrl-C
    before a run has started."""
    try:
        yield
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


def end(message: str, code: int) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)
