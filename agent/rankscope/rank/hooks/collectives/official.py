"""The official source: hooks before and after each operation, which torch has since 2.14.

They fire below every caller, in Python or C++, and above the backend. They see less than the
dispatcher: not the reduce op, and `gather` and `gather_into_tensor` are one; 2.14 has but one name
for all forms of a collective. torch calls the hook after an operation only if that did not raise,
so a failure shows when the caller hears of it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from rankscope.files import ring
from rankscope.rank.context import Context, HookSkipped
from rankscope.rank.guard import guarded, guarded_one
from rankscope.rank.hooks.collectives.last_calls import at_exit
from rankscope.rank.hooks.collectives.operators import OPERATORS, Operator
from rankscope.rank.hooks.collectives.outside import Registrations
from rankscope.rank.hooks.collectives.watch import Token, Watch, WatchedSource, patch_wait
from rankscope.rank.recorder import MEASURE_EVERY
from rankscope.wire import schema

HOOK_ID = 0x52534B50  # "RSKP"; hooks of others keep their own numbers
_ERROR_LOGGER = "c10d-NullHandler-default"  # torch logs there what a torch.distributed call raised
_OTHER = Operator("", "other", 2)
_NO_TENSORS = (0, 0, 0, True)
_thread_cpu_ns = time.thread_time_ns
# by member name: the numbers differ between versions; what is no communication of the user's
# program is left out
_OPERATIONS: dict[str, str] = {
    "SEND": "send",
    "RECV": "recv",
    "BROADCAST": "broadcast",
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce_coalesced",
    "REDUCE": "reduce",
    "ALLGATHER": "all_gather",
    "ALLGATHER_BASE": "all_gather_into_tensor",
    "ALLGATHER_COALESCED": "all_gather_coalesced",
    "ALLGATHER_INTO_TENSOR_COALESCED": "all_gather_into_tensor_coalesced",
    "REDUCE_SCATTER": "reduce_scatter",
    "REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "REDUCE_SCATTER_TENSOR_COALESCED": "reduce_scatter_tensor_coalesced",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
    "BARRIER": "barrier",
    "SCATTER": "scatter",
    "GATHER": "gather",
}
# names that in 2.14 stand for the forms that functional collectives use too
_FAMILIES = frozenset({"ALLGATHER", "REDUCE_SCATTER", "ALLTOALL"})
_LEFT_OUT = frozenset({"SPLIT", "NEW_WINDOW"})
Issue = Callable[..., Token]
Row = tuple[Operator, int, Issue]


class Official(WatchedSource):
    """Hooks of the process group (PyTorch 2.14 and later): every path, some 5 us a call."""

    name: ClassVar[str] = "official"
    outside_us: ClassVar[float] = 5.0

    @staticmethod
    def check() -> None:
        """Raise HookSkipped where this version of torch has no such hooks."""
        from torch._C._distributed_c10d import ProcessGroup

        if not hasattr(ProcessGroup, "register_pre_hook"):
            raise HookSkipped("this PyTorch has no hooks of process groups (2.14 and later do)")

    def install(self, context: Context) -> str:
        """Hook the groups that are there, and each new one as torch registers it."""
        import torch.distributed.distributed_c10d as module

        c10d: Any = module  # of its private names, older versions lack some
        watch = self._watch = Watch(context, "official hook", depth=2)  # before, the guard
        hooks = _Hooks(watch)
        original = c10d._register_process_group

        def register_process_group(name: Any, group: Any) -> Any:
            result = original(name, group)
            attach(group, name)
            return result

        attach = guarded(hooks.attach)
        context.patch(c10d, "_register_process_group", register_process_group)
        for group, name in list(c10d._world.pg_names.items()):
            attach(group, name)
        context.add_undo(hooks.detach)
        at_exit(guarded(hooks.detach))
        handler = _Errors(hooks)
        logger = logging.getLogger(_ERROR_LOGGER)
        logger.addHandler(handler)
        context.add_undo(lambda: logger.removeHandler(handler))
        registrations = Registrations()
        patch_wait(context, watch, registrations)
        registrations.put_in()
        context.add_undo(registrations.take_out)
        return "official hooks; ends from futures and waits; reduce op not known"


class _Hooks:
    """The hooks of all groups of this process, and the calls that have not come back yet.

    They must be out before the interpreter ends. torch keeps groups that no script destroys until
    the C++ runtime ends, and lets go of their hooks then, for which it takes the interpreter lock
    that is no more: the process dies of SIGSEGV (PyTorch 2.14 to 2.15).
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._rows = _rows(watch)
        self._groups: list[tuple[weakref.ref[Any], str]] = []
        self._open: dict[int, tuple[int, int, Token, int]] = {}  # by thread
        self._calls = itertools.count(1)

    def attach(self, group: Any, name: str) -> None:
        """Register both hooks with a group, in the thread that made it: its tables have no lock."""
        reference = weakref.ref(group)  # the hooks must not keep their group alive
        group.register_pre_hook(HOOK_ID, guarded_one(self._before(reference)))
        group.register_post_hook(HOOK_ID, guarded_one(self._after(id(group))))
        self._groups = [known for known in self._groups if _find(*known)] + [(reference, name)]

    def detach(self) -> None:
        """Take the hooks out of every group that still lives."""
        while self._groups:
            group = _find(*self._groups.pop())
            if group is not None:
                group.unregister_pre_hook(HOOK_ID)
                group.unregister_post_hook(HOOK_ID)

    def failed(self) -> None:
        """Note that what this thread has called did not come back: it raised."""
        opened = self._open.pop(threading.get_ident(), None)
        if opened is not None:
            self._watch.failed(opened[2])

    def _before(self, reference: weakref.ref[Any]) -> Callable[[Any], None]:
        context, watch, rows, calls_open = self._watch.context, self._watch, self._rows, self._open
        measure, results, calls = watch.measure, watch.results, self._calls
        call_site = watch.call_site
        get_ident = threading.get_ident

        def before(event: Any) -> None:
            began = _thread_cpu_ns() if next(calls) % MEASURE_EVERY == 0 else 0
            recorder, row = context.recorder, rows.get(int(event.name))
            group = reference()
            if recorder is None or not recorder.active or row is None or group is None:
                return
            thread = get_ident()
            if thread in calls_open:  # one call of a thread at a time: the one before it raised
                self.failed()
            operator, operation, issue = row
            peer, inputs, outputs = event.root, event.input_tensors, event.output_tensors
            if peer < 0 and operator.operation == "recv":
                operator, operation, issue = rows[_ANY_SOURCE]
            result = measure(outputs) if outputs else _NO_TENSORS
            handed_in = measure(inputs) if inputs else _NO_TENSORS
            if operator.group_at == 1:  # in place: torch names the tensors once
                outputs = outputs or inputs
                result = handed_in = result if result[1] else handed_in
            is_whole = not recorder.buffer[ring.THINNED_AT]
            site, by_engine = call_site(recorder, is_whole)
            token = issue(
                recorder, operation, recorder.group(group), handed_in, result, peer, 0,
                event.async_op, site, by_engine, is_whole,
            )  # fmt: skip
            if operator.functional and not by_engine:
                results.note(outputs, token[0], token[2])
            own_ns = max(1, _thread_cpu_ns() - began) if began else 0
            calls_open[thread] = (id(group), event.op_id, token, own_ns)

        return before

    def _after(self, group_id: int) -> Callable[[Any], None]:
        calls_open, returned, cost = self._open, self._watch.returned, self._watch.cost
        get_ident = threading.get_ident

        def after(event: Any) -> None:
            opened = calls_open.pop(get_ident(), None)
            if opened is None:
                return
            known_group, number, token, own_ns = opened
            if (known_group, number) != (group_id, event.op_id):
                return
            began = _thread_cpu_ns() if own_ns else 0
            returned(token, event.work)
            if began:
                cost(own_ns + _thread_cpu_ns() - began)

        return after


