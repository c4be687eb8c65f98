"""The agent's side of the torch child: starts it early, releases it, limits it, reads it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from rankscope.formulas import busbw_bytes_per_second
from rankscope.preflight.facts.interfaces import Choice
from rankscope.preflight.facts.smoke import SmokeFacts, SmokeHalf, SmokeSize, SmokeStage
from rankscope.preflight.model import Options
from rankscope.preflight.system import System

# `import torch` took 4-18 s on a loaded machine; the collectives need 3-5 s (section 6.3).
IMPORT_LIMIT_S = 30.0
LIMITS_S = {"quick": 10.0, "default": 20.0, "deep": 60.0}  # from the release on
_BUDGETS_S = {"quick": 1.0, "default": 3.0, "deep": 20.0}  # of them, for the collectives
_LEAST_MARGIN_S = 3.0  # torch's own time-out comes first, because its text names the address
_NUM_TAIL_LINES = 30
_MAX_LINE_BYTES = 65_536
_STAGES: dict[str, SmokeStage] = {
    "imported": "imported", "store": "store", "group": "group", "collectives": "collectives",
    "halving": "halving", "done": "done",
}  # fmt: skip
_COMMAND = (sys.executable, "-m", "rankscope.preflight.smoke.child")
# "NCCL INFO Using network Socket" (2.18 and later), "NCCL INFO NET/IB : Using [0]mlx5_0:1/IB"
_NCCL_NET = re.compile(r"NCCL INFO (?:Using network (\S+)|NET/(\S+) : Using \[)")


class SmokeChild:
    """One torch process in a session of its own; nothing of it outlives `stop`."""

    def __init__(
        self,
        tier: str = "default",
        *,
        command: Sequence[str] = _COMMAND,
        limit_s: float | None = None,
        budget_s: float | None = None,
    ) -> None:
        self._command = command
        self._limit_s = limit_s or LIMITS_S[tier]
        self._budget_s = budget_s or _BUDGETS_S[tier]
        self._facts = SmokeFacts(backend="")
        self._sizes: dict[int, SmokeSize] = {}
        self._tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)
        self._child: asyncio.subprocess.Process | None = None
        self._listener: socket.socket | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._imported = asyncio.Event()
        self._deadline = 0.0

    async def start(self, system: System, options: Options) -> None:
        """Start the child, which imports torch meanwhile. Where it cannot be, facts say why."""
        if options.tier == "quick":
            return self.skip("left out by --quick")
        if importlib.util.find_spec("torch") is None:
            return self.skip("torch is not installed")
        self._listener = _listen()
        self._facts = msgspec.structs.replace(
            self._facts, port=self._listener.getsockname()[1], backend=options.backend
        )
        reading, writing = os.pipe()
        try:
            self._child = await asyncio.create_subprocess_exec(
                *self._command, str(writing),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT, start_new_session=True, limit=_MAX_LINE_BYTES,
                pass_fds=(writing, self._listener.fileno()), env=_environment(system),
            )  # fmt: skip
        except OSError as error:
            os.close(reading)
            self._fail(f"the torch process could not be started: {error}")
            return
        finally:
            os.close(writing)
        assert self._child.stdout is not None
        told = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(told), os.fdopen(reading, "rb", 0)
        )
        self._readers = [
            asyncio.create_task(self._listen_to(told)),
            asyncio.create_task(self._drain(self._child.stdout)),
        ]

    def skip(self, reason: str) -> None:
        """Say why there is no smoke test: a path that it needs has failed, and the like."""
        if not self._facts.skipped:
            self._facts = msgspec.structs.replace(self._facts, skipped=reason)

    async def imported(self, limit_s: float = IMPORT_LIMIT_S) -> bool:
        """Wait until torch is there; False if it is not, or the child has failed."""
        if self._child is None:
            return False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._imported.wait(), limit_s)
        if not self._imported.is_set():
            self._fail(f"torch was not imported in {limit_s:g} s")
        return not self._facts.error

    async def release(
        self, rank: int, nodes: Sequence[str], address: str, port: int, backend: str = "gloo"
    ) -> None:
        """Let the child begin. All nodes call it once all children have imported torch.

        `address` and `port` are those of rank 0: its address as this node sees it, and
        `SmokeFacts.port` of its report.
        """
        if self._child is None or self._child.stdin is None or self._facts.error:
            return
        assert self._listener is not None
        self._facts = msgspec.structs.replace(self._facts, backend=backend, world_size=len(nodes))
        plan = {
            "rank": rank, "nodes": list(nodes), "address": address, "port": port,
            "backend": backend, "listen_fd": self._listener.fileno() if rank == 0 else -1,
            "timeout_s": max(1.0, self._limit_s - _LEAST_MARGIN_S), "budget_s": self._budget_s,
        }  # fmt: skip
        self._deadline = asyncio.get_running_loop().time() + self._limit_s
        with contextlib.suppress(ConnectionError):  # it has died: the readers will tell
            self._child.stdin.write(msgspec.json.encode(plan) + b"\n")
            await self._child.stdin.drain()
        self._listener.close()

    async def finished(self) -> SmokeFacts:
        """Wait for the end of a released child, or for its limit, and kill what is left."""
        if self._child is not None and self._deadline:
            try:
                left_s = self._deadline - asyncio.get_running_loop().time()
                code = await asyncio.wait_for(self._child.wait(), max(0.0, left_s))
                await asyncio.wait(self._readers, timeout=1.0)
                if self._facts.stage != "done":
                    self._fail(f"ended with {_ended(code)} in stage {self._where()}")
            except TimeoutError:
                self._fail(f"killed after {self._limit_s:g} s in stage {self._where()}")
        await self.stop()
        return self.facts()

    def facts(self) -> SmokeFacts:
        """Return what is known by now."""
        sizes = tuple(self._sizes[size] for size in sorted(self._sizes))
        tail = "\n".join(self._tail) if self._facts.error else ""
        return msgspec.structs.replace(self._facts, sizes=sizes, output_tail=tail)

    async def stop(self) -> None:
        """Kill the child and all that it started."""
        if self._listener is not None:
            self._listener.close()
        if self._child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        await self._child.wait()
        _, pending = await asyncio.wait(self._readers, timeout=1.0)
        for reader in pending:
            reader.cancel()
        if self._child.stdin is not None:
            self._child.stdin.close()
        self._child._transport.close()  # type: ignore[attr-defined]
        self._child = None

    def _fail(self, error: str) -> None:
        if not self._facts.error and not self._facts.skipped:
            self._facts = msgspec.structs.replace(self._facts, error=error)

    def _where(self) -> str:
        """Return the stage, with the size that did not end."""
        open_size = next((s for s, row in self._sizes.items() if row.elapsed_ms < 0), None)
        at = f" at {open_size} B" if open_size is not None else ""
        return f"{self._facts.stage}{at}"

    async def _listen_to(self, told: asyncio.StreamReader) -> None:
        while line := await told.readline():
            try:
                self._take(msgspec.json.decode(line))
            except (msgspec.MsgspecError, KeyError, TypeError):
                continue  # cut by a kill
        self._imported.set()  # or it never will be: whoever waits must not wait for the limit
        if self._facts.stage == "not started" and not self._facts.skipped:
            self._fail("the torch process ended before torch was imported")

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind in _STAGES:
            event = {k: v for k, v in event.items() if k in SmokeFacts.__struct_fields__}
            event["backends"] = tuple(event.get("backends", self._facts.backends))
            self._facts = msgspec.structs.replace(self._facts, stage=_STAGES[kind], **event)
            if kind == "imported":
                self._imported.set()
        elif kind == "gloo":
            choices = msgspec.convert(event["choices"], tuple[Choice, ...])
            self._facts = msgspec.structs.replace(self._facts, gloo=choices)
        elif kind == "size":
            self._sizes[event["size_bytes"]] = self._measured(event)
        elif kind == "half":
            half = msgspec.convert(event, SmokeHalf)
            self._facts = msgspec.structs.replace(self._facts, halves=(*self._facts.halves, half))
        elif kind == "left out":
            self._facts = msgspec.structs.replace(self._facts, left_out_bytes=event["size_bytes"])
        elif kind == "error":
            self._fail(event["text"])

    def _measured(self, event: dict[str, Any]) -> SmokeSize:
        if "elapsed_ms" not in event:
            return SmokeSize(size_bytes=event["size_bytes"])
        speed = busbw_bytes_per_second(
            "all_reduce", event["size_bytes"], event["elapsed_ms"] / 1e3, self._facts.world_size
        )
        right = event["num_wrong"] == 0
        return SmokeSize(busbw_mb_per_s=(speed or 0.0) / 1e6, is_correct=right, **event)

    async def _drain(self, output: asyncio.StreamReader) -> None:
        """Read what torch prints, or it would wait for us; keep the end of it."""
        while True:
            try:
                line = await output.readline()
            except ValueError:  # a line longer than the limit
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._tail.append(text[:500])
            if net := _NCCL_NET.search(text):
                name = net[1] or net[2]
                self._facts = msgspec.structs.replace(self._facts, nccl_net=name)


def _listen() -> socket.socket:
    """Take a port for the store, over IPv6 and IPv4 where there is IPv6."""
    try:
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):
        return socket.create_server(("", 0))


def _environment(system: System) -> dict[str, str]:
    """Return the user's own environment, without what would make the child part of his job."""
    environ = {
        name: value
        for name, value in system.environ.items()
        if not name.startswith(("RANKSCOPE", "TORCHELASTIC_")) and name != "NCCL_DEBUG_FILE"
    }
    environ.setdefault("OMP_NUM_THREADS", "1")
    environ["NCCL_DEBUG"] = "INFO"  # which network NCCL takes, only its own lines tell
    environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET")
    return environ


def _ended(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
