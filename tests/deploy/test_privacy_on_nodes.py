"""[privacy] in a real federation: noise of the operating system, budgets that clients keep, silence."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from descant.core.privacy import gradients
from descant.core.privacy.settings import Privacy
from descant.core.tree import leaves
from descant.deploy import protocol
from descant.deploy.backend import Rules
from descant.deploy.messages import WireMessage
from descant.deploy.privacy import OwnAccount, require_agreed
from descant.deploy.protocol import load_experiment
from descant.deploy.transport import Payload
from descant.engine.protect import protected
from descant.errors import DescantError, UsageError
from descant.experiment import run as runs
from descant.experiment.config import Experiment
from descant.experiment.run import Run, Setup
from descant.theory.accountant import Event, epsilon
from flower_helpers import DATA, MemoryServer, Quiet, experiment, federate, make_clients


def private(method: str = "fedavg", **own: Any) -> Experiment:
    plain = experiment(method, train={"rounds": 2, "local": {"epochs": 1}})
    return dataclasses.replace(plain, privacy=Privacy(**({"noise": 1.0, "sampling": "known"} | own)))


def played(made: Experiment, out: Path, observer: Any = None, **options: Any) -> Run:
    transport = MemoryServer(make_clients(DATA, out / "clients", observer))
    return federate(made, transport, out / "server", **options)


def model_of(run: Run) -> torch.Tensor:
    return torch.cat([leaf.flatten() for _, leaf in leaves(run.snapshot("last").server)])


@pytest.mark.slow
def test_two_federations_with_one_seed_have_other_noise_and_nothing_comes_from_the_stream(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("draw_coarse_normal_", "add_coarse_normal_"):
        monkeypatch.setattr(gradients.random, name, None)  # would fail
    first, second = (model_of(played(private(), tmp_path / name)) for name in ("one", "two"))
    assert not torch.allclose(first, second, atol=1e-3)


@pytest.mark.slow
def test_with_the_stream_in_its_place_it_is_the_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                           ) -> None:
    monkeypatch.setattr(protocol, "protected", lambda *given, secret: protected(*given))
    for sampling in ("known", "poisson"):
        made = private(sampling=sampling, epsilon=None)
        run = played(made, tmp_path / sampling)
        simulated = runs.start(Setup.of(made))
        assert torch.allclose(model_of(run), model_of(simulated), atol=1e-12)
        assert run.history[-1]["epsilon"] == simulated.history[-1]["epsilon"]


@pytest.mark.slow
def test_losses_and_figures_stay_with_the_clients(tmp_path: Path) -> None:
    seen = Quiet()
    run = played(private("ditto"), tmp_path, seen)
    assert all(row["loss"] is None and "personal" not in row for row in run.history)
    assert run.summary["last"] is None
    assert not any(json.loads((tmp_path / "server" / "clients.json").read_text()).values())
    assert "score" not in {what for what, *_ in seen.of("working")}
    told = played(private("ditto", figures="told"), tmp_path / "told")
    assert told.summary["last"] is not None
    assert all(math.isfinite(row["loss"]) for row in told.history)


@pytest.mark.thorough
def test_a_client_keeps_its_own_budget_whatever_the_server_asks(tmp_path: Path) -> None:
    made = private(epsilon=4.0, noise=1.0)  # one round alone has 4.38
    account = OwnAccount.of(Setup.of(private()).work(), made.train, private(epsilon=4.0, noise=1.5).privacy
                            or Privacy(noise=1.0), 0)
    assert account.spent(1) < account.spent(2) < account.spent(3)
    account.require(1, 1)
    with pytest.raises(UsageError, match="once more would exceed"):
        account.require(3, 1)
    run = played(made, tmp_path)
    assert run.rounds == 0
    assert run.summary["stopped"] == "budget"


@pytest.mark.thorough
def test_a_reply_that_is_asked_for_again_counts_again(tmp_path: Path) -> None:
    """Client 0 works twice for the first round, as for a server that was killed after it had the reply, with
    other noise each time. The budget is for two: in the second round it is without this client."""
    answers, uploads = make_clients(DATA, tmp_path / "clients"), []
    once = answers["0"]

    def twice(payload: Payload) -> Any:
        asked = WireMessage.decode(payload).facts
        if (asked.get("job"), asked.get("number")) == ("local", 1):
            uploads.append(once(payload))
        uploads.append(once(payload))
        return uploads[-1]

    answers["0"] = twice
    run = federate(private(epsilon=4.0, noise=1.6), MemoryServer(answers), tmp_path / "server")
    assert run.rounds == 2
    [(name, why)] = run.history[1]["rejections"].items()
    assert name == "0"
    assert "this client has trained 2 times, and once more would exceed privacy.epsilon = 4" in why
    first, again = [packed.data for packed in (WireMessage.decode(reply).tensors.get("value.upload.theta")
                                               for reply in uploads) if packed is not None]
    assert first != again


@pytest.mark.parametrize("unit", ["record", "client"])
@pytest.mark.thorough
def test_a_new_federation_of_the_same_experiment_has_no_new_budget(unit: str, tmp_path: Path) -> None:
    """A server may begin as many as it likes, with other clients or other names: `--expect` is about the
    experiment alone. What was spent before counts; of another experiment, it has a ledger of its own."""
    made = private(unit=unit, epsilon=4.0, noise=1.6)
    assert played(made, tmp_path).rounds == 2
    fewer = {name: DATA[name] for name in "012"}

    def again(wanted: Experiment) -> Run:
        answers = make_clients(fewer, tmp_path / "clients", expected=wanted)
        return federate(wanted, MemoryServer(answers), tmp_path / f"server of {wanted.train.seed}")

    with pytest.raises(DescantError, match=r"once more would exceed|one more would exceed"):
        again(made)
    other = dataclasses.replace(made, train=dataclasses.replace(made.train, seed=7))
    assert again(other).rounds == 2


@pytest.mark.parametrize(("sums", "rounds"), [(2, 1), (3, 2)])
@pytest.mark.thorough
def test_a_sum_that_was_told_before_a_kill_is_counted(sums: int, rounds: int, tmp_path: Path) -> None:
    """The server is killed while clients score the model of round 2, which is not saved: they have seen two
    sums, and see a third one, with other noise, if the budget has room for it."""
    spent = epsilon(Event(1.6, 1.0, sums), 1e-5)
    made = private(unit="client", epsilon=spent + 0.01, noise=1.6, figures="told")
    answers, models = make_clients(DATA, tmp_path / "clients"), []
    once = answers["0"]

    def killed(payload: Payload) -> Any:
        asked = WireMessage.decode(payload)
        if asked.facts.get("job") == "score":
            models.append(asked.tensors["shared.model.theta"].data)
            if len(models) == 1:
                raise KeyboardInterrupt
        return once(payload)

    answers["0"] = killed
    with pytest.raises(KeyboardInterrupt):
        federate(made, MemoryServer(answers), tmp_path / "server")
    run = federate(made, MemoryServer(answers), tmp_path / "server")
    assert (run.rounds, len({*models})) == (rounds, rounds)
    assert run.summary["stopped"] == ("budget" if rounds == 1 else None)
    written = json.loads((tmp_path / "server" / "run" / "summary.json").read_text())
    for found in (run, runs.load(tmp_path / "server" / "run", run.setup)):
        assert found.summary["privacy"]["epsilon"] == written["privacy"]["epsilon"] == spent


@pytest.mark.parametrize(("own", "train", "words"), [
    ({"noise": None, "epsilon": 4.0}, {}, "part of what is agreed"),
    ({"unit": "client", "sampling": "poisson"}, {"cohort": 2}, "hide nobody"),
    ({}, {"patience": 2}, "patience"),
    ({"scale": "client"}, {}, "one row is in what all others add")])
def test_what_clients_could_not_check_is_refused(own: dict[str, Any], train: dict[str, Any], words: str,
                                                 tmp_path: Path) -> None:
    data, own = {key: own[key] for key in own if key == "scale"}, {key: own[key] for key in own
                                                                     if key != "scale"}
    made = experiment("fedavg", train=train)
    made = dataclasses.replace(made, privacy=private(**own).privacy, data=dataclasses.replace(
        made.data, preprocess=dataclasses.replace(made.data.preprocess, **data)))
    with pytest.raises(UsageError, match=words):
        require_agreed(made)
    with pytest.raises(UsageError, match=words):
        federate(made, MemoryServer({}), tmp_path, clients=2, rules=Rules())
    file = tmp_path / "experiment.toml"
    file.write_text('[data]\ndataset = "digits"\n[algorithm]\nname = "fedavg"\n[privacy]\nepsilon = 3.0\n')
    with pytest.raises(UsageError, match="part of what is agreed"):
        load_experiment(file, [])
