"""States and ends that came past batches that waited: they count, and those that come later again.

See `rankscope.node.upload.vitals`.
"""

from __future__ import annotations

from typing import Any

import pytest

from rankscope.wire import schema
from tests.server.conftest import Sender, TestClient

NOW = 1_700_000_000 * 10**9
SECOND = 10**9


def registered(at: int, pid: int = 7) -> schema.RankRegistered:
    return schema.RankRegistered(
        attempt=0, rank=3, time_ns=NOW + at * SECOND, world_size=4, local_rank=3,
        local_world_size=4, node_rank=0, host="node-a", pid=pid,
    )  # fmt: skip


def state(at: int, step: int) -> schema.RankState:
    time_ns = NOW + at * SECOND
    return schema.RankState(
        attempt=0, rank=3, time_ns=time_ns, step=step, phase="forward", phase_since_ns=time_ns,
        heartbeat_ns=time_ns,
    )  # fmt: skip


def ended(at: int, reason: Any = "exit_code") -> schema.RankEnded:
    return schema.RankEnded(
        attempt=0, rank=3, time_ns=NOW + at * SECOND, reason=reason,
        exit_code=1 if reason == "exit_code" else None, last_step=40,
    )  # fmt: skip


@pytest.fixture
def sender(client: TestClient) -> Sender:
    return Sender(client, "early", "node-a")


def rank(sender: Sender) -> dict[str, Any]:
    found: dict[str, Any] = sender.get("/ranks/3")
    return found


def end_lines(sender: Sender) -> list[str]:
    rows = sender.get("/logs", q='"rank 3 ended"')["lines"]
    return [row["message"] for row in rows]


def test_an_end_stays_when_what_was_before_it_comes(sender: Sender) -> None:
    vitals = Sender(sender.client, sender.run_id, "node-a-vitals")
    vitals.send(state(60, 41), ended(61))
    assert rank(sender)["end_reason"] is not None
    sender.send(registered(0), state(1, 2))
    sender.send(state(30, 20))
    assert rank(sender)["end_reason"] is not None
    sender.send(state(60, 41), ended(61))
    row = rank(sender)
    assert row["end_reason"] is not None
    assert row["step"] == 41
    assert len(end_lines(sender)) == 1


def test_the_step_that_never_came_is_not_counted_when_what_was_before_the_end_comes(
    sender: Sender,
) -> None:
    vitals = Sender(sender.client, sender.run_id, "node-a-vitals")
    vitals.send(ended(61, "clean"))
    sender.send(registered(0), state(1, 2))
    sender.send(state(30, 20))
    sender.send(state(60, 41))
    sender.send(ended(61, "clean"))
    run = sender.get("")
    assert rank(sender)["step"] == run["run"]["step"] == 40
    assert [attempt["step_hi"] for attempt in run["attempts"]] == [40]


def test_a_rank_that_came_up_again_runs(sender: Sender) -> None:
    sender.send(registered(0), ended(10))
    sender.send(registered(12, pid=8))
    assert rank(sender)["end_reason"] is None
    sender.send(ended(20))
    assert rank(sender)["end_reason"] is not None
    assert len(end_lines(sender)) == 2


def test_an_earlier_end_does_not_replace_a_later_one(sender: Sender) -> None:
    vitals = Sender(sender.client, sender.run_id, "node-a-vitals")
    vitals.send(ended(61))
    sender.send(registered(0), ended(10))
    sender.send(registered(12, pid=8))
    assert rank(sender)["end_reason"] is not None


def test_a_known_reason_replaces_lost(sender: Sender) -> None:
    sender.send(registered(0), ended(61, "lost"))
    sender.send(ended(60))
    assert rank(sender)["end_reason"] == "exit_code"
