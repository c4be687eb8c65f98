"""A command that ends before any rank was heard of, or before there is enough to judge."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.verdict.answers import Look

SECOND = 1_000_000_000
WHO = {"attempt": 0, "rank": schema.NODE_RANK}


def look(*codes: int, printed: Sequence[str] = ()) -> Look:
    """Return what is said of a run whose launchers' commands ended with these codes."""
    state = RunState("x")
    state.apply_record(
        schema.RunStarted(**WHO, time_ns=SECOND, name="x", command=["x"], launcher="python")
    )
    for at, text in enumerate(printed):
        state.apply_record(
            schema.LogLine(
                **WHO, time_ns=SECOND + at, level=20, message=text, logger="", stream="stderr"
            )
        )
    for at, code in enumerate(codes):
        fields = {"exit_code": str(code)}
        state.apply_record(
            schema.Event(**WHO, time_ns=(2 + at) * SECOND, name=schema.COMMAND_ENDED, fields=fields)
        )
    return state.look(60 * SECOND)


@pytest.mark.parametrize(
    ("code", "how"),
    [(127, "127 (it was not found)"), (126, "126 (it cannot be started)"), (137, "137 (signal 9)"),
     (3, "3")],
)  # fmt: skip
def test_it_has_failed(code: int, how: str) -> None:
    seen = look(code)
    assert seen.status == "failed"
    assert seen.status_text == f"The command ended with exit code {how} before any rank began"
    assert (seen.answer.state, seen.answer.text) == ("unknown", seen.status_text)
    assert seen.answer.deciding == ("its last lines of output, under Logs",)


@pytest.mark.parametrize(
    ("printed", "why"),
    [
        (['Traceback (most recent call last):\n  File "a.py", line 2\nKeyError: \'rate\''],
         "KeyError: 'rate'"),
        (["loaded", "config error: no such dataset: imagenet"],
         "config error: no such dataset: imagenet"),
        (["a.sh: line 1: nosuch: command not found"], "a.sh: line 1: nosuch: command not found"),
        (["train: hidden size must be even",
          "E1126 13:37:06.263000 28399 torch/distributed/elastic/api.py:1002] failed (exitcode: 1)",
          "=====\ntrain.py FAILED\ntorch.distributed.elastic.multiprocessing.errors.Child"],
         "train: hidden size must be even"),
    ],
)  # fmt: skip
def test_the_line_that_tells_why_is_told(printed: list[str], why: str) -> None:
    seen = look(1, printed=printed)
    assert seen.answer.text == f"The command ended with exit code 1 before any rank began: {why}"
    assert seen.status_text == seen.answer.text


def test_what_it_printed_otherwise_is_no_reason() -> None:
    assert look(1, printed=["reading data", "done"]).answer.text.endswith("before any rank began")


def test_one_that_trained_nothing_has_ended() -> None:
    assert look(0).status == "ended"


def test_one_node_that_failed_is_told_whatever_the_others_did() -> None:
    assert "exit code 1 " in look(0, 1, 0).status_text


def test_while_it_runs_it_starts() -> None:
    seen = look()
    assert (seen.status, seen.answer.state) == ("starting", "waiting")
