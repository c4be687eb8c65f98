"""`rankscope explain`: what began it, from plain logs of any number of ranks."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import ClassVar

from rankscope.terminal import shown

EXIT_UNREADABLE = 2


class ExplainCommand:
    """Say what began a failure, from plain logs or dumps: the first cause before its echoes.

    Needs no agent, no server and no run: give the logs that you have. Each line is compared with
    the known errors, a table of failures of NCCL, Gloo, torchrun, CUDA, drivers, kernels,
    loaders, networks and disks; lines that look alarming and are harmless are left out.
    Whose line it is comes from a prefix ([rank3]:, [default0]:, srun --label, mpirun --tag-output,
    kubectl logs --prefix) or from the file's name (rank_3.log, worker-3/stderr.log).

    Examples:
      rankscope explain train.log
      rankscope explain logs/                      all files below a folder; .gz and .zst too
      kubectl logs -l job=train --prefix --tail=-1 | rankscope explain -
      dmesg | rankscope explain - train.log        the kernel's view and the ranks' together
      rankscope explain --json logs/ | jq .root
      rankscope explain --known-errors ours.toml logs/    with entries of your own
      rankscope explain dumps/                     Flight Recorder dumps or a trace

    With --json one object is printed: root (null where no fault is found) with family, ranks,
    signal, cause, remedy and confidence; findings with family, role, ranks, signal and count.
    Exit codes: 0 no fault found; 1 a fault was found; 2 a log or an entry cannot be read; 64 wrong
    usage. All logs of one job together show more than one: what began it is often in another.
    """

    name: ClassVar[str] = "explain"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument(
            "paths",
            nargs="+",
            metavar="PATH",
            help="log, dump or trace, folder of them, or - for stdin",
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
        parser.add_argument(
            "--all", action="store_true", help="show every kind of line that was found"
        )
        parser.add_argument(
            "--known-errors", "--book", dest="known_errors", action="append", default=[],
            metavar="FILE",
            help="a TOML file with entries of your own, before ours; may be given again",
        )  # fmt: skip

    def run(self, arguments: argparse.Namespace) -> int:
        """Read the logs and print what they show. Returns the exit code."""
        # by name: the agent package imports no other; this part of the server needs no extra
        explaining = importlib.import_module("rankscope_server.explain")
        try:
            code: int = explaining.explain(
                arguments.paths, arguments.known_errors, arguments.json, arguments.all
            )
        except explaining.ExplainError as error:
            sys.stderr.write(f"rankscope explain: {shown(str(error))}\n")
            return EXIT_UNREADABLE
        return code
