"""Data parallel without a wrapper: all gradients in one tensor, and one all_reduce."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(200, 700), nn.SiLU(), nn.Linear(700, 700), nn.SiLU(),
                        nn.Linear(700, 20))  # fmt: skip
    parameters = list(net.parameters())
    data = torch.Generator().manual_seed(rank)
    count = 0
    while True:
        x = torch.randn(128, 200, generator=data)
        loss = nn.functional.mse_loss(net(x), x[:, :20] ** 2)
        for parameter in parameters:
            parameter.grad = None
        loss.backward()
        gradient = parameters_to_vector([parameter.grad for parameter in parameters])
        dist.all_reduce(gradient)
        with torch.no_grad():
            vector_to_parameters(
                parameters_to_vector(parameters) - 0.05 * gradient / size, parameters
            )
        count += 1
        if count % 40 == 0 and rank == 0:
            print(f"update {count} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
