"""Starts the other agents over ssh and carries reports between all of them.

Each agent writes its reports to stdout and reads the others' from stdin (`LineCarrier`), so nodes
that cannot reach each other at all still come to one verdict. ssh itself is tried by this, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from rankscope.preflight.exchange.carrier import CarrierError
from rankscope.preflight.exchange.intake import Intake, RefusedReportError
from rankscope.preflight.model import NodeReport, decode_report, encode

# BatchMode: a question for a password would wait for ever where it is not seen.
SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "LogLevel=ERROR")
AGENT = (sys.executable, "-m", "rankscope", "preflight", "--lines")
SETTLE_S = 15.0  # by then an agent has spoken, or ssh has failed: 5 s to connect, then Python
LEAVE_S = 2.0  # for agents to end by themselves, once their stdin is closed
_MAX_LINE_BYTES = 64 * 2**20
_MAX_SHOWN = 6
_FORWARDED = ("PYTHONPATH",)  # where this very program may come from


class SshCarrier:
    """One ssh session for each other node, and a relay between them."""

    name: ClassVar[str] = "ssh"

    def __init__(
        self,
        nodes: Sequence[str],
        options: Sequence[str] = (),
        *,
        ssh: Sequence[str] = SSH,
        agent: Sequence[str] = AGENT,
        token: str = "",
        directory: str | None = None,
    ) -> None:
        """Start agents on `nodes`, with `options` of the command line and `--node NODE`.

        `token` is RANKSCOPE_PREFLIGHT_TOKEN: it is sent through stdin, where no `ps` shows it.
        """
        self._nodes, self._options, self._token = tuple(nodes), tuple(options), token
        self._ssh, self._agent = tuple(ssh), tuple(agent)
        self._directory = directory or os.getcwd()
        self._intake = Intake(len(self._nodes) + 1)
        self._sessions: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._reports: dict[str, NodeReport] = {}
        self._sent: dict[str, dict[str, int]] = {node: {} for node in nodes}  # versions, by node
        self._errors: dict[str, deque[str]] = {node: deque(maxlen=5) for node in nodes}
        self._started = 0.0
        self._has_reported = False
        self.failures: dict[str, str] = {}  # by node: why there is no session any more

    async def exchange(self, mine: NodeReport, have: Mapping[str, int]) -> list[NodeReport]:
        """Relay what is new in all directions. Raises CarrierError once, naming all failures."""
        if not self._started:
            await self._start()
        await self._relay(mine)
        waited_s = asyncio.get_running_loop().time() - self._started
        is_settled = all(n in self._reports or n in self.failures for n in self._nodes)
        if self.failures and not self._has_reported and (is_settled or waited_s > SETTLE_S):
            self._has_reported = True
            raise CarrierError(self._failed())
        return [r for r in self._reports.values() if r.version > have.get(r.node, -1)]

    async def close(self) -> None:
        """End all sessions: agents end when their stdin closes, and what is left is killed."""
        for session in self._sessions.values():
            if session.stdin is not None:
                session.stdin.close()
        ends = [asyncio.ensure_future(session.wait()) for session in self._sessions.values()]
        if ends:
            await asyncio.wait(ends, timeout=LEAVE_S)
        for session in self._sessions.values():
            if session.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    session.kill()
        await asyncio.gather(*ends, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def collect(self, wait_s: float, limit_s: float) -> dict[str, NodeReport]:
        """Relay until all are done, for one who is no node himself; return the reports.

        `wait_s` is for the first report of each, `limit_s` for the rest.
        """
        loop = asyncio.get_running_loop()
        none = NodeReport(node="")
        started = loop.time()
        while True:
            with contextlib.suppress(CarrierError):
                await self.exchange(none, {})
            running = [n for n in self._nodes if n not in self.failures and not self._is_done(n)]
            silent = [n for n in running if n not in self._reports]
            elapsed_s = loop.time() - started
            if not running or elapsed_s > wait_s + limit_s:
                return dict(self._reports)
            if len(silent) == len(running) and elapsed_s > wait_s:
                return dict(self._reports)
            await asyncio.sleep(0.2)

    def _is_done(self, node: str) -> bool:
        report = self._reports.get(node)
        return report is not None and (report.stage == "done" or report.is_leaving)

    async def _start(self) -> None:
        self._started = asyncio.get_running_loop().time()
        await asyncio.gather(*(self._open(node) for node in self._nodes))

    async def _open(self, node: str) -> None:
        try:
            session = await asyncio.create_subprocess_exec(
                *self._ssh, "--", node, self._command(node),  # a name is no option of ssh
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, limit=_MAX_LINE_BYTES, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self.failures[node] = f"{self._ssh[0]} cannot be started: {error.strerror}"
            return
        assert session.stdin is not None
        self._sessions[node] = session
        session.stdin.write(f"{self._token}\n".encode())
        self._tasks += [
            asyncio.create_task(self._read(node, session)),
            asyncio.create_task(self._read_errors(node, session)),
        ]

    def _command(self, node: str) -> str:
        """Return the line for the shell there, whichever shell that is."""
        forwarded = [f"{n}={os.environ[n]}" for n in _FORWARDED if os.environ.get(n)]
        agent = shlex.join(["env", *forwarded, *self._agent, *self._options, "--node", node])
        script = (
            "IFS= read -r RANKSCOPE_PREFLIGHT_TOKEN; export RANKSCOPE_PREFLIGHT_TOKEN; "
            f"cd {shlex.quote(self._directory)} 2>/dev/null; exec {agent}"
        )
        return f"exec sh -c {shlex.quote(script)}"

    async def _relay(self, mine: NodeReport) -> None:
        """Give every agent what it lacks; one that does not read holds no other up."""
        everything = [*self._reports.values(), *([mine] if mine.node else [])]
        for node, session in self._sessions.items():
            if node in self.failures or session.stdin is None or session.stdin.is_closing():
                continue
            if session.stdin.transport.get_write_buffer_size() > _MAX_LINE_BYTES:
                continue
            sent = self._sent[node]
            for report in everything:
                if report.node != node and report.version > sent.get(report.node, -1):
                    session.stdin.write(encode(report) + b"\n")
                    sent[report.node] = report.version

    async def _read(self, node: str, session: asyncio.subprocess.Process) -> None:
        assert session.stdout is not None
        while line := await session.stdout.readline():
            try:
                report = self._intake.take(decode_report(line))
            except (msgspec.MsgspecError, RefusedReportError):
                self._errors[node].append(line.decode(errors="replace").strip()[:200])
                continue  # a greeting of the shell's start files
            before = self._reports.get(report.node)
            if before is None or report.version > before.version:
                self._reports[report.node] = report
        code = await session.wait()
        if not self._is_done(node):
            await asyncio.sleep(0)  # its last words on stderr
            why = self._errors[node][-1] if self._errors[node] else "it said nothing"
            self.failures[node] = f"exit code {code}: {why}"

    async def _read_errors(self, node: str, session: asyncio.subprocess.Process) -> None:
        assert session.stderr is not None
        while line := await session.stderr.readline():
            if text := line.decode(errors="replace").strip():
                self._errors[node].append(text[:200])

    def _failed(self) -> str:
        parts = [f"{node}: {why}" for node, why in sorted(self.failures.items())]
        more = f"; and {len(parts) - _MAX_SHOWN} more" if len(parts) > _MAX_SHOWN else ""
        return f"ssh failed to {'; to '.join(parts[:_MAX_SHOWN])}{more}"
