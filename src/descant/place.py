"""The user's own objects, named by their place: "package.module:name"."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import torch

from descant.errors import UsageError, unknown

_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_place(text: object) -> bool:
    """Whether this reads "package.module:name"."""
    return isinstance(text, str) and _FORM.fullmatch(text) is not None


def imported(place: str, where: str) -> Any:
    """The object at a place; `where` names the field in errors. The module is looked for where Python looks,
    and in the current directory."""
    path, _, attribute = place.partition(":")
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.append(here)  # stays: worker processes import it again
    try:
        with torch.random.fork_rng(devices=[]):  # what it draws at its first import must not matter
            module = importlib.import_module(path)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{path}.".startswith(f"{error.name}.")
        reason = (f"there is no module {error.name!r} in this Python or in the current directory"
                  if missing and isinstance(error, ModuleNotFoundError)
                  else f"its import fails with {type(error).__name__}: {error}")
        raise UsageError(f"{where} {place}: {reason}") from error
    if not hasattr(module, attribute):
        names = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
        raise unknown(f"{where} {place}: name in module {path}", attribute, names)
    return getattr(module, attribute)
