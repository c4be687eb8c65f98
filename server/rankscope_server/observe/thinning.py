"""How much of the collectives ranks record, and why not all, as they say it themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from rankscope.wire.schema import Event
from rankscope_server.findings.text import percent_text, ranks_text

_SERVERS_REMEDY = (
    "give the server more processors, raise RANKSCOPE_FLUSH_SECONDS, or run a second server on "
    "PostgreSQL"
)


@dataclass(frozen=True, slots=True, order=True)
class Thinning:
    """A level that took effect on a rank: one step in `every` is recorded whole from a step on."""

    from_step: int
    level: int  # 0: everything, 1: all but call sites
    every: int
    overhead_ratio: float  # share of the training thread's time that recording took
    budget_ratio: float
    source: str
    # Of a server that did not keep up and asked for it: what it said. Empty: it keeps the budget.
    servers_why: str = ""

    @property
    def text(self) -> str:
        """Return what is left out, why, and what would bring it back."""
        left_out = (
            "Call sites of collectives are left out"
            if self.level == 1
            else f"One step in {self.every} is recorded whole, the others without their single "
            "collectives,"
        )
        if self.servers_why:
            return (
                f"{left_out} since step {self.from_step:,}, because the server did not keep up "
                f"({self.servers_why}); to record more, {_SERVERS_REMEDY}"
            )
        took = f" (it took {percent_text(self.overhead_ratio)})" if self.overhead_ratio > 0 else ""
        compiler = "" if self.source == "probe" else "install a C++ compiler or "
        return (
            f"{left_out} since step {self.from_step:,}, to keep recording below "
            f"{percent_text(self.budget_ratio)} of the training thread{took}; to record more, "
            f"{compiler}raise RANKSCOPE_OVERHEAD_PERCENT"
        )


def thinning_of(event: Event) -> Thinning | None:
    """Return what an event says; None if its numbers cannot be read."""
    fields = event.fields
    try:
        return Thinning(
            from_step=int(fields.get("from_step", event.step)),
            level=int(fields["level"]),
            every=int(fields.get("every", "1")),
            overhead_ratio=float(fields.get("overhead_ratio", "0")),
            budget_ratio=float(fields["budget_ratio"]),
            source=fields.get("source", ""),
            servers_why=fields.get("servers_why", ""),
        )
    except (KeyError, ValueError):
        return None


def thinning_notes(newest: Mapping[int, Thinning]) -> tuple[str, ...]:
    """Return a sentence for each level in force; with its ranks where they differ."""
    by_level: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank, one in newest.items():
        by_level[one.level, one.every, one.from_step].append(rank)
    notes = []
    for (level, _, _), ranks in sorted(by_level.items()):
        who = "" if len(by_level) == 1 else f" ({ranks_text(sorted(ranks))})"
        if level > 0:
            worst = max((newest[rank] for rank in ranks), key=lambda one: one.overhead_ratio)
            notes.append(worst.text + who)
    return tuple(notes)
