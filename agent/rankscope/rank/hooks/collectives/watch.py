"""What the sources of collectives that are written in Python have in common.

How a call is measured, from which line of the user's code, and how its end is seen: from the
future of the work where the backend has one, else from `Work.wait`, which is patched on its class
and also shows exposed waiting.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any, TypeAlias

from rankscope.rank.context import Context, HookSkipped
from rankscope.rank.group import Group
from rankscope.rank.guard import guarded, guarded_two
from rankscope.rank.hooks.collectives.functional import Results, patch_wait_tensor
from rankscope.rank.hooks.collectives.last_calls import drain
from rankscope.rank.hooks.collectives.operators import Operator
from rankscope.rank.hooks.collectives.outside import Registrations
from rankscope.rank.recorder import MAX_CALL_SITES, Recorder
from rankscope.wire import schema

_MAX_FRAMES = 40
_MAX_THREADS = 64
_BY_FUTURE = schema.ENDED_BY.index("future")
_OWN_DIRECTORY = str(Path(__file__).parents[3])
_now = time.monotonic_ns
# slot number; the autograd engine called, so C++ waits; host: the end can be seen from the CPU;
# a future is needed to see it: the caller itself waits for a synchronous call
Token: TypeAlias = tuple[int, bool, bool, bool]
Waiting: TypeAlias = tuple[Any, int, bool]  # a work, its slot number, on the host
Measured: TypeAlias = tuple[int, int, int, bool]  # bytes, tensors, dtype of the first, on the CPU


class WatchedSource:
    """What the sources in Python share; `_watch` is there once they are installed."""

    _watch: Watch | None = None

    def set_call_sites(self, wanted: bool) -> None:
        """Record from now on which line of the user's code calls, or not."""
        if self._watch is not None:
            self._watch.has_call_sites = wanted


