"""What the agents of a simulated job would send: the records and chunks of the real schema.

An `Item` is (arrival at the server in ns, record or chunk with its columns), as
`rankscope_server.analysis` takes them. `encode=True` packs each chunk as the wire has it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import Column, encode_chunk
from tests.simulator.ends import crash, saves
from tests.simulator.engine import PHASES, Array, Engine, Row, Step
from tests.simulator.environments import environments
from tests.simulator.job import Job
from tests.simulator.numbers import numbers
from tests.simulator.signals import gpu_samples, step_signals
from tests.simulator.told import MS as MS
from tests.simulator.told import START_NS as START_NS
from tests.simulator.told import Item as Item


class Recording:
    """Runs a job and tells it as its agents would. `items` first, then `states` at moments.

    Only the last steps are kept in memory: a state can be asked for while they are.
    """

    def __init__(self, job: Job, *, encode: bool = False, collectives: bool = True) -> None:
        self.job, self.encode, self.collectives = job, encode, collectives
        chance = np.random.default_rng((job.seed, 1))
        noise, hosts = job.noise, job.num_hosts
        self.offset_ms = chance.uniform(-noise.clock_offset_ms, noise.clock_offset_ms, hosts)
        self.drift = chance.uniform(-1, 1, hosts) * noise.clock_drift_ppm * 1e-6
        self._host = np.arange(job.num_ranks) // job.ranks_per_host
        self._names = [job.group_names(rank) for rank in range(job.num_ranks)]
        self._before: dict[str, int] = {}  # numbers of a kind of group before the kept steps
        self._kept: list[Step] = []
        self.last: Step | None = None
        self.began_ms: dict[int, float] = {}  # true time at which a step began
        self._engine = Engine(job)

    # --- clocks ------------------------------------------------------------------------------

    def clock_ns(self, ranks: Array, times_ms: Array) -> Array:
        """Return what the clocks of ranks' hosts show at true times; times may be infinite."""
        hosts, times_ms = self._host[ranks], np.where(np.isfinite(times_ms), times_ms, 0.0)
        shown = times_ms + self.offset_ms[hosts] + self.drift[hosts] * times_ms
        for fault in self.job.faults:
            if fault.kind == "clock_set" and self._kept:
                begin = self._begin_of(fault.start)
                shown = shown + np.where((hosts == fault.host) & (times_ms >= begin), fault.size, 0)
        return START_NS + (shown * MS).astype(np.int64)

    def _begin_of(self, step: int) -> float:
        """Return about when a step begins: the steps before last as long as the first kept."""
        first = self._kept[0]
        if step <= first.number:
            return float(first.started.flat[0]) - 1.0
        known = [kept for kept in self._kept if kept.number == step]
        return float(known[0].started.flat[0]) if known else float("inf")

    # --- records -----------------------------------------------------------------------------

    def items(self, per_chunk: int = 10) -> Iterator[Item]:
        """Yield registrations, then the chunks of each `per_chunk` steps, in true order."""
        yield from self.registrations()
        block: list[Step] = []
        for step in self._engine.steps():
            self._keep(step)
            block.append(step)
            if len(block) == per_chunk:
                yield from self._chunks(block)
                block = []
        if block:
            yield from self._chunks(block)
        for fault in self.job.faults:
            if fault.kind == "crash" and fault.rank in self.hung and self.last is not None:
                yield from crash(self.job, fault, self.last)

    def registrations(self) -> Iterator[Item]:
        """Yield what ranks say of themselves when they start."""
        job = self.job
        # One list for all members: 8,192 of the world's would take half a gigabyte.
        members = {name: list(ranks) for name, ranks in job.groups.items()}
        for rank in range(job.num_ranks):
            who = {"attempt": 0, "rank": rank, "time_ns": START_NS}
            stage = job.place(rank)[0]
            yield START_NS, schema.RankRegistered(
                **who, world_size=job.num_ranks, local_rank=rank % job.ranks_per_host,
                local_world_size=min(job.ranks_per_host, job.num_ranks),
                node_rank=rank // job.ranks_per_host, host=job.host(rank), pid=1000 + rank,
                backend=job.backend, stage=stage if job.pipeline > 1 else -1,
                num_stages=job.pipeline if job.pipeline > 1 else 0,
                num_microbatches=job.microbatches if job.pipeline > 1 else 0,
                schedule="gpipe" if job.pipeline > 1 else "",
            )  # fmt: skip
            for name in self._names[rank].values():
                yield (
                    START_NS,
                    schema.GroupDefined(
                        **who, group=name, ranks=members[name], backend=job.backend
                    ),
                )

        yield from environments(job)

    def _keep(self, step: Step) -> None:
        self._kept.append(step)
        self.last = step
        self.began_ms[step.number] = float(step.started.min())
        if len(self._kept) > 12:
            for row in self._kept.pop(0).rows:
                if row.peer is None:
                    self._before[row.kind] = self._before.get(row.kind, 0) + 1

    def _chunks(self, block: list[Step]) -> Iterator[Item]:
        yield from self._step_chunks(block)
        if self.collectives:
            yield from self._call_chunks(block)
        if self.job.tells_numbers:
            yield from numbers(self.job, block)
        yield from saves(self.job, block)
        yield from gpu_samples(self.job, block)

    # --- steps -------------------------------------------------------------------------------

    def _step_chunks(self, block: list[Step]) -> Iterator[Item]:
        num_ranks = self.job.num_ranks
        columns = {name: np.zeros((len(block), num_ranks), np.int64) for name in
                   schema.STEP_COLUMNS}  # fmt: skip
        ended = np.array([step.ended.ravel() for step in block])
        ranks = np.arange(num_ranks)
        for place, step in enumerate(block):
            columns["step"][place] = step.number
            columns["started_ns"][place] = self.clock_ns(ranks, step.started.ravel())
            is_done = np.isfinite(step.ended)
            took = np.where(is_done, step.ended, 0.0) - np.where(is_done, step.started, 0.0)
            columns["duration_ns"][place] = _ns(took)
            for phase in PHASES:
                columns[f"{phase}_ns"][place] = _ns(step.spent[phase])
                if phase not in ("data", "checkpoint"):
                    columns[f"{phase}_blocked_ns"][place] = _ns(step.blocked[phase])
            columns["flags"][place] = schema.STEP_FIRST if step.number == 1 else 0
            if step.spent["checkpoint"].any():
                columns["flags"][place] |= schema.STEP_CHECKPOINT
            step_signals(self.job, step, columns, place)
            columns["num_collectives"][place] = len(step.rows)
            columns["microbatches"][place] = self.job.microbatches
        for rank in range(num_ranks):
            done = np.isfinite(ended[:, rank])
            if done.any():
                own: dict[str, Column] = {name: table[done, rank] for name, table in
                                          columns.items()}  # fmt: skip
                arrival = START_NS + int(ended[done, rank].max() * MS)
                yield arrival, self._chunk("steps", rank, own, "started_ns")

    # --- collectives -------------------------------------------------------------------------

    def _call_chunks(self, block: list[Step]) -> Iterator[Item]:
        rows = [(step, row) for step in block for row in step.rows]
        issued = np.array([row.issued.ravel() for _, row in rows])
        ended = np.array([row.ended.ravel() for _, row in rows])
        peers = np.array([_peers(row) for _, row in rows])
        numbers = self._numbers(rows, issued)
        step_of = np.array([step.number for step, _ in rows])
        is_p2p = np.array([row.peer is not None for _, row in rows])
        for rank in range(self.job.num_ranks):
            mine = np.isfinite(issued[:, rank]) & np.isfinite(ended[:, rank])
            if not mine.any():
                continue
            places = np.flatnonzero(mine)
            calls = [rows[place][1].odd.get(rank, rows[place][1].call) for place in places]
            arrived = self.clock_ns(np.full(len(places), rank), issued[places, rank])
            took = self.clock_ns(np.full(len(places), rank), ended[places, rank]) - arrived
            count = len(places)
            sizes = np.array([call.size_bytes for call in calls], np.int64)
            columns: dict[str, Column] = {
                "arrived_ns": arrived, "started_ns": np.full(count, -1), "duration_ns": took,
                "device_duration_ns": np.full(count, -1), "returned_ns": np.full(count, 20_000),
                "blocked_ns": np.zeros(count, np.int64), "sequence": numbers[places, rank],
                "step": step_of[places], "size_bytes": sizes, "input_bytes": sizes,
                "output_bytes": sizes, "peer_rank": peers[places, rank],
                "num_tensors": np.ones(count, np.int64), "state": np.full(count, schema.ENDED),
                "flags": np.where(is_p2p[places], schema.FLAG_P2P, schema.FLAG_ASYNC),
                "group": [self._names[rank][rows[place][1].kind] for place in places],
                "operation": [call.operation for call in calls],
                "dtype": [call.dtype for call in calls],
                "reduce_op": [call.reduce_op for call in calls],
                "call_site": [call.site for call in calls], "issued_by": ["kernel"] * count,
                "ended_by": ["flight recorder"] * count,
            }  # fmt: skip
            arrival = START_NS + int(ended[places, rank].max() * MS)
            yield arrival, self._chunk("collectives", rank, columns, "arrived_ns")

    def _numbers(self, rows: list[tuple[Step, Row]], issued: Array) -> Array:
        """Return sequences: of a group by its calls, of exchanges by peer and direction."""
        numbers = np.zeros(issued.shape, np.int64)
        counts: dict[object, Array] = {}
        per_step = self._per_step()
        for place, (_, row) in enumerate(rows):
            takes_part = np.isfinite(issued[place])
            key: object = row.kind
            if row.peer is not None:
                key = (row.call.operation, row.call.site)
            if key not in counts:
                counts[key] = per_step.get(key, np.zeros(self.job.num_ranks, np.int64)) * (
                    rows[0][0].number - 1
                )
            counts[key] = counts[key] + takes_part
            numbers[place] = np.where(takes_part, counts[key], 0)
        return numbers

    def _per_step(self) -> dict[object, Array]:
        """Return how many calls of each kind a healthy step has, by rank."""
        found: dict[object, Array] = {}
        first = self._kept[0]
        for row in first.rows:
            key: object = row.kind if row.peer is None else (row.call.operation, row.call.site)
            part = ~np.isnan(row.issued.ravel())
            found[key] = found.get(key, np.zeros(self.job.num_ranks, np.int64)) + part
        return found

    def _chunk(
        self, kind: schema.ChunkKind, rank: int, columns: dict[str, Column], time: str
    ) -> tuple[schema.Chunk, dict[str, Column]]:
        times = np.asarray(columns[time])
        low, high = int(times.min()), int(times.max())
        is_read = self.encode or kind == "collectives"  # of steps the columns are all that is
        data = encode_chunk(columns) if is_read else f"{kind} {rank} {low}".encode()
        chunk = schema.Chunk(
            kind=kind, attempt=0, rank=rank, host=self.job.host(rank), count=len(times),
            time_lo_ns=low, time_hi_ns=high, data=data,
        )  # fmt: skip
        return chunk, columns

    # --- states ------------------------------------------------------------------------------

    @property
    def hung(self) -> set[int]:
        """Return the ranks that came to where they hang, as far as the job was run."""
        return self._engine.hung

    def stopped_ms(self) -> float:
        """Return when the last rank that could still move did so."""
        assert self.last is not None
        return float(self.last.moved.max())

    def states(self, at_ms: float, seconds_late: float = 0.0) -> list[Item]:
        """Return where every rank is at a true time within the last steps."""
        num_ranks, ranks = self.job.num_ranks, np.arange(self.job.num_ranks)
        assert self.last is not None
        step = next((s for s in self._kept if (s.ended > at_ms).any()), self.last)
        moved = np.minimum(step.moved.ravel(), at_ms)
        now_ns, moved_ns = self.clock_ns(ranks, np.full(num_ranks, at_ms)), None
        moved_ns = self.clock_ns(ranks, moved)
        standing = {kind: self._standing(kind, at_ms) for kind in ("world", "dp", "tp")}
        exchanges = self._exchanges(at_ms)
        items: list[Item] = []
        arrival = START_NS + int((at_ms + 1000 * seconds_late) * MS)
        for rank in range(num_ranks):
            groups = [standing[kind][rank] for kind in self._names[rank] if kind != "pp"]
            groups += exchanges.get(rank, [])
            items.append((arrival, schema.RankState(
                attempt=0, rank=rank, time_ns=int(now_ns[rank]), step=step.number,
                phase=PHASES[step.phase.flat[rank]],  # type: ignore[arg-type]
                phase_since_ns=int(moved_ns[rank]), heartbeat_ns=int(moved_ns[rank]),
                groups=groups,
            )))  # fmt: skip
        return items

    def _standing(self, kind: str, at_ms: float) -> list[schema.GroupState]:
        rows = [row for step in self._kept for row in step.rows if row.kind == kind]
        if not rows:
            return [schema.GroupState(group=names.get(kind, kind), issued=0, ended=0)
                    for names in self._names]  # fmt: skip
        issued = np.array([row.issued.ravel() for row in rows])
        ended = np.array([row.ended.ravel() for row in rows])
        takes_part = ~np.isnan(issued)
        came, left = takes_part & (issued <= at_ms), takes_part & (ended <= at_ms)
        per_step = self._per_step().get(kind, 0)
        first = (self._kept[0].number - 1) * per_step
        num_issued, num_ended = came.sum(0) + first, left.sum(0) + first
        is_open = came & ~left
        ranks = np.arange(self.job.num_ranks)
        last = len(rows) - 1 - np.argmax(came[::-1], 0)
        oldest = np.argmax(is_open, 0)
        last_ns = self.clock_ns(ranks, issued[last, ranks])
        open_ns = self.clock_ns(ranks, issued[oldest, ranks])
        found = []
        for rank, names in enumerate(self._names):
            fields: dict[str, object] = {}
            if came[:, rank].any():
                row = rows[last[rank]]
                call = row.odd.get(rank, row.call)
                fields = {
                    "operation": call.operation, "size_bytes": call.size_bytes,
                    "issued_ns": int(last_ns[rank]), "call_site": call.site,
                    "dtype": call.dtype, "reduce_op": call.reduce_op,
                }  # fmt: skip
            if is_open[:, rank].any():
                row = rows[oldest[rank]]
                call = row.odd.get(rank, row.call)
                fields |= {
                    "open_sequence": int(num_ended[rank]) + 1, "open_operation": call.operation,
                    "open_bytes": call.size_bytes, "open_ns": int(open_ns[rank]),
                    "open_call_site": call.site, "open_dtype": call.dtype,
                    "open_reduce_op": call.reduce_op,
                }  # fmt: skip
            found.append(schema.GroupState(
                group=names.get(kind, kind), issued=int(num_issued[rank]),
                ended=int(num_ended[rank]), **fields,  # type: ignore[arg-type]
            ))  # fmt: skip
        return found

    def _exchanges(self, at_ms: float) -> dict[int, list[schema.GroupState]]:
        """Return the pipeline group of each rank: counts per peer, and the oldest open exchange."""
        rows = [row for step in self._kept for row in step.rows if row.peer is not None]
        if not rows:
            return {}
        issued = np.array([row.issued.ravel() for row in rows])
        ended = np.array([row.ended.ravel() for row in rows])
        peers = np.array([_peers(row) for row in rows])
        is_send = np.array([row.call.operation == "send" for row in rows])[:, None]
        came = ~np.isnan(issued) & (issued <= at_ms)
        is_open = came & ~(ended <= at_ms)
        # A receive before a send: who waits in a receive is stuck there.
        rank_order = np.where(is_open, issued + np.where(is_send, 1e9, 0.0), np.inf)
        oldest = rank_order.argmin(0)
        ranks = np.arange(self.job.num_ranks)
        since_ns = self.clock_ns(ranks, issued[oldest, ranks])
        found = {}
        for rank, names in enumerate(self._names):
            counts = []
            for peer in np.unique(peers[came[:, rank], rank]).tolist():
                of_peer = came[:, rank] & (peers[:, rank] == peer)
                send, done = is_send[:, 0], ended[:, rank] <= at_ms
                counts.append(schema.PeerState(
                    peer=peer, sent=int((of_peer & send).sum()),
                    sent_ended=int((of_peer & send & done).sum()),
                    received=int((of_peer & ~send).sum()),
                    received_ended=int((of_peer & ~send & done).sum()),
                ))  # fmt: skip
            fields: dict[str, object] = {}
            if is_open[:, rank].any():
                row, peer = rows[oldest[rank]], int(peers[oldest[rank], rank])
                same = came[:, rank] & (peers[:, rank] == peer) & (is_send[:, 0] == (
                    row.call.operation == "send"))  # fmt: skip
                fields = {
                    "p2p_operation": row.call.operation, "p2p_peer": peer,
                    "p2p_issued_ns": int(since_ns[rank]),
                    "p2p_sequence": int(same[: oldest[rank] + 1].sum()),
                }  # fmt: skip
            found[rank] = [schema.GroupState(
                group=names["pp"], issued=0, ended=0, peers=counts,
                **fields,  # type: ignore[arg-type]
            )]  # fmt: skip
        return found


def _ns(times_ms: Array) -> Array:
    flat = times_ms.ravel()
    return (np.where(np.isfinite(flat), flat, 0.0) * MS).astype(np.int64)


def _peers(row: Row) -> Array:
    if row.peer is None:
        return np.full(row.issued.size, -1)
    return np.where(np.isnan(row.issued.ravel()), -1, row.peer.ravel())
