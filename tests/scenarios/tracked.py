"""Trains alone for some steps and logs its loss to a tracker, as its users write it.

    python tracked.py TRACKER

Its store is where the environment says, or in the working directory.
"""

import sys

import torch

STEPS = 30


class MLflow:
    def __init__(self):
        import mlflow

        mlflow.set_experiment("characters")
        self.mlflow = mlflow
        mlflow.start_run(run_name="owl")

    def log(self, step, loss):
        self.mlflow.log_metric("loss", loss, step=step)

    def end(self):
        self.mlflow.end_run()


class Wandb:
    def __init__(self):
        import wandb

        self.run = wandb.init(project="characters", name="owl")

    def log(self, step, loss):
        self.run.log({"loss": loss}, step=step)

    def end(self):
        self.run.finish()


class TensorBoard:
    def __init__(self):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter("board/owl")

    def log(self, step, loss):
        self.writer.add_scalar("loss", loss, step)

    def end(self):
        self.writer.close()


class Trackio:
    def __init__(self):
        import trackio

        self.run = trackio.init("characters", name="owl", embed=False)

    def log(self, step, loss):
        self.run.log({"loss": loss}, step=step)

    def end(self):
        self.run.finish()


class SwanLab:
    def __init__(self):
        import swanlab

        self.run = swanlab.init(project="characters", name="owl", mode="offline")

    def log(self, step, loss):
        self.run.log({"loss": loss}, step=step)

    def end(self):
        self.run.finish()


class Comet:
    def __init__(self):
        import comet_ml

        self.experiment = comet_ml.OfflineExperiment(
            project_name="characters", offline_directory="comet", display_summary_level=0
        )

    def log(self, step, loss):
        self.experiment.log_metric("loss", loss, step=step)

    def end(self):
        self.experiment.end()


TRACKERS = {
    "mlflow": MLflow, "wandb": Wandb, "tensorboard": TensorBoard, "trackio": Trackio,
    "swanlab": SwanLab, "comet": Comet,
}  # fmt: skip

if __name__ == "__main__":
    tracker = TRACKERS[sys.argv[1]]()
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, STEPS + 1):
        loss = model(torch.ones(8, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tracker.log(step, loss.item())
    tracker.end()
