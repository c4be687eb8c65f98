"""A training script of a job of Kubernetes: node 1 fails in the first attempt, all end in the next.

torchrun kubernetes_job.py
"""

import os

import torch
import torch.distributed as dist

STEPS, FAILS_AFTER = 8, 4


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fails = os.environ["JOBSET_RESTART_ATTEMPT"] == "0" and rank == 1
    for step in range(STEPS):
        if fails and step == FAILS_AFTER:
            raise RuntimeError("the disk of this node is gone")
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