class Watch:
    """The two ends of every call, and the works whose wait is still to come."""

    def __init__(
        self, context: Context, issued_by: str, depth: int, *, has_boxes: bool = False
    ) -> None:
        """Make it for one source; `depth` frames of ours stand above `issuer`'s caller.

        `has_boxes`: it knows works as the dispatcher does, in boxes.
        """
        import torch
        from torch._C._distributed_c10d import ProcessGroup, Work

        self.context = context
        self.unbox_group = ProcessGroup.unbox
        self._unbox_work = Work.unbox if has_boxes else None
        self.work_class = Work
        self.failed = guarded(self._failed)
        self.wait_ended = guarded_two(self._wait_ended)
        self.wait_failed = guarded_two(self._wait_failed)
        self._depth = 1 + depth
        self.has_call_sites = True
        self._issued_by = schema.ISSUED_BY.index(issued_by)
        self._dtypes = dtype_numbers()
        self._tensor = torch.Tensor
        # by id: the hash of a code object reads all of it. The code is kept for its id
        self._inside_torch: dict[int, tuple[bool, Any]] = {}
        self._not_the_user = not_the_user()
        # works whose wait is still to come: the latest of each thread, which must live until its
        # caller has it (most are waited for at once), and weakly, by id, those before
        self._latest: dict[int, Waiting] = {}
        self._waiting: dict[int, tuple[weakref.ref[Any], int, bool]] = {}
        self.results = Results()
        self._calling: set[int] = set()  # slots whose future has not called back yet
        context.before_exit.append(guarded(self._drain))
        # a child that let go of the parent's work would wait for the parent's threads for ever
        os.register_at_fork(before=self._let_go)

    def cost(self, cpu_ns: int) -> None:
        """Add what recording one collective took of this thread's CPU."""
        if self.context.recorder is not None:
            self.context.recorder.costs.add_call(cpu_ns)

    def issuer(self, operator: Operator, *, knows_async: bool) -> Callable[..., Token]:
        """Return what writes the slot of one operator's call; `peer` is a rank of the group."""
        asks = operator.has_future and not knows_async
        has_future = operator.has_future
        is_p2p, one_way, is_barrier = operator.is_p2p, operator.one_way, operator.is_barrier
        always = schema.FLAG_P2P | schema.FLAG_ASYNC if is_p2p else 0
        issued_by = self._issued_by

        def issue(
            recorder: Recorder, operation: int, group: Group, handed_in: Measured,
            result: Measured, peer: int, reduce_op: int, is_async: bool, site: int,
            by_engine: bool, is_whole: bool,
        ) -> Token:  # fmt: skip
            peer_rank = group.ranks[peer] if 0 <= peer < len(group.ranks) else -1
            if is_barrier:  # its tensor is torch's own
                handed_in = result = (0, 0, 0, result[3])
            input_bytes, output_bytes = handed_in[0], result[0]
            if one_way and (is_p2p or peer_rank != recorder.identity.rank):
                if one_way == "in":
                    input_bytes = 0
                else:
                    output_bytes = 0
            flags = always | schema.FLAG_ASYNC if is_async else always
            if by_engine:
                flags |= schema.FLAG_BY_ENGINE
            if not is_whole:
                flags |= schema.FLAG_THINNED
            number = recorder.issued(
                operation,
                group,
                group.next_p2p(operation, peer_rank) if is_p2p else next(group.sequence),
                input_bytes,
                output_bytes,
                result[2] or handed_in[2],
                max(handed_in[1], result[1]),
                peer_rank,
                reduce_op,
                flags,
                site,
                issued_by,
            )
            if by_engine:
                recorder.engine_issued(number)
            on_host = result[3] and handed_in[3]  # on a device a future ends when it is enqueued
            asks_future = asks or (has_future and (by_engine or is_async))
            return number, by_engine, on_host, is_whole and on_host and asks_future

        return issue

    def returned(self, token: Token, work: Any) -> None:
        """Note that the call came back, and arrange that the end of `work` is seen."""
        number, by_engine, on_host, needs_future = token
        recorder = self.context.recorder
        assert recorder is not None
        recorder.returned(number)  # first: the callback below may run at once
        if by_engine and not needs_future:
            return
        if self._unbox_work is not None:
            work = self._unbox_work(work)
        if work is None:
            return
        if not by_engine:  # C++ callers never wait through Python
            thread = get_ident()
            if thread in self._latest:
                self._let_go_of(thread)
            elif len(self._latest) > _MAX_THREADS:  # threads that ended leave theirs behind
                self._let_go()
            self._latest[thread] = work, number, on_host
        if needs_future:
            try:
                future = work.get_future()
            except RuntimeError:  # this backend has none for this operation
                return
            ended, calling = recorder.ended, self._calling
            calling.add(number)

            def done(_: Any) -> None:
                ended(number, schema.FLAG_END_IS_UPPER_BOUND, _BY_FUTURE)
                calling.discard(number)

            future.add_done_callback(done)

    def _drain(self) -> None:
        drain(lambda: len(self._calling))

    def _failed(self, token: Token) -> None:
        recorder = self.context.recorder
        if recorder is not None:
            recorder.failed(token[0])

    def _let_go(self) -> None:
        for thread in list(self._latest):
            self._let_go_of(thread)

    def _let_go_of(self, thread: int) -> None:
        """Know the latest work of a thread weakly from now on."""
        latest = self._latest.pop(thread, None)
        if latest is not None:
            work, number, on_host = latest
            key, waiting = id(work), self._waiting
            waiting[key] = weakref.ref(work, lambda _: waiting.pop(key, None)), number, on_host

    def _wait_failed(self, work: Any, began_ns: int) -> None:
        self._wait_ended(work, began_ns, failed=True)

    def _wait_ended(self, work: Any, began_ns: int, failed: bool = False) -> None:
        thread, context = get_ident(), self.context
        latest, recorder = self._latest.get(thread), context.recorder
        if latest is not None and latest[0] is work:
            # a work holds its group, sockets and all, after its destruction
            self._latest.pop(thread, None)
        else:
            latest = self._waited_late(work, thread)
        if recorder is None:
            return
        duration, in_training = _now() - began_ns, thread == context.clock.thread
        if latest is not None:
            _, number, on_host = latest
            if failed:
                recorder.failed(number)
            # on a device, wait returns once the stream has its wait enqueued
            recorder.waited(number, duration, on_host and not failed, in_training)
        elif in_training and recorder.waits_unknown:  # the call itself was not recorded
            recorder.thread_blocked(duration)

    def _waited_late(self, work: Any, thread: int) -> Waiting | None:
        """Return what is known of a work of an earlier call, or of another thread's."""
        self._let_go_of(thread)
        known = self._waiting.pop(id(work), None)
        if known is not None and known[0]() is work:
            return (work, *known[1:])
        for other, latest in list(self._latest.items()):
            if latest[0] is work:
                self._latest.pop(other, None)
                return latest
        return None

    def waited(self, number: int, on_host: bool, duration: int, failed: bool) -> None:
        """Note that this thread was blocked in a wait for so many ns, until the end came."""
        recorder = self.context.recorder
        if recorder is None:
            return
        if failed:
            recorder.failed(number)
        is_end = on_host and not failed  # as in `_wait_ended`
        recorder.waited(number, duration, is_end, get_ident() == self.context.clock.thread)

    def measure(self, tensors: Any) -> Measured:
        """Return (bytes, number of tensors, dtype of the first, on the CPU) of nested lists."""
        while isinstance(tensors, list | tuple) and len(tensors) == 1:
            tensors = tensors[0]
        if isinstance(tensors, self._tensor):
            return tensors.nbytes, 1, self._dtypes.get(tensors.dtype, 0), tensors.is_cpu
        size_bytes = count = dtype = 0
        on_host = True
        for part in tensors:
            part_bytes, part_count, part_dtype, part_on_host = self.measure(part)
            size_bytes += part_bytes
            count += part_count
            dtype = dtype or part_dtype
            on_host = on_host and part_on_host
        return size_bytes, count, dtype, on_host

    def call_site(self, recorder: Recorder, is_whole: bool) -> tuple[int, bool]:
        """Return the innermost frame outside torch, and whether the autograd engine called.

        Calls from the engine share one place per backward pass, found once. A step that is not
        recorded whole has no call sites.
        """
        wants_site = is_whole and self.has_call_sites
        engine = self.context.engine_code
        if not wants_site and engine is None:
            return 0, False
        try:
            frame: Any = sys._getframe(self._depth)
        except ValueError:  # C++ called in a thread without Python frames: the engine's
            return max(recorder.engine_site(), 0), True
        by_engine = frame.f_code is engine
        if not wants_site:
            return 0, by_engine
        if by_engine and (site := recorder.engine_site()) >= 0:
            return site, True
        site, known = 0, self._inside_torch
        for _ in range(_MAX_FRAMES):
            if frame is None:
                break
            is_inside = known.get(id(frame.f_code)) or self._is_inside_torch(frame.f_code)
            if not is_inside[0]:
                sites = recorder.call_sites
                place = sites.known.get((id(frame.f_code), frame.f_lasti))
                site = place[0] if place is not None else sites.of_frame(frame)
                break
            frame = frame.f_back
        if by_engine:
            recorder.set_engine_site(site)
        return site, by_engine

    def _is_inside_torch(self, code: Any) -> tuple[bool, Any]:
        inside = code.co_filename.startswith(self._not_the_user), code
        if len(self._inside_torch) < MAX_CALL_SITES:  # a script may make code anew in each step
            self._inside_torch[id(code)] = inside
        return inside


