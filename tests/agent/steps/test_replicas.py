"""Two ranks under DDP: gradients before and after reduction, and replicas that part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rankscope.wire import schema
from tests.agent import recorded

NOW = {
    "RANKSCOPE_NUMBERS_SECONDS": "1e-9",
    "RANKSCOPE_NUMBERS_BUDGET_RATIO": "1e9",
    "RANKSCOPE_REPLICA_CHECK_STEPS": "4",
}


def run(tmp_path: Path, *arguments: int) -> tuple[list[dict[str, Any]], list[dict[int, Any]]]:
    done = recorded.run(tmp_path, "gradients.py", *map(str, arguments), ranks=2, **NOW)
    assert done.returncode == 0, done.stderr
    assert "rankscope:" not in done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    seen: list[dict[int, Any]] = []
    for rank in recorded.read(tmp_path):
        of_rank: dict[int, Any] = {}
        for record in rank.of(schema.Metrics):
            of_rank.setdefault(record.step, {}).update(record.values)
        seen.append(of_rank)
    return told, seen


@pytest.mark.multiproc
@pytest.mark.parametrize("micro", [1, 3])
def test_local_and_reduced_gradients(tmp_path: Path, micro: int) -> None:
    told, seen = run(tmp_path, 33, micro, 0, 0)
    expected = {(line["rank"], line["step"]): line for line in told}
    for rank in (0, 1):
        sampled = [step for step, one in seen[rank].items() if "gradient_norm_local" in one]
        assert sampled == [16, 32]
        for step in sampled:
            line, one = expected[rank, step], seen[rank][step]
            assert one["gradient_norm_local"] == pytest.approx(line["local"], rel=1e-5)
            assert one["gradient_norm"] == pytest.approx(line["reduced"], rel=1e-5)
            assert one["gradient_norm_local"] != pytest.approx(one["gradient_norm"], rel=1e-3)
            assert one["gradient_local_nonfinite"] == one["gradient_nonfinite"] == 0
    assert seen[0][2]["model_parameters"] == seen[0][2]["parameters"] == 47
    layers = (seen[0][2]["model_layers"], seen[0][2]["layer_parameters"])
    assert layers == (1, 47), "no row of equal ones"
    if micro > 1:  # and none of it changes a bit of what the program computes
        plain = recorded.run(
            tmp_path / "plain", "gradients.py", "33", str(micro), "0", "0", ranks=2, RANKSCOPE="0"
        )
        alone = [json.loads(line) for line in plain.stdout.splitlines() if line.startswith("{")]
        assert {(line["rank"], line["step"]): line for line in alone} == expected


@pytest.mark.multiproc
def test_the_rank_that_brings_in_nan_is_named_and_so_is_a_flipped_bit(tmp_path: Path) -> None:
    _, seen = run(tmp_path, 24, 1, 16, 17)
    assert seen[0][16]["gradient_local_nonfinite"] == 0
    assert seen[1][16]["gradient_local_nonfinite"] == 1
    sums = [{s: one["replica_checksum"] for s, one in r.items() if "replica_checksum" in one}
            for r in seen]  # fmt: skip
    assert list(sums[0]) == list(sums[1]) == [4, 8, 12, 16, 20, 24]
    assert [sums[0][step] == sums[1][step] for step in sums[0]] == [True] * 4 + [False] * 2
    assert len(set(sums[0].values())) >= 5  # it trains; step 16 changed nothing
