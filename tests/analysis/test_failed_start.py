"""A program that ends before any step: its own sentence is the headline, and no rank is blamed."""

from __future__ import annotations

import random

import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.findings.finding import Finding
from rankscope_server.observe.line_table import LAUNCHER
from tests.analysis.failures import at, run

TRACEBACK = """Traceback (most recent call last):
  File "/home/ada/train.py", line 40, in main
    check(batch, ranks)
  File "/home/ada/model.py", line 7, in check
    assert batch % ranks == 0
  File "/opt/lib/python3.11/site-packages/torch/nn/modules/module.py", line 9, in call
    return f()
AssertionError"""
REFUSED = "train.py: error: the following arguments are required: --lr"
ALL = "The program ended before any step: "


def line(text: str, ms: float = -90, rank: int = LAUNCHER) -> schema.LogLine:
    return schema.LogLine(
        attempt=0, rank=rank, time_ns=at(ms), level=20, message=text, stream="stdout"
    )


def registered(rank: int, host: str) -> schema.RankRegistered:
    return schema.RankRegistered(
        attempt=0, rank=rank, time_ns=at(-2_000), world_size=4, local_rank=rank % 2,
        local_world_size=2, node_rank=0, host=host, pid=rank,
    )  # fmt: skip


def left(rank: int, ms: float = 0, code: int = 2) -> schema.RankEnded:
    return schema.RankEnded(
        attempt=0, rank=rank, time_ns=at(ms), reason="exit_code", exit_code=code, last_step=1
    )


def stopped(rank: int, ms: float = 80) -> schema.RankEnded:
    return schema.RankEnded(
        attempt=0, rank=rank, time_ns=at(ms), reason="signal", signal=15, last_step=1
    )


def raised(rank: int, ms: float, kind: str, message: str, trace: str = "") -> schema.ErrorRaised:
    return schema.ErrorRaised(
        attempt=0, rank=rank, time_ns=at(ms), type=kind, message=message, traceback=trace
    )


def found(
    *records: schema.AnyRecord, hosts: str = "aaaa", state: RunState | None = None
) -> Finding:
    state = state or RunState("run")
    shuffled = [*(registered(rank, host) for rank, host in enumerate(hosts)), *records]
    random.Random(3).shuffle(shuffled)
    for record in [*shuffled, *shuffled[:3]]:
        state.apply_record(record)
    (finding,) = [one for one in state.look(at(9_000)).findings if one.detector == "root-cause"]
    return finding


def test_an_argument_that_all_ranks_refuse_is_nobodys_fault() -> None:
    finding = found(
        line("usage: train.py [-h] --lr LR\n"), line(REFUSED), left(1), left(0, 9), stopped(2),
        stopped(3),
    )  # fmt: skip
    assert (finding.kind, finding.ranks, finding.hosts) == ("failed_start", (), ())
    assert finding.what == ALL + REFUSED
    assert finding.confidence >= 0.9
    assert finding.cost_throughput_ratio is None  # nothing ran that could be lost
    assert "Ranks 0 and 1 exited with code 2, all alike" in finding.why
    assert "ranks 2 and 3 did not get so far" in finding.why
    assert "no rank and no host is at fault" in finding.next


def test_one_rank_that_was_quicker_than_the_launcher_is_named() -> None:
    finding = found(line(REFUSED), left(2), stopped(0), stopped(1), stopped(3))
    assert finding.ranks == (2,)
    assert finding.what == f"Rank 2 on a ended before its first step: {REFUSED}"
    assert "waited for it" not in finding.why


def test_a_host_that_lacks_what_the_others_have_is_named() -> None:
    missing = "[Errno 2] No such file or directory: '/data/train.bin'"
    finding = found(
        *(raised(rank, rank, "FileNotFoundError", missing) for rank in (2, 3)),
        stopped(0), stopped(1), hosts="aabb",
    )  # fmt: skip
    assert finding.hosts == ("b",)
    assert finding.ranks == (2, 3)
    assert missing in finding.what


def test_an_exception_is_quoted_with_its_place() -> None:
    errors = [raised(rank, rank * 300, "AssertionError", "", TRACEBACK) for rank in range(4)]
    finding = found(*errors)
    assert finding.what == ALL + "AssertionError in `assert batch % ranks == 0`"
    assert finding.why.endswith("at model.py:7, in check")
    assert finding.ranks == ()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["train.py: set DATA_DIR first"], "its last line: train.py: set DATA_DIR first"),
        (["reading", "================="], "its last line: reading"),
        ([], "wrote nothing that says why"),
    ],
)
def test_a_line_that_gives_no_reason_is_called_the_last_one(lines: list[str], said: str) -> None:
    printed = [line(text, -100 + number) for number, text in enumerate(lines)]
    finding = found(*printed, *(left(rank, rank, 3) for rank in range(4)))
    assert finding.what.startswith(ALL + "it exited with code 3")
    assert said in finding.what
    assert finding.confidence < 0.85


def test_an_indented_line_continues_the_one_before() -> None:
    printed = [line("train.py: batch 30 on 4 ranks", -90), line("  choose a multiple of 4", -89)]
    finding = found(*printed, *(left(rank, rank) for rank in range(4)))
    assert finding.what == ALL + "train.py: batch 30 on 4 ranks choose a multiple of 4"


def test_ranks_that_fail_differently_are_no_common_refusal() -> None:
    finding = found(
        raised(0, 0, "KeyError", "'a'"), raised(1, 400, "ValueError", "bad"), stopped(2), stopped(3)
    )
    assert finding.ranks == (0,)
    assert "KeyError: 'a'" in finding.what


def test_a_rank_whose_peers_lost_it_failed_alone() -> None:
    lost = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    echoes = [raised(rank, 90, "RuntimeError", lost) for rank in (0, 1, 2)]
    finding = found(raised(3, 0, "ValueError", "bad shard"), *echoes)
    assert (finding.kind, finding.ranks) == ("failed_start", (3,))


def test_what_happens_after_the_first_step_is_a_crash() -> None:
    late = [
        schema.ErrorRaised(
            attempt=0, rank=rank, time_ns=at(rank), type="ValueError", message="bad", step=41
        )
        for rank in range(4)
    ]
    finding = found(*late, state=run())
    assert finding.kind == "crash"
    assert len(finding.ranks) == 4


def test_a_rank_that_is_killed_before_its_first_step_crashed() -> None:
    killed = schema.RankEnded(
        attempt=0, rank=1, time_ns=at(0), reason="signal", signal=11, last_step=1
    )
    assert found(killed, stopped(0), stopped(2), stopped(3)).kind == "crash"


def test_a_launcher_that_fails_by_itself_is_quoted() -> None:
    """torchrun cannot listen: no rank begins, and its traceback goes through its own files."""
    state = RunState("run")
    why = "torch.distributed.DistNetworkError: port: 29500, name: EADDRINUSE, already in use"
    own = 'File "/x/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 367'
    trace = f"Traceback (most recent call last):\n  {own}\n{why}"
    echo = trace.replace(why, "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:")
    for record in (
        line(trace, -90), line(echo, -10),
        line("======\ntrain.py FAILED\n------\nRoot Cause (first observed failure):\n======", -9),
        schema.Event(
            attempt=0, rank=LAUNCHER, time_ns=at(0), name=schema.COMMAND_ENDED,
            fields={"exit_code": "1"},
        ),
    ):  # fmt: skip
        state.apply_record(record)
    assert why in state.look(at(9_000)).answer.text
