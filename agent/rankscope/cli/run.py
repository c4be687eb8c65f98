"""`rankscope run`: launch a command with the agent on."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from rankscope.cli import EXIT_USAGE
from rankscope.native.probe import build
from rankscope.node.launch.launcher import Launcher, Outcome
from rankscope.node.launch.tee import STDERR, STDOUT
from rankscope.node.launch.tracking import trackers_of
from rankscope.node.upload.server import Server
from rankscope.settings import SettingError, Settings, from_environment
from rankscope.terminal import SafeConsole


class RunCommand:
    """Start a command with the agent on, without a change to its script.

    The command's ranks record themselves, a collector beside them samples the node and
    uploads, and its output is passed on unchanged and indexed. Put `--` before the command.
    With a server, the address of the run's page comes first, and the verdict in three lines
    when it is known, when it changes and at the end. Without one what the run left in files is
    looked at when it ends, for the same three lines.

    Examples:
      rankscope run --server http://127.0.0.1:8787 -- torchrun --nproc-per-node 8 train.py
      rankscope run --name "lr sweep 3" -- python -m my_package.train --config small.toml
      rankscope run --preflight -- torchrun --nnodes 2 --node-rank 0 ... train.py

    Exit codes: the command's own, 128+n if signal n killed it, 127 if it is not found, 126
    if it cannot be started; 64 wrong usage; 78 refused by the preflight, nothing was started.
    A token for the server is taken from RANKSCOPE_TOKEN only; see docs for all variables.
    """

    name: ClassVar[str] = "run"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument(
            "--server", metavar="URL", help="where to upload to; default $RANKSCOPE_SERVER"
        )
        parser.add_argument(
            "--run-id", metavar="ID", help="name that all nodes of the run share; default: from "
            "the launcher or Slurm, else made from the time",
        )  # fmt: skip
        parser.add_argument(
            "--name", metavar="NAME", help="title on the dashboard; default: the script's name"
        )
        parser.add_argument(
            "--tags", metavar="NAME=VALUE,...", help="labels of the run; one that is an address is "
            "a link on its page",
        )  # fmt: skip
        parser.add_argument(
            "--track", metavar="NAME,...", help="write verdict and numbers of steps into trackers, "
            "beside what the script logs there: mlflow, wandb, tensorboard, ...",
        )  # fmt: skip
        parser.add_argument(
            "--dir", metavar="DIR", help="base of the run directories, on a local disk; default: "
            "the user's runtime directory",
        )  # fmt: skip
        parser.add_argument(
            "--json",
            action="store_true",
            help="print one JSON object on stdout at the end, and "
            "nothing else there: the command's own output is sent to stderr",
        )
        parser.add_argument(
            "--preflight", nargs="?", choices=("quick", "default", "deep"), const="default",
            help="first check nodes, paths and settings of this launch (`rankscope preflight`), "
            "and start nothing that would fail",
        )  # fmt: skip
        parser.add_argument(
            "--preflight-on", choices=("fail", "warn", "never"), default="fail",
            help="refuse at a failure or a missing node, at warnings too, or never: then it only "
            "prints; default %(default)s",
        )  # fmt: skip
        parser.add_argument(
            "--preflight-nodes", metavar="LIST", help="all nodes, node 0 first, where the launch "
            "does not show: node0,node1 or node[0-7]",
        )  # fmt: skip
        parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")

    def run(self, arguments: argparse.Namespace) -> int:
        """Launch the command and return its exit code."""
        console = SafeConsole(stderr=True, highlight=False, soft_wrap=True)

        def say(text: str) -> None:
            printable = text.encode(errors="replace").decode()
            console.print(f"rankscope: {printable}", markup=False)

        command = _command(arguments)
        if not command:
            say("no command given: write it after `--`, as in `rankscope run -- python train.py`")
            return EXIT_USAGE
        try:
            settings = _settings(arguments)
        except SettingError as error:
            say(str(error))
            return EXIT_USAGE
        refused = _preflight(arguments, command, settings.server, say)
        if refused:
            return refused
        _prepare_probe(settings, say)
        outcome = Launcher(
            command, settings, os.environ, say, STDERR if arguments.json else STDOUT
        ).run()
        if arguments.json:
            SafeConsole(soft_wrap=True, highlight=False).print(
                json.dumps(_as_json(outcome)), markup=False
            )
        else:
            _print_outcome(outcome, say)
        return outcome.exit_code


def _preflight(
    arguments: argparse.Namespace, command: list[str], server: str, say: Callable[[str], None]
) -> int:
    """Run the preflight if it was asked for. Returns the exit code of a refusal, or 0."""
    if arguments.preflight is None:
        return 0
    from rankscope.cli.preflight_options import read_nodes
    from rankscope.preflight import launch_gate

    try:
        nodes = read_nodes(arguments.preflight_nodes, "--preflight-nodes")
        reason = launch_gate.check(
            command, arguments.preflight, arguments.preflight_on, nodes, server
        )
    except launch_gate.UsageError as error:
        say(f"--preflight: {str(error).replace(' --nodes', ' --preflight-nodes')}")
        return EXIT_USAGE
    if reason:
        say(f"not launched: {reason}")
        return launch_gate.EXIT_REFUSED
    return 0


def _prepare_probe(settings: Settings, say: Callable[[str], None]) -> None:
    """Compile the native probe before the ranks start, where no ready-made one fits."""
    if not settings.probe_build or settings.collectives not in ("auto", "probe"):
        return
    try:
        if not build.is_needed() or build.missing() or build.last_failure(build.path_of()):
            return  # another source is used; `rankscope doctor` says why
        say("compiling the native probe for this version of PyTorch, once (about 20 s) ...")
        build.build()
    except (build.BuildError, OSError) as error:
        say(f"cannot build the native probe, using a slower source: {error}")


def _command(arguments: argparse.Namespace) -> list[str]:
    command: list[str] = list(arguments.command_line)
    return command[1:] if command[:1] == ["--"] else command


def _settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings of the environment under those of the options. Raises SettingError."""
    settings = from_environment(os.environ)
    chosen = {
        name: getattr(arguments, name)
        for name in ("server", "run_id", "name", "tags", "track", "dir")
        if getattr(arguments, name)
    }
    if "dir" in chosen:
        chosen["dir"] = str(Path(chosen["dir"]).absolute())
    settings = dataclasses.replace(settings, **chosen)
    trackers_of(settings)
    if settings.server:
        try:
            Server(settings.server, settings.token)
        except ValueError as error:
            raise SettingError(str(error)) from error
    return settings


def _print_outcome(outcome: Outcome, say: Callable[[str], None]) -> None:
    where = outcome.url or f"rankscope report {shlex.quote(str(outcome.directory))}"
    if outcome.conclusion is not None:
        for line in outcome.conclusion.lines():
            say(line)
    say(f"run {outcome.run_id} ended with exit code {outcome.exit_code}: {where}")
    if outcome.left is not None and outcome.left.batches:
        left = outcome.left
        say(
            f"{left.batches} batches ({left.size_bytes / 1e3:,.0f} kB) did not reach the server "
            f"and wait in {left.path}; the next `rankscope run --run-id {outcome.run_id}` sends "
            "them"
        )


def _as_json(outcome: Outcome) -> dict[str, object]:
    left = outcome.left
    return {
        "run_id": outcome.run_id,
        "exit_code": outcome.exit_code,
        "directory": str(outcome.directory),
        "url": outcome.url or None,
        "answer": None if outcome.conclusion is None else outcome.conclusion.answer,
        "verdict": None if outcome.conclusion is None else outcome.conclusion.verdict,
        "unsent": {
            "batches": 0 if left is None else left.batches,
            "bytes": 0 if left is None else left.size_bytes,
            "path": None if left is None else str(left.path),
        },
    }
