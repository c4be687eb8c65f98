"""Where the members of each group are, and what the operation of one of them lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from msgspec import structs

from rankscope.wire.schema import GroupState, PeerState
from rankscope_server.diagnose.window import Window

Lack: TypeAlias = Literal["not entered", "behind", "sends nothing", "takes nothing", ""]
Key: TypeAlias = tuple[object, ...]
_UNKNOWN_END_AFTER = 256  # operations without one known end: the backend reports none


@dataclass(frozen=True, slots=True)
class OpenOperation:
    """An operation that one or more ranks are in, and the ranks that it lacks."""

    key: Key  # the same for all who are in this operation
    group: str
    members: tuple[int, ...]
    name: str
    sequence: int  # 0: point to point
    size_bytes: int
    lacks: tuple[int, ...]
    lack: Lack
    # What was issued and not waited for stays open while its rank continues: weak evidence.
    is_weak: bool = False
    # Another rank has ended it: what keeps it open is the rank that is still in it.
    is_done_elsewhere: bool = False
    # A device that reports no ends: it may have ended, and so may all before it.
    end_is_unknown: bool = False


class Positions:
    """Where all ranks said that they are; each operation is worked out once."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._heard = set(window.states) | set(window.ended)
        self._groups: dict[tuple[str, int], _Standing | None] = {}
        self._known: dict[Key, OpenOperation | None] = {}

    @cached_property
    def _states(self) -> dict[tuple[int, str], GroupState]:
        return {
            (rank, group.group): group
            for rank, state in self._window.states.items()
            for group in state.groups
        }

    @cached_property
    def _by_name(self) -> dict[str, tuple[int, ...]]:
        return {name: ranks for (_, name), ranks in self._window.groups.items()}

    def runs_on_device(self, rank: int) -> bool:
        """Return whether what a rank has entered may still wait for its device."""
        return self._window.runs_on_device(rank)

    def collective(self, rank: int, group: GroupState) -> tuple[OpenOperation, int] | None:
        """Return the first collective of a group that this rank has not ended, and since when."""
        if group.issued <= group.ended:
            return None
        end_is_unknown = not self._reports_ends(rank, group)
        has_ends = not end_is_unknown and (group.ended > 0 or group.issued <= _UNKNOWN_END_AFTER)
        members = self._members(rank, group.group)
        if has_ends and group.open_sequence > group.ended:
            sequence, since_ns = group.open_sequence, group.open_ns
            name, size_bytes = group.open_operation, group.open_bytes
        else:
            sequence = group.ended + 1 if has_ends else group.issued
            since_ns, name, size_bytes = group.issued_ns, group.operation, group.size_bytes
        # By identity: members are one tuple for the whole group, and long.
        key = (group.group, id(members), sequence, group.ended, end_is_unknown)
        if key not in self._known:
            worked_out = self._work_out(rank, group, members, sequence, name, size_bytes, has_ends)
            if worked_out is not None and end_is_unknown:
                worked_out = replace(worked_out, end_is_unknown=True)
            self._known[key] = worked_out
        operation = self._known[key]
        return None if operation is None else (operation, since_ns)

    def _reports_ends(self, rank: int, group: GroupState) -> bool:
        """Return whether no end of a rank in a group means that it has ended none."""
        return bool(group.ended or group.ends_are_known) or not self.runs_on_device(rank)

    def exchange(self, rank: int, group: GroupState) -> tuple[OpenOperation, int] | None:
        """Return the oldest open send or receive of a group, and since when."""
        on_device = self.runs_on_device(rank)
        end_is_unknown = on_device and not (
            group.ends_are_known or any(_has_end(counts) for counts in group.peers)
        )
        if end_is_unknown:
            group = self._not_come(rank, group)
        peer = group.p2p_peer
        if not group.p2p_operation or peer < 0 or peer not in self._heard:
            return None
        is_send = group.p2p_operation == "send"
        if self._is_unclear(peer, group):
            return None
        is_there = self._peer_has_come(rank, peer, group)
        lack: Lack = "takes nothing" if is_send else "sends nothing"
        operation = OpenOperation(
            key=(group.group, *((rank, peer) if is_send else (peer, rank)), group.p2p_sequence),
            group=group.group,
            members=(rank, peer),
            name=group.p2p_operation,
            sequence=0,
            size_bytes=0,
            lacks=() if is_there else (peer,),
            lack="" if is_there else lack,
            # On the host what both have issued has happened, or no rank waits for it yet.
            is_weak=(is_send or is_there) and not on_device,
            end_is_unknown=end_is_unknown,
        )
        return operation, group.p2p_issued_ns

    def _not_come(self, rank: int, group: GroupState) -> GroupState:
        """Return `group` with an exchange open to which the peer has not come, if there is one.

        A device that reports no ends leaves all of them open, from the first one on. Since when the
        rank waits in it is not known: not before it last moved.
        """
        state = self._window.states[rank]
        for counts in group.peers:
            theirs = self._states.get((counts.peer, group.group))
            back = (
                next((peer for peer in theirs.peers if peer.peer == rank), None) if theirs else None
            )
            for operation, mine, come in (
                ("recv", counts.received, back.sent if back else 0),
                ("send", counts.sent, back.received if back else 0),
            ):
                if come < mine:
                    return structs.replace(
                        group, p2p_operation=operation, p2p_peer=counts.peer,
                        p2p_sequence=come + 1, p2p_issued_ns=state.heartbeat_ns,
                    )  # fmt: skip
        return group

    def _is_unclear(self, peer: int, group: GroupState) -> bool:
        """Return whether a peer says nothing of a group in which it has had exchanges before."""
        is_first = group.p2p_sequence == 1
        silent = (peer, group.group) not in self._states and peer in self._window.states
        return silent and not is_first and self._window.has_stepped(peer)

    def _members(self, rank: int, group: str) -> tuple[int, ...]:
        """Return the ranks of a group as this rank defined it; empty where no rank did."""
        own = self._window.groups.get((rank, group))
        if own is not None:
            return own
        ranks = self._by_name.get(group, ())
        return ranks if rank in ranks else ()

    def _peer_has_come(self, rank: int, peer: int, group: GroupState) -> bool:
        """Return whether the peer has issued its half of an exchange, as far as it says so."""
        theirs = self._states.get((peer, group.group))
        if theirs is None or not group.p2p_sequence:
            return False
        counts = next((counts for counts in theirs.peers if counts.peer == rank), None)
        if counts is None:
            return False
        issued = counts.received if group.p2p_operation == "send" else counts.sent
        return issued >= group.p2p_sequence

    def _work_out(
        self, rank: int, group: GroupState, members: tuple[int, ...], sequence: int, name: str,
        size_bytes: int, has_ends: bool,
    ) -> OpenOperation | None:  # fmt: skip
        standing = self._standing(group.group, members)
        if standing is None:
            return None
        absent = standing.issued < sequence
        behind = ~absent & (standing.ended < group.ended) & standing.reports_ends & has_ends
        is_done = bool(has_ends and (standing.ended >= sequence).any())
        # On the host an end is known a little later here and there; on a device it is a fact.
        lacking = absent | behind if self.runs_on_device(rank) else absent
        if not lacking.any():
            lacking = behind
        lack: Lack = "not entered" if absent.any() else "behind" if lacking.any() else ""
        return OpenOperation(
            key=(group.group, id(members), sequence),
            group=group.group,
            members=members,
            name=name,
            sequence=sequence,
            size_bytes=size_bytes,
            lacks=tuple(standing.members[lacking].tolist()),
            lack=lack,
            is_done_elsewhere=is_done,
        )

    def _standing(self, group: str, members: tuple[int, ...]) -> _Standing | None:
        """Return where the members are; None before all of them were heard."""
        key = (group, id(members))
        if key not in self._groups:
            known = len(members) > 1 and self._heard.issuperset(members)
            known = known and not self._unclear(group, members)
            self._groups[key] = self._standing_of(group, members) if known else None
        return self._groups[key]

    def _standing_of(self, group: str, members: tuple[int, ...]) -> _Standing:
        places = [self._states.get((member, group)) for member in members]
        reports_ends = [
            place is None or self._reports_ends(member, place)
            for member, place in zip(members, places, strict=True)
        ]
        return _Standing(places, members, reports_ends)

    def _unclear(self, group: str, members: tuple[int, ...]) -> list[int]:
        """Return the members that say nothing of a group though they have been in it.

        Others have ended a collective of it, and these have ended a step since they came up: their
        collectives were not recorded, which does not mean that they have not entered one.
        """
        places = [self._states.get((member, group)) for member in members]
        if not any(place is not None and place.ended for place in places):
            return []
        return [
            member
            for member, place in zip(members, places, strict=True)
            if place is None and member in self._window.states and self._window.has_stepped(member)
        ]


def _has_end(counts: PeerState) -> bool:
    return bool(counts.sent_ended or counts.received_ended)


class _Standing:
    """Last sequences of the members of one group, as arrays; a member not seen in it has none."""

    def __init__(
        self,
        places: Sequence[GroupState | None],
        members: tuple[int, ...],
        reports_ends: list[bool],
    ) -> None:
        self.members = np.array(members, np.int64)
        self.issued: Any = np.array([place.issued if place else -1 for place in places], np.int64)
        self.ended: Any = np.array([place.ended if place else -1 for place in places], np.int64)
        # where not, a member may have ended all that it has entered
        self.reports_ends = np.array(reports_ends, bool)
