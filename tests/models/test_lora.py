"""Transformers of Hugging Face with LoRA adapters: a frozen backbone, once, and a vector of the rest."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import descant
from descant.models import make_task

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # theirs


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "lora.py"
    spec = importlib.util.spec_from_file_location("lora_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lora_example"] = module
    spec.loader.exec_module(module)
    return module


def test_only_adapters_are_in_the_vector_and_the_backbone_is_there_once(example: ModuleType) -> None:
    net, fed = example.network(), example.federation()
    task = make_task(net, fed)
    trained = [p for p in net.parameters() if p.requires_grad]
    assert task.dim == sum(p.numel() for p in trained) < 0.05 * sum(p.numel() for p in net.parameters())
    frozen = [{name: p.data_ptr() for name, p in module.named_parameters() if not p.requires_grad}
              for module in (task._module, task._train.module, task._eval.module)]
    assert frozen[0] == frozen[1] == frozen[2]
    own = {p.data_ptr() for p in net.parameters()}
    assert not own & {*frozen[0].values()}  # what the user does to the module changes nothing here


def test_adapters_train_together_as_they_do_alone(example: ModuleType) -> None:
    """Attention drops by the stream of each client, so that vmap and the loop agree."""
    net, fed = example.network(), example.federation()
    runs = [descant.run("ditto", federation=fed, model=net, rounds=1, local={"steps": 2}, batch=4,
                        dtype="float64", backend=backend) for backend in ("vectorised", "loop")]
    assert runs[0].setup.task.alone is None
    for client in range(fed.population):
        a, b = (run.personal(client).theta for run in runs)
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_an_adapter_is_exported_as_one_of_peft(example: ModuleType, tmp_path: Path) -> None:
    from peft import PeftModel

    run = descant.run("ditto", federation=example.federation(), model=example.network(), rounds=1,
                      local={"steps": 2}, batch=4, backend="vectorised")
    run.personal_model(0).save_pretrained(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 200_000
    loaded = PeftModel.from_pretrained(example.backbone(), tmp_path).eval()
    tokens = run.setup.federation.x[:4]
    assert torch.equal(loaded(tokens).logits, run.personal_model(0)(tokens).logits)


class Features(torch.nn.Module):
    """A frozen Transformer as a feature extractor: what it says of the first token, without dropout."""

    rows = 0

    def __init__(self, backbone: torch.nn.Module) -> None:
        super().__init__()
        self.backbone = backbone.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        Features.rows += len(tokens)
        found: torch.Tensor = self.backbone.eval()(tokens).last_hidden_state[:, 0]
        return found


def test_a_frozen_transformer_runs_once_for_each_row(example: ModuleType) -> None:
    net = torch.nn.Sequential(Features(example.backbone().bert), torch.nn.Linear(64, 2))
    passed = []
    for rounds in (1, 3):
        Features.rows = 0
        descant.run("ditto", federation=example.federation(), model=net, rounds=rounds, local={"steps": 2},
                    batch=4, backend="vectorised")
        passed.append(Features.rows)
    assert passed[0] == passed[1]


def test_the_example_shows_what_adapters_of_ones_own_gain(example: ModuleType, tmp_path: Path) -> None:
    found = example.main(tmp_path)
    assert found["ditto"] > found["fedavg"] + 0.2  # one model cannot serve both kinds of clients
