"""Where a stream waits for other ranks: which calls are seen, on real groups and DDP of one rank.

There is no device here: the streams are numbers, and marks are kept in place of events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from rankscope.rank.hooks import stream_waits
from rankscope.rank.hooks.stream_waits import NO_GROUP, StreamWaits
from tests.agent.watching import Watching

WAIT, WORK = True, False


class Marks:
    """The waits of the test, and what they told: True where a wait ended, False where work did."""

    def __init__(self, watching: Watching) -> None:
        self.told: list[bool] = []
        self.stream = 7
        context = watching.context
        self.clock = context.clock
        self.waits = StreamWaits(context, self.told.append)
        context.listen("backward", self.waits.backward_begins)
        self.clock.on_phase = self._phase

    def _phase(self, phase: int) -> None:
        self.told.append(self.waits.ends_with_phase())

    def take(self) -> list[bool]:
        told = list(self.told)
        self.told.clear()
        return told


@pytest.fixture
def marks(watching: Watching, monkeypatch: pytest.MonkeyPatch, group: None) -> Iterator[Marks]:
    found = Marks(watching)
    monkeypatch.setattr(stream_waits, "_stream", lambda: found.stream)
    monkeypatch.setattr(stream_waits, "_is_capturing", lambda: False)
    yield found
    found.waits.end_step()


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_calls_of_python(marks: Marks) -> None:
    tensor = torch.ones(2)
    marks.waits.begin_step()
    dist.all_reduce(tensor)
    assert marks.take() == [WORK, WAIT, WORK, WAIT]  # the call, and the wait of its work
    work = dist.all_reduce(tensor, async_op=True)
    assert marks.take() == [WORK, WAIT]
    work.wait()
    assert marks.take() == [WORK, WAIT]
    functional.wait_tensor(functional.all_reduce(tensor, "sum", dist.group.WORLD))
    assert marks.take() == [WORK, WAIT]
    dist._broadcast_coalesced(dist.group.WORLD, [tensor], 1 << 20, 0)
    assert marks.take() == [WORK, WAIT]
    assert marks.waits.end_step() == ""


def test_what_was_there_is_there_again(marks: Marks) -> None:
    before = {name: ProcessGroup.__dict__[name] for name in ("allreduce", "send", "barrier")}
    wait = Work.__dict__["wait"]
    for _ in range(3):
        marks.waits.begin_step()
        assert Work.__dict__["wait"] is not wait
        dist.barrier()
        marks.waits.end_step()
        assert Work.__dict__["wait"] is wait
        assert {name: ProcessGroup.__dict__[name] for name in before} == before
    marks.take()
    dist.barrier()
    assert marks.take() == []


def test_what_the_script_puts_over_it_stays_and_is_silent(
    marks: Marks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Work, "wait", Work.__dict__["wait"])
    marks.waits.begin_step()
    inner = Work.__dict__["wait"]
    monkeypatch.setattr(Work, "wait", lambda self, *args: inner(self, *args))
    marks.waits.end_step()
    assert Work.__dict__["wait"] is not inner
    dist.all_reduce(torch.ones(2))
    assert marks.take() == []
    marks.waits.begin_step()
    dist.all_reduce(torch.ones(2))
    assert marks.take() == [WORK, WAIT, WORK, WAIT]


def test_errors_pass_and_the_wait_ends(marks: Marks) -> None:
    marks.waits.begin_step()
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        dist.group.WORLD.allreduce("no tensors")  # type: ignore[union-attr]
    assert marks.take() == [WORK, WAIT]
    dist.all_reduce(torch.ones(2))
    assert marks.take() == [WORK, WAIT, WORK, WAIT]


def test_ddp_waits_when_the_gradients_are_done(marks: Marks) -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    recorder = marks.waits._context.recorder
    assert recorder is not None
    order: list[Any] = []
    model.module.weight.register_hook(lambda _: order.append("gradient"))
    for step in range(3):
        marks.take()
        marks.waits.begin_step()
        loss = model(torch.ones(1, 2)).sum()
        marks.clock.enter(0)
        marks.take()
        loss.register_hook(lambda _: recorder.engine_issued(0))  # as the sources do for a bucket
        loss.backward()
        told = marks.take()
        assert told[-2:] == [WORK, WAIT], (step, told)  # until the callback, and until the end
        assert marks.waits.end_step() == ""
    assert order == ["gradient"] * 3


def test_without_buckets_the_end_of_a_pass_is_no_wait(marks: Marks) -> None:
    model = torch.nn.Linear(2, 2)
    marks.waits.begin_step()
    model(torch.ones(1, 2)).sum().backward()
    assert WAIT not in marks.take()
    assert marks.waits.end_step() == ""


def test_a_pass_from_a_leaf_is_not_known(marks: Marks) -> None:
    leaf = torch.ones(1, requires_grad=True)
    marks.waits.begin_step()
    leaf.backward()
    assert "DDP" in marks.waits.end_step()


def test_a_wait_that_was_not_seen_makes_the_step_unknown(marks: Marks) -> None:
    recorder = marks.waits._context.recorder
    assert recorder is not None
    marks.waits.begin_step()
    recorder.thread_blocked(1)  # a compiled program waits for functional collectives in C++
    assert "compiled" in marks.waits.end_step()
    marks.waits.begin_step()
    assert marks.waits.end_step() == ""


class Stream:
    """A stream beside the step's, with the methods that torch's has."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> Any:
        return object()


def test_a_stream_with_collectives_is_waited_for(
    marks: Marks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    main, aside, copies = Stream(7), Stream(8), Stream(9)
    marks.waits.begin_step()
    marks.stream = 8
    dist.all_reduce(torch.ones(2))
    assert marks.take() == []
    done, copied = aside.record_event(), copies.record_event()
    marks.stream = 7
    main.wait_event(copied)
    aside.wait_event(done)
    assert marks.take() == []
    main.wait_event(done)
    assert marks.take() == [WORK, WAIT]
    assert marks.waits.end_step() == ""
    marks.waits.begin_step()
    marks.stream = 8
    dist.all_reduce(torch.ones(2))
    marks.stream = 7
    assert "another stream" in marks.waits.end_step()


def test_compiled_programs_are_not_compiled_again(marks: Marks) -> None:
    """In one graph, and with waits for what others enter: the patches come and go around it."""

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(tensor: torch.Tensor) -> torch.Tensor:
        reduced = functional.all_reduce(tensor, "sum", dist.group.WORLD)
        return functional.wait_tensor(reduced) * 2

    tensor = torch.ones(2)
    marks.waits.begin_step()
    marks.waits.end_step()
    compiled(tensor)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            marks.waits.begin_step()
            assert compiled(tensor).tolist() == [2.0, 2.0]
            marks.waits.end_step()
            assert compiled(tensor).tolist() == [2.0, 2.0]


def test_a_compiled_backward_pass_is_left_alone(
    marks: Marks, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._dynamo.compiled_autograd as compiled_autograd

    monkeypatch.setattr(compiled_autograd, "compiled_autograd_enabled", True)
    marks.waits.begin_step()
    (torch.ones(1, requires_grad=True) * 2).backward()
    assert "DDP" in marks.waits.end_step()


def test_no_group_no_waits(watching: Watching) -> None:
    told: list[bool] = []
    waits = StreamWaits(watching.context, told.append)
    waits.begin_step()
    assert waits.end_step() == NO_GROUP
    assert told == []
