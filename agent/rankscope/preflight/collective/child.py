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
from typing import Any, Literal

import msgspec

from rankscope.preflight.facts.choice import Choice
from rankscope.preflight.facts.smoke import SmokeFacts, SmokeHalf, SmokeSize, SmokeStage
from rankscope.preflight.options import Options
from rankscope.preflight.system import System
from rankscope.wire.formulas import busbw_bytes_per_second

IMPORT_LIMIT_S = 30.0  # `import torch` took 4-18 s on a loaded machine, 2 s on an idle one
STORE_LIMIT_S = 20.0  # from the release until all have met: others may import more slowly
LIMITS_S = {"quick": 15.0, "default": 15.0, "deep": 60.0}  # from one sign of life to the next
_BUDGETS_S = {"quick": 3.0, "default": 3.0, "deep": 20.0}  # of it, for the sizes
_LEAST_MARGIN_S = 3.0  # torch's own time-outs come first, because their text names the address
_LOOK_S = 0.5
_NUM_TAIL_LINES = 30
_MAX_LINE_BYTES = 65_536
_STAGES: dict[str, SmokeStage] = {
    "imported": "imported", "store": "store", "group": "group", "collectives": "collectives",
    "halving": "halving", "done": "done",
}  # fmt: skip
Ended = Literal["raised", "died", "limit", "not begun"]
_COMMAND = (sys.executable, "-m", "rankscope.preflight.collective")
# "NCCL INFO Using network Socket" (2.18 and later), "NCCL INFO NET/IB : Using [0]mlx5_0:1/IB"
_NCCL_NET = re.compile(r"NCCL INFO (?:Using network (\S+)|NET/(\S+) : Using \[)")


