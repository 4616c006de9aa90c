"""A model card that the Hub's own library reads, and an Optuna study that its dashboard opens."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

import descant
from cli_helpers import call
from descant.deploy.export.export import export_model
from descant.deploy.export.network import load_model

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(90, 4)).astype("float32")


@pytest.fixture(scope="module")
def run() -> descant.Run:
    federation = descant.Federation.from_arrays(
        ROWS, (ROWS[:, 0] > 0).astype(int), np.array(["north: 1", "south", "east"])[np.arange(90) % 3],
        class_names=["no", "yes"], scale="client")
    return descant.run("ditto", federation=federation, rounds=3, backend="vectorised", eval={"every": 1})


@pytest.mark.slow
def test_the_hub_reads_the_card(run, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    place = export_model(run, "north: 1", tmp_path, card=True)
    card = hub.ModelCard.load(place / "README.md")
    found = {result.metric_type: result.metric_value for result in card.data.eval_results}
    client = run.setup.federation.names.index("north: 1")
    rows = torch.from_numpy(run.setup.federation.test[client])
    module = load_model(place)
    right = module(run.setup.federation.x[rows]).argmax(1) == run.setup.federation.y[rows]
    assert found["accuracy"] == pytest.approx(float(right.float().mean()))
    assert card.data.pipeline_tag == "tabular-classification"
    assert "ditto" in card.data.tags
    assert card.data.eval_results[0].dataset_name == "test rows of north: 1"
    config = json.loads((place / "config.json").read_text())
    assert config["id2label"] == {"0": "no", "1": "yes"}
    assert not any(f"{value:.4f}" in card.content for value in ROWS.ravel().tolist())
    with safe_open(place / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.slow
def test_a_shared_model_has_no_figures_of_a_client(run, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    card = hub.ModelCard.load(export_model(run, None, tmp_path, card=True) / "README.md")
    assert card.data.eval_results is None
    assert "The model for all clients" in card.text
    assert not (export_model(run, None, tmp_path / "plain") / "README.md").exists()


@pytest.mark.slow
def test_the_command_writes_the_same(tmp_path):
    assert call("run", "--set", "train.rounds=2", "--out", tmp_path / "run").code == 0
    done = call("export", tmp_path / "run", "--client", "3", "--to", tmp_path / "typed", "--card")
    assert done.code == 0, done
    made = export_model(descant.load(tmp_path / "run"), "3", tmp_path / "python", card=True)
    names = ("README.md", "config.json", "model.json", "model.safetensors")
    assert {path.name for path in made.iterdir()} == set(names)
    for name in names:
        assert (made / name).read_bytes() == (tmp_path / "typed" / "3" / name).read_bytes()


NOISED, PLAIN = "with the same noise: it is protected", "without noise: it is not protected"
COMMON, SHARED = "predicts with: it is protected", "made of what has noise: it is protected"
FIRST, LAST = 0, -1  # of the clients: the last one takes no part


@pytest.mark.parametrize(("method", "unit", "client", "words"), [
    ("ditto", "record", FIRST, NOISED), ("ditto", "client", FIRST, PLAIN), ("ditto", "record", None, SHARED),
    ("ditto", "client", None, SHARED), ("ditto", "record", LAST, PLAIN),
    ("localtrain", "record", FIRST, PLAIN), ("fedavg", "client", FIRST, COMMON),
    (descant.algorithms.FedAvg(finetune=2), "record", FIRST, PLAIN)])
@pytest.mark.filterwarnings("ignore:each sum is of about 3 clients")
@pytest.mark.thorough
def test_the_card_says_what_privacy_protects(method, unit, client, words, tmp_path):
    federation = descant.Federation.from_arrays(ROWS, (ROWS[:, 0] > 0).astype(int), np.arange(90) % 4,
                                                unseen=1)
    client = None if client is None else federation.names[client]
    run = descant.run(method, federation=federation, rounds=2, backend="vectorised",
                      privacy={"unit": unit, "noise": 2.0, "delta": 1e-3})
    text = (export_model(run, client, tmp_path, card=True) / "README.md").read_text()
    said = text.partition("## Privacy\n")[2].partition("\n## ")[0]
    spent = run.summary["privacy"]
    assert f'(`unit = "{unit}"`)' in said
    assert f"epsilon = {spent['epsilon']:.3g} at delta = 0.001." in said
    assert [each for each in (NOISED, PLAIN, COMMON, SHARED) if each in said] == [words]
    assert "The run was a simulation." in said
    assert ("The figures of test rows have no noise." in said) == (client is not None)


@pytest.mark.thorough
def test_without_privacy_the_card_claims_none(run, tmp_path):
    assert "epsilon" not in (export_model(run, "south", tmp_path, card=True) / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_optunas_dashboard_opens_the_study(tmp_path):
    """The dashboard's own functions find the journal, the study and its trials."""
    dashboard = pytest.importorskip("optuna_dashboard._cli")
    from wsgiref.util import setup_testing_defaults

    from optuna_dashboard import wsgi

    federation = descant.federation("digits", partition="classes", clients=3)
    found = descant.tune(federation, 3, tmp_path / "search", algorithm="fedavg", rounds=2)
    storage = dashboard.get_storage(str(tmp_path / "search" / "journal.log"), storage_class=None)

    def asked(path: str) -> dict:
        environment: dict = {}
        setup_testing_defaults(environment)
        answer = wsgi(storage)(environment | {"PATH_INFO": path}, lambda status, *_: seen.append(status))
        return json.loads(b"".join(answer))

    seen: list[str] = []
    [study] = asked("/api/studies")["study_summaries"]
    trials = asked(f"/api/studies/{study['study_id']}")["trials"]
    assert seen == ["200 OK"] * 2
    assert study["study_name"] == "descant"
    assert next(trial["values"] for trial in trials if trial["state"] == "Complete") is not None
    assert len(trials) == len(found.table())
