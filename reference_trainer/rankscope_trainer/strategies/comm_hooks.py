"""What DDP sends instead of its gradients: PyTorch's own hooks, and the state of one of them.

    none       every bucket as it is, 4 bytes a number
    fp16       each number rounded to 2 bytes: 11 bits of precision, but nothing above 65504 and
               next to nothing below 6e-8
    bf16       each number rounded to 2 bytes: 8 bits of precision, and the range of 4 bytes
    powersgd   each gradient that is a matrix M (n x m) as P (n x r) times Q^T (r x m)

        rank 0   M + error  ──  P = M Q ──┐ sum  ┌── orthogonal P,  Q = M^T P ──┐ mean ┌── M = P Q^T
        rank 1   M + error  ──  P = M Q ──┘      └── orthogonal P,  Q = M^T P ──┘      └── M = P Q^T

PowerSGD sends r (n + m) numbers instead of n m. Each rank keeps what the product misses of its own
gradient and adds it to the next one (error feedback), so that nothing is lost but only late; and it
begins with the Q of the step before (warm start). Errors and Qs are therefore part of a checkpoint.

The loss follows that of a single process within 0.01 % over ten steps with fp16 and 0.1 % with
bf16, for only the rounding differs. With powersgd it does not: the gradient is another one. There
all that can be said is that the loss falls.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings

# Its buckets must be the final ones, as errors belong to a bucket; DDP regroups them at step 2.
PLAIN_STEPS = 2


def register(replica: DistributedDataParallel, settings: "Settings") -> PowerSGDState | None:
    """Have `replica` reduce its gradients as the settings say; return the hook's state."""
    if settings.comm_hook == "fp16":
        replica.register_comm_hook(None, fp16_compress_hook)
    elif settings.comm_hook == "bf16":
        replica.register_comm_hook(None, bf16_everywhere)
    elif settings.comm_hook == "powersgd":
        state = PowerSGDState(
            process_group=None,
            matrix_approximation_rank=settings.powersgd_rank,
            start_powerSGD_iter=PLAIN_STEPS,
        )
        replica.register_comm_hook(state, powersgd_in_order)
        return state
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


def powersgd_state(hook: PowerSGDState) -> dict[str, Any]:
    """Return what PowerSGD must remember, as plain numbers and tensors."""
    rng = hook.rng.get_state(legacy=False)
    keys = torch.from_numpy(rng["state"]["key"].astype(np.int64))
    return {
        "iter": hook.iter,
        "errors": dict(hook.error_dict),
        "ps": dict(hook.p_memory_dict),
        "qs": dict(hook.q_memory_dict),
        "random": (keys, rng["state"]["pos"], rng["has_gauss"], rng["gauss"]),
    }


def load_powersgd_state(hook: PowerSGDState, state: dict[str, Any], device: torch.device) -> None:
    """Put back what `powersgd_state` returned."""
    hook.iter = state["iter"]
    hook.error_dict = {index: error.to(device) for index, error in state["errors"].items()}
    hook.p_memory_dict = {index: p.to(device) for index, p in state["ps"].items()}
    hook.q_memory_dict = {index: q.to(device) for index, q in state["qs"].items()}
    keys, position, has_gauss, gauss = state["random"]
    hook.rng.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))
