"""What each rank called as number n of each group, kept as fingerprints.

A number that all members have called alike is one entry, and one that is incomplete an entry and a
bit for each rank; only what differs is kept by what each rank called. So a healthy job of a
thousand ranks holds a few hundred numbers per group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from rankscope.wire.arrays import distinct, sorted_distinct
from rankscope.wire.schema import FLAG_P2P, RankState
from rankscope_server.call_shapes import CallShape
from rankscope_server.findings.statistics import Array
from rankscope_server.observe.alike import Alike, Callers
from rankscope_server.observe.collectives import Collectives

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
_UNCALLED = -1  # the code of a number that no rank has called


class Call(NamedTuple):
    """What has to be alike on all ranks; `site` alone may differ where the code does."""

    operation: str
    reduce_op: str
    dtype: str
    size_bytes: int  # -1: may differ
    root: int  # -1: has none
    site: str


class Made(NamedTuple):
    """Calls of one group, arrays of one length, in the order they came."""

    by: Array  # of each, the set of `callers` that made it
    callers: Callers
    number: Array
    code: Array  # a place in `CallTable.calls`
    at: Array  # where step and time of each are: only those of calls that differ are read
    step: Array
    time_ns: Array
    is_state: bool  # known from states of ranks, not from chunks

    def where(self, chosen: Array) -> Made:
        """Return some of them: those at places, or where a mask is set."""
        if chosen.dtype == bool and chosen.all():
            return self
        return self._replace(
            by=self.by[chosen], number=self.number[chosen], code=self.code[chosen],
            at=self.at[chosen],
        )  # fmt: skip

    @property
    def is_of_single(self) -> bool:
        """Return whether one rank alone made each of them."""
        return bool(self.callers.ranks.shape[1] == 1)

    @property
    def rank(self) -> Array:
        """Return the first rank of each."""
        found: Array = self.callers.ranks[self.by, 0]
        return found

    def each(self) -> tuple[Made, Array]:
        """Return the calls of each rank for itself, and the place of each among these."""
        if self.is_of_single:
            return self, np.arange(len(self.by))
        sizes = self.callers.sizes[self.by]
        places = np.repeat(np.arange(len(sizes)), sizes)
        member = np.arange(len(places)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        by, made = self.by[places], self.where(places)
        ranks, at = self.callers.ranks[by, member], made.at + self.callers.shifts[by, member]
        return made._replace(by=np.arange(len(ranks)), callers=single(ranks), at=at), places


def single(ranks: Array) -> Callers:
    """Return sets of one rank each."""
    return Callers(ranks[:, None], np.zeros((len(ranks), 1), np.int64), np.ones(len(ranks), int))


class Exchanges:
    """What members of a group send and expect in the newest exchanges with sizes of their own."""

    def __init__(self) -> None:
        self._parts: list[Array] = []  # rows of number, rank, bytes sent, bytes expected

    def put(self, rows: Array) -> None:
        """Take exchanges, events x (number, rank, bytes sent, bytes expected)."""
        if len(rows):
            self._parts.append(rows)
            if sum(map(len, self._parts)) > MAX_CALLS:
                self._join()

    def uneven(self, num_members: int) -> tuple[int, dict[int, tuple[int, int]]] | None:
        """Return the first in which members send more or less in sum than they expect."""
        rows = self._join()
        if not num_members or not len(rows):
            return None
        _, at, count = np.unique(rows[:, 0], return_inverse=True, return_counts=True)
        is_whole = (count >= num_members)[at]
        more = np.bincount(at, weights=(rows[:, 2] - rows[:, 3]).astype(float))
        wrong = rows[is_whole & (more[at] != 0)]
        self._parts = [rows[~is_whole | (more[at] != 0)]]
        if not len(wrong):
            return None
        first = int(wrong[:, 0].min())
        members = wrong[wrong[:, 0] == first]
        return first, {rank: (sent, got) for _, rank, sent, got in members.tolist()}

    def _join(self) -> Array:
        """Return the rows of the newest numbers, of a rank that reports one twice the later."""
        if not self._parts:
            return np.zeros((0, 4), np.int64)
        rows = np.concatenate(self._parts)
        newest = np.unique(rows[:, 0])[-KEPT:]
        rows = rows[rows[:, 0] >= newest[0]] if len(newest) else rows
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]  # stable: the later row comes after
        is_last = np.ones(len(rows), bool)
        is_last[:-1] = np.any(rows[1:, :2] != rows[:-1, :2], axis=1)
        self._parts = [rows[is_last]]
        return self._parts[0]


class Track:
    """The calls of one group. A code is a place in `CallTable.calls`.

    Numbers are columns, ranks rows, both ascending. Of a number that all have called alike so far
    it is known what that was and who they are; of one that differs, who called what, as a set of
    ranks for each code, one bit a rank.
    """

    def __init__(self, num_members: int = 0) -> None:
        self.num_members = num_members  # 0 before the group was defined
        self.sites: dict[int, set[str]] = {}  # rank -> where it ever called from
        self.first: dict[int, tuple[int, int]] = {}  # number that differs -> step, time ns
        self.exchanges = Exchanges()
        self.known_edits: dict[object, object] = {}  # answers that hold for good
        self.newest = 0
        self.broken = _NEVER  # first number in which more than the place in the code differs
        self.given_up = 0  # numbers up to this one are not looked at any more
        # What a rank calls from a place of its own, as the others call it: rank, code -> code
        self.alias: dict[tuple[int, int], int] = {}
        self._alias_keys, self._alias_codes = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._differ: dict[int, dict[int, int]] = {}  # number -> code -> ranks
        self._numbers = np.zeros(0, np.int64)
        self._codes = np.zeros(0, np.int64)  # what was called; `_UNCALLED` where it is not known
        self._is_agreed = np.zeros(0, bool)
        self._is_odd = np.zeros(0, bool)  # it is in `_differ`
        # In a thinned step no chunk completes what is known from states alone.
        self._is_from_chunk = np.zeros(0, bool)
        self._ranks = np.zeros(0, np.int64)
        # Whether all have called a number is asked of neighbours in memory.
        self._has_called = np.zeros((0, 0), bool)  # numbers x ranks
        self._known_calls = np.zeros((0, 0), bool)  # ranks x codes

    # --- reading -----------------------------------------------------------------------------

    @property
    def odd(self) -> set[int]:
        """Return the numbers that were not called alike."""
        return set(self._differ)

    @property
    def num_agreed(self) -> int:
        """Return how many of the numbers that are held all members have called alike."""
        return int(self._is_agreed.sum())

    @property
    def num_open(self) -> int:
        """Return how many numbers are held that are not complete, or differ."""
        return len(self._numbers) - self.num_agreed

    @property
    def last_agreed(self) -> int:
        """Return the newest number that all members have called alike, 0 for none."""
        agreed = self._numbers[self._is_agreed]
        return int(agreed[-1]) if len(agreed) else 0

    def row(self, number: int) -> dict[int, int]:
        """Return what each rank called as one number that is not agreed on."""
        return {
            rank: code for code, ranks in self._calls_of(number).items() for rank in ranks_of(ranks)
        }

    def sole(self, number: int) -> int | None:
        """Return what all called that are known to have called a number; None if they differ."""
        at = self._place(number)
        if at is None or self._is_odd[at]:
            return None
        return int(self._codes[at])

    def usual(self, number: int, among: int) -> int | None:
        """Return what most of some ranks (one bit each) called; None if none is known to have."""
        at = self._place(number)
        if at is not None and self._is_agreed[at]:
            return int(self._codes[at])
        counts = [
            (-(ranks & among).bit_count(), code)
            for code, ranks in self._calls_of(number).items()
            if ranks & among
        ]
        return min(counts)[1] if counts else None

    def _place(self, number: int) -> int | None:
        at = int(np.searchsorted(self._numbers, number))
        return at if at < len(self._numbers) and self._numbers[at] == number else None

    def _calls_of(self, number: int) -> dict[int, int]:
        known = self._differ.get(number)
        if known is not None:
            return known
        at = self._place(number)
        if at is None or self._is_agreed[at]:
            return {}
        return {int(self._codes[at]): mask_of(self._ranks[self._has_called[at]].tolist())}

    # --- writing -----------------------------------------------------------------------------

    def put(self, made: Made, calls: list[Call], kinds: Array) -> None:
        """Take calls; the same call again changes nothing. `kinds` are calls without their site."""
        sets = distinct(made.by)
        self._know(distinct(made.callers.ranks[sets].reshape(-1)), np.zeros(0, np.int64))
        self._note_sites(made, calls)
        numbers = distinct(made.number)
        wanted = (numbers > self.given_up) & (numbers <= self.broken + _AFTER)
        if not wanted.all():
            made = made.where((made.number > self.given_up) & (made.number <= self.broken + _AFTER))
            numbers = numbers[wanted]
        if not len(numbers):
            return
        if self.alias:
            made, _ = made.each()
            made = made._replace(code=self._in_their_terms(made))
        self._know(np.zeros(0, np.int64), numbers)
        self.newest = max(self.newest, int(numbers[-1]))
        columns, places = (_places(self._numbers, those) for those in (numbers, made.number))
        if not made.is_state:
            self._is_from_chunk[columns] = True
        if self._is_agreed[columns].any():
            is_open = ~self._is_agreed[places]
            made, places = made.where(is_open), places[is_open]
        self._take(made, places, kinds)
        self._agree_on_complete()
        self._forget()

    def agree(self, number: int, code: int) -> None:
        """Note that how a number differs is harmless: all called `code`."""
        self._differ.pop(number, None)
        self.first.pop(number, None)
        at = self._place(number)
        if at is not None:
            self._is_odd[at], self._is_agreed[at], self._codes[at] = False, True, code
        self._forget()

    def know_members(self, num_members: int) -> None:
        """Note how many members there are, and agree on what all of them had called alike."""
        self.num_members = num_members
        self._agree_on_complete()
        self._forget()

    def _know(self, ranks: Array, numbers: Array) -> None:
        """Make rows for ranks and columns for numbers, those that are there already stay."""
        if _are_among(self._ranks, ranks) and _are_among(self._numbers, numbers):
            return
        all_ranks, all_numbers = _united(self._ranks, ranks), _united(self._numbers, numbers)
        rows = np.searchsorted(all_ranks, self._ranks)
        columns = np.searchsorted(all_numbers, self._numbers)
        has_called = np.zeros((len(all_numbers), len(all_ranks)), bool)
        if len(all_ranks) > len(self._ranks):
            has_called[np.ix_(columns, rows)] = self._has_called
            known_calls = np.zeros((len(all_ranks), self._known_calls.shape[1]), bool)
            known_calls[rows] = self._known_calls
            self._known_calls = known_calls
        elif len(columns) and columns[-1] == len(columns) - 1:  # new ones come after all
            has_called[: len(columns)] = self._has_called
        else:
            has_called[columns] = self._has_called
        self._has_called = has_called
        codes = np.full(len(all_numbers), _UNCALLED)
        codes[columns] = self._codes
        flags = np.zeros((3, len(all_numbers)), bool)
        flags[:, columns] = self._is_agreed, self._is_odd, self._is_from_chunk
        self._codes, (self._is_agreed, self._is_odd, self._is_from_chunk) = codes, flags
        self._ranks, self._numbers = all_ranks, all_numbers

    def _note_sites(self, made: Made, calls: list[Call]) -> None:
        if self._known_calls.shape[1] < len(calls):
            more = np.zeros((len(self._ranks), len(calls) - self._known_calls.shape[1]), bool)
            self._known_calls = np.concatenate([self._known_calls, more], axis=1)
        sets, codes = divmod(distinct(made.by * len(calls) + made.code), len(calls))
        rows = _places(self._ranks, made.callers.ranks[sets])
        news = ~self._known_calls[rows, codes[:, None]]
        if news.any():
            pairs = np.unique((rows * len(calls) + codes[:, None])[news])
            for row, code in np.stack(divmod(pairs, len(calls)), axis=1).tolist():
                self._known_calls[row, code] = True
                self.sites.setdefault(int(self._ranks[row]), set()).add(calls[code].site)

    def _in_their_terms(self, made: Made) -> Array:
        """Return the codes, those that a rank calls from a place of its own as the others do."""
        if len(self.alias) != len(self._alias_keys):  # entries are added, never changed
            pairs = sorted(self.alias.items())
            self._alias_keys = np.array([rank << 32 | code for (rank, code), _ in pairs], np.int64)
            self._alias_codes = np.array([code for _, code in pairs], np.int64)
        keys = made.rank << 32 | made.code
        at = np.minimum(np.searchsorted(self._alias_keys, keys), len(self._alias_keys) - 1)
        return np.where(self._alias_keys[at] == keys, self._alias_codes[at], made.code)

    def _take(self, made: Made, places: Array, kinds: Array) -> None:
        if not made.is_of_single:
            if self._is_as_known(made, places):
                return
            made, of = made.each()
            places = places[of]
        rows = _places(self._ranks, made.rank)
        cells, had_called = places * len(self._ranks) + rows, self._has_called.copy()
        self._has_called.reshape(-1)[cells] = True
        if np.count_nonzero(self._has_called) - np.count_nonzero(had_called) < len(rows):
            news = ~had_called.reshape(-1)[cells] & self._is_first(rows, places)
            made, places = made.where(news), places[news]
        unknown = self._codes[places] == _UNCALLED
        self._codes[places[unknown][::-1]] = made.code[unknown][::-1]  # the first one stays
        self._is_odd[places[made.code != self._codes[places]]] = True
        if self._is_odd.any():
            odd = np.flatnonzero(self._is_odd[places])
            self._differing(made.where(odd), places[odd], kinds)

    def _is_as_known(self, made: Made, places: Array) -> bool:
        """Take calls that are those of the others, as nearly all are; else return False."""
        codes = self._codes.copy()
        unknown = codes[places] == _UNCALLED
        codes[places[unknown][::-1]] = made.code[unknown][::-1]  # the first one stays
        if (made.code != codes[places]).any() or self._is_odd[places].any():
            return False
        self._codes = codes
        rows = _places(self._ranks, made.callers.ranks)
        cells, at = self._has_called.reshape(-1), places * len(self._ranks)
        is_single = made.callers.sizes[made.by] == 1
        cells[at[is_single] + rows[made.by[is_single], 0]] = True
        is_many = ~is_single
        cells[at[is_many, None] + rows[made.by[is_many]]] = True
        return True

    def _is_first(self, rows: Array, places: Array) -> Array:
        """Return which calls are the first of their rank and number."""
        order = np.empty(self._has_called.shape, np.int32)
        turn = np.arange(len(rows), dtype=np.int32)
        order[places[::-1], rows[::-1]] = turn[::-1]  # of equal places the last write stays
        found: Array = order[places, rows] == turn
        return found

    def _differing(self, made: Made, places: Array, kinds: Array) -> None:
        """Take calls of numbers that differ, each for itself."""
        order = np.lexsort((made.code, places))
        made, places = made.where(order), places[order]
        for at in np.unique(places).tolist():
            begin, end = np.searchsorted(places, (at, at + 1)).tolist()
            number = int(self._numbers[at])
            codes, ranks = made.code[begin:end].tolist(), made.rank[begin:end].tolist()
            row = self._differ.get(number)
            if row is None:
                called = mask_of(self._ranks[self._has_called[at]].tolist())
                before = called & ~mask_of(ranks)
                row = self._differ[number] = {int(self._codes[at]): before} if before else {}
            for code, rank in zip(codes, ranks, strict=True):
                row[code] = row.get(code, 0) | 1 << rank
            at = made.at[begin:end]
            times = made.step[at].tolist(), made.time_ns[at].tolist()
            when = min(zip(*times, strict=True))
            known = self.first.get(number)
            self.first[number] = min(known, when) if known else when
            if number < self.broken and len({int(kinds[code]) for code in row}) > 1:
                self.broken = number

    def _agree_on_complete(self) -> None:
        if self.num_members:
            waits = np.flatnonzero(~self._is_agreed & ~self._is_odd)
            if len(self._ranks) == self.num_members:
                whole = self._has_called[waits].all(axis=1)
            else:
                whole = self._has_called[waits].sum(axis=1) == self.num_members
            self._is_agreed[waits[whole]] = True

    def _forget(self) -> None:
        """Drop all but the newest numbers that are agreed on, and what is open for too long."""
        gone = np.zeros(len(self._numbers), bool)
        agreed = np.flatnonzero(self._is_agreed)
        if len(agreed) > 2 * KEPT:
            gone[agreed[:-KEPT]] = True
        if len(agreed):
            # A rank sends its states before its later calls: nothing more comes of these numbers.
            is_idle = ~self._is_from_chunk & ~self._is_agreed & ~self._is_odd
            gone[np.flatnonzero(is_idle[: agreed[-1]])[:-KEPT]] = True
        forgotten = self._numbers[gone & self._is_agreed]
        still_open = np.flatnonzero(~self._is_agreed & ~gone)
        if len(still_open) > MAX_OPEN:
            old = still_open[: len(still_open) - MAX_OPEN + MAX_OPEN // 4]
            gone[old] = True
            forgotten = np.append(forgotten, self._numbers[old])
        if not gone.any():
            return
        self.given_up = max(self.given_up, int(forgotten.max(initial=0)))
        for number in self._numbers[gone & self._is_odd].tolist():
            self._differ.pop(number, None)
            self.first.pop(number, None)
        kept = ~gone
        self._numbers, self._codes = self._numbers[kept], self._codes[kept]
        self._is_agreed, self._is_odd = self._is_agreed[kept], self._is_odd[kept]
        self._is_from_chunk = self._is_from_chunk[kept]
        self._has_called = self._has_called[kept]


class CallTable:
    """Fingerprints of all collectives of an attempt, whatever order they come in."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.num_taken = 0
        self._tracks: dict[str, Track] = {}
        self._states: dict[str, list[tuple[int, ...]]] = {}  # by group: of `Made`, not taken yet
        self._codes: dict[tuple[str, str, str, int, int, str], int] = {}
        self._same: dict[Call, int] = {}
        self._kinds: dict[tuple[object, ...], int] = {}  # calls wherever they come from
        self._hard: list[int] = []  # code -> kind
        self._since_ns = 0  # what is older is of another program

    @property
    def tracks(self) -> dict[str, Track]:
        """Return the calls of each group."""
        self._take_states()
        return self._tracks

    def define(self, group: str, num_members: int) -> None:
        """Note how many members a group has."""
        track = self._tracks.setdefault(group, Track())
        if num_members > track.num_members:
            track.know_members(num_members)

    def start_again(self, since_ns: int) -> None:
        """Forget everything before a rank came up as a new process: all count from 1 again."""
        self._since_ns = max(self._since_ns, since_ns)
        self._states.clear()
        self._tracks = {name: Track(track.num_members) for name, track in self._tracks.items()}

    def add(self, events: Collectives, together: Alike | None = None) -> None:
        """Take collectives of ranks; `together` are those of them that stand for all."""
        if self._since_ns:  # some are of another program
            together = None
        self._take_states()
        chosen = np.arange(len(events)) if together is None else together.places
        by = np.arange(len(events)) if together is None else together.of
        callers = single(events.rank) if together is None else together.callers
        codes = np.array([self._code(_key(shape)) for shape in events.shapes])[events.codes[chosen]]
        keep = self._is_kept(events, chosen, codes)
        if not keep.all():
            chosen, by, codes = chosen[keep], by[keep], codes[keep]
        number, step, time_ns = events["sequence"], events["step"], events["arrived_ns"]
        for group, those in events.places_by_group(chosen):
            at = chosen[those]
            made = Made(
                by[those], callers, number[at], codes[those], at, step, time_ns, is_state=False
            )
            self._put(group, made)
        self._put_exchanges(events)

    def _is_kept(self, events: Collectives, chosen: Array, codes: Array) -> Array:
        keep: Array = (events["sequence"][chosen] > 0) & (events["flags"][chosen] & FLAG_P2P == 0)
        if self._since_ns:
            keep &= events["arrived_ns"][chosen] >= self._since_ns
        if len(self.calls) >= MAX_CALLS:
            keep &= codes != _TOO_MANY
        return keep

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
                    code = self._code(key)
                    if code != _TOO_MANY:
                        made = (state.rank, number, code, state.step, time_ns)
                        self._states.setdefault(group.group, []).append(made)

    def _take_states(self) -> None:
        states, self._states = self._states, {}
        for group, rows in states.items():
            rank, number, code, step, time_ns = np.array(rows, np.int64).T
            at = np.arange(len(rows))
            made = Made(at, single(rank), number, code, at, step, time_ns, is_state=True)
            self._put(group, made)

    def _put(self, group: str, made: Made) -> None:
        self.num_taken += int(made.callers.sizes[made.by].sum())
        track = self._tracks.setdefault(group, Track())
        track.put(made, self.calls, np.array(self._hard))

    def _put_exchanges(self, events: Collectives) -> None:
        are_exchanges = [shape.operation in EXCHANGES for shape in events.shapes]
        if not any(are_exchanges):
            return
        of_all = np.flatnonzero(events.of_shapes(are_exchanges))
        codes = np.zeros(len(of_all), np.int64)
        kept = of_all[self._is_kept(events, of_all, codes)]
        for group, chosen in events.by_group(kept):
            track = self._tracks[group]
            names = ("sequence", "input_bytes", "output_bytes")
            number, sent, expected = (events[name][chosen] for name in names)
            rows = np.stack([number, events.rank[chosen], sent, expected], axis=1)
            track.exchanges.put(rows[(number > track.given_up) & (sent >= 0)])

    def _code(self, key: tuple[str, str, str, int, int, str]) -> int:
        """Return the code of a call; raw values that mean the same have the same one."""
        known = self._codes.get(key)
        if known is not None:
            return known
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


