"""What a run cost, as the API answers it: of what the analysis stored, on both databases."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import sqlalchemy as sa

from rankscope.wire import schema
from rankscope_server.api.cost.queries import WHAT, cost, parts_of, sentence
from rankscope_server.store import tables
from rankscope_server.verdict.cost import PARTS
from tests.server.conftest import Sender


def look(sender: Sender) -> None:
    sender.client.app.state.service.analysis.look_now()  # type: ignore[attr-defined]


def test_every_part_has_its_sentence() -> None:
    assert tuple(sorted(WHAT)) == tuple(sorted(PARTS))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (
            {"productive": 60.0, "waiting": 30.0, "data": 10.0},
            "60 % of the ranks' time went into computing that is kept; most of the rest, 30 %, "
            "is waiting",
        ),
        (
            {"productive": 0.0, "unknown": 100.0},
            "0.0 % of the ranks' time went into computing that is kept; most of the rest, 100 %, "
            "is not known",
        ),
        ({"productive": 100.0}, "100 % of the ranks' time went into computing that is kept"),
    ],
)
def test_the_sentence(seconds: dict[str, float], text: str) -> None:
    parts = parts_of({"parts": seconds, "wall_seconds": 100.0})
    assert sentence(parts) == text
    assert parts[0].name == "productive"


@pytest.mark.parametrize(
    ("attempts", "seconds"), [(1, None), (3, ((40.0 + 20.0 + 8.0) / 2 + (30.0 + 6.0) / 3) / 4)]
)
def test_what_an_interruption_took_is_the_mean_over_restarts(
    attempts: int, seconds: float | None
) -> None:
    stored = dict.fromkeys(PARTS, 1.0) | {
        "restart": 40.0, "lost work": 20.0, "stuck or failing": 8.0, "start-up": 30.0,
        "first steps": 6.0,
    }  # fmt: skip
    row = SimpleNamespace(cost=json.dumps({
        "parts": stored, "wall_seconds": sum(stored.values()), "num_ranks": 4,
        "num_attempts": attempts, "lost_steps": 0, "ettr": 0.5, "num_divided": 1, "slow_ranks": [],
        "what_if": None, "no_what_if": "",
    }))  # fmt: skip
    assert cost(cast(Any, row)).restart_seconds == seconds


def test_the_answer_is_what_was_stored_and_adds_up(seeded: Sender) -> None:
    look(seeded)
    shown = seeded.get("/cost")
    assert sum(part["share"] for part in shown["parts"]) == pytest.approx(1.0, rel=1e-9)
    assert sum(part["rank_hours"] for part in shown["parts"]) == pytest.approx(
        shown["rank_hours"], rel=1e-9
    )
    shares = {part["name"]: part["share"] for part in shown["parts"]}
    losses = [part["share"] for part in shown["parts"][1:]]
    assert losses == sorted(losses, reverse=True)
    assert shown["parts"][0]["name"] == "productive"
    assert shown["num_ranks"] == 4
    assert shown["slow_ranks"] == [2]
    assert shares["straggling"] > 0.05
    kept = ("productive", "straggling", "waiting", "communication", "communication or waiting")
    ettr = sum(shares.get(name, 0.0) for name in (*kept, "data", "evaluation"))
    assert shown["ettr"] == pytest.approx(ettr, rel=1e-9)
    assert any("Straggling is about rank 2" in note for note in shown["notes"])
    assert (shown["what_if"] is None) == bool(shown["no_what_if"])
    table = seeded.client.get(f"/api/v1/runs/{seeded.run_id}/cost?format=csv").text
    assert table.splitlines()[0] == "name,what,rank_hours,share"
    assert len(table.splitlines()) == 1 + len(shown["parts"])


def started(**more: Any) -> schema.RunStarted:
    given: dict[str, Any] = {
        "attempt": 0, "rank": -1, "time_ns": time.time_ns(), "name": "x", "world_size": 2,
        "command": ["train.py"], "launcher": "", "tags": {},
    }  # fmt: skip
    return schema.RunStarted(**given | more)


def test_what_is_not_known_says_why(sender: Sender) -> None:
    sender.send(started())
    shown = sender.get("/cost")
    assert shown["text"] == "Not known: no step has ended yet"
    assert (shown["parts"], shown["rank_hours"], shown["ettr"]) == ([], None, None)
    recorded = Sender(sender.client, "recorded")
    recorded.send(started(launcher=schema.IMPORTED))
    assert recorded.get("/cost")["text"] == "Not known: a recording is a part of a run"
    assert sender.client.get("/api/v1/runs/nothing/cost").status_code == 404


def test_a_run_from_before_has_none(sender: Sender) -> None:
    """A database that was brought up to date has runs without this column's content."""
    sender.send(started())
    service = sender.client.app.state.service  # type: ignore[attr-defined]
    change = sa.update(tables.run).values(status="ended", step=200, cost=None)
    service.writer.run(lambda unit: unit.connection.execute(change))
    assert sender.get("/cost")["text"] == (
        "Not known: the run was over before this server kept what runs cost"
    )
