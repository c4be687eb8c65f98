"""How the model is spread over the ranks: one file for each strategy, named in one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from rankscope_trainer.strategies import checks

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings
    from rankscope_trainer.strategies.strategy import Strategy
    from rankscope_trainer.world import World


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One strategy: where it is, and what must hold before it starts.

    Its module is imported only where it runs, so that `--help` does not wait for torch.
    """

    module: str  # in this package
    class_name: str
    check: Callable[[Settings, int], None] = lambda settings, world_size: None
    microbatches: Callable[[int], int] = lambda world_size: 2  # where the settings name none
    is_elastic: bool = False  # a checkpoint goes on with another number of ranks

    def build(self, settings: Settings, world: World) -> Strategy:
        """Build this rank's part of the strategy."""
        found = getattr(import_module(f"{__name__}.{self.module}"), self.class_name)
        strategy: Strategy = found(settings, world)
        return strategy


STRATEGIES: dict[str, Entry] = {
    "ddp": Entry(module="ddp", class_name="DataParallel", check=checks.ddp, is_elastic=True),
    "pipeline": Entry(
        module="pipeline",
        class_name="Pipeline",
        check=checks.pipeline,
        microbatches=lambda world_size: 2 * world_size,
    ),
    "model_parallel": Entry(
        module="model_parallel",
        class_name="ModelParallel",
        check=checks.model_parallel,
        microbatches=lambda world_size: 1,
    ),
    "pipedream": Entry(
        module="pipedream",
        class_name="PipeDream",
        check=checks.pipedream,
        microbatches=lambda world_size: 1,
    ),
    "hogwild": Entry(
        module="hogwild",
        class_name="Hogwild",
        check=checks.hogwild,
        microbatches=lambda world_size: 1,
    ),
    "ring": Entry(module="ring", class_name="Ring"),
    "local_sgd": Entry(module="local_sgd", class_name="LocalSGD"),
    "fsdp": Entry(module="fsdp", class_name="FullySharded", check=checks.fsdp),
    "tensor": Entry(module="tensor", class_name="TensorParallel", check=checks.tensor),
    "hybrid": Entry(
        module="hybrid",
        class_name="Hybrid",
        check=checks.hybrid,
        microbatches=lambda world_size: 4,
    ),
    "parameter_server": Entry(
        module="parameter_server",
        class_name="worker_or_server",
        check=checks.parameter_server,
    ),
}
