"""What the page of hangs says. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rankscope_server.api.hang.schema import HangFinding, Standing, WaitGraphAnswer, WaitNode
from rankscope_server.api.hang.standings import Waits
from rankscope_server.api.hang.stored import StoredWindow
from rankscope_server.diagnose.hang.positions import OpenOperation
from rankscope_server.findings.text import capital, ranks_text, seconds_text
from rankscope_server.text import group_text, plural


class Say:
    """Sentences about the graph of one attempt, in the past where it is over."""

    def __init__(self, window: StoredWindow, *, is_over: bool) -> None:
        self._window, self._is_over = window, is_over
        self._members = {name: ranks for (_, name), ranks in window.groups.items()}

    def node(
        self,
        standing: Standing,
        count: int,
        inside: Sequence[OpenOperation],
        lacked: Sequence[OpenOperation],
        held: Sequence[OpenOperation],
    ) -> str:
        """Return what ranks of one node are in, or what they did not do; `held` others ended."""
        if inside:
            return f"in {self._some(inside)}"
        what = self._some(lacked) if lacked else "what others are in"
        have = "had" if self._is_over else "has" if count == 1 else "have"
        waits = "waited" if self._is_over else "waits"
        if standing in ("missing", "behind") and held:
            ended, wait = ("had ended", "waited") if self._is_over else ("have ended", "wait")
            return f"still in {self._some(held)}, which others {ended}; ranks in {what} {wait}"
        if lacked and not lacked[0].sequence and standing == "missing":
            done = "sent nothing to" if lacked[0].lack == "sends nothing" else "taken nothing from"
            return f"{have} {done} a rank that {waits}"
        if standing == "missing":
            return f"{have} not entered {what}"
        if standing == "behind":
            return f"{have} not finished what comes before {what}"
        if standing == "left":
            return f"went on, or ended, without {what}"
        end = {"gone": "ended", "silent": "sent no more records"}.get(standing, "nothing is known")
        return f"{end}; who is in {what} {waits}"

    def transfer(self, inside: Sequence[OpenOperation]) -> str:
        """Return that an operation does not end though all are in it."""
        ends = "did not end" if self._is_over else "does not end"
        return f"{self._some(inside)}: all members have entered it, and it {ends}"

    def edge(self, source: WaitNode, target: WaitNode) -> str:
        """Return "1,023 ranks wait for rank 17"."""
        wait = "waited" if self._is_over else "waits" if source.ranks.count == 1 else "wait"
        if target.is_transfer:
            return f"{capital(who(source))} {wait} for its end"
        return f"{capital(who(source))} {wait} for {who(target)}"

    def _some(self, operations: Sequence[OpenOperation]) -> str:
        """Return one operation, or of how many groups."""
        if len({operation.key for operation in operations}) == 1:
            return self._operation(operations[0])
        names = sorted({operation.name for operation in operations})
        num_groups = len({operation.group for operation in operations})
        return f"{' and '.join(names[:3])} of {plural(num_groups, 'group')}"

    def _operation(self, operation: OpenOperation) -> str:
        """Return "all_reduce #812 over all 8 ranks"."""
        if not operation.sequence:
            way = "from" if operation.name == "recv" else "to"
            return f"{operation.name} {way} rank {operation.members[1]}"
        members = self._members.get(operation.group)
        description = self._window.descriptions.get(operation.group, "")
        over = (
            f"group {operation.group}"
            if members is None
            else group_text(list(members), self._window.world_size, description)
        )
        return f"{operation.name} #{operation.sequence:,} over {over}"


def who(node: WaitNode) -> str:
    """Return "rank 17", "ranks 3 and 4" or "1,023 ranks"."""
    if node.ranks.count > len(node.ranks.some) or node.ranks.count > 4:
        return plural(node.ranks.count, "rank")
    return ranks_text(node.ranks.some)


def waiting_text(graph: WaitGraphAnswer, *, is_over: bool) -> str:
    """Return the answer where ranks wait and no finding calls it a hang."""
    waiting = [node for node in graph.nodes if node.depth > 0 and not node.is_transfer]
    longest = max((node.waited_seconds or 0.0 for node in graph.nodes), default=0.0)
    for_seconds = f" for {seconds_text(longest)}" if longest else ""
    number = plural(graph.num_waiting, "rank")
    first = graph.nodes[0]
    many = graph.num_waiting != 1
    if is_over:
        verb = "waited"
    else:
        verb = ("have" if many else "has") + " waited"
    end = " when the attempt ended" if is_over else "; this is not called a hang yet"
    if first.is_transfer or not waiting:
        return f"{number} {verb} in an operation that all had entered{for_seconds}{end}"
    roots = [node for node in graph.nodes if node.depth == 0]
    target = who(first) if len(roots) == 1 else plural(sum(n.ranks.count for n in roots), "rank")
    return f"{number} {verb} for {target}{for_seconds}{end}"


def no_wait_text(waits: Waits, num_clean: int, *, is_over: bool) -> tuple[str, str]:
    """Return the answer where no rank waits, and why that is known.

    `num_clean`: all ranks ended cleanly, so many; else 0.
    """
    text = f"No rank {'waited' if is_over else 'waits'} for another"
    if is_over:
        text += " when the attempt ended"
    if num_clean:
        return text, f"{'Its rank' if num_clean == 1 else f'All {num_clean:,} ranks'} ended cleanly"
    longest = max(waits.idle_seconds.items(), key=lambda item: item[1], default=None)
    if longest is None:
        return text, ""
    rank, seconds = longest
    return text, (
        f"The rank that was quiet for longest, rank {rank}, last moved {seconds_text(seconds)} "
        "before its last record"
    )


def unclear_text(waits: Waits) -> str:
    """Return that ranks do not move and nothing is known of what they are in."""
    ranks = sorted(waits.unclear)
    have, they = ("have", "they are") if len(ranks) > 1 else ("has", "it is")
    return (
        f"{capital(ranks_text(ranks))} {have} not moved, and which collectives {they} in is not "
        "known: their groups were not recorded"
    )


def over_text(finding: HangFinding) -> str:
    """Return the answer where a hang has ended by itself."""
    return f"No rank waits for another now. Over: {finding.what}"


def parts_text(
    function: str, roots: Sequence[str], others: Sequence[str], num_roots: int, num_others: int
) -> str:
    """Return where stacks of the ranks that are waited for part from those of the others."""
    of_roots = f"{plural(num_roots, 'rank')} that others wait for"
    of_others = f"{plural(num_others, 'other')} {_were(num_others)}"
    return (
        f"All were in {function}; from there {of_roots} {_were(num_roots)} in {_list(roots)}, "
        f"{of_others} in {_list(others)}"
    )


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def _list(names: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(names))
    rest = len(distinct) - 2
    return " or ".join(distinct[:2]) + (f" or {rest} more" if rest > 0 else "")
