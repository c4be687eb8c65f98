"""What ranks print tells what their end meant; alone, no line is a failure."""

from __future__ import annotations

import random

import msgspec
import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from rankscope_server.observe import line_table
from rankscope_server.observe.line_table import LineTable
from rankscope_server.verdict.answers import Look
from tests.analysis.failures import ECHOES, at, ended, look_after, raised, run

WATCHDOG = (
    "[rank%d]:[E1121 10:00:00.000000000 ProcessGroupNCCL.cpp:632] [Rank %d] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=40, OpType=ALLREDUCE, NumelIn=4096, "
    "Timeout(ms)=600000) ran for 600012 milliseconds before timing out."
)
# what a rank prints before it leaves without an exception; text of the verdict, family's remedy
CAUSES = (
    ("node-0:41:77 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-x to "
     "9637892 bytes, error: No space left on device (28)", "shm", "shm"),
    ("ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory",
     "libcudnn", "librar"),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "ECC", "GPU"),
    ("OSError: [Errno 28] No space left on device", "No space left", "free space"),
)  # fmt: skip


def line(rank: int, ms: float, text: str, level: int = 40) -> schema.LogLine:
    return schema.LogLine(
        attempt=0, rank=rank, time_ns=at(ms), level=level, message=text, stream="stderr"
    )


def crash_of(look: Look) -> Finding:
    (finding,) = [one for one in look.findings if one.detector == "root-cause"]
    return finding


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause[0][:30])
@pytest.mark.parametrize("seed", range(3))
def test_a_line_tells_why_a_rank_left_without_an_exception(
    cause: tuple[str, str, str], seed: int
) -> None:
    chance = random.Random(seed)
    culprit = chance.randrange(8)
    records: list[schema.AnyRecord] = [
        line(culprit, -100, cause[0]),
        ended(culprit, 0, reason="exit_code", exit_code=1),
    ]
    for rank in set(range(8)) - {culprit}:
        records.append(raised(rank, chance.uniform(20, 400), *chance.choice(ECHOES)))
        records.append(ended(rank, 500, reason="exit_code", exit_code=1))
    finding = crash_of(look_after(run(8, num_hosts=2), records, seed))
    assert finding.ranks == (culprit,)
    assert cause[1] in finding.what
    assert cause[2].lower() in finding.next.lower()
    assert finding.confidence >= 0.9
    assert any(one.text.startswith("Its log: ") for one in finding.evidence)


REFUSED = (
    "trainer: setting `layers`: 1 layers cannot fill 2 pipeline stages",
    "trainer: setting `heads`: 3 heads do not divide width 64 evenly",
    "trainer: setting `fault`: 'slow' is no fault. Known faults: " + ", ".join(["hang"] * 200),
)


@pytest.mark.parametrize("said_by", [1, line_table.LAUNCHER])
@pytest.mark.parametrize("why", REFUSED, ids=("cannot", "do not", "is no"))
def test_a_line_of_the_script_itself_is_told_in_place_of_the_exit_code_alone(
    said_by: int, why: str
) -> None:
    """A trainer that refuses its settings says why in one plain line, and leaves with 64."""
    launcher = "E1126 13:37:06.2 1 torch/distributed/elastic/multiprocessing/api.py:1002] failed"
    records: list[schema.AnyRecord] = [
        line(said_by, -90, why, level=20), line(line_table.LAUNCHER, -50, launcher),
        ended(1, 0, reason="exit_code", exit_code=64), ended(0, 80, reason="signal", signal=15),
    ]  # fmt: skip
    finding = crash_of(look_after(run(2), records))
    assert f"exited with code 64 in step 41: {why[:60]}" in finding.what
    assert finding.next == "Do what the line says that rank 1 ended with, then restart"
    assert any(one.text.startswith(f"Its log: {why[:60]}") for one in finding.evidence)
    ends = [record for record in records if isinstance(record, schema.RankEnded)]
    late = [line(said_by, -500_000, why, level=20), *ends]
    assert "without an exception" in crash_of(look_after(run(2), late)).what


