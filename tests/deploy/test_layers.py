"""Exported networks of usual layers are made again from a description: no code is needed, and none runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import descant
from descant.core.sample import SampleFormat
from descant.core.sealed import sealed_table, unsealed_table
from descant.deploy.export import export_model, load_model, predictions
from descant.deploy.export.layers import LAYERS, described, rebuilt_layers
from descant.deploy.export.manifest import read_manifest
from descant.errors import DescantError, UsageError
from descant.models import MODELS, NetworkSpec, OwnModel
from module_zoo import NormReLU

FEDERATION = descant.Federation.from_arrays(
    np.random.default_rng(0).standard_normal((24, 6)).astype(np.float32), np.arange(24) % 3,
    np.repeat(np.arange(3), 8))


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.LeakyReLU(0.3), nn.Dropout(0.2),
                         nn.Sequential(nn.Linear(5, 4, bias=False), nn.LayerNorm(4), nn.GELU("tanh")),
                         nn.Linear(4, 3))


def exported(module: nn.Module, to: Path) -> tuple[Any, Path]:
    run = descant.run("fedavg", federation=FEDERATION, model=module, rounds=1, batch=4, backend="loop",
                      local={"steps": 1})
    return run, export_model(run, 0, to)


def again(module: nn.Module, sample: SampleFormat) -> nn.Module:
    """What is made of the description, as JSON, and the tensors."""
    tensors = dict(module.state_dict())
    made = rebuilt_layers(json.loads(json.dumps(described(module))), tensors, sample, torch.float32, "")
    made.load_state_dict(tensors)
    return made.eval()


SAMPLES = {"lstm": SampleFormat((7,), "int64", (), "int64", 3, 11),
           "har_cnn": SampleFormat((9, 128), classes=6),
           "fedbn_alexnet": SampleFormat((3, 63, 63), classes=4)}


@pytest.mark.parametrize("name", [name for name, spec in MODELS.items() if issubclass(spec, NetworkSpec)])
def test_the_networks_of_descant(name: str) -> None:
    sample = SAMPLES.get(name, SampleFormat((3, 32, 32), classes=10))
    spec = MODELS[name]()
    assert isinstance(spec, NetworkSpec)
    module = spec.network(sample).eval()
    x = torch.rand(2, *sample.shape) if sample.tokens is None else torch.randint(11, (2, 7))
    with torch.no_grad():
        assert torch.equal(again(module, sample)(x), module(x))


@pytest.mark.parametrize("module", [
    plain(),
    nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 3, padding="same"), nn.PReLU(4),
                  nn.MaxPool1d(2, 1), nn.Flatten(), nn.Softplus(2.0), nn.LogSoftmax(1)),
    nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, (1, 2), groups=1, bias=False),
                  nn.GroupNorm(2, 4), nn.ELU(0.5), nn.AdaptiveAvgPool2d((1, 2)), nn.Flatten(2),
                  nn.InstanceNorm1d(4), nn.Flatten()),
])
def test_networks_of_usual_layers(module: nn.Module) -> None:
    x = torch.rand(4, 6)
    assert torch.equal(again(module.eval(), SampleFormat((6,)))(x), module(x))


def test_a_layer_without_parameters_or_with_defaults_alone() -> None:
    for kind in LAYERS:
        assert kind.__name__.isidentifier()
    assert described(nn.Sequential()) == {"layer": "Sequential", "parts": []}


def test_a_python_object_needs_no_code(tmp_path: Path) -> None:
    run, place = exported(plain(), tmp_path)
    module = load_model(place)
    x = run.setup.federation.x
    assert torch.equal(module(x), run.personal_model(0)(x))
    assert isinstance(module, nn.Sequential)
    np.savez(tmp_path / "rows.npz", x=FEDERATION.x.numpy())
    assert torch.equal(predictions(place, tmp_path / "rows.npz").outputs, module(x))
    np.savez(tmp_path / "rows.npz", x=np.full((2, 6), 1e39))
    with pytest.raises(UsageError, match=r"rows\.npz: x\[0\]: 1e\+39 is too large for float32: correct it"):
        predictions(place, tmp_path / "rows.npz")


def patched() -> nn.Module:
    module = plain()
    module[2].forward = torch.sin  # type: ignore[method-assign]
    return module


def hooked() -> nn.Module:
    module = plain()
    module[2].register_forward_hook(lambda module, inputs, output: 2 * output)
    return module


@pytest.mark.parametrize("module", [patched(), hooked(), nn.Sequential(nn.Linear(6, 3), NormReLU(3)),
                                    nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))])
def test_what_is_not_known_is_not_described(module: nn.Module) -> None:
    assert described(module) is None


def test_another_python_object_is_passed_again(tmp_path: Path) -> None:
    _, place = exported(nn.Sequential(nn.Linear(6, 3), NormReLU(3)), tmp_path)
    assert read_manifest(place).layers is None
    with pytest.raises(UsageError, match=r"was a Python object, which is not in the file: pass it again"):
        load_model(place)


def test_code_that_is_named_is_not_needed(tmp_path: Path) -> None:
    run = descant.run("fedavg", federation=FEDERATION, model=OwnModel(f"{__name__}:plain"), rounds=1, batch=4,
                      backend="loop", local={"steps": 1})
    place = export_model(run, 0, tmp_path)
    assert torch.equal(load_model(place)(FEDERATION.x), run.personal_model(0)(FEDERATION.x))


# -- hostile descriptions ------------------------------------------------------------------------------------

LINEAR = {"layer": "Linear", "in_features": 6, "out_features": 3, "bias": True}


def parts(*layers: Any) -> dict[str, Any]:
    return {"layer": "Sequential", "parts": [[str(k), layer] for k, layer in enumerate(layers)]}


def nested(depth: int) -> Any:
    return LINEAR if not depth else parts(nested(depth - 1))


@pytest.mark.parametrize(("layers", "words"), [
    (parts(LINEAR | {"out_features": 10**9, "in_features": 10**9}), "0.bias has the shape (3,), expected"),
    (parts(LINEAR, {"layer": "AdaptiveAvgPool1d", "output_size": 10**9}), "AdaptiveAvgPool1d makes"),
    (parts(LINEAR | {"out_features": -3}), "cannot be made"),
    (parts(LINEAR | {"in_features": "6"}), "cannot be made"),
    (parts(LINEAR | {"device": "cuda"}), "is described by in_features, out_features, bias, not by"),
    (parts({"layer": "Linear"}), "is described by in_features, out_features, bias, not by nothing"),
    (parts({"layer": "os:system"}), "describes no layer that is known"),
    (parts({"layer": []}), "cannot be made"), (parts(3), "describes no layer"), ({}, "describes no layer"),
    ({"layer": "Sequential", "parts": 3}, "cannot be made"),
    ({"layer": "Sequential", "parts": [["0", LINEAR], ["0", LINEAR]]}, "has the parts 0, 0"),
    ({"layer": "Sequential", "parts": [["a.b", LINEAR]]}, "cannot be made"),
    ({"layer": "Sequential", "parts": [["forward", LINEAR]]}, "cannot be made"),
    ({"layer": "Network", "parts": [["head", LINEAR]]}, "has the parts head"),
    (parts(LINEAR, {"layer": "GroupNorm", "num_groups": 0, "num_channels": 3, "eps": 1, "affine": False}),
     "cannot be made"),
    (nested(60), "describes no layer that is known"),
])
def test_a_description_is_bounded_by_its_tensors(tmp_path: Path, layers: Any, words: str) -> None:
    _, place = exported(nn.Sequential(nn.Linear(6, 3)), tmp_path)
    about = unsealed_table(json.loads((place / "model.json").read_text()))
    (place / "model.json").write_text(json.dumps(sealed_table(about | {"layers": layers})))
    with pytest.raises(DescantError) as error:
        load_model(place)
    assert str(place) in str(error.value)
    assert words in str(error.value)


def test_a_named_model_is_bounded_by_its_tensors(tmp_path: Path) -> None:
    run = descant.run("fedavg", federation=FEDERATION, model="mclr", rounds=1, batch=4, local={"steps": 1})
    place = export_model(run, 0, tmp_path)
    about = unsealed_table(json.loads((place / "model.json").read_text()))
    old = {name: value for name, value in about.items() if name != "layers"}  # as older versions wrote it
    (place / "model.json").write_text(json.dumps(old))
    assert torch.equal(load_model(place)(FEDERATION.x), run.personal_model(0)(FEDERATION.x))
    for shape, words in (([2**20, 2**20], r"its layers are not those of its tensors: head\.weight"),
                         ([2**30, 2**30], "the model cannot be made")):
        (place / "model.json").write_text(json.dumps(old | {"input": about["input"] | {"shape": shape}}))
        with pytest.raises(UsageError, match=words):
            load_model(place)
    (place / "model.json").write_text(json.dumps(old | {"input": about["input"] | {"shape": [2.5]}}))
    with pytest.raises(DescantError, match="input is"):
        load_model(place)
