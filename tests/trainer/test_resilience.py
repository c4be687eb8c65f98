"""What goes wrong beside the ranks themselves: batches, data, notices to leave, learning."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rankscope_trainer.command_line import load_settings
from rankscope_trainer.data import Batches, ByteWindows, Sample, checksum
from rankscope_trainer.duration import Duration
from rankscope_trainer.errors import SettingError
from rankscope_trainer.learning_rate import doubt, learning_rate
from rankscope_trainer.patience import Patience
from rankscope_trainer.source import DataSource
from rankscope_trainer.supply import LONGEST_PAUSE_SECONDS, MOST_CORRUPT_IN_A_ROW, Pauses, Supply
from rankscope_trainer.train import Trainer
from rankscope_trainer.world import World
from tests.scenarios.elastic import ranks_of
from tests.trainer.launch import run, start

TINY = ["--layers", "1", "--width", "8", "--heads", "2", "--context", "16", "--device", "cpu"]
TINY += ["--data-bytes", "4000", "--log-every", "1000"]


def _trainer(world: World, *arguments: str) -> Trainer:
    return Trainer(load_settings([*TINY, *arguments], {}), world)


def _on_batch(trainer: Trainer, act: Callable[[int, Sample], None]) -> None:
    """Let something happen to each batch between loading and use."""
    build, drawn = trainer._build_supply, iter(range(1, 10**6))

    def with_act() -> Supply:
        supply = build()
        supply._on_batch = lambda batch: act(next(drawn), batch)
        return supply

    trainer._build_supply = with_act  # type: ignore[method-assign]


def test_one_flipped_bit_is_recognised() -> None:
    windows = ByteWindows(bytes(range(200)) * 3, context=10)
    sums = [checksum(*windows[index]) for index in range(len(windows))]
    batches = Batches(windows, batch_size=4, checksums=sums)
    for batch in (batch for batch, _ in zip(batches, range(5), strict=False)):
        assert batches.corrupt(batch) == []
        for half in batch:
            half[2, 3] ^= 1 << 40
            assert len(batches.corrupt(batch)) == 1
            half[2, 3] ^= 1 << 40


def test_a_corrupt_batch_is_skipped_and_reported(
    world: World, reported: list[tuple[int, dict[str, float]]], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = _trainer(world, "--steps", "5", "--check-batches")

    def corrupt(number: int, batch: Sample) -> None:
        if number == 3:
            batch[0][1, 4] += 1

    _on_batch(trainer, corrupt)
    trainer.run()
    assert (3, {"skipped_batches": 1, "corrupt_batches": 1}) in reported
    assert trainer.batches.position == 6 * 8  # five were trained, one was not
    assert "step 3: skipped a corrupt batch, windows [" in caplog.text


def test_data_that_is_corrupt_throughout_ends_the_run(world: World) -> None:
    trainer = _trainer(world, "--check-batches")
    _on_batch(trainer, lambda number, batch: batch[0].add_(1))
    with pytest.raises(RuntimeError, match=f"{MOST_CORRUPT_IN_A_ROW} batches in a row"):
        trainer.run()


def test_all_ranks_skip_what_is_corrupt_on_one(tmp_path: Path) -> None:
    """The fault corrupts rank 1's batch only; rank 0 skips its own, and both go on together."""
    finished = run(
        tmp_path, 2, "--steps", "4", "--check-batches",
        "--fault", "corrupt_batch:rank=1,start=2,steps=1",
    )  # fmt: skip
    assert finished.code == 0, finished.output
    assert sorted(finished.losses()) == [1, 2, 3, 4]
    assert finished.output.count("corrupt batches skipped so far: 1") == 2


def test_a_source_is_one_text_over_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1").write_bytes(b"abc")
    (tmp_path / "a" / "2").write_bytes(b"defg")
    (tmp_path / "b").write_bytes(b"hi")
    source = DataSource(str(tmp_path))
    assert source.read(0, 100) == b"abcdefghi"
    assert source.read(2, 5) == b"cdefg"
    assert DataSource(str(tmp_path / "b")).read(1, 1) == b"i"
    (tmp_path / "a" / "2").write_bytes(b"d")
    with pytest.raises(OSError, match="shorter than it was") as raised:
        source.read(2, 5)
    assert raised.value.errno == errno.EIO


