"""A parameter server that holds far more of the weights than the others."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings


class HotShard(Fault):
    """The first server holds so many times the weights of each other one, and their traffic."""

    name: ClassVar[str] = "hot_shard"
    finding: ClassVar[str] = "hot_shard"
    place: ClassVar[Place] = Place.START
    default_size: ClassVar[Magnitude | None] = Magnitude(count=8)
    size_is: ClassVar[str] = "times another's weights"
    on_all_ranks: ClassVar[bool] = True

    def check(self, settings: "Settings", world_size: int) -> None:
        """One shard can only be hotter than another."""
        if settings.strategy != "parameter_server" or settings.servers < 2:
            problem = "hot_shard needs strategy parameter_server with several servers"
            raise SettingError("fault", problem, "Choose it, and servers = 2 or more")

    def fire(self, context: FaultContext) -> None:
        """Deal the weights unevenly."""
        settings = context.settings
        assert settings is not None
        shares = [context.size()] + [1.0] * (settings.servers - 1)
        context.settings = dataclasses.replace(
            settings, server_shares=",".join(f"{share:g}" for share in shares)
        )
