"""Every collective is there: count and bytes equal what model and schedule say, exactly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rankscope.wire import schema
from rankscope_trainer.command_line import load_settings
from rankscope_trainer.strategies.traffic import expected_traffic
from rankscope_trainer.strategies.traffic.message import STARTUP
from tests.agent import recorded
from tests.scenarios.trainer import train

STEPS = 6


@pytest.mark.core
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, ["--strategy", "ddp"]),
        (2, ["--strategy", "ddp", "--bucket-mib", "0.1", "--microbatches", "3"]),
        (2, ["--strategy", "pipeline", "--schedule", "gpipe", "--microbatches", "4"]),
        (4, ["--strategy", "pipeline", "--schedule", "1f1b", "--microbatches", "8"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_count_and_bytes(tmp_path: Path, ranks: int, arguments: list[str]) -> None:
    arguments = [*arguments, "--steps", str(STEPS)]
    train(tmp_path, ranks, *arguments)
    settings = load_settings(arguments, {}, ranks)
    for rank in recorded.read(tmp_path):
        expected = expected_traffic(settings, rank=rank.rank, world_size=ranks)
        seen: dict[int, Counter[tuple[str, int]]] = {}
        for slot in rank.collectives:
            operation = schema.OPERATIONS[slot["operation"]]
            size_bytes = int(max(slot["input_bytes"], slot["output_bytes"]))
            if operation == "all_gather":  # ours counts what every rank ends up with
                size_bytes //= ranks
            seen.setdefault(int(slot["step"]), Counter())[operation, size_bytes] += 1
        first = expected.pop(STARTUP, Counter()) + expected.pop(1)  # the agent's steps begin at 1
        wanted = {1: first} | expected
        as_pairs = {
            step: Counter({(message.operation, message.num_bytes): count
                           for message, count in traffic.items()})
            for step, traffic in wanted.items()
        }  # fmt: skip
        assert seen == as_pairs, f"rank {rank.rank}"
        in_steps = {int(step["step"]): int(step["num_collectives"]) for step in rank.steps}
        assert in_steps == {step: sum(traffic.values()) for step, traffic in seen.items()}


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, ["--strategy", "ddp", "--comm-hook", "fp16", "--clip", "1"]),
        (2, ["--strategy", "pipeline", "--schedule", "zero_bubble", "--gradient-norm"]),
        (2, ["--strategy", "model_parallel", "--clip", "1"]),
        (2, ["--strategy", "pipedream"]),
        (2, ["--strategy", "hogwild"]),
        (3, ["--strategy", "ring"]),
        (2, ["--strategy", "local_sgd", "--average-every", "3"]),
        (2, ["--strategy", "fsdp", "--clip", "1"]),
        (2, ["--strategy", "tensor", "--sequence-parallel"]),
        (4, ["--strategy", "hybrid", "--tensor-parallel", "1"]),
        (3, ["--strategy", "parameter_server", "--clip", "1"]),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else str(value),
)
def test_what_the_agent_counts_is_what_a_strategy_says_it_costs(
    tmp_path: Path, ranks: int, arguments: list[str]
) -> None:
    """Over the whole run: where an optimizer's step is not the last thing, steps end elsewhere."""
    arguments = [*arguments, "--steps", str(STEPS)]
    train(tmp_path, ranks, *arguments)
    settings = load_settings(arguments, {}, ranks)
    for rank in recorded.read(tmp_path):
        seen: Counter[tuple[str, int]] = Counter()
        for slot in rank.collectives:
            handed_in, received = int(slot["input_bytes"]), int(slot["output_bytes"])
            seen[schema.OPERATIONS[slot["operation"]], handed_in or received] += 1
        wanted: Counter[tuple[str, int]] = Counter()
        for traffic in expected_traffic(settings, rank=rank.rank, world_size=ranks).values():
            for message, count in traffic.items():
                wanted[message.operation, message.num_bytes] += count
        assert seen == wanted, f"rank {rank.rank}"
        assert [int(step["step"]) for step in rank.steps][:STEPS] == list(range(1, STEPS + 1))
