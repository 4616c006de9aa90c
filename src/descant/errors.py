"""The two kinds of failure a user meets, both with a message that says what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONG = 200  # characters of a name that is repeated
COMPARED = 1000  # names among which a near one is looked for


class DescantError(Exception):
    """Something went wrong that the user can act on (exit code 1)."""


class UsageError(DescantError, ValueError):
    """The request itself is wrong: a field, a name, a value (exit code 2)."""


def unknown(kind: str, name: object, known: Iterable[str]) -> UsageError:
    """The error for a name that does not exist, with the nearest one that does."""
    names = sorted({*known})
    near = difflib.get_close_matches(str(name)[:LONG], names[:COMPARED], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    more = f" and {len(names) - COMPARED:,} more" if len(names) > COMPARED else ""
    listed = ", ".join(names[:COMPARED]) + more
    return UsageError(f"unknown {kind} {name!r:.{LONG}}: {hint}known are {listed or 'none'}")


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one(value: object) -> str:
    """What a value is, with its article: "a list", "an int"."""
    name = type(value).__name__
    is_vowel = name[0] in "aeioAEIO" or name == "ndarray"
    return f"{'an' if is_vowel else 'a'} {name}"
