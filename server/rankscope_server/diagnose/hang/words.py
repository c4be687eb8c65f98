"""What the hang detector says about a tangle that does not move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rankscope_server.diagnose.hang.positions import OpenOperation
from rankscope_server.diagnose.hang.wait_graph import activity_ns
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding
from rankscope_server.findings.text import capital, cut, ranks_text, seconds_text

_STACK_LINES = 12
_USUAL_LINES = 4  # innermost lines of those who wait: enough to see in which call
_LOADER_MARKS = ("dataloader.py", "_next_data", "_try_get_data")
_S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HangCase:
    """Roots that keep others waiting; without roots, a transfer that does not end."""

    roots: tuple[int, ...]
    operation: OpenOperation
    alike: tuple[int, ...]  # that wait for a root itself, in `operation` or in one of its name
    waiters: tuple[int, ...]  # all who wait
    waited_seconds: float
    still_in: dict[int, OpenOperation]  # what a root is in that others have ended
    idle_seconds: dict[int, float]
    gone: tuple[int, ...]
    silent: tuple[int, ...]  # all of `roots`, or none
    unheard: tuple[int, ...]  # that may lack as well: of them nothing is heard any more
    is_cycle: bool
    is_certain: bool
    is_open: bool = False  # of a circle: what its ranks called is not known, so none is named


def hang_finding(window: Window, case: HangCase) -> Finding:
    """Return the finding of a case."""
    confidence, reasons = _confidence(case)
    onset_step, onset_ms = _onset(window, case)
    name = "+".join(str(rank) for rank in case.roots) or f"group {case.operation.group}"
    return window.finding(
        "hang",
        f"hang/{name}",
        ranks=() if case.is_open else case.roots,
        hosts=() if case.is_open else window.hosts(case.roots),
        group=case.operation.group,
        onset_step=onset_step,
        onset_ms=onset_ms,
        cost=1.0,
        confidence=(confidence, reasons),
        what=_what(window, case, onset_step),
        why=_why(window, case),
        next=_next(window, case),
        command=_command(window, case),
        evidence=_evidence(window, case),
        ruled_out=_ruled_out(window, case),
        disproof=_disproof(window, case),
        victims=tuple(sorted({*case.waiters, *case.roots})) if case.is_open else case.waiters,
    )


def _onset(window: Window, case: HangCase) -> tuple[int | None, float | None]:
    """Return the step of the roots and when the first of them was last active.

    Where silent roots are by now is not known: then those of the ranks that wait.
    """
    ranks = case.waiters if case.silent else case.roots or case.waiters
    states = [window.states[rank] for rank in ranks if rank in window.states]
    if not states:
        ends = [window.ended[rank] for rank in case.roots if rank in window.ended]
        return (ends[0].last_step, ends[0].time_ns / 1e6) if ends else (None, None)
    first = min(states, key=activity_ns)
    return first.step or None, activity_ns(first) / 1e6


def _operation_text(operation: OpenOperation) -> str:
    if operation.sequence:
        return f"{operation.name} #{operation.sequence:,} of group {operation.group}"
    return operation.name


def _what(window: Window, case: HangCase, step: int | None) -> str:
    operation = case.operation
    in_step = f" in step {step:,}" if step else ""
    if not case.roots:
        return (
            f"{capital(_operation_text(operation))} does not end{in_step}: all "
            f"{len(operation.members)} members have entered it"
        )
    who = window.who(case.roots)
    many = len(case.roots) > 1
    if case.is_cycle:
        who = who if many else f"{who} and its peers"
        why = "which of them called something else is not known" if case.is_open else (
            "their operations come in different orders"
        )  # fmt: skip
        return f"{who} wait for each other{in_step}: {why}"
    if set(case.gone) == set(case.roots):
        return f"{who} {'are' if many else 'is'} gone{in_step}, and others still wait"
    if set(case.silent) == set(case.roots):
        return f"{who} {'have' if many else 'has'} stopped reporting{in_step}, and others wait"
    have = "have" if many else "has"
    if any(held.is_done_elsewhere for held in case.still_in.values()):
        missing = f"{have} not come to {_operation_text(operation)}"
    elif operation.lack == "not entered":
        missing = f"{have} not entered {_operation_text(operation)}"
    elif operation.lack == "behind":
        missing = f"{have} not finished what comes before {_operation_text(operation)}"
    else:
        verb = "sent nothing to" if operation.lack == "sends nothing" else "taken nothing from"
        missing = f"{have} {verb} {ranks_text(case.alike)}"
    loader = [root for root in case.roots if _is_in_loader(window, root)]
    where = f", stuck in {'their' if many else 'its'} DataLoader" * (len(loader) == len(case.roots))
    they = "they" if many else "it"
    return f"{who} {'hang' if many else 'hangs'}{in_step}: {they} {missing}{where}"


def _why(window: Window, case: HangCase) -> str:
    operation = case.operation
    behind = len(case.waiters) - len(case.alike)
    waits = "waits" if len(case.alike) == 1 else "wait"
    where = (
        f"{len(case.alike)} of {len(operation.members)} members {waits} in {operation.name}"
        if operation.sequence
        else f"{capital(ranks_text(case.alike))} {waits} in {operation.name}"
    )
    text = f"{where} for {seconds_text(case.waited_seconds)}"
    if behind > 0:
        text += f", {behind} more {'rank waits' if behind == 1 else 'ranks wait'} behind them"
    for root in () if case.silent else case.roots[:4]:
        text += "; " + _root_text(window, case, root)
    if case.silent:
        text += f"; {_silence_text(case.silent)}"
    if case.unheard:
        whereabouts = "where they are" if len(case.unheard) > 1 else "where it is"
        text += f"; {_silence_text(case.unheard)}: {whereabouts} is not known"
    return text


def _silence_text(ranks: Sequence[int]) -> str:
    node = "nodes" if len(ranks) > 1 else "node"
    return f"nothing was heard from the {node} of {ranks_text(ranks)} although other nodes report"


def _root_text(window: Window, case: HangCase, root: int) -> str:
    ended = window.ended.get(root)
    if root in case.gone and ended is not None:
        return f"the process of rank {root} ended ({ended.detail or ended.reason})"
    if root in case.silent:
        return _silence_text((root,))
    state = window.states.get(root)
    if state is None:
        return f"rank {root} never said where it is"
    seconds = case.idle_seconds.get(root)
    still = "is not known to have moved"
    if seconds is not None:
        still = f"has not moved for {seconds_text(seconds)}"
    place = f"is in phase {state.phase} of step {state.step:,}" if state.step else ""
    held = case.still_in.get(root)
    if held is not None and held.is_done_elsewhere:
        inside = f"is still in {_operation_text(held)}, which others have ended,"
        place = f"{place}, {inside}" if place else inside
    parts = (f"rank {root}", place, "and" * bool(place), still)
    return " ".join(part for part in parts if part)


def _next(window: Window, case: HangCase) -> str:
    if not case.roots:
        hosts = ", ".join(window.hosts(case.operation.members)[:4])
        return f"Look at the network between {hosts or 'the members'}, then restart"
    if case.is_cycle:
        return "Compare the order of their calls in their stacks, then fix the order"
    root = case.roots[0]
    if window.facts.is_recording:
        return _next_of_recorded(window, case.roots)
    host = window.host(root)
    if root in case.gone:
        return f"See how rank {root} ended, then restart"
    if root in case.silent:
        return f"See whether {host or 'its node'} is up and its collector runs"
    stack = f"the stack of rank {root}"
    if _is_in_loader(window, root):
        return f"Read {stack}: it waits for its data loader; look at the loader's workers and disk"
    without = f" without {host}" if len(window.hosts(tuple(window.ranks))) > 1 and host else ""
    return f"Read {stack}, then restart the job{without}"


def _command(window: Window, case: HangCase) -> str:
    for root in case.roots:
        known = window.ranks.get(root)
        if known is not None and known.pid and root not in case.gone:
            return f"py-spy dump --pid {known.pid}"
    return ""


def _is_in_loader(window: Window, rank: int) -> bool:
    stacks = window.stacks.get(rank)
    state = window.states.get(rank)
    is_old = stacks is not None and state is not None and stacks.time_ns < activity_ns(state)
    return stacks is not None and not is_old and any(mark in stacks.text for mark in _LOADER_MARKS)


def _usual_stack(window: Window, waiters: tuple[int, ...]) -> tuple[int, int, str] | None:
    """Return (ranks with it, one of them, innermost lines) of the stack most waiters have."""
    tops: dict[str, list[int]] = {}
    for rank in waiters:
        if rank in window.stacks:
            lines = window.stacks[rank].text.strip().splitlines()[:_USUAL_LINES]
            tops.setdefault("\n".join(lines), []).append(rank)
    if not tops:
        return None
    text, ranks = max(tops.items(), key=lambda item: (len(item[1]), -item[1][0]))
    return len(ranks), ranks[0], text


def _evidence(window: Window, case: HangCase) -> tuple[Evidence, ...]:
    facts = [
        Evidence(capital(_root_text(window, case, root)), window.link(root))
        for root in case.roots[:4]
    ]
    for root in case.roots[:2]:
        stacks = window.stacks.get(root)
        if stacks is not None:
            lines = stacks.text.strip().splitlines()[:_STACK_LINES]
            facts.append(Evidence(f"Stack of rank {root}:\n" + "\n".join(lines), window.link(root)))
    usual = _usual_stack(window, case.waiters)
    if usual is not None and case.roots:
        count, rank, text = usual
        who = f"{count} ranks that wait" if count > 1 else f"rank {rank}, which waits"
        facts.append(Evidence(f"Stack of {who}:\n{text}", window.link(rank)))
    if case.alike:
        sites = {
            group.call_site
            for rank in case.alike
            for group in window.states[rank].groups
            if group.group == case.operation.group and group.call_site
        }
        called = f", called at {cut(sorted(sites)[0], 80)}" if len(sites) == 1 else ""
        facts.append(
            Evidence(
                f"{capital(ranks_text(case.alike))} in {_operation_text(case.operation)}{called}",
                window.link(case.alike[0]),
            )
        )
    chain = tuple(rank for rank in case.waiters if rank not in case.alike)
    if window.facts.is_recording and case.idle_seconds:
        facts.append(Evidence(_time_note(min(case.idle_seconds.values()))))
    if chain:
        facts.append(Evidence(f"Waiting behind them: {ranks_text(chain)}"))
    return tuple(facts)


def _ruled_out(window: Window, case: HangCase) -> tuple[str, ...]:
    out: list[str] = []
    if window.facts.is_recording:
        idle = list(case.idle_seconds.values())
        return tuple(_ruled_out_of_recorded(window, case.roots, idle) if case.roots else out)
    if case.roots and not case.is_cycle:
        out.append("A slow rank: no hook has run in it and its step does not advance")
        phases = {window.states[r].phase for r in case.roots if r in window.states}
        if not phases & {"checkpoint", "evaluation"}:
            out.append("A checkpoint or an evaluation: it is in neither")
    if (
        case.roots
        and not case.gone
        and all(window.states[r].alive for r in case.roots if r in window.states)
    ):
        out.append("A dead process: its process is there")
    return tuple(out)


def _disproof(window: Window, case: HangCase) -> str:
    if not case.roots:
        return "The operation is large and the network slow: bytes still flow"
    if case.is_cycle:
        return "One of them leaves its operation by itself"
    if window.facts.is_recording:
        return _disproof_of_recorded(case.roots)
    return "Its stack changes, or the operation ends by itself: then it is slow, not hung"


def _confidence(case: HangCase) -> tuple[float, str]:
    if case.is_cycle:
        return 0.6, "the circle is proved, but not which of them calls in the wrong order"
    if not case.roots:
        return 0.5, "all have entered, so the operation does not show which rank"
    if not case.is_certain:
        return 0.65, "open sends hide what it does now; it stopped first"
    if case.silent or (case.gone and len(case.gone) == len(case.roots)):
        return 0.85, "others wait for it and its process or node does not answer"
    if len(case.roots) > 1:
        return 0.95, "others have entered what they have not, and they wait for no other rank"
    return 0.95, "others have entered what it has not, and it waits for no rank"


def _next_of_recorded(window: Window, roots: Sequence[int]) -> str:
    """Return what to do about ranks that hung, once the job is over."""
    their = "their" if len(roots) > 1 else "its"
    hosts = window.hosts(tuple(roots))
    checked = ", ".join(hosts[:4]) if hosts else f"{their} host{'s' * (len(roots) > 1)}"
    return (
        f"Look at what stopped {ranks_text(roots)}{_at(window, roots)}: {their} logs, and the "
        "kernel log for Xid and ECC errors; run rankscope preflight on "
        f"{checked} before the next start"
    )


def _ruled_out_of_recorded(
    window: Window, roots: Sequence[int], idle_seconds: Sequence[float]
) -> list[str]:
    """Return what the dumps of the ranks at fault exclude."""
    if not all(root in window.states for root in roots):
        return []
    out = [f"A process that had ended: {ranks_text(roots)} wrote {_dumps(roots)}"]
    if idle_seconds:
        which = "them" if len(roots) > 1 else "it"
        out.insert(
            0, f"A slow rank: no call of {which} began in the {seconds_text(min(idle_seconds))} "
            "before",
        )  # fmt: skip
    return out


def _disproof_of_recorded(roots: Sequence[int]) -> str:
    """Return what would disprove that ranks hung."""
    who = "one of them" if len(roots) > 1 else "it"
    return f"A log shows that {who} went on after the dumps were written: then it was slow"


def _time_note(seconds: float) -> str:
    """Return how the time that ranks waited is known."""
    return (
        "Dumps do not say when they were written: not before the oldest open operation had run "
        f"into its time-out, {seconds_text(seconds)} after the last sign"
    )


def _at(window: Window, roots: Sequence[int]) -> str:
    times = [activity_ns(window.states[root]) for root in roots if root in window.states]
    known = [time_ns for time_ns in times if time_ns > 0]
    if not known:
        return ""
    return f" at {datetime.fromtimestamp(max(known) // _S, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _dumps(roots: Sequence[int]) -> str:
    return "their dumps" if len(roots) > 1 else "its dump"
