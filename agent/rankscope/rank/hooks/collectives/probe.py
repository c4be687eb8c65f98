"""The native source as the agent sees it: loads the probe that fits and answers its questions."""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rankscope.files import ring
from rankscope.files.run_directory import COLLECTIVES_RING
from rankscope.native.binaries import unsupported
from rankscope.native.probe import build, installed, ready
from rankscope.rank.context import Context, HookSkipped
from rankscope.rank.guard import guarded
from rankscope.rank.hooks.collectives.last_calls import drain
from rankscope.rank.hooks.collectives.operators import OPERATORS, Operator, places
from rankscope.rank.hooks.collectives.watch import not_the_user
from rankscope.wire import schema

LAYOUT = " ".join(f"{name}:{code}" for name, _, code in ring.COLLECTIVE_FIELDS)
# In the order of `Constants` in probe.cpp.
CONSTANTS: tuple[int, ...] = (
    ring.HEADER_BYTES, ring.HEAD_AT, ring.HEARTBEAT_AT, ring.STEP_AT, ring.HOOK_ERRORS_AT,
    ring.BLOCKED_AT, ring.LATEST_END_AT, ring.ENGINE_NUMBER_AT, ring.ENGINE_ARRIVED_AT,
    ring.ENGINE_SITE_AT, ring.OWN_NS_AT, ring.OWN_THINNED_NS_AT, ring.THINNED_AT,
    ring.TRAINING_THREAD_AT,
    schema.ISSUED, schema.RETURNED, schema.ENDED, schema.FAILED,
    schema.FLAG_ASYNC, schema.FLAG_P2P, schema.FLAG_END_FROM_WAIT, schema.FLAG_THINNED,
    schema.FLAG_BY_ENGINE,
    schema.ISSUED_BY.index("probe"), schema.ENDED_BY.index("probe"),
    schema.ENDED_BY.index("wait"), schema.ENDED_BY.index("error"),
    len(schema.REDUCE_OPS),
)  # fmt: skip


class Probe:
    """C++ kernels at the dispatcher: every path, every version, 1 to 2 us a call."""

    name: ClassVar[str] = "probe"
    outside_us: ClassVar[float] = 2.0

    def __init__(self) -> None:
        self._module: Any = None

    def set_call_sites(self, wanted: bool) -> None:
        """Record from now on which line calls, or not: to find it takes the interpreter lock."""
        if self._module is not None:
            self._module.set_call_sites(wanted)

    @staticmethod
    def check() -> None:
        """Raise HookSkipped where no probe fits this PyTorch, ready-made or compiled here."""
        import torch

        if unsupported():
            raise HookSkipped(unsupported())
        for operator in OPERATORS:
            name = f"c10d::{operator.operator}"
            if hasattr(torch.ops.c10d, operator.operator) and (
                torch._C._dispatch_has_kernel_for_dispatch_key(name, "BackendSelect")
            ):
                raise HookSkipped(f"another library watches {name}")
        load()

    def install(self, context: Context) -> str:
        """Load the probe now; it begins when the ring is there to write to."""
        loaded = load()
        self._module = loaded.module
        if loaded.not_ready:
            context.sources["collectives/ready-made"] = f"skipped: {loaded.not_ready}"
        context.on_recorder(lambda _: _start(context, loaded.module))
        return f"{loaded.origin}; C++ kernels at BackendSelect, ends from futures and waits"


@dataclass(frozen=True)
class Loaded:
    """A probe in this process."""

    module: Any
    origin: str  # who made it, in words
    not_ready: str  # why it is not a ready-made one; empty if it is


@functools.cache
def load() -> Loaded:
    """Load the first probe that fits: ready-made, or compiled before. Raises HookSkipped."""
    try:
        torch = installed.torch()
        try:
            return _load_ready(torch)
        except (ready.Unfit, HookSkipped) as reason:
            not_ready = str(reason)
        path = build.path_of()
        if path.exists():
            if not build.is_trusted(path):
                raise HookSkipped(f"{path} is not yours alone to write: it is not loaded")
            return Loaded(_import(path, torch), "compiled here", not_ready)
        not_yet = "not compiled yet: `rankscope doctor --build` does it"
        lack = build.missing() or build.last_failure(path) or not_yet
    except (installed.NoTorch, build.BuildError, OSError) as error:
        raise HookSkipped(str(error)) from None
    raise HookSkipped(f"{lack}; ready-made: {not_ready}")


