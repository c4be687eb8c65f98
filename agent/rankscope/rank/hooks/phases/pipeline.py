"""Forward and backward of pipeline stages, which a schedule runs in turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from rankscope.rank.guard import guarded
from rankscope.rank.hooks.phases.timed import in_phase
from rankscope.rank.steps import BACKWARD, FORWARD

if TYPE_CHECKING:
    from rankscope.rank.runtime import Agent


class Pipeline:
    """Forward and backward of each microbatch of torch.distributed.pipelining, and the stage."""

    name: ClassVar[str] = "pipeline"
    needs: ClassVar[str] = "torch.distributed.pipelining.stage"

    def install(self, agent: Agent) -> str:
        """Patch the chunk methods of the stage base class, from which all stages derive."""
        import torch.distributed.pipelining.stage as module

        base: Any = module._PipelineStageBase
        clock = agent.clock
        for method, phase in (
            ("forward_one_chunk", FORWARD),
            ("backward_one_chunk", BACKWARD),
            ("backward_weight_one_chunk", BACKWARD),
        ):
            if hasattr(base, method):
                agent.patch(base, method, in_phase(clock, phase, getattr(base, method)))
        original = base.__init__

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            made(self)

        indices: set[int] = set()

        @guarded
        def made(stage: Any) -> None:
            clock.forward_is_explicit = True
            indices.add(int(stage.stage_index))
            agent.describe(  # of several the first says where the rank stands in the pipeline
                stage=min(indices),
                num_stages=int(stage.num_stages),
                num_local_stages=len(indices),
            )

        agent.patch(base, "__init__", __init__)
        return "chunk methods of pipeline stages"
