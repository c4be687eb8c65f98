"""The ways by which reports travel beside the mesh, made from what was asked for."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from rankscope.preflight.checks.base import Run
from rankscope.preflight.exchange.base import Carrier, CarrierError
from rankscope.preflight.exchange.discover import Discovery
from rankscope.preflight.model import Finding, NodeReport
from rankscope.preflight.plan import UNNAMED, Progress
from rankscope.preflight.probe import schedule
from rankscope.preflight.start import (
    TOKEN_VARIABLE,
    Asking,
    UsageError,
    foreign_checks,
    run_id_of,
)
from rankscope.preflight.system import System

if TYPE_CHECKING:
    from rankscope.preflight.exchange.ssh import SshBoard
    from rankscope.preflight.runner import Outcome

LIMIT_S = 120.0  # of agents that were started over ssh: `--deep` with idle connections takes 60 s


@dataclass(frozen=True, kw_only=True)
class Ways:
    """What was asked for; empty: not this way."""

    share: str = ""  # a directory
    server: str = ""
    is_over_ssh: bool = False  # start the other agents
    is_on_lines: bool = False  # we were started over ssh: reports go by stdin and stdout
    stop: Callable[[], None] = lambda: None  # ends this agent, when the one that started it is gone

    def carriers(
        self, run_id: str, token: str, who: Discovery, asking: Asking
    ) -> tuple[Carrier, ...]:
        """Open them. Raises UsageError."""
        made: list[Carrier] = []
        try:
            if self.share:
                made.append(_share(self.share, run_id))
            if self.server:
                made.append(_server(self.server, run_id, token, who, os.environ))
            if self.is_over_ssh:
                others = [node for node in who.nodes if node != who.me]
                made.append(over_ssh(others, run_id, who, asking))
        except CarrierError as error:
            raise UsageError(str(error)) from error
        if self.is_on_lines:
            from rankscope.preflight.exchange.lines import LineBoard

            made.append(LineBoard(sys.stdin.buffer, sys.stdout.buffer, self.stop))
        return tuple(made)


def _share(directory: str, run_id: str) -> Carrier:
    from rankscope.preflight.exchange.share import ShareBoard

    if not os.path.isdir(directory):
        raise UsageError(f"--share: {directory} is no directory here; give one that all nodes see")
    return ShareBoard(directory, run_id)


def _server(
    server: str, run_id: str, token: str, who: Discovery, environ: Mapping[str, str]
) -> Carrier:
    from rankscope.preflight.exchange.http import Meeting
    from rankscope.preflight.persist import JudgingBoard

    if run_id == UNNAMED:
        raise UsageError("--server: other jobs meet there too: add --run NAME, the same everywhere")
    meeting = Meeting(
        run=run_id,
        node=who.me,
        node_rank=who.node_rank,
        num_nodes=who.num_nodes,
        nodes=who.nodes,
        hello_token=token,
        training_run=environ.get("RANKSCOPE_RUN_ID", ""),
    )
    return JudgingBoard(server, meeting, environ.get("RANKSCOPE_TOKEN", ""), environ)


def over_ssh(nodes: Sequence[str], run_id: str, who: Discovery, asking: Asking) -> SshBoard:
    """Return the board that starts agents on `nodes`. Raises UsageError."""
    from rankscope.preflight.exchange.ssh import SshBoard

    if not who.nodes:
        raise UsageError("--ssh: it is not known which nodes: add --nodes or --hostfile")
    if asking.command:
        raise UsageError("--ssh: nodes have command lines of their own: give --nproc, --backend, "
                         "--master-port in place of the launch")  # fmt: skip
    words = (*_words(asking, who), "--run", run_id)
    return SshBoard(nodes, words, token=os.environ.get(TOKEN_VARIABLE, ""))


def _words(asking: Asking, who: Discovery) -> Iterator[str]:
    """Yield the options that the agents on the other nodes get: all that must be the same."""
    options = asking.options
    if options.tier != "default":
        yield f"--{options.tier}"
    given = {
        "--nodes": ",".join(who.nodes),
        "--wait": f"{asking.wait_s:g}",
        "--timeout": f"{asking.timeout_s:g}",
        "--master-addr": asking.who.master_addr,
        "--master-port": str(asking.who.master_port or ""),
        "--nproc": str(options.nproc),
        "--backend": options.backend,
        "--only": ",".join(options.only),
        "--skip": ",".join(options.skip),
        "--expect-gbps": f"{options.expect_gbps:g}",
        "--checkpoint-dir": options.checkpoint_dir,
        "--ckpt-gb": f"{options.checkpoint_gb:g}",
        "--script": options.script,
        "--data-dir": options.data_dir,
        "--loader-workers": str(options.num_loader_workers),
    }
    for option, value in given.items():
        if value and value != "0":
            yield from (option, value)


def judged_from_outside(
    asking: Asking, system: System, who: Discovery, progress: Progress
) -> Outcome:
    """Start an agent on every node, from a machine that is none of them, and judge what they say.

    Raises UsageError.
    """
    from rankscope.preflight.runner import Outcome
    from rankscope.preflight.verdict.engine import judge

    run_id = asking.run_id or run_id_of(system, is_alone=True)
    started = time.monotonic()
    progress.stage("ssh", f"{len(who.nodes)} nodes")
    limit_s = asking.timeout_s or LIMIT_S
    reports, failures = asyncio.run(_gathered(run_id, who, asking, limit_s))
    run = Run(run_id, who.nodes, reports, asking.options)
    verdict = judge(run, foreign_checks())
    took_ms = (time.monotonic() - started) * 1e3
    asides = [
        Finding(id="ssh", status="unknown", title=f"{node}: {why}", nodes=(node,))
        for node, why in failures.items()
    ]
    verdict = msgspec.structs.replace(
        verdict,
        elapsed_ms=took_ms,
        coverage=schedule.coverage(who.nodes),
        asides=(*asides, *verdict.asides),
    )
    return Outcome(verdict, run)


async def _gathered(
    run_id: str, who: Discovery, asking: Asking, limit_s: float
) -> tuple[dict[str, NodeReport], dict[str, str]]:
    board = over_ssh(who.nodes, run_id, who, asking)
    try:
        return await board.gather(asking.wait_s, limit_s), board.failures
    finally:
        await board.close()
