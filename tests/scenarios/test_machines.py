"""A real run on this machine: what the page of machines says of it."""

from __future__ import annotations

import socket
import statistics
from typing import Any

import pytest

from tests.scenarios.conftest import Watched

pytestmark = pytest.mark.multiproc


def values(one: dict[str, Any]) -> list[float]:
    return [value for value in one["max"] if value is not None]


def test_a_run_tells_what_its_machine_does(watched: Watched) -> None:
    watched.start(2, "--steps", "100000")
    host = socket.gethostname()

    def sampled() -> Any:
        """The processes of both ranks, once each has a rate."""
        path = f"/samples?kind=process&host={host}&names=user_us_total,rss_bytes"
        series = watched.get(path).get("series", [])
        return len(series) == 4 and all(values(one) for one in series) and series

    series = watched.until(sampled)
    ranks = {rank["rank"]: rank for rank in watched.ranks()}
    assert {one["label"] for one in series} == {
        f"rank {number}, pid {rank['pid']}" for number, rank in ranks.items()
    }
    for one in series:
        low, high = (50e6, 5e9) if one["unit"] == "bytes" else (0, 64)
        assert all(low <= value <= high for value in values(one)), one
    page = watched.get("/machines")
    (machine,) = page["machines"]
    assert (machine["host"], machine["ranks"]) == (host, [0, 1])
    sources = {one["source"]: one for one in machine["sources"]}
    assert sources["host"]["state"] == "works"
    assert all(one["reason"] for one in sources.values() if one["state"] == "skipped")

    def used() -> Any:
        """The machine's own, once three intervals give a rate that no late look spoils."""
        path = "/samples?kind=host&names=cpu_user_us_total,memory_used_bytes"
        series = sorted(watched.get(path)["series"], key=lambda one: str(one["unit"]), reverse=True)
        return len(series) == 2 and all(len(values(one)) >= 3 for one in series) and series

    cpu, memory = watched.until(used)
    assert (cpu["unit"], memory["unit"]) == ("ratio", "bytes")
    assert 0 < statistics.median(values(cpu)) <= 1.05
    assert min(values(memory)) > 1 << 20
