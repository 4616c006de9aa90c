"""A federation of LoRA adapters: a frozen Transformer for all, and each client's own few numbers.

    pip install 'descant[lora]'
    python examples/lora.py [DIR]

The backbone is a small BERT with random weights, so that nothing is downloaded; with
`AutoModelForSequenceClassification.from_pretrained(...)` in its place the rest stays as it is. Only the
adapters and the head are trained, sent and kept: a model of a client is a vector of these. The clients' texts
are made up: the same word means yes to some of them, and no to others.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import descant
from descant.algorithms import Ditto, FedAvg

WORDS, LENGTH, CLIENTS, ROWS = 50, 8, 12, 40


def federation(seed: int = 0) -> descant.Federation:
    """Sentences of word numbers. What the first word means depends on the client's kind."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(5, WORDS, (CLIENTS * ROWS, LENGTH))
    client = np.repeat(np.arange(CLIENTS), ROWS)
    kind = client % 2
    tokens[:, 0] = np.where(rng.random(len(tokens)) < 0.5, 3, 4)
    answer = (tokens[:, 0] == 3 + kind).astype(int)
    return descant.Federation.from_arrays(torch.from_numpy(tokens), answer, client=client)


def backbone(width: int = 64) -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(
        vocab_size=WORDS, hidden_size=width, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=4 * width, max_position_embeddings=LENGTH, num_labels=2))


def network(width: int = 64) -> PeftModel:
    """The frozen backbone with adapters and a head, which are trained."""
    lora = LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=16, target_modules=["query", "value"])
    return get_peft_model(backbone(width), lora)


def main(place: Path, rounds: int = 15) -> dict[str, float]:
    fed, net = federation(), network()
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    print(f"{trained:,} of {sum(p.numel() for p in net.parameters()):,} parameters are trained\n")
    found = {}
    solver = descant.Adam(lr=0.01)
    for method in (FedAvg(solver=solver), Ditto(lam=0.01, solver=solver)):
        run = descant.run(method, federation=fed, model=net, rounds=rounds, local={"epochs": 1}, batch=8)
        found[method.name] = run.summary["best"]["personal"]["test"]["accuracy"]["mean"]
        print(f"{method.name:8} test accuracy {found[method.name]:.3f}")
    adapter = place / "client-0"
    run.personal_model(0).save_pretrained(adapter)  # ordinary files of peft, without the backbone
    print(f"\nthe adapter of client 0: {adapter}")
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/lora"))
