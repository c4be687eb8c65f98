"""The open trace of ByteDance's StragglerAnalysis: operations of a pipeline job, in Parquet.

Columns: `dp_rank, stage, rank, step, optype, start_ts, duration, seq_id, mc, gmc, mb_id`; times
are seconds from the beginning of the step, on one clock. Of each tensor-parallel group one rank is
traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rankscope.wire import schema
from rankscope.wire.chunk import Column
from rankscope_server.importers.columns import chunk_of, collective_columns
from rankscope_server.observe.facts import SLOWDOWN_FIELDS
from rankscope_server.replay.event_graph import GraphBuilder
from rankscope_server.replay.replay import Replay

Array = NDArray[Any]
Transfer: TypeAlias = tuple[str, int, *tuple[int, ...]]  # kind, replica or stage, the rest
COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id")
_MS = 1e3
_UNEVEN = "its steps differ in their operations; give steps that are recorded whole"
# exchange -> (its kind, what the stage that sends adds to its number, or the one that takes)
_EXCHANGES: dict[str, tuple[str, int]] = {
    "forward-send": ("forward-exchange", 0),
    "forward-recv": ("forward-exchange", -1),
    "backward-send": ("backward-exchange", 0),
    "backward-recv": ("backward-exchange", 1),
}
_REPLICAS = frozenset({"params-all-gather", "grads-reduce-scatter"})  # over one stage
# over the stages of a replica; the layer-norm reduction runs over ranks that are not traced
_STAGES = frozenset({"embedding-grads-all-reduce", "optimizer-clip-main-grad"})


class NotATrace(ValueError):
    """The file is not such a trace, or it cannot be read here; the message says why."""


@dataclass(frozen=True, slots=True)
class OpenTrace:
    """The columns of a trace, rows in order of step, rank and time. Times in ms."""

    columns: Mapping[str, Array]
    ranks: tuple[int, ...]
    steps: Array

    @property
    def stage_of(self) -> dict[int, int]:
        """Return the stage of each rank."""
        found = zip(self.columns["rank"].tolist(), self.columns["stage"].tolist(), strict=True)
        return dict(found)


def read_open_trace(path: Path) -> OpenTrace:
    """Read a trace. Raises NotATrace."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise NotATrace("reading Parquet needs pyarrow: pip install 'rankscope[traces]'") from error
    try:
        names = pyarrow.parquet.read_schema(path).names
        if lacking := [name for name in COLUMNS if name not in names]:
            raise NotATrace(
                f"{path}: no column {', '.join(lacking)}; give a trace of StragglerAnalysis"
            )
        table = pyarrow.parquet.read_table(path, columns=list(COLUMNS))
    except NotATrace:
        raise
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise NotATrace(f"{path}: {str(error).rstrip('.')}; copy it again") from error
    if not table.num_rows:
        raise NotATrace(f"{path}: holds no operation; give the whole trace")
    columns: dict[str, Array] = {
        name: np.asarray(table[name].to_pylist() if name == "optype" else table[name].to_numpy())
        for name in COLUMNS
    }
    for name in ("start_ts", "duration"):
        columns[name] = columns[name].astype(np.float64) * _MS
    order = np.lexsort((columns["start_ts"], columns["rank"], columns["step"]))
    columns = {name: values[order] for name, values in columns.items()}
    ranks = tuple(np.unique(columns["rank"]).tolist())
    return OpenTrace(columns, ranks, np.unique(columns["step"]))


@dataclass(frozen=True, slots=True)
class Batch:
    """What a rank does next: one piece of computation, or transfers that it issues at once."""

    row: int  # of the rank
    operations: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    nodes: tuple[int, ...]  # of the replay


@dataclass(frozen=True, slots=True)
class Reading:
    """A trace ready to replay, what each rank does in program order, and the rows of the trace."""

    replay: Replay
    script: tuple[Batch, ...]
    rows: Array  # operations x steps


def replay_of(trace: OpenTrace) -> Reading:
    """Return the trace ready to replay. Raises NotATrace where steps differ in what they do."""
    cells = trace.columns
    num_steps, num_ranks = len(trace.steps), len(trace.ranks)
    first = np.flatnonzero(cells["step"] == trace.steps[0])
    if len(first) * num_steps != len(cells["step"]):
        raise NotATrace(_UNEVEN)
    by_step = np.arange(len(cells["step"])).reshape(num_steps, -1)
    # Within a rank, operations keep their order by kind and number; the clock may swap neighbours.
    names = np.unique(cells["optype"])
    code = np.searchsorted(names, cells["optype"])
    key = (cells["rank"].astype(np.int64) * len(names) + code) * (1 << 20) + cells["seq_id"]
    place = np.argsort(key[by_step], axis=1, kind="stable")
    if not np.all(np.take_along_axis(key[by_step], place, 1) == np.sort(key[first])):
        raise NotATrace(_UNEVEN)
    rows = np.take_along_axis(by_step, place, 1).T  # operations x steps
    return _build(trace, rows, num_ranks)


