"""Events of the GPU: bookkeeping on any machine, times where there is a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from rankscope.rank.hooks import stream_waits
from rankscope.rank.hooks.gpu_phases import EventPool
from rankscope.rank.step_metrics import AsyncReads
from rankscope.rank.steps import BACKWARD, FORWARD
from rankscope.wire import schema
from tests.agent.steps.programs import net
from tests.agent.watching import Watching

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Device:
    """Passes its events when it is told to."""

    def __init__(self) -> None:
        self.now, self.num_events = 0.0, 0
        self.is_done = True

    def event(self) -> Any:
        device = self
        device.num_events += 1

        class Event:
            def record(self) -> None:
                self.at = device.now

            def query(self) -> bool:
                return device.is_done

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at)

        return Event()


def play(pool: EventPool, device: Device, step: int) -> None:
    pool.mark(0)
    for phase, ms in ((FORWARD, 20), (BACKWARD, 40), (FORWARD, 5)):
        device.now += ms
        pool.mark(phase)
    pool.close(step)


def test_events_are_used_again() -> None:
    device = Device()
    pool = EventPool(device.event)
    for step in range(1, 50):
        play(pool, device, step)
        ((of_step, seconds),) = pool.arrived(step)
        assert of_step == step
        assert seconds == pytest.approx(
            {"gpu_forward_seconds": 0.025, "gpu_backward_seconds": 0.04}
        )
    assert device.num_events == 4


def test_waits_belong_to_the_phase_that_ends_after_them() -> None:
    device = Device()
    pool = EventPool(device.event)
    for knows_waits in (True, False):
        pool.mark(0)
        for ms, is_wait, phase in (
            (3, False, None), (7, True, None), (1, False, FORWARD),
            (20, False, None), (4, True, BACKWARD), (2, False, 0),
        ):  # fmt: skip
            device.now += ms
            if phase is None:
                pool.mark_part(is_wait=is_wait)
            else:
                pool.mark(phase, is_wait=is_wait)
        pool.close(1, knows_waits=knows_waits)
        ((_, seconds),) = pool.arrived(1)
        expected = {
            "gpu_forward_seconds": 0.011, "gpu_backward_seconds": 0.024, "gpu_other_seconds": 0.002
        }  # fmt: skip
        if knows_waits:
            expected |= {
                "gpu_forward_wait_seconds": 0.007, "gpu_backward_wait_seconds": 0.004,
            }  # fmt: skip
        assert seconds == pytest.approx(expected)


def test_a_device_that_is_behind_is_not_waited_for() -> None:
    device = Device()
    pool = EventPool(device.event)
    device.is_done = False
    for step in range(1, 13):
        play(pool, device, step)
        assert pool.arrived(step) == []
    assert device.num_events == 48
    device.is_done = True
    assert [step for step, _ in pool.arrived(13)] == [4, 5, 6, 7, 8, 9, 10, 11, 12]


def test_a_step_with_too_many_changes_is_left_out() -> None:
    device = Device()
    pool = EventPool(device.event)
    for _ in range(2000):
        pool.mark(FORWARD)
    pool.close(1)
    assert pool.arrived(1) == []
    assert device.num_events < 600


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A process with one rank and a device in place of CUDA: its clock is moved by the test."""
    device = Device()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: device.event())
    monkeypatch.setattr(stream_waits, "_stream", lambda: 0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield device
    dist.destroy_process_group()


def train(device: Device, num_steps: int, each: Callable[[], None]) -> None:
    """Forward takes 20 ms on the device and backward 40; `each` runs before the optimizer."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.register_forward_hook(lambda *_: setattr(device, "now", device.now + 20))
    for _ in range(num_steps):
        loss = model(torch.ones(2, 8)).sum()
        loss.register_hook(lambda _: setattr(device, "now", device.now + 40))
        loss.backward()
        each()
        optimizer.step()
        optimizer.zero_grad()


on_gpu_phases = pytest.mark.parametrize(
    "watching", [{"hooks": "optimizer,backward,gpu-phases"}], indirect=True
)


@on_gpu_phases
def test_many_steps_are_measured_at_first_and_few_later(
    device: Device, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps take no time here: those that are measured later lie half a second apart."""

    original = ProcessGroup.__dict__["allreduce"]

    def waits_for_others(*args: Any) -> Any:
        device.now += 5
        return original(*args)

    monkeypatch.setattr(ProcessGroup, "allreduce", waits_for_others)

    def reduce() -> None:
        dist.all_reduce(torch.ones(2))
        device.now += 3

    train(device, 400, reduce)
    records = [one for one in watching.of(schema.Metrics) if "gpu_backward_seconds" in one.values]
    steps = [one.step for one in records]
    assert steps[:60] == list(range(2, 122, 2))
    assert len(steps) < 80
    for one in records:
        assert one.values["gpu_forward_seconds"] == pytest.approx(0.020)
        assert one.values["gpu_backward_seconds"] == pytest.approx(0.040)
        assert one.values["gpu_other_seconds"] == pytest.approx(0.008)
        assert one.values["gpu_other_wait_seconds"] == pytest.approx(0.005)
        assert one.values["gpu_backward_wait_seconds"] == 0.0
        assert "gpu_forward_wait_seconds" not in one.values
    assert (
        watching.context.sources["gpu-phases"] == "pooled CUDA events, read one or more steps later"
    )
    assert ProcessGroup.__dict__["allreduce"] is waits_for_others


@on_gpu_phases
def test_why_waits_are_not_known_is_said(device: Device, watching: Watching) -> None:
    recorder = watching.context.recorder
    assert recorder is not None

    def wait_elsewhere() -> None:
        recorder.thread_blocked(1000)

    train(device, 60, wait_elsewhere)
    records = [one for one in watching.of(schema.Metrics) if "gpu_backward_seconds" in one.values]
    assert records
    assert not any("wait" in name for one in records for name in one.values)
    assert (
        "waits of the stream not known: the thread waited inside C++"
        in (watching.context.sources["gpu-phases"])
    )


@pytest.mark.gpu
@needs_gpu
def test_a_tensor_of_the_gpu_is_read_later() -> None:
    reader = AsyncReads()
    for step in range(1, 40):
        reader.add(step, "loss", torch.full((), float(step), device="cuda"))
        torch.cuda.synchronize()
        assert list(reader.arrived(step)) == [(step, "loss", float(step))]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "watching", [{"hooks": "optimizer,backward,gpu-phases,copies"}], indirect=True
)
def test_phases_of_the_gpu(watching: Watching) -> None:
    model = net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(40):
        loss = model(torch.ones(2, 8).cuda()).sum()
        loss.backward()
        torch.cuda._sleep(20_000_000)  # some ms, in no phase
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
    records = [one for one in watching.of(schema.Metrics) if "gpu_backward_seconds" in one.values]
    assert records
    assert all(one.values["gpu_other_seconds"] > 0.002 for one in records)
    assert any(step["copy_ns"] > 0 for step in watching.steps)
