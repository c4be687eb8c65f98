"""What each rank did when, as slices that fill its step without a gap or an overlap.

A rank says when it made each call, how long until the end and how long it was blocked: so waits are
where they were. Of its phases it says how long they took in sum. What is left between waits is its
self time: in a pipeline sends and receives say which of it was forward and backward, elsewhere
phases fill it in their usual order. All slices together are the step, those of waits the
blocked time, as the rank reported them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import numpy as np

from rankscope.wire.schema import P2P_OPERATIONS
from rankscope_server.api.timeline.calls import Matched
from rankscope_server.api.timeline.reading import Recorded
from rankscope_server.api.timeline.schema import SliceKind

Array = np.ndarray[Any, np.dtype[Any]]
KINDS: tuple[SliceKind, ...] = get_args(SliceKind)
# Between two steps a script logs and asks for the next batch.
_ORDER: tuple[SliceKind, ...] = (
    "other", "data", "forward", "backward", "optimizer", "checkpoint", "evaluation",
)  # fmt: skip
_REPEATED = ("data", "forward", "backward")  # once for each microbatch
_MAX_REPEATED = 64
_LEAST_REST = 0.01  # of a step: less of a wait that no call says of is how exact times are
_MIN_NS = 1_000


class Slice(NamedTuple):
    """A stretch of one rank, ns on the one clock."""

    kind: SliceKind
    begin_ns: int
    end_ns: int
    call: int = -1  # a place in the calls
    microbatch: int = -1


class Part(NamedTuple):
    """Self time of one kind."""

    kind: SliceKind
    length_ns: float
    microbatch: int = -1


@dataclass(slots=True)
class Lane:
    """One rank's step."""

    rank: int
    slices: list[Slice] = field(default_factory=list)
    state: str = "recorded"


def own_parts(recorded: Recorded) -> dict[str, Array]:
    """Return by phase what each rank did itself in it, ms by rank; NaN not known."""
    cells = recorded.cells
    blocked = {name.removesuffix("_blocked"): cells[name] for name in cells if "_blocked" in name}
    return {
        phase: np.maximum(cells[phase] - np.nan_to_num(blocked.get(phase, 0.0)), 0.0)
        for phase in _ORDER
    }


def lane_of(recorded: Recorded, matched: Matched, parts: dict[str, Array], rank: int) -> Lane:
    """Return the slices of one rank."""
    cells, calls = recorded.cells, matched.calls
    mine = np.arange(*np.searchsorted(calls.rank, (rank, rank + 1)))
    length_ns = float(cells["step"][rank]) * 1e6
    began = int(recorded.started_ns[rank])
    if np.isnan(length_ns) or not began:
        return Lane(rank, state="no data")
    ended = began + round(length_ns)
    own_ms: dict[str, float] = {phase: float(parts[phase][rank]) for phase in _ORDER}
    if np.isnan(cells["blocked"][rank]) or any(np.isnan(list(own_ms.values()))):
        return Lane(rank, [Slice("unknown", began, ended)], "not measured")
    waits = waits_of(recorded, matched, mine, began, ended - _tail_ns(recorded, rank, own_ms))
    located = sum(wait.end_ns - wait.begin_ns for wait in waits)
    rest = float(cells["blocked"][rank]) * 1e6 - located
    gaps = list(_gaps(waits, began, ended))
    lane = Lane(rank, waits)
    if recorded.places[rank].is_piped and _exchanges(matched, mine):
        lane.slices += _piped(recorded, matched, mine, gaps, own_ms, rest)
    else:
        rest = rest if rest > _LEAST_REST * length_ns else 0.0
        lane.slices += fill(gaps, _in_order(recorded, rank, own_ms, rest))
    lane.slices.sort(key=lambda one: one.begin_ns)
    return lane


def _tail_ns(recorded: Recorded, rank: int, own_ms: dict[str, float]) -> int:
    """Return how long the optimizer's time after the last wait is.

    Ends that callbacks report may be later than the wait was over; no rank waits in the optimizer.
    """
    late = recorded.cells["optimizer_blocked"][rank] + own_ms["checkpoint"] + own_ms["evaluation"]
    return round(1e6 * own_ms["optimizer"]) if late == 0 else 0


