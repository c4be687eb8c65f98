"""What DDP sends instead of its gradients: PyTorch's own hooks, one of ours, and their states.

    none       every bucket as it is, 4 bytes a number
    fp16       each number rounded to 2 bytes: 11 bits of precision, but nothing above 65504 and
               next to nothing below 6e-8
    bf16       each number rounded to 2 bytes: 8 bits of precision, and the range of 4 bytes
    fp8        each number rounded to 1 byte: 4 bits of precision, with a scale of its own for each
               bucket and piece; `float8.py`
    powersgd   each gradient that is a matrix M (n x m) as P (n x r) times Q^T (r x m)

        rank 0   M + error  ──  P = M Q ──┐ sum  ┌── orthogonal P,  Q = M^T P ──┐ mean ┌── M = P Q^T
        rank 1   M + error  ──  P = M Q ──┘      └── orthogonal P,  Q = M^T P ──┘      └── M = P Q^T

PowerSGD sends r (n + m) numbers instead of n m. Each rank keeps what the product misses of its own
gradient and adds it to the next one (error feedback), so that nothing is lost but only late; and it
begins with the Q of the step before (warm start). Errors and Qs are therefore part of a checkpoint;
so are the errors of fp8.

The loss follows that of a single process within 0.01 % over ten steps with fp16, 0.1 % with bf16
and 1 % with fp8, for only the rounding differs. With powersgd it does not: the gradient is another
one. There all that can be said is that the loss falls.
"""

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from rankscope_trainer.strategies.float8 import Float8

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings

# Its buckets must be the final ones, as errors belong to a bucket; DDP regroups them at step 2.
PLAIN_STEPS = 2


class Memory(Protocol):
    """What a hook must remember from step to step."""

    def state(self) -> dict[str, Any]:
        """Return it as plain numbers and tensors."""

    def load_state(self, state: dict[str, Any], device: torch.device) -> None:
        """Put back what `state` returned."""


class PowerSGD(PowerSGDState):
    """PyTorch's state, and how a checkpoint keeps it."""

    def state(self) -> dict[str, Any]:
        """Return errors, factors and random numbers."""
        rng = self.rng.get_state(legacy=False)
        keys = torch.from_numpy(rng["state"]["key"].astype(np.int64))
        return {
            "iter": self.iter,
            "errors": dict(self.error_dict),
            "ps": dict(self.p_memory_dict),
            "qs": dict(self.q_memory_dict),
            "random": (keys, rng["state"]["pos"], rng["has_gauss"], rng["gauss"]),
        }

    def load_state(self, state: dict[str, Any], device: torch.device) -> None:
        """Put them back."""
        self.iter = state["iter"]
        self.error_dict = {index: error.to(device) for index, error in state["errors"].items()}
        self.p_memory_dict = {index: p.to(device) for index, p in state["ps"].items()}
        self.q_memory_dict = {index: q.to(device) for index, q in state["qs"].items()}
        keys, position, has_gauss, gauss = state["random"]
        numbers = ("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss)
        self.rng.set_state(numbers)


def register(replica: DistributedDataParallel, settings: "Settings") -> Memory | None:
    """Have `replica` reduce its gradients as the settings say; return what the hook remembers."""
    if settings.comm_hook == "fp16":
        replica.register_comm_hook(None, fp16_compress_hook)
    elif settings.comm_hook == "bf16":
        replica.register_comm_hook(None, bf16_everywhere)
    elif settings.comm_hook == "powersgd":
        state = PowerSGD(
            process_group=None,
            matrix_approximation_rank=settings.powersgd_rank,
            start_powerSGD_iter=PLAIN_STEPS,
        )
        replica.register_comm_hook(state, powersgd_in_order)
        return state
    elif settings.comm_hook == "fp8":
        memory = Float8()
        replica.register_comm_hook(memory, float8_in_order)
        return memory
    return None


# DDP compares the annotations below with these very types, so they must not be mere texts: that is
# why this file does not import `annotations` from `__future__`.


def bf16_everywhere(
    _: None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # public, but not declared
) -> torch.futures.Future[torch.Tensor]:
    """Round to bf16. Without NCCL, DDP refuses PyTorch's hook by name; but gloo can add up bf16."""
    assert dist.group.WORLD is not None
    return bf16_compress_hook(dist.group.WORLD, bucket)


def float8_in_order(
    memory: Float8,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Reduce one bucket after the other, as the next function does, for the same reason."""
    is_plain = memory.iter < PLAIN_STEPS
    memory.iter += bucket.is_last()
    if is_plain:
        assert dist.group.WORLD is not None
        return allreduce_hook(dist.group.WORLD, bucket)
    memory.reduce(bucket.index(), bucket.buffer())
    reduced: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    reduced.set_result(bucket.buffer())
    return reduced


def powersgd_in_order(
    state: PowerSGDState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Reduce one bucket after the other.

    PyTorch's hook starts its second and third reduction as callbacks. Those of two buckets may come
    in another order on each rank, and gloo would then add up numbers that do not belong together.
    """
    reduced = powerSGD_hook(state, bucket)
    reduced.wait()
    return reduced
