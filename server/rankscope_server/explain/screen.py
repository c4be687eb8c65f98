"""The answer on one screen of a terminal: the root first."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rankscope.terminal import SafeConsole
from rankscope_server.findings.text import confidence_word, cut, ranks_text

_ROWS = 6
_SIGNAL = 240
_ROLE_STYLE = {"initiating": "red", "cascade": "yellow", "teardown": "dim", "benign": "dim"}
_COST_OF_LOGS = "not in the logs: the steps since the last checkpoint are lost if the run ended"
_NO_FAULT = "No fault found"


def show(answer: dict[str, Any], read: str, is_full: bool, console: SafeConsole) -> None:
    """Print the answer. `read` says what was read; `is_full` shows every finding."""
    root = answer["root"]
    if root is None:
        console.print(_panel_of_none(answer, read))
    else:
        console.print(_panel(root, read))
    findings = answer["findings"]
    if findings:
        console.print(_table(findings if is_full else findings[:_ROWS]))
    hidden = 0 if is_full else len(findings) - _ROWS
    if hidden > 0:
        console.print(Text(f"{hidden} more kinds of lines: --all shows them", style="dim"))
    if answer["num_ungrouped"]:
        console.print(Text(f"{answer['num_ungrouped']:,} more lines of other kinds", style="dim"))


def _panel_of_none(answer: dict[str, Any], read: str) -> Panel:
    recorded = answer.get("recorded")
    if recorded is None or recorded["state"] == "healthy":
        text = f"{_NO_FAULT} in {read}.\n{_why_none(answer)}"
        return Panel(Text(text), border_style="green")
    what, _, why = recorded["text"].partition(": ")
    lines = [f"{what} in {read}: {why}" if why else f"{what} ({read})"]
    lines += [text for text in (recorded["detail"],) if text]
    lines += [f"It would take {text}" for text in recorded["next"]]
    return Panel(Text("\n".join(lines)), border_style="yellow")


def _why_none(answer: dict[str, Any]) -> str:
    recorded = answer.get("recorded")
    if recorded is not None:
        return "; ".join(text for text in (recorded["text"], recorded["detail"]) if text)
    loud = [f for f in answer["findings"] if f["role"] == "unknown"]
    if loud:
        kinds = "one kind of line claims" if len(loud) == 1 else f"{len(loud)} kinds of lines claim"
        return f"{kinds} an error that is not a known one; read them below."
    return "The rank that failed may have written to another log."


def _panel(root: dict[str, Any], read: str) -> Panel:
    rows = Table.grid(padding=(0, 1))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    rows.add_row("What", _what(root))
    rows.add_row("Why", root["cause"])
    if root["signal"]:
        rows.add_row("Line", Text(cut(root["signal"], _SIGNAL).strip(), style="cyan"))
    rows.add_row("Next", Text(root["remedy"], style="bold"))
    if root["check"]:
        rows.add_row("Check", root["check"])
    if root["rivals"]:
        others = "; ".join(f"{r['family']} on {_who(r['ranks'])}" for r in root["rivals"][:3])
        rows.add_row("Or", others)
    rows.add_row("Cost", root.get("cost") or _COST_OF_LOGS)
    if root.get("recorded"):
        rows.add_row("Read", root["recorded"])
    sure = f"{confidence_word(root['confidence'])}: {root['confidence_text']}"
    rows.add_row("Sure", f"{sure}; disproved if {root['would_be_wrong_if']}")
    title = "The first cause" if root["role"] == "initiating" else "The first that is seen"
    return Panel(Group(rows), title=f"{title}, in {read}", border_style="red", title_align="left")


def _what(root: dict[str, Any]) -> str:
    ranks = root["ranks"]
    family = root.get("kind", "other") if root["family"] == "other" else root["family"]
    if root["role"] == "initiating":
        return f"{family} on {_who(ranks)}"
    seen = f", seen on {ranks_text(tuple(root['seen_on']))}" if root["seen_on"] else ""
    where = f"suspected: {_who(ranks)}" if ranks else "where it began is not in these logs"
    return f"{family}{seen}; {where}"


def _who(ranks: list[int]) -> str:
    return ranks_text(tuple(ranks)) if ranks else "a rank that the logs do not name"


def _table(findings: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1), show_edge=False, expand=True)
    for name, right in (("role", False), ("family", False), ("ranks", False), ("lines", True)):
        table.add_column(name, no_wrap=True, justify="right" if right else "left")
    table.add_column("first of them", no_wrap=True, overflow="ellipsis", ratio=1)
    for finding in findings:
        style = _ROLE_STYLE.get(finding["role"], "default")
        table.add_row(
            Text(finding["role"], style=style),
            finding["family"],
            _few(finding["ranks"]),
            f"{finding['count']:,}",
            Text((finding["signal"] or finding.get("what", "")).strip()),
        )
    return table


def _few(ranks: list[int]) -> str:
    if not ranks:
        return "-"
    return str(ranks[0]) if len(ranks) == 1 else f"{len(ranks):,} of them"
