"""Who called something else than its group, and how its calls differ from those of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.policy import POLICY
from rankscope_server.observe.alignment import DEPTH, Edit, align, foretell
from rankscope_server.observe.calls import KEPT, Call, CallTable, Track, mask_of

_SECOND = 1e9


@dataclass(frozen=True, slots=True)
class Side:
    """Ranks that called the same, from the first difference on."""

    ranks: tuple[int, ...]
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class CallDifference:
    """The first number of a group that was not called alike."""

    group: str
    number: int
    step: int
    time_ns: int
    culprits: Side
    others: Side
    edits: tuple[Edit, ...]  # of the culprits against the others
    is_tie: bool  # neither side is the larger one, nor does either go on as before
    is_foretold: bool  # of equal sides, the culprits are those that do not go on as before
    is_site_only: bool
    num_present: int
    num_members: int  # 0 not known


def differences(window: Window) -> list[CallDifference]:
    """Return the first difference of each group that has one and is heard well enough."""
    found = []
    for group, track in window.calls.tracks.items():
        if track.odd:
            difference = _first(window, window.calls, group, track)
            if difference is not None:
                found.append(difference)
    return found


def _first(window: Window, table: CallTable, group: str, track: Track) -> CallDifference | None:
    for number in sorted(track.odd):
        called = _comparable(window, group, track.row(number))
        if len(set(called.values())) < 2:
            continue
        row = {rank: track.alias.get((rank, code), code) for rank, code in called.items()}
        site_only = len({table.calls[code][:-1] for code in row.values()}) == 1
        if not _is_settled(window, group, track, row, number, site_only):
            continue
        if site_only and _is_harmless(table, track, number, called, row):
            continue
        return _difference_of(table, group, track, number, row, site_only)
    return None


def _comparable(window: Window, group: str, row: Mapping[int, int]) -> dict[int, int]:
    """Return the calls of ranks that mean the same group by this name.

    A rank whose own word of the group is missing means the one in which others count it.
    """
    named = Counter(members for (_, name), members in window.groups.items() if name == group)
    meant = {rank: window.groups.get((rank, group)) for rank in row}
    for rank in [rank for rank, members in meant.items() if members is None]:
        meant[rank] = next((one for one, _ in named.most_common() if rank in one), None)
    if len(set(meant.values())) == 1:
        return dict(row)
    usual = Counter(members for members in meant.values() if members).most_common(1)
    return {rank: code for rank, code in row.items() if usual and meant[rank] == usual[0][0]}


def _is_settled(
    window: Window, group: str, track: Track, row: Mapping[int, int], number: int, site_only: bool
) -> bool:
    """Return whether all who can still report what they called have done so, or had the time."""
    _, first_ns = track.first[number]
    policy = window.policy
    now_ns = max((window.states[r].time_ns for r in row if r in window.states), default=0)
    had_time = (now_ns - first_ns) / _SECOND >= policy.desync_wait_seconds
    if site_only:  # what a rank calls later shows whether it has a line of its own for it
        return had_time or track.newest - number >= DEPTH
    if had_time:
        return True
    members = next((m for r in row if (m := window.groups.get((r, group)))), tuple(row))
    for member in members:
        if member in row:
            continue
        state = window.states.get(member)
        standing = next((g for g in state.groups if g.group == group), None) if state else None
        if state is None or (standing is not None and standing.issued >= number):
            return False
    return True


def _is_harmless(
    table: CallTable, track: Track, number: int, called: Mapping[int, int], row: Mapping[int, int]
) -> bool:
    """Return whether calls that differ by their place in the code alone are in one order.

    A rank that has a line of its own for a call (rank 0 logs, a stage of a pipeline) never comes
    from the line of the others. One that does may have the order wrong: then its next calls are
    those of the others, moved. `called` are the codes as they were, `row` in the others' terms.
    """
    usual, _ = _majority(row)
    for rank, code in called.items():
        known = track.alias.get((rank, code))
        if usual in (code, known) or not table.calls[code].site or not table.calls[usual].site:
            continue
        if known is None and table.calls[usual].site not in track.sites.get(rank, ()):
            track.alias[rank, code] = usual
        elif _has_moved(track, number, rank, row):
            return False
    track.agree(number, usual)
    return True


def _has_moved(track: Track, number: int, rank: int, row: Mapping[int, int]) -> bool:
    others = [peer for peer, code in row.items() if code != row[rank]]
    sure = POLICY.desync_equal_calls
    theirs = _reference(track, number, others, sure + 2)
    mine = _actual(track, number, rank, sure + 2)
    is_swap = len(mine) > 1 and len(theirs) > 1 and mine[:2] == theirs[1::-1]
    is_skip = mine[:sure] == theirs[1 : sure + 1] and len(mine) >= sure
    is_insert = theirs[:sure] == mine[1 : sure + 1] and len(theirs) >= sure
    return is_swap or is_skip or is_insert


def _majority(row: Mapping[int, int]) -> tuple[int, bool]:
    """Return the code that most ranks called, and whether it is more than half of them."""
    (code, count), *_ = Counter(row.values()).most_common()
    tied = [other for other, n in Counter(row.values()).items() if n == count]
    return (min(tied) if len(tied) > 1 else code), 2 * count > len(row)


def _difference_of(
    table: CallTable, group: str, track: Track, number: int, row: Mapping[int, int],
    site_only: bool,
) -> CallDifference:  # fmt: skip
    usual, is_sure = _majority(row)
    # With whom members agree whose calls never came is not known.
    is_sure = is_sure and 2 * list(row.values()).count(usual) >= track.num_members
    is_foretold = False
    if not is_sure:
        expected = foretell(_before(track, number), 1)
        if expected and expected[0] in row.values():
            usual, is_foretold = expected[0], True
    others = tuple(sorted(rank for rank, code in row.items() if code == usual))
    wrong = Counter(code for code in row.values() if code != usual).most_common(1)[0][0]
    culprits = tuple(sorted(rank for rank, code in row.items() if code != usual))
    first = min(rank for rank in culprits if row[rank] == wrong)
    reference = _reference(track, number, others, DEPTH)
    actual = _actual(track, number, first, DEPTH)
    history = [*_before(track, number), *reference]
    foretold = foretell(history, DEPTH - len(reference)) if len(reference) < DEPTH else []

    def is_alike(one: int, other: int) -> bool:
        a, b = table.calls[one], table.calls[other]
        return a.site == b.site if a.site and b.site else a.operation == b.operation

    key = (number, first, tuple(reference), tuple(actual))
    edits = track.known_edits.get("edits") if track.known_edits.get("key") == key else None
    if edits is None:
        edits = tuple(align([*reference, *foretold], actual, is_alike))
        track.known_edits = {"key": key, "edits": edits}
    assert isinstance(edits, tuple)
    step, time_ns = track.first[number]
    return CallDifference(
        group=group,
        number=number,
        step=step,
        time_ns=time_ns,
        culprits=Side(culprits, tuple(table.calls[code] for code in actual)),
        others=Side(others, tuple(table.calls[code] for code in [*reference, *foretold])),
        edits=edits,
        is_tie=not is_sure and not is_foretold,
        is_foretold=not is_sure and is_foretold,
        is_site_only=site_only,
        num_present=len(row),
        num_members=track.num_members,
    )


def _before(track: Track, number: int) -> list[int]:
    """Return what all called before a number, without a gap, oldest first."""
    codes: list[int] = []
    while len(codes) < KEPT:
        code = track.sole(number - 1 - len(codes))
        if code is None:
            break
        codes.append(code)
    return codes[::-1]


def _reference(track: Track, number: int, ranks: Sequence[int], count: int) -> list[int]:
    """Return what most of some ranks called from a number on, up to the first gap."""
    codes: list[int] = []
    among = mask_of(ranks)
    for place in range(number, number + count):
        code = track.usual(place, among)
        if code is None:
            break
        codes.append(code)
    return codes


def _actual(track: Track, number: int, rank: int, count: int) -> list[int]:
    """Return what one rank called from a number on, in the others' codes, up to the first gap."""
    codes = _reference(track, number, (rank,), count)
    return [track.alias.get((rank, code), code) for code in codes]
