"""Quiet hours: from one time of day to another on the clocks of a place, also over midnight."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta
from typing import Annotated, Literal, TypeAlias
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

TimeOfDay: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")]
_LONGEST = timedelta(days=2)


class QuietHours(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Messages wait from `start` to `end`, but those that come through."""

    start: TimeOfDay
    end: TimeOfDay
    zone: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]  # Europe/Berlin
    lets_through: Literal["critical", "none"] = "critical"


def check(quiet: QuietHours) -> None:
    """Raise ValueError, with the field first, where the hours cannot be."""
    if quiet.start == quiet.end:
        raise ValueError("quiet.end: it is the time at which they start; say another one")
    try:
        ZoneInfo(quiet.zone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(
            f"quiet.zone: {quiet.zone!r} is no time zone that this machine knows; "
            "say for example Europe/Berlin or UTC"
        ) from error


def is_quiet(quiet: QuietHours, at: datetime) -> bool:
    """Return whether a moment is in the quiet hours, by what clocks there show."""
    clock = at.astimezone(ZoneInfo(quiet.zone)).time()
    start, end = time.fromisoformat(quiet.start), time.fromisoformat(quiet.end)
    if start < end:
        return start <= clock < end
    return clock >= start or clock < end


def waits_until_ns(quiet: QuietHours | None, severity: str, now_ns: int) -> int:
    """Return until when a message waits; 0 where it is sent now."""
    if quiet is None or severity == quiet.lets_through:
        return 0
    at = datetime.fromtimestamp(now_ns / 1e9, UTC)
    if not is_quiet(quiet, at):
        return 0
    # By minutes: clocks that are put forward or back make the end another one than by sums.
    minute = at.replace(second=0, microsecond=0) + timedelta(minutes=1)
    last = minute + _LONGEST
    while minute < last and is_quiet(quiet, minute):
        minute += timedelta(minutes=1)
    return int(minute.timestamp()) * 10**9
