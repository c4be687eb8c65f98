"""Read `name:rank=R,start=S,steps=N,size=X` into a plan."""

from __future__ import annotations

import dataclasses

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults import FAULTS
from rankscope_trainer.faults.fault import Fault, Magnitude

FORM = "Write name:rank=R,start=S,steps=N,size=X; rank and start are required"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """One fault, on one rank, from step `start` on, for `steps` steps (None: until the end)."""

    fault: Fault
    rank: int
    start: int
    steps: int | None
    size: Magnitude | None

    def covers(self, step: int) -> bool:
        """Tell whether the fault is on in `step`."""
        return self.start <= step and (self.steps is None or step < self.start + self.steps)


def parse_fault(text: str, world_size: int, last_step: int) -> FaultPlan:
    """Return the plan that `text` describes, or raise a `SettingError` that says what is wrong."""
    name, _, rest = text.partition(":")
    by_name = {fault.name: fault for fault in FAULTS}
    if name not in by_name:
        known = ", ".join(by_name)
        raise SettingError("fault", f"{name!r} is no fault", f"Known faults: {known}")
    fields = _read_fields(text, rest)
    rank, start = _whole(text, fields, "rank"), _whole(text, fields, "start")
    if rank is None or start is None:
        missing = "rank" if rank is None else "start"
        raise SettingError("fault", f"{text!r} has no {missing}", FORM)
    steps = _whole(text, fields, "steps")
    if not 0 <= rank < world_size:
        raise SettingError(
            "fault", f"{text!r}: there is no rank {rank}", f"Ranks are 0 to {world_size - 1}"
        )
    if not 1 <= start <= last_step:
        raise SettingError(
            "fault", f"{text!r}: there is no step {start}", f"Steps are 1 to {last_step}"
        )
    if steps is not None and steps < 1:
        raise SettingError("fault", f"{text!r} lasts {steps} steps", "Give at least 1, or none")
    fault = by_name[name]
    return FaultPlan(
        fault=fault, rank=rank, start=start, steps=steps, size=_size(text, fault, fields)
    )


def _read_fields(text: str, rest: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals or key not in ("rank", "start", "steps", "size") or key in fields:
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
    remedy = "Write 50ms or 2s for time, 1.5 for a multiple of the rank's own compute"
    number, scale = written, 0.0
    for suffix, seconds in (("ms", 1e-3), ("s", 1.0)):
        if written.endswith(suffix):
            number, scale = written.removesuffix(suffix), seconds
            break
    try:
        value = float(number)
    except ValueError as error:
        raise SettingError("fault", f"{text!r}: size {written!r} is no size", remedy) from error
    if not 0 < value < float("inf"):
        raise SettingError("fault", f"{text!r}: size {written!r} is not above 0", remedy)
    return Magnitude(seconds=value * scale) if scale else Magnitude(ratio=value)
