"""Collects the facts of this node: each part in a thread of its own, with a limit.

What can block in the kernel (NFS, NVML, torch) runs in a child process inside its collector; the
limit here is the second line: a part that does not end is reported and left behind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rankscope.preflight.checks.base import Check
from rankscope.preflight.exchange.blocking import in_thread
from rankscope.preflight.facts import (
    gpu,
    host,
    interfaces,
    launch,
    limits,
    names,
    ports,
    rdma,
    software,
    storage,
)
from rankscope.preflight.model import Facts, Trouble
from rankscope.preflight.plan import Plan
from rankscope.preflight.system import System

QUICK_LIMIT_S = 4.0  # files of /proc and /sys, one name to resolve (3 s)
LOAD_LIMIT_S = 45.0  # with --deep: NVML and half a second of work on each of up to 8 GPUs
SLOW_LIMIT_S = 12.0  # disks, NVML, versions: their children have limits of 3 to 10 s


@dataclass(frozen=True)
class Part:
    """One field of `Facts`, and how it is measured."""

    name: str
    collect: Callable[[], Any]
    limit_s: float


def quick_parts(plan: Plan) -> list[Part]:
    """Return what must be known before any node is called."""
    system, who = plan.system, plan.who
    collectors: dict[str, Callable[[], Any]] = {
        "launch": lambda: launch.collect(system, plan.command),
        "host": lambda: host.collect(system),
        "names": lambda: names.collect(system, who.master_addr, who.nodes),
        "interfaces": lambda: interfaces.collect(system),
        "ports": lambda: ports.collect(system, who.master_port, True),  # any node may have rank 0
        "limits": lambda: limits.collect(system, plan.options),
    }
    return [Part(name, collect, QUICK_LIMIT_S) for name, collect in collectors.items()]


def slow_parts(plan: Plan) -> list[Part]:
    """Return what may take seconds and is awaited only at the end."""
    system, options, node = plan.system, plan.options, plan.who.me
    gpu_limit_s = LOAD_LIMIT_S if options.tier == "deep" else SLOW_LIMIT_S
    return [
        Part("software", lambda: software.collect(system, options), SLOW_LIMIT_S),
        Part("gpu", lambda: gpu.collect(system, options), gpu_limit_s),
        Part("rdma", lambda: rdma.collect(system, options), SLOW_LIMIT_S),
        Part("storage", lambda: storage.collect(system, options, plan.run_id, node), SLOW_LIMIT_S),
        *foreign_parts(plan.foreign, system),
    ]


def foreign_parts(checks: Sequence[Check], system: System) -> list[Part]:
    """Return the collectors of checks from elsewhere, which may have one."""
    found = []
    for check in checks:
        collect = getattr(check, "collect", None)
        if callable(collect):
            found.append(Part(check.id, functools.partial(collect, system), QUICK_LIMIT_S))
    return found


class Collected:
    """What one node has collected so far; `on_change` is called after each part."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self.facts = Facts()
        self.extra: dict[str, Any] = {}
        self.troubles: list[Trouble] = []

    async def add(self, part: Part) -> None:
        """Run a collector and store what it returns, or why it returned nothing."""
        found, trouble = await measure(part)
        if trouble is not None:
            self.note(trouble)
        elif part.name in Facts.__struct_fields__:
            self.set(**{part.name: found})
        else:
            self.extra[part.name] = found
            self._on_change()

    def set(self, **facts: Any) -> None:
        """Store facts that were measured elsewhere."""
        self.facts = msgspec.structs.replace(self.facts, **facts)
        self._on_change()

    def note(self, trouble: Trouble) -> None:
        """Store what could not be measured."""
        self.troubles.append(trouble)
        self._on_change()

    def fields(self) -> dict[str, Any]:
        """Return all of it as fields of a `NodeReport`."""
        return {
            "facts": self.facts, "extra": dict(self.extra), "troubles": tuple(self.troubles)
        }  # fmt: skip


def sayable(value: Any) -> Any:
    """Return `value`, its texts as they can be sent: bytes that are no text become "?"."""
    try:
        msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.convert(_replaced(msgspec.to_builtins(value)), type(value))
    return value


def _replaced(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_replaced(key): _replaced(one) for key, one in value.items()}
    return [_replaced(one) for one in value] if isinstance(value, list | tuple) else value


async def measure(part: Part) -> tuple[Any, Trouble | None]:
    """Run one collector; return its facts, or None and what went wrong."""
    try:
        return await in_thread(lambda: sayable(part.collect()), part.limit_s), None
    except TimeoutError:
        reason = f"not measured: no answer in {part.limit_s:g} s"
    except Exception as error:  # noqa: BLE001 - a broken collector is a result
        reason = f"not measured: {type(error).__name__}: {error}"
    return None, Trouble(part=part.name, status="unknown", reason=reason)
