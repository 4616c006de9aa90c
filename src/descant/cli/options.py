"""How options are declared, and those that several commands have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer


def option(flag: str, metavar: str | None, help: str, **more: Any) -> Any:
    """An option whose default is not printed."""
    return typer.Option(flag, metavar=metavar, help=help, show_default=False, **more)


def argument(metavar: str, help: str) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def _use_data_dir(directory: Path | None) -> None:
    """Through the environment, which loaders read and worker processes inherit."""
    if directory is not None:
        os.environ["DESCANT_DATA"] = str(directory)


Settings = Annotated[list[str] | None, option(
    "--set", "SECTION.FIELD=VALUE", "Change a field of the experiment; may be given more than once.")]
DataDir = Annotated[Path | None, option(
    "--data-dir", "DIR", "Where datasets are kept. Default: $DESCANT_DATA, or ~/.cache/descant.",
    callback=_use_data_dir)]
Allow = Annotated[list[str] | None, option(
    "--allow", "PACKAGE",
    "A trusted package or module whose code may be imported where a file names it (a method, model, "
    "prior or metric as package.module:name); may be given more than once. To allow it always: "
    "allow = [...] in ~/.config/descant/settings.toml.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Profiled = Annotated[bool, typer.Option(
    "--profile", help="Show where the time of the rounds went: sampling, batches, local work and so on.")]
Track = Annotated[list[str] | None, option(
    "--track", "TOOL", "Also keep the figures in tensorboard (in DIR/tensorboard), mlflow or wandb "
                       "(offline), which have their own environment variables; may be given more than once.")]