@pytest.mark.parametrize("said_by", [1, line_table.LAUNCHER])
def test_an_argument_that_is_refused_is_told(said_by: int) -> None:
    why = "train.py: error: unrecognized arguments: --stepz 3"
    records: list[schema.AnyRecord] = [
        line(said_by, -90, why, level=20), ended(1, 0, reason="exit_code", exit_code=2),
        ended(0, 80, reason="signal", signal=15),
    ]  # fmt: skip
    finding = crash_of(look_after(run(2), records))
    assert finding.ranks == (1,)
    assert "unrecognized arguments: --stepz 3" in finding.what


def test_ranks_whose_watchdog_speaks_before_they_leave_are_echoes() -> None:
    """Rank 2 disappears; the others print that a collective timed out, and abort."""
    records: list[schema.AnyRecord] = [ended(2, 60, reason="lost")]
    for rank in (0, 1, 3):
        records.append(line(rank, -40 * rank, WATCHDOG % (rank, rank)))
        records.append(ended(rank, 20 - 10 * rank, reason="signal", signal=6))
    finding = crash_of(look_after(run(), records))
    assert finding.ranks == (2,)
    without = [record for record in records if not isinstance(record, schema.LogLine)]
    assert crash_of(look_after(run(), without)).ranks != (2,)  # the lines are what tells


GLOO_MISMATCH = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at third_party/gloo/gloo/transport/tcp/pair.cc:456] "
    "op.preamble.length <= op.nbytes. 5612 vs 5464. Received data size doesn't match expected size."
)


@pytest.mark.parametrize("printed_by", [0, line_table.LAUNCHER], ids=["rank", "launcher"])
@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_aborts_over_unlike_calls_is_not_accused(printed_by: int, seed: int) -> None:
    """Whichever rank compares the calls first ends; torchrun stops the others."""
    records: list[schema.AnyRecord] = [
        line(printed_by, -10, GLOO_MISMATCH, level=20),
        msgspec.structs.replace(
            raised(0, 0, "Aborted", "Fatal Python error: Aborted"), where="fatal_signal"
        ),
        ended(0, 5, reason="signal", signal=6),
        *(ended(rank, 60, reason="exit_code", exit_code=143) for rank in (1, 2, 3)),
    ]
    finding = crash_of(look_after(run(), records, seed))
    assert (finding.ranks, finding.severity) == ((), "critical")
    assert finding.what.startswith("The ranks called different collectives")
    assert "pair.cc" in finding.why
    assert "same collectives in the same order" in finding.next
    other = [record for record in records if not isinstance(record, schema.LogLine)]
    assert crash_of(look_after(run(), other, seed)).ranks == (0,)  # the line is what tells
    long_ago = [line(printed_by, -300_000, GLOO_MISMATCH, level=20), *other]
    assert crash_of(look_after(run(), long_ago, seed)).ranks == (0,)


@pytest.mark.parametrize("text", [CAUSES[0][0], WATCHDOG % (1, 1), "ERROR: giving up on cache"])
def test_lines_alone_are_no_failure(text: str) -> None:
    records: list[schema.AnyRecord] = [line(rank, 10.0 * rank, text) for rank in range(4)]
    assert look_after(run(), records).findings == []
    records += [ended(rank, 500, reason="clean", exit_code=0) for rank in range(4)]
    assert look_after(run(), records).findings == []


def test_what_a_rank_that_ended_well_said_too_is_no_cause() -> None:
    records: list[schema.AnyRecord] = [
        *(line(rank, -50, CAUSES[0][0]) for rank in (0, 1)),
        ended(0, 0, reason="clean", exit_code=0),
        ended(1, 0, reason="exit_code", exit_code=1),
    ]
    finding = crash_of(look_after(run(2), records))
    assert finding.ranks == (1,)
    assert "shm" not in finding.what
    assert finding.confidence < 0.85


