"""The text of NVIDIA's nccl-tests (and of RCCL's): sizes, times and bandwidths, checked.

A bandwidth is taken from size and time, and what is printed is held against it. Some versions and
forks print an algorithm bandwidth that already holds the factor of the bus bandwidth: that is
recognised and never applied twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rankscope.wire.formulas import bus_factor

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
    held_factor: bool  # the printed algorithm bandwidth was already the bus bandwidth
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
    held = _near(algbw * 1e9, true_algbw * factor) and not _near(algbw * 1e9, true_algbw)
    return BenchmarkRow(
        operation,
        num_ranks,
        size,
        took_us,
        true_algbw,
        true_algbw * factor,
        printed,
        held,
        _near(printed, true_algbw * factor),
    )


def _near(one: float, other: float) -> bool:
    # Bandwidths are printed with two digits after the point of a GB/s.
    return abs(one - other) <= max(_AGREE * other, 0.006e9)
