"""The report in a terminal: the verdict on the first screen, then the details."""

from __future__ import annotations

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rankscope.terminal import SafeConsole
from rankscope_server.api.report.schema import Report
from rankscope_server.findings.text import cut, ranks_text
from rankscope_server.report.words import finding_note, rank_states, run_text, time_text, title

_STYLE = {"critical": "red", "warning": "yellow", "info": "cyan"}
_STATE_STYLE = {
    "culprit": "red", "advice": "yellow", "healthy": "green", "waiting": "yellow",
    "unknown": "yellow",
}  # fmt: skip
# Lines of each row on 80 columns, so that all of them fit into 24.
_LINES = {"what": 3, "why": 4, "next": 3, "wrong_if": 2, "ruled_out": 2, "explains": 2}
_LABEL_COLUMNS = 16  # label, padding and border
_SHORT = {"communication": "comm.", "optimizer": "optim.", "checkpoint": "saving"}  # 80 columns
_MAX_LINES = 12
_MAX_FINDINGS = 10


def show(report: Report, console: SafeConsole) -> None:
    """Print the report."""
    console.print(_first(report, console.width))
    console.print(Text(f"{run_text(report)}. Read from {report.source}", style="dim"))
    for note in report.notes:
        console.print(Text(f"Note: {note}", style="yellow"))
    _findings(report, console)
    _budget(report, console)
    _ranks(report, console)
    _section(console, "Not measured: unknown, not healthy", report.not_measured)
    _section(
        console,
        "Errors, the first one first",
        [
            f"{error.role}: {ranks_text(error.ranks)}: {error.type}: {error.message}"
            for error in report.errors
        ],
    )
    _section(
        console,
        "Environment",
        [
            report.environment.text,
            *(
                f"{difference.fact}: "
                + "; ".join(
                    f"{v.value or 'not set'} on {ranks_text(v.ranks)}" for v in difference.values
                )
                for difference in report.environment.differences
                if difference.severity != "info"
            ),
        ],
    )
    lines = [f"{time_text(line.time_ms)[11:19]} {_of(line.ranks)} {line.message}"
             for line in report.lines]  # fmt: skip
    _section(console, "Last log lines", lines[-_MAX_LINES:])


def _first(report: Report, width: int) -> Panel:
    rows = Table.grid(padding=(0, 1))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    for row in report.summary:
        room = _LINES.get(row.key, 2) * max(20, width - _LABEL_COLUMNS)
        if row.key == "command":  # to be copied: never cut
            rows.add_row(row.label, Text(row.text, style="cyan"))
        else:
            style = "bold" if row.key in ("what", "next") else ""
            rows.add_row(row.label, Text(cut(row.text, room), style=style))
    style = _STATE_STYLE[report.answer.state]
    if report.verdict is not None:
        style = _STYLE.get(report.verdict.severity, style)
    return Panel(rows, title=title(report), title_align="left", border_style=style)


def _findings(report: Report, console: SafeConsole) -> None:
    others = [
        finding
        for finding in report.findings
        if report.verdict is None or finding.id != report.verdict.id
    ]
    if not others:
        return
    console.print(Text("\nOther findings", style="bold"))
    table = Table(box=None, padding=(0, 1), show_header=False, show_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in others[:_MAX_FINDINGS]:
        note = finding_note(report, finding)
        table.add_row(
            Text(finding.severity, style=_STYLE.get(finding.severity, "")),
            Text(finding.what + (f" ({note})" if note else "")),
        )
    console.print(table)
    if len(others) > _MAX_FINDINGS:
        console.print(Text(f"{len(others) - _MAX_FINDINGS} more in the page", style="dim"))


def _budget(report: Report, console: SafeConsole) -> None:
    budget = report.budget
    if not budget.rows:
        return
    steps = f"steps {budget.step_lo:,} to {budget.step_hi:,}"
    console.print(Text(f"\nWhere a step goes, in ms, {steps}", style="bold"))
    table = Table(box=None, padding=(0, 1), show_edge=False)
    used = [part for part in budget.parts if any(row.parts.get(part) for row in budget.rows)]
    table.add_column("")
    for name in ("total", *used):
        table.add_column(_SHORT.get(name, name), justify="right", no_wrap=True)
    for row in budget.rows:
        table.add_row(
            row.label, _ms(row.total_ms), *(_ms(row.parts.get(part, 0.0)) for part in used)
        )
    console.print(table)
    console.print(Text(budget.text, style="dim"))


def _ms(milliseconds: float) -> str:
    """Return milliseconds, three digits of them; the head of the table has the unit."""
    if milliseconds >= 100 or not milliseconds:
        return f"{milliseconds:,.0f}"
    return f"{milliseconds:.1f}" if milliseconds >= 0.1 else f"{milliseconds:.2g}"


def _ranks(report: Report, console: SafeConsole) -> None:
    rows = [f"{ranks_text(ranks)}: {state}" for state, ranks in rank_states(report)]
    _section(console, f"Ranks: {report.coverage.text}", rows)


def _section(console: SafeConsole, head: str, rows: list[str]) -> None:
    if not rows:
        return
    console.print(Text(f"\n{head}", style="bold"))
    for row in rows[:_MAX_LINES]:
        console.print(Text(f"  {cut(row, 300)}"))
    if len(rows) > _MAX_LINES:
        console.print(Text(f"  {len(rows) - _MAX_LINES} more", style="dim"))


def _of(ranks: list[int]) -> str:
    named = [rank for rank in ranks if rank >= 0]
    return ranks_text(named) if named else "node"
