"""Which code a file may name.

Importing a module runs it. So a file may name only what its reader permits:

- a file that a command merely opens (a run directory, a model, a comparison, a server's experiment) may
  name what the user has allowed: with `--allow`, with `allow=` in Python, or in their settings;
- a file that the user runs may also name modules of the user's own project;
- no file may name modules of Python's standard library.
"""

from __future__ import annotations

import importlib.util
import os
import re
import site
import sys
import sysconfig
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

from descant.errors import UsageError, unknown

_ENTRY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*)?")


@dataclass(frozen=True)
class Permit:
    """What a file may name."""

    allow: tuple[str, ...] = ()  # packages and modules with all their content, or single places
    project: bool = False  # also the user's own project: the user runs this file

    def covers(self, place: str) -> bool:
        """Whether the object at "package.module:name" may be imported."""
        module = place.partition(":")[0]
        top = top_of(place)
        if is_standard(top):
            return False
        listed = any(place == entry or f"{module}.".startswith(f"{entry}.") for entry in self.allow)
        return listed or (self.project and is_project(top))


NOTHING = Permit()
Allowed: TypeAlias = Collection[str] | Permit  # names, or a permit


def opened(allow: Allowed = ()) -> Permit:
    """The permit of a file that is merely opened: `allow` and the user's settings."""
    return allow if isinstance(allow, Permit) else Permit((*_checked(allow, "--allow"), *_settings()))


def ran(allow: Collection[str] = ()) -> Permit:
    """The permit of a file that the user runs."""
    return Permit(opened(allow).allow, project=True)


def top_of(place: str) -> str:
    """The package of a place or module."""
    return place.partition(":")[0].partition(".")[0]


def is_standard(top: str) -> bool:
    """Whether a package comes with Python."""
    return top in sys.stdlib_module_names or top in sys.builtin_module_names


def is_project(top: str) -> bool:
    """Whether a package is the user's own: not Python's, not an installed library, not descant."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return True  # the import reports that it is missing
    found = [spec.origin] if spec.has_location else [*(spec.submodule_search_locations or ())]
    return top != "descant" and bool(found) and not any(
        Path(place).resolve().is_relative_to(library) for place in found if place for library in _libraries())


def refusal(place: str, where: str) -> UsageError:
    """The error for what is not permitted, with the remedy; `where` names the field."""
    top = top_of(place)
    if is_standard(top):
        return UsageError(f"{where} {place}: {top} is a module of Python itself, which is refused (a module "
                          "of your own needs another name)")
    return UsageError(f"{where} {place} is code that a file names, imported only if you allow it. If "
                      f'you trust {top}, add --allow {top} to the command (in Python: allow=["{top}"]), or '
                      f'write allow = ["{top}"] into {settings_file()}')


def settings_file() -> Path:
    """The user's own settings."""
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not base.is_absolute():  # as XDG specifies
        try:
            base = Path.home() / ".config"
        except RuntimeError:  # no home; never relative to the current directory
            base = Path("/.config")
    return base / "descant" / "settings.toml"


def _settings() -> tuple[str, ...]:
    """What the user's settings allow."""
    path = settings_file()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    for name in table:
        if name != "allow":
            raise unknown(f"setting in {path}", name, ["allow"])
    listed = table.get("allow", [])
    if not isinstance(listed, list):
        raise UsageError(f'{path}: allow must be a list of packages, such as ["my_package"], not {listed!r}')
    return _checked(listed, f"{path}: allow")


def _checked(allow: Collection[str], where: str) -> tuple[str, ...]:
    entries = (allow,) if isinstance(allow, str) else tuple(allow)
    for entry in entries:
        if not isinstance(entry, str) or not _ENTRY.fullmatch(entry):
            raise UsageError(f"{where} {entry!r} must name a package or a module, such as my_package")
        if is_standard(top_of(entry)):
            raise UsageError(f"{where} {entry}: a module of Python itself cannot be allowed")
    return entries


@cache
def _libraries() -> tuple[Path, ...]:
    """The directories of Python and of installed packages."""
    places = [*site.getsitepackages(), site.getusersitepackages(),
              *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))]
    return tuple(dict.fromkeys(Path(place).resolve() for place in places))
