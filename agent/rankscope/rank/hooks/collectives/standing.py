"""Where a rank waits while its kernels are out: a thread of ours records it, if it is stuck.

It looks once a second and writes nothing unless the training thread has been waiting in the same
step for some time. A rank that waits publishes its last collective as open, so that the ranks that
did not come to it are named as in any other step; one that works publishes nothing. It needs the
interpreter lock: where a rank keeps that, it is silent, and its peers speak.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from rankscope.rank.context import Context
from rankscope.rank.group import Group
from rankscope.rank.guard import guarded
from rankscope.rank.patches import file_of
from rankscope.rank.recorder import Recorder
from rankscope.wire import schema

LOOK_SECONDS = 1.0
STILL_SECONDS = 2.0  # a step that takes longer is looked at
_BUSY = 0.5  # share of the time: who computes more than that does not wait
_FLAGS = schema.FLAG_THINNED
_NO_SOURCE = schema.ISSUED_BY.index("")  # only that there was a call is known
_UNKNOWN = schema.OPERATIONS.index("other")
_C10D = "distributed/distributed_c10d.py"
# the innermost file of a thread that waits for a collective
_WAITS = (
    _C10D, "distributed/_functional_collectives.py", "nn/parallel/distributed.py",
    "futures/__init__.py", "_ops.py",
)  # fmt: skip
_OURS = os.path.join(os.path.dirname(__file__), "watch.py")  # of Work.wait


def _cpu_clock_of(native_id: int) -> int:
    """Return the clock of a thread's CPU time; asking it of one that has ended is an OSError."""
    return ~native_id << 3 | 6  # MAKE_THREAD_CPUCLOCK(tid, CPUCLOCK_SCHED), posix-timers_types.h


class Standing:
    """Slots in the ring for what the training thread waits in; one for each Outside."""

    def __init__(
        self, context: Context, torch_folder: str, moved: Callable[[], list[tuple[Any, int]]]
    ) -> None:
        self.thread: int | None = None  # its identity, while it runs
        self._context = context
        self._c10d = torch_folder + _C10D
        self._waits = {_OURS, *(torch_folder + name for name in _WAITS)}
        self._moved = moved
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._open: dict[str, tuple[int, int]] = {}  # group -> (sequence, slot)
        self._began = 0.0  # when the step did
        self._before: tuple[float, int, dict[Any, int]] | None = None

    def start(self) -> None:
        """Start the thread, if it does not run."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(self._stop,), name="rankscope-standing", daemon=True
        )
        self._thread.start()
        self.thread = self._thread.ident

    def stop(self) -> None:
        """End the thread: before the groups go, and the interpreter."""
        if self._stop is not None and self._thread is not None:
            self._stop.set()
            if self._thread is not threading.current_thread():
                self._thread.join(LOOK_SECONDS)
        self.end()
        self._thread = self._stop = self.thread = None

    def forget(self) -> None:
        """A fork: the thread is the parent's."""
        self._thread = self._stop = self.thread = None
        self._open = {}

    def end(self) -> None:
        """A step begins or ends: nothing of the one before is open."""
        self._began, self._before = time.monotonic(), None
        recorder = self._context.recorder
        while self._open and recorder is not None:
            _, (_, number) = self._open.popitem()
            recorder.ended(number, 0, 0)

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(LOOK_SECONDS):
            self._look()

    @guarded
    def _look(self) -> None:
        recorder, outside = self._context.recorder, self._context.outside
        if recorder is None or outside is None or not outside.is_out:
            return
        now = time.monotonic()
        clock = self._context.clock
        frame = sys._current_frames().get(clock.thread)
        if frame is None:  # the thread has ended, and its clock of CPU time with it
            return
        began, cpu_ns = self._began, time.clock_gettime_ns(_cpu_clock_of(clock.native_id))
        moved = dict(self._moved())
        before, self._before = self._before, (now, cpu_ns, moved)
        if before is None or began != self._began or now - began < STILL_SECONDS:
            return
        is_busy = (cpu_ns - before[1]) * 1e-9 > _BUSY * (now - before[0])
        if is_busy or not self._is_waiting(frame):
            self._publish(recorder, {}, _UNKNOWN)
        elif moved == before[2]:  # it stood still for a second
            group, operation = self._call(frame)
            self._publish(recorder, {group: moved[group]} if group in moved else moved, operation)
        if began != self._began:  # the step ended meanwhile
            self.end()

    def _is_waiting(self, frame: FrameType) -> bool:
        return frame.f_code is self._context.engine_code or file_of(frame.f_code) in self._waits

    def _call(self, frame: FrameType | None) -> tuple[Any, int]:
        """Return (group, operation) of the call of torch.distributed that a thread is in."""
        while frame is not None:
            name = frame.f_code.co_name
            if name in schema.OPERATIONS and frame.f_code.co_filename == self._c10d:
                group = frame.f_locals.get("group")
                if group is None:
                    group = sys.modules["torch.distributed.distributed_c10d"]._get_default_group()
                return group, schema.OPERATIONS.index(name)
            frame = frame.f_back
        return None, _UNKNOWN

    def _publish(self, recorder: Recorder, wanted: dict[Any, int], operation: int) -> None:
        """Have one open slot for each wanted group, at its sequence."""
        groups: dict[str, tuple[Group, int]] = {}
        for process_group, sequence in wanted.items():
            group = recorder.group(process_group)
            groups[group.name] = (group, sequence)
        for name, (sequence, number) in list(self._open.items()):
            if name not in groups or groups[name][1] != sequence:
                recorder.ended(number, 0, 0)
                self._open.pop(name, None)
        for name, (group, sequence) in groups.items():
            if name not in self._open:
                number = recorder.issued(
                    operation, group, sequence, 0, 0, 0, 0, -1, 0, _FLAGS, 0, _NO_SOURCE
                )
                recorder.num_outside -= 1  # it counts already
                self._open[name] = (sequence, number)
