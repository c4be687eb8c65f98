from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from rankscope_trainer.__main__ import fault_table
from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults import FAULTS
from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place
from rankscope_trainer.faults.injector import COMPUTE_PER_FORWARD, Injector
from rankscope_trainer.faults.plan import FaultPlan, parse_fault
from rankscope_trainer.faults.processes import FaultInjectedError
from rankscope_trainer.json_lines import JsonLines
from tests.trainer.launch import read_manifest, run, start

README = Path(__file__).parents[2] / "reference_trainer/README.md"
ALWAYS = "rank=0,start=1"


class Sleeps(list[float]):
    """Replaces `time.sleep`, and remembers."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


def _injector(*texts: str, path: Path | None = None, sleep: Sleeps | None = None) -> Injector:
    return Injector(
        [parse_fault(text, world_size=2, last_step=100) for text in texts],
        rank=0,
        microbatches=4,
        manifest=JsonLines(str(path or "")),
        sleep=sleep if sleep is not None else Sleeps(),
    )


class Module:
    """Something with a forward that takes a known time."""

    def forward(self, value: int) -> int:
        time.sleep(0.002)
        return value + 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_says_what_it_does_and_leads_to(fault: Fault) -> None:
    sentence = (type(fault).__doc__ or "").splitlines()[0]
    assert sentence.endswith(".")
    line = next(line for line in fault_table().splitlines() if line.startswith(f"{fault.name} "))
    assert line.split()[1] == fault.finding
    assert line.endswith(sentence)
    assert f"`{fault.name}`" in README.read_text()


def test_fault_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_a_fault_is_read_from_its_text() -> None:
    plan = parse_fault("slow_compute:rank=1,start=5,steps=3,size=2.5", 2, 100)
    assert (plan.fault.name, plan.rank, plan.start, plan.steps) == ("slow_compute", 1, 5, 3)
    assert plan.size == Magnitude(ratio=2.5)
    assert [step for step in range(20) if plan.covers(step)] == [5, 6, 7]
    assert parse_fault("slow_data:start=5,rank=0,size=50ms", 2, 100).size == Magnitude(seconds=0.05)
    assert parse_fault("slow_data:start=5,rank=0,size=1.5s", 2, 100).size == Magnitude(seconds=1.5)
    endless = parse_fault("slow_data:start=5,rank=0", 2, 100)
    assert endless.size == Magnitude(ratio=1.0)
    assert endless.covers(10**9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("magic:rank=0,start=1", "Known faults: slow_compute, slow_forward, "),
        ("hang", "has no rank"),
        ("hang:rank=0", "has no start"),
        ("hang:rank=2,start=1", "Ranks are 0 to 1"),
        ("hang:rank=0,start=101", "Steps are 1 to 100"),
        ("hang:rank=0,start=0", "Steps are 1 to 100"),
        ("hang:rank=zero,start=1", "rank 'zero' is not a whole number"),
        ("hang:rank=0,start=1,rank=1", "cannot read 'rank=1'"),
        ("hang:rank=0,start=1,colour=red", "cannot read 'colour=red'"),
        ("hang:rank=0,start=1,size=1", "has no size"),
        ("slow_data:rank=0,start=1,size=big", "Write 50ms"),
        ("slow_data:rank=0,start=1,size=-1ms", "not above 0"),
        ("slow_data:rank=0,start=1,size=nan", "not above 0"),
        ("slow_data:rank=0,start=1,steps=0", "at least 1"),
        ("slow_data:rank=0,start=1,size=4MiB", "Write 50ms"),
        ("memory_leak:rank=0,start=1,size=4", "Write 16MiB"),
        ("bad_shard:rank=0,start=1,size=2", "Write a time"),
        ("slow_data:rank=0,start=1,peer=1", "Leave peer out"),
        ("version_drift:rank=0,steps=3", "until the end"),
        ("rare_checkpoint:rank=0", "Write rank=all"),
    ],
)
def test_a_wrong_fault_says_what_is_right(text: str, words: str) -> None:
    with pytest.raises(SettingError) as raised:
        parse_fault(text, 2, 100)
    assert raised.value.name == "fault"
    assert words in str(raised.value)


def test_slow_forward_sleeps_inside_each_forward_for_its_share() -> None:
    sleeps = Sleeps()
    injector = _injector("slow_forward:rank=0,start=2,steps=1,size=80ms", sleep=sleeps)
    module = Module()
    injector.inject_into(module)
    for step in (1, 2, 3):
        injector.begin_step(step)
        assert [module.forward(value) for value in range(4)] == [1, 2, 3, 4]
    assert sleeps == pytest.approx([0.02] * 4)


def test_a_ratio_is_of_the_own_compute_without_the_delay() -> None:
    sleeps = Sleeps()
    injector = _injector("slow_forward:rank=0,start=1,size=2", sleep=sleeps)
    module = Module()
    injector.inject_into(module)
    injector.begin_step(1)
    for _ in range(4):
        module.forward(0)
    # A forward takes 2 ms and a little more (on a busy machine much more), the backward is taken
    # for twice that.
    assert all(0.002 <= seconds / (2 * COMPUTE_PER_FORWARD) < 1.0 for seconds in sleeps)
    assert len(sleeps) == 4


def test_slow_data_waits_until_there_is_something_to_compare_with(tmp_path: Path) -> None:
    sleeps, path = Sleeps(), tmp_path / "manifest.jsonl"
    injector = _injector("slow_data:rank=0,start=1", path=path, sleep=sleeps)
    module = Module()
    injector.inject_into(module)
    for step in (1, 2):
        injector.begin_step(step)
        injector.fire(Place.DATA)
        module.forward(0)
    assert len(sleeps) == 1
    assert json.loads(path.read_text())["start_step"] == 2


@pytest.mark.parametrize(
    ("name", "forward_ms", "backward_ms"),
    [("slow_forward", 30, 0), ("slow_backward", 0, 30), ("slow_compute", 10, 20)],
)
def test_a_slow_rank_is_slow_in_the_right_half(
    name: str, forward_ms: float, backward_ms: float
) -> None:
    """Forwards and backwards of two of four microbatches, of a size for all four."""
    sleeps = Sleeps()
    injector = _injector(f"{name}:rank=0,start=1,size=120ms", sleep=sleeps)
    model = torch.nn.Linear(3, 2)
    injector.inject_into(model)
    injector.begin_step(1)
    for _ in range(2):
        before = sum(sleeps)
        outputs = model(torch.ones(1, 3))
        assert sum(sleeps) - before == pytest.approx(forward_ms / 1000)
        before = sum(sleeps)
        outputs.sum().backward()
        assert sum(sleeps) - before == pytest.approx(backward_ms / 1000)
    with torch.no_grad():
        model(torch.ones(1, 3))  # has no backward to act in


def test_the_local_gradient_is_seen_once_with_the_last_microbatch() -> None:
    seen: list[float] = []

    class Watcher(Fault):
        """Sees gradients."""

        name = "watcher"
        finding = "none"
        place = Place.BEFORE_REDUCE

        def fire(self, context: FaultContext) -> None:
            assert context.tensor is not None
            seen.append(float(context.tensor.sum()))
            context.tensor = context.tensor * 0

    plan = FaultPlan(fault=Watcher(), rank=0, start=1, steps=None, size=None)
    injector = Injector([plan], rank=0, microbatches=3, manifest=JsonLines(""))
    model = torch.nn.Linear(3, 1, bias=False)
    injector.inject_into(model)
    for step in (1, 2):
        injector.begin_step(step)
        model.zero_grad()
        for value in (1.0, 2.0, 4.0):
            model(torch.full((1, 3), value)).sum().backward()
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[3.0, 3.0, 3.0]]  # without the last one's
    assert seen == [12.0, 12.0]


def test_a_fault_that_lasts_is_begun_once_and_ended_also_when_the_run_fails(
    tmp_path: Path,
) -> None:
    calls: list[str] = []

    class Lasting(Fault):
        """Lasts."""

        name = "lasting"
        finding = "none"
        place = Place.STEP

        def begin(self, context: FaultContext) -> None:
            calls.append(f"begin {context.step}")

        def fire(self, context: FaultContext) -> None:
            calls.append("fire")
            context.add(fires=1)

        def end(self, context: FaultContext) -> None:
            calls.append(f"end {context.step}")

    def plan(start: int, steps: int | None) -> FaultPlan:
        return FaultPlan(fault=Lasting(), rank=None, start=start, steps=steps, size=None)

    manifest = JsonLines(str(tmp_path / "manifest"))
    injector = Injector([plan(2, 2), plan(7, None)], rank=5, manifest=manifest)
    for step in range(1, 8):
        injector.begin_step(step)
    injector.close()
    assert calls == ["begin 2", "fire", "fire", "end 4", "begin 7", "fire", "end 7"]
    ends = [json.loads(line) for line in (tmp_path / "manifest").read_text().splitlines()][1::2]
    assert [line["fires"] for line in ends] == [2, 1]


def test_a_plan_may_be_for_one_attempt_only() -> None:
    plan = parse_fault("crash:rank=all,start=3,attempt=1", 4, 9)
    assert [plan.concerns(rank, attempt) for rank, attempt in ((0, 1), (3, 1), (0, 0))] == [
        True, True, False
    ]  # fmt: skip
    assert parse_fault("crash:rank=2,start=3", 4, 9).concerns(2, 7)


def test_other_ranks_are_left_alone() -> None:
    injector = _injector("slow_compute:rank=1,start=1", "crash:rank=1,start=1")
    module = Module()
    injector.inject_into(module)
    injector.begin_step(1)
    injector.fire(Place.BEFORE_FORWARD)
    assert "forward" not in vars(module)


def test_the_manifest_names_what_fired_and_when_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "manifest.jsonl"
    faults = ("slow_data:rank=0,start=2,steps=3,size=1ms", "slow_data:rank=0,start=9,size=2ms")
    injector = _injector(*faults, "crash:rank=0,start=50", path=path)
    before = time.time_ns()
    for step in range(1, 11):
        injector.begin_step(step)
        injector.fire(Place.DATA)
        injector.fire(Place.BEFORE_FORWARD)
    injector.close()
    injector.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    times = [line.pop(key) for line in lines for key in list(line) if key.endswith("_time_ns")]
    assert times == sorted(times)
    assert before <= times[0] <= times[-1] <= time.time_ns()
    start = {"fault": "slow_data", "rank": 0, "pid": os.getpid()}
    assert lines == [
        {**start, "start_step": 2, "size": "1ms"},
        {"fault": "slow_data", "rank": 0, "end_step": 4, "fired": 3},
        {**start, "start_step": 9, "size": "2ms"},
        {"fault": "slow_data", "rank": 0, "end_step": 10, "fired": 2},
    ]


def test_crash_and_hang_are_in_the_manifest_before_they_act(tmp_path: Path) -> None:
    crashing = _injector(f"crash:{ALWAYS}", path=tmp_path / "crash")
    crashing.begin_step(1)
    with pytest.raises(FaultInjectedError, match="step 1"):
        crashing.fire(Place.BEFORE_FORWARD)
    assert json.loads((tmp_path / "crash").read_text())["start_step"] == 1

    class Enough(Exception):
        pass

    class Impatient(Sleeps):
        def __call__(self, seconds: float) -> None:
            raise Enough

    hanging = _injector(f"hang:{ALWAYS}", path=tmp_path / "hang", sleep=Impatient())
    hanging.begin_step(1)
    with pytest.raises(Enough):
        hanging.fire(Place.BEFORE_FORWARD)
    assert json.loads((tmp_path / "hang").read_text())["fault"] == "hang"


@pytest.mark.multiproc
def test_slow_faults_slow_a_real_run_down(tmp_path: Path) -> None:
    faults = ["--fault", "slow_compute:rank=1,start=3,steps=4,size=300ms"]
    faults += ["--fault", "slow_data:rank=0,start=8,steps=3,size=200ms"]
    finished = run(tmp_path, 2, "--strategy", "pipeline", "--steps", "12", *faults)
    assert finished.code == 0, finished.output
    lines = {(line["fault"], "fired" in line): line for line in finished.manifest()}
    assert len(lines) == len(finished.manifest()) == 4
    for name, first, last, fired, seconds in (
        # Forward and backward of four microbatches in each of four steps.
        ("slow_compute", 3, 6, 32, 1.2),
        ("slow_data", 8, 10, 3, 0.6),
    ):
        begin, end = lines[name, False], lines[name, True]
        assert (begin["start_step"], end["end_step"], end["fired"]) == (first, last, fired)
        # The start is written before the first delay, the end after the last.
        assert (end["end_time_ns"] - begin["start_time_ns"]) / 1e9 >= seconds


@pytest.mark.multiproc
def test_a_crash_ends_the_run_and_says_who_it_was(tmp_path: Path) -> None:
    finished = run(tmp_path, 2, "--steps", "9", "--fault", "crash:rank=1,start=4")
    assert finished.code == 1
    error = "rankscope_trainer.faults.processes.FaultInjectedError"
    assert f"[rank1]: {error}: rank 1" in finished.output
    assert f"[rank0]: {error}" not in finished.output
    begin, end = finished.manifest()
    assert (begin["fault"], begin["rank"], begin["start_step"]) == ("crash", 1, 4)
    assert (end["end_step"], end["fired"]) == (4, 1)


def _looks_asleep(process: psutil.Process) -> Iterator[int]:
    """Yield how many looks in a row found that the process slept, and used no processor between."""
    looks, before = 0, process.cpu_times()
    while True:
        now, is_asleep = process.cpu_times(), process.status() == psutil.STATUS_SLEEPING
        looks, before = (looks + 1 if is_asleep and now == before else 0), now
        yield looks


@pytest.mark.multiproc
def test_who_waits_for_a_hanging_rank_can_still_be_stopped(tmp_path: Path) -> None:
    process = start(tmp_path, 2, ["--steps", "9", "--fault", "hang:rank=1,start=4"])
    deadline = time.monotonic() + 60
    while not read_manifest(tmp_path):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    (hanging,) = read_manifest(tmp_path)
    assert (hanging["fault"], hanging["rank"], hanging["start_step"]) == ("hang", 1, 4)
    ranks = {child.pid for child in psutil.Process(process.pid).children()}
    (waiting,) = ranks - {hanging["pid"]}
    # Rank 0 is inside a collective that does not end, where Python runs no signal handler.
    for looks in _looks_asleep(psutil.Process(waiting)):
        if looks == 20:
            break
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(waiting, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert f"exitcode: {128 + signal.SIGTERM}" in output, output
    assert "[rank0]: Traceback" not in output
    assert "[rank1]: Traceback" not in output
    assert "rank 1 WARNING stopped by signal 15" in output
    assert read_manifest(tmp_path)[1]["end_step"] == 4
