"""The open trace as the records and chunks of an agent, so that detectors and pages take it.

Gaps between operations are set to zero, as in the replay of the trace, and steps follow each
other. Sizes are not in the trace: they are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.wire import schema
from rankscope.wire.chunk import Column, encode_chunk
from rankscope_server.importers.open_trace import Batch, OpenTrace, Reading, Transfer
from rankscope_server.observe.facts import RECORDING, SLOWDOWN_FIELDS

Array = NDArray[Any]
_NS_PER_MS = 1_000_000
_PHASES = {"forward-compute": "forward", "backward-compute": "backward"}  # the rest: optimizer
_BLOCKED = {"forward-exchange": "forward", "backward-exchange": "backward"}
_OPERATIONS = {
    "forward-send": "send", "forward-recv": "recv", "backward-send": "send",
    "backward-recv": "recv", "params-all-gather": "all_gather_into_tensor",
    "grads-reduce-scatter": "reduce_scatter_tensor",
}  # fmt: skip
_SHIFT = {"forward-send": 1, "forward-recv": -1, "backward-send": -1, "backward-recv": 1}


def records_of(
    trace: OpenTrace, reading: Reading, start_ns: int = 0
) -> tuple[list[schema.AnyRecord], list[tuple[schema.Chunk, dict[str, Column]]]]:
    """Return what agents would have sent; the first step begins at `start_ns`."""
    replay = reading.replay
    num_ranks, num_steps = replay.graph.num_ranks, len(trace.steps)
    times = replay.graph.times(replay.recorded, np.zeros((num_ranks, num_steps)))
    duration = times[replay.graph.last].max(axis=0)
    began = np.concatenate([[0.0], np.cumsum(duration)[:-1]])
    records = [*_registrations(trace, reading, start_ns), _whole(reading, start_ns)]
    chunks = []
    for row in range(num_ranks):
        script = [batch for batch in reading.script if batch.row == row]
        steps, events = _rank(trace, reading, script, times, duration)
        steps["started_ns"] = began
        for event in events:
            event["arrived_ns"] = event["arrived_ns"] + began
        rank = trace.ranks[row]
        chunks.append(_chunk("steps", rank, _step_columns(trace, steps, start_ns)))
        chunks.append(_chunk("collectives", rank, _event_columns(trace, events, start_ns)))
    return records, chunks


def _whole(reading: Reading, start_ns: int) -> schema.Event:
    """Return what is known of the recording as a whole: S, and that it holds no dates."""
    replay = reading.replay
    step_ms, ratio = replay.mean_step_ms(), replay.slowdown()
    values = (ratio, step_ms, step_ms / ratio)
    fields = {name: f"{value:.6g}" for name, value in zip(SLOWDOWN_FIELDS, values, strict=True)}
    return schema.Event(
        attempt=0, rank=schema.NODE_RANK, time_ns=start_ns, name=RECORDING,
        fields={**fields, "dates": "none"},
    )  # fmt: skip


def _registrations(trace: OpenTrace, reading: Reading, start_ns: int) -> list[schema.AnyRecord]:
    records: list[schema.AnyRecord] = []
    groups: dict[tuple[int, str], set[int]] = {}
    for batch in reading.script:
        for transfer in batch.transfers:
            rank = trace.ranks[batch.row]
            groups.setdefault((rank, _group(transfer)), set())
    members: dict[str, list[int]] = {}
    for rank, group in groups:
        members.setdefault(group, []).append(rank)
    num_stages = int(reading.replay.stage.max()) + 1
    numbers = trace.columns["seq_id"][trace.columns["optype"] == "forward-compute"]
    for row, rank in enumerate(trace.ranks):
        records.append(schema.RankRegistered(
            attempt=0, rank=rank, time_ns=start_ns, world_size=len(trace.ranks),
            local_rank=0, local_world_size=1, node_rank=-1, host="", pid=0,
            stage=int(reading.replay.stage[row]), num_stages=num_stages,
            num_microbatches=int(numbers.max()) + 1,
        ))  # fmt: skip
        records += [
            schema.GroupDefined(
                attempt=0,
                rank=rank,
                time_ns=start_ns,
                group=group,
                ranks=sorted(ranks),
                backend="",
            )
            for group, ranks in members.items()
            if rank in ranks
        ]
    return records


def _group(transfer: Transfer) -> str:
    kind, place = transfer[0], transfer[1]
    return f"pipeline-{place}" if kind.endswith("exchange") else f"{kind}-{place}"


def _rank(
    trace: OpenTrace, reading: Reading, script: list[Batch], times: Array, duration: Array
) -> tuple[dict[str, Array], list[dict[str, Any]]]:
    """Return the phases of a rank, and its operations, as vectors over steps, ms."""
    replay, cells = reading.replay, trace.columns
    num_ranks = replay.graph.num_ranks
    now = np.zeros(len(duration))
    steps: dict[str, Array] = {}
    events: list[dict[str, Any]] = []

    def spend(name: str, took: Array) -> None:
        steps[name] = steps.get(name, np.zeros(len(duration))) + took

    for batch in script:
        if not batch.transfers:
            kind = str(cells["optype"][reading.rows[batch.operations[0], 0]])
            took = replay.recorded[batch.nodes[0]]
            spend(_PHASES.get(kind, "optimizer"), took)
            now = times[num_ranks + batch.nodes[0]]
            continue
        issued = now
        for operation, transfer, node in zip(
            batch.operations, batch.transfers, batch.nodes, strict=True
        ):
            ended = times[num_ranks + node]
            blocked = np.maximum(ended - now, 0.0)
            phase = _BLOCKED.get(transfer[0], "optimizer")
            spend(phase, blocked)
            spend(f"{phase}_blocked", blocked)
            now = now + blocked
            events.append({
                "kind": str(cells["optype"][reading.rows[operation, 0]]), "transfer": transfer,
                "stage": int(cells["stage"][reading.rows[operation, 0]]),
                "arrived_ns": issued, "duration_ns": ended - issued, "blocked_ns": blocked,
            })  # fmt: skip
    for name in ("other", "other_blocked"):  # until the slowest rank has ended its step
        spend(name, duration - now)
    steps["duration"] = duration
    return steps, events


def _step_columns(trace: OpenTrace, steps: Mapping[str, Array], start_ns: int) -> dict[str, Column]:
    columns: dict[str, Column] = {
        name: np.zeros(len(trace.steps), np.int64) for name in schema.STEP_COLUMNS
    }
    for name, values in steps.items():
        column = name if name.endswith("_ns") else f"{name}_ns"
        columns[column] = (values * _NS_PER_MS).astype(np.int64)
    columns["started_ns"] = np.asarray(columns["started_ns"]) + start_ns
    columns["step"] = trace.steps.astype(np.int64)
    return columns


def _event_columns(
    trace: OpenTrace, events: list[dict[str, Any]], start_ns: int
) -> dict[str, Column]:
    num_steps, count = len(trace.steps), len(events)
    columns: dict[str, Column] = {
        name: [""] * (count * num_steps)
        if name in schema.STRING_COLUMNS
        else np.zeros(count * num_steps, np.int64)
        for name in schema.COLLECTIVE_COLUMNS
    }
    for name in ("arrived_ns", "duration_ns", "blocked_ns"):
        values = np.stack([event[name] for event in events], axis=1)  # steps x events
        columns[name] = (values.ravel() * _NS_PER_MS).astype(np.int64)
    columns["arrived_ns"] = np.asarray(columns["arrived_ns"]) + start_ns
    for name in ("started_ns", "device_duration_ns", "returned_ns"):
        columns[name] = np.full(count * num_steps, -1)
    columns["step"] = np.repeat(trace.steps.astype(np.int64), count)
    columns["sequence"] = np.zeros(count * num_steps, np.int64)
    columns["state"] = np.full(count * num_steps, schema.ENDED)
    columns["num_tensors"] = np.ones(count * num_steps, np.int64)
    columns["peer_rank"] = np.tile([_peer(trace, event) for event in events], num_steps)
    columns["group"] = [_group(event["transfer"]) for event in events] * num_steps
    columns["operation"] = [_OPERATIONS.get(e["kind"], "all_reduce") for e in events] * num_steps
    for name, word in (("dtype", "other"), ("ended_by", "wait")):
        columns[name] = [word] * (count * num_steps)
    return columns


def _peer(trace: OpenTrace, event: Mapping[str, Any]) -> int:
    shift = _SHIFT.get(event["kind"])
    if shift is None:
        return -1
    cells, replica = trace.columns, event["transfer"][1]
    here = (cells["dp_rank"] == replica) & (cells["stage"] == event["stage"] + shift)
    return int(cells["rank"][np.argmax(here)])


def _chunk(
    kind: schema.ChunkKind, rank: int, columns: dict[str, Column]
) -> tuple[schema.Chunk, dict[str, Column]]:
    times = np.asarray(columns["started_ns" if kind == "steps" else "arrived_ns"])
    steps = np.asarray(columns["step"])
    chunk = schema.Chunk(
        kind=kind, attempt=0, rank=rank, host="", count=len(times),
        time_lo_ns=int(times.min()), time_hi_ns=int(times.max()), data=encode_chunk(columns),
        step_lo=int(steps.min()), step_hi=int(steps.max()),
    )  # fmt: skip
    return chunk, columns
