"""Part of the wire schema: how far one rank is in one process group."""

from __future__ import annotations

import msgspec


class PeerState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far one rank is with one peer in one group: last sequences, 0 for none."""

    peer: int
    sent: int = 0  # sends issued
    sent_ended: int = 0
    received: int = 0  # receives issued
    received_ended: int = 0


class GroupState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far one rank is in one process group. Sequences count collectives only, from 1."""

    group: str
    issued: int  # last sequence entered
    ended: int  # last sequence known to have ended
    operation: str = ""  # of the last one entered
    size_bytes: int = 0
    issued_ns: int = 0  # when the last one was entered
    call_site: str = ""
    dtype: str = ""  # the rest of what the last one was; empty: an agent that does not say it
    reduce_op: str = ""
    root: int = -1
    # oldest collective still open in this group; 0: none, or an agent that does not say it
    open_sequence: int = 0
    open_operation: str = ""
    open_bytes: int = 0
    open_ns: int = 0
    open_call_site: str = ""
    open_dtype: str = ""
    open_reduce_op: str = ""
    open_root: int = -1
    # oldest point-to-point operation still open in this group, if any
    p2p_operation: str = ""
    p2p_peer: int = -1
    p2p_issued_ns: int = 0
    p2p_sequence: int = 0  # among those with this peer in this direction; 0: not known
    peers: list[PeerState] = []
    # ends come from a record of the backend itself; without, 0 ended on a device may be all ended
    ends_are_known: bool = False


def exchanges_of(state: GroupState) -> int:
    """Return how many sends and receives a rank has issued in a group."""
    return sum(peer.sent + peer.received for peer in state.peers)
