"""The native source as the agent sees it: loads the compiled probe and answers its questions."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rankscope import ring, schema
from rankscope.guard import guarded
from rankscope.hooks.base import HookSkipped
from rankscope.hooks.collectives.last_calls import drain
from rankscope.hooks.collectives.operators import OPERATORS, Operator, places
from rankscope.hooks.collectives.probe import build
from rankscope.hooks.collectives.watch import not_the_user
from rankscope.rundir import COLLECTIVES_RING

if TYPE_CHECKING:
    from rankscope.runtime import Agent

LAYOUT = " ".join(f"{name}:{code}" for name, _, code in ring.COLLECTIVE_FIELDS)
# In the order of `Constants` in probe.cpp.
CONSTANTS: tuple[int, ...] = (
    ring.HEADER_BYTES, ring.HEAD_AT, ring.HEARTBEAT_AT, ring.STEP_AT, ring.HOOK_ERRORS_AT,
    ring.BLOCKED_AT, ring.LATEST_END_AT, ring.ENGINE_NUMBER_AT, ring.ENGINE_ARRIVED_AT,
    ring.ENGINE_SITE_AT, ring.OWN_NS_AT, ring.OWN_CALLS_AT, ring.UNTRACKED_AT,
    schema.ISSUED, schema.RETURNED, schema.ENDED, schema.FAILED,
    schema.FLAG_ASYNC, schema.FLAG_P2P, schema.FLAG_END_FROM_WAIT,
    schema.ISSUED_BY.index("probe"), schema.ENDED_BY.index("probe"),
    schema.ENDED_BY.index("wait"), schema.ENDED_BY.index("error"),
    len(schema.REDUCE_OPS),
)  # fmt: skip
# torch's C++ names of the dtypes that the wire knows
_SCALAR_TYPES = {
    "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Double": "float64",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128",
    "Float8_e4m3fn": "float8_e4m3fn", "Float8_e5m2": "float8_e5m2",
}  # fmt: skip


class Probe:
    """C++ kernels at the dispatcher: every path, every version, 1 to 2 us a call."""

    name: ClassVar[str] = "probe"
    outside_us: ClassVar[float] = 2.0

    def __init__(self) -> None:
        self._module: Any = None
        self._has_call_sites = True

    def cheaper(self) -> str:
        """Leave out call sites: they take the interpreter lock."""
        if self._module is None or not self._has_call_sites:
            return ""
        self._has_call_sites = False
        self._module.set_call_sites(False)
        return "without call sites"

    @staticmethod
    def check() -> None:
        """Raise HookSkipped where no probe was built for this PyTorch and Python."""
        import torch

        try:
            path = build.path_of()
        except (build.BuildError, OSError) as error:
            raise HookSkipped(str(error)) from None
        if not path.exists():
            not_yet = "not built yet: `rankscope doctor --build` does it"
            raise HookSkipped(build.missing() or build.last_failure(path) or not_yet)
        if not build.is_trusted(path):
            raise HookSkipped(f"{path} is not yours alone to write: it is not loaded")
        for operator in OPERATORS:
            name = f"c10d::{operator.operator}"
            if hasattr(torch.ops.c10d, operator.operator) and (
                torch._C._dispatch_has_kernel_for_dispatch_key(name, "BackendSelect")
            ):
                raise HookSkipped(f"another library watches {name}")

    def install(self, agent: Agent) -> str:
        """Load the probe now; it begins when the ring is there to write to."""
        module = _load(build.path_of())
        self._module = module
        agent.on_recorder(lambda _: _start(agent, module))
        return "C++ kernels at BackendSelect; ends from futures and waits, without Python"


def _load(path: Path) -> Any:
    """Import the compiled module from its file. Raises HookSkipped if it does not load."""
    if build.MODULE in sys.modules:
        return sys.modules[build.MODULE]
    loader = importlib.machinery.ExtensionFileLoader(build.MODULE, str(path))
    spec = importlib.util.spec_from_file_location(build.MODULE, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
    except ImportError as error:
        raise HookSkipped(f"{path}: {error}") from None
    sys.modules[build.MODULE] = module
    return module


def _start(agent: Agent, module: Any) -> None:
    """Give the probe the ring and its three questions, and let it replace Work.wait."""
    from torch._C._distributed_c10d import Work, _resolve_process_group

    recorder = agent.recorder
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
        return recorder.call_site(code, line)

    module.open(
        str(recorder.directory / COLLECTIVES_RING),
        LAYOUT,
        CONSTANTS,
        {name: schema.DTYPES.index(dtype) for name, dtype in _SCALAR_TYPES.items()},
        recorder.identity.rank,
        define_group,
        is_inside,
        name_place,
        agent.engine_code,
    )
    wait = module.start(_rows(), Work)
    agent.before_exit.append(guarded(lambda: drain(module.ends_expected)))
    num_before = len(agent.undo)
    agent.undo.append(module.stop)
    agent.patch(Work, "wait", wait)
    agent.undo_collectives += agent.undo[num_before:]  # whenever the recorder opened
    del agent.undo[num_before:]


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
