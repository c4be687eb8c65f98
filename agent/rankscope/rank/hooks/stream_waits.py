"""Where the stream of a step waits for other ranks.

A host that enqueues a wait for NCCL returns at once; it is the stream that waits. So events are
put on the stream around all that can make it wait: the methods of a process group (a synchronous
collective runs on the caller's own stream), `Work.wait`, a future's, functional collectives',
DDP's broadcast of buffers, and the stream's own waits for a stream with collectives on it, as FSDP
has them. DDP waits in C++ for its buckets when a backward pass is over: a callback of the engine
that was asked for before DDP's own marks where that begins.

What is patched is patched for the sampled steps alone: the others cost nothing, and the sources of
collectives may change places in between. Only `wait_tensor` stays patched, which compilers trace:
what they have compiled must not see it change. A step in which the thread waited anywhere else is
not known.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from rankscope.rank.context import Context
from rankscope.rank.guard import guarded
from rankscope.rank.hooks.collectives.native_waits import native_waits
from rankscope.rank.steps import BACKWARD

_CALLS = (  # methods of a process group, of all versions
    "allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "_allgather_base", "all_gather_single", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced", "alltoall",
    "alltoall_base", "all_to_all_single", "broadcast", "reduce", "gather", "scatter", "barrier",
    "send", "recv", "recv_anysource", "_end_coalescing",
)  # fmt: skip
_WAITS = ("wait", "synchronize", "block_current_stream")  # of a work
_FUNCTIONAL = "torch.distributed._functional_collectives"
_MAX_STREAMS = 64
# why the waits of a step are not known
NO_GROUP = "no process group"
_LOST = "the end of the backward pass, where DDP waits, was not seen"
_ASIDE = "collectives were called on another stream, and nothing was seen to wait for it"
_ELSEWHERE = "the thread waited inside C++, as compiled programs do"


class StreamWaits:
    """Calls `mark` where a part of the step ends on its stream, True for a wait."""

    def __init__(self, context: Context, mark: Callable[[bool], None]) -> None:
        self._context, self._mark = context, mark
        self._patched: list[tuple[Any, str, Any, Any]] = []  # owner, name, ours, what was there
        self._has_functional = False
        self._made: dict[tuple[Any, str], tuple[Any, Any]] = {}  # what was there, and ours for it
        self._streams: set[int] = set()  # beside the step's, with collectives on them
        self._events: dict[int, Any] = {}  # by id: recorded on one of these; kept for its id
        self._begin()

    def _begin(self) -> None:
        self._stream = 0  # of the step
        self._is_inside = self._is_marked = False  # of a function that waits; its beginning
        self._is_ending = False  # the gradients are done, DDP waits
        self._is_lost = False  # DDP's wait was not seen
        self._num_aside = self._num_joined = 0  # calls on other streams; waits for such a stream
        self._begun_ns = self._seen_ns = self._entered_ns = 0  # of the thread's waiting

    def begin_step(self) -> None:
        """Watch from here on, on the stream of now, if there are other ranks to wait for."""
        recorder, dist = self._context.recorder, sys.modules.get("torch.distributed")
        if recorder is None or dist is None or not dist.is_available() or not dist.is_initialized():
            return
        self._begin()
        self._stream, self._begun_ns = _stream(), recorder.thread_blocked_ns
        self._patch()

    def end_step(self) -> str:
        """Take the patches away; return why not all waits were seen, nothing if they were."""
        was_open = self._is_open
        for owner, name, ours, before in reversed(self._patched):
            if owner.__dict__.get(name) is ours:  # else the script has put its own around it
                setattr(owner, name, before)
        self._patched.clear()
        self._events.clear()
        recorder = self._context.recorder
        if not was_open or recorder is None:
            return NO_GROUP
        if self._is_lost:
            return _LOST
        if self._num_aside and not self._num_joined:
            return _ASIDE
        is_all = recorder.thread_blocked_ns - self._begun_ns == self._seen_ns
        return "" if is_all else _ELSEWHERE

    @property
    def _is_open(self) -> bool:
        return bool(self._patched)

    # --- DDP ---------------------------------------------------------------------------------

    def backward_begins(self, roots: Any) -> None:
        """Ask the engine to call back when the gradients are done: in the pass's first node."""
        if not self._is_open:
            return
        nodes = (getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots)
        node = next((node for node in nodes if node is not None), None)
        if node is None or _is_autograd_compiled():
            self._is_lost = True
        else:
            handle: list[Any] = []
            handle.append(node.register_prehook(guarded(lambda _: self._ask(handle))))

    def _ask(self, handle: list[Any]) -> None:
        from torch.autograd import Variable

        handle[0].remove()
        if self._is_open:
            engine: Any = Variable._execution_engine
            engine.queue_callback(guarded(self._gradients_done))

    def _gradients_done(self) -> None:
        recorder = self._context.recorder
        if not self._is_open or recorder is None or not recorder.backward.ends_in_wait():
            return
        if self._is_inside or _stream() != self._stream or _is_capturing():
            self._is_lost = True
        else:
            self._mark(False)
            self._is_ending = self._is_inside = True

    def ends_with_phase(self) -> bool:
        """Return whether the part that ends with this phase was DDP's wait."""
        was_ending = self._is_ending
        if was_ending:
            self._is_ending = self._is_inside = False
        return was_ending

    # --- calls -------------------------------------------------------------------------------

    def _patch(self) -> None:
        import torch.cuda
        from torch._C._distributed_c10d import ProcessGroup, Work

        for owner, name, _ in native_waits():
            self._put(owner, name, self._around)
        for name in _WAITS:
            self._put(Work, name, self._around)
        functional = sys.modules.get(_FUNCTIONAL)
        if functional is not None and not self._has_functional:
            self._has_functional = True
            original = functional.wait_tensor
            self._context.patch(functional, "wait_tensor", self._around(original))
        for name in _CALLS:
            self._put(ProcessGroup, name, self._call)
        self._put(torch.cuda.Stream, "wait_event", self._wait_event)
        self._put(torch.cuda.Stream, "record_event", self._record_event)

    def _put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        before = owner.__dict__.get(name)
        if before is None:  # this version does not have it
            return
        known = self._made.get((owner, name))
        ours = known[1] if known is not None and known[0] is before else make(before)
        self._made[owner, name] = before, ours
        setattr(owner, name, ours)
        self._patched.append((owner, name, ours, before))

    @guarded
    def _enter(self) -> bool:
        """Begin what may let the stream wait; return whether it is to be left again."""
        clock, recorder = self._context.clock, self._context.recorder
        if not self._is_open or self._is_inside or recorder is None:
            return False
        # the engine's threads work while the one that trains is inside the pass
        if threading.get_ident() != clock.thread and clock.phase != BACKWARD:
            return False
        self._entered_ns = recorder.thread_blocked_ns
        self._is_marked = _stream() == self._stream and not _is_capturing()
        if self._is_marked:
            self._mark(False)
        self._is_inside = True
        return True

    @guarded
    def _leave(self) -> None:
        self._is_inside = False
        if self._is_marked:
            self._mark(True)
        if self._context.recorder is not None:
            self._seen_ns += self._context.recorder.thread_blocked_ns - self._entered_ns

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `original`, whose call the stream may wait in."""
        import torch

        is_compiling = torch.compiler.is_compiling

        @wraps(original)
        def waiting(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._enter():
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self._leave()

        return waiting

    def _call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        around, note = self._around(original), guarded(self._note_stream)

        @wraps(original)
        def calling(*args: Any, **kwargs: Any) -> Any:
            note()
            return around(*args, **kwargs)

        return calling

    def _note_stream(self) -> None:
        """Remember a stream beside the step's that carries collectives."""
        stream = _stream()
        if stream != self._stream and not self._is_inside:
            self._num_aside += 1
            if len(self._streams) < _MAX_STREAMS:
                self._streams.add(stream)

    def _wait_event(self, original: Callable[..., Any]) -> Callable[..., Any]:
        around, joins = self._around(original), guarded(self._joins)

        @wraps(original)
        def wait_event(stream: Any, event: Any) -> Any:
            return around(stream, event) if joins(stream, event) else original(stream, event)

        return wait_event

    def _joins(self, stream: Any, event: Any) -> bool:
        """Return whether the step's stream will wait for one with collectives."""
        if stream.cuda_stream != self._stream or id(event) not in self._events:
            return False
        self._num_joined += 1
        return True

    def _record_event(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note = guarded(self._note_event)

        @wraps(original)
        def record_event(stream: Any, *args: Any, **kwargs: Any) -> Any:
            event = original(stream, *args, **kwargs)
            note(stream, event)
            return event

        return record_event

    def _note_event(self, stream: Any, event: Any) -> None:
        if self._is_open and stream.cuda_stream in self._streams:
            self._events[id(event)] = event


def _stream() -> int:
    """Return the current stream of this thread, as a number."""
    from torch import _C

    stream: int = _C._cuda_getCurrentRawStream(_C._cuda_getDevice())
    return stream


def _is_autograd_compiled() -> bool:
    """Return whether backward passes are traced, and with them the hooks of their nodes."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "compiled_autograd_enabled", False))


def _is_capturing() -> bool:
    import torch

    return torch.cuda.is_current_stream_capturing()
