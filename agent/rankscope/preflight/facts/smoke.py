"""What the collective smoke test saw on this node. Filled by `smoke/`."""

from __future__ import annotations

from typing import Literal

import msgspec

from rankscope.preflight.facts.choice import Choice

SmokeStage = Literal["not started", "imported", "store", "group", "collectives", "halving", "done"]


class SmokeSize(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One all-reduce of a size: the best of its repetitions."""

    size_bytes: int
    elapsed_ms: float = -1.0  # -1: did not end
    busbw_mb_per_s: float = 0.0  # 2(n-1)/n x size / time, MB = 10^6 bytes
    is_correct: bool = False
    num_wrong: int = 0  # elements whose sum was wrong


class SmokeHalf(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One all-reduce among some of the nodes, while the slowest member is looked for."""

    nodes: tuple[str, ...]
    size_bytes: int
    elapsed_ms: float


class SmokeFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far the child came, and what it measured."""

    backend: str  # gloo or nccl
    stage: SmokeStage = "not started"
    world_size: int = 0  # one rank of each node
    skipped: str = ""  # why it was not started
    error: str = ""  # the exception, or "killed in stage group, where it did not get on"
    ended_by: Literal["", "raised", "died", "limit", "not begun"] = ""  # what `error` is
    output_tail: str = ""
    port: int = 0  # kept for the store, should this node have rank 0 and not MASTER_PORT
    store: str = ""  # where this node called the store: "node0:29500"
    beside: str = ""  # why the store was not at MASTER_PORT
    # For who reads the JSON report: the smallest size that would not have fitted the time; 0: none
    left_out_bytes: int = 0
    store_ms: float = -1.0
    sizes: tuple[SmokeSize, ...] = ()
    halves: tuple[SmokeHalf, ...] = ()
    gloo: tuple[Choice, ...] = ()  # gloo's own answer to which address it takes
    backends: tuple[str, ...] = ()  # that this build of torch has
    nccl_net: str = ""  # Socket, IB, ...: from NCCL's INFO lines