class SmokeChild:
    """One torch process in a group of its own; nothing of it outlives `stop`."""

    def __init__(
        self,
        system: System,
        options: Options,
        *,
        command: Sequence[str] = (),
        limit_s: float | None = None,
        budget_s: float | None = None,
    ) -> None:
        self._system, self._command = system, command or _COMMAND
        self._limit_s = limit_s or LIMITS_S[options.tier]
        self._budget_s = budget_s or _BUDGETS_S[options.tier]
        self._facts = SmokeFacts(backend=options.backend)
        self._sizes: dict[int, SmokeSize] = {}
        self._tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)
        self._child: asyncio.subprocess.Process | None = None
        self._listener: socket.socket | None = None
        self._lent: socket.socket | None = None
        self._starting: asyncio.Task[None] | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._imported = asyncio.Event()
        self._deadline = self._last_deadline = 0.0

    @property
    def port(self) -> int:
        """Return the port that is reserved for the store, should this node have rank 0; 0: none."""
        return self._facts.port

    def start(self, lent: socket.socket | None = None) -> None:
        """Take a port and start the child, which imports torch meanwhile.

        `lent` is the job's own port, which the agent still answers: rank 0's child takes it over.
        """
        self._lent = lent
        if importlib.util.find_spec("torch") is None:
            self._facts = msgspec.structs.replace(self._facts, skipped="torch is not installed")
            return
        self._listener = _listen()
        port = self._listener.getsockname()[1]
        self._facts = msgspec.structs.replace(self._facts, port=port)
        self._starting = asyncio.create_task(self._start(self._listener))

    async def imported(self) -> bool:
        """Wait until torch is there; False if it is not, or the child has failed."""
        limit_s = IMPORT_LIMIT_S
        if self._starting is None:
            return False
        await self._starting
        with contextlib.suppress(
            TimeoutError
        ):  # wait_for of Python 3.11 may swallow a cancellation
            async with asyncio.timeout(limit_s if self._child else 0.0):
                await self._imported.wait()
        if not self._imported.is_set():
            self._fail("not begun", f"torch was not imported in {limit_s:g} s")
        return not self._facts.error

    async def run(
        self, *, rank: int, nodes: Sequence[str], address: str, port: int, backend: str,
        beside: str = "",
    ) -> SmokeFacts:  # fmt: skip
        """Let the child begin, wait for its end or its limit, and return what it measured.

        All nodes call it. `address` is that of the store as this node believes it, `port` the
        job's, or rank 0's `port` for the reason `beside`. Cancelling it and calling `stop` ends
        everything.
        """
        where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self._facts = msgspec.structs.replace(self._facts, store=where, beside=beside)
        if await self.imported():
            await self._release(rank, nodes, address, port, backend)
            await self._finished()
        await self.stop()
        return self.facts()

    def facts(self) -> SmokeFacts:
        """Return what is known by now."""
        sizes = tuple(self._sizes[size] for size in sorted(self._sizes))
        tail = "\n".join(self._tail) if self._facts.error else ""
        return msgspec.structs.replace(self._facts, sizes=sizes, output_tail=tail)

    async def stop(self) -> None:
        """Kill the child and all that it started."""
        if self._starting is not None:
            await asyncio.wait((self._starting,))  # it hands the listener over
        self._let_go()
        if self._child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        await self._child.wait()
        _, pending = await asyncio.wait(self._readers, timeout=1.0)
        for reader in pending:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._child._transport.close()  # type: ignore[attr-defined]
        self._child = None

    async def _start(self, listener: socket.socket) -> None:
        reading, writing = os.pipe()
        try:
            self._child = await asyncio.create_subprocess_exec(
                *self._command, str(writing),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT, limit=_MAX_LINE_BYTES,
                process_group=0,  # no session of its own: there its low priority would not count
                pass_fds=(writing, *(one.fileno() for one in (listener, self._lent) if one)),
                env=_environment(self._system),
            )  # fmt: skip
        except OSError as error:
            os.close(reading)
            self._fail("not begun", f"the torch process could not be started: {error}")
            return
        finally:
            os.close(writing)
        assert self._child.stdout is not None
        events = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(events), os.fdopen(reading, "rb", 0)
        )
        self._readers = [
            asyncio.create_task(self._listen_to(events)),
            asyncio.create_task(self._drain(self._child.stdout)),
        ]

    async def _release(
        self, rank: int, nodes: Sequence[str], address: str, port: int, backend: str
    ) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._listener is not None
        self._facts = msgspec.structs.replace(self._facts, backend=backend, world_size=len(nodes))
        own = self._lent if self._lent and _port_of(self._lent) == port else self._listener
        has_port = rank == 0 and port == _port_of(own)
        plan = {
            "rank": rank, "nodes": list(nodes), "address": address, "port": port,
            "backend": backend, "listen_fd": own.fileno() if has_port else -1,
            "store_timeout_s": STORE_LIMIT_S - _LEAST_MARGIN_S, "budget_s": self._budget_s,
            "timeout_s": max(1.0, self._limit_s - _LEAST_MARGIN_S),
        }  # fmt: skip
        self._deadline = asyncio.get_running_loop().time() + STORE_LIMIT_S
        with contextlib.suppress(ConnectionError):  # it has died: the readers will see it
            self._child.stdin.write(msgspec.json.encode(plan) + b"\n")
            await self._child.stdin.drain()
        self._let_go()

    def _let_go(self) -> None:
        """Close this process's handles of the ports: the child has its own."""
        for sock in (self._listener, self._lent):
            if sock is not None:
                sock.close()

    async def _finished(self) -> None:
        """Wait until the child has ended, or its deadline, which moves on as all have met."""
        assert self._child is not None
        loop = asyncio.get_running_loop()
        ended = asyncio.ensure_future(self._child.wait())
        while not ended.done() and (left_s := self._deadline - loop.time()) > 0:
            await asyncio.wait((ended,), timeout=min(left_s, _LOOK_S))  # it may come nearer
        if not ended.done():
            ended.cancel()
            self._fail("limit", f"killed in stage {self._where()}, where it did not get on")
            return
        await asyncio.wait(self._readers, timeout=1.0)
        if self._facts.stage != "done":
            self._fail("died", f"ended with {_ended(ended.result())} in stage {self._where()}")

    def _fail(self, ended_by: Ended, error: str) -> None:
        """Keep the first error: what comes later follows from it."""
        if not self._facts.error:
            self._facts = msgspec.structs.replace(self._facts, error=error, ended_by=ended_by)

    def _where(self) -> str:
        """Return the stage, with the size that did not end."""
        open_size = next((s for s, row in self._sizes.items() if row.elapsed_ms < 0), None)
        at = f" at {open_size} B" if open_size is not None else ""
        return f"{self._facts.stage}{at}"

    async def _listen_to(self, events: asyncio.StreamReader) -> None:
        while line := await events.readline():
            try:
                self._take(msgspec.json.decode(line))
            except (msgspec.MsgspecError, KeyError, TypeError):
                continue  # cut by a kill
        self._imported.set()  # or it never will be: a task that waits must not wait for the limit
        if self._facts.stage == "not started":
            self._fail("died", "the torch process ended before torch was imported")

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        self._note(kind, event)
        if self._last_deadline:  # all have met, and it gets on
            now = asyncio.get_running_loop().time()
            self._deadline = min(now + self._limit_s, self._last_deadline)

    def _note(self, kind: str, event: dict[str, Any]) -> None:
        if kind in _STAGES:
            event = {k: v for k, v in event.items() if k in SmokeFacts.__struct_fields__}
            event["backends"] = tuple(event.get("backends", self._facts.backends))
            self._facts = msgspec.structs.replace(self._facts, stage=_STAGES[kind], **event)
            if kind == "imported":
                self._imported.set()
            if kind == "store":
                self._last_deadline = asyncio.get_running_loop().time() + 3 * self._limit_s
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
            self._fail("raised", event["text"])

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


def _port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


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
    environ["OMP_NUM_THREADS"] = "1"  # there is nothing to compute
    environ["NCCL_DEBUG"] = "INFO"  # which network NCCL takes, only its own lines say
    environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET")
    return environ


def _ended(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
