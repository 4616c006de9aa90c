"""Secure aggregation from the command line: options that cannot be, what a client's terminal shows, and who
may sign requests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID
from secure_helpers import Authority

import flower_helpers as flower
from cli_helpers import Result, call
from descant.deploy.backend import Rules
from descant.deploy.transport import Payload, Rejected
from descant.deploy.transport.seals import METHOD, Seal, _text, check_seal
from descant.view.federation_client import _short
from flower_helpers import CLIENTS, DATA, MemoryServer, experiment

DIGITS = """
[data]
dataset = "digits"
partition = "iid"
clients = 4
[model]
name = "mclr"
[algorithm]
name = "fedavg"
[train]
rounds = 1
"""


def refused(result: Result, *words: str) -> None:
    assert result.code == 2, result.out
    for word in words:
        assert word in result.err, result.err
    assert "Traceback" not in result.err


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.toml").write_text(DIGITS)
    return tmp_path


@pytest.mark.parametrize(("options", "words"), [
    (["--threshold", "3"], ["--threshold is for --secure-aggregation"]),
    (["--secure-aggregation", "--threshold", "2"], ["--threshold must be more than half of the 4 clients"]),
    (["--secure-aggregation", "--threshold", "5"], ["at most 4, not 5"]),
    (["--secure-aggregation", "--set", "algorithm.name=cgpfl"], ["cgpfl", "what fits", "fedavg"]),
    (["--secure-aggregation", "--set", "robust.rule=median"], ["[robust]", "one by one", "--max-norm"]),
    (["--secure-aggregation", "--set", 'eval.diagnostics=["coherence"]'], ["eval.diagnostics"]),
    (["--secure-aggregation", "--set", "train.cohort=2"], ["a cohort of 3 clients at least, not 2"]),
])
def test_a_secure_server_that_cannot_be(options: list[str], words: list[str], home: Path) -> None:
    refused(call("server", "digits.toml", "--clients", 4, "--out", "out", "--insecure", *options), *words)
    assert not (home / "out").exists()


def test_a_secure_client_that_cannot_be(home: Path) -> None:
    one = ["client", "--server", "127.0.0.1:9", "--name", "north", "--data", "digits:0", "--insecure"]
    refused(call(*one, "--threshold", 3), "--threshold is for --secure-aggregation")
    refused(call(*one, "--secure-aggregation", "--threshold", 0), "--threshold")


def test_a_clients_certificate_seals_no_request() -> None:
    """Of the same authority, and rightly signed: what is wrong is that it is a client's."""
    authority, payload = Authority(), Payload('{"what": "hello"}', "[]", {})

    def sealed(use: Any) -> Payload:
        one = authority.identity(use)
        return payload._replace(seal=Seal(one.key.sign(_text(payload, 7, {}), METHOD), one.certificate))

    check_seal(sealed(ExtendedKeyUsageOID.SERVER_AUTH), 7, authority.pem)
    with pytest.raises(Rejected, match="signature is not the server's"):
        check_seal(sealed(ExtendedKeyUsageOID.CLIENT_AUTH), 7, authority.pem)


@pytest.mark.thorough
def test_what_a_client_shows_of_shares_and_signatures_is_short(tmp_path: Path) -> None:
    """All facts that leave a client in a round, as its terminal shows them."""
    told = flower.Quiet()
    answers = flower.make_clients(DATA, tmp_path, told)
    flower.federate(experiment("fedavg", train={"rounds": 1}), MemoryServer(answers), tmp_path / "server",
                    rules=Rules(deadline=30, secure=True, threshold=3), alone=False)
    shown = [f"{key} {_short(value)}" for what, _, facts, *_ in told.of("answered") if what == "secure"
             for key, value in facts.items()]
    assert len(shown) > 4 * CLIENTS
    assert max(map(len, shown)) < 300
    assert not any(re.search(r"[A-Za-z0-9+/=]{60}", line) for line in shown)


def test_numbers_and_figures_are_shown_whole() -> None:
    assert _short({"personal": {"accuracy": 0.91239, "loss": 1.0}}) == "(personal (accuracy 0.9124, loss 1))"
    assert _short("a" * 40) == "a" * 40
    assert _short("abcdefgh" * 20) == "abcdefgh... (160 characters)"
