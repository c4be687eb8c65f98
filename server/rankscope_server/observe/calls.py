"""What each rank called as number n of each group, kept as fingerprints.

A number that all members have called alike is one entry; only what is incomplete or differs is
kept by rank. So a healthy job of a thousand ranks holds a few hundred numbers per group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rankscope.wire.chunk import Column
from rankscope.wire.schema import FLAG_P2P, RankState

# Numbers of a group that are not complete. A chunk holds up to some thousand calls of one rank,
# and those of its peers come seconds later; what is older than all that is given up.
MAX_OPEN = 16_384
KEPT = 256  # numbers that all called alike, for the order of calls before a difference
MAX_CALLS = 65_536  # distinct fingerprints
# Ranks may hand in pieces of different sizes: the sizes are no part of the fingerprint.
RAGGED = frozenset(
    {
        "all_gather",
        "all_gather_coalesced",
        "all_to_all",
        "all_to_all_single",
        "gather",
        "gather_into_tensor",
        "scatter",
    }
)
EXCHANGES = frozenset({"all_to_all", "all_to_all_single"})
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter", "gather_into_tensor"})
_NEVER = 1 << 62
_AFTER = 256  # numbers after the first wrong one that are kept: all later ones differ, too
_TOO_MANY = -1  # the code of a call beyond those that are kept apart


class Call(NamedTuple):
    """What has to be alike on all ranks; `site` alone may differ where the code does."""

    operation: str
    reduce_op: str
    dtype: str
    size_bytes: int  # -1: may differ
    root: int  # -1: has none
    site: str


@dataclass(slots=True)
class Track:
    """The calls of one group. A code is a place in `CallTable.calls`.

    Who called what is kept as a set of ranks for each code, one bit a rank: numbers that are
    never complete, because a rank is silent, would fill the memory otherwise.
    """

    num_members: int = 0  # 0 before the group was defined
    open: dict[int, dict[int, int]] = field(default_factory=dict)  # number -> code -> ranks
    agreed: dict[int, int] = field(default_factory=dict)  # number -> code
    odd: set[int] = field(default_factory=set)  # of the open numbers, those that differ
    sites: dict[int, set[str]] = field(default_factory=dict)  # rank -> where it ever called from
    first: dict[int, tuple[int, int]] = field(default_factory=dict)  # odd -> step, time ns
    # What a rank calls from a place of its own, as the others call it: rank, code -> code
    alias: dict[tuple[int, int], int] = field(default_factory=dict)
    splits: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)  # bytes in, out
    known_edits: dict[object, object] = field(default_factory=dict)  # answers that hold for good
    newest: int = 0
    broken: int = _NEVER  # first number in which more than the place in the code differs
    given_up: int = 0  # numbers up to this one are not looked at any more
    # Of the open numbers, those known from states alone: in a thinned step no chunk completes them
    from_states: set[int] = field(default_factory=set)
    forget_at: int = 2 * KEPT  # how many of them there are when old ones are forgotten

    def put(
        self, rank: int, number: int, code: int, when: tuple[int, int], *, is_state: bool = False
    ) -> bool:
        """Take one call, made at (step, ns); return whether its number differs now.

        The same call again changes nothing.
        """
        if number <= self.given_up or number in self.agreed or number > self.broken + _AFTER:
            return False
        row = self.open.setdefault(number, {})
        if not is_state:
            self.from_states.discard(number)
        elif not row:
            self.from_states.add(number)
        bit = 1 << rank
        if any(ranks & bit for ranks in row.values()):
            return False
        if self.alias:
            code = self.alias.get((rank, code), code)
        ranks = row[code] = row.get(code, 0) | bit
        self.newest = max(self.newest, number)
        if len(row) > 1:
            self.odd.add(number)
            known = self.first.get(number)
            self.first[number] = min(known, when) if known else when
        elif ranks.bit_count() == self.num_members:
            self.agree(number, code)
        if len(self.open) > MAX_OPEN:
            self._give_up()
        return len(row) > 1

    def row(self, number: int) -> dict[int, int]:
        """Return what each rank called as one number that is not agreed on."""
        return {
            rank: code for code, ranks in self.open.get(number, {}).items()
            for rank in ranks_of(ranks)
        }  # fmt: skip

    def usual(self, number: int, among: int) -> int | None:
        """Return what most of some ranks (one bit each) called; None if none is known to have."""
        agreed = self.agreed.get(number)
        if agreed is not None:
            return agreed
        counts = [
            (-(ranks & among).bit_count(), code)
            for code, ranks in self.open.get(number, {}).items()
            if ranks & among
        ]
        return min(counts)[1] if counts else None

    def agree(self, number: int, code: int) -> None:
        """Note that a number was called alike by all, or that how it differs is harmless."""
        self._drop(number)
        self.agreed[number] = code
        if len(self.agreed) > 2 * KEPT:
            for old in sorted(self.agreed)[:-KEPT]:
                del self.agreed[old]
                self.given_up = max(self.given_up, old)
        if len(self.from_states) > self.forget_at:
            self._forget_states(number)

    def uneven_splits(self) -> tuple[int, dict[int, tuple[int, int]]] | None:
        """Return the first all_to_all whose members send more or less than they expect."""
        for number in sorted(self.splits):
            row = self.splits[number]
            if not self.num_members or len(row) < self.num_members:
                continue
            if sum(sent for sent, _ in row.values()) != sum(got for _, got in row.values()):
                return number, row
            del self.splits[number]
        return None

    def know_members(self, num_members: int) -> None:
        """Note how many members there are, and agree on what all of them had called alike."""
        self.num_members = num_members
        for number, row in list(self.open.items()):
            (code, ranks), *others = row.items()
            if not others and ranks.bit_count() == num_members:
                self.agree(number, code)

    def _forget_states(self, agreed: int) -> None:
        """Forget what states said of numbers before one that all have called, but for the last.

        A rank sends its states before its later calls: nothing more comes of those numbers.
        """
        for number in sorted(n for n in self.from_states if n < agreed)[:-KEPT]:
            if number not in self.odd:
                self._drop(number)
        self.forget_at = 2 * max(KEPT, len(self.from_states))

    def _give_up(self) -> None:
        for number in sorted(self.open)[: MAX_OPEN // 4]:
            self._drop(number)
            self.given_up = max(self.given_up, number)

    def _drop(self, number: int) -> None:
        self.open.pop(number, None)
        self.odd.discard(number)
        self.from_states.discard(number)
        self.first.pop(number, None)


class CallTable:
    """Fingerprints of all collectives of an attempt, whatever order they come in."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.tracks: dict[str, Track] = {}
        self.num_taken = 0
        self._codes: dict[tuple[str, str, str, int, int, str], int] = {}
        self._same: dict[Call, int] = {}
        self._kinds: dict[tuple[object, ...], int] = {}  # calls wherever they come from
        self._hard: list[int] = []  # code -> kind
        self._since_ns = 0  # what is older is of another program

    def define(self, group: str, num_members: int) -> None:
        """Note how many members a group has."""
        track = self.tracks.setdefault(group, Track())
        if num_members > track.num_members:
            track.know_members(num_members)

    def start_again(self, since_ns: int) -> None:
        """Forget everything before a rank came up as a new process: all count from 1 again."""
        self._since_ns = max(self._since_ns, since_ns)
        members = {name: track.num_members for name, track in self.tracks.items()}
        self.tracks = {name: Track(num_members=count) for name, count in members.items()}

    def add(self, rank: int, columns: Mapping[str, Column]) -> None:
        """Take one chunk of collectives of a rank."""
        since_ns = self._since_ns
        numbers = (
            np.asarray(columns[name]).tolist()
            for name in ("sequence", "size_bytes", "peer_rank", "step", "arrived_ns", "flags",
                         "input_bytes", "output_bytes")
        )  # fmt: skip
        words = (columns[name] for name in ("group", "operation", "reduce_op", "dtype",
                                            "call_site"))  # fmt: skip
        codes, tracks = self._codes, self.tracks
        for (
            group, operation, reduce_op, dtype, site, number, size_bytes, root, step, time_ns,
            flags, input_bytes, output_bytes,
        ) in zip(*words, *numbers, strict=True):  # fmt: skip
            if number <= 0 or flags & FLAG_P2P or time_ns < since_ns:
                continue
            key = (operation, reduce_op, dtype, size_bytes, root, site)
            code = codes.get(key)
            if code is None:
                code = self._code(key)
            track = tracks.get(group)
            if track is None:
                track = tracks[group] = Track()
            self._put(track, rank, number, code, step, time_ns)
            if operation in EXCHANGES and number > track.given_up and input_bytes >= 0:
                _put_split(track, rank, number, (input_bytes, output_bytes))

    def add_state(self, state: RankState) -> None:
        """Take the last and the oldest open call of each group of a rank: chunks report them later,
        and of a rank that hangs not before its end.
        """
        if not state.is_recording:
            return
        for group in state.groups:
            last = (group.operation, group.reduce_op, group.dtype, group.size_bytes, group.root,
                    group.call_site)  # fmt: skip
            oldest = (group.open_operation, group.open_reduce_op, group.open_dtype,
                      group.open_bytes, group.open_root, group.open_call_site)  # fmt: skip
            for key, number, time_ns in (
                (last, group.issued, group.issued_ns),
                (oldest, group.open_sequence, group.open_ns),
            ):
                if key[0] and key[2] and number > 0 and time_ns >= self._since_ns:
                    track = self.tracks.setdefault(group.group, Track())
                    code = self._code(key)
                    self._put(track, state.rank, number, code, state.step, time_ns, is_state=True)

    def _put(
        self, track: Track, rank: int, number: int, code: int, step: int, time_ns: int, *,
        is_state: bool = False,
    ) -> None:  # fmt: skip
        if code == _TOO_MANY:
            return
        self.num_taken += 1
        known = track.sites.get(rank)
        if known is None:
            known = track.sites[rank] = set()
        known.add(self.calls[code].site)
        differs = track.put(rank, number, code, (step, time_ns), is_state=is_state)
        if differs and number < track.broken:
            kinds = {self._hard[one] for one in track.open[number]}
            if len(kinds) > 1:
                track.broken = number

    def _code(self, key: tuple[str, str, str, int, int, str]) -> int:
        """Return the code of a call; raw values that mean the same have the same one."""
        operation, reduce_op, dtype, size_bytes, root, site = key
        call = Call(
            operation,
            reduce_op,
            "" if operation == "barrier" else dtype,
            -1 if operation in RAGGED or operation == "barrier" else size_bytes,
            root if operation in _ROOTED else -1,
            site,
        )
        code = self._same.get(call)
        if code is None:
            if len(self.calls) >= MAX_CALLS:
                return _TOO_MANY
            code = self._same[call] = len(self.calls)
            self.calls.append(call)
            self._hard.append(self._kinds.setdefault(call[:-1], len(self._kinds)))
        if len(self._codes) < MAX_CALLS:
            self._codes[key] = code
        return code


def ranks_of(mask: int) -> list[int]:
    """Return the ranks whose bits are set."""
    return [rank for rank, bit in enumerate(reversed(f"{mask:b}")) if bit == "1"]


def mask_of(ranks: Iterable[int]) -> int:
    """Return ranks as bits."""
    return sum(1 << rank for rank in set(ranks))


def _put_split(track: Track, rank: int, number: int, sizes: tuple[int, int]) -> None:
    track.splits.setdefault(number, {})[rank] = sizes
    if len(track.splits) > KEPT:
        del track.splits[min(track.splits)]
