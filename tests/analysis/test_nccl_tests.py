"""The reader of nccl-tests: recorded rows from public reports, and every layout of a row."""

from __future__ import annotations

import pytest

from rankscope.wire.formulas import bus_factor
from rankscope_server.importers.nccl_tests import read_nccl_tests

# Rows as printed, with where they were reported, the operation and the number of ranks.
RECORDED = [
    # github.com/coreweave/nccl-tests, pull request 43 (GB200, 72 GPUs)
    ("all_reduce", 72, 586.06, 1806.7,
     "   536870912     134217728     float     sum      -1   1806.7  297.16  586.06      0   1835.9"
     "  292.43  576.74      0"),
    # github.com/kvcache-ai/Mooncake, pull request 3484 (8 GPUs): in place is the faster one
    ("all_reduce", 8, 66.76, 27.49,
     "  1048576        262144     float     sum      -1    27.76   37.78   66.11       0    27.49"
     "   38.15   66.76       0"),
    # github.com/NVIDIA/nccl, issue 340 (2 GPUs, before June 2020): algbw holds the factor 1/2
    ("all_gather", 2, 21.86, 3070.3,
     "   134217728      16777216   float   3298.6   20.34   20.34  0e+00   3070.3   21.86   21.86"
     "  0e+00"),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "num_ranks", "busbw", "took_us", "line"), RECORDED)
def test_recorded_rows_give_the_printed_bandwidth(
    operation: str, num_ranks: int, busbw: float, took_us: float, line: str
) -> None:
    (row,) = read_nccl_tests(line, operation, num_ranks)
    assert row.took_us == took_us
    assert row.busbw_bytes_per_second == pytest.approx(busbw * 1e9, rel=0.01)
    assert row.printed_busbw_bytes_per_second == pytest.approx(busbw * 1e9)
    assert row.agrees
    assert row.has_factor == (operation == "all_gather")


def table(operation: str, num_ranks: int, layout: str, held: bool) -> str:
    """Return a text in one of the layouts that the tool has had."""
    factor = bus_factor(operation, num_ranks)
    assert factor is not None
    program = {"all_to_all": "alltoall"}.get(operation, operation)
    lines = [f"+ ./build/{program}_perf -b 1M -e 1G -f 4", "#", "# Using devices"]
    lines += [
        f"#  Rank {r:2} Group  0 Pid {100 + r} on node-a device {r}" for r in range(num_ranks)
    ]
    lines.append("#       size         count      type   redop    root     time   algbw   busbw")
    for power in range(20, 31, 2):
        size = 1 << power
        halves = []
        for slower in (1.0, 1.1):
            took = (30 + size / 40e3) * slower
            algbw = size / took / 1e3
            shown = algbw * factor if held else algbw
            last = {"new": "0", "error": "1e-07", "na": "N/A"}[layout]
            halves.append(f"{took:8.2f} {shown:7.2f} {algbw * factor:7.2f} {last:>6}")
        words = {"new": "float     sum      -1", "error": "float     sum", "na": "float    none"}
        lines.append(f"{size:12} {size // 4:12} {words[layout]} {' '.join(halves)}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 41.1"])


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("layout", ["new", "error", "na"])
@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_the_factor_is_applied_once(operation: str, layout: str, held: bool) -> None:
    rows = read_nccl_tests(table(operation, 16, layout, held))
    assert len(rows) == 6
    for row in rows:
        assert (row.operation, row.num_ranks) == (operation, 16)
        assert row.busbw_bytes_per_second == pytest.approx(
            row.printed_busbw_bytes_per_second, rel=0.01
        )
        assert row.agrees
        if operation == "all_reduce":  # 15/16 drowns in the digits that are printed
            assert row.has_factor == held


def test_a_bandwidth_that_does_not_follow_from_size_and_time_is_said() -> None:
    line = "8388608 2097152 float sum -1 100.0 83.89 300.00 0 100.0 83.89 300.00 0"
    (row,) = read_nccl_tests(line, "all_reduce", 8)
    assert not row.agrees
    assert row.busbw_bytes_per_second == pytest.approx(83.89e9 * 1.75, rel=0.01)


def test_other_lines_are_no_rows() -> None:
    text = "\n".join(
        [
            "node-a:1:1 [0] NCCL INFO Channel 00/02 : 0 1 2 3",
            "0 0 float sum -1 5.70 0.00 0.00 0 5.54 0.00 0.00 0",
            "1048576 262144 float sum",
            "Traceback (most recent call last):",
        ]
    )
    assert read_nccl_tests(text) == []
    assert read_nccl_tests("") == []
