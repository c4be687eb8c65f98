"""What one dump says of a rank that is stuck, in a few lines for people."""

from __future__ import annotations

from datetime import UTC, datetime

from rankscope.node.flight.ask import Dump, Entry

_MAX_GROUPS = 30
_MAX_FRAMES = 10
_MAX_TEXT = 400


def summary(dump: Dump) -> dict[str, str]:
    """Return the fields of an event: where each group stands, and the oldest open operation."""
    fields = {"entries": str(len(dump.entries))}
    names = {str(entry.pg_id): entry.process_group for entry in dump.entries}
    for pg_id, status in sorted(dump.pg_status.items())[:_MAX_GROUPS]:
        name, description = names.get(pg_id, (f"number {pg_id}", ""))
        fields[f"group {name} {description}".strip()[:_MAX_TEXT]] = (
            f"enqueued {status.get('last_enqueued_collective', '?')}, "
            f"started {status.get('last_started_collective', '?')}, "
            f"completed {status.get('last_completed_collective', '?')}"
        )
    waiting = open_entries(dump)
    fields["open"] = str(len(waiting))
    if waiting:
        oldest = min(waiting, key=lambda entry: entry.record_id)
        fields["oldest open"] = _text(oldest)
        if oldest.frames:
            fields["oldest open, called from"] = "\n".join(
                f"{frame.filename}:{frame.line} {frame.name}"[:_MAX_TEXT]
                for frame in oldest.frames[:_MAX_FRAMES]
            )
    return fields


def open_entries(dump: Dump) -> list[Entry]:
    """Return what is not done: the state says so for NCCL, `retired` for every backend.

    The entries of a coalesced batch never change, the one that ends the batch tells for all.
    """
    done = {entry.batch for entry in dump.entries if _is_done(entry) and entry.ends_batch}
    return [entry for entry in dump.entries if not _is_done(entry) and entry.batch not in done]


def _is_done(entry: Entry) -> bool:
    return entry.retired or entry.state == "completed"


def _text(entry: Entry) -> str:
    at = datetime.fromtimestamp(entry.time_created_ns / 1e9, UTC) if _is_time(entry) else None
    parts = [
        f"{entry.profiling_name} in group {' '.join(entry.process_group)}",
        f"number {entry.sequence}",
        entry.state,
        f"{' '.join(entry.input_dtypes)} {entry.input_sizes} -> {entry.output_sizes}",
        "" if at is None else f"called {at:%Y-%m-%d %H:%M:%S.%f} UTC",
    ]
    return ", ".join(part for part in parts if part)[: 2 * _MAX_TEXT]


def _is_time(entry: Entry) -> bool:
    return 0 < entry.time_created_ns < 1 << 61
