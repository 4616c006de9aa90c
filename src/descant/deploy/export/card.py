"""A model as the Hugging Face Hub shows it: README.md, a model card, and config.json.

The card says what the model is, how it was made and how to use it. It has figures, and no row of any data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from descant.core.metric import figure, title
from descant.core.tree import leaves
from descant.deploy.export.manifest import Manifest
from descant.engine.personal import personal_model
from descant.experiment.run import Run, Which

CARD, CONFIG = "README.md", "config.json"
NAMES = {"mse": "mse", "r2": "r_squared", "auroc": "roc_auc"}  # of metrics on the Hub, where they differ


def test_figures(run: Run, client: int | None, which: Which) -> dict[str, float]:
    """A client's figures on its own test rows; none of the global model, which belongs to nobody."""
    if client is None:
        return {}
    scored = personal_model(run.work, run.snapshot(which), client, score=True).personal.test
    task = run.setup.task
    if not float(scored[0]):  # no test rows
        return {}
    return dict(zip(task.metric_names, task.figures(scored).tolist(), strict=True))


def privacy_words(run: Run, client: int | None, which: Which) -> str | None:
    """What [privacy] of the run says of a client's model (None: of the global model), as docs/privacy.md has
    it; None without."""
    if (account := run.account) is None:
        return None
    spent, whose = run.summary["privacy"], client is not None and run.setup.federation.names[client]
    is_record = spent["unit"] == "record"
    unit = "every training row of a client" if is_record else "a client with all its rows"
    said = [f'Protected is {unit} (`unit = "{spent["unit"]}"`).',
            f"The run reached epsilon = {spent['epsilon']:.3g} at delta = {spent['delta']:g}."]
    if client is None:
        said.append("This model is made of what has noise: it is protected.")
    elif _is_global(run, client, which):
        said.append(f"This is the model for all clients, which {whose} predicts with: it is protected.")
    elif is_record and not account.queries.nothing and not _is_tuned(run, client, which):
        said.append(f"This model was trained on the rows of {whose} with the same noise: it is protected.")
    else:
        said.append(f"This model was trained on the rows of {whose} without noise: it is not protected, and "
                    "whoever gets it learns of these rows.")
    if not run.setup.federation.is_remote:
        said.append("The run was a simulation. Its noise follows from its seed, and protects nobody: epsilon "
                    "is what these settings claim where noise and coins are secret.")
    return "\n".join(said)


def _is_global(run: Run, client: int, which: Which) -> bool:
    """Whether a client predicts with the model for all."""
    shared = run.work.algorithm.global_model(run.snapshot(which).server)
    if shared is None:
        return False
    own, common = (dict(leaves(model)) for model in (run.personal(client, which), shared))
    return own.keys() == common.keys() and all(torch.equal(own[name], common[name]) for name in own)


def _is_tuned(run: Run, client: int, which: Which) -> bool:
    """Whether a client's model is trained after the rounds, where rows are not protected."""
    method, store = run.work.algorithm, run.snapshot(which).store
    tunes = method.trains_to_personalize and method.personal_steps() != 0
    return tunes or not bool(store.took_part(np.array([client]))[0])


def card_files(manifest: Manifest, name: str, figures: Mapping[str, float], privacy: str | None = None
               ) -> dict[str, bytes]:
    """Both files. `privacy`: what there is to say of it."""
    front = json.dumps(_front(manifest, name, figures), indent=1, ensure_ascii=False)  # JSON is YAML
    config = json.dumps(_config(manifest), indent=1, ensure_ascii=False)
    return {CARD: f"---\n{front}\n---\n{_text(manifest, name, figures, privacy)}".encode(),
            CONFIG: f"{config}\n".encode()}


def _kind(manifest: Manifest) -> str:
    """The task, as the Hub calls it."""
    if manifest.input.tokens is not None:
        return "text-classification"
    if len(manifest.input.shape) == 3 and manifest.classes is not None:
        return "image-classification"
    return "tabular-regression" if manifest.classes is None else "tabular-classification"


def _front(manifest: Manifest, name: str, figures: Mapping[str, float]) -> dict[str, Any]:
    method = manifest.algorithm["name"]
    table: dict[str, Any] = {
        "library_name": "descant", "pipeline_tag": _kind(manifest),
        "tags": ["descant", "pytorch", "federated-learning", "personalized-federated-learning", method]}
    if not figures:
        return table
    result = {"task": {"type": _kind(manifest)},
              "dataset": {"type": "private", "name": f"test rows of {name}"},
              "metrics": [{"type": NAMES.get(metric, metric), "name": f"test {title(metric)}", "value": value}
                          for metric, value in figures.items()]}
    return table | {"model-index": [{"name": f"{method} for {name}", "results": [result]}]}


def _config(manifest: Manifest) -> dict[str, Any]:
    labels = {} if manifest.classes is None else {
        "id2label": {str(k): label for k, label in enumerate(manifest.classes)},
        "label2id": {label: k for k, label in enumerate(manifest.classes)}}
    return {"model_type": "descant", "torch_dtype": manifest.dtype, "model": manifest.model,
            "input": {"shape": [*manifest.input.shape], "dtype": manifest.input.dtype,
                      "tokens": manifest.input.tokens},
            "outputs": manifest.outputs, "descant_version": manifest.descant} | labels


def _text(manifest: Manifest, name: str, figures: Mapping[str, float], privacy: str | None) -> str:
    method, shape = manifest.algorithm["name"], " x ".join(map(str, manifest.input.shape)) or "1"
    whose = ("The model for all clients" if manifest.client is None else
             f"The model of {name}, which took no part in the training" if manifest.newcomer else
             f"The personal model of {name}")
    target = ("a real number" if manifest.classes is None else
              f"one of {len(manifest.classes)} classes: {', '.join(manifest.classes[:20])}"
              f"{', ...' if len(manifest.classes) > 20 else ''}")
    rows = "".join(f"| {title(metric)} | {figure(metric, value)} |\n" for metric, value in figures.items())
    table = f"\n## Figures\n\nOn test rows of {name}, which were not trained on.\n\n| | |\n|---|---|\n{rows}"
    bare = "\nThe figures of test rows have no noise." if figures else ""
    protection = "" if privacy is None else f"\n## Privacy\n\n{privacy}{bare}\n"
    scaled = ("" if not manifest.preprocess else
              " Rows are completed and scaled with constants in model.json before the network sees them.")
    notes = "".join(f"\n- {note}" for note in manifest.notes)
    return f"""# {method} for {name}

{whose}, from a federation that was trained with [descant](https://pypi.org/project/descant/)
({method}, round {manifest.round}). Clients keep their data; what they exchanged are models.

- Input: samples of {shape} ({manifest.input.dtype}).{scaled}
- Output: {target}.
- It was made for one client's data. What it does on others' is not known.
- A model can tell something of the rows that it was trained on: consider that before you publish it, and
  choose a license. This card names none.{notes}
{table if figures else ""}{protection}
## Use

```python
import descant

module = descant.export.load_model(".", on_rows=True)  # an nn.Module that takes raw rows
```

Without descant: `safetensors.torch.load_file("model.safetensors")` is the `state_dict` of the network, and
model.json describes its layers, the preprocessing and the schema of the tables.

## Hyper-parameters

```json
{json.dumps(manifest.algorithm, indent=1)}
```
"""
