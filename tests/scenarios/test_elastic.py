"""Ranks and nodes die, and come: the run goes on, exactly, from its last checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rankscope_trainer.command_line import load_settings
from tests.scenarios.elastic import (
    CHECKPOINT_EVERY,
    SMALL,
    ElasticRun,
    kill_node,
    kill_ranks,
    repeated_steps,
)
from tests.trainer.whole_runs import losses_of_windows

pytestmark = pytest.mark.multiproc

BATCH_SIZE = 4
# Microbatches of a step over all ranks, those of the first of two ranks, and of how many windows
# in a row it draws how many. FSDP's ranks gather weights together, so all have equally many.
SHARES = {"ddp": (3, (0, 1), 3), "fsdp": (4, (0,), 2)}


def test_a_run_survives_kills(tmp_path: Path) -> None:
    """More kills: `python benchmarks/elastic.py --kills 10`."""
    verdict, output = kill_ranks(tmp_path, kills=3)
    assert verdict.passed, f"{verdict}\n{output}"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the ranks: of a small model two threads wait for each other, and burn that time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(tmp_path: Path, strategy: str) -> Iterator[ElasticRun]:
    """A run that ends when it is told to, however long nodes take to go and to come."""
    global_batch = BATCH_SIZE * SHARES[strategy][0]
    arguments = ["--strategy", strategy, "--batch-size", str(BATCH_SIZE)]
    arguments += ["--global-batch", str(global_batch)]
    arguments += ["--grace-seconds", "20", "--checkpoint-keep", "1000", "--steps", "1000000"]
    slow = ["--fault", "slow_compute:rank=0,start=1,size=100ms"]
    run = ElasticRun(tmp_path, *arguments, *slow)
    yield run
    run.close()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("strategy", SHARES)
def test_it_shrinks_and_grows(run: ElasticRun, strategy: str) -> None:
    first = run.start_elastic()
    run.until_hosted()
    lost = run.start_elastic()
    _train_with(run, 2)
    kill_node(lost)
    _train_with(run, 1)
    new = run.start_elastic()
    _train_with(run, 2)
    first.terminate()
    new.terminate()
    run.finish()

    attempts, lines = run.attempts(), run.lines()
    sizes = {one["attempt"]: one["world_size"] for one in attempts}
    assert [size for size, _ in itertools.groupby(sizes.values())][-3:] == [2, 1, 2], run.output()
    # The killed node costs what was trained since the checkpoint; the newcomer costs nothing, as
    # the ranks that are there are told in time. So are all at the end.
    repeated = repeated_steps(lines)
    assert max(repeated) <= CHECKPOINT_EVERY
    assert repeated[-1] == 0
    last = lines[-1].step
    assert (run.folder / "checkpoints" / f"step-{last:08d}").is_dir(), run.output()
    assert {line.step for line in lines} == set(range(1, last + 1))

    settings = load_settings(
        [*SMALL, "--batch-size", str(BATCH_SIZE), "--steps", str(last)], {}, world_size=1
    )
    microbatches, replicas, of = SHARES[strategy]
    right = losses_of_windows(settings, BATCH_SIZE * microbatches)
    for line in lines:
        own = right[line.step]
        if sizes[line.attempt] == 2:  # windows are dealt out like cards
            own = [loss for replica in replicas for loss in own[replica::of]]
        assert line.loss == pytest.approx(sum(own) / len(own), rel=2e-5), line


def _train_with(run: ElasticRun, world_size: int) -> None:
    """Wait until so many ranks have trained for a while."""
    run.until(lambda: [one["world_size"] for one in run.attempts()][-1:] == [world_size])
    attempt = run.attempts()[-1]
    run.until_step(attempt["resumed_after"] + CHECKPOINT_EVERY + 2, attempt["attempt"])
