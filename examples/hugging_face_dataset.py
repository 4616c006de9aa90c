"""A Hugging Face dataset of images, labels and writers as a federation; a model as a folder for the Hub.

    pip install 'descant[partitioners]'  # brings datasets
    python examples/hugging_face_dataset.py
"""

import tempfile
from pathlib import Path

import datasets
import numpy as np
from sklearn.datasets import load_digits

import descant

digits = load_digits()
writers = np.where(digits.target < 5, "ann", "bob")  # who writes which digits
features = datasets.Features({
    "image": datasets.Array2D((8, 8), "float32"), "writer": datasets.Value("string"),
    "label": datasets.ClassLabel(names=[f"digit {k}" for k in range(10)])})
data = datasets.Dataset.from_dict({"image": digits.images / 16, "writer": writers, "label": digits.target},
                                  features=features)

federation = descant.Federation.from_frame(data, target="label", client="writer", columns=["image"])
print(federation, federation.class_names[:2])

run = descant.run("fedper", federation=federation, model="dnn", rounds=10)
print(run)

with tempfile.TemporaryDirectory() as folder:
    place = descant.export.export_model(run, "ann", folder, card=True)
    print(sorted(path.name for path in Path(place).iterdir()))
