"""The answer to ingest says how far its producer's batches are stored."""

from __future__ import annotations

from typing import Any

import pytest

from rankscope.wire.schema import HELD_HEADER
from tests.server.conftest import Sender, TestClient, log_line


def post(sender: Sender, sequence: int, held_from: str = "") -> Any:
    headers = {HELD_HEADER: held_from} if held_from else {}
    body = sender.body(log_line(f"line {sequence}"), sequence=sequence)
    reply = sender.client.post("/api/v1/ingest", content=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()["watermark"]


def asked(sender: Sender, held_from: int, producer: str = "p") -> Any:
    reply = sender.client.get(
        "/api/v1/ingest/watermark",
        params={"run_id": "run", "producer": producer, "held_from": held_from},
    )
    assert reply.status_code == 200, reply.text
    return reply.json()["watermark"]


def upto(durable: int, newest: int, refused: int = 0) -> dict[str, int]:
    return {"durable": durable, "newest": newest, "refused": refused}


def test_what_is_accepted_is_durable(sender: Sender) -> None:
    assert post(sender, 1, "1") == upto(1, 1)
    assert post(sender, 2, "2") == upto(2, 2)
    assert post(sender, 2, "2") == upto(2, 2)  # a repeat


@pytest.mark.parametrize("held", ["", "-1", "1.5", "9" * 40])
def test_a_sender_that_holds_nothing_gets_none(sender: Sender, held: str) -> None:
    assert post(sender, 1, held) is None


def test_a_watermark_stops_before_what_is_missing_of_what_is_held(sender: Sender) -> None:
    for sequence in (1, 2, 4, 5, 7):
        post(sender, sequence, str(sequence))
    assert asked(sender, 1) == upto(2, 7)
    assert asked(sender, 3) == upto(2, 7)  # the third is not there
    assert asked(sender, 4) == upto(5, 7)  # and one that was dropped holds nothing up
    assert asked(sender, 7) == upto(7, 7)
    assert asked(sender, 8) == upto(7, 7)
    assert post(sender, 3, "1") == upto(5, 7)  # it comes late
    assert post(sender, 6, "6") == upto(6, 6)
    assert asked(sender, 1) == upto(7, 7)


def test_a_producer_that_is_not_known_has_none_stored(sender: Sender) -> None:
    assert asked(sender, 1, "another") == upto(0, 0)
    post(sender, 3, "3")
    assert asked(sender, 2) == upto(0, 3)  # the second is not there
    assert asked(sender, 3) == upto(3, 3)


def test_what_was_refused_of_it_is_counted(sender: Sender) -> None:
    sender.send({"kind": "weather", "attempt": 0, "rank": 0, "time_ns": 1})
    assert asked(sender, 1) == upto(1, 1, refused=1)


@pytest.mark.parametrize(
    "asked_for",
    [{"run_id": "a/b"}, {"producer": "a\x00b"}, {"producer": ""}, {"held_from": "0"},
     {"held_from": "all"}],
)  # fmt: skip
def test_what_is_no_question_is_answered_with_422(
    client: TestClient, asked_for: dict[str, str]
) -> None:
    params = {"run_id": "run", "producer": "p", "held_from": "1"} | asked_for
    assert client.get("/api/v1/ingest/watermark", params=params).status_code == 422
