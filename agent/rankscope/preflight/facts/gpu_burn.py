"""Half a second of work on every GPU, in a torch child: its pace, and the bus under load."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from rankscope.preflight.facts import burn_child
from rankscope.preflight.system import System

BURN_LIMIT_S = 30.0  # torch 4 s, a context on each of 8 GPUs 0.5 s, warm-up and 0.5 s of work each


class Burn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one GPU did under load. 0 and None: not told."""

    index: int  # as CUDA counts
    uuid: str = ""
    bf16_tflops: float = 0.0
    is_correct: bool = True  # the same product twice
    copy_gb_per_s: float = 0.0  # from pinned memory of the host
    pcie_generation: int | None = None
    pcie_width: int | None = None
    clock_reasons: int | None = None
    error: str = ""


# Made at import: two threads that are the first to use a type crash msgspec (0.22.0).
_BURNS = msgspec.json.Decoder(Burn)


def burn(system: System, num_gpus: int) -> tuple[tuple[Burn, ...], str]:
    """Return what each GPU did, or why nothing was measured."""
    argv = [sys.executable, "-P", str(Path(burn_child.__file__)), str(num_gpus)]
    done = system.run(argv, BURN_LIMIT_S)
    rows = []
    for line in done.out.splitlines():
        try:
            rows.append(_BURNS.decode(line))
        except msgspec.MsgspecError:
            continue  # torch itself may print
    problem = ""
    if done.code is None:
        problem = f"the load on the GPUs did not end in {BURN_LIMIT_S:g} s"
    elif done.code != 0 or not rows:
        problem = (done.err.strip().splitlines() or [f"exit code {done.code}"])[-1]
    return tuple(rows), problem
