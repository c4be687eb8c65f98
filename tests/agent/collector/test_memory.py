"""Hours of a run in seconds: the collector's memory stays where it is."""

from __future__ import annotations

from pathlib import Path

from tests.agent.collector.memory import follow


def test_memory_stays_flat_over_attempts_groups_and_call_sites(tmp_path: Path) -> None:
    memory = follow(tmp_path / "run", attempts=5, steps=800)
    missing = sum(memory.written[name] - memory.stored[name] for name in memory.written)
    assert missing == memory.lost  # a loaded machine may be too slow for the ring: it is counted
    assert memory.stored["collectives"] > memory.written["collectives"] / 2
    assert max(memory.rss_bytes) < 128 << 20
    assert memory.growth_bytes < 8 << 20, memory
    assert memory.open_files[-1] <= memory.open_files[1] + 2, memory
