"""Which of the recognised lines began it: the first cause before its echoes."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope_server.known_errors.tally import Group, Tally

_MAX_SILENT = 8  # more than that are no suspects but logs that were not given
_CLASS = {"initiating": 0, "cascade": 1, "teardown": 2}
_SURE, _LIKELY, _HEDGED, _ECHO_ONLY, _STOP_ONLY = 0.9, 0.75, 0.5, 0.4, 0.3


@dataclass(frozen=True)
class Root:
    """The first cause, as far as the lines show it."""

    group: Group
    ranks: tuple[int, ...]  # at fault as far as is known, never those that only echo
    signal: str | None
    confidence: float
    reason: str  # the rule that gave the confidence, in words
    rivals: tuple[Group, ...] = ()  # as good as the cause itself: order between files is unknown
    echoes: tuple[Group, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """What a reading amounts to: the root or None, and every group that counts, in order."""

    root: Root | None
    groups: tuple[Group, ...]
    num_ungrouped: int = 0


def evaluate(tally: Tally) -> Evaluation:
    """Return the root and the groups of a reading.

    Class before strength before rarity before order: an initiating line beats an echo, a cause in
    itself beats a line that leaves much open. Order counts within one source alone, for the clocks
    of two are not compared.
    """
    counting = [group for group in tally.groups.values() if _counts(group, tally)]
    ordered = sorted(counting, key=_order)
    faults = [group for group in ordered if group.role in _CLASS]
    root = _root(faults, tally) if faults else None
    return Evaluation(root, tuple(ordered), tally.num_ungrouped)


def _counts(group: Group, tally: Tally) -> bool:
    entry = group.entry
    if entry is None:
        return True
    if entry.role == "note" or group.count < entry.min_count:
        return False
    if entry.unless and tally.has(entry.unless):
        return False
    if entry.differs:
        ranks = {rank for _, rank in group.values.values()}
        if len(group.values) < 2 or (None not in ranks and len(ranks) < 2):
            return False
        if None not in ranks:
            return True  # two ranks of one job: not one log of two runs
    return not entry.when or tally.has(entry.when)


def _order(group: Group) -> tuple[int, int, tuple[int, int]]:
    role = _CLASS.get(group.role or "", 4 if group.role == "benign" else 3)
    return role, -group.strength, group.first


def _root(faults: list[Group], tally: Tally) -> Root:
    first = faults[0]
    same = [group for group in faults if _order(group)[:2] == _order(first)[:2]]
    apart = [group for group in same if not group.sources & first.sources]
    if apart and first.role == "initiating":  # in other files: the rarer one is the likelier cause
        rarest = min([first, *apart], key=lambda group: (len(group.ranks) or 1, group.first))
        first = rarest
    rivals = tuple(
        group for group in same
        if group is not first and group.family != first.family
        and not group.sources & first.sources
        and (len(group.ranks) or 1) == (len(first.ranks) or 1)
    )  # fmt: skip
    echoes = tuple(group for group in faults if group.role != "initiating" and group is not first)
    ranks, signal = _who(first, faults, tally)
    confidence, reason = _confidence(first, ranks, rivals, echoes)
    return Root(first, ranks, signal, confidence, reason, rivals, echoes)


def _who(group: Group, faults: list[Group], tally: Tally) -> tuple[tuple[int, ...], str | None]:
    if group.culprits:
        return tuple(sorted(group.culprits)), group.signal
    if (
        group.role == "cascade"
    ):  # those that wait or lost a peer speak; the one that is gone does not
        speakers = set().union(*(fault.ranks for fault in faults))
        silent = tally.ranks - speakers
        is_few = len(silent) <= _MAX_SILENT and len(silent) < len(speakers)
        return (tuple(sorted(silent)) if is_few else ()), group.signal
    if group.entry is not None and group.entry.differs:  # the value that fewest have is the odd one
        odd = min(group.values, key=lambda value: group.value_counts[value])
        line, rank = group.values[odd]
        return (() if rank is None else (rank,)), line
    return tuple(sorted(group.ranks)), group.signal


def _confidence(
    group: Group, ranks: tuple[int, ...], rivals: tuple[Group, ...], echoes: tuple[Group, ...]
) -> tuple[float, str]:
    if group.role == "teardown":
        return _STOP_ONLY, "only the stop of the job was seen, not what led to it"
    if group.role == "cascade" and group.culprits:
        return _HEDGED, "the ranks that wait name the one that they wait for"
    if group.role == "cascade" and ranks:
        return _ECHO_ONLY, "only echoes were seen; the ranks that say nothing are suspected"
    if group.role == "cascade":
        return _ECHO_ONLY, "only echoes were seen: the rank where it began has left no line here"
    if rivals:
        return _HEDGED, "another cause is as likely, and the order between files is not known"
    if group.entry is None and echoes:
        return _LIKELY, "it is no known error, but it began by itself and others echo it"
    if group.entry is None:
        return _HEDGED, "it is no known error, and nothing echoes it"
    if group.strength == 1:
        return _HEDGED, "the line is known, but several causes lead to it"
    if group.strength == 3:
        return _SURE, "the line names the cause itself"
    return _LIKELY, "a known failure that begins by itself"
