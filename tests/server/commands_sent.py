"""What a collector sends that takes commands: its ranks, their states, their answers."""

from __future__ import annotations

import time
from typing import Any

from rankscope.wire import schema
from tests.server.conftest import Sender

HEADERS = {schema.COMMANDS_HEADER: "1"}
NOW = time.time_ns()


def registered(rank: int, host: str = "node-a", **more: Any) -> schema.RankRegistered:
    values = {
        "world_size": 4,
        "local_rank": rank % 2,
        "local_world_size": 2,
        "node_rank": rank // 2,
    }
    return schema.RankRegistered(
        attempt=0, rank=rank, time_ns=NOW, host=host, pid=100 + rank, **(values | more)
    )


def state(rank: int, step: int = 7, **more: Any) -> schema.RankState:
    return schema.RankState(
        attempt=0, rank=rank, time_ns=NOW + step, step=step, phase="other", phase_since_ns=NOW,
        heartbeat_ns=NOW, **more,
    )  # fmt: skip


def answer(command: int, rank: int, said: Any, **more: Any) -> schema.CommandAnswer:
    return schema.CommandAnswer(
        attempt=0, rank=rank, time_ns=NOW, command=command, state=said, **more
    )


class Node(Sender):
    """A collector: it says that it takes commands."""

    def take(self, *records: Any) -> list[dict[str, Any]]:
        reply = self.client.post("/api/v1/ingest", content=self.body(*records), headers=HEADERS)
        assert reply.status_code == 200, reply.text
        assert reply.json()["refused"] == []
        found: list[dict[str, Any]] = reply.json()["commands"]
        return found

    def ask(self, status: int = 200, **wanted: Any) -> dict[str, Any]:
        reply = self.client.post(f"/api/v1/runs/{self.run_id}/commands", json=wanted)
        assert reply.status_code == status, reply.text
        made: dict[str, Any] = reply.json()
        return made

    def states(self, command: dict[str, Any]) -> dict[int, str]:
        shown = self.get(f"/commands/{command['id']}")["ranks"]
        return {rank["rank"]: rank["state"] for rank in shown}
