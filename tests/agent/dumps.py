"""Flight Recorder dumps, made by hand."""

from __future__ import annotations

from typing import Any


def entry(number: int, **more: Any) -> dict[str, Any]:
    """Return an entry as NCCL's recorder writes it."""
    return {
        "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"),
        "collective_seq_id": number + 1, "p2p_seq_id": 0, "op_id": number + 1,
        "profiling_name": "nccl:all_reduce", "time_created_ns": 10**18 + number * 10**6,
        "input_sizes": [[8, 4]], "input_dtypes": ["Float"], "output_sizes": [[8, 4]],
        "output_dtypes": ["Float"], "state": "completed", "retired": True, "is_p2p": False,
        "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
        "timeout_ms": 600_000,
    } | more  # fmt: skip


def dump(entries: list[dict[str, Any]], ranks: str = "[0, 1]", **status: int) -> dict[str, Any]:
    counts = {"last_enqueued_collective": len(entries), "last_started_collective": -1,
              "last_completed_collective": sum(e["retired"] for e in entries)} | status  # fmt: skip
    return {
        "version": "2.10", "nccl_version": "2.27",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}},
        "pg_status": {"0": counts}, "entries": entries,
    }  # fmt: skip
