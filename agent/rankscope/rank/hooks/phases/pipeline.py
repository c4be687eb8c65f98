"""Pipelines: forward and backward of their stages, and the schedule that runs them in turns."""

from __future__ import annotations

from typing import Any, ClassVar

from rankscope.rank.context import Context
from rankscope.rank.hooks.phases.timed import in_phase
from rankscope.rank.steps import BACKWARD, FORWARD


class Pipeline:
    """Forward and backward of each microbatch of torch.distributed.pipelining, and the stage."""

    name: ClassVar[str] = "pipeline"
    needs: ClassVar[str] = "torch.distributed.pipelining.stage"

    def install(self, context: Context) -> str:
        """Patch the chunk methods of the stage base class, from which all stages derive."""
        import torch.distributed.pipelining.stage as module

        base: Any = module._PipelineStageBase
        clock = context.clock
        for method, phase in (
            ("forward_one_chunk", FORWARD),
            ("backward_one_chunk", BACKWARD),
            ("backward_weight_one_chunk", BACKWARD),
        ):
            if hasattr(base, method):
                context.patch(base, method, in_phase(clock, phase, getattr(base, method)))
        indices: set[int] = set()

        def made(stage: Any) -> None:
            clock.forward_is_explicit = True
            indices.add(int(stage.stage_index))
            context.describe(  # of several the first one is the position of the rank
                stage=min(indices),
                num_stages=int(stage.num_stages),
                num_local_stages=len(indices),
            )

        context.on_new(base, made)
        return "chunk methods of pipeline stages"


class PipelineSchedule:
    """Name and number of microbatches of a schedule of torch.distributed.pipelining."""

    name: ClassVar[str] = "pipeline-schedule"
    needs: ClassVar[str] = "torch.distributed.pipelining.schedules"

    def install(self, context: Context) -> str:
        """Patch the constructor of the base class, which every schedule calls."""
        import torch.distributed.pipelining.schedules as module

        base: Any = module._PipelineSchedule
        described: list[bool] = []

        def made(schedule: Any) -> None:
            trains = bool(getattr(schedule, "_has_backward", True))
            if trains or True not in described:  # one that only evaluates does not replace it
                described.append(trains)
                context.describe(
                    num_microbatches=int(schedule._n_microbatches),
                    schedule=type(schedule).__name__,
                )

        context.on_new(base, made)
        return "schedules of pipelines"
