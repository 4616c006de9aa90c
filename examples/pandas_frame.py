"""Hospitals in one pandas DataFrame: patients never on two sides, a model for each hospital.

    pip install 'descant[pandas]'
    python examples/pandas_frame.py
"""

import numpy as np
import pandas as pd

import descant
from descant.algorithms import Ditto

rng = np.random.default_rng(0)
rows = 600
frame = pd.DataFrame({
    "hospital": rng.choice(["north", "south", "east"], rows, p=[0.5, 0.3, 0.2]),
    "patient": np.repeat(np.arange(rows // 2), 2),
    "age": rng.normal(60, 12, rows),
    "blood": pd.Categorical(rng.choice(["A", "B", "0"], rows), categories=["0", "A", "B", "AB"]),
    "smoker": rng.random(rows) < 0.3,
})
frame["hospital"] = frame.groupby("patient")["hospital"].transform("first")  # a patient has one hospital
risk = (frame["age"] - 60) / 12 + frame["smoker"] * np.where(frame["hospital"] == "north", 2.0, -1.0)
frame["ill"] = np.where(rng.random(rows) < 1 / (1 + np.exp(-risk)), "yes", "no")
frame.loc[rng.random(rows) < 0.05, "age"] = np.nan

federation = descant.Federation.from_frame(frame, target="ill", client="hospital", group="patient",
                                           scale="client", impute="client")
print(federation)

run = descant.run(Ditto(lam=0.1), federation=federation, rounds=20, class_weights=[1.0, 1.5], average=5)
print(run.table()[["loss", "personal_test_accuracy"]].dropna().tail(3))

model = run.personal_model("north")  # an ordinary nn.Module
print(sum(parameter.numel() for parameter in model.parameters()), "parameters for", federation.column_names)
