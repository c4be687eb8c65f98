"""Blocks, floods and the errors that only C++ could print."""

from __future__ import annotations

import logging

import pytest

from rankscope.output.blocks import summary_fields
from rankscope.output.line_records import FAILURE_SUMMARY, LineRecords
from rankscope.output.lines import BURST_LINES, BURST_SERIOUS, Line, LineIndexer, level_of
from rankscope.wire import schema

# as torchrun 2.13 printed it
SUMMARY = """============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_10:16:17
  host      : node7
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 4241)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_10:16:15
  host      : node7
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 4242)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4242
============================================================"""
TIMEOUT = (
    "[rank2]:[E1121 10:00:00.123456789 ProcessGroupNCCL.cpp:632] [Rank 2] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
    "Timeout(ms)=600000) ran for 600012 milliseconds before timing out."
)
TERMINATE = (
    "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 2] Process group watchdog thread terminated "
    "with exception: CUDA error\n"
    "Exception raised from ncclCommWatchdog at /pytorch/x.cpp:1901 (most recent call first):\n"
    "frame #0: c10::Error::Error(...)\n"
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Indexed:
    """An indexer and what came out of it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.lines: list[Line] = []
        self.suppressed: list[int] = []
        self.indexer = LineIndexer(
            "stderr", self.lines.append, self.suppressed.append, clock=self.clock,
            wall_ns=lambda: 1,
        )  # fmt: skip

    def feed(self, text: str) -> list[Line]:
        self.indexer.feed(text.encode())
        self.indexer.flush()
        return self.lines


@pytest.fixture
def indexed() -> Indexed:
    return Indexed()


def test_torchruns_summary_is_one_line_and_an_event(indexed: Indexed) -> None:
    before, block, after = indexed.feed(f"before\n{SUMMARY}\nafter\n")
    assert (before.text, after.text) == ("before", "after")
    assert (block.text, block.kind, block.level) == (SUMMARY, "summary", logging.ERROR)
    _, event = LineRecords().of(block, 2, schema.NODE_RANK)
    assert isinstance(event, schema.Event)
    assert (event.name, event.rank, event.attempt) == (FAILURE_SUMMARY, 1, 2)
    assert event.fields == {
        "host": "node7", "time": "2026-11-21_10:16:15", "rank": "1", "local_rank": "1",
        "exit_code": "-9", "pid": "4242", "failures": "2",
        "error": "Signal 9 (SIGKILL) received by PID 4242",
    }  # fmt: skip


def test_a_rule_that_begins_no_summary_stays_a_line(indexed: Indexed) -> None:
    lines = indexed.feed(f"{'=' * 60}\nResults\n{'=' * 60}\nacc 0.9\n")
    assert [line.text for line in lines] == ["=" * 60, "Results", "=" * 60, "acc 0.9"]
    assert {line.level for line in lines} == {logging.INFO}
    assert summary_fields("nothing") == {}


def test_a_watchdog_is_an_error_of_its_rank_once(indexed: Indexed) -> None:
    (line,) = indexed.feed(TIMEOUT + "\n")
    assert (line.level, line.rank) == (logging.ERROR, 2)
    records = LineRecords()
    said, error = records.of(line, 0, 2)
    assert isinstance(said, schema.LogLine)
    assert isinstance(error, schema.ErrorRaised)
    assert (error.type, error.where, error.rank) == ("NCCL watchdog timeout", "collective", 2)
    assert error.message.startswith("ALLREDUCE SeqNum=7 ran for 600012 ms: ")
    assert len(records.of(line, 0, 2)) == 1
    assert len(records.of(line, 0, 3)) == 2


def test_what_cpp_says_at_its_end_is_one_error(indexed: Indexed) -> None:
    block, after = indexed.feed(TERMINATE + "Fatal Python error: Aborted\n")
    assert block.kind == "terminate"
    assert after.text == "Fatal Python error: Aborted"
    assert len(LineRecords().of(after, 0, schema.NODE_RANK)) == 1  # of nobody knows which rank
    _, error = LineRecords().of(block, 0, schema.NODE_RANK)
    assert isinstance(error, schema.ErrorRaised)
    assert (error.type, error.rank) == ("c10::DistBackendError", 2)
    assert error.where == "collective"
    assert error.message.endswith("terminated with exception: CUDA error")
    assert "frame #0" in error.traceback


def test_faulthandler_of_the_script_is_an_error_too(indexed: Indexed) -> None:
    report = (
        "Fatal Python error: Segmentation fault\n\nThread 0x00007f (most recent call first):\n"
        '  File "a.py", line 3 in wait\n\nCurrent thread 0x00007e (most recent call first):\n'
        '  File "a.py", line 9 in f\n\nExtension modules: numpy.core (total: 1)'
    )
    block, after = indexed.feed(f"{report}\nnext\n")
    assert (block.text, block.kind, after.text) == (report, "fatal", "next")
    _, error = LineRecords().of(block, 0, 4)
    assert isinstance(error, schema.ErrorRaised)
    assert (error.type, error.where) == ("Segmentation fault", "fatal_signal")
    assert error.traceback == report


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, "
         "OpType=BROADCAST)", "NCCL watchdog timeout"),
        ("[rank1]: [PG ID 0 PG GUID 0 Rank 1] Process group watchdog thread terminated with "
         "exception: NCCL error", "NCCL watchdog error"),
        ("[Rank 3] Heartbeat monitor timed out! Process will be terminated after dumping debug "
         "info. workMetaList_.size()=1", "NCCL heartbeat monitor"),
        ("To avoid data inconsistency, we are taking the entire process down.",
         "NCCL takes the process down"),
        ("terminate called without an active exception", "std::terminate"),
        ("a watchdog barks", None),
        ("Watchdog is enabled", None),
    ],
)  # fmt: skip
def test_forms_of_native_errors(text: str, kind: str | None) -> None:
    records = LineRecords().of(Line(text, "stderr", 20, 1), 0, 0)
    assert [r.type for r in records if isinstance(r, schema.ErrorRaised)] == (
        [kind] if kind else []
    )


def test_secrets_go_out_of_lines_and_blocks(indexed: Indexed) -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEabc/+\nMIIEdef\n-----END RSA PRIVATE KEY-----"
    lines = indexed.feed(f"password=hunter2\n{key}\nafter\nTraceback (most recent call last):\n"
                         '  File "a", line 1\nValueError: Bearer abcdef0123\n')  # fmt: skip
    texts = "\n".join(line.text for line in lines)
    assert not any(secret in texts for secret in ("hunter2", "MIIE", "abcdef0123"))
    assert [line.level for line in lines] == [logging.INFO, logging.INFO, logging.INFO, 40]


def test_a_flood_costs_no_error(indexed: Indexed) -> None:
    flood = b"".join(b"INFO line %d\n" % number for number in range(BURST_LINES + 20_000))
    for start in range(0, len(flood), 5000):
        indexed.indexer.feed(flood[start : start + 5000])
    indexed.indexer.feed(b"INFO x\nERROR: disk\n[rank0]: Traceback (most recent call last):\n")
    indexed.indexer.feed(b'[rank0]:   File "a.py"\n[rank0]: KeyError: 1\nINFO y\n')
    indexed.indexer.flush()
    assert [line.text for line in indexed.lines[BURST_LINES:]] == [
        "ERROR: disk", 'Traceback (most recent call last):\n  File "a.py"\nKeyError: 1',
    ]  # fmt: skip
    assert sum(indexed.suppressed) == 20_002
    errors = b"ERROR: again\n" * (BURST_SERIOUS + 500)
    indexed.indexer.feed(errors)
    indexed.indexer.flush()
    assert sum(indexed.suppressed) == 20_002 + 502  # errors have a limit too


def test_progress_bars_leave_their_last_drawing(indexed: Indexed) -> None:
    for percent in range(100):
        indexed.indexer.feed(b"\r%3d%%|####      | %d/100" % (percent, percent))
    assert len(indexed.indexer._state.partial) < 100
    indexed.indexer.feed(b"\r100%|##########| 100/100\n")
    assert [line.text for line in indexed.lines] == ["100%|##########| 100/100"]


@pytest.mark.parametrize("prefix", ["", "["])
def test_levels_of_glog(prefix: str) -> None:
    assert level_of(f"{prefix}W1121 10:16:15.123456789 socket.cpp:755] x") == logging.WARNING
    assert level_of(f"{prefix}F1121 10:16:15.123456789 socket.cpp:755] x") == logging.CRITICAL
