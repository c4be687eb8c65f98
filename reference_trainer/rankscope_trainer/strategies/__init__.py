"""How the model is spread over the ranks: one file for each strategy, named in one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings
    from rankscope_trainer.strategies.strategy import Strategy
    from rankscope_trainer.world import World

# torch is imported only by the strategy that runs, so that `--help` does not wait for it.


def _ddp(settings: Settings, world: World) -> Strategy:
    from rankscope_trainer.strategies.ddp import DataParallel

    return DataParallel(settings, world)


def _pipeline(settings: Settings, world: World) -> Strategy:
    from rankscope_trainer.strategies.pipeline import Pipeline

    return Pipeline(settings, world)


STRATEGIES: dict[str, Callable[[Settings, World], Strategy]] = {
    "ddp": _ddp,
    "pipeline": _pipeline,
}
