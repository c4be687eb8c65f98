"""Faults that only some strategies can show: what is sent, computed and used then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer.launch import RECORDED_TRAINER, run

pytestmark = pytest.mark.multiproc


def test_the_first_stage_holds_more_layers(tmp_path: Path) -> None:
    arguments = ["--strategy", "pipeline", "--steps", "3", "--fault", "uneven_stages:size=1"]
    finished = run(tmp_path, 2, *arguments, program=RECORDED_TRAINER)
    assert finished.code == 0, finished.output
    begins = [line for line in finished.manifest() if "size" in line]
    assert [(x["fault"], x["start_step"], x["size"]) for x in begins] == [
        ("uneven_stages", 0, "1")
    ] * 2
    for rank, layers in ((0, 3), (1, 1)):
        record = finished.record(rank)
        assert [record[step]["layers"] for step in (1, 2, 3)] == [layers] * 3


def test_without_stashing_backwards_use_newer_weights(tmp_path: Path) -> None:
    versions = tmp_path / "versions.jsonl"
    arguments = ["--strategy", "pipedream", "--steps", "6", "--versions", str(versions)]
    finished = run(tmp_path, 2, *arguments, "--fault", "stale_weights:rank=all")
    assert finished.code == 0, finished.output
    assert {line["fault"] for line in finished.manifest()} == {"stale_weights"}
    lines = [json.loads(line) for line in versions.read_text().splitlines()]
    newer = [x["backward_version"] - x["forward_version"] for x in lines if x["stage"] == 0]
    assert max(newer) == 1
    assert all(x["backward_version"] == x["forward_version"] for x in lines if x["stage"] == 1)


def test_a_hot_shard_gets_most_of_the_traffic(tmp_path: Path) -> None:
    arguments = ["--strategy", "parameter_server", "--servers", "2", "--steps", "3"]
    finished = run(tmp_path, 3, *arguments, "--fault", "hot_shard:size=8")
    assert finished.code == 0, finished.output
    assert {line["fault"] for line in finished.manifest()} == {"hot_shard"}
    moved = [sum(size for _, size in finished.operations(rank)[2]) for rank in (1, 2)]
    assert moved[0] == pytest.approx(8 * moved[1], rel=0.05)
