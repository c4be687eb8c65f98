"""Where a rank stands: what is open, what it was, and how far it is with each peer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rankscope.files import ring
from rankscope.node.ranks.states import GroupTracker
from rankscope.wire import schema

DTYPE = np.dtype([(name, code) for name, code, *_ in ring.COLLECTIVE_FIELDS])


def slots(*rows: dict[str, Any]) -> Any:
    found = np.zeros(len(rows), DTYPE)
    found["peer_rank"] = -1
    for place, row in enumerate(rows):
        for name, value in ({"arrived_ns": 1000 + place, "group_id": 1} | row).items():
            found[name][place] = value
    return found


def number(words: tuple[str, ...], word: str) -> int:
    return words.index(word)


def states(tracker: GroupTracker) -> list[schema.GroupState]:
    return tracker.states({1: "dp"}, {3: "train.py:8 step"}, lambda ns: ns + 10**9)


def test_the_oldest_open_collective_is_told_with_all_it_is() -> None:
    tracker = GroupTracker()
    rows = slots(
        {"sequence": 1, "state": schema.RETURNED},  # nobody waited for it: it has ended
        {"sequence": 2, "state": schema.ENDED},
        {"sequence": 3, "state": schema.ISSUED, "operation": number(schema.OPERATIONS, "broadcast"),
         "dtype": number(schema.DTYPES, "int64"), "peer_rank": 5, "input_bytes": 64,
         "call_site": 3},
        {"sequence": 4, "state": schema.ISSUED, "operation": number(schema.OPERATIONS,
         "all_reduce"), "reduce_op": number(schema.REDUCE_OPS, "max"), "output_bytes": 8,
         "dtype": number(schema.DTYPES, "float32")},
    )  # fmt: skip
    tracker.update(rows)
    tracker.set_open(rows)
    (group,) = states(tracker)
    assert (group.issued, group.ended, group.operation) == (4, 2, "all_reduce")
    assert (group.dtype, group.reduce_op, group.root) == ("float32", "max", -1)
    assert (group.open_sequence, group.open_operation, group.open_bytes) == (3, "broadcast", 64)
    assert (group.open_dtype, group.open_root) == ("int64", 5)
    assert group.open_call_site == "train.py:8 step"
    assert group.open_ns == 1002 + 10**9


@pytest.mark.parametrize(
    ("issued_by", "ended_by", "flags", "is_open"),
    [
        ("probe", "probe", 0, True),
        ("kernel", "future", schema.FLAG_BY_ENGINE, True),
        ("official hook", "future", schema.FLAG_ASYNC, True),
        ("kernel", "future", 0, False),  # the caller waits for it, so no future was asked
        ("kernel", "wait", schema.FLAG_ASYNC, False),  # this backend has no futures
        ("probe", "probe", schema.FLAG_THINNED, False),
        ("kernel", "future", schema.FLAG_ASYNC | schema.FLAG_THINNED, False),
    ],
)
def test_what_stays_open_while_later_ones_end_is_told_where_ends_are_seen(
    issued_by: str, ended_by: str, flags: int, is_open: bool
) -> None:
    """gloo's two threads end operations in any order: a mismatched one hangs alone."""
    source = {"issued_by": number(schema.ISSUED_BY, issued_by)}
    told = {"state": schema.ENDED, "ended_by": number(schema.ENDED_BY, ended_by)} | source
    tracker = GroupTracker()
    rows = slots(
        {"sequence": 1} | told,
        {"sequence": 2, "state": schema.RETURNED, "flags": flags} | source,
        {"sequence": 3} | told,
    )
    tracker.update(rows)
    tracker.set_open(rows)
    (group,) = states(tracker)
    known = (3, 1, 2) if is_open else (3, 3, 0)
    assert (group.issued, group.ended, group.open_sequence) == known


def test_what_no_end_is_ever_told_of_hides_no_later_hang() -> None:
    """A group of gloo and NCCL: futures tell the ends on the host, nothing those on a device."""
    kernel = {"issued_by": number(schema.ISSUED_BY, "kernel"), "flags": schema.FLAG_ASYNC}
    told = {"state": schema.ENDED, "ended_by": number(schema.ENDED_BY, "future")} | kernel
    on_device = {"state": schema.RETURNED} | kernel

    def open_sequence(num_steps: int) -> int:
        tracker = GroupTracker()
        devices = [{"sequence": 1 + step, "step": step} | on_device for step in range(num_steps)]
        rows = slots(
            *devices, {"sequence": num_steps + 1} | told, {"sequence": num_steps + 2} | on_device
        )
        tracker.update(rows)
        tracker.set_open(rows)
        (group,) = states(tracker)
        return group.open_sequence

    assert open_sequence(2) == 1  # perhaps a call that hangs alone
    assert open_sequence(20) == 22


def test_nothing_open_is_said_as_nothing() -> None:
    tracker = GroupTracker()
    rows = slots({"sequence": 1, "state": schema.ENDED})
    tracker.update(rows)
    tracker.set_open(rows)
    (group,) = states(tracker)
    assert (group.open_sequence, group.open_operation, group.peers) == (0, "", [])


def test_exchanges_are_counted_for_each_peer_and_direction() -> None:
    tracker = GroupTracker()
    send, recv = (number(schema.OPERATIONS, word) for word in ("send", "recv"))
    p2p = {"flags": schema.FLAG_P2P}
    rows = slots(
        {"sequence": 1, "operation": send, "peer_rank": 2, "state": schema.ENDED, **p2p},
        {"sequence": 2, "operation": send, "peer_rank": 2, "state": schema.RETURNED, **p2p},
        {"sequence": 1, "operation": recv, "peer_rank": 0, "state": schema.ISSUED, **p2p},
    )
    tracker.update(rows[:2])
    tracker.update(rows)
    tracker.set_open(rows)
    (group,) = states(tracker)
    assert sorted(group.peers, key=lambda peer: peer.peer) == [
        schema.PeerState(peer=0, received=1),
        schema.PeerState(peer=2, sent=2, sent_ended=1),
    ]
    assert (group.p2p_operation, group.p2p_peer, group.p2p_sequence) == ("recv", 0, 1)
    assert (group.issued, group.open_sequence) == (0, 0)


def test_what_no_source_saw_has_a_number_and_is_not_compared() -> None:
    tracker = GroupTracker()
    rows = slots(
        {"sequence": 7, "state": schema.ISSUED, "flags": schema.FLAG_THINNED},
        {"sequence": 3, "state": schema.ISSUED, "flags": schema.FLAG_THINNED, "group_id": 2,
         "operation": number(schema.OPERATIONS, "barrier")},
    )  # fmt: skip
    tracker.update(rows)
    tracker.set_open(rows)
    groups = {group.group: group for group in tracker.states({1: "dp", 2: "tp"}, {}, int)}
    assert (groups["dp"].issued, groups["dp"].operation, groups["dp"].dtype) == (
        7,
        "collective",
        "",
    )
    assert groups["dp"].open_operation == "collective"
    assert groups["dp"].open_dtype == ""
    assert (groups["tp"].operation, groups["tp"].dtype) == ("barrier", "")
