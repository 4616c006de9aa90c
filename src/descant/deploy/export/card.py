"""A model as the Hugging Face Hub shows it: README.md, a model card, and config.json.

The card says what the model is, how it was made and how to use it. It has figures, and no row of any data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from descant.core.metric import figure, title
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


def card_files(manifest: Manifest, name: str, figures: Mapping[str, float]) -> dict[str, bytes]:
    """Both files."""
    front = json.dumps(_front(manifest, name, figures), indent=1, ensure_ascii=False)  # JSON is YAML
    config = json.dumps(_config(manifest), indent=1, ensure_ascii=False)
    return {CARD: f"---\n{front}\n---\n{_text(manifest, name, figures)}".encode(),
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


def _text(manifest: Manifest, name: str, figures: Mapping[str, float]) -> str:
    method, shape = manifest.algorithm["name"], " x ".join(map(str, manifest.input.shape)) or "1"
    whose = ("The model for all clients" if manifest.client is None else
             f"The model of {name}, which took no part in the training" if manifest.newcomer else
             f"The personal model of {name}")
    target = ("a real number" if manifest.classes is None else
              f"one of {len(manifest.classes)} classes: {', '.join(manifest.classes[:20])}"
              f"{', ...' if len(manifest.classes) > 20 else ''}")
    rows = "".join(f"| {title(metric)} | {figure(metric, value)} |\n" for metric, value in figures.items())
    table = f"\n## Figures\n\nOn test rows of {name}, which were not trained on.\n\n| | |\n|---|---|\n{rows}"
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
{table if figures else ""}
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