def test_pauses_grow_and_are_bounded() -> None:
    slept: list[float] = []
    pauses = Pauses(100.0, sleep=slept.append)
    while pauses.pause():
        pass
    assert slept[:4] == [0.25, 0.5, 1.0, 2.0]
    assert max(slept) <= LONGEST_PAUSE_SECONDS
    assert sum(slept) == 100.0


def test_data_that_goes_away_is_waited_for(world: World, tmp_path: Path) -> None:
    data, away = tmp_path / "text", tmp_path / "away"
    data.write_bytes(bytes(range(250)) * 16)
    folder = tmp_path / "checkpoints"
    common = ["--data-path", str(data), "--steps", "6", "--seed", "3"]
    undisturbed = _trainer(world, *common)
    undisturbed.run()
    trainer = _trainer(world, *common, "--checkpoint-dir", str(folder))
    waited: list[Path] = []

    def remove(number: int, batch: Sample) -> None:
        if number == 3:
            data.rename(away)

    def come_back(step: int) -> None:
        save(step)
        waited.extend(folder.glob("step-*"))
        away.rename(data)

    save = trainer._save
    trainer._save = come_back  # type: ignore[method-assign]
    _on_batch(trainer, remove)
    trainer.run()
    assert [path.name for path in waited] == ["step-00000003"]
    assert trainer.batches.position == undisturbed.batches.position
    pairs = zip(
        trainer.strategy.model.parameters(), undisturbed.strategy.model.parameters(), strict=True
    )
    assert all(torch.equal(one, other) for one, other in pairs)


def test_data_that_stays_away_ends_the_run_with_a_checkpoint(world: World, tmp_path: Path) -> None:
    data, folder = tmp_path / "text", tmp_path / "checkpoints"
    data.write_bytes(bytes(range(250)) * 16)
    trainer = _trainer(
        world, "--data-path", str(data), "--data-wait-seconds", "0.3",
        "--checkpoint-dir", str(folder),
    )  # fmt: skip

    def remove(number: int, batch: Sample) -> None:
        if number == 2:
            data.unlink()

    _on_batch(trainer, remove)
    with pytest.raises(FileNotFoundError):
        trainer.run()
    assert (folder / "step-00000002").is_dir()


def test_after_a_notice_all_ranks_save_the_same_step_and_leave(tmp_path: Path) -> None:
    """One rank alone gets the signal; the code is that of SIGTERM on all, and nothing is lost."""
    arguments = ["--steps", "100000", "--grace-seconds", "100"]
    arguments += ["--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "100000"]
    process = start(tmp_path, 2, arguments)
    losses = tmp_path / "losses.jsonl"
    _wait_for(lambda: losses.exists() and losses.stat().st_size > 0, process)  # a step has ended
    ranks_of(process)[1].send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 1, output  # of the launcher, as its ranks left early
    assert f"exitcode: {128 + signal.SIGTERM}" in output, output
    assert output.count("left after signal 15, together with all ranks") == 2, output
    assert "Traceback" not in output.partition("failed (exitcode")[0]  # before the launcher's own
    last = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()][-1]
    (checkpoint,) = (tmp_path / "checkpoints").glob("step-*")
    assert checkpoint.name == f"step-{last['step']:08d}"


