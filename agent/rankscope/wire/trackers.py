"""Experiment trackers: what they are called, and what a rank says of the run that it logs to.

The fields of the event `TRACKER`, empty where they are not known: which tracker; `run`, its id
there; the `name` and the `project` that people see; `page`, its address in a browser; `store`, a
folder or the address of the tracker's server; `mode`, as "offline".
"""

from __future__ import annotations

TITLES: dict[str, str] = {
    "mlflow": "MLflow",
    "wandb": "Weights & Biases",
    "tensorboard": "TensorBoard",
    "trackio": "trackio",
    "swanlab": "SwanLab",
    "comet": "Comet",
}
FIELDS: tuple[str, ...] = ("tracker", "run", "name", "project", "page", "store", "mode")
