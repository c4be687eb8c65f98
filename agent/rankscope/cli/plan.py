"""`rankscope plan`: which way to share a model fits, and what memory, time and money it takes."""

from __future__ import annotations

import argparse
import json
import sys
from typing import ClassVar

from rankscope.cli import EXIT_USAGE
from rankscope.terminal import one_line

EXIT_NOTHING_FITS = 1


class PlanCommand:
    """Show which ways to share a model fit on a machine, and what each takes, before a launch.

    For every strategy the best of its variants: memory of a rank by part, messages, what of them
    computation does not cover, idle time, step time within bounds, money; which to take and why;
    and what is left out, with the reason. It needs no GPU, and torch only for --model
    MODULE:CALLABLE. What is not known is said: without a rate there are no times.

    Examples:
      rankscope plan --model llama2-7b --batch 1024 --nodes 8 --devices 8 --device h100 \\
          --link between=50GB/s --price 2.5/hour --tokens 1e12
      rankscope plan --layers 32 --width 4096 --heads 32 --sequence 4096 --vocabulary 32000 \\
          --batch 256 --devices 8 --memory 80GB --rate 400TFLOPs --link inside=360GB/s
      rankscope plan --model my_code:build --sequence 2048 --batch 64 --devices 4 --device a100
      rankscope preflight --nodes node0,node1 --json links.json     measured, in place of --link:
      rankscope plan --model llama2-13b --batch 512 --nodes 2 --devices 8 --device a100 \\
          --links links.json
      rankscope plan --trainer "--layers 16 --width 256" --devices 4 --memory 8GB
      rankscope plan --explain                    the rules of thumb in it, with their sources
      rankscope plan --model gpt3-175b --batch 1536 --nodes 64 --devices 8 --device a100 \\
          --link between=25GB/s --strategy fsdp,tensor+pipeline+data

    Sizes: GB is 10^9 bytes, GiB 2^30. A batch is of samples, over all ranks. docs/plan.md shows how
    each number comes about, and how far predictions were from what was measured.

    Exit codes: 0 something fits; 1 nothing fits; 64 wrong usage.
    """

    name: ClassVar[str] = "plan"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        from rankscope.cli.plan_options import add_options

        add_options(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Plan and print. Returns the exit code."""
        from rankscope.cli import plan_answer, plan_screen
        from rankscope.cli.plan_options import request_of
        from rankscope.planning.errors import PlanError
        from rankscope.planning.plan import plan_of

        for flag, text, table in plan_screen.LISTS:
            if getattr(arguments, flag):
                plan_screen.show_list(text, table(), is_json=arguments.json)
                return 0
        try:
            request = request_of(arguments)
            plan = plan_of(
                request.model, request.machine, batch=request.batch, optimizer=request.optimizer,
                families=request.families,
            )  # fmt: skip
        except PlanError as error:
            sys.stderr.write(f"rankscope plan: {one_line(error)}\nTry: rankscope plan --help\n")
            return EXIT_USAGE
        if arguments.json:
            print(json.dumps(plan_answer.answer_of(plan, request)))
        else:
            plan_screen.show(plan, request)
        return 0 if plan.chosen else EXIT_NOTHING_FITS
