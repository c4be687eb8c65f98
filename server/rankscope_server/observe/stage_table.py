"""Stages of pipelines that a script writes itself, and servers, known by what its ranks send.

    rank 0   F0 send                recv B0        a chain: each rank sends ahead to the next one,
    rank 1      recv F1 B1 send                    and then has something back of it

In such a chain every rank but the first can only work on what it received: it computes between a
receive and the next send, and not between a send and the next receive. That is what parts a
pipeline from ranks that exchange borders or pieces of a ring, which also send to and fro: these
compute after they have exchanged. All ranks must run backward.

Who runs none, and yet exchanges to and fro with ranks that do, serves these, as servers of
parameters do: its time is not to be compared with theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from rankscope.wire.backends import is_of_device
from rankscope.wire.schema import P2P_OPERATIONS, RankRegistered
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.statistics import median
from rankscope_server.observe.collectives import Collectives
from rankscope_server.observe.deviation import usual_steps
from rankscope_server.observe.event_table import EventTable
from rankscope_server.observe.exchanges import Exchanges, exchanges_of
from rankscope_server.observe.step_table import StepTable

_STEPS = 16  # that are looked at
_MIN_STEPS = 8
_AGAIN = 1.5  # times as many steps as at the last look
_SAME_SHARE = 0.8  # of the steps in which a pair of ranks begins alike
_LOOSE_SHARE = 0.25  # of its work that a stage may do between a send and a receive
SERVER = "server"  # the role of ranks that run no backward and serve those that do
_RELAYED_SHARE = 0.5  # of the work on a microbatch that it does between a receive and a send


class Place(NamedTuple):
    """Where a rank is in a pipeline, or that it serves others."""

    stage: int = -1
    num_stages: int = 0
    num_microbatches: int = (
        0  # in the pipeline at once; 1: each leaves it before the next one comes
    )
    role: str = ""


@dataclass(frozen=True, slots=True)
class _Link:
    """What a rank exchanges with one peer in a step."""

    num_sends: int
    num_receives: int
    sends_first: bool


class StageTable:
    """The places of the ranks of one attempt, of which no library says anything."""

    def __init__(self) -> None:
        self.places: dict[int, Place] = {}
        self._has_exchanges = False
        self._looked_at = 0  # steps that were known then

    def start_again(self) -> None:
        """Forget the places: a rank came up as a new process."""
        self.__init__()  # type: ignore[misc]

    def add(self, events: Collectives) -> None:
        """Take note of whether ranks exchange anything."""
        self._has_exchanges = self._has_exchanges or any(
            shape.operation in P2P_OPERATIONS for shape in events.shapes
        )

    def renew(
        self,
        ranks: Mapping[int, RankRegistered],
        steps: StepTable,
        events: EventTable,
        policy: Policy,
        reporting: Set[int] = frozenset(),
    ) -> None:
        """Look for a pipeline in the newest steps, unless one is known or nothing is new.

        Not on devices: the host does not say there when it has what it received. `reporting` are
        ranks that report what they do for others; calls of torch.distributed.rpc are no exchanges.
        """
        total = steps.num_steps + steps.dropped_steps
        if (
            self.places
            or not (self._has_exchanges or reporting)
            or total < _AGAIN * self._looked_at
        ):
            return
        if all(known.num_microbatches or is_of_device(known.backend) for known in ranks.values()):
            return
        usual = np.flatnonzero(usual_steps(steps, policy) & ~steps.thinned())[-_STEPS:]
        if len(usual) < _MIN_STEPS:
            return
        self._looked_at = total
        cells = {
            name: steps.get(name)[:, usual] for name in ("microbatches", "forward", "backward")
        }
        passes = np.nan_to_num(median(cells["microbatches"]))
        work_ms = np.nan_to_num(median(cells["forward"] + cells["backward"]))
        passes_of = dict(zip(steps.ranks, passes.tolist(), strict=True))
        work_of = dict(zip(steps.ranks, work_ms.tolist(), strict=True))
        if self._has_exchanges:
            rows = events.select(steps.steps[usual])
            found = exchanges_of(rows, events.words("operation"))
            self.places = places_of(found, passes_of, work_of) or servers_of(found, passes_of)
        if not self.places and max(passes_of.values()) >= 1:
            idle = {rank for rank in reporting if passes_of.get(rank, 1.0) < 1}
            self.places = {rank: Place(role=SERVER) for rank in sorted(idle)}

    def said(self, ranks: Mapping[int, RankRegistered]) -> Mapping[int, RankRegistered]:
        """Return what ranks say of themselves, with the places that they do not say."""
        if not self.places:
            return ranks
        return {
            rank: known if (place := self.places.get(rank)) is None else _placed(known, place)
            for rank, known in ranks.items()
        }


def _placed(known: RankRegistered, place: Place) -> RankRegistered:
    if place.role:
        return msgspec.structs.replace(known, role=place.role)
    if known.num_stages and known.num_microbatches:
        return known
    if known.num_stages:
        return msgspec.structs.replace(known, num_microbatches=place.num_microbatches)
    return msgspec.structs.replace(
        known, stage=place.stage, num_stages=place.num_stages, num_local_stages=1,
        num_microbatches=place.num_microbatches,
    )  # fmt: skip


def places_of(
    found: Exchanges, passes: Mapping[int, float], work_ms: Mapping[int, float]
) -> dict[int, Place]:
    """Return the place of every rank where all are stages of pipelines alike; else nothing.

    `passes` are backward passes of a step, `work_ms` self time in forward and backward, by rank.
    """
    links = _links(found)
    if not passes or min(passes.values()) < 1:
        return {}
    chains = _chains(links, set(passes))
    if len({len(chain) for chain in chains}) != 1:
        return {}
    relays = _relays(found)
    for chain in chains:
        for rank in chain[1:]:
            relayed, loose = relays[rank]
            least = _RELAYED_SHARE * work_ms[rank] / round(passes[rank])
            if loose > _LOOSE_SHARE * work_ms[rank] or not relayed > least:
                return {}
    heads = [chain[0] for chain in chains]
    count = max(round(passes[rank]) for rank in heads)
    at_once = max(_most_in_flight(found, rank, count) for rank in heads)
    return {
        rank: Place(stage, len(chain), count if at_once > 1 else 1)
        for chain in chains
        for stage, rank in enumerate(chain)
    }


def servers_of(found: Exchanges, passes: Mapping[int, float]) -> dict[int, Place]:
    """Return the ranks that run no backward and exchange to and fro with ranks that do."""
    links = _links(found)
    servers = set()
    for (rank, peer), link in links.items():
        is_other = passes.get(rank, 1) < 1 <= passes.get(peer, 0)
        if is_other and link.num_sends and link.num_receives:
            servers.add(rank)
    return {rank: Place(role=SERVER) for rank in sorted(servers)}


def _links(found: Exchanges) -> dict[tuple[int, int], _Link]:
    """Return what each rank exchanges with each peer: medians over its steps."""
    keys = np.stack([found.rank, found.peer, found.step])
    of_step, first, inverse = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    inverse = inverse.ravel()
    sends = np.bincount(inverse, weights=found.is_send, minlength=len(first))
    receives = np.bincount(inverse, minlength=len(first)) - sends
    links: dict[tuple[int, int], _Link] = {}
    pairs, pair_of = np.unique(of_step[:2], axis=1, return_inverse=True)
    for at, (rank, peer) in enumerate(pairs.T.tolist()):
        mine = pair_of.ravel() == at
        begins = float(np.mean(found.is_send[first[mine]]))
        if 1 - _SAME_SHARE < begins < _SAME_SHARE:
            return {}  # now one of the two begins, now the other
        links[rank, peer] = _Link(
            int(np.median(sends[mine])), int(np.median(receives[mine])), begins > 0.5
        )
    return links


def _chains(links: Mapping[tuple[int, int], _Link], ranks: set[int]) -> list[list[int]]:
    """Return all ranks in chains from their first to their last one; nothing where some are not."""
    after: dict[int, int] = {}
    before: dict[int, int] = {}
    for (rank, peer), link in links.items():
        other = links.get((peer, rank))
        is_alike = other is not None and link.num_sends == other.num_receives > 0
        if other is None or not is_alike or link.sends_first == other.sends_first:
            return []
        found = after if link.sends_first else before
        if found.setdefault(rank, peer) != peer:
            return []
    chains = []
    for head in sorted(set(after) - set(before)):
        chain = [head]
        while chain[-1] in after:
            chain.append(after[chain[-1]])
        chains.append(chain)
    is_whole = {rank for chain in chains for rank in chain} == ranks
    return chains if is_whole else []


def _relays(found: Exchanges) -> dict[int, tuple[float, float]]:
    """Return by rank the ms of a step that it works before it sends on, and before it receives.

    Both since an exchange of the other kind; medians over steps.
    """
    turns = np.r_[False, found.is_send[1:] != found.is_send[:-1]] & ~found.is_first
    keys, inverse = np.unique(np.stack([found.rank, found.step]), axis=1, return_inverse=True)
    inverse = inverse.ravel()
    relayed, loose = (
        np.bincount(
            inverse, weights=found.worked_ms * (turns & (found.is_send == is_send)),
            minlength=keys.shape[1],
        )
        for is_send in (True, False)
    )  # fmt: skip
    return {
        rank: (float(np.median(relayed[keys[0] == rank])), float(np.median(loose[keys[0] == rank])))
        for rank in np.unique(keys[0]).tolist()
    }


def _most_in_flight(found: Exchanges, rank: int, count: int) -> int:
    """Return how many of `count` microbatches are under way at once behind the first stage."""
    mine = found.rank == rank
    is_send, step = found.is_send[mine], found.step[mine]
    most = []
    for one in np.unique(step).tolist():
        sends = is_send[step == one]
        each = [max(1, int(np.sum(sends == kind)) // count) for kind in (True, False)]
        under_way = np.cumsum(sends) // each[0] - np.cumsum(~sends) // each[1]
        most.append(int(under_way.max()))
    return int(np.median(most))
