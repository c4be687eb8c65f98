"""Collectives and send/recv of every process group, whichever way the program calls them.

There are several sources; each sees the same calls and writes the same records, at a different
cost. The tuple SOURCES lists them, the cheapest first; the first one that works here is taken.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from rankscope.rank.context import Context, HookSkipped
from rankscope.rank.guard import guarded
from rankscope.rank.hooks.collectives.kernels import Kernels
from rankscope.rank.hooks.collectives.last_calls import settle_before_destruction
from rankscope.rank.hooks.collectives.native_waits import patch_native_waits
from rankscope.rank.hooks.collectives.official import Official
from rankscope.rank.hooks.collectives.probe import Probe


class CollectiveSource(Protocol):
    """One way to see collectives; the class docstring says what it sees and costs."""

    name: ClassVar[str]
    outside_us: ClassVar[float]  # cost of one call outside our own code, in real training

    def set_call_sites(self, wanted: bool) -> None:
        """Record from now on which line of the user's code calls, or not."""

    @staticmethod
    def check() -> None:
        """Raise HookSkipped where this source cannot work, with the reason."""

    def install(self, context: Context) -> str:
        """Begin to watch; return in a few words what is used."""


SOURCES: tuple[type[CollectiveSource], ...] = (Probe, Official, Kernels)
AUTO = "auto"


class Collectives:
    """Every collective and send/recv: when it was entered and ended, its group, bytes, place."""

    name: ClassVar[str] = "collectives"
    needs: ClassVar[str] = "torch.distributed.distributed_c10d"

    def __init__(self) -> None:
        self._installed = False

    def install(self, context: Context) -> str:
        """Wait for the first process group: torch may not be wholly imported yet."""
        import torch.distributed.distributed_c10d as c10d

        original = c10d._new_process_group_helper

        def new_process_group(*args: Any, **kwargs: Any) -> Any:
            before(*args)
            return original(*args, **kwargs)

        @guarded
        def before(group_size: int, group_rank: int, global_ranks: list[int], *_: Any) -> None:
            context.has_group = True
            self._install_source(context)
            if context.outside is not None:
                context.outside.new_group()
            if not global_ranks:  # the default group: now the rank is known in any case
                context.world_known(group_rank, group_size)
                _count_world(context)

        context.patch(c10d, "_new_process_group_helper", new_process_group)
        settle_before_destruction(context)
        if c10d.is_initialized():  # groups are there already: their earlier operations are lost
            context.has_group = True
            self._install_source(context)
            context.on_recorder(_count_world)
        return (
            context.sources.get(self.name, "") if self._installed else "waits for a process group"
        )

    def _install_source(self, context: Context) -> None:
        if self._installed:
            return
        self._installed = True
        try:
            chosen, reasons = choose(context.settings.collectives)
            source = chosen()
            with context.within(context.source_scope):
                patch_native_waits(context)
                context.sources[self.name] = f"{source.name}: {source.install(context)}"
            context.govern(source)
        except HookSkipped as skipped:
            context.sources[self.name] = f"skipped: {skipped}"
            context.on_recorder(lambda context: context.describe())  # no group will do it
            return
        for name, reason in reasons.items():
            context.sources[f"{self.name}/{name}"] = f"skipped: {reason}"


def _count_world(context: Context) -> None:
    if context.recorder is not None:
        context.recorder.world_made()


def check_name(wanted: str) -> None:
    """Raise ValueError if the setting names no source."""
    known = (AUTO, *(source.name for source in SOURCES))
    if wanted not in known:
        raise ValueError(f"RANKSCOPE_COLLECTIVES={wanted!r}: there are: {', '.join(known)}")


def choose(wanted: str) -> tuple[type[CollectiveSource], dict[str, str]]:
    """Return the source to use, and for each cheaper one why it is not used.

    Raises HookSkipped if none works.
    """
    reasons: dict[str, str] = {}
    for source in SOURCES:
        if wanted not in (AUTO, source.name):
            continue
        try:
            source.check()
        except HookSkipped as reason:
            reasons[source.name] = str(reason)
            continue
        return source, reasons
    raise HookSkipped("; ".join(f"{name}: {why}" for name, why in reasons.items()))
