"""Kernels out of the dispatcher in thinned steps: on real ranks, nothing is counted differently."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rankscope.files import ring
from rankscope.wire import schema
from tests.agent import recorded

pytestmark = pytest.mark.multiproc

# one step in 4 is whole
ENVIRONMENT = {"RANKSCOPE_COLLECTIVES": "kernels", "RANKSCOPE_OVERHEAD_PERCENT": "90"}


def run(tmp_path: Path, *arguments: str, **more: str) -> list[dict[str, Any]]:
    """Return what each rank said, by rank."""
    done = recorded.run(tmp_path, "outside.py", *arguments, ranks=2, **(ENVIRONMENT | more))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rankscope:" not in done.stderr
    told = [json.loads(line) for line in re.findall(r"(?m)^\{.*\}$", done.stdout)]
    return sorted(told, key=lambda one: int(one["rank"]))


def steps_with(rank: recorded.Recorded, flag: int) -> list[int]:
    return [int(step) for step in rank.steps["step"][(rank.steps["flags"] & flag) != 0]]


def sequences(rank: recorded.Recorded, group: str) -> dict[int, list[int]]:
    """Return the sequences of one group, by step."""
    found: dict[int, list[int]] = {}
    for slot in rank.collectives:
        if rank.groups[int(slot["group_id"])] == group:
            found.setdefault(int(slot["step"]), []).append(int(slot["sequence"]))
    return found


def test_sequences_go_on_over_steps_without_kernels(tmp_path: Path) -> None:
    """Also of a group that no whole step uses, and of one that is made without kernels."""
    told = run(tmp_path / "on", "losses", "28")
    plain = run(tmp_path / "off", "losses", "28", RANKSCOPE="0")
    assert [one["losses"] for one in told] == [one["losses"] for one in plain]
    ranks = recorded.read(tmp_path / "on")
    assert len(ranks) == 2
    for rank, one in zip(ranks, told, strict=True):
        assert one["source"] == "kernels out of the dispatcher, counted by the backend"
        assert one["counters"] == [61, 28, 15, 1]
        # 14 began without kernels, and a group was made in it; 15 follows no whole step
        assert steps_with(rank, schema.STEP_WAITS_UNKNOWN) == [
            5, 6, 7, 9, 10, 11, 13, 14, 17, 18, 19, 21, 22, 23, 25, 26, 27,
        ]  # fmt: skip
        thinned = steps_with(rank, schema.STEP_THINNED)
        assert thinned == [step for step in range(5, 29) if step % 4]
        world = sequences(rank, "0")
        assert [world[step] for step in (8, 12, 16, 20, 24, 28)] == [
            [20, 21], [28, 29], [36, 37], [44, 45], [52, 53], [60, 61],
        ]  # fmt: skip
        assert not set(world) & {9, 10, 11, 13, 17, 18, 19}
        assert sequences(rank, "1")[28] == [28]
        assert sequences(rank, "3") == {
            14: [1], 15: [2], 16: [3], 20: [7], 24: [11], 28: [15]
        }  # fmt: skip
        numbers = dict(zip(rank.steps["step"].tolist(), rank.steps["num_collectives"], strict=True))
        assert [int(numbers[step]) for step in (9, 11, 12, 13, 14, 15, 19, 28)] == [
            3, 3, 3, 3, 5, 4, 4, 4,
        ]  # fmt: skip
        header = ring.RingReader(rank.directory / "collectives.ring", ring.COLLECTIVE_FIELDS)
        assert header.u64(ring.OWN_SWITCHES_AT) == 12
        assert 0 < header.u64(ring.OWN_SWITCH_NS_AT) < 12 * 20e6


def test_nothing_moves_while_another_thread_is_inside(tmp_path: Path) -> None:
    zero, one = run(tmp_path, "thread")
    assert zero["before"] is one["before"] is False
    assert not any(zero["inside"])  # as it was
    assert zero["num_unsafe"] > 0
    assert one["num_unsafe"] == 0
    assert set(one["inside"]) == {True, False}  # it moves where no thread is inside
    assert {True, False} == set(zero["after"])
    ranks = recorded.read(tmp_path)
    worlds = [sequences(rank, "0") for rank in ranks]
    common = set(worlds[0]) & set(worlds[1])
    assert common >= {4, 16, 20}
    assert all(worlds[0][step] == worlds[1][step] for step in common)
    for rank in ranks:  # what could not be recorded whole says so
        whole = set(rank.steps["step"].tolist()) - set(steps_with(rank, schema.STEP_THINNED))
        assert whole <= set(sequences(rank, "0"))


def test_a_group_that_sends_keeps_the_kernels_in(tmp_path: Path) -> None:
    """And what is neither a collective nor recorded moves no sequence."""
    for one in run(tmp_path, "p2p"):
        assert one["is_in"] == [step not in (4, 5, 6, 8, 9, 10) for step in range(1, 19)]
        assert "point-to-point" in one["stays"]
    for rank in recorded.read(tmp_path):
        world = sequences(rank, "0")
        assert [world[step] for step in (8, 12, 13, 18)] == [
            [20, 21], [28, 29], [30, 31], [40, 41],
        ]  # fmt: skip
        said = rank.of(schema.RankRegistered)[-1].sources["collectives/thinned steps"]
        assert said.startswith("kernels stay in: ")


def test_a_fork_and_a_switch_while_the_kernels_are_out(tmp_path: Path) -> None:
    for one in run(tmp_path, "fork"):
        assert one["before"] is False
        assert one["code"] == 7
    for rank in recorded.read(tmp_path):
        world = sequences(rank, "0")
        assert world[8] == [20, 21]
        assert world[13] == [28, 29]  # step 12 was not recorded on any rank
        assert 12 not in rank.steps["step"].tolist()
