"""What was asked of a preflight: the same on all nodes, or `env.agree` reports it."""

from __future__ import annotations

from typing import Literal

import msgspec

Tier = Literal["quick", "default", "deep"]


class Options(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The options of one preflight."""

    tier: Tier = "default"
    backend: str = ""  # gloo or nccl; empty: nccl where there are GPUs, else gloo
    nproc: int = 0  # ranks on each node; 0: from the launcher, else the GPUs, else 1
    num_loader_workers: int = 0  # of each rank, for limits and shared memory
    expect_gbps: float = 0.0  # bandwidth of a pair below this fails; 0: relative only
    checkpoint_dir: str = ""  # a directory that all nodes must see
    checkpoint_gb: float = 0.0  # free space wanted there
    script: str = ""  # the user's script, for the fingerprint and the import test
    data_dir: str = ""
    only: tuple[str, ...] = ()  # ids of checks, or families
    skip: tuple[str, ...] = ()

    def left_out(self, id: str, family: str) -> str:
        """Return why a check of a family was not asked for; "" if it was."""
        names = {id, family}
        if self.only and not names & set(self.only):
            return "not among --only"
        return "left out by --skip" if names & set(self.skip) else ""
