"""What is drawn: values that no field expects, tables with some of them, and bytes that are changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

from hypothesis import strategies as st

WORDS = st.sampled_from(["", " ", "a", "\x00", "a/b", "../..", "~", "~nobody/x", "/", "nan", "inf",
                         "1e400", "ü", "\u2028", "\ud7ff", "a:b", "os:system", "x" * 5000, "-1", "number",
                         "name", "%s", "{}"])
INTEGERS = st.one_of(st.integers(-3, 70), st.sampled_from(
    [2**31, 2**31 - 1, 2**63 - 1, -2**63, 10**9, 10**18]))
HUGE = st.sampled_from([2**63, 10**309, -10**309, 10**4000])
FLOATS = st.one_of(st.floats(), st.sampled_from([1e308, 1e39, -1e39, 5e-324]))
PLAIN = st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, WORDS, st.text(max_size=8))
VALUES: st.SearchStrategy[Any] = st.recursive(
    PLAIN, lambda inner: st.one_of(st.lists(inner, max_size=3),
                                   st.dictionaries(st.one_of(WORDS, st.text(max_size=4)), inner, max_size=3)),
    max_leaves=5)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all entries of tables and lists."""
    items = (value.items() if isinstance(value, Mapping) else
             enumerate(value) if isinstance(value, list) else ())
    return [found for key, inner in items for found in ((*path, key), *places(inner, (*path, key)))]


@st.composite
def changed_tables(draw: st.DrawFn, tables: list[dict[str, Any]], values: st.SearchStrategy[Any] = VALUES
                   ) -> dict[str, Any]:
    """One of the tables in which some entries are replaced, removed or added."""
    table = copy.deepcopy(draw(st.sampled_from(tables)))
    for _ in range(draw(st.integers(0, 3))):
        if not (found := places(table)):
            break
        *way, last = draw(st.sampled_from(found))
        inner: Any = table
        for key in way:
            inner = inner[key]
        action = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if action == "remove":
            del inner[last]
        elif action == "add" and isinstance(inner, dict):
            inner[draw(st.one_of(WORDS, st.text(max_size=5)))] = draw(values)
        else:
            inner[last] = draw(values)
    return table


class Change(NamedTuple):
    """A change of some bytes; `place` and `length` are shares of the whole."""

    kind: str
    place: float
    length: float
    data: bytes

    def of(self, whole: bytes) -> bytes:
        start = int(self.place * len(whole))
        end = start + max(1, int(self.length * (len(whole) - start)))
        if self.kind == "flip" and whole:
            start = min(start, len(whole) - 1)
            bit = self.data[0] % 8 if self.data else 0
            return whole[:start] + bytes([whole[start] ^ 1 << bit]) + whole[start + 1 :]
        return {"cut": whole[:start], "remove": whole[:start] + whole[end:],
                "zero": whole[:start] + bytes(min(end, len(whole)) - start) + whole[end:],
                "repeat": whole[:end] + whole[start:],
                "insert": whole[:start] + self.data + whole[start:],
                "replace": self.data, "flip": whole,
                "overwrite": whole[:start] + self.data + whole[start + len(self.data) :]}[self.kind]


CHANGES = st.builds(
    Change, st.sampled_from(["flip"] * 6 + ["overwrite"] * 4
                            + ["cut", "remove", "zero", "repeat", "insert", "replace"]),
    st.floats(0, 1, exclude_max=True), st.one_of(st.just(0.0), st.floats(0, 1)),
    st.one_of(st.binary(max_size=8),
              st.sampled_from([b"\xff" * 8, bytes(8), b"\xff\xff\xff\x7f", b'"', b"\n"])))
