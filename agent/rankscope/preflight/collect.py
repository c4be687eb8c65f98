"""Collects the facts of this node: each part in a thread of its own, with a limit.

What can block in the kernel (NFS, NVML, torch) runs in a child process inside its collector; the
limit here is the second line: a part that does not end is reported and left behind.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rankscope.preflight.checks.base import Check
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
from rankscope.preflight.model import Facts, Options, Trouble
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


@dataclass(frozen=True)
class Asked:
    """What the collectors are told."""

    options: Options
    run_id: str
    node: str
    command: Sequence[str]
    master_addr: str
    master_port: int
    peers: tuple[str, ...]
    is_master: bool


def quick_parts(system: System, asked: Asked) -> list[Part]:
    """Return what must be known before anybody is called."""
    return [
        Part("launch", lambda: launch.collect(system, asked.command), QUICK_LIMIT_S),
        Part("host", lambda: host.collect(system), QUICK_LIMIT_S),
        Part("names", lambda: names.collect(system, asked.master_addr, asked.peers), QUICK_LIMIT_S),
        Part("interfaces", lambda: interfaces.collect(system), QUICK_LIMIT_S),
        Part(
            "ports",
            lambda: ports.collect(system, asked.master_port, asked.is_master),
            QUICK_LIMIT_S,
        ),
        Part("limits", lambda: limits.collect(system, asked.options), QUICK_LIMIT_S),
    ]


def slow_parts(system: System, asked: Asked) -> list[Part]:
    """Return what may take seconds and is awaited only at the end."""
    options = asked.options
    gpu_limit_s = LOAD_LIMIT_S if options.tier == "deep" else SLOW_LIMIT_S
    return [
        Part("software", lambda: software.collect(system, options), SLOW_LIMIT_S),
        Part("gpu", lambda: gpu.collect(system, options), gpu_limit_s),
        Part("rdma", lambda: rdma.collect(system, options), SLOW_LIMIT_S),
        Part(
            "storage",
            lambda: storage.collect(system, options, asked.run_id, asked.node),
            SLOW_LIMIT_S,
        ),
    ]


def foreign_parts(checks: Sequence[Check], system: System) -> list[Part]:
    """Return the collectors of checks from elsewhere, which may have one."""
    found = []
    for check in checks:
        collect = getattr(check, "collect", None)
        if callable(collect):
            found.append(Part(check.id, functools.partial(collect, system), QUICK_LIMIT_S))
    return found


class Gathered:
    """What one node has collected so far; `on_change` is called after each part."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self.facts = Facts()
        self.extra: dict[str, Any] = {}
        self.troubles: list[Trouble] = []

    async def add(self, part: Part) -> None:
        """Run a collector and keep what it returns, or why it returned nothing."""
        found, trouble = await measure(part)
        if trouble is not None:
            self.tell(trouble)
        elif part.name in Facts.__struct_fields__:
            self.set(**{part.name: found})
        else:
            self.extra[part.name] = found
            self._on_change()

    def set(self, **facts: Any) -> None:
        """Keep facts that were measured elsewhere."""
        self.facts = msgspec.structs.replace(self.facts, **facts)
        self._on_change()

    def tell(self, trouble: Trouble) -> None:
        """Keep what could not be measured."""
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
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Any] = loop.create_future()

    def tell(value: Any, error: Exception | None) -> None:
        if found.done():
            return
        if error is None:
            found.set_result(value)
        else:
            found.set_exception(error)

    def work() -> None:
        value, failure = None, None
        try:
            value = sayable(part.collect())
        except Exception as error:  # noqa: BLE001 - a broken collector is a result
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, value, failure)

    threading.Thread(target=work, name=f"preflight-{part.name}", daemon=True).start()
    try:
        async with asyncio.timeout(part.limit_s):
            return await found, None
    except TimeoutError:
        reason = f"not measured: no answer in {part.limit_s:g} s"
    except Exception as error:  # noqa: BLE001 - see above
        reason = f"not measured: {type(error).__name__}: {error}"
    return None, Trouble(part=part.name, status="unknown", reason=reason)