def test_no_rank_waits_longer_than_the_grace_period(tmp_path: Path) -> None:
    """The other rank never arrives; the notice must still end this one."""
    program = (
        "import time\n"
        "from rankscope_trainer.stopping import Stopping\n"
        "stopping = Stopping()\n"
        "stopping.install()\n"
        "stopping.give_grace(0.5)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.05)\n"  # runs on although the signal was received
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        assert time.monotonic() - began >= 0.5


def test_training_ends_when_validation_does_not_improve(world: World, tmp_path: Path) -> None:
    common = ["--validate-every", "2", "--patience", "2", "--learning-rate", "1.0"]
    common += ["--checkpoint-dir", str(tmp_path)]
    trainer = _trainer(world, *common, "--steps", "100")
    trainer.run()
    stopped = trainer._saved
    assert 0 < stopped < 100
    again = _trainer(world, *common, "--steps", "100")
    again.run()
    assert again._saved == stopped  # it remembers, and trains no further


def test_a_run_that_is_too_short_trains_on(world: World, tmp_path: Path) -> None:
    times = tmp_path / "times.jsonl"
    common = ["--steps", "3", "--step-times", str(times)]

    def steps(*more: str) -> tuple[list[int], float]:
        times.unlink(missing_ok=True)
        _trainer(world, *common, *more).run()
        lines = [json.loads(line) for line in times.read_text().splitlines()]
        seconds = (lines[-1]["ended_ns"] - lines[0]["began_ns"]) / 1e9
        return [line["step"] for line in lines], seconds

    numbers, seconds = steps()
    assert numbers == [1, 2, 3]
    least = 1 + 10 * seconds  # a second: steps of milliseconds fill less than one pause of the host
    numbers, seconds = steps("--least-seconds", str(least))
    assert seconds > 0.8 * least
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) > 3


def test_the_steps_that_fill_a_run_are_counted_by_its_own_pace(world: World) -> None:
    now = [100.0]
    duration = Duration(10.0, 20, world.device, lambda: now[0])
    now[0] += 4.0
    assert duration.steps_left(28) == 12  # 8 steps took 4 s, and 6 s are left
    now[0] += 5.0
    assert duration.steps_left(40) == 3  # they took 0.45 s each
    now[0] += 2.0
    assert duration.steps_left(43) == 0
    assert Duration(0.0, 0, world.device).steps_left(5) == 0


def test_ranks_that_do_not_know_the_loss_stop_with_the_others(world: World) -> None:
    patience = Patience(2, world.device)
    assert [patience.observe(loss) for loss in (3.0, 2.0, 2.5)] == [3.0, 2.0, 2.5]
    assert not patience.is_exhausted
    patience.observe(2.0)  # as good, but not better
    assert patience.is_exhausted


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", [1e-3, 1e-3, 1e-3]),
        ("--warm-up 4", [0.25e-3, 0.5e-3, 1e-3]),
        ("--scale-learning-rate linear --base-batch 16", [4e-3, 4e-3, 4e-3]),
        ("--scale-learning-rate sqrt --base-batch 16 --warm-up 2", [1e-3, 2e-3, 2e-3]),
    ],
)
def test_learning_rate(arguments: str, expected: list[float]) -> None:
    settings = load_settings(arguments.split(), {})
    rates = [learning_rate(settings, step, global_batch=64) for step in (1, 2, 9)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "is_doubtful"),
    [
        ("--scale-learning-rate linear", True),
        ("--scale-learning-rate linear --optimizer sgd", False),
        ("--scale-learning-rate sqrt", False),
        ("", False),
    ],
)
def test_a_rate_in_proportion_to_the_batch_is_doubtful_for_adam(
    arguments: str, is_doubtful: bool
) -> None:
    assert bool(doubt(load_settings(arguments.split(), {}))) is is_doubtful


def test_the_rate_and_the_norm_of_each_step_are_reported(
    world: World, reported: list[tuple[int, dict[str, float]]]
) -> None:
    _trainer(world, "--steps", "3", "--warm-up", "4", "--gradient-norm").run()
    clipped = _trainer(world, "--steps", "3", "--warm-up", "4", "--clip", "0.01")
    clipped.run()
    steps = [values for _, values in reported if "loss" in values]
    rates = [values["learning_rate"] for values in steps[:3]]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4])
    assert steps[0]["gradient_norm"] == steps[3]["gradient_norm"] > 0.01  # before it is clipped


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("--patience 2", "patience"),
        ("--global-batch 10 --batch-size 4", "global_batch"),
        ("--global-batch 12 --batch-size 4 --world 4", "global_batch"),
        ("--global-batch 12 --strategy pipeline", "global_batch"),
    ],
)
def test_settings_that_do_not_fit_together(arguments: str, name: str) -> None:
    flags, _, ranks = arguments.partition(" --world ")
    with pytest.raises(SettingError) as raised:
        load_settings(flags.split(), {}, int(ranks or 1))
    assert raised.value.name == name


def _wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not what():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