def _places(known: Array, values: Array) -> Array:
    """Return the place of each value among those known (ascending), all of which are there."""
    is_dense = int(known[-1]) - int(known[0]) == len(known) - 1
    found: Array = values - known[0] if is_dense else np.searchsorted(known, values)
    return found


def _united(known: Array, values: Array) -> Array:
    """Return all values of two ascending arrays, each once, ascending."""
    if not len(values):
        return known
    return sorted_distinct(np.concatenate([known, values]))


def _are_among(known: Array, values: Array) -> bool:
    """Return whether all values are among those known (ascending)."""
    if not len(values) or not len(known):
        return not len(values)
    at = np.minimum(np.searchsorted(known, values), len(known) - 1)
    return bool((known[at] == values).all())


def ranks_of(mask: int) -> list[int]:
    """Return the ranks whose bits are set."""
    return [rank for rank, bit in enumerate(reversed(f"{mask:b}")) if bit == "1"]


def mask_of(ranks: Iterable[int]) -> int:
    """Return ranks as bits."""
    return sum(1 << rank for rank in set(ranks))


def _key(shape: CallShape) -> tuple[str, str, str, int, int, str]:
    return (shape.operation, shape.reduce_op, shape.dtype, shape.size_bytes, shape.peer_rank,
            shape.call_site)  # fmt: skip
