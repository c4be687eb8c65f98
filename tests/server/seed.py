"""Fills a server with a realistic run over HTTP, for browser tests and for a look at the pages.

    python tests/server/seed.py http://127.0.0.1:8787 --ranks 4 --steps 300 --fault slow_compute

A run of data-parallel training: each step waits for the data, runs forward and backward, reduces
gradients in three buckets and steps the optimizer. The slow rank works longer; the others wait
for it inside their collectives. The same `seed` gives the same run.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from rankscope.node.columns import RankEvents, chunks_of
from rankscope.wire import schema, zstd
from rankscope.wire.chunk import Column, encode_chunk

MS = 1_000_000
S = 1_000 * MS
GROUP = "default_pg"
BUCKETS = (26_214_400, 26_214_400, 9_437_184)
FAULTS = ("none", "slow_compute", "slow_data", "hang", "crash")


@dataclass(kw_only=True)
class Plan:
    """What kind of run to make."""

    run_id: str = "demo-run"
    name: str = ""  # "": from the run id
    torch: str = "2.13.0"  # its version
    ranks: int = 4
    steps: int = 300
    fault: str = "slow_compute"
    slow_rank: int = 2
    slow_from: int = 0  # 0: after 40 % of the steps
    slow_factor: float = 1.5
    slow_until: int = 0  # 0: to the end
    ranks_per_node: int = 2
    steps_per_batch: int = 20
    end: bool = True  # False: the run goes on
    gpus: bool = False
    start_ns: int = 0  # 0: so that the last step ends now
    pause_seconds: float = 0.0  # between batches, to watch pages live
    hang_seconds: float = 20.0  # a hang began so long ago
    alive_seconds: float = 0.0  # hung ranks go on to report for so long
    seed: int = 1

    def __post_init__(self) -> None:
        if self.fault not in FAULTS:
            raise ValueError(f"fault {self.fault!r}; use one of {FAULTS}")
        self.slow_rank = min(self.slow_rank, self.ranks - 1)
        self.slow_from = self.slow_from or max(1, int(self.steps * 0.4))
        self.slow_until = self.slow_until or self.steps

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def host_of(self, rank: int) -> str:
        return f"node-{chr(ord('a') + self.node_of(rank) % 26)}"


@dataclass
class Node:
    """The collector of one node: numbers its batches."""

    index: int
    host: str
    ranks: list[int]
    producer: str
    sequence: int = 0
    records: list[schema.AnyRecord] = field(default_factory=list)
    chunks: list[schema.Chunk] = field(default_factory=list)


@dataclass
class Steps:
    """Times of all ranks in all steps, in nanoseconds; ranks by steps."""

    started: np.ndarray[Any, Any]
    phases: dict[str, np.ndarray[Any, Any]]
    arrived: np.ndarray[Any, Any]  # ranks x steps x buckets
    ended: np.ndarray[Any, Any]  # steps x buckets
    backward_blocked: np.ndarray[Any, Any]
    duration: np.ndarray[Any, Any]


def seed_run(base_url: str, token: str = "", **choices: Any) -> str:
    """Post a run made by `Plan(**choices)`; return its run id."""

    def send(body: bytes) -> None:
        post_body(base_url, body, token)

    return seed_with(send, **choices)


def wait_until_judged(base_url: str, timeout_seconds: float = 60.0) -> None:
    """Wait until a look has seen every stored batch; before, findings still change.

    Raises:
        TimeoutError: looks did not catch up in time.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        with urllib.request.urlopen(f"{base_url}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        if "rankscope_runs_behind 0.0" in lines:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"stored batches wait for a look after {timeout_seconds:.0f} s")
        time.sleep(0.1)


def seed_with(send: Callable[[bytes], object], **choices: Any) -> str:
    """Give the batches of a run, zstd packed, to `send`; return its run id."""
    plan = Plan(**choices)
    times = make_steps(plan)
    nodes = make_nodes(plan)
    register(plan, times, nodes)
    for node in nodes:
        send(next_batch(plan.run_id, node))
    last = plan.steps if plan.fault not in {"hang", "crash"} else plan.slow_from
    for lo in range(0, last, plan.steps_per_batch):
        hi = min(lo + plan.steps_per_batch, last)
        for node in nodes:
            add_steps(plan, times, node, lo, hi)
            send(next_batch(plan.run_id, node))
        time.sleep(plan.pause_seconds)
    deadline = time.monotonic() + (plan.alive_seconds if plan.fault == "hang" else 0.0)
    while True:
        finish(plan, times, nodes, last)
        for node in nodes:
            send(next_batch(plan.run_id, node))
        if time.monotonic() >= deadline:
            return plan.run_id
        time.sleep(1.0)


def make_nodes(plan: Plan) -> list[Node]:
    nodes: dict[int, Node] = {}
    for rank in range(plan.ranks):
        index = plan.node_of(rank)
        producer = f"{plan.run_id}/{plan.host_of(rank)}/{plan.seed}"
        nodes.setdefault(index, Node(index, plan.host_of(rank), [], producer)).ranks.append(rank)
    return list(nodes.values())


def make_steps(plan: Plan) -> Steps:
    """Simulate the run: self time per phase, then everybody meets in the collectives."""
    rng = np.random.default_rng(plan.seed)
    shape = (plan.ranks, plan.steps)

    def noisy(ms: float) -> np.ndarray[Any, Any]:
        return ms * MS * rng.lognormal(0.0, 0.02, shape)

    phases = {
        "data": noisy(4), "forward": noisy(36), "backward": noisy(64), "optimizer": noisy(8),
        "other": noisy(2),
    }  # fmt: skip
    bad = (plan.slow_rank, slice(plan.slow_from - 1, plan.slow_until))
    if plan.fault == "slow_compute":
        for phase in ("forward", "backward"):
            phases[phase][bad] *= plan.slow_factor
    elif plan.fault == "slow_data":
        phases["data"][bad] += (plan.slow_factor - 1) * 110 * MS
    phases["forward"][:, 0] *= 4  # the first step warms caches up
    before = phases["data"] + phases["forward"] + phases["other"]
    arrived = np.empty((*shape, len(BUCKETS)))
    ended = np.empty((plan.steps, len(BUCKETS)))
    started, duration, blocked = (np.empty(shape) for _ in range(3))
    now = 0.0
    transfer = [size / 10 for size in BUCKETS]  # 10 GB/s, in ns
    for step in range(plan.steps):
        started[:, step] = now
        for bucket in range(len(BUCKETS)):
            share = (bucket + 1) / len(BUCKETS)
            at = now + before[:, step] + share * phases["backward"][:, step]
            arrived[:, step, bucket] = at
            free = ended[step, bucket - 1] if bucket else 0.0
            ended[step, bucket] = max(at.max(), free) + transfer[bucket]
        own_end = now + before[:, step] + phases["backward"][:, step]
        blocked[:, step] = ended[step, -1] - own_end
        now = float((ended[step, -1] + phases["optimizer"][:, step]).max())
        duration[:, step] = now - started[:, step]
    # Who steps its optimizer faster waits a little in the next step's first call: "other".
    phases["other"] += duration - sum(phases.values()) - blocked
    ended_ns = time.time_ns() - (int(plan.hang_seconds * S) if plan.fault == "hang" else 0)
    if plan.fault in {"hang", "crash"}:  # the steps after it never happen
        now = float(started[:, min(plan.slow_from, plan.steps - 1)].max())
    offset = plan.start_ns or ended_ns - int(now)
    return Steps(started + offset, phases, arrived + offset, ended + offset, blocked, duration)


def register(plan: Plan, times: Steps, nodes: list[Node]) -> None:
    start = int(times.started[0, 0]) - 3 * S
    for node in nodes:
        node.records.append(
            schema.RunStarted(
                attempt=0, rank=schema.NODE_RANK, time_ns=start,
                name=plan.name or f"{plan.run_id} gpt",
                command=["torchrun", f"--nproc-per-node={plan.ranks_per_node}", "train.py"],
                launcher="torchrun", world_size=plan.ranks, tags={"model": "gpt-nano"},
            )
        )  # fmt: skip
        node.records += machine_events(plan, node, start)
        for rank in node.ranks:
            node.records += [
                registered(plan, rank, start + rank * MS),
                environment(plan, rank, start + S),
            ]
            # Its members, said by each of 8,192 ranks, are 67 million numbers: one of a node does.
            if plan.ranks <= 1_024 or rank == node.ranks[0]:
                node.records.append(
                    schema.GroupDefined(
                        attempt=0, rank=rank, time_ns=start + S, group=GROUP, backend="gloo",
                        ranks=list(range(plan.ranks)), description="default",
                    )
                )  # fmt: skip
            node.records.append(
                log(rank, start + S, logging.INFO, f"rank {rank}: model has 1,234,567 parameters")
            )


def machine_events(plan: Plan, node: Node, time_ns: int) -> list[schema.AnyRecord]:
    """What a collector says of its machine at the start."""
    no_gpu = "works" if plan.gpus else "skipped: NVML: NVML Shared Library Not Found"
    sources = {
        "host": "works", "pressure": "works", "nic": "works", "tcp": "works", "gpu": no_gpu,
        "infiniband": "skipped: no port in /sys/class/infiniband: no adapter, or its driver is "
        "not loaded",
    }  # fmt: skip
    fields = {"host": node.host}
    sources = {f"source.{name}": state for name, state in sources.items()}
    gpus = {f"{place}.name": "NVIDIA H100 80GB HBM3" for place in range(len(node.ranks))}
    told = [("machine sources", fields | sources)]
    if plan.gpus:
        told.append(("gpus", fields | gpus | {"driver": "570.86.15"}))
    return [
        schema.Event(attempt=0, rank=schema.NODE_RANK, time_ns=time_ns, name=name, fields=values)
        for name, values in told
    ]


def registered(plan: Plan, rank: int, time_ns: int) -> schema.RankRegistered:
    return schema.RankRegistered(
        attempt=0, rank=rank, time_ns=time_ns, world_size=plan.ranks,
        local_rank=rank % plan.ranks_per_node, local_world_size=plan.ranks_per_node,
        node_rank=plan.node_of(rank), host=plan.host_of(rank), pid=4_000 + rank, backend="gloo",
        sources={"collectives": "process group wrapper", "gpu": "skipped: no NVML"},
    )  # fmt: skip


def environment(plan: Plan, rank: int, time_ns: int) -> schema.Environment:
    odd = rank == plan.ranks - 1 and plan.ranks > 1 and plan.fault != "none"
    facts = {
        "torch.version": plan.torch,
        "python.version": "3.11.7",
        "kernel": "6.8.0-45-generic" if odd else "6.8.0-47-generic",
        "nccl.version": "2.21.5" if odd else "2.23.4",
        "hostname": plan.host_of(rank),
        "pid": str(4_000 + rank),
        "env.OMP_NUM_THREADS": "1",
        "cpu.model": "Xeon 8480",
        "cpu.count": "64",
    }
    return schema.Environment(attempt=0, rank=rank, time_ns=time_ns, facts=facts)


def log(rank: int, time_ns: int, level: int, message: str, **more: Any) -> schema.LogLine:
    more.setdefault("logger", "train")
    return schema.LogLine(
        attempt=0, rank=rank, time_ns=time_ns, level=level, message=message, **more
    )


def add_steps(plan: Plan, times: Steps, node: Node, lo: int, hi: int) -> None:
    """Add what a collector sends for steps `lo`..`hi` (0-based, `hi` excluded)."""
    events = []
    for rank in node.ranks:
        of_kinds: dict[Any, dict[str, Column]] = {
            "steps": step_columns(plan, times, rank, lo, hi),
            "collectives": collective_columns(plan, times, rank, lo, hi),
        }
        events += [
            RankEvents(kind, 0, rank, node.host, columns, len(np.asarray(columns["step"])))
            for kind, columns in of_kinds.items()
        ]
        node.records += list(sparse_records(plan, times, rank, lo, hi))
    node.chunks += chunks_of(events)
    node.chunks += node_chunks(plan, times, node, lo, hi)
    if plan.gpus:
        node.chunks.append(gpu_chunk(plan, times, node, lo, hi))


def step_chunk(plan: Plan, times: Steps, rank: int, lo: int, hi: int) -> schema.Chunk:
    return chunk(plan, "steps", rank, step_columns(plan, times, rank, lo, hi), "started_ns")


def step_columns(plan: Plan, times: Steps, rank: int, lo: int, hi: int) -> dict[str, Column]:
    count = hi - lo
    zeros = np.zeros(count, np.int64)
    columns: dict[str, Column] = dict.fromkeys(schema.STEP_COLUMNS, zeros)
    for name, values in times.phases.items():
        columns[f"{name}_ns"] = values[rank, lo:hi].astype(np.int64)
    blocked = times.backward_blocked[rank, lo:hi].astype(np.int64)
    own = times.duration[rank, lo:hi] - blocked
    flags = zeros.copy()
    if lo == 0:
        flags[0] |= schema.STEP_FIRST
    columns |= {
        "step": np.arange(lo + 1, hi + 1),
        "started_ns": times.started[rank, lo:hi].astype(np.int64),
        "duration_ns": times.duration[rank, lo:hi].astype(np.int64),
        "backward_ns": columns["backward_ns"] + blocked,  # type: ignore[operator]
        "backward_blocked_ns": blocked,
        "cpu_ns": (own * 0.97).astype(np.int64),
        "microbatches": zeros + 1,
        "num_collectives": zeros + len(BUCKETS),
        "flags": flags,
    }
    return columns


def collective_columns(plan: Plan, times: Steps, rank: int, lo: int, hi: int) -> dict[str, Column]:
    buckets = len(BUCKETS)
    count = (hi - lo) * buckets
    arrived = times.arrived[rank, lo:hi].reshape(-1).astype(np.int64)
    ended = times.ended[lo:hi].reshape(-1).astype(np.int64)
    steps = np.repeat(np.arange(lo + 1, hi + 1), buckets)
    blocked = np.zeros((hi - lo, buckets), np.int64)
    blocked[:, -1] = times.backward_blocked[rank, lo:hi]
    fill = np.zeros(count, np.int64)
    columns: dict[str, Column] = {
        "arrived_ns": arrived,
        "duration_ns": ended - arrived,
        "started_ns": fill - 1,
        "device_duration_ns": fill - 1,
        "returned_ns": fill + 30_000,
        "blocked_ns": blocked.reshape(-1),
        "sequence": np.arange(lo * buckets + 1, hi * buckets + 1),
        "step": steps,
        **dict.fromkeys(
            ("size_bytes", "input_bytes", "output_bytes"), np.tile(np.array(BUCKETS), hi - lo)
        ),
        "peer_rank": fill - 1,
        "num_tensors": fill + 1,
        "state": fill + schema.ENDED,
        "flags": fill + schema.FLAG_ASYNC,
        "group": [GROUP] * count,
        "operation": ["all_reduce"] * count,
        "dtype": ["float32"] * count,
        "reduce_op": ["sum"] * count,
        "call_site": ["train.py:88 train_step"] * count,
        "issued_by": ["probe"] * count,
        "ended_by": ["probe"] * count,
    }
    return columns


def sample_columns(kind: str, at: Steps, told: dict[str, Any]) -> dict[str, Column]:
    """Return all columns of a kind; what is not told is not known."""
    columns: dict[str, Column] = {}
    for name in schema.CHUNK_COLUMNS[kind]:
        value = told.get(name, "" if name in schema.STRING_COLUMNS else -1)
        if isinstance(value, str):
            columns[name] = [value] * len(at)
        else:
            kind_of = np.float32 if name in schema.FLOAT_COLUMNS else np.int64
            columns[name] = np.broadcast_to(value, len(at)).astype(kind_of)
    return columns | {"time_ns": at, "interval_ns": np.full(len(at), S)}


def node_chunks(plan: Plan, times: Steps, node: Node, lo: int, hi: int) -> list[schema.Chunk]:
    """Return what a machine without a GPU samples."""
    start, end = sample_range(plan, times, node, lo, hi)
    at = np.arange(start, end, S, dtype=np.int64)
    rng = np.random.default_rng([plan.seed, node.index, lo])
    since = (at - (int(times.started[0, 0]) - S)) / 1e9  # seconds that the counters counted
    told: dict[str, dict[str, Any]] = {
        "host": {
            "cpu_user_us_total": since * 6e5,
            "cpu_system_us_total": since * 3e4,
            "cpu_iowait_us_total": since * 1e4,
            "cpu_steal_us_total": 0,
            "cpu_idle_us_total": since * 3.6e5,
            "num_cpus": 32,
            "load_1m": rng.uniform(2, 3, len(at)),
            "cpu_busiest_ratio": rng.uniform(0.9, 1, len(at)),
            "runnable": 3,
            "memory_used_bytes": (12 << 30) + rng.integers(0, 1 << 26, len(at)),
            "memory_total_bytes": 64 << 30,
            "swap_used_bytes": 0,
            "major_faults_total": 0,
            "run_disk_free_bytes": 200 << 30,
        },
        "pressure": {"cpu_some_us_total": since * 2e4, "io_full_us_total": 0},
        "nic": {
            "interface": "eth0",
            "received_bytes_total": since * 6e7,
            "sent_bytes_total": since * 6e7,
            "received_errors_total": 0,
            "is_up": 1,
            "link_mbps": 100_000,
        },
        "tcp": {"sent_segments_total": since * 5e4, "retransmitted_segments_total": since * 2},
    }
    return [
        chunk(plan, kind, schema.NODE_RANK, sample_columns(kind, at, values), "time_ns", node.host)
        for kind, values in told.items()
    ]


def gpu_chunk(plan: Plan, times: Steps, node: Node, lo: int, hi: int) -> schema.Chunk:
    start, end = sample_range(plan, times, node, lo, hi)
    at = np.repeat(np.arange(start, end, S, dtype=np.int64), len(node.ranks))
    rng = np.random.default_rng([plan.seed, node.index, lo, 7])
    told = {
        "gpu": np.tile(np.arange(len(node.ranks)), len(at) // len(node.ranks)),
        "utilization_ratio": rng.uniform(0.8, 0.98, len(at)),
        "memory_used_bytes": 61 << 30,
        "memory_total_bytes": 80 << 30,
        "sm_clock_mhz": 1_980,
        "power_watts": rng.uniform(560, 640, len(at)),
        "temperature_celsius": 61,
        "throttle_reasons": 4,
    }
    columns = sample_columns("gpu", at, told)
    return chunk(plan, "gpu", schema.NODE_RANK, columns, "time_ns", node.host)


def sample_range(plan: Plan, times: Steps, node: Node, lo: int, hi: int) -> tuple[int, int]:
    """Return the time of a batch, at least one second long, aligned to the node's samples."""
    origin = int(times.started[0, 0]) + node.index * 100 * MS
    first = int(times.started[0, lo]) - origin
    last = int(times.started[0, hi - 1] + times.duration[0, hi - 1]) - origin
    begin = origin + -(-first // S) * S
    return begin, max(begin + 1, origin + last)


def chunk(
    plan: Plan, kind: Any, rank: int, columns: dict[str, Column], time_column: str, host: str = ""
) -> schema.Chunk:
    at = np.asarray(columns[time_column])
    steps = np.asarray(columns.get("step", [0]))
    return schema.Chunk(
        kind=kind, attempt=0, rank=rank, host=host or plan.host_of(rank), count=len(at),
        time_lo_ns=int(at.min()), time_hi_ns=int(at.max()), data=encode_chunk(columns),
        step_lo=int(steps.min()), step_hi=int(steps.max()),
    )  # fmt: skip


def sparse_records(
    plan: Plan, times: Steps, rank: int, lo: int, hi: int
) -> Iterator[schema.AnyRecord]:
    ends = times.started[rank] + times.duration[rank]
    rng = random.Random(f"{plan.seed}.{rank}.{lo}")
    for step in range(lo + 1, hi + 1):
        at = int(ends[step - 1])
        if rank == 0:
            loss = 4.0 * step**-0.15 + rng.uniform(-0.02, 0.02)
            norm = 1.0 + 3.0 / step + 0.2 * math.sin(step)  # draws nothing: the rest stays as it is
            seconds = times.duration[rank, step - 1] / 1e9
            values = {"loss": loss, "learning_rate": 3e-4, "gradient_norm": norm}
            values |= {"samples_per_second": float(32 / seconds), "loss_nonfinite": 0.0}
            yield schema.Metrics(attempt=0, rank=rank, time_ns=at, step=step, values=values)
        if step % 10 == 0:
            seconds = times.duration[rank, step - 1] / 1e9
            yield log(
                rank, at, logging.INFO, f"step {step} took {seconds:.3f} s", step=step,
                fields={"epoch": "0"},
            )  # fmt: skip
        if step % 50 == 0 and rank == 0:
            fields = {"path": f"checkpoints/{step}.pt", "seconds": "0.4"}
            yield schema.Event(
                attempt=0, rank=rank, time_ns=at, name="checkpoint", step=step, fields=fields
            )
        if step % 97 == 0:
            yield log(
                rank, at, logging.WARNING, "gradient norm 12.7 is above 10.0, clipped", step=step,
                logger="train.optimizer",
            )  # fmt: skip
        if step == max(2, plan.steps // 2) and rank == plan.ranks - 1:
            yield log(rank, at, logging.ERROR, TRACEBACK, step=step, logger="train.metrics")
    yield state(plan, times, rank, hi, int(ends[hi - 1]))


def state(plan: Plan, times: Steps, rank: int, step: int, time_ns: int) -> schema.RankState:
    issued = step * len(BUCKETS)
    return schema.RankState(
        attempt=0, rank=rank, time_ns=time_ns, step=step, phase="other",
        phase_since_ns=time_ns - MS, heartbeat_ns=time_ns, cpu_seconds=step * 0.11,
        rss_bytes=(900 << 20) + rank * 1_000_000,
        groups=[
            schema.GroupState(
                group=GROUP, issued=issued, ended=issued, operation="all_reduce",
                size_bytes=BUCKETS[-1], issued_ns=int(times.arrived[rank, step - 1, -1]),
                call_site="train.py:88 train_step",
            )
        ],
    )  # fmt: skip


def finish(plan: Plan, times: Steps, nodes: list[Node], last: int) -> None:
    """Add the end: clean, a crash with its echoes, or a hang that goes on."""
    now = int((times.started[:, last - 1] + times.duration[:, last - 1]).max()) + 100 * MS
    for node in nodes:
        for rank in node.ranks:
            if plan.fault == "hang":
                node.records.append(hung_state(plan, times, rank, last, now))
            elif plan.fault == "crash":
                node.records += crash_records(plan, rank, last, now)
            elif plan.end:
                node.records.append(
                    schema.RankEnded(
                        attempt=0, rank=rank, time_ns=now, reason="clean", exit_code=0,
                        last_step=last,
                    )
                )  # fmt: skip


def hung_state(plan: Plan, times: Steps, rank: int, last: int, now: int) -> schema.RankState:
    # The collector sees the process alive; no hook of it has run since it began to wait.
    base = state(plan, times, rank, last, now)
    missing = rank == plan.slow_rank
    issued = last * len(BUCKETS) + (0 if missing else 1)
    group = schema.GroupState(
        group=GROUP, issued=issued, ended=last * len(BUCKETS), operation="all_reduce",
        size_bytes=BUCKETS[0], issued_ns=now, call_site="train.py:88 train_step",
    )  # fmt: skip
    return schema.RankState(
        attempt=0, rank=rank, time_ns=time.time_ns(), step=last + 1,
        phase="data" if missing else "backward", phase_since_ns=now,
        heartbeat_ns=now, groups=[group], cpu_seconds=base.cpu_seconds,
        rss_bytes=base.rss_bytes,
    )  # fmt: skip


def crash_records(plan: Plan, rank: int, last: int, now: int) -> list[schema.AnyRecord]:
    first = rank == plan.slow_rank
    at = now if first else now + 300 * MS + rank * MS
    kind = "ValueError" if first else "RuntimeError"
    message = (
        "bad sample at offset 81920: expected 128 tokens, got 0"
        if first
        else "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.4]:31207"
    )
    return [
        schema.ErrorRaised(
            attempt=0, rank=rank, time_ns=at, type=kind, message=message, step=last + 1,
            traceback=TRACEBACK.replace("ValueError", kind),
            where="main" if first else "collective",
        ),
        schema.RankEnded(
            attempt=0, rank=rank, time_ns=at + 50 * MS, reason="exception", exit_code=1,
            last_step=last, detail=f"{kind}: {message}",
        ),
    ]  # fmt: skip


TRACEBACK = """evaluation failed, going on without it
Traceback (most recent call last):
  File "/home/user/train.py", line 141, in evaluate
    batch = next(batches)
  File "/home/user/data.py", line 58, in __next__
    raise ValueError(f"bad sample at offset {offset}")
ValueError: bad sample at offset 81920, after ncclRemoteError on node-b"""


def next_batch(run_id: str, node: Node) -> bytes:
    """Return what a node gathered as its next batch, zstd packed."""
    node.sequence += 1
    body = schema.encode(
        schema.Batch(
            schema_version=schema.SCHEMA_VERSION, run_id=run_id, producer=node.producer,
            sequence=node.sequence, host=node.host, sent_ns=time.time_ns(),
            records=[msgspec.Raw(schema.encode(record)) for record in node.records],
            chunks=node.chunks,
        )
    )  # fmt: skip
    node.records, node.chunks = [], []
    return zstd.pack(body)


def post_body(base_url: str, body: bytes, token: str = "") -> dict[str, Any]:
    headers = {"Content-Type": "application/msgpack", "Content-Encoding": "zstd"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(f"{base_url}/api/v1/ingest", body, headers)
    with urllib.request.urlopen(request, timeout=30) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    plan = Plan()
    for name, default in vars(plan).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        else:
            unset = name in {"slow_from", "slow_until"}
            parser.add_argument(flag, type=type(default), default=0 if unset else default)
    choices = vars(parser.parse_args())
    url = choices.pop("url").rstrip("/")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.info("%s/runs/%s", url, seed_run(url, **choices))


if __name__ == "__main__":
    main()
