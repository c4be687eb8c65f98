"""How the model is spread over the ranks: one module or folder for each strategy, in one table."""

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
class StrategyEntry:
    """One strategy: where it is, and what must hold before it starts.

    Its module is imported only where it runs, so that `--help` does not wait for torch.
    """

    module: str  # in this package
    class_name: str
    check: Callable[[Settings, int], None] = lambda settings, world_size: None
    is_elastic: bool = False  # a checkpoint goes on with another number of ranks

    def build(self, settings: Settings, world: World) -> Strategy:
        """Build this rank's part of the strategy."""
        module = import_module(f"{__name__}.{self.module}")
        strategy: Strategy = getattr(module, self.class_name)(settings, world)
        return strategy


STRATEGIES: dict[str, StrategyEntry] = {
    "ddp": StrategyEntry(
        module="ddp", class_name="DataParallel", check=checks.ddp, is_elastic=True
    ),
    "pipeline": StrategyEntry(
        module="pipeline", class_name="Pipeline", check=checks.pipeline, is_elastic=True
    ),
    "model_parallel": StrategyEntry(
        module="model_parallel",
        class_name="ModelParallel",
        check=checks.model_parallel,
        is_elastic=True,
    ),
    "pipedream": StrategyEntry(module="pipedream", class_name="PipeDream", check=checks.pipedream),
    "hogwild": StrategyEntry(module="hogwild", class_name="Hogwild", check=checks.hogwild),
    "ring": StrategyEntry(module="ring", class_name="Ring", is_elastic=True),
    "local_sgd": StrategyEntry(module="local_sgd", class_name="LocalSGD"),
    "fsdp": StrategyEntry(
        module="fsdp", class_name="FullySharded", check=checks.fsdp, is_elastic=True
    ),
    "tensor": StrategyEntry(
        module="tensor", class_name="TensorParallel", check=checks.tensor, is_elastic=True
    ),
    "hybrid": StrategyEntry(
        module="hybrid", class_name="Hybrid", check=checks.hybrid, is_elastic=True
    ),
    "parameter_server": StrategyEntry(
        module="parameter_server.worker",
        class_name="worker_or_server",
        check=checks.parameter_server,
        is_elastic=True,
    ),
}
