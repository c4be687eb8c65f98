"""`rankscope demo`: the whole line on one machine, with a fault to find."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from rankscope.cli import EXIT_INTERRUPTED
from rankscope.demo import plan as plans
from rankscope.demo.processes import Demo, DemoFailed
from rankscope.demo.result import Recording, recording, result
from rankscope.demo.watch import View, Watch
from rankscope.files import run_directory_choice
from rankscope.terminal import SafeConsole

_SEVERITY = {"critical": "bold red", "warning": "yellow", "info": "cyan"}


class DemoCommand:
    """Train on a few ranks, slow one of them at a random step, and show who it was.

    Starts a server on loopback and the reference trainer under torchrun, with the agent
    attached; nothing has to be installed or running. Ctrl-C ends everything.

    Examples:
      rankscope demo                         one rank computes slowly from a random step on
      rankscope demo --fault hang            one rank never enters a collective
      rankscope demo --fault none --ranks 2  a clean run: nothing is to be found
      rankscope demo --once --json           for scripts: one JSON object, then the end

    RANKSCOPE_CACHE, RANKSCOPE_COLLECTIVES, RANKSCOPE_OVERHEAD_PERCENT and
    RANKSCOPE_PROBE_BUILD say how to record; other settings of the environment are left out.

    Exit codes: 0 the verdict is right, also where Ctrl-C ends the demo after that; 1 it is
    wrong, or there is none to compare, or a part did not start; 64 usage; 130 Ctrl-C before.
    """

    name: ClassVar[str] = "demo"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument(
            "--fault",
            choices=(*plans.FAULTS, "random", "none"),
            default="slow_compute",
            help="what goes wrong (default: slow_compute)",
        )
        parser.add_argument(
            "--ranks", type=_ranks, default=4, help="ranks to train on (default: 4)"
        )
        parser.add_argument(
            "--strategy", choices=plans.STRATEGIES, default="ddp", help="(default: ddp)"
        )
        parser.add_argument("--once", action="store_true", help="end when there is a verdict")
        parser.add_argument(
            "--json", action="store_true", help="print one JSON object and nothing else on stdout"
        )
        parser.add_argument("--seed", type=int, help="draw the same rank and step again")
        parser.add_argument("--port", type=int, default=0, help="of the server (default: any free)")
        parser.add_argument(
            "--data-dir",
            type=Path,
            help="(default: the user's data folder; where there is none, a temporary one)",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the demo. Returns the exit code."""
        console = SafeConsole(stderr=arguments.json)
        for module, extra in (("rankscope_server", "server"), ("rankscope_trainer", "trainer")):
            if (
                importlib.util.find_spec(module) is None
                or importlib.util.find_spec("torch") is None
            ):
                console.print(
                    f"The demo needs pip install 'rankscope\\[all]' ({extra} is missing)."
                )
                return 1
        plan = plans.draw(arguments.fault, arguments.ranks, arguments.strategy, arguments.seed)
        signal.signal(signal.SIGTERM, _as_interrupt)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _as_interrupt)
        directory = arguments.data_dir or _data_directory()
        may_move = arguments.data_dir is None
        demo = Demo(plan, directory.absolute(), arguments.port, may_move=may_move)
        watch = Watch(demo, arguments.once)
        try:
            with demo:
                return _run(demo, watch, console, once=arguments.once, as_json=arguments.json)
        except (DemoFailed, OSError) as error:
            console.print(Text(str(error), style="red"))
            if arguments.json:
                sys.stdout.write(json.dumps({"error": str(error), "match": False}) + "\n")
            return 1
        except KeyboardInterrupt:
            console.print("Stopped: server, ranks and collector have ended.")
            if result(demo, watch, Recording())["match"]:
                return 0
            return 1 if watch.is_over else EXIT_INTERRUPTED