def waits_of(
    recorded: Recorded, matched: Matched, mine: Array, began: int, ended: int
) -> list[Slice]:
    """Return the slices in which a rank was blocked for one of its calls, by time."""
    calls = matched.calls
    is_p2p = np.array([word in P2P_OPERATIONS for word in calls.operations], bool)
    found: list[Slice] = []
    free = began
    waited = calls.waited_ns[mine]
    ends = matched.ended_ns[mine]
    for place in np.lexsort((ends, ends - waited)).tolist():
        if not waited[place]:
            continue
        call = int(mine[place])
        end = min(int(ends[place]), ended)
        begin = max(end - int(waited[place]), free)
        if end - begin < _MIN_NS:
            continue
        turn = begin
        if matched.is_split[call]:
            comes = end - int(waited[place]) + int(matched.idle_ns[call])
            turn = min(max(comes, begin), end)
            is_other_stage = is_p2p[calls.operation[call]] and _other_stage(recorded, calls, call)
            if turn > begin:
                found.append(Slice("bubble" if is_other_stage else "waiting", begin, turn, call))
            if end > turn:
                found.append(Slice("communication", turn, end, call))
        else:
            found.append(Slice("blocked", begin, end, call))
        free = end
    return found


def _other_stage(recorded: Recorded, calls: Any, call: int) -> bool:
    peer, rank = int(calls["peer_rank"][call]), int(calls.rank[call])
    places = recorded.places
    return 0 <= peer < len(places) and places[peer].stage != places[rank].stage


def _gaps(waits: Sequence[Slice], began: int, ended: int) -> Iterator[tuple[int, int]]:
    """Yield what is between waits."""
    at = began
    for wait in waits:
        if wait.begin_ns > at:
            yield at, wait.begin_ns
        at = wait.end_ns
    if ended > at:
        yield at, ended


def _in_order(
    recorded: Recorded, rank: int, own_ms: dict[str, float], rest_ns: float
) -> list[Part]:
    """Return the self time of a rank in the usual order, of each microbatch an equal share.

    A wait that no call says of stands after the backward pass.
    """
    after = [Part(kind, 1e6 * own_ms[kind]) for kind in _ORDER[4:]]
    blocked = [Part("blocked", rest_ns)] if rest_ns > 0 else []
    if recorded.places[rank].stage >= 0:  # of several stages: forward and backward take turns
        work = sum(own_ms[kind] for kind in ("forward", "backward", "other"))
        return [Part("data", 1e6 * own_ms["data"]), Part("work", 1e6 * work), *blocked, *after]
    count = np.nan_to_num(recorded.cells["microbatches"][rank])
    times = int(min(max(count, 1), _MAX_REPEATED))
    repeated = [
        Part(kind, 1e6 * own_ms[kind] / times, turn if times > 1 else -1)
        for turn in range(times)
        for kind in _ORDER
        if kind in _REPEATED
    ]
    before = [Part("other", 1e6 * own_ms["other"])]
    return [*before, *repeated, *blocked, *after]


def fill(gaps: Sequence[tuple[int, int]], parts: Sequence[Part]) -> list[Slice]:
    """Fill gaps with parts in order; if parts are longer or shorter in sum, all of them alike."""
    room = sum(end - begin for begin, end in gaps)
    total = sum(part.length_ns for part in parts)
    if room <= 0:
        return []
    if total <= 0:
        return [Slice("work", begin, end) for begin, end in gaps]
    lengths = np.cumsum([part.length_ns for part in parts]) * (room / total)
    bounds = [0, *np.round(lengths).astype(np.int64).tolist()]  # in own time, without the waits
    found, place, own = [], 0, 0
    for begin, end in gaps:
        until = own + end - begin
        while place < len(parts):
            low, high = max(bounds[place], own), min(bounds[place + 1], until)
            if high > low:
                kind, _, microbatch = parts[place]
                shift = begin - own
                found.append(Slice(kind, low + shift, high + shift, -1, microbatch))
            if bounds[place + 1] > until:
                break
            place += 1
        own = until
    return found


# --- pipelines -------------------------------------------------------------------------------


class _Mark(NamedTuple):
    """A point of a rank of a pipeline: a microbatch came in or went out."""

    at_ns: int
    is_send: bool
    is_ahead: bool  # to or from the next stage
    microbatch: int


def _exchanges(matched: Matched, mine: Array) -> bool:
    calls = matched.calls
    words = {calls.operations[code] for code in np.unique(calls.operation[mine]).tolist()}
    return bool(words & P2P_OPERATIONS)