def _find(reference: weakref.ref[Any], name: str) -> Any:
    """Return a group; one that Python has let go of may live on in torch, by its name."""
    import torch._C._distributed_c10d as module

    c10d: Any = module
    group = reference()
    if group is None:
        try:
            group = c10d._resolve_process_group(name)
        except (RuntimeError, ValueError, LookupError):
            return None
    return group


class _Errors(logging.Handler):
    """Hears at once of a call that raised; others show at the next call of their thread."""

    def __init__(self, hooks: _Hooks) -> None:
        super().__init__(logging.DEBUG)
        self._failed = guarded(hooks.failed)

    def emit(self, record: logging.LogRecord) -> None:
        """Take the calls of this thread as failed; whatever else is logged there is left alone."""
        if isinstance(record.msg, dict) and "error" in record.msg:
            self._failed()


_ANY_SOURCE = -1


def _rows(watch: Watch) -> dict[int, Row]:
    """Return what to do with each member of HookOpName, by its number in this version."""
    import torch._C._distributed_c10d as module

    c10d: Any = module  # older versions have no HookOpName
    by_operation = {operator.operation: operator for operator in OPERATORS}
    names = {name: int(number) for name, number in c10d.HookOpName.__members__.items()}
    rows = {}
    for name, number in names.items():
        if name not in _LEFT_OUT:
            operator = by_operation.get(_OPERATIONS.get(name, ""), _OTHER)
            if name in _FAMILIES and f"{name}_BASE" not in names:
                operator = replace(operator, functional=True)
            rows[number] = _row(watch, operator)
    rows[_ANY_SOURCE] = _row(watch, by_operation["recv_any_source"])
    return rows


def _row(watch: Watch, operator: Operator) -> Row:
    return (
        operator,
        schema.OPERATIONS.index(operator.operation),
        watch.issuer(operator, knows_async=True),
    )