def _run(demo: Demo, watch: Watch, console: SafeConsole, *, once: bool, as_json: bool) -> int:
    demo.start_server()
    plan = demo.plan
    console.print(
        Text.assemble(
            ("Rankscope ", "bold"),
            f"watches {plan.ranks} ranks ({plan.strategy}, {plan.steps} steps or more).\n",
            f"  dashboard  {demo.url}\n  data       {demo.directory}\n",
            f"  logs       {demo.log_directory}",
        ),
        soft_wrap=True,
    )
    demo.start_training()
    _show(demo, watch, console)
    outcome = result(demo, watch, recording(demo.api, demo.run_id))
    _print_verdict(console, watch.last, outcome)
    if as_json:
        sys.stdout.write(json.dumps(outcome) + "\n")
        sys.stdout.flush()
    if not once:
        stuck = "The stuck ranks stay as they are. " if not demo.training_ended() else ""
        console.print(f"\n{stuck}Look around: {demo.url}\nCtrl-C ends everything.", soft_wrap=True)
        while True:
            time.sleep(3600)
    return 0 if outcome["match"] else 1


def _show(demo: Demo, watch: Watch, console: SafeConsole) -> None:
    """Draw progress until the watch is over."""
    progress = Progress(
        TextColumn("step {task.completed:>4.0f} of {task.total:.0f}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[numbers]}"),
        console=console,
    )
    task = progress.add_task("", total=demo.plan.steps, numbers="starting the ranks")
    began = (time.monotonic(), 0)
    pace = 0.0
    with Live(console=console, refresh_per_second=4, transient=not console.is_terminal) as live:
        for view in watch.views():
            now = time.monotonic()
            if now - began[0] >= 2.0:
                pace = (view.step - began[1]) / (now - began[0])
                began = (now, view.step)
            loss = "" if view.loss is None else f"loss {view.loss:.3f}  "
            progress.update(
                task,
                completed=view.step,
                total=max(view.step, demo.plan.steps),
                numbers=f"{loss}{pace:.1f} steps/s" if view.step else "",
            )
            live.update(Group(progress, _findings(view)))


def _findings(view: View) -> Table | Text:
    if not view.findings:
        return Text(view.answer, style="dim")
    table = Table(box=None, show_header=False, padding=(0, 1))
    for finding in view.findings[:8]:
        style = _SEVERITY.get(finding["severity"], "")
        state = "" if finding["state"] == "open" else f" ({finding['state']})"
        table.add_row(Text(finding["severity"], style=style), Text(finding["what"] + state))
    return table


def _print_verdict(console: SafeConsole, view: View | None, outcome: dict[str, Any]) -> None:
    verdict, truth = outcome["verdict"], outcome["truth"]
    if verdict is None:
        body = Text(view.answer if view is not None else "No data reached the server.")
    else:
        cost = verdict["cost_throughput_ratio"]
        body = Text.assemble(
            (verdict["what"] + "\n", "bold"),
            verdict["why"] + "\n",
            ("Next: ", "bold"),
            verdict["next"],
            "" if cost is None else f"\nCost: {cost:.0%} of the throughput",
        )
    console.print(Panel(body, title="verdict", border_style="green" if outcome["match"] else "red"))
    if truth is None:
        truth_text = "no fault was injected"
    else:
        truth_text = f"{truth['fault']} on rank {truth['rank']} from step {truth['start_step']}"
    if outcome["not_judged"]:
        comparison = f"Not compared: {outcome['not_judged']}."
    else:
        comparison = f"The verdict is {'right' if outcome['match'] else 'wrong'}."
    lines = [f"The truth: {truth_text}. {comparison}"]
    if outcome["better_source"]:
        lines.append(
            f"Collectives by {outcome['collectives']}. Better: {outcome['better_source']}."
        )
    if outcome["thinned"]:
        lines.append(f"Thinned: {outcome['thinned']}.")
    console.print(Text("\n".join(lines)))


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 16:
        raise argparse.ArgumentTypeError(f"{text!r}: say a number of ranks from 1 to 16")
    return int(text)


def data_directory(environ: Mapping[str, str]) -> Path | None:
    """Return the user's folder for data, where none is named; None if none can be written."""
    with contextlib.suppress(RuntimeError):  # a user without an entry has no home
        home = Path(environ["HOME"] if "HOME" in environ else Path.home())
        base = Path(environ.get("XDG_DATA_HOME") or home / ".local" / "share")
        if base.is_absolute() and run_directory_choice.is_writable(base):
            return base / "rankscope"
    return None


def _data_directory() -> Path:
    """Return the user's folder for data, or a new temporary one if none can be written."""
    return data_directory(os.environ) or Path(tempfile.mkdtemp(prefix="rankscope-"))


def _as_interrupt(*_: object) -> None:
    """End the demo by the first signal; a second would cut short what the first began to end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
