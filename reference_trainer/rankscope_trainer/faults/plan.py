"""Read `name:rank=R,start=S,steps=N,size=X` into a plan."""

from __future__ import annotations

import dataclasses

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults import FAULTS
from rankscope_trainer.faults.fault import Fault, Magnitude, Place

FORM = "Write name:rank=R,start=S,steps=N,size=X; rank and start are required"
KEYS = ("rank", "start", "steps", "size", "peer", "attempt")
# How a size is written: the end of the text, the unit, and how many of it one is.
SUFFIXES = (
    ("MiB/s", "mib_per_second", 1.0),
    ("MiB", "mib", 1.0),
    ("ppm", "ppm", 1.0),
    ("ms", "seconds", 1e-3),
    ("s", "seconds", 1.0),
)
REMEDIES = {
    "ratio": "Write 50ms or 2s for time, 1.5 for a multiple of the rank's own compute",
    "seconds": "Write a time like 50ms or 2s",
    "mib": "Write 16MiB",
    "mib_per_second": "Write 4MiB/s",
    "count": "Write a number",
    "share": "Write a number above 0 and at most 1",
    "ppm": "Write 50ppm",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """One fault, on one rank, from step `start` on, for `steps` steps (None: until the end)."""

    fault: Fault
    rank: int | None  # None: on all
    start: int
    steps: int | None
    size: Magnitude | None
    peer: int | None = None
    attempt: int | None = None  # only in this attempt of the job, counted from 0; None: in each

    def concerns(self, rank: int, attempt: int) -> bool:
        """Return whether the fault is one of this rank's in this attempt."""
        return self.rank in (None, rank) and self.attempt in (None, attempt)

    def covers(self, step: int) -> bool:
        """Return whether the fault is on in `step`."""
        return self.start <= step and (self.steps is None or step < self.start + self.steps)


def parse_fault(text: str, world_size: int, last_step: int) -> FaultPlan:
    """Return the plan that `text` describes, or raise a `SettingError` that says what is wrong."""
    name, _, rest = text.partition(":")
    by_name = {fault.name: fault for fault in FAULTS}
    if name not in by_name:
        known = ", ".join(by_name)
        raise SettingError("fault", f"{name!r} is no fault", f"Known faults: {known}")
    fields = _read_fields(text, rest)
    fault = type(by_name[name])()  # its own instance: two plans of a fault share nothing
    if fault.place is Place.START:
        fields.setdefault("start", "1")
    if fault.on_all_ranks:
        fields.setdefault("rank", "all")
    for key in ("rank", "start"):
        if key not in fields:
            raise SettingError("fault", f"{text!r} has no {key}", FORM)
    plan = FaultPlan(
        fault=fault,
        rank=None if fields["rank"] == "all" else _whole(text, fields, "rank"),
        start=_whole(text, fields, "start") or 0,
        steps=_whole(text, fields, "steps"),
        size=_size(text, fault, fields),
        peer=_whole(text, fields, "peer"),
        attempt=_whole(text, fields, "attempt"),
    )
    _check(text, plan, world_size, last_step)
    return plan


def _check(text: str, plan: FaultPlan, world_size: int, last_step: int) -> None:
    """Refuse ranks and steps that do not exist, and what this fault cannot do."""
    fault, ranks = plan.fault, f"Ranks are 0 to {world_size - 1}"
    for rank in (plan.rank, plan.peer):
        if rank is not None and not 0 <= rank < world_size:
            raise SettingError("fault", f"{text!r}: there is no rank {rank}", ranks)
    if not 1 <= plan.start <= last_step:
        problem = f"{text!r}: there is no step {plan.start}"
        raise SettingError("fault", problem, f"Steps are 1 to {last_step}")
    if plan.steps is not None and plan.steps < 1:
        problem = f"{text!r} lasts {plan.steps} steps"
        raise SettingError("fault", problem, "Give at least 1, or none")
    if fault.place is Place.START and (plan.start != 1 or plan.steps is not None):
        problem = f"{text!r}: {fault.name} acts before the first step, until the end"
        raise SettingError("fault", problem, "Leave start and steps out")
    if fault.on_all_ranks and plan.rank is not None:
        problem = f"{text!r}: {fault.name} on one rank would only break the run"
        raise SettingError("fault", problem, "Write rank=all, or leave it out")
    if plan.peer is not None and (not fault.has_peer or plan.peer == plan.rank):
        problem = f"{text!r}: {fault.name} is not between these two ranks"
        remedy = "Name another rank as peer" if fault.has_peer else "Leave peer out"
        raise SettingError("fault", problem, remedy)


def _read_fields(text: str, rest: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals or key not in KEYS or key in fields:
            raise SettingError("fault", f"{text!r}: cannot read {part!r}", FORM)
        fields[key] = value
    return fields


def _whole(text: str, fields: dict[str, str], key: str) -> int | None:
    if key not in fields:
        return None
    try:
        return int(fields[key])
    except ValueError as error:
        problem = f"{text!r}: {key} {fields[key]!r} is not a whole number"
        raise SettingError("fault", problem, FORM) from error


def _size(text: str, fault: Fault, fields: dict[str, str]) -> Magnitude | None:
    if "size" not in fields:
        return fault.default_size
    if fault.default_size is None:
        raise SettingError("fault", f"{text!r}: {fault.name} has no size", "Leave size out")
    written = fields["size"]
    unit = fault.default_size.unit
    remedy = REMEDIES[unit]
    number, scale = written, 1.0
    written_unit = unit if unit in ("ratio", "count", "share") else ""  # others have a suffix
    for suffix, suffix_unit, factor in SUFFIXES:
        if written.endswith(suffix):
            number, written_unit, scale = written.removesuffix(suffix), suffix_unit, factor
            break
    try:
        value = float(number)
    except ValueError as error:
        raise SettingError("fault", f"{text!r}: size {written!r} is no size", remedy) from error
    if written_unit != unit and (unit, written_unit) != ("ratio", "seconds"):
        raise SettingError("fault", f"{text!r}: size {written!r} is no size", remedy)
    if not 0 < value < float("inf") or (unit == "share" and value > 1):
        raise SettingError("fault", f"{text!r}: size {written!r} is not above 0", remedy)
    return Magnitude(**{written_unit: value * scale})
