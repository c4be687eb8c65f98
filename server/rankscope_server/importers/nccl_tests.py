"""The text of NVIDIA's nccl-tests (and of RCCL's): sizes, times and bandwidths, checked.

A bandwidth is taken from size and time, and compared with what is printed. Some versions and
forks print an algorithm bandwidth that already holds the factor of the bus bandwidth: that is
recognised and never applied twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankscope.importers.flight_records import Imported
from rankscope.wire import schema
from rankscope.wire.formulas import bus_factor
from rankscope_server.importers.columns import chunk_of, collective_columns

_AGREE = 0.05  # printed with two or three digits, small ones are rounded by that much
_TEST = re.compile(
    r"\b(all_reduce|all_gather|reduce_scatter|alltoall|all_to_all|broadcast|reduce|sendrecv|"
    r"gather|scatter|hypercube)_perf\b",
)
_GIVEN_RANKS = re.compile(r"nThread\s+(\d+)\s+nGpus\s+(\d+)", re.IGNORECASE)
_RANK_LINE = re.compile(r"^#?\s+Rank\s+(\d+)\b", re.IGNORECASE)
_OPERATIONS = {"alltoall": "all_to_all", "sendrecv": "send"}
_TYPES = re.compile(r"float|double|half|bfloat16|u?int(8|32|64)|u?char|f8e\dm\d|fp8\w*")


@dataclass(frozen=True, slots=True)
class BenchmarkRow:
    """One size. Bandwidths are bytes per second, of the faster of out of place and in place."""

    operation: str
    num_ranks: int
    size_bytes: int
    took_us: float
    algbw_bytes_per_second: float  # size / time
    busbw_bytes_per_second: float
    printed_busbw_bytes_per_second: float
    has_factor: bool  # the printed algorithm bandwidth was already the bus bandwidth
    agrees: bool  # what is printed follows from size and time


def read_nccl_tests(text: str, operation: str = "", num_ranks: int = 0) -> list[BenchmarkRow]:
    """Return the rows of a benchmark's output.

    Operation and number of ranks are read from the text; give them where it does not say. A row
    whose factor is not known has the printed bus bandwidth.
    """
    found = _TEST.search(text)
    if not operation and found:
        operation = _OPERATIONS.get(found[1], found[1])
    if not num_ranks:
        num_ranks = _ranks_of(text)
    rows = (_row_of(line.split(), operation, num_ranks) for line in text.splitlines())
    return [row for row in rows if row is not None]


def _ranks_of(text: str) -> int:
    ranks = {int(m[1]) for line in text.splitlines() if (m := _RANK_LINE.match(line))}
    if ranks:
        return max(ranks) + 1
    given = _GIVEN_RANKS.search(text)
    return int(given[1]) * int(given[2]) if given else 0


def _row_of(words: list[str], operation: str, num_ranks: int) -> BenchmarkRow | None:
    """Return the row of a line: size, count, type, reduce op, root, then twice four numbers."""
    if len(words) < 6 or not (words[0].isdecimal() and words[1].isdecimal()):
        return None
    if not _TYPES.fullmatch(words[2]) or not int(words[0]):
        return None
    values = words[3:]
    while values and not _is_number(values[0]):  # the reduce op; others have none
        values = values[1:]
    values = values[len(values) % 4 == 1 :]  # the root
    if len(values) < 4:
        return None
    runs = [values[:3], values[4:7]]
    known = [tuple(map(float, run)) for run in runs if len(run) == 3 and all(map(_is_number, run))]
    good = [run for run in known if run[0] > 0]
    return _row(operation, num_ranks, int(words[0]), *min(good)) if good else None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _row(
    operation: str, num_ranks: int, size: int, took_us: float, algbw: float, busbw: float
) -> BenchmarkRow:
    true_algbw = size / took_us * 1e6
    factor = bus_factor(operation, num_ranks)
    printed = busbw * 1e9
    if factor is None:
        factor = printed / true_algbw if true_algbw else 1.0
    has_factor = _near(algbw * 1e9, true_algbw * factor) and not _near(algbw * 1e9, true_algbw)
    return BenchmarkRow(
        operation,
        num_ranks,
        size,
        took_us,
        true_algbw,
        true_algbw * factor,
        printed,
        has_factor,
        _near(printed, true_algbw * factor),
    )


def _near(one: float, other: float) -> bool:
    # Bandwidths are printed with two digits after the point of a GB/s.
    return abs(one - other) <= max(_AGREE * other, 0.006e9)


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
        found.records += _measurement(row, number, int(began[number - 1]))
    return found


def _ranks(text: str) -> dict[int, _Rank]:
    found = {}
    for line in text.splitlines():
        match = _RANK.match(line)
        if match is not None:
            model = re.sub(r"^\[\S+\]\s*", "", match[5]).strip()
            found[int(match[1])] = _Rank(match[3], int(match[2]), int(match[4]), model[:200])
    return found


def _measurement(row: BenchmarkRow, number: int, time_ns: int) -> list[schema.Record]:
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
    columns = collective_columns(count)
    columns |= {
        "arrived_ns": began, "duration_ns": took_ns, "device_duration_ns": took_ns,
        "blocked_ns": np.zeros(count, np.int64), "sequence": np.arange(1, count + 1),
        "step": np.arange(1, count + 1), "size_bytes": sizes, "input_bytes": sizes,
        "num_tensors": np.ones(count, np.int64), "state": np.full(count, schema.ENDED),
        "flags": np.zeros(count, np.int64), "group": [GROUP] * count,
        "operation": [_operation(row.operation) for row in rows], "dtype": ["other"] * count,
    }  # fmt: skip
    return chunk_of("collectives", rank, columns, host)


def _operation(name: str) -> str:
    return name if name in schema.OPERATIONS else "other"
