"""Python kernels that leave the dispatcher for thinned steps: there a collective costs nothing.

What the steps recorded whole show is that the backend's own counter of a group moves by one with
each of its collectives; while the kernels are out, sequences go on by that counter. Where it does
not hold the kernels stay in, with the reason.

The dispatcher's tables are read without a lock. So the kernels move only between two steps, in
the training thread, when no other thread can be inside a collective; and in one call into C that
neither runs bytecode nor lets go of the interpreter lock.
"""

from __future__ import annotations

import operator
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial, wraps
from types import FrameType
from typing import Any, TypeAlias

from rankscope.rank.context import Context
from rankscope.rank.group import backend_of
from rankscope.rank.guard import guarded
from rankscope.rank.hooks.collectives.standing import Standing
from rankscope.rank.recorder import Recorder

DISPATCH_KEY = "BackendSelect"
_SOURCE = "collectives/thinned steps"
_MAX_BREAKS = 100_000  # each leaves 56 bytes behind, in PyTorch's objects of libraries
_OUT = "kernels out of the dispatcher, counted by the backend"
# they move the counter and are no collectives
_ASIDE = ("send", "recv", "recv_anysource", "monitored_barrier")
# threads of torch's own that wait there all the time and call nothing
_IDLE = (os.path.join("utils", "data", "_utils"), os.path.join("_inductor", "compile_worker"))
_thread_cpu_ns = time.thread_time_ns
# by group, weakly: a group ends when its owners let go of it
_Numbers: TypeAlias = weakref.WeakKeyDictionary[Any, int]
_Pairs: TypeAlias = weakref.WeakKeyDictionary[Any, tuple[int, int]]


class Registrations:
    """Kernels at the dispatcher that go out and come in together."""

    def __init__(self) -> None:
        self._kernels: list[tuple[str, str, Callable[..., Any]]] = []
        self._modules: list[Any] = []

    def add(self, namespace: str, name: str, kernel: Callable[..., Any]) -> bool:
        """Remember a kernel for `put_in`; return False where another library has one there."""
        if _is_taken(namespace, name):
            return False
        self._kernels.append((namespace, name, kernel))
        return True

    def put_in(self, is_safe: Callable[[], bool] = lambda: True) -> bool:
        """Register all of them, but where another library has come first; return `is_safe`."""
        import torch

        modules: dict[str, Any] = {  # without a file: torch keeps its name for ever, each time
            namespace: torch._C._dispatch_library("IMPL", namespace, "", "", 0)
            for namespace in {namespace for namespace, _, _ in self._kernels}
        }
        calls = [
            partial(modules[namespace].impl, name, DISPATCH_KEY, kernel, True)
            for namespace, name, kernel in self._kernels
            if not _is_taken(namespace, name)
        ]
        if not is_safe():
            return False
        list(map(operator.call, calls))  # no bytecode in between, see above
        self._modules = list(modules.values())  # last: Ctrl-C before it takes them out again
        return True

    @property
    def are_in(self) -> bool:
        """Whether they are at the dispatcher."""
        return bool(self._modules)

    def take_out(self) -> None:
        """Take all out again. `Library._destroy` would let go of the interpreter lock."""
        self._modules.clear()


def _is_taken(namespace: str, name: str) -> bool:
    import torch

    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has_kernel(f"{namespace}::{name}", DISPATCH_KEY))


