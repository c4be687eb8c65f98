"""A command that ends before any rank was heard of, or before there is enough to judge."""

from __future__ import annotations

import pytest

from rankscope import schema
from rankscope_server.analysis import Look, RunState

SECOND = 1_000_000_000
WHO = {"attempt": 0, "rank": schema.NODE_RANK}


def look(*codes: int) -> Look:
    """Return what is said of a run whose launchers' commands ended with these codes."""
    state = RunState("x")
    state.apply_record(
        schema.RunStarted(**WHO, time_ns=SECOND, name="x", command=["x"], launcher="python")
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


def test_one_that_trained_nothing_has_ended() -> None:
    assert look(0).status == "ended"


def test_one_node_that_failed_is_told_whatever_the_others_did() -> None:
    assert "exit code 1 " in look(0, 1, 0).status_text


def test_while_it_runs_it_starts() -> None:
    seen = look()
    assert (seen.status, seen.answer.state) == ("starting", "waiting")
