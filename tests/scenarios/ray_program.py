"""Trains with Ray Train on two workers, once for each of the given ways to end.

    python ray_program.py FOLDER [ends|raises|killed|restarts]...

Each is a run of its own, called ray-WAY, if RANKSCOPE_RUN_ID does not say another name.
"""

import contextlib
import os
import signal
import sys
from typing import Any

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

STEPS, FAILS_AFTER = 24, 12


def train(config: dict[str, Any]) -> None:
    way, rank = config["way"], ray.train.get_context().get_world_rank()
    again = os.path.join(config["folder"], f"{way}.again")
    model = prepare_model(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        if step == FAILS_AFTER and rank == 1 and not os.path.exists(again):
            open(again, "w").close()
            if way == "raises":
                raise RuntimeError("the disk of this worker is gone")
            if way in ("killed", "restarts"):
                os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ray.train.report({"loss": 1.0})


def main(folder: str, *ways: str) -> None:
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=os.environ["RAY_FOLDER"])
    for way in ways:
        variables = {} if "RANKSCOPE_RUN_ID" in os.environ else {"RANKSCOPE_RUN_ID": f"ray-{way}"}
        trainer = TorchTrainer(
            train,
            train_loop_config={"way": way, "folder": folder},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                storage_path=f"{folder}/storage",
                failure_config=FailureConfig(max_failures=1 if way == "restarts" else 0),
                worker_runtime_env={"env_vars": variables},
            ),
        )
        with contextlib.suppress(ray.train.TrainingFailedError):  # Ray has printed it
            trainer.fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
