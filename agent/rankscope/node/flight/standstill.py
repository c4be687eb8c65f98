"""Which collectives of a rank that does not move its device has not done, from one dump.

Where the Flight Recorder may not be polled, nothing reports the ends of NCCL's collectives: what
was entered last may have ended. The dump of an incident reports it, until the next call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from rankscope.files.flight_recorder import Dump, open_entries
from rankscope.node.flight.lanes import groups_named
from rankscope.wire.group_state import GroupState


@dataclass(frozen=True)
class Standstill:
    """Collectives in flight by the label of their group, as long as no call is made.

    `head` is the number of calls so far; `exchanging` are groups with sends or receives in flight.
    """

    head: int
    in_flight: Mapping[str, int]
    exchanging: frozenset[str]

    def complete(self, states: Iterable[GroupState], head: int) -> list[GroupState]:
        """Return `states` with the ends that the dump knows, if it is still true."""
        return [
            self._complete(state) if head == self.head and state.group in self.in_flight else state
            for state in states
        ]

    def _complete(self, state: GroupState) -> GroupState:
        ended = max(state.ended, state.issued - self.in_flight[state.group])
        if state.group in self.exchanging:  # ends of exchanges are not reported per peer
            return msgspec.structs.replace(state, ended=ended)
        peers = [
            msgspec.structs.replace(one, sent_ended=one.sent, received_ended=one.received)
            for one in state.peers
        ]
        return msgspec.structs.replace(
            state, ended=ended, peers=peers, p2p_operation="", p2p_peer=-1, p2p_issued_ns=0,
            p2p_sequence=0, ends_are_known=True,
        )  # fmt: skip


def standstill(dump: Dump, head: int, groups: Mapping[int, str]) -> Standstill:
    """Return what a dump says that was asked for after `head` calls; `groups` are the labels."""
    is_open: dict[str, set[int]] = defaultdict(set)
    exchanging = set()
    for entry in open_entries(dump):
        if entry.is_p2p:
            exchanging.add(entry.process_group[0])
        else:
            is_open[entry.process_group[0]].add(entry.collective_seq_id)
    label_of = {}
    for name in {entry.process_group[0] for entry in dump.entries}:
        if same := groups_named(name, groups):
            label_of[name] = groups[max(same)]  # the last one made: a world may be made again
    return Standstill(
        head,
        {label: len(is_open[name]) for name, label in label_of.items()},
        frozenset(label_of[name] for name in exchanging if name in label_of),
    )
