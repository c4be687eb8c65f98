"""What becomes of items on the way: lost, late, doubled, and in any order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from rankscope.wire import schema
from rankscope.wire.chunk import BLOCK_RANKS, Column, decode_chunk, encode_chunk, encode_ranks
from rankscope_server.analysis.state import RunState
from rankscope_server.ingest.chunks import ReadChunks, ValidatedChunk, validate_chunks
from tests.simulator.records import Item

LOST, LATE, DOUBLED = 0.01, 0.05, 0.05
LATE_NS = 5_000_000_000


def as_validated(chunk: schema.Chunk) -> ValidatedChunk:
    """Return a chunk as a server takes it from a batch."""
    raw = msgspec.Raw(schema.encode(chunk))
    (((validated,), refused),) = validate_chunks([ReadChunks([raw])])
    assert not refused
    return validated


def deliver(
    items: Iterable[Item],
    seed: int,
    lost: float = LOST,
    late: float = LATE,
    doubled: float = DOUBLED,
) -> list[Item]:
    """Return items by arrival: chunks lost, chunks and records late by 5 s or come twice.

    Records are not lost: the collector sends them until the server says that it has them. What a
    rank overwrote unread is lost for good, and that is chunks.
    """
    chance = np.random.default_rng(seed)
    found: list[Item] = []
    for arrival, what in items:
        if isinstance(what, tuple) and chance.random() < lost:
            continue
        when = arrival + (LATE_NS if chance.random() < late else 0)
        found.append((when, what))
        if chance.random() < doubled:
            found.append((when + int(chance.integers(1, LATE_NS)), what))
    return sorted(found, key=lambda item: item[0])


def together(items: Iterable[Item]) -> list[Item]:
    """Return items with the chunks of a host's ranks put into one, as its collector does.

    All chunks are encoded and read again.
    """
    found: list[Item] = []
    waiting: dict[tuple[str, str, int], dict[int, tuple[int, schema.Chunk]]] = {}
    columns_of: dict[int, dict[str, Column]] = {}

    def put(key: tuple[str, str, int]) -> None:
        taken = waiting.pop(key)
        chunks = [taken[rank][1] for rank in sorted(taken)]
        of_ranks = {chunk.rank: columns_of.pop(id(chunk)) for chunk in chunks}
        data = encode_ranks(of_ranks) if len(chunks) > 1 else encode_chunk(*of_ranks.values())
        joined = msgspec.structs.replace(
            chunks[0], count=sum(chunk.count for chunk in chunks),
            time_lo_ns=min(chunk.time_lo_ns for chunk in chunks),
            time_hi_ns=max(chunk.time_hi_ns for chunk in chunks),
            step_lo=min(chunk.step_lo for chunk in chunks),
            step_hi=max(chunk.step_hi for chunk in chunks), data=data,
        )  # fmt: skip
        arrival = max(arrival for arrival, _ in taken.values())
        found.append((arrival, (joined, decode_chunk(data))))

    for arrival, what in items:
        if not isinstance(what, tuple) or what[0].rank < 0:
            found.append((arrival, what))
            continue
        chunk, columns = what
        key = (chunk.kind, chunk.host, chunk.rank // BLOCK_RANKS)
        if chunk.rank in waiting.get(key, {}):
            put(key)
        waiting.setdefault(key, {})[chunk.rank] = (arrival, chunk)
        columns_of[id(chunk)] = dict(columns)
    for key in list(waiting):
        put(key)
    return sorted(found, key=lambda item: item[0])


def shuffled(items: Iterable[Item], seed: int) -> list[Item]:
    """Return items in an order that has nothing to do with time."""
    found = list(items)
    order = np.random.default_rng(seed).permutation(len(found))
    return [found[place] for place in order]


def apply(state: RunState, items: Iterable[Item]) -> None:
    """Give items to an analysis in the order in which they stand."""
    for _, what in items:
        if isinstance(what, tuple):
            state.apply_chunk(*what)
        else:
            state.apply_record(what)


def relabelled(items: Iterable[Item], new: Sequence[int]) -> list[Item]:
    """Return the items of the same job with rank r called `new[r]`."""
    names = np.array(new)

    def of_group(group: schema.GroupState) -> schema.GroupState:
        peers = [msgspec.structs.replace(peer, peer=new[peer.peer]) for peer in group.peers]
        peer = new[group.p2p_peer] if group.p2p_peer >= 0 else -1
        return msgspec.structs.replace(group, p2p_peer=peer, peers=peers)

    found: list[Item] = []
    for arrival, what in items:
        if isinstance(what, tuple):
            chunk, columns = what
            if "rank" in columns:  # samples of a node
                owner = np.asarray(columns["rank"])
                columns = columns | {"rank": np.where(owner < 0, -1, names[owner])}
            if chunk.rank < 0:
                found.append((arrival, (chunk, columns)))
                continue
            if "peer_rank" in columns:
                peers = np.asarray(columns["peer_rank"])
                columns = columns | {"peer_rank": np.where(peers < 0, -1, names[peers])}
                chunk = msgspec.structs.replace(chunk, data=encode_chunk(columns))
            found.append((arrival, (msgspec.structs.replace(chunk, rank=new[chunk.rank]), columns)))
            continue
        record = msgspec.structs.replace(what, rank=new[what.rank]) if what.rank >= 0 else what
        if isinstance(record, schema.GroupDefined):
            record = msgspec.structs.replace(record, ranks=[new[rank] for rank in record.ranks])
        elif isinstance(record, schema.RankState):
            groups = [of_group(group) for group in record.groups]
            record = msgspec.structs.replace(record, groups=groups)
        found.append((arrival, record))
    return found