def _load_ready(torch: installed.Torch) -> Loaded:
    path, binary = ready.find(torch)
    try:
        module = _import(path, torch)
    except HookSkipped as reason:
        build.remember_refusal(str(reason))  # then one is compiled for the runs to come
        raise
    build.remember_refusal("")
    return Loaded(module, f"ready-made for PyTorch {binary.torch}", "")


def _import(path: Path, torch: installed.Torch) -> Any:
    """Import the module from its file and try it. Raises HookSkipped if it cannot be used."""
    loader = importlib.machinery.ExtensionFileLoader(build.MODULE, str(path))
    spec = importlib.util.spec_from_file_location(build.MODULE, path, loader=loader)
    assert spec is not None
    try:
        importlib.import_module("torch.distributed")  # its libraries first: they are found by name
        module = importlib.util.module_from_spec(spec)
        misfit = _misfit(module, torch)
    except ImportError as error:
        raise HookSkipped(f"{path}: {error}") from None
    if misfit:
        raise HookSkipped(f"{path}: {misfit}")
    return module


def _misfit(module: Any, torch: installed.Torch) -> str:
    """Return how what the probe reads differs from what this PyTorch makes; empty if it fits."""
    from torch._C._distributed_c10d import Work

    if not torch.version.startswith(module.torch_minor + "."):
        return f"made for PyTorch {module.torch_minor}"
    if not module.reads_tensors():
        return "this build of PyTorch lays out tensors in another way"
    work = Work()
    owners = [module.num_owners(work)]
    boxed = work.boxed()  # owns it too, until it is deleted
    owners.append(module.num_owners(work))
    del boxed
    owners.append(module.num_owners(work))
    return "" if owners == [1, 2, 1] else "this build of PyTorch lays out works in another way"


def _recursion_at(module: Any) -> int:
    """Return where in PyThreadState, in bytes, each call of Python's counts down; -1: not found.

    By its depth the probe knows the autograd engine again, without the interpreter lock.
    """

    def words(depth: int) -> Any:
        return words(depth - 1) if depth else memoryview(module.thread_words()).cast("i")

    taken = {depth: words(depth) for depth in (0, 1, 3, 7)}
    found = [
        place
        for place, most in enumerate(taken[0])
        if all(most - there[place] == depth for depth, there in taken.items())
    ]
    return 4 * found[0] if len(found) == 1 else -1


def _start(context: Context, module: Any) -> None:
    """Give the probe the ring and its three questions, and let it replace Work.wait."""
    from torch._C._distributed_c10d import Work, _resolve_process_group

    recorder = context.recorder
    assert recorder is not None
    prefixes = not_the_user()
    resolve: Any = _resolve_process_group

    @guarded
    def define_group(name: str) -> tuple[int, list[int]] | None:
        group = recorder.group(resolve(name))
        return group.index, group.ranks

    @guarded
    def is_inside(code: Any) -> bool:
        inside: bool = code.co_filename.startswith(prefixes)
        return inside

    @guarded
    def name_place(code: Any, line: int) -> int:
        return recorder.call_sites.of_line(code, line)

    module.open(
        str(recorder.directory / COLLECTIVES_RING),
        LAYOUT,
        CONSTANTS,
        {name: schema.DTYPES.index(dtype) for name, dtype in schema.C10_DTYPES.items()},
        recorder.identity.rank,
        _recursion_at(module),
        define_group,
        is_inside,
        name_place,
        context.engine_code,
    )
    wait = module.start(_rows(), Work)
    context.before_exit.append(guarded(lambda: drain(module.ends_expected)))
    with context.within(context.source_scope):  # whenever the recorder opened
        context.add_undo(module.stop)
        context.patch(Work, "wait", wait)


def _rows() -> list[tuple[Any, ...]]:
    """Return what the probe must know of each operator that this version of torch has."""
    import torch

    rows = []
    for operator in OPERATORS:
        packet = getattr(torch.ops.c10d, operator.operator, None)
        if packet is not None:
            rows.append(_row(operator, packet.default._schema))
    return rows


def _row(operator: Operator, types: Any) -> tuple[Any, ...]:
    where = places(types)
    return (
        operator.operator,
        schema.OPERATIONS.index(operator.operation),
        operator.group_at,
        operator.peer_at,
        where.async_at,
        where.reduce_at,
        len(types.arguments),
        operator.is_p2p,
        operator.is_barrier,
        operator.has_future,
        operator.one_way == "in",
        operator.one_way == "out",
    )
