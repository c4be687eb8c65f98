"""What torch's own `fr_trace` says of dumps that the simulated ranks would have written."""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from tests.simulator.job import Job
from tests.simulator.records import MS, START_NS, Recording

NAME = "fr_trace"
_DTYPES = {"float32": "Float", "bfloat16": "BFloat16", "int32": "Int"}
_MISSING = re.compile(r"missing ranks: \{([\d, ]+)\}")
_CULPRIT = re.compile(r"Culprit rank (\d+)")


def dumps_of(recording: Recording) -> list[dict[str, Any]]:
    """Return the dump of every rank: collectives of the last steps, as in version 2.10."""
    job, rows = recording.job, [(step, row) for step in recording._kept for row in step.rows
                                if row.peer is None]  # fmt: skip
    numbers = recording._numbers(rows, np.array([row.issued.ravel() for _, row in rows]))
    places = {name: number for number, name in enumerate(job.groups)}
    config = {
        str(number): {"name": str(number), "desc": name, "ranks": str(list(job.groups[name]))}
        for name, number in places.items()
    }
    return [_dump(recording, rank, rows, numbers, places, config) for rank in range(job.num_ranks)]


def _dump(recording: Recording, rank: int, rows: Any, numbers: Any, places: Any,
          config: Any) -> dict[str, Any]:  # fmt: skip
    entries = []
    names = recording.job.group_names(rank)
    for at, (_, row) in enumerate(rows):
        issued, ended = row.issued.ravel()[rank], row.ended.ravel()[rank]
        if not np.isfinite(issued):
            continue
        call, group = row.odd.get(rank, row.call), places[names[row.kind]]
        done = bool(np.isfinite(ended))
        size = [call.size_bytes // (2 if call.dtype == "bfloat16" else 4)]
        entries.append({
            "record_id": len(entries), "pg_id": group, "collective_seq_id": int(numbers[at, rank]),
            "process_group": (str(group), config[str(group)]["desc"]), "p2p_seq_id": 0,
            "op_id": len(entries), "profiling_name": f"nccl:{call.operation}",
            "time_created_ns": START_NS + int(issued * MS), "input_sizes": [size],
            "input_dtypes": [_DTYPES[call.dtype]], "output_sizes": [size],
            "output_dtypes": [_DTYPES[call.dtype]], "state": "completed" if done else "scheduled",
            "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
            "retired": done, "timeout_ms": 600_000, "is_p2p": False, "frames": [],
        })  # fmt: skip
    return {"version": "2.10", "pg_config": config, "entries": entries, "rank": rank}


def fr_trace(recording: Recording) -> tuple[int, ...]:
    """Return the ranks that `torch.distributed.flight_recorder.fr_trace` names."""
    with warnings.catch_warnings():  # its own, on Python 3.13
        warnings.filterwarnings("ignore", "Failing to pass a value to the 'type_params'")
        from torch.distributed.flight_recorder import fr_trace as tool

    heard = io.StringIO()
    logger = logging.getLogger("Flight Recorder")
    own, logger.handlers = logger.handlers, [logging.StreamHandler(heard)]
    with tempfile.TemporaryDirectory() as folder:
        for dump in dumps_of(recording):
            (Path(folder) / f"dump_{dump['rank']}").write_bytes(pickle.dumps(dump))
        try:
            with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
                tool.main([folder, "--prefix", "dump_"])
        finally:
            logger.handlers = own
    text = heard.getvalue()
    found = {int(number) for match in _MISSING.findall(text) for number in match.split(",")}
    return tuple(sorted(found | {int(number) for number in _CULPRIT.findall(text)}))


def may_run(job: Job) -> bool:
    """Return whether the tool has a case: it reads collectives of what stopped or differs."""
    kinds = {fault.kind for fault in job.faults}
    return bool(kinds & {"hang", "skip", "insert", "swap", "shape", "dtype", "operation"})
