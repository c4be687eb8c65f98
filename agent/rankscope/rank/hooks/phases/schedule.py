"""How a pipeline is run: its schedule, and into how many microbatches it cuts a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rankscope.rank.guard import guarded

if TYPE_CHECKING:
    from rankscope.rank.runtime import Agent


class PipelineSchedule:
    """Name and number of microbatches of a schedule of torch.distributed.pipelining."""

    name: ClassVar[str] = "pipeline-schedule"
    needs: ClassVar[str] = "torch.distributed.pipelining.schedules"

    def install(self, agent: Agent) -> str:
        """Patch the constructor of the base class, which every schedule calls."""
        import torch.distributed.pipelining.schedules as module

        base: Any = module._PipelineSchedule
        original = base.__init__

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            made(self)

        told: list[bool] = []

        @guarded
        def made(schedule: Any) -> None:
            trains = bool(getattr(schedule, "_has_backward", True))
            if trains or True not in told:  # one that only evaluates does not replace it
                told.append(trains)
                agent.describe(
                    num_microbatches=int(schedule._n_microbatches),
                    schedule=type(schedule).__name__,
                )

        agent.patch(base, "__init__", __init__)
        return "schedules of pipelines"
