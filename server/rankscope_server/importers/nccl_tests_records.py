"""A benchmark of nccl-tests as a run: every size one step, the same for all ranks.

The tool prints one time for all ranks (their mean, unless told otherwise), so each rank gets it;
who was slow among them cannot be known from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankscope.importers.flight_records import Imported
from rankscope.wire import schema
from rankscope.wire.chunk import Column, encode_chunk
from rankscope_server.importers.nccl_tests import BenchmarkRow, read_nccl_tests

SOURCE = "nccl-tests"
GROUP = "world"
_MAX_RANKS = 1 << 16
# "#  Rank  0 Group  0 Pid  1234 on  node-a device  0 [0x07] NVIDIA H100"
_RANK = re.compile(r"#?\s+Rank\s+(\d+)\s.*?Pid\s+(\d+)\s+on\s+(\S+)\s+device\s+(\d+)\s*(.*)", re.I)
_VERSION = re.compile(r"(?:NCCL version|nccl-headers=|nccl-library=)\s*([\d.]+)", re.I)


@dataclass(frozen=True, slots=True)
class _Rank:
    host: str
    pid: int
    device: int
    model: str


def import_nccl_tests(text: str, time_ns: int) -> Imported:
    """Return the records of a benchmark that ended at `time_ns`. Raises ValueError."""
    rows = read_nccl_tests(text)
    if not rows:
        raise ValueError("no row of results; give what the benchmark printed, whole")
    ranks = _ranks(text)
    num_ranks = max(rows[0].num_ranks, len(ranks))
    if not 0 < num_ranks <= _MAX_RANKS:
        raise ValueError("it does not say how many ranks took part; give its head too")
    took_ns = [max(1, round(row.took_us * 1e3)) for row in rows]
    began = time_ns - sum(took_ns) + np.concatenate([[0], np.cumsum(took_ns)[:-1]]).astype(np.int64)
    found = Imported(num_ranks)
    version = _VERSION.search(text)
    for rank in range(num_ranks):
        known = ranks.get(rank, _Rank("", 0, rank, ""))
        who: dict[str, Any] = {"attempt": 0, "rank": rank, "time_ns": int(began[0])}
        found.records += [
            schema.RankRegistered(
                **who, world_size=num_ranks, local_rank=known.device, local_world_size=1,
                node_rank=-1, host=known.host, pid=known.pid, backend="nccl",
                sources={"collectives": SOURCE},
            ),
            schema.GroupDefined(**who, group=GROUP, ranks=list(range(num_ranks)), backend="nccl"),
        ]  # fmt: skip
        facts = {"gpu.model": known.model, "nccl": version[1] if version else ""}
        facts = {name: value for name, value in facts.items() if value}
        if facts:
            found.records.append(schema.Environment(**who, facts=facts))
        found.chunks.append(_chunk(rank, known.host, rows, began, np.array(took_ns)))
    for number, row in enumerate(rows, 1):
        found.records += _told(row, number, int(began[number - 1]))
    return found


def _ranks(text: str) -> dict[int, _Rank]:
    found = {}
    for line in text.splitlines():
        match = _RANK.match(line)
        if match is not None:
            model = re.sub(r"^\[\S+\]\s*", "", match[5]).strip()
            found[int(match[1])] = _Rank(match[3], int(match[2]), int(match[4]), model[:200])
    return found


def _told(row: BenchmarkRow, number: int, time_ns: int) -> list[schema.Record]:
    who: dict[str, Any] = {"attempt": 0, "rank": 0, "time_ns": time_ns, "step": number}
    values = {
        "size_bytes": float(row.size_bytes), "took_us": row.took_us,
        "algbw_bytes_per_second": row.algbw_bytes_per_second,
        "busbw_bytes_per_second": row.busbw_bytes_per_second,
    }  # fmt: skip
    text = (
        f"{row.operation or 'operation'} of {row.size_bytes:,} bytes: {row.took_us:g} us, "
        f"bus bandwidth {row.busbw_bytes_per_second / 1e9:.2f} GB/s"
    )
    if not row.agrees:
        text += (
            f"; printed is {row.printed_busbw_bytes_per_second / 1e9:.2f}, which does not follow"
        )
    level = 20 if row.agrees else 30
    return [
        schema.Metrics(**who, values=values),
        schema.LogLine(**who, level=level, message=text, logger=SOURCE, stream="stdout"),
    ]


def _chunk(
    rank: int, host: str, rows: list[BenchmarkRow], began: Any, took_ns: Any
) -> schema.Chunk:
    count = len(rows)
    sizes = np.array([row.size_bytes for row in rows], np.int64)
    columns: dict[str, Column] = {
        name: [""] * count if name in schema.STRING_COLUMNS else np.full(count, -1, np.int64)
        for name in schema.COLLECTIVE_COLUMNS
    }
    columns |= {
        "arrived_ns": began, "duration_ns": took_ns, "device_duration_ns": took_ns,
        "blocked_ns": np.zeros(count, np.int64), "sequence": np.arange(1, count + 1),
        "step": np.arange(1, count + 1), "size_bytes": sizes, "input_bytes": sizes,
        "num_tensors": np.ones(count, np.int64), "state": np.full(count, schema.ENDED),
        "flags": np.zeros(count, np.int64), "group": [GROUP] * count,
        "operation": [_operation(row.operation) for row in rows], "dtype": ["other"] * count,
    }  # fmt: skip
    return schema.Chunk(
        kind="collectives", attempt=0, rank=rank, host=host, count=count,
        time_lo_ns=int(began[0]), time_hi_ns=int(began[-1]), data=encode_chunk(columns),
        step_lo=1, step_hi=count,
    )  # fmt: skip


def _operation(name: str) -> str:
    return name if name in schema.OPERATIONS else "other"