def test_what_earlier_runs_that_ended_well_showed_is_no_cause() -> None:
    records: list[schema.AnyRecord] = [
        line(1, -50, CAUSES[0][0]), ended(1, 0, reason="exit_code", exit_code=1),
    ]  # fmt: skip
    state = run(4)
    key = line_table.key_of(40, CAUSES[0][0])
    assert key is not None
    state.usual_lines = frozenset({key})
    assert "shm" not in crash_of(look_after(state, records)).what
    assert "shm" in crash_of(look_after(run(4), records)).what


def test_old_lines_say_nothing_of_an_end() -> None:
    records: list[schema.AnyRecord] = [
        line(1, -200_000, CAUSES[0][0]), ended(1, 0, reason="exit_code", exit_code=1),
    ]  # fmt: skip
    assert "shm" not in crash_of(look_after(run(4), records)).what


def test_one_rank_that_names_a_cause_among_its_echoes_is_the_culprit() -> None:
    """Every rank raises a lost connection; one has printed that its GPU failed."""
    records: list[schema.AnyRecord] = [line(3, -30, CAUSES[2][0])]
    for rank in range(8):
        records.append(raised(rank, 10.0 * rank, *ECHOES[1]))
        records.append(ended(rank, 300, reason="exit_code", exit_code=1))
    finding = crash_of(look_after(run(8), records))
    assert finding.ranks == (3,)
    assert "ECC" in finding.what
    everyone: list[schema.AnyRecord] = [line(rank, -30, CAUSES[2][0]) for rank in range(8)]
    assert crash_of(look_after(run(8), [*records[1:], *everyone])).ranks == ()


def test_the_kernels_word_on_a_killed_rank() -> None:
    kill = schema.Event(
        attempt=0, rank=2, time_ns=at(-200), name="oom kill",
        fields={"text": "Memory cgroup out of memory: Killed process 41 (python)", "pid": "41"},
    )  # fmt: skip
    killed = ended(2, 0, reason="signal", signal=9)
    finding = crash_of(look_after(run(), [kill, killed]))
    assert finding.ranks == (2,)
    assert "ran out of memory" in finding.what
    assert "num_workers" in finding.next
    other = schema.Event(
        attempt=0, rank=1, time_ns=at(-200), name="oom kill", fields=dict(kill.fields)
    )
    assert "ran out of memory" not in crash_of(look_after(run(), [other, killed])).what


def test_order_and_doubling_change_nothing() -> None:
    lines = [
        line(rank, chance, text)
        for rank in range(4)
        for chance, text in ((5.0 * rank, CAUSES[0][0]), (900.0, CAUSES[3][0]), (40.0, "E: x"))
    ]
    tables = []
    for seed in range(4):
        table, mixed = LineTable(), [*lines, *lines[::2]]
        random.Random(seed).shuffle(mixed)
        for one in mixed:
            table.take(one)
        tables.append({row.key: (row.first, row.text, row.said) for row in table.rows.values()})
    assert all(table == tables[0] for table in tables)


def test_memory_does_not_grow_with_the_logs() -> None:
    """4,096 ranks with prefixes of any width say alike; one rank says a new thing each time."""
    table = LineTable()
    for rank in range(4096):
        table.take(line(rank, rank, f"[rank{rank}]: RuntimeError: bad shard {rank}: Errno 28 x"))
    assert len(table.rows) == 1
    for number in range(2000):
        word = "".join(chr(97 + (number // 26**k) % 26) for k in range(4))
        table.take(line(0, number, f"ERROR {word} went wrong"))
    assert len(table.rows) <= line_table._MAX_UNKNOWN + 2
    table.take(line(1, 5000, "loss 0.1", level=20))
    assert not any("loss" in key for key in table.rows)


def test_a_state_feeds_its_table() -> None:
    state = RunState("run")
    for _ in range(2):
        state.apply_record(line(0, 0, CAUSES[1][0]))
    (attempt,) = state._attempts.values()
    assert len(attempt.lines.rows) == 1
