"""A small classifier under DeepSpeed's engine, with two microbatches a step, on CPUs over gloo.

deepspeed --num_accelerators 2 deepspeed_zero.py --stage 0|1|2|3
"""

import argparse

import deepspeed
import torch

STEPS, MICROBATCHES, BATCH = 24, 2, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)  # of the launcher
    parser.add_argument("--stage", type=int, default=1)
    stage = parser.parse_args().stage
    # an operation for inference in shared memory, which would be compiled at the start
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": MICROBATCHES,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    samples = STEPS * MICROBATCHES * BATCH
    data = torch.utils.data.TensorDataset(torch.randn(samples, 64), torch.randint(8, (samples,)))
    for inputs, labels in torch.utils.data.DataLoader(data, batch_size=BATCH):
        loss = torch.nn.functional.cross_entropy(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
    assert engine.global_steps == STEPS
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