class Outside:
    """Takes the kernels out for thinned steps and puts them in again; one for each source."""

    def __init__(self, context: Context, registrations: Registrations) -> None:
        import torch
        import torch.distributed.distributed_c10d as c10d

        self.stays = ""  # why the kernels stay in for good; empty: they may go out
        self._num_breaks = 0
        self.num_unsafe = 0  # steps that began while another thread was inside torch
        self._context = context
        self._registrations = registrations
        self._known_groups: Callable[[], dict[Any, Any]] = lambda: c10d._world.pg_map
        self._torch = torch.__path__[0] + os.sep
        self._step = 0  # of the last boundary
        self._offsets = _Numbers()  # counter less sequence
        self._begun = _Numbers()  # counters when the step began, while out
        self._compared: _Pairs | None = None  # (counter, issued), while in
        self._is_forked = False  # since they went out
        self._standing = Standing(context, self._torch, self.moved)
        os.register_at_fork(after_in_child=self._forked)

    def install(self) -> None:
        """Watch what moves the counters beside collectives; from now on boundaries count."""
        from torch.distributed.distributed_c10d import ProcessGroup

        for name in _ASIDE:
            original = getattr(ProcessGroup, name, None)
            if original is not None:
                self._context.patch(
                    ProcessGroup, name, self._aside(original, "barrier" not in name)
                )
        self._context.outside = self
        self._context.before_exit.append(self._standing.stop)
        self._context.add_undo(self._close)

    @property
    def is_out(self) -> bool:
        """Whether the kernels are out of the dispatcher."""
        return not self._registrations.are_in

    # --- between two steps -------------------------------------------------------------------

    @guarded
    def at_boundary(self) -> None:
        """A step begins: see that the kernels are where it needs them."""
        recorder = self._context.recorder
        if recorder is None or not recorder.active or recorder.step == self._step:
            return
        self._step = recorder.step
        if self._is_forked:
            return  # a group of its own will put them in
        if self.is_out:
            if self.stays or not recorder.is_thinned:
                self._end_break(recorder)
        elif not self.stays:
            if recorder.is_thinned:
                self._begin_break(recorder)
            elif self._compared is None:
                self._compared = _Pairs(self._read(recorder))
        recorder.waits_unknown = self.is_out

    @guarded
    def new_group(self) -> None:
        """A process group is about to be made: its ranks call more than a step does."""
        recorder = self._context.recorder
        if not self.is_out:
            return
        if recorder is None or self._is_forked:  # nothing was recorded that would have to go on
            self._is_forked = not self._registrations.put_in()
        else:
            self._come_in(recorder)

    def moved(self) -> list[tuple[Any, int]]:
        """Return (group, sequence) of those that called something since the step began."""
        return [
            (group, counter - self._offsets.get(group, 0))
            for group, begun in list(self._begun.items())
            if (counter := _counter_of(group)) is not None and counter != begun
        ]

    def _begin_break(self, recorder: Recorder) -> None:
        if self._compared is None:
            return  # no step was recorded whole yet
        began = _thread_cpu_ns()
        self._compare(recorder)
        self._offsets = _Numbers(
            {group: counter - issued for group, (counter, issued) in self._read(recorder).items()}
        )
        if self._num_breaks >= _MAX_BREAKS:
            self._stay(f"they have been out {_MAX_BREAKS:,} times, and each time takes memory")
        if self.stays or not self._is_safe():
            return
        self._num_breaks += 1
        self._registrations.take_out()
        self._compared = None
        recorder.outside_in_step, recorder.step_begins = self._num_calls, self._step_begins
        self._step_begins()
        self._standing.start()
        recorder.costs.add_switch(_thread_cpu_ns() - began)
        self._report(_OUT)

    def _end_break(self, recorder: Recorder) -> None:
        began = _thread_cpu_ns()
        if self._num_calls() or not self._come_in(recorder):
            recorder.leave_thinned()  # it has called already, or may be calling
            return
        self._compared = _Pairs(self._read(recorder))
        recorder.costs.add_switch(_thread_cpu_ns() - began)
        if self.stays:
            self._report(f"kernels stay in: {self.stays}")

    def _come_in(self, recorder: Recorder) -> bool:
        """Put the kernels in unless another thread may be in a collective; return if they are."""
        self._go_on(recorder)
        if not self._registrations.put_in(self._is_safe):
            return False
        self._end_count(recorder)
        return True

    def _go_on(self, recorder: Recorder) -> None:
        """Let the sequences go on where the counters are."""
        for group in self._known_groups():
            counter = _counter_of(group)
            if counter is None:
                continue
            issued = counter - self._offsets.get(group, 0)
            if issued or recorder.has_group(group):
                recorder.group(group).continue_after(issued)

    def _end_count(self, recorder: Recorder) -> None:
        self._standing.end()
        recorder.num_outside += self._num_calls()
        recorder.outside_in_step = recorder.step_begins = None
        self._begun = _Numbers()

    def _step_begins(self) -> None:
        """Count from here."""
        self._standing.end()
        recorder = self._context.recorder
        if self._begun and recorder is not None:
            recorder.num_outside += self._num_calls()
        counters = {group: _counter_of(group) for group in self._known_groups()}
        self._begun = _Numbers({group: n for group, n in counters.items() if n is not None})

    def _num_calls(self) -> int:
        """Return how many collectives this step has called."""
        return sum(
            counter - begun
            for group in self._known_groups()
            if (begun := self._begun.get(group)) is not None
            and (counter := _counter_of(group)) is not None
        )

    # --- whether it may be -------------------------------------------------------------------

    def _read(self, recorder: Recorder) -> dict[Any, tuple[int, int]]:
        """Return (counter, number issued) of each group; where one cannot be, the kernels stay."""
        found = {}
        for group, (named, _) in self._known_groups().items():
            known = recorder.group(group) if recorder.has_group(group) else None
            backend = named if named == "gloo" else backend_of(group)  # asked at each whole step
            if backend != "gloo":
                self._stay(f"the counter of {backend} has not been tried")
            elif known is not None and known.p2p:
                self._stay(f"group {known.name} carries point-to-point operations")
            else:
                counter = _counter_of(group)
                if counter is None:
                    self._stay("a group has no counter")
                else:
                    found[group] = (counter, known.issued if known is not None else 0)
        return found

    def _compare(self, recorder: Recorder) -> None:
        """See whether the counters moved as our sequences did since they were read."""
        now = self._read(recorder)
        for group, (counter, issued) in list((self._compared or {}).items()):
            if group not in now:
                continue  # destroyed
            if now[group][0] - counter != now[group][1] - issued:
                name = recorder.group(group).name
                self._stay(f"the backend counts the collectives of group {name} in another way")

    def _stay(self, reason: str) -> None:
        if not self.stays:
            self.stays = reason
            if not self.is_out:
                self._report(f"kernels stay in: {reason}")

    def _report(self, words: str) -> None:
        if self._context.sources.get(_SOURCE) != words:
            self._context.sources[_SOURCE] = words
            self._context.describe()

    def _is_safe(self) -> bool:
        """Return whether no other thread can be inside a collective: then kernels may move."""
        mine, engine = threading.get_ident(), self._context.engine_code
        callers = self._context.recorder.callers if self._context.recorder is not None else ()
        # the engine's own threads may work while a hook of the user runs in this one
        is_safe = mine == self._context.clock.thread and not any(
            frame.f_code is engine for frame in _above(sys._getframe(1))
        )
        others = sys._current_frames()
        for thread in others.keys() - {mine, self._standing.thread}:
            is_safe &= thread not in callers
            is_safe &= not any(map(self._is_in_torch, _above(others[thread])))
        del others[mine]  # a frame that holds itself is left to the garbage collector
        if not is_safe:
            self.num_unsafe += 1
            if self.num_unsafe.bit_count() == 1:  # 1, 2, 4, 8 ... times
                self._report(f"another thread was inside torch as {self.num_unsafe} steps began")
        return is_safe

    def _is_in_torch(self, frame: FrameType) -> bool:
        path = frame.f_code.co_filename
        return path.startswith(self._torch) and not path[len(self._torch) :].startswith(_IDLE)

    def _aside(self, original: Callable[..., Any], is_p2p: bool) -> Callable[..., Any]:
        """Return a method of a group that leaves out what its counter moves by."""
        counter_of = guarded(_counter_of)
        note = guarded(self._note_aside)

        @wraps(original)
        def aside(group: Any, *args: Any, **kwargs: Any) -> Any:
            before = counter_of(group)
            try:
                return original(group, *args, **kwargs)
            finally:
                if before is not None:
                    note(group, before, is_p2p)

        return aside

    def _note_aside(self, group: Any, before: int, is_p2p: bool) -> None:
        now = _counter_of(group)
        moved = 0 if now is None else now - before
        if is_p2p:
            self._stay("a group carries point-to-point operations")
        if self.is_out:
            self._offsets[group] = self._offsets.get(group, 0) + moved
            if group in self._begun:
                self._begun[group] += moved
        elif self._compared is not None and group in self._compared:
            counter, issued = self._compared[group]
            self._compared[group] = (counter + moved, issued)

    # --- ends --------------------------------------------------------------------------------

    def _close(self) -> None:
        self._context.outside = None
        self._standing.stop()
        recorder = self._context.recorder
        if self.is_out and recorder is not None:
            self._go_on(recorder)
            self._end_count(recorder)
            recorder.waits_unknown = False

    def _forked(self) -> None:
        self._standing.forget()
        self._begun, self._offsets, self._compared = _Numbers(), _Numbers(), None
        self._step, self._is_forked = 0, self.is_out


def _counter_of(group: Any) -> int | None:
    """Return a group's own counter, None where its backend has none."""
    try:
        counter: int = group._get_sequence_number_for_group()
    except RuntimeError:
        return None
    return counter


def _above(frame: FrameType | None) -> list[FrameType]:
    """Return a frame and those that called it."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames
