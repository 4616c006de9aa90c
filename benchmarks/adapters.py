"""The memory of a federation of adapters: how often its frozen backbone is there.

    python -m benchmarks.adapters
    python -m benchmarks.adapters --words 36000

Twenty clients, a Transformer of two layers with ten million frozen parameters, LoRA adapters and a head. The
memory is that of the process with the user's own network, before and after a run. Part of the growth is
torch's, for its products; the second command shows how it grows with the backbone.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import descant

LENGTH, WIDTH = 8, 448


def held() -> int:
    """The bytes of memory of this process that are its own."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


def network(words: int) -> torch.nn.Module:
    torch.manual_seed(0)
    base = BertForSequenceClassification(BertConfig(
        vocab_size=words, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=8,
        intermediate_size=4 * WIDTH, max_position_embeddings=LENGTH, num_labels=2))
    lora = LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=16, target_modules=["query", "value"])
    found: torch.nn.Module = get_peft_model(base, lora)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--words", type=int, default=12_000)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # of the libraries
    torch.set_num_threads(1)
    net = network(given.words)
    frozen = sum(p.numel() for p in net.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    rows = 8 * given.clients
    tokens = torch.randint(0, given.words, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    fed = descant.Federation.from_arrays(tokens, tokens[:, 0] % 2, client=torch.arange(rows) % given.clients)
    work = {"local": {"steps": 1}, "batch": 4, "progress": False, "backend": "vectorised", "chunk": 2}
    before = held()
    run = descant.run("ditto", fed, model=net, rounds=given.rounds, **work)
    after = held()
    copies = {p.data_ptr() for module in (run.setup.task.template, run.setup.task._train.module,
                                          run.setup.task._eval.module)
              for p in module.parameters() if not p.requires_grad}
    own = sum(1 for p in run.setup.task.template.parameters() if not p.requires_grad)
    print(json.dumps({
        "clients": given.clients, "frozen": frozen, "trained": trained, "backbone_mb": round(4e-6 * frozen),
        "held_before_mb": round(1e-6 * before), "held_after_mb": round(1e-6 * after),
        "copies_of_the_backbone_in_descant": len(copies) / own}))


if __name__ == "__main__":
    main()
