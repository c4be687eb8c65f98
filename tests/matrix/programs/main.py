"""One rank of the matrix: runs the families named on the command line, one after the other."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path

from ledger import Ledger


def main() -> int:
    scratch, *families = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ledger = Ledger(Path(scratch) / f"ledger-{rank}.jsonl", rank, size, Path(scratch))
    ledger.begin_world()
    for name in families:
        module = importlib.import_module(name)
        ledger.family(name)
        reason = module.skipped() if hasattr(module, "skipped") else ""
        if reason:
            ledger.family_ended(skipped=reason)
            continue
        try:
            module.run(ledger)
        except BaseException:
            ledger.family_ended(error=traceback.format_exc())
            raise
        ledger.family_ended()
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()  # nobody leaves while another still talks to it
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
