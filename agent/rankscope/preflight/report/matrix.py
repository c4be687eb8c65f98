"""The matrix of nodes: one letter for every path that was measured, few enough to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rankscope.preflight.checks.base import Run
from rankscope.preflight.checks.pairs import is_untried
from rankscope.preflight.facts.edges import Dial, DialClass, EdgeFacts
from rankscope.preflight.facts.loss import along
from rankscope.preflight.model import LaunchVerdict

OK, NOT_TESTED, SELF, SOME, LOSS = ".", "-", " ", "+", "L"
MEANINGS: dict[str, str] = {  # worst first; the order decides where a path has several
    "D": "drop", "R": "refused", "P": "prohibited", "A": "address dead", "U": "unresolved",
    "W": "wrong host", "X": "other program", "M": "large lost", "E": "error",
    "N": "no data",
    LOSS: "loss", "s": "slow", "c": "clock", OK: "ok", NOT_TESTED: "not tested",
}  # fmt: skip
_OF_DIAL: dict[DialClass, str] = {
    "drop": "D", "refused": "R", "prohibited": "P", "local-firewall": "P", "no-arp": "A",
    "no-route": "A", "unresolved": "U", "wrong-host": "W", "not-us": "X", "large-stall": "M",
    "error": "E", "no-local-port": "E",
    "no-data": "N", "no-answer": "N", "other-secret": "X", "other-run": "X",
    "other-version": "X", "ok": OK,
}  # fmt: skip
_OF_FINDING = {
    "net.mtu.path": "M", "net.loss": LOSS, "net.latency": "s", "net.jitter": "s",
    "net.bandwidth": "s", "clock.offset": "c", "coll.pair": "s",
}  # fmt: skip
MILD = frozenset("Lsc")  # a path that works, though badly
_ORDER = "".join(MEANINGS)
MOST_NODES = 32  # above, only nodes with bad paths have a row
_HUB_PEERS = 4  # a node with bad paths to more peers has a row of its own, its peers among "others"
_MOST_ROWS = 16


@dataclass(frozen=True)
class Matrix:
    """Rows are where a path starts, columns where it ends."""

    names: tuple[str, ...]  # of rows and columns; the last may be `others`
    cells: tuple[tuple[str, ...], ...]  # a letter; with SOME: only some of the others
    others: str = ""  # label of the row and column for all who have none
    note: str = ""  # what is not shown, and what is known of it
    values: tuple[tuple[str, ...], ...] = ()  # beside the letters: "2 %", the loss on that way

    def value(self, row: int, column: int) -> str:
        """Return what stands beside the letter of a cell; "" for nothing."""
        return self.values[row][column] if self.values else ""

    @property
    def letters(self) -> tuple[str, ...]:
        """Return the letters that need a word, worst first, as a legend shows them."""
        seen = {cell.rstrip(SOME) for row in self.cells for cell in row} | {OK}
        return tuple(letter for letter in MEANINGS if letter in seen)

    @property
    def has_bad(self) -> bool:
        """Return whether a path is worse than ok."""
        return any(
            cell.strip() and cell not in (OK, NOT_TESTED) for row in self.cells for cell in row
        )


def letter(edge: EdgeFacts | None) -> str:
    """Return the letter of what one node measured towards one peer."""
    if edge is None or edge.not_tested:
        return NOT_TESTED
    dials = [dial for dial in (edge.mesh, edge.master, *edge.ephemeral) if dial is not None]
    if not dials:
        return NOT_TESTED
    if edge.mtu is not None and not edge.mtu.large_ok:
        return _worst([*map(_of_dial, dials), "M"])
    return _worst(map(_of_dial, dials))


def _of_dial(dial: Dial) -> str:
    return _OF_DIAL[dial.outcome]


def _worst(letters: Iterable[str]) -> str:
    return min(letters, key=_ORDER.index)


def build(verdict: LaunchVerdict, run: Run, most_nodes: int = MOST_NODES) -> Matrix | None:
    """Return the matrix; None for a single node, or where no path was measured."""
    names = list(verdict.expected) + [n for n in verdict.reported if n not in verdict.expected]
    letters = _letters(verdict, run)
    if len(names) < 2 or all(one == NOT_TESTED for one in letters.values()):
        return None
    lost = _lost(run, letters)
    if len(names) <= most_nodes:
        return Matrix(names=tuple(names), cells=_cells(names, letters), values=_values(names, lost))
    bad = {pair: one for pair, one in letters.items() if one not in (OK, NOT_TESTED)}
    chosen, num_left = _chosen(bad, names, min(most_nodes, _MOST_ROWS))
    rest = [name for name in names if name not in chosen]
    others = f"{len(rest):,} others"
    cells = _with_others(chosen, letters, set(rest))
    note = _note(rest, letters, num_left)
    values = _values([*chosen, others], lost)
    return Matrix(names=(*chosen, others), cells=cells, others=others, note=note, values=values)


def _note(rest: list[str], letters: Mapping[tuple[str, str], str], num_left: int) -> str:
    """Say what is known of the nodes without a row; who was not tested is not clean."""
    if num_left:
        return f"{num_left:,} more nodes with bad paths are among the others"
    tested = {name for pair, one in letters.items() if one != NOT_TESTED for name in pair}
    num_clean = sum(name in tested for name in rest)
    silent = f", {len(rest) - num_clean:,} not tested" if num_clean < len(rest) else ""
    return f"{num_clean:,} nodes clean{silent}"


def _letters(verdict: LaunchVerdict, run: Run) -> dict[tuple[str, str], str]:
    letters = {
        (start, end): NOT_TESTED if is_untried(run.reports.get(end), edge) else letter(edge)
        for start, end, edge in run.edges()
    }
    for finding in verdict.findings:
        said = _OF_FINDING.get(finding.id)
        if said is not None:
            for pair in finding.edges:
                letters[pair] = _worst([letters.get(pair, NOT_TESTED), said])
    return {(start, end): one for (start, end), one in letters.items() if start != end}


def _lost(run: Run, letters: Mapping[tuple[str, str], str]) -> dict[tuple[str, str], str]:
    """Return the loss of the paths that lose too much, as it is shown; each way has its own."""
    found = {}
    for (start, end), one in letters.items():
        lost = along(run.edge(start, end), run.edge(end, start)) if one == LOSS else None
        if lost is not None:
            share = lost.ratio * 100
            found[start, end] = f"{share:.0f}%" if share >= 1 else f"{share:.1g}%".lstrip("0")
    return found


def _values(names: list[str], values: Mapping[tuple[str, str], str]) -> tuple[tuple[str, ...], ...]:
    if not values:
        return ()
    return tuple(tuple(values.get((start, end), "") for end in names) for start in names)


def _cells(names: list[str], letters: Mapping[tuple[str, str], str]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        tuple(SELF if start == end else letters.get((start, end), NOT_TESTED) for end in names)
        for start in names
    )


def _chosen(
    bad: Mapping[tuple[str, str], str], names: list[str], most: int
) -> tuple[list[str], int]:
    """Return the nodes that need a row, and how many more would.

    A node with bad paths to many peers explains them: they need no rows of their own. What is
    left are single pairs, of which both ends are shown.
    """
    peers: dict[str, set[str]] = {}
    for start, end in bad:
        peers.setdefault(start, set()).add(end)
        peers.setdefault(end, set()).add(start)
    hubs: list[str] = []
    while peers:
        worst = max(peers, key=lambda name: (len(peers[name]), name))
        if len(peers[worst]) <= _HUB_PEERS:
            break
        hubs.append(worst)
        for peer in peers.pop(worst):
            peers[peer].discard(worst)
        peers = {name: left for name, left in peers.items() if left}
    ends = sorted(peers, key=lambda name: (-len(peers[name]), name))
    wanted = hubs + ends
    order = {name: place for place, name in enumerate(names)}
    shown = sorted(wanted[:most], key=lambda name: order.get(name, len(order)))
    return shown, len(wanted) - len(shown)


def _with_others(
    chosen: list[str], letters: Mapping[tuple[str, str], str], rest: set[str]
) -> tuple[tuple[str, ...], ...]:
    place = {name: number for number, name in enumerate(chosen)}
    size = len(chosen) + 1
    seen: list[list[set[str]]] = [[set() for _ in range(size)] for _ in range(size)]
    for (start, end), one in letters.items():
        row, column = place.get(start, size - 1), place.get(end, size - 1)
        seen[row][column].add(one)
    rows = []
    for row in range(size):
        cells = [_together(seen[row][column]) for column in range(size)]
        if row < size - 1:
            cells[row] = SELF
        rows.append(tuple(cells))
    return tuple(rows)


def _together(seen: set[str]) -> str:
    tested = seen - {NOT_TESTED}
    if not tested:
        return NOT_TESTED
    return _worst(tested) + (SOME if len(tested) > 1 else "")
