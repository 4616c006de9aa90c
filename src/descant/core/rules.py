"""The rules that every method keeps to, and what is found against them (`descant.testing`)."""

from __future__ import annotations

from descant.errors import DescantError

CHECKS = {
    "class": "the class tells what it is",
    "table": "a table makes the same method again, and it can be sent to another process",
    "runs": "no function fails in an ordinary round",
    "trees": "states, messages, uploads and models are tensors in NamedTuples",
    "dtype": "real numbers have the type of the run",
    "rows": "what is for a cohort has a row for each of its clients",
    "form": "states and uploads keep their form over clients and rounds",
    "finite": "there is no NaN, not even of a client with one row, or without validation rows",
    "pure": "no function changes what it is given",
    "random": "no function draws from a generator of torch, numpy or Python",
    "repeatable": "the same arguments give the same result",
    "cohort": "what a client is sent does not depend on who else is in the cohort",
    "order": "what the server learns does not depend on the order of the cohort",
    "forgets": "a method that forgets does not look at what a client has kept",
    "sums": "where a mean is all that the server needs, clients can be added up in any groups",
    "newcomer": "what newcomers are sent is made for none of them",
    "test rows": "no model is made from test rows",
    "branch": "there is no Python control flow on the values of tensors",
    "vectorised": "clients that run together come to what they come to alone",
}


class CheckFailed(DescantError, AssertionError):
    """A method does not pass a check."""

    def __init__(self, method: str, check: str, why: str) -> None:
        super().__init__(f"{method} fails the check {check!r} ({CHECKS[check]}): {why}")
        self.check, self.why = check, why


class Unusable(Exception):
    """Nothing can be learned from what would follow."""


class FailureLog:
    """Collects what fails, once for each check."""

    def __init__(self, method: str, skip: frozenset[str], raises: bool) -> None:
        self.method, self.skip, self.raises = method, skip, raises
        self.failures: list[CheckFailed] = []

    def fail(self, check: str, why: str) -> None:
        if check in self.skip or any(failure.check == check for failure in self.failures):
            return
        self.failures.append(CheckFailed(self.method, check, why))
        if self.raises:
            raise self.failures[-1]

    def stop(self, check: str, why: str) -> Unusable:
        self.fail(check, why)
        return Unusable()
