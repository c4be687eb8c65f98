"""The collector killed again and again, the server away: the short form of the benchmark."""

from __future__ import annotations

from pathlib import Path

from tests.agent.collector.killing import Killing, Plan


def test_nothing_is_lost_and_nothing_is_there_twice(tmp_path: Path) -> None:
    plan = Plan(kills=20, kill_every_seconds=0.8, outage_seconds=10, kills_in_outage=2)
    result = Killing(plan, tmp_path).carry_out()
    assert result.kills >= 15
    assert result.ranks_ended == plan.ranks
    assert min(result.written.values()) > 200
    assert result.is_exact, result
    assert result.producers == 1
    assert result.batches_missing == 0


def test_what_the_spool_cannot_hold_is_counted(tmp_path: Path) -> None:
    plan = Plan(
        kills=2, kill_every_seconds=1, outage_seconds=12, kills_in_outage=2, spool_bytes=20_000
    )
    result = Killing(plan, tmp_path).carry_out()
    assert result.most_spooled_bytes <= 20_000 + 10_000  # a batch may come between two looks
    assert set(result.losses) == {"spool: spool full"}
    assert 0 < sum(result.missing.values()) <= result.losses["spool: spool full"]
    assert result.batches_missing > 0
    assert not any(result.twice.values())
    assert not any(result.not_written.values())
