"""The command: `torchrun --standalone --nproc-per-node 4 -m rankscope_trainer`."""

from __future__ import annotations

import logging
import os
import sys

from rankscope_trainer.command_line import help_text, load_settings
from rankscope_trainer.errors import EXIT_USAGE, SettingError
from rankscope_trainer.faults import FAULTS
from rankscope_trainer.regroup import NUM_PLACES
from rankscope_trainer.stopping import Stopped, Stopping

logger = logging.getLogger("rankscope_trainer")


def main(arguments: list[str]) -> int:
    """Train as the arguments say; return the exit code."""
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(help_text())
        return 0
    if "--list-faults" in arguments:
        sys.stdout.write(fault_table())
        return 0
    stopping = Stopping()
    stopping.install()
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s rank {rank} %(levelname)s %(message)s"
    )
    try:
        places = os.environ.get(NUM_PLACES, "1")  # one that stands by is no rank yet
        world_size = int(os.environ.get("WORLD_SIZE", places))
        settings = load_settings(arguments, os.environ, world_size)
        if settings.regroup:  # torch, only once it is needed
            from rankscope_trainer.regroup.training import train_in_groups as train
        else:
            from rankscope_trainer.train import train

        train(settings, stopping)
    except SettingError as error:
        sys.stderr.write(f"rankscope_trainer: {error}\n")
        return EXIT_USAGE
    except BaseException as error:
        if not stopping.received:
            raise
        # Peers that left first make a collective fail here: a consequence, not worth a traceback.
        logger.warning("stopped by signal %d", stopping.received)
        raise Stopped(128 + stopping.received) from error
    return 0


def fault_table() -> str:
    """Return the table of faults: name, the finding it leads to, its size, and what it does."""
    lines = [f"{'fault':24} {'finding':20} {'size':36} what it does"]
    lines += [f"{f.name:24} {f.finding:20} {f.size_text:36} {f.sentence}" for f in FAULTS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