def _build(trace: OpenTrace, rows: Array, num_ranks: int) -> Reading:
    cells, builder = trace.columns, GraphBuilder(num_ranks)
    row_of = {rank: row for row, rank in enumerate(trace.ranks)}
    start = np.median(cells["start_ts"][rows], axis=1)
    durations: dict[int, Array] = {}
    members: dict[Transfer, list[int]] = {}
    kind_of: dict[int, str] = {}
    order = np.lexsort((start, cells["rank"][rows[:, 0]]))
    script: list[Batch] = []
    for batch in _batches(cells, rows, order, start):
        rank = row_of[int(cells["rank"][rows[batch[0], 0]])]
        keys = [_transfer(cells, int(rows[operation, 0])) for operation in batch]
        transfers = tuple(key for key in keys if key is not None)
        if not transfers:
            node = builder.work(rank)
            durations[node] = cells["duration"][rows[batch[0]]]
            kind_of[node] = str(cells["optype"][rows[batch[0], 0]])
            script.append(Batch(rank, tuple(batch), (), (node,)))
            continue
        for operation, transfer in zip(batch, transfers, strict=True):
            builder.issue(rank, transfer)
            members.setdefault(transfer, []).append(operation)
        for transfer in transfers:
            builder.join(rank, transfer)
        nodes = tuple(builder.transfers[transfer] for transfer in transfers)
        script.append(Batch(rank, tuple(batch), transfers, nodes))
    graph = builder.build()
    for transfer in members:
        node = builder.transfers[transfer]
        mine = rows[members[transfer]]  # members x steps
        latest = cells["start_ts"][mine].max(axis=0)
        ended = (cells["start_ts"][mine] + cells["duration"][mine]).max(axis=0)
        durations[node] = np.maximum(ended - latest, 0.0)
        kind_of[node] = transfer[0]
    recorded = np.zeros((graph.num_nodes, rows.shape[1]))
    for node, values in durations.items():
        recorded[node] = values
    kinds = (*sorted(set(kind_of.values())), "nothing")
    stage_of = trace.stage_of
    ended = (cells["start_ts"] + cells["duration"])[rows]
    replay = Replay(
        graph=graph,
        recorded=recorded,
        kind=np.array([kinds.index(kind_of.get(node, "nothing")) for node in range(len(recorded))]),
        kinds=kinds,
        stage=np.array([stage_of[rank] for rank in trace.ranks]),
        step_ms=ended.max(axis=0) - cells["start_ts"][rows].min(axis=0),
        is_chained=False,
        ranks=trace.ranks,
        steps=trace.steps,
    )
    return Reading(replay, tuple(script), rows)


def _batches(
    cells: Mapping[str, Array], rows: Array, order: Array, start: Array
) -> Iterator[list[int]]:
    """Yield operations that a rank issues at once: one, or exchanges that begin together."""
    batch: list[int] = []
    for operation in order.tolist():
        row = rows[operation, 0]
        is_exchange = cells["optype"][row] in _EXCHANGES
        if batch and not (
            is_exchange
            and cells["optype"][rows[batch[0], 0]] in _EXCHANGES
            and cells["rank"][row] == cells["rank"][rows[batch[0], 0]]
            and start[operation] == start[batch[0]]
        ):
            yield batch
            batch = []
        batch.append(operation)
    if batch:
        yield batch


def _transfer(cells: Mapping[str, Array], row: int) -> Transfer | None:
    """Return what names a transfer among all ranks; None for computation."""
    kind, number = str(cells["optype"][row]), int(cells["seq_id"][row])
    replica, stage = int(cells["dp_rank"][row]), int(cells["stage"][row])
    if kind in _EXCHANGES:
        name, shift = _EXCHANGES[kind]
        return name, replica, stage + shift, number
    if kind in _REPLICAS:
        return kind, stage, number
    return (kind, replica, number) if kind in _STAGES else None


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
) -> tuple[list[schema.AnyRecord], list[schema.Chunk]]:
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
        chunks.append(chunk_of("steps", rank, _step_columns(trace, steps, start_ns)))
        chunks.append(chunk_of("collectives", rank, _event_columns(trace, events, start_ns)))
    return records, chunks


def _whole(reading: Reading, start_ns: int) -> schema.Event:
    """Return what is known of the recording as a whole: S, and that it holds no dates."""
    replay = reading.replay
    step_ms, ratio = replay.mean_step_ms(), replay.slowdown()
    values = (ratio, step_ms, step_ms / ratio)
    fields = {name: f"{value:.6g}" for name, value in zip(SLOWDOWN_FIELDS, values, strict=True)}
    return schema.Event(
        attempt=0, rank=schema.NODE_RANK, time_ns=start_ns, name=schema.RECORDING,
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
    columns = collective_columns(count * num_steps, 0)
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
