"""Which runs of experiment trackers a run is linked with: one of each tracker."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rankscope.wire.schema import Event
from rankscope.wire.trackers import FIELDS, TITLES


def merged(stored: str, events: Iterable[Event]) -> str:
    """Return the JSON of what is known with more events, whatever their order.

    Of each tracker the newest attempt counts, in it the lowest rank, and of several runs of this
    rank the first, in which others may be nested.
    """
    known: dict[str, dict[str, Any]] = json.loads(stored)
    for event in events:
        tracker = event.fields.get("tracker", "")
        if tracker not in TITLES:
            continue
        said: dict[str, Any] = {name: event.fields.get(name, "") for name in FIELDS}
        said |= {"attempt": event.attempt, "rank": event.rank, "time_ns": event.time_ns}
        known[tracker] = min(known.get(tracker, said), said, key=_order)
    return json.dumps(known, sort_keys=True)


def _order(said: dict[str, Any]) -> tuple[int, int, int, str]:
    return -said["attempt"], said["rank"], said["time_ns"], said["run"]