def not_the_user() -> tuple[str, ...]:
    """Return the beginnings of file names that are not the user's code."""
    import torch
    from typing_extensions import deprecated

    # the wrapper of deprecated functions: which file it is in differs between versions of Python
    wrapper: Any = deprecated.__call__
    wrappers = (contextlib.__file__, wrapper.__code__.co_filename)
    return (torch.__path__[0], _OWN_DIRECTORY, *wrappers, "<")


def dtype_numbers() -> dict[Any, int]:
    """Return the wire's number of each torch.dtype."""
    import torch

    return {
        getattr(torch, name): index
        for index, name in enumerate(schema.DTYPES)
        if hasattr(torch, name)
    }


def patch_wait(context: Context, watch: Watch, registrations: Registrations) -> None:
    """Time Work.wait on its class, and what functional collectives have instead.

    From __dict__: a bound original would break the method.
    """
    original = watch.work_class.__dict__.get("wait")
    if original is None:
        raise HookSkipped("Work.wait is not a method of its class in this version")
    wait_ended, wait_failed = watch.wait_ended, watch.wait_failed

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = _now()
        try:
            result = original(self, *args, **kwargs)
        except BaseException:
            wait_failed(self, began)
            raise
        wait_ended(self, began)
        return result

    wait.__doc__ = original.__doc__
    context.patch(watch.work_class, "wait", wait)
    patch_wait_tensor(context, watch.results, watch.waited, registrations)
