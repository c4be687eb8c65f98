"""Exactly what each rank sends and receives, computed from the settings alone.

Nothing here starts a process group. A test compares these numbers with what a run really did;
they hold for PyTorch 2.13. The size of a message is that of the tensor which this rank sends
(`recv`: that it receives into), as all_gather's input and not its output.
"""

from __future__ import annotations

from collections.abc import Callable

from rankscope_trainer.agreement import AGREEMENT_BYTES, needs_agreement
from rankscope_trainer.patience import PATIENCE_BYTES
from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.traffic import parameter_server, replicas, sharded, stages
from rankscope_trainer.strategies.traffic.message import (
    INT64_BYTES,
    STARTUP,
    Message,
    Traffic,
    is_saved,
    is_validated,
)
from rankscope_trainer.strategies.uneven import last_steps

__all__ = ["STARTUP", "Message", "Traffic", "expected_traffic", "total_traffic"]

# Of one rank, by step: from the settings, rank, world size, and the step after which a run goes on.
TRAFFIC: dict[str, Callable[[Settings, int, int, int], dict[int, Traffic]]] = {
    "ddp": replicas.ddp,
    "ring": replicas.ring,
    "local_sgd": replicas.local_sgd,
    "hogwild": replicas.hogwild,
    "pipeline": stages.pipeline,
    "model_parallel": stages.model_parallel,
    "pipedream": stages.pipedream,
    "fsdp": sharded.fsdp,
    "tensor": sharded.tensor,
    "hybrid": sharded.hybrid,
    "parameter_server": parameter_server.traffic,
}


def expected_traffic(
    settings: Settings, *, rank: int, world_size: int, resumed_after: int = 0
) -> dict[int, Traffic]:
    """Return the traffic of one rank by step, from `STARTUP` to the last step of the settings.

    What a rank does at the end of a step, validation and checkpoint, belongs to that step.
    """
    by_step = TRAFFIC[settings.strategy](settings, rank, world_size, resumed_after)
    for step in range(resumed_after + 1, settings.steps + 1):
        # what ranks agree on before the step, after a validation, and on a checkpoint's loss
        if needs_agreement(settings):
            by_step[step][Message("all_reduce", AGREEMENT_BYTES)] += 1
        if settings.patience or settings.keep_best:
            by_step[step][Message("all_reduce", PATIENCE_BYTES)] += is_validated(settings, step)
        if settings.keep_best and not settings.validate_every:
            by_step[step][Message("all_reduce", PATIENCE_BYTES)] += is_saved(settings, step)
    if settings.checkpoint_dir:
        if settings.resume:
            by_step[STARTUP][Message("broadcast", INT64_BYTES)] += 1  # the step to go on from
        last = min(last_steps(settings, world_size))  # after it some rank is missing
        for step in range(resumed_after + 1, last + 1):
            by_step[step][Message("barrier", 0)] += step % settings.checkpoint_every == 0
    return {step: +traffic for step, traffic in by_step.items()}  # `+` drops counts of 0


def total_traffic(by_step: dict[int, Traffic]) -> Traffic:
    """Return the traffic of a whole run."""
    return sum(by_step.values(), Traffic())
