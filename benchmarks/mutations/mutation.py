"""What a mutation is, and the tests that several have in common."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    file: str  # in src/descant
    old: str  # what is there, once
    new: str  # what is put in its place
    tests: tuple[str, ...]  # what pytest is given
    why: str  # what is wrong about it
    mark: str = "not slow"  # of these tests


METHODS = ("tests/algorithms/test_methods.py", "tests/algorithms/test_baselines.py")
CONFORMANCE = ("tests/algorithms/test_conformance.py",)
COMPOSITION = ("tests/algorithms/test_composition.py",)
VOCABULARY = ("tests/core/test_vocabulary.py",)
FUSED = ("tests/priors/test_fused.py",)
SCORED = ("tests/engine/test_scored_together.py",)
PLAN = ("tests/engine/test_plans.py",)
TRAINING = ("tests/experiment/test_training.py",)
RUNS = ("tests/experiment/test_runs.py", "tests/engine/test_faults.py")
ROBUST = ("tests/core/test_robust.py",)
GUARD = ("tests/engine/test_attack_and_guard.py",)
OWN = ("tests/experiment/test_own_methods.py",)
CHECKS = ("tests/algorithms/test_check_algorithm.py",)


def responsible(name: str) -> tuple[str, ...]:
    return (f"tests/algorithms/test_{name}.py",)
