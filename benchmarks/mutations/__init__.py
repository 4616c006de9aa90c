"""The mutations of `benchmarks.mutate`: one wrong line each, and the tests that are responsible for it."""

from __future__ import annotations

from benchmarks.mutations.hostile import HOSTILE
from benchmarks.mutations.learning import LEARNING
from benchmarks.mutations.mutation import Mutation
from benchmarks.mutations.running import RUNNING

__all__ = ["MUTATIONS", "Mutation"]

MUTATIONS: tuple[Mutation, ...] = (*LEARNING, *RUNNING, *HOSTILE)
