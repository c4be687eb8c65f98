"""`rankscope preflight`: why a distributed launch would fail, before it does."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rankscope.cli import EXIT_INCOMPLETE, EXIT_USAGE
from rankscope.cli.preflight_options import (
    add_options,
    check_names,
    request_of,
    transports_of,
    wanted_of,
)
from rankscope.terminal import SafeConsole, shown

if TYPE_CHECKING:
    from rankscope.preflight.checks.base import Run
    from rankscope.preflight.model import LaunchVerdict


class PreflightCommand:
    """Find out why a launch would fail, hang, shrink or crawl, in seconds, before it does.

    Start it on every node, as you would start the job. The nodes find each other, test every
    pair in both directions, compare themselves, and all print the same answer: what is wrong, on
    which node, what the launch would have done, and the command that repairs it. It needs no root,
    no GPU and no torch, changes nothing, and opens ports only while it runs.

    Examples:
      rankscope preflight                                    this machine alone
      rankscope preflight --nodes node0,node1,node2          by hand, the same line on each node
      rankscope preflight --nodes "node[0-2]" -- torchrun --nnodes 3 --nproc-per-node 8 train.py
      srun --ntasks-per-node=1 rankscope preflight --quick --exclude-list bad.txt
      mpirun --map-by ppr:1:node rankscope preflight         nodes from the launcher
      rankscope preflight --nodes node0,node1 --share /nfs/tmp      nothing connects: by files
      rankscope preflight --server https://rankscope:8787 --run 7   or by outbound HTTP alone
      rankscope preflight --list                             every check, and what it says
      srun rankscope preflight --emit > all.jsonl; rankscope preflight merge all.jsonl

    Words behind `--` are the launch: it is read, not started. `rankscope run --preflight -- ...`
    checks and then launches.

    Exit codes: 0 pass, also with warnings; 1 warnings, with --fail-on warn; 2 a failure; 3 a node
    is missing or nothing could be evaluated; 64 wrong usage.
    """

    name: ClassVar[str] = "preflight"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        add_options(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Do what was asked and return the exit code."""
        from rankscope.preflight.plan import StandsAside, UsageError

        if arguments.list:
            return _list(is_markdown=arguments.markdown, is_json=arguments.json == "-")
        try:
            check_names(arguments)
            wanted_of(arguments)  # what cannot be delivered is refused before it is measured
            if arguments.words[:1] == ["merge"]:
                return _merge(arguments)
            return _preflight(arguments)
        except UsageError as error:
            sys.stderr.write(
                f"rankscope preflight: {shown(str(error))}\nTry: rankscope preflight --help\n"
            )
            return EXIT_USAGE
        except StandsAside as reason:
            sys.stderr.write(f"rankscope preflight: nothing to do here: {shown(str(reason))}\n")
            return 0


def _list(*, is_markdown: bool, is_json: bool) -> int:
    from rankscope.preflight.report import catalogue
    from rankscope.preflight.start import foreign_checks

    if is_json:
        listed = [dataclasses.asdict(row) for row in catalogue.rows(foreign_checks())]
        sys.stdout.write(json.dumps({"checks": listed}) + "\n")
    elif is_markdown:
        sys.stdout.write(catalogue.markdown())
    else:
        SafeConsole(highlight=False).print(catalogue.table(foreign_checks()))
    return 0


def _preflight(arguments: argparse.Namespace) -> int:
    from rankscope.preflight import start
    from rankscope.preflight.model import encode
    from rankscope.preflight.persist import persist
    from rankscope.preflight.plan import Silent
    from rankscope.preflight.report.progress import Live
    from rankscope.preflight.system import System

    system, request = System(), request_of(arguments)
    who = start.look_up(request, system)
    with Live(sys.stderr) as progress:
        if arguments.ssh and who.nodes and who.me not in who.nodes:
            outcome = start.run_from_outside(request, system, who, progress)
            return _deliver(arguments, outcome.verdict, outcome.run)
        stop = start.Stop()
        plan = start.plan_of(request, system, who, transports_of(arguments, stop))
        ended = start.run(plan, Silent() if arguments.lines else progress, stop)
    if ended.is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one leaves the answer as it is
    verdict, run = ended.outcome.verdict, ended.outcome.run
    if arguments.lines:
        return 0  # our report is sent; the one that started us evaluates it
    if arguments.emit:
        return _emit(encode(run.reports[plan.who.me]) + b"\n")
    stored = persist(plan, ended.outcome, os.environ)
    if stored.error:
        sys.stderr.write(f"rankscope preflight: {shown(str(stored.error))}\n")
    return _deliver(arguments, verdict, run, ended.is_interrupted, stored.url)


def _emit(data: bytes) -> int:
    from rankscope.preflight.report.deliver import write_out

    try:
        write_out(data)
    except OSError as error:
        sys.stderr.write(f"rankscope preflight: --emit: stdout: {error.strerror or error}\n")
        return EXIT_INCOMPLETE
    return 0


def _deliver(
    arguments: argparse.Namespace,
    verdict: LaunchVerdict,
    run: Run,
    is_interrupted: bool = False,
    url: str = "",
) -> int:
    from rankscope.preflight.report.deliver import deliver
    from rankscope.preflight.report.summary import summarise

    summary = summarise(verdict, run, arguments.fail_on, url, is_interrupted)
    errors = deliver(summary, wanted_of(arguments))
    for error in errors:
        sys.stderr.write(f"rankscope preflight: {shown(str(error))}\n")
    # a script that asked for a file and gets none must not read a pass in the exit code
    return summary.exit_code or (EXIT_INCOMPLETE if errors else 0)


def _merge(arguments: argparse.Namespace) -> int:
    """Evaluate reports that travelled as files."""
    from rankscope.preflight.plan import UsageError
    from rankscope.preflight.report import stored
    from rankscope.preflight.start import foreign_checks, run_id_of
    from rankscope.preflight.system import System
    from rankscope.preflight.verdict.engine import evaluate

    paths = arguments.words[1:]
    if not paths:
        raise UsageError("merge: no file given; write rankscope preflight merge FILE ... (or -)")
    try:
        reports = stored.read((path, _read(path)) for path in paths)
    except (stored.StoredError, OSError) as error:
        raise UsageError(f"merge: {error}") from error
    request = request_of(arguments)
    run = stored.merged(reports, request.run_id or run_id_of(System()), request.who.nodes, None)
    return _deliver(arguments, evaluate(run, foreign_checks()), run)


def _read(path: str) -> bytes:
    return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
