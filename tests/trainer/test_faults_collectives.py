"""Faults at a collective: what one rank really brought to the process group, and what followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.launch import Finished, run

WATCHED_TRAINER = Path(__file__).with_name("watched_trainer.py")
ONE_BUCKET = ["--bucket-mib", "4"]
SEVERAL_BUCKETS = ["--bucket-mib", "0.05"]
Called = tuple[str, str, int]  # operation, kind of number, count of numbers


def _calls(folder: Path, rank: int, step: int) -> list[Called]:
    return [
        (operation, kind, elements)
        for line in _watched(folder, rank)
        if line["step"] == step and "call" in line
        for operation, kind, elements in [line["call"]]
    ]


def _digest(folder: Path, rank: int, step: int) -> dict[str, str]:
    (digest,) = (
        line["digest"]
        for line in _watched(folder, rank)
        if line["step"] == step and "digest" in line
    )
    assert isinstance(digest, dict)
    return digest


def _watched(folder: Path, rank: int) -> list[dict[str, Any]]:
    lines = (folder / f"watched-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _run(folder: Path, *arguments: str) -> Finished:
    return run(folder, 2, *arguments, program=WATCHED_TRAINER)


@pytest.mark.multiproc
def test_what_is_left_out_can_be_made_up_for_without_an_error(tmp_path: Path) -> None:
    """With a single bucket all calls are alike, so only the weights show it."""
    plans = ["collective_skipped:rank=1,start=3", "collective_doubled:rank=1,start=4"]
    plans += ["swallowed_exception:rank=1,start=5,steps=1", "collective_doubled:rank=1,start=6"]
    plans += ["wrong_dtype:rank=1,start=7"]
    faults = [word for plan in plans for word in ("--fault", plan)]
    finished = _run(tmp_path, "--steps", "8", *ONE_BUCKET, *faults)
    assert finished.code == 0, finished.output
    assert "Traceback" not in finished.output
    assert "rank 1 WARNING step 5 failed, going on: rank 1 cannot" in finished.output

    (call,) = _calls(tmp_path, 0, 3)
    assert call[:2] == ("all_reduce", "float32")
    rounded = (call[0], "int32", call[2])
    assert [_calls(tmp_path, 0, step) for step in range(3, 9)] == [[call]] * 6
    assert [_calls(tmp_path, 1, step) for step in range(3, 9)] == [
        [], [call, call], [], [call, call], [rounded], [call]
    ]  # fmt: skip
    assert _digest(tmp_path, 0, 2) == _digest(tmp_path, 1, 2)
    assert _digest(tmp_path, 0, 3) != _digest(tmp_path, 1, 3)

    ends = [line for line in finished.manifest() if "fired" in line]
    assert sorted((line["end_step"], line["fault"]) for line in ends) == [
        (int(end), fault)
        for end, fault in zip("34567", [plan.partition(":")[0] for plan in plans], strict=True)
    ]
    assert all(line["num_elements"] == call[2] for line in ends if "operation" in line)


@pytest.mark.multiproc
def test_two_collectives_are_swapped(tmp_path: Path) -> None:
    finished = _run(
        tmp_path, "--steps", "7", *SEVERAL_BUCKETS, "--fault", "collectives_swapped:rank=1,start=3"
    )
    first, second, *_ = _calls(tmp_path, 0, 5)
    assert first != second  # gloo finds that out, and ends the rank that did it
    assert finished.code == 1
    assert "op.preamble.length <= op.nbytes" in finished.output, finished.output
    for step in (3, 4):  # the steps in which it counts
        assert _calls(tmp_path, 0, step) == _calls(tmp_path, 1, step)
    assert _calls(tmp_path, 1, 5)[0] == second  # it may be gone before its next call
    begin = finished.manifest()[0]
    assert (begin["fault"], begin["start_step"]) == ("collectives_swapped", 5)


@pytest.mark.multiproc
@pytest.mark.parametrize("fault", ["wrong_shape", "wrong_op"])
def test_another_shape_or_operation_ends_the_run(fault: str, tmp_path: Path) -> None:
    finished = _run(
        tmp_path, "--steps", "5", *ONE_BUCKET, "--timeout-seconds", "6",
        "--fault", f"{fault}:rank=1,start=3",
    )  # fmt: skip
    assert finished.code == 1, finished.output
    ((operation, kind, elements),) = _calls(tmp_path, 0, 3)
    assert (operation, kind) == ("all_reduce", "float32")
    broken = {
        "wrong_shape": ("all_reduce", kind, elements // 2),
        "wrong_op": ("broadcast", kind, elements),
    }
    assert _calls(tmp_path, 1, 3) == [broken[fault]]
    assert list(finished.losses()) == [1, 2]
    begin = finished.manifest()[0]
    assert (begin["fault"], begin["rank"], begin["start_step"]) == (fault, 1, 3)
