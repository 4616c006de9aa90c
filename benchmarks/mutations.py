"""The mutations of `benchmarks.mutate`: one wrong line each, and the tests that are responsible for it."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    file: str  # in src/descant
    old: str  # what is there, once
    new: str  # what is put in its place
    tests: tuple[str, ...]  # what pytest is given
    why: str  # what is wrong about it


MUTATIONS: tuple[Mutation, ...] = ()