def _marks(recorded: Recorded, matched: Matched, mine: Array) -> list[_Mark]:
    calls, places = matched.calls, recorded.places
    turns: dict[tuple[bool, bool], int] = {}
    found = []
    for call in mine.tolist():
        word = calls.operations[calls.operation[call]]
        peer, rank = int(calls["peer_rank"][call]), int(calls.rank[call])
        if word not in P2P_OPERATIONS or not 0 <= peer < len(places):
            continue
        is_send, is_ahead = word == "send", places[peer].stage > places[rank].stage
        turn = turns[is_send, is_ahead] = turns.get((is_send, is_ahead), -1) + 1
        at = matched.arrived_ns[call] if is_send else matched.ended_ns[call]
        found.append(_Mark(int(at), is_send, is_ahead, turn))
    # What goes out at the same time goes before what comes in.
    return sorted(found, key=lambda mark: (mark.at_ns, not mark.is_send))


def _piped(
    recorded: Recorded, matched: Matched, mine: Array, gaps: list[tuple[int, int]],
    own_ms: dict[str, float], rest_ns: float,
) -> list[Slice]:  # fmt: skip
    """Return the self time of a rank of a pipeline: what is between two marks has one kind."""
    marks = _marks(recorded, matched, mine)
    first_ns = 1e6 * (own_ms["data"] + own_ms["other"] / 2)
    last_ns = 1e6 * (own_ms["optimizer"] + own_ms["checkpoint"] + own_ms["evaluation"])
    found: list[Slice] = []
    begin, end = gaps[0][0], gaps[-1][1]
    head = [Part("data", 1e6 * own_ms["data"]), Part("other", first_ns - 1e6 * own_ms["data"])]
    tail = [Part(kind, 1e6 * own_ms[kind]) for kind in _ORDER[4:]]
    if rest_ns > _LEAST_REST * (gaps[-1][1] - gaps[0][0]):
        tail.insert(0, Part("blocked", rest_ns))
        last_ns += rest_ns
    head_end = min(begin + int(first_ns), gaps[0][1], marks[0].at_ns)
    tail_begin = max(end - int(last_ns), gaps[-1][0], head_end)
    found += fill([(begin, head_end)], head) if head_end > begin else []
    found += fill([(tail_begin, end)], tail) if end > tail_begin and last_ns > 0 else []
    tail_begin = tail_begin if last_ns > 0 else end
    cuts = np.array([mark.at_ns for mark in marks])
    for gap_begin, gap_end in gaps:
        low, high = max(gap_begin, head_end), min(gap_end, tail_begin)
        inner = cuts[(cuts > low) & (cuts < high)].tolist()
        edges = [low, *sorted(set(inner)), high]
        for left, right in itertools.pairwise(edges):
            if right > left:
                found += _between(marks, left, right, own_ms)
    return found


def _between(
    marks: Sequence[_Mark], left: int, right: int, own_ms: dict[str, float]
) -> list[Slice]:
    """Return what a rank did between two marks or waits, by what came in and what goes out."""
    before = [mark for mark in marks if mark.at_ns <= left]
    goes = next(
        (mark for mark in marks if mark.is_send and right <= mark.at_ns <= right + _MIN_NS), None
    )
    last = before[-1] if before else None
    received = next((mark for mark in reversed(before) if not mark.is_send), None)
    if goes is None:
        if last is None:
            return [Slice("forward", left, right, -1, 0)]
        # Work that sends nothing, as the weights' half of a backward, or what a wait cut off.
        is_forward = last.is_ahead if last.is_send else not last.is_ahead
        return [Slice("forward" if is_forward else "backward", left, right, -1, last.microbatch)]
    if goes.is_ahead:
        return [Slice("forward", left, right, -1, goes.microbatch)]
    is_turn = last is not None and last is received and not last.is_ahead
    if not is_turn:
        return [Slice("backward", left, right, -1, goes.microbatch)]
    # The last stage: what came in goes forward and back without a mark between.
    total = own_ms["forward"] + own_ms["backward"]
    share = own_ms["forward"] / total if total > 0 else 0.5
    middle = left + round((right - left) * share)
    return fill(
        [(left, right)],
        [
            Part("forward", middle - left, last.microbatch if last else -1),
            Part("backward", right - middle, goes.microbatch),
        ],
    )
