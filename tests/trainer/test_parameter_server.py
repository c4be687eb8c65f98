"""Servers and workers: exact in sync mode, exact counts in every mode, no message left behind."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rankscope_trainer.command_line import load_settings
from rankscope_trainer.data import Batches, ByteWindows, read_standard_library, split_text
from rankscope_trainer.errors import SettingError
from rankscope_trainer.model import GPT, next_byte_loss
from rankscope_trainer.settings import Settings
from rankscope_trainer.strategies.parameter_server.layout import Layout, shard_sizes
from rankscope_trainer.strategies.traffic import expected_traffic, total_traffic
from tests.trainer.launch import Finished, run, start, with_checkpoints
from tests.trainer.whole_runs import (
    assert_resumes_bit_for_bit,
    assert_traffic_as_computed,
    counted_traffic,
    train_alone,
)

TRACED_TRAINER = Path(__file__).with_name("traced_trainer.py")
STEPS = 8
HALFWAY = 4
SLOW = "--fault slow_compute:rank=0,start=2,size=300ms"
SYNC = "--servers 2 --server-shares 3,1 --server-ranks first --clip 0.5"
RUNS: dict[str, tuple[int, str]] = {  # ranks, arguments
    "sync": (5, SYNC),
    "reassign": (
        3,
        # AdamW would forgive gradients that are too large by a factor
        "--reassign --microbatches 4 --validate-every 8 --optimizer sgd --learning-rate 0.1"
        " --fault slow_compute:rank=0,start=2,steps=3,size=2s",
    ),
    "calls": (
        5,
        "--exchange calls --servers 2 --server-shares 3,1 --server-ranks first --clip 0.5",
    ),
    "async": (4, f"--consistency async --clip 1 {SLOW}"),
    "bounded": (4, f"--consistency bounded --staleness 1 {SLOW}"),
    "backup": (5, f"--backup-workers 1 --servers 2 --clip 1 {SLOW}"),
}


def _arguments(folder: Path, name: str) -> list[str]:
    arguments = f"--strategy parameter_server --layers 2 --timeout-seconds 240 {RUNS[name][1]}"
    return with_checkpoints(folder, arguments, steps=STEPS, every=HALFWAY)


class Runs:
    """Each run once, when a test first asks for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._finished: dict[str, Finished] = {}

    def __getitem__(self, name: str) -> Finished:
        if name not in self._finished:
            folder = self._folder / name
            finished = run(folder, RUNS[name][0], *_arguments(folder, name), program=TRACED_TRAINER)
            assert finished.code == 0, finished.output
            self._finished[name] = finished
        return self._finished[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def _settings(finished: Finished, name: str) -> tuple[Settings, Layout]:
    settings = load_settings(finished.arguments, {}, RUNS[name][0])
    return settings, Layout.of(settings, RUNS[name][0])


def _steps(finished: Finished, rank: int) -> list[dict[str, Any]]:
    """Return what one rank reported of each step."""
    return [line for line in _trace(finished, rank, "metrics") if "learning_rate" in line]


def _trace(finished: Finished, rank: int, event: str) -> list[dict[str, Any]]:
    lines = (finished.folder / f"trace-{rank}.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == event]


def _loss_fell(finished: Finished, rank: int) -> bool:
    losses = [line["loss"] for line in _steps(finished, rank) if "loss" in line]
    return bool(losses[-1] < losses[0] - 0.2)


def _counts(finished: Finished, step: int, rank: int) -> dict[str, int]:
    part = finished.folder / "checkpoints" / f"step-{step:08d}" / f"rank-{rank}.pt"
    counts: dict[str, int] = torch.load(part, weights_only=True)["strategy"]["counts"]
    return counts


def _validation_loss(settings: Settings, num_workers: int, model: GPT) -> float:
    """Return the loss of the first worker's part of the validation data."""
    text = split_text(read_standard_library(settings.data_bytes), settings.validation_ratio)[1]
    size = settings.batch_size * settings.microbatches_for(num_workers)
    windows = ByteWindows(text, settings.context)
    batches = iter(Batches(windows, batch_size=size, num_shards=num_workers, seed=settings.seed))
    with torch.no_grad():
        samples = [next(batches) for _ in range(settings.validate_batches)]
        losses = [next_byte_loss(model(inputs), targets).item() for inputs, targets in samples]
    return sum(losses) / len(losses)


@pytest.mark.multiproc
def test_sync_losses_equal_those_of_a_single_process(runs: Runs) -> None:
    settings, layout = _settings(runs["sync"], "sync")
    workers = len(layout.workers)
    expected, _ = train_alone(settings, workers, workers)
    assert runs["sync"].losses() == pytest.approx(expected, rel=2e-5)
    assert "Warning" not in runs["sync"].output
    for server in layout.servers:
        for line in _steps(runs["sync"], server):
            assert (line["weight_version"], line["staleness_max"]) == (line["step"], 0)
    for worker in layout.workers:
        for line in _steps(runs["sync"], worker):
            assert (line["weight_version"], line["lead"]) == (line["step"] - 1, 0)


@pytest.mark.multiproc
def test_traffic_of_each_sync_step_is_the_computed_one(runs: Runs) -> None:
    settings, _ = _settings(runs["sync"], "sync")
    assert_traffic_as_computed(runs["sync"], RUNS["sync"][0])
    first_steps = [counted_traffic(runs["sync"], rank, settings)[1] for rank in (0, 1)]
    hot, other = (sum(m.num_bytes * count for m, count in t.items()) for t in first_steps)
    assert hot > 2.9 * other


@pytest.mark.multiproc
def test_load_of_each_server_and_waits_of_workers_are_recorded(runs: Runs) -> None:
    _, layout = _settings(runs["sync"], "sync")
    for index, server in enumerate(layout.servers):
        for name in ("requests", "bytes", "queue_seconds", "busy_seconds"):
            totals = [line[f"shard_{index}_{name}"] for line in _steps(runs["sync"], server)]
            assert totals == sorted(totals), name
            assert totals[-1] > totals[0] > 0, name
    for worker in layout.workers:
        assert min(line["waited_seconds"] for line in _steps(runs["sync"], worker)) > 0


@pytest.mark.multiproc
def test_calls_train_what_messages_train(runs: Runs) -> None:
    """To the last bit: only who carries the numbers differs."""
    assert runs["calls"].losses() == runs["sync"].losses()
    for noise in ("Warning", "warning", "Leak", "[W"):
        assert noise not in runs["calls"].output
    assert_traffic_as_computed(runs["calls"], RUNS["calls"][0])
    _, layout = _settings(runs["calls"], "calls")
    for index, server in enumerate(layout.servers):
        by_calls, sent = (_steps(runs[name], server)[-1] for name in ("calls", "sync"))
        for what in ("requests", "bytes"):
            assert by_calls[f"shard_{index}_{what}"] == sent[f"shard_{index}_{what}"]
        assert by_calls[f"shard_{index}_queue_seconds"] > 0
    for worker in layout.workers:
        assert min(line["waited_seconds"] for line in _steps(runs["calls"], worker)) > 0


@pytest.mark.multiproc
@pytest.mark.parametrize("mode", ["bounded --staleness 1", "sync --backup-workers 1"])
def test_calls_may_go_on_as_messages_may(tmp_path: Path, mode: str) -> None:
    arguments = f"--strategy parameter_server --layers 2 --exchange calls --consistency {mode}"
    flags = with_checkpoints(tmp_path, f"{arguments} {SLOW}", steps=STEPS, every=STEPS)
    finished = run(tmp_path, 4, *flags, program=TRACED_TRAINER)
    assert finished.code == 0, finished.output
    counts = _counts(finished, STEPS, 3)
    late = counts["dropped"] + counts["skipped"]
    assert late == (STEPS if "backup" in mode else 0)
    assert counts["used"] + late == STEPS * 3
    assert all(_loss_fell(finished, worker) for worker in (1, 2))


@pytest.mark.multiproc
def test_a_resumed_run_by_calls_goes_on_bit_for_bit(runs: Runs, tmp_path: Path) -> None:
    ranks = RUNS["calls"][0]
    assert_resumes_bit_for_bit(
        runs["calls"], ranks, tmp_path, after=HALFWAY, program=TRACED_TRAINER
    )


@pytest.mark.multiproc
def test_a_resumed_sync_run_goes_on_bit_for_bit(runs: Runs, tmp_path: Path) -> None:
    ranks = RUNS["sync"][0]
    assert_resumes_bit_for_bit(runs["sync"], ranks, tmp_path, after=HALFWAY, program=TRACED_TRAINER)


@pytest.mark.core
@pytest.mark.multiproc
def test_each_microbatch_is_trained_once_by_whichever_worker(runs: Runs) -> None:
    finished = runs["reassign"]
    settings, layout = _settings(finished, "reassign")
    traces = [_steps(finished, worker) for worker in layout.workers]
    trained = [[line["microbatches"] for line in t] for t in traces]
    number = settings.microbatches
    assert [sum(step) for step in zip(*trained, strict=True)] == [len(trained) * number] * STEPS
    assert min(trained[0]) < number < max(trained[1])  # worker 0 is slow
    helped = sum(line["helped_microbatches"] for t in traces for line in t)
    steps = _steps(finished, layout.servers[0])
    assert steps[-1]["reassigned_microbatches"] == helped > 0
    workers = len(layout.workers)
    _, model = train_alone(settings, workers, workers)
    (validation_loss,) = (
        line["validation_loss"]
        for line in _trace(finished, 0, "metrics")
        if "validation_loss" in line
    )
    expected = _validation_loss(settings, workers, model)
    assert validation_loss == pytest.approx(expected, rel=2e-5)


@pytest.mark.multiproc
def test_async_versions_and_staleness_are_counted_exactly(runs: Runs) -> None:
    finished = runs["async"]
    settings, layout = _settings(finished, "async")
    (server,) = layout.servers
    served = _steps(finished, server)
    pushes = STEPS * len(layout.workers)
    assert served[-1]["weight_version"] == served[-1]["used"] == pushes
    # The n-th gradient meets version n; it is as stale as its own version is older.
    used = [line["weight_version"] for w in layout.workers for line in _steps(finished, w)]
    stale = sum(line["staleness"] for line in served) * len(layout.workers)
    assert stale == pytest.approx(sum(range(pushes)) - sum(used))
    assert stale > 0
    assert all(_loss_fell(finished, worker) for worker in layout.workers)
    ranks = RUNS["async"][0]
    for worker in layout.workers:
        expected = expected_traffic(settings, rank=worker, world_size=ranks)
        traffic = counted_traffic(finished, worker, settings)
        assert traffic == {step: sent for step, sent in expected.items() if sent}
    expected = expected_traffic(settings, rank=server, world_size=ranks)
    traffic = counted_traffic(finished, server, settings)
    assert total_traffic(traffic) == total_traffic(expected)


@pytest.mark.multiproc
def test_the_bound_of_staleness_is_reached_and_never_exceeded(runs: Runs) -> None:
    finished = runs["bounded"]
    settings, layout = _settings(finished, "bounded")
    leads = [line["lead"] for w in layout.workers for line in _steps(finished, w)]
    assert max(leads) == settings.staleness
    assert max(line["lead_max"] for line in _steps(finished, layout.servers[0])) == max(leads)
    # Without the servers' word for it: who begins step n has finished n - 1, so all others had
    # at least computed step n - 1 - staleness by then.
    computed = {
        (worker, line["step"]): line["time_ns"]
        for worker in layout.workers
        for line in _trace(finished, worker, "computed")
    }
    for worker in layout.workers:
        for line in _trace(finished, worker, "begin"):
            needed = line["step"] - 1 - settings.staleness
            for other in layout.workers if needed > 0 else ():
                assert computed[other, needed] < line["time_ns"], (worker, other, line)
    assert all(_loss_fell(finished, worker) for worker in layout.workers)


@pytest.mark.multiproc
def test_every_step_drops_exactly_its_backup_workers(runs: Runs) -> None:
    finished = runs["backup"]
    settings, layout = _settings(finished, "backup")
    backups = settings.backup_workers
    for step in (HALFWAY, STEPS):
        for server in layout.servers:
            counts = _counts(finished, step, server)
            assert counts["used"] == step * (len(layout.workers) - backups)
            assert counts["dropped"] + counts["skipped"] == step * backups
    assert sum(_counts(finished, STEPS, server)["dropped"] for server in layout.servers) > 0
    assert _loss_fell(finished, layout.workers[1])


@pytest.mark.multiproc
def test_a_run_that_is_stopped_leaves_at_once(tmp_path: Path) -> None:
    arguments = [*_arguments(tmp_path, "bounded"), "--steps", "100000"]
    with start(tmp_path, 3, arguments, program=TRACED_TRAINER) as process:
        deadline = time.monotonic() + 200
        trace = tmp_path / "trace-0.jsonl"
        while not (trace.exists() and '"step": 2' in trace.read_text()):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "rank 0 WARNING stopped by signal 15" in output


def test_pieces_of_the_weights_follow_the_shares() -> None:
    settings = load_settings(["--servers", "3", "--server-shares", "5,1,1"], {}, 4)
    assert shard_sizes(settings, 700) == [500, 100, 100]
    assert sum(shard_sizes(settings, 701)) == 701
    assert shard_sizes(load_settings(["--servers", "3"], {}, 4), 10) == [3, 4, 3]
    assert Layout.of(settings, 8) == Layout(range(5, 8), range(5))


@pytest.mark.parametrize(
    ("arguments", "name", "words"),
    [
        ("--servers 4", "servers", "leave no worker"),
        ("--servers 2 --server-shares 1", "server_shares", "3,1"),
        ("--server-shares 0", "server_shares", "numbers above 0"),
        ("--server-shares three", "server_shares", "numbers above 0"),
        ("--backup-workers 3", "backup_workers", "at most 2"),
        ("--backup-workers 1 --consistency async", "backup_workers", "sync"),
        ("--reassign --consistency bounded", "reassign", "sync"),
        ("--reassign --backup-workers 1", "reassign", "either"),
        ("--reassign --exchange calls", "reassign", "messages"),
        ("--backup-workers 1 --patience 1 --validate-every 1", "patience", "all ranks meet"),
    ],
)
def test_a_wrong_setting_is_refused(arguments: str, name: str, words: str) -> None:
    with pytest.raises(SettingError) as raised:
        load_settings(["--strategy", "parameter_server", *arguments.split()], {}, 4)
    assert raised.value.name == name
    assert words in str(raised.value)


def test_a_batch_that_is_skipped_moves_the_position_like_one_that_is_drawn() -> None:
    windows = ByteWindows(bytes(range(200)), 8)  # 24 windows: 3 slices of 7, and a rest
    one, other = (Batches(windows, batch_size=7) for _ in range(2))
    drawn = iter(one)
    for _ in range(8):
        next(drawn)
        assert not len(other.skip()[0])
        assert one.position == other.position
