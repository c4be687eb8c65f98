"""A layer pair of Megatron-core, cut over two ranks and copied to two more, on CPUs over gloo.

torchrun --nproc-per-node 4 megatron_layers.py
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

STEPS = 24


def main() -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = ModelParallelConfig(
        tensor_model_parallel_size=2, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, params_dtype=torch.float32,
    )  # fmt: skip
    shared = {
        "config": config, "init_method": torch.nn.init.xavier_normal_, "bias": True,
        "skip_bias_add": False,
    }  # fmt: skip
    up = ColumnParallelLinear(32, 64, gather_output=False, **shared)
    down = RowParallelLinear(64, 32, input_is_parallel=True, **shared)
    weights = [*up.parameters(), *down.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.01)
    for _ in range(STEPS):
        hidden, _ = up(torch.randn(8, 4, 32))
        output, _ = down(torch.relu(hidden))
        output.square().mean().backward()
        for weight in weights:
            dist.all_reduce(weight.grad, group=parallel_state.get_data_parallel_group())
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
