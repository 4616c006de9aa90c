"""Writes that Ctrl-C does not tear."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from descant.core.files import uninterrupted


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_waits_for_the_write() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    written = []

    def write() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            written.append("whole")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert written == ["whole"]


def test_a_worker_that_ignores_it_goes_on() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
