"""How far a rank is in each of its groups, counted from the slots that were read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rankscope.wire import schema

MAX_GROUPS = 256  # in one RankState: the ones last used
MAX_PEERS = 64  # of one group in one RankState
_SENT, _SENT_ENDED, _RECEIVED, _RECEIVED_ENDED = range(4)  # places in the counts of a peer
_PROBE = schema.ISSUED_BY.index("probe")
_BY_FUTURE = tuple(schema.ENDED_BY.index(name) for name in ("probe", "future"))
_NO_SOURCE = schema.ISSUED_BY.index("")
_ENDLESS_AFTER = 256  # operations of a group without one known end: its backend reports none
_ENDLESS_STEPS = 8  # with such calls open: no step ends with one, so nothing reports their ends


@dataclass
class _Standing:
    issued: int = 0
    ended: int = 0
    operation: int = 0
    size_bytes: int = 0
    arrived_ns: int = 0  # monotonic
    call_site: int = 0
    dtype: int = 0
    reduce_op: int = 0
    root: int = -1
    is_seen: bool = True  # the last one, by a source
    reported: set[int] = field(default_factory=set)  # operations whose ends a future reports
    peers: dict[int, list[int]] = field(default_factory=dict)
    p2p_issued: int = 0  # highest sequence with any one peer
    p2p_has_end: bool = False


class GroupTracker:
    """Follows the sequences of all groups of one rank."""

    def __init__(self) -> None:
        self._groups: dict[int, _Standing] = {}
        self._open: Any = None  # slots that are open now
        self.oldest_open_ns = 0  # monotonic arrival of the oldest open operation, 0 none
        self.oldest_inside_ns = 0  # the same, for a call that has not come back

    def update(self, slots: Any) -> None:
        """Take in slots, new ones and again ones that were open."""
        if len(slots) == 0:
            return
        p2p = (slots["flags"] & schema.FLAG_P2P) != 0
        for group_id in np.unique(slots["group_id"]).tolist():
            standing = self._groups.setdefault(group_id, _Standing())
            of_group = slots["group_id"] == group_id
            collectives = slots[of_group & ~p2p]
            if len(collectives):
                self._take(standing, collectives)
            exchanges = slots[of_group & p2p]
            if len(exchanges):
                highest = int(exchanges["sequence"].max())
                standing.p2p_issued = max(standing.p2p_issued, highest)
                standing.p2p_has_end |= bool((exchanges["state"] >= schema.ENDED).any())
                self._count(standing, exchanges)

    @staticmethod
    def _take(standing: _Standing, slots: Any) -> None:
        last = slots[int(np.argmax(slots["sequence"]))]
        if int(last["sequence"]) >= standing.issued:
            standing.issued = int(last["sequence"])
            standing.operation = int(last["operation"])
            size_bytes = max(int(last["input_bytes"]), int(last["output_bytes"]))
            standing.size_bytes = min(size_bytes, 1 << 61)
            standing.arrived_ns = min(int(last["arrived_ns"]), 1 << 61)
            standing.call_site = int(last["call_site"])
            standing.dtype, standing.reduce_op = int(last["dtype"]), int(last["reduce_op"])
            standing.root = int(last["peer_rank"])
            standing.is_seen = bool(_is_seen(last))
        ended = slots["sequence"][slots["state"] >= schema.ENDED]
        if len(ended):
            standing.ended = max(standing.ended, int(ended.max()))
        by_future = np.isin(slots["ended_by"], _BY_FUTURE)
        standing.reported.update(slots["operation"][by_future].tolist())

    @staticmethod
    def _count(standing: _Standing, slots: Any) -> None:
        """Raise the counts of each peer; a receive from any source shows its peer at its end."""
        is_send = slots["operation"] == schema.OPERATIONS.index("send")
        has_ended = slots["state"] >= schema.ENDED
        for peer in np.unique(slots["peer_rank"]).tolist():
            if peer < 0 or (peer not in standing.peers and len(standing.peers) >= MAX_PEERS):
                continue
            counts = standing.peers.setdefault(peer, [0, 0, 0, 0])
            of_peer = slots["peer_rank"] == peer
            sends, receives = of_peer & is_send, of_peer & ~is_send
            for place, chosen in (
                (_SENT, sends),
                (_SENT_ENDED, sends & has_ended),
                (_RECEIVED, receives),
                (_RECEIVED_ENDED, receives & has_ended),
            ):
                if chosen.any():
                    highest = int(slots["sequence"][chosen].max())
                    counts[place] = max(counts[place], min(highest, 1 << 61))

    def set_open(self, slots: Any) -> None:
        """Replace what is open now."""
        self._open = slots[slots["state"] < schema.ENDED]
        inside = self._open[self._open["state"] == schema.ISSUED]
        # a send that has returned may stay open because no caller waits for it: that is no hang
        is_send = self._open["operation"] == schema.OPERATIONS.index("send")
        waits = self._open[~is_send | (self._open["state"] == schema.ISSUED)]
        self.oldest_open_ns = int(waits["arrived_ns"].min()) if len(waits) else 0
        self.oldest_inside_ns = int(inside["arrived_ns"].min()) if len(inside) else 0

    def endless_groups(self) -> tuple[list[int], list[int]]:
        """Return the groups whose operations never report their end: (collectives, p2p)."""
        groups = self._groups.items()
        return (
            [key for key, group in groups if group.issued > _ENDLESS_AFTER and not group.ended],
            [
                key
                for key, group in groups
                if group.p2p_issued > _ENDLESS_AFTER and not group.p2p_has_end
            ],
        )

    def states(
        self,
        groups: Mapping[int, str],
        call_sites: Mapping[int, str],
        to_wall: Callable[[int], int],
    ) -> list[schema.GroupState]:
        """Return the standing in each group, the ones last used first where there are many."""
        p2p, oldest = self._oldest_p2p(), self._oldest_collectives()
        before = {group_id: int(slot["sequence"]) - 1 for group_id, slot in oldest.items()}
        latest = sorted(self._groups.items(), key=lambda item: item[1].arrived_ns, reverse=True)[
            :MAX_GROUPS
        ]
        return [
            schema.GroupState(
                group=groups.get(group_id) or f"group {group_id}",
                issued=group.issued,
                ended=min(group.ended, before.get(group_id, group.ended)),
                operation=_called(group.operation, group.is_seen) if group.issued else "",
                size_bytes=group.size_bytes,
                issued_ns=to_wall(group.arrived_ns) if group.arrived_ns else 0,
                call_site=call_sites.get(group.call_site, ""),
                dtype=_dtype(group.dtype, group.is_seen) if group.issued else "",
                reduce_op=_word(schema.REDUCE_OPS, group.reduce_op),
                root=max(group.root, -1),
                peers=[_peer(peer, counts) for peer, counts in group.peers.items()],
                **self._open_fields(oldest.get(group_id), call_sites, to_wall),
                **self._p2p_fields(p2p.get(group_id), to_wall),
            )
            for group_id, group in latest
        ]

    def _oldest_p2p(self) -> dict[int, Any]:
        """Return the oldest open point-to-point operation by group, a receive before a send.

        A send may stay open because no caller waits; one in a receive is stuck.
        """
        if self._open is None or len(self._open) == 0:
            return {}
        slots = self._open[(self._open["flags"] & schema.FLAG_P2P) != 0]
        is_send = slots["operation"] == schema.OPERATIONS.index("send")
        slots = slots[np.lexsort((slots["arrived_ns"], is_send))]
        distinct, first = np.unique(slots["group_id"], return_index=True)
        pairs = zip(distinct.tolist(), first.tolist(), strict=True)
        return {group_id: slots[place] for group_id, place in pairs}

    def _oldest_collectives(self) -> dict[int, Any]:
        """Return the first collective that is open, by group.

        One that stays open while later ones end has ended all the same: no caller waited. Not
        so where futures report the ends of such calls: gloo's threads end them in any order.
        """
        if self._open is None or len(self._open) == 0:
            return {}
        slots = self._open[(self._open["flags"] & schema.FLAG_P2P) == 0]
        groups = [self._groups[group] for group in slots["group_id"].tolist()]
        is_last = slots["sequence"] > np.array([group.ended for group in groups], np.int64)
        is_reported = [
            operation in group.reported
            for group, operation in zip(groups, slots["operation"].tolist(), strict=True)
        ]
        would_report = np.array(is_reported, bool) & ((slots["flags"] & schema.FLAG_THINNED) == 0)
        # the sources in Python ask for a future only where the caller itself does not wait
        is_asked = (slots["flags"] & (schema.FLAG_ASYNC | schema.FLAG_BY_ENGINE)) != 0
        would_report &= is_asked | (slots["issued_by"] == _PROBE)
        would_report &= ~_is_endless(slots, would_report)
        slots = slots[is_last | would_report]
        slots = slots[np.argsort(slots["sequence"], kind="stable")]
        distinct, first = np.unique(slots["group_id"], return_index=True)
        pairs = zip(distinct.tolist(), first.tolist(), strict=True)
        return {group_id: slots[place] for group_id, place in pairs}

    @staticmethod
    def _open_fields(
        slot: Any, call_sites: Mapping[int, str], to_wall: Callable[[int], int]
    ) -> dict[str, Any]:
        if slot is None:
            return {}
        size_bytes = max(int(slot["input_bytes"]), int(slot["output_bytes"]))
        return {
            "open_sequence": min(int(slot["sequence"]), 1 << 61),
            "open_operation": _called(int(slot["operation"]), bool(_is_seen(slot))),
            "open_bytes": min(size_bytes, 1 << 61),
            "open_ns": to_wall(min(int(slot["arrived_ns"]), 1 << 61)),
            "open_call_site": call_sites.get(int(slot["call_site"]), ""),
            "open_dtype": _dtype(int(slot["dtype"]), bool(_is_seen(slot))),
            "open_reduce_op": _word(schema.REDUCE_OPS, int(slot["reduce_op"])),
            "open_root": max(int(slot["peer_rank"]), -1),
        }

    @staticmethod
    def _p2p_fields(slot: Any, to_wall: Callable[[int], int]) -> dict[str, Any]:
        if slot is None:
            return {}
        return {
            "p2p_operation": _operation(int(slot["operation"])),
            "p2p_peer": max(int(slot["peer_rank"]), -1),
            "p2p_issued_ns": to_wall(min(int(slot["arrived_ns"]), 1 << 61)),
            "p2p_sequence": min(int(slot["sequence"]), 1 << 61),
        }


def _peer(peer: int, counts: list[int]) -> schema.PeerState:
    return schema.PeerState(
        peer=peer,
        sent=counts[_SENT],
        sent_ended=counts[_SENT_ENDED],
        received=counts[_RECEIVED],
        received_ended=counts[_RECEIVED_ENDED],
    )


def _word(words: tuple[str, ...], index: int) -> str:
    return words[index] if index < len(words) else words[0]


def _operation(index: int) -> str:
    return _word(schema.OPERATIONS, index)


def _is_endless(slots: Any, is_reported: Any) -> Any:
    """Return which slots are of a kind that stays open for ever, by group and operation.

    A group of gloo and NCCL has ends of its operations on the host, and none of those on a device.
    """
    endless = np.zeros(len(slots), bool)
    reported = slots[is_reported]
    for group_id, operation in set(zip(reported["group_id"], reported["operation"], strict=True)):
        alike = is_reported & (slots["group_id"] == group_id) & (slots["operation"] == operation)
        if len(np.unique(slots["step"][alike])) > _ENDLESS_STEPS:
            endless |= alike
    return endless


def _is_seen(slot: Any) -> Any:
    """Return whether a source saw the call; else only that there was one is known."""
    return (slot["issued_by"] != _NO_SOURCE) | ((slot["flags"] & schema.FLAG_THINNED) == 0)


def _called(operation: int, is_seen: bool) -> str:
    return _operation(operation) if is_seen or operation else "collective"


def _dtype(dtype: int, is_seen: bool) -> str:
    return _word(schema.DTYPES, dtype) if is_seen else ""  # then calls are not compared
