"""Figures of two runs in a local store of MLflow, read again with MLflow's own functions.

    pip install 'descant[mlflow]'
    python examples/mlflow_tracking.py                  # keeps mlflow.db where you stand
    mlflow ui --backend-store-uri sqlite:///mlflow.db   # needs the whole of MLflow: pip install mlflow
"""

import mlflow

import descant

STORE = "sqlite:///mlflow.db"
federation = descant.federation("digits", partition="classes", clients=5, classes_per_client=3)
for method in ("fedavg", "ditto"):
    descant.run(method, federation=federation, rounds=6, eval={"every": 2},
                observer=descant.MLflow(STORE, experiment="digits"))

client = mlflow.MlflowClient(STORE)
[experiment] = [found for found in client.search_experiments() if found.name == "digits"]
for kept in client.search_runs([experiment.experiment_id], order_by=["attribute.start_time ASC"]):
    curve = client.get_metric_history(kept.info.run_id, "personal/test/accuracy")
    print(kept.data.params["algorithm.name"], [(point.step, round(point.value, 3)) for point in curve])
