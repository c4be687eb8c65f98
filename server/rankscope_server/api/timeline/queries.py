"""One step of all ranks: reads it, and puts timeline, critical path and answer together."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import sqlalchemy as sa

from rankscope.wire.schema import P2P_OPERATIONS, STEP_FIRST, STEP_THINNED
from rankscope_server.answers import LeftOut, capped, json_object
from rankscope_server.api.steps.queries import (
    WARM_UP_STEPS,
    first_step,
    known,
    load_range,
    quiet,
    steps_of_many,
)
from rankscope_server.api.timeline.answer import LEAST_STEPS, Facts, Reference, SlowCall, answer_of
from rankscope_server.api.timeline.calls import (
    CallKind,
    Matched,
    kinds_of,
    match,
    usual_transfers,
)
from rankscope_server.api.timeline.lanes import (
    LANES,
    MAX_FOLDED,
    MAX_LANES,
    choose_lanes,
    folded,
    parse_ranks,
)
from rankscope_server.api.timeline.path import Path, critical_path, path_text, shares_of
from rankscope_server.api.timeline.reading import Recorded, read_step
from rankscope_server.api.timeline.schema import (
    Flights,
    Lane,
    PathPart,
    Slices,
    SlowStep,
    StepAnswer,
    StepCall,
    StepEvidence,
    StepTimeline,
)
from rankscope_server.api.timeline.slices import KINDS, Slice, lane_of, own_parts
from rankscope_server.api.timeline.slices import Lane as RankLane
from rankscope_server.findings.text import bytes_text, ms_text
from rankscope_server.ingest.step_metrics import BLOCKED_METRICS, PHASE_METRICS
from rankscope_server.problems import not_found
from rankscope_server.store import tables
from rankscope_server.text import plural

Array = np.ndarray[Any, np.dtype[Any]]
Usual: TypeAlias = dict[CallKind, tuple[float, int]]  # of transfers: median ns, count
MAX_SLICES = 100_000
MAX_CALLS = 5_000
_REFERENCE_STEPS = 2_000  # of which the median step is taken, and so many of single ranks
_REFERENCE_CELLS, _RANK_STEPS = 64_000, 128
_MAX_FINDINGS = 3
_AROUND, _SLOWEST = 50, 5  # steps to each side, and how many of them are named
_SLOWER = 1.5  # a transfer is slower than usual from here on, and by as much of the step
_SLOWER_SHARE = 0.05
_FACTS = ("step", "own_work", "blocked", *PHASE_METRICS, *BLOCKED_METRICS)
_ORDER_TEXT = (
    "Waits and operations are where they were; of phases only the length is measured: they fill "
    "the time between waits in their usual order."
)
_PIPED_TEXT = (
    "Waits and operations are where they were; what is between a receive and a send is forward or "
    "backward by where it goes."
)
_TURNS_TEXT = (
    "Waits and operations are where they were; ranks hold several stages, so what is forward and "
    "what is backward between them is not known."
)


def step_timeline(
    connection: sa.Connection, run: sa.Row[Any], step: int, ranks: str, also: int | None, lanes: int
) -> StepTimeline:
    """Return one step. Raises Problem 404, 422."""
    recorded = read_step_of(connection, run, step)
    matched = match(recorded.calls, recorded.clocks.shift_ns, sizes_of(recorded))
    path = critical_path(recorded, matched)
    near = match(recorded.near, recorded.clocks.shift_ns, sizes_of(recorded))
    usual = usual_transfers(near, step)
    answer = _answer(connection, run, recorded, matched, path, usual)
    own_ms = recorded.cells["own_work"]
    wanted = parse_ranks(ranks, recorded.height)
    chosen = (
        [(rank, "") for rank in wanted][: max(lanes, MAX_LANES if lanes == LANES else lanes)]
        if wanted
        else choose_lanes(recorded, own_ms, answer.ranks, also, shares_of(path), lanes)
    )
    parts = own_parts(recorded)
    drawn: list[RankLane] = []
    count = 0
    for rank, _ in chosen:
        drawn.append(lane_of(recorded, matched, parts, rank))
        count += len(drawn[-1].slices)
        if count > MAX_SLICES and len(drawn) > 1:
            break
    chosen = chosen[: len(drawn)]
    origin, length = span_of(recorded)
    hosts = folded(recorded.hosts, own_ms, recorded.cells["blocked"], (rank for rank, _ in chosen))
    calls, place_of = _calls(recorded, matched, usual, drawn, path)
    clock_text, is_sure = recorded.clocks.text(length / 1e6, recorded.hosts)
    first, last = first_step(connection, run.run_id), run.step
    return StepTimeline(
        step=step, attempt=recorded.attempt, began_ms=origin / 1e6 if origin else None,
        length_us=length // 1_000, world_size=recorded.height,
        num_nodes=len({host for host in recorded.hosts if host}), answer=answer,
        kinds=list(KINDS),
        lanes=[_lane(recorded, matched, lane, why, origin)
               for lane, (_, why) in zip(drawn, chosen, strict=True)],
        slices=_slices(drawn, matched, place_of, origin),
        flights=_flights(drawn, matched, place_of, origin), calls=calls,
        calls_capped=capped(len(calls), len(matched.first)) if len(calls) == MAX_CALLS else None,
        path=_path_parts(path, matched, place_of, origin), path_text=path_text(path),
        clock_text=clock_text, is_clock_sure=is_sure,
        phases_text=_phases_text(recorded),
        notes=_notes(recorded), slowest=_slowest(connection, run, step, first, last),
        step_lo=first, step_hi=last, left_out=_left_out(recorded),
        folded=hosts[:MAX_FOLDED], folded_capped=capped(MAX_FOLDED, len(hosts)),
        lanes_capped=capped(len(drawn), len(wanted) or recorded.height),
    )  # fmt: skip


def read_step_of(connection: sa.Connection, run: sa.Row[Any], step: int) -> Recorded:
    """Return what is stored of a step. Raises Problem 404 where nothing is."""
    recorded = read_step(connection, run, step)
    if np.isnan(recorded.cells["step"]).all() and not len(recorded.calls):
        first = first_step(connection, run.run_id)
        remedy = f"this run has steps {first:,} to {run.step:,}" if run.step else "it has none yet"
        raise not_found(f"nothing is stored of step {step:,}", remedy, "step")
    return recorded


def sizes_of(recorded: Recorded) -> dict[str, int]:
    """Return how many ranks each group has."""
    return {name: len(group.ranks) for name, group in recorded.groups.items()}


def span_of(recorded: Recorded) -> tuple[int, int]:
    """Return the first begin of a rank, ns, and how long until the last end."""
    started, length = recorded.started_ns, recorded.cells["step"]
    is_known = (started > 0) & ~np.isnan(length)
    if not is_known.any():
        return 0, 0
    ended = started[is_known] + np.round(length[is_known] * 1e6).astype(np.int64)
    origin = int(started[is_known].min())
    return origin, int(ended.max()) - origin


# --- the answer ------------------------------------------------------------------------------


def _answer(
    connection: sa.Connection, run: sa.Row[Any], recorded: Recorded, matched: Matched, path: Path,
    usual: Usual,
) -> StepAnswer:  # fmt: skip
    findings = _findings(connection, run.run_id)
    reference = _reference(connection, run, recorded.step, findings)
    flags = np.nan_to_num(recorded.cells["flags"]).astype(np.int64)
    waited = np.bincount(matched.calls.rank, matched.idle_ns, recorded.height) / 1e6
    waited = np.where(np.isnan(recorded.cells["blocked"]), np.nan, waited)
    answer = answer_of(
        Facts(
            step=recorded.step, roles=[place.stage for place in recorded.places],
            hosts=recorded.hosts, step_ms=recorded.cells["step"],
            own_ms=recorded.cells["own_work"], blocked_ms=recorded.cells["blocked"],
            parts_ms=own_parts(recorded), waited_ms=waited, reference=reference,
            accused=frozenset(
                rank for one in findings if one.has_cost and one.holds(recorded.step)
                for rank in one.ranks
            ),
            is_first=bool((flags & STEP_FIRST).any()),
            slow_calls=_slow_calls(recorded, matched, usual),
            path_text=path_text(path),
        )
    )  # fmt: skip
    found = [
        StepEvidence(text=f"Finding: {one.what}", href=f"findings/{one.id}")
        for one in findings
        if one.holds(recorded.step)
    ][:_MAX_FINDINGS]
    if not found:
        return answer
    fields = {name: getattr(answer, name) for name in answer.__struct_fields__}
    return StepAnswer(**(fields | {"evidence": [*answer.evidence, *found]}))


def _reference(
    connection: sa.Connection, run: sa.Row[Any], step: int, findings: list[_Held]
) -> Reference:
    """Return the steps to compare with: before what is wrong began, else around the step."""
    warm = first_step(connection, run.run_id) + WARM_UP_STEPS
    onsets = [one.onset for one in findings
              if one.has_cost and one.onset - warm >= WARM_UP_STEPS
              and (one.holds(step) or step < one.onset)]  # fmt: skip
    height = max(run.world_size, 1)
    most = min(_REFERENCE_STEPS, steps_of_many(height, ()))
    if onsets:
        last = min(onsets) - 1
        first = max(warm, last - most + 1)
        text = f"steps {first:,} to {last:,}, before a finding begins at step {last + 1:,}"
    else:
        last = min(max(run.step, warm), max(step + most // 2, warm + most))
        first = max(warm, last - most + 1)
        text = f"steps {first:,} to {last:,}"
    steps = load_range(connection, run.run_id, ("step",), first, last)["step"]
    slowest = np.atleast_1d(quiet(np.nanmax, steps, 0)) if steps.size else np.zeros(0)
    if first <= step <= last and len(slowest):
        slowest[step - first] = np.nan  # not with itself
    count = max(8, min(_RANK_STEPS, _REFERENCE_CELLS // height))
    middle = min(max(step, first + count // 2), last - count // 2)
    low, high = max(first, middle - count // 2), min(last, middle + count // 2)
    planes = load_range(connection, run.run_id, _FACTS, low, high)
    if low <= step <= high:
        planes = {name: np.delete(plane, step - low, axis=1) for name, plane in planes.items()}
    parts = {
        phase: np.maximum(planes[phase] - np.nan_to_num(planes.get(f"{phase}_blocked", 0.0)), 0.0)
        for phase in PHASE_METRICS
    }
    blocked = planes["blocked"]
    return Reference(
        text=text, is_before_finding=any(one.has_cost and one.holds(step) for one in findings)
        and bool(onsets), step_ms=slowest, own_ms=planes["own_work"], parts_ms=parts,
        shared_ms=np.atleast_1d(quiet(np.nanmin, blocked, 0)) if blocked.size else np.zeros(0),
    )  # fmt: skip


def _slow_calls(recorded: Recorded, matched: Matched, usual: Usual) -> list[SlowCall]:
    """Return the transfers that took clearly longer than in the steps around, the worst first."""
    length_ms = float(np.nan_to_num(quiet(np.nanmax, recorded.cells["step"])))
    kind, kinds = kinds_of(matched)
    found = []
    for place in np.unique(kind[matched.transfer_ns >= 0]).tolist():
        one = kinds[place]
        before, count = usual.get(one, (0.0, 0))
        took = matched.transfer_ns[(kind == place) & (matched.transfer_ns >= 0)]
        slow = took[took > _SLOWER * before]
        more_ms = float((slow - before).sum()) / 1e6
        if count < LEAST_STEPS or more_ms <= _SLOWER_SHARE * length_ms:
            continue
        longest = ms_text(float(slow.max()) / 1e6)
        times = f" (the longest of {len(slow)})" if len(slow) > 1 else ""
        where = f" from rank {one.source} to rank {one.target}"
        if one.source < 0:
            group = recorded.groups.get(one.group)
            where = f" among {group.text}" if group is not None and group.text else ""
        text = (
            f"{one.operation} of {bytes_text(one.size_bytes)}{where}: {longest}{times}, "
            f"{ms_text(before / 1e6)} in the steps around"
        )
        found.append(SlowCall(text, more_ms, one.source >= 0))
    return sorted(found, key=lambda one: -one.more_ms)


class _Held(NamedTuple):
    """A finding that says since when."""

    id: int
    what: str
    onset: int
    ended: int | None
    has_cost: bool
    ranks: list[int]

    def holds(self, step: int) -> bool:
        """Return whether it is about a step."""
        return self.onset <= step and (self.ended is None or step <= self.ended)


def _findings(connection: sa.Connection, run_id: str) -> list[_Held]:
    table = tables.finding.c
    rows = connection.execute(
        sa.select(table.id, table.body).where(table.run_id == run_id).order_by(table.id)
    )
    found = []
    for row in rows:
        body = json_object(row.body)
        if body.get("onset_step") is not None:
            ended, cost = body.get("ended_step"), body.get("cost_throughput_ratio")
            what = str(body.get("what", ""))
            ranks = [int(rank) for rank in body.get("ranks", [])]
            onset = int(body["onset_step"])
            found.append(_Held(int(row.id), what, onset, ended, bool(cost), ranks))
    return found


def _slowest(
    connection: sa.Connection, run: sa.Row[Any], step: int, first: int, last: int
) -> list[SlowStep]:
    warm = first + WARM_UP_STEPS if step >= first + WARM_UP_STEPS else first
    low, high = max(warm, step - _AROUND), min(last, step + _AROUND)
    steps = load_range(connection, run.run_id, ("step",), low, high)["step"]
    if not steps.size:
        return []
    slowest = np.atleast_1d(quiet(np.nanmax, steps, 0))
    order = [place for place in np.argsort(-np.nan_to_num(slowest)).tolist()
             if not np.isnan(slowest[place]) and low + place != step]  # fmt: skip
    return [
        SlowStep(step=low + place, step_ms=round(float(slowest[place]), 3))
        for place in order[:_SLOWEST]
    ]


# --- the picture -----------------------------------------------------------------------------


def _calls(
    recorded: Recorded, matched: Matched, usual: Usual, drawn: list[RankLane], path: Path
) -> tuple[list[StepCall], dict[int, int]]:
    """Return the operations that some lane or the path has, and where each of them is."""
    ranks = np.array([lane.rank for lane in drawn], np.int64)
    mine = np.isin(matched.calls.rank, ranks)
    wanted = dict.fromkeys(int(matched.of[one.call]) for one in path.stretches if one.call >= 0)
    wanted |= dict.fromkeys(matched.of[np.flatnonzero(mine)].tolist())
    order = sorted(list(wanted)[:MAX_CALLS], key=lambda one: matched.arrived_ns[matched.first[one]])
    kind, kinds = kinds_of(matched)
    return (
        [_call(recorded, matched, usual, operation, kinds[kind[operation]]) for operation in order],
        {operation: place for place, operation in enumerate(order)},
    )


def _call(
    recorded: Recorded, matched: Matched, usual: Usual, operation: int, kind: CallKind
) -> StepCall:
    calls, first = matched.calls, int(matched.first[operation])
    group = recorded.groups.get(kind.group)
    is_p2p = calls.operations[calls.operation[first]] in P2P_OPERATIONS
    members = int(matched.num_members[operation])
    before = usual.get(kind)
    return StepCall(
        operation=kind.operation, group=kind.group,
        group_text="" if group is None else group.text,
        sequence=int(calls["sequence"][first]), size_bytes=kind.size_bytes,
        num_members=_none(members), num_recorded=int(matched.num_recorded[operation]),
        last_rank=_none(int(matched.last_rank[operation])),
        is_sure=bool(matched.late_ns[operation] > matched.sure_ns[operation]),
        late_ms=_ms(matched.late_ns[operation]), skew_ms=_ms(matched.skew_ns[operation]),
        transfer_ms=_ms(matched.transfer_ns[operation]),
        usual_ms=None if before is None else round(before[0] / 1e6, 3),
        source=_none(kind.source) if is_p2p else None,
        target=_none(kind.target) if is_p2p else None,
    )  # fmt: skip


def _none(rank: int) -> int | None:
    return rank if rank >= 0 else None


def _ms(ns: Any) -> float | None:
    return None if ns < 0 else round(float(ns) / 1e6, 3)


def _slices(
    drawn: list[RankLane], matched: Matched, place_of: dict[int, int], origin: int
) -> Slices:
    rows = [(number, one) for number, lane in enumerate(drawn) for one in lane.slices]

    def call_of(one: Slice) -> int:
        return -1 if one.call < 0 else place_of.get(int(matched.of[one.call]), -1)

    return Slices(
        lane=[number for number, _ in rows],
        kind=[KINDS.index(one.kind) for _, one in rows],
        begin_us=[(one.begin_ns - origin) // 1_000 for _, one in rows],
        end_us=[(one.end_ns - origin) // 1_000 for _, one in rows],
        call=[call_of(one) for _, one in rows],
        microbatch=[one.microbatch for _, one in rows],
    )


def _flights(
    drawn: list[RankLane], matched: Matched, place_of: dict[int, int], origin: int
) -> Flights:
    calls, ended = matched.calls, matched.ended_ns
    lanes, places = [], []
    for number, lane in enumerate(drawn):
        low, high = np.searchsorted(calls.rank, (lane.rank, lane.rank + 1)).tolist()
        known = [call for call in range(low, high) if int(matched.of[call]) in place_of]
        places += known
        lanes += [number] * len(known)
    began = np.maximum(calls["started_ns"], 0)
    is_device = np.array([_is_of_device(matched, call) for call in places], bool)
    begins = matched.arrived_ns[places] + np.where(is_device, began[places], 0)
    return Flights(
        lane=lanes,
        call=[place_of[int(matched.of[call])] for call in places],
        begin_us=((begins - origin) // 1_000).tolist(),
        end_us=((ended[places] - origin) // 1_000).tolist(),
    )


def _is_of_device(matched: Matched, call: int) -> bool:
    calls = matched.calls
    return bool(calls["device_duration_ns"][call] >= 0 and calls["started_ns"][call] >= 0)


def _lane(recorded: Recorded, matched: Matched, lane: RankLane, why: str, origin: int) -> Lane:
    rank, cells = lane.rank, recorded.cells
    place, clocks = recorded.places[rank], recorded.clocks
    began, length = int(recorded.started_ns[rank]), cells["step"][rank]
    total: dict[str, float] = {}
    for one in lane.slices:
        total[one.kind] = total.get(one.kind, 0.0) + (one.end_ns - one.begin_ns) / 1e6
    is_known = lane.state == "recorded"
    has_time = lane.state != "no data"
    roles = [other.stage for other in recorded.places]
    peers = [other for other, role in enumerate(roles) if role == place.stage and other != rank]
    ahead, band = clocks.ahead_ns[rank], clocks.band_ns[rank]
    return Lane(
        rank=rank, host=place.host, stage=place.stage if place.stage >= 0 else None, why=why,
        state=cast(Literal["recorded", "no data", "not measured"], lane.state),
        begin_us=(began - origin) // 1_000 if has_time else None,
        end_us=(began - origin + round(float(length) * 1e6)) // 1_000 if has_time else None,
        self_ms=_known(cells["own_work"][rank]),
        peers_ms=_known(quiet(np.nanmedian, cells["own_work"][peers])) if peers else None,
        data_ms=_known(cells["data"][rank]),
        waiting_ms=round(total.get("waiting", 0) + total.get("bubble", 0), 3) if is_known else None,
        communication_ms=round(total.get("communication", 0), 3) if is_known else None,
        clock_ahead_ms=_known(ahead / 1e6), clock_band_ms=_known(band / 1e6),
    )  # fmt: skip


def _known(value: Any) -> float | None:
    found = known(value)
    return None if found is None or not np.isfinite(found) else round(found, 3)


def _path_parts(
    path: Path, matched: Matched, place_of: dict[int, int], origin: int
) -> list[PathPart]:
    return [
        PathPart(
            rank=one.rank, begin_us=(one.begin_ns - origin) // 1_000,
            end_us=(one.end_ns - origin) // 1_000, is_sure=one.is_sure,
            call=-1 if one.call < 0 else place_of.get(int(matched.of[one.call]), -1),
        )
        for one in path.stretches
    ]  # fmt: skip


def _phases_text(recorded: Recorded) -> str:
    if any(place.is_piped for place in recorded.places):
        return _PIPED_TEXT
    if any(place.stage >= 0 for place in recorded.places):
        return _TURNS_TEXT
    if np.nanmax(np.nan_to_num(recorded.cells["microbatches"]), initial=0) > 1:
        return f"{_ORDER_TEXT} Each microbatch has an equal share of them."
    return _ORDER_TEXT


def _notes(recorded: Recorded) -> list[str]:
    """Return what is not known of the step."""
    found = []
    flags = np.nan_to_num(recorded.cells["flags"]).astype(np.int64)
    thinned = int(((flags & STEP_THINNED) != 0).sum())
    if thinned:
        found.append(
            f"Thinned on {plural(thinned, 'rank')}: its operations were counted, not recorded; "
            "waits stand after the backward pass, and for whom is not known."
        )
    counted = int(np.nansum(np.nan_to_num(recorded.cells["num_collectives"])))
    if counted and not thinned and not len(recorded.calls):
        found.append(
            f"None of its {counted:,} operations is stored: removed by retention, lost or not "
            "here yet. Waits stand after the backward pass."
        )
    missing = int(np.isnan(recorded.cells["step"]).sum())
    if missing:
        found.append(
            f"{recorded.height - missing:,} of {recorded.height:,} ranks have a record of it."
        )
    devices = [place.is_on_device for place in recorded.places]
    if any(devices) and np.isnan(recorded.cells["blocked"][devices]).any():
        found.append(
            "Hosts only enqueue here; what devices did is measured in some steps, and in this one "
            "not on all ranks."
        )
    return found


def _left_out(recorded: Recorded) -> list[LeftOut]:
    found = []
    if recorded.num_again:
        what = "operations of an attempt whose step a later one ran again"
        found.append(LeftOut(what=what, count=recorded.num_again))
    if recorded.is_cut:
        found.append(LeftOut(what="operations of some ranks: the step has too many", count=None))
    return found
