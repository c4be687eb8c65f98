"""The report as one file of HTML: no script, nothing from elsewhere, for light, dark and paper."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from rankscope_server.answers import Capped
from rankscope_server.api.findings.schema import ShownFinding
from rankscope_server.api.report.parts import cost_text
from rankscope_server.api.report.schema import Report
from rankscope_server.api.steps.schema import Budget
from rankscope_server.findings.text import ms_text, percent_text, ranks_text, si_text
from rankscope_server.report.words import finding_note, run_text, time_text, title

# The browser itself refuses whatever is not in this file, should a text ever look like markup.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLES = Path(__file__).with_name("page.css")


def page(report: Report) -> str:
    """Return the whole file."""
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(report.run.name)}: {_text(title(report))}</title>",
        f"<style>{_STYLES.read_text()}</style></head><body>",
        f"<h1>{_text(title(report))}</h1>",
        f'<p class="faint">{_text(run_text(report))}. Read from {_text(report.source)}, '
        f"{_text(time_text(report.made_ms))}.</p>",
        *(f'<p class="note">{_text(note)}</p>' for note in report.notes),
        _first(report),
        _numbers(report),
        _findings(report),
        _budget(report.budget),
        _coverage(report),
        _ranks(report),
        _errors(report),
        _environment(report),
        _lines(report),
        f'<p class="faint">Made by {_text(report.made_by)}. Unknown is not healthy: what was not '
        "measured is listed above.</p></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _text(text: str) -> str:
    return escape(text, quote=True)


def _code(text: str) -> str:
    return f"<code>{_text(text)}</code>"


def _first(report: Report) -> str:
    kind = report.verdict.severity if report.verdict else report.answer.state
    rows = []
    for row in report.summary:
        body = _text(row.text)
        if row.key == "command":
            body = _code(row.text)
        rows.append(f'<dt>{_text(row.label)}</dt><dd class="{row.key}">{body}</dd>')
    return f'<section class="card {_text(kind)}"><dl class="first">{"".join(rows)}</dl></section>'


def _numbers(report: Report) -> str:
    rows = []
    for number in report.numbers:
        if number.value is None:
            continue
        value = (
            percent_text(number.value)
            if number.unit == "ratio"
            else si_text(number.value, number.unit)
        )
        if number.change_ratio is not None and abs(number.change_ratio) >= 0.005:
            value += f" ({100 * number.change_ratio:+.0f} %)"
        rows.append((number.label, value, number.reference_text))
    return _table("Numbers", ("", "", ""), rows)


def _findings(report: Report) -> str:
    if not report.findings:
        return ""
    return "<h2>Findings</h2>" + "".join(_finding(report, finding) for finding in report.findings)


def _finding(report: Report, one: ShownFinding) -> str:
    note = finding_note(report, one)
    facts = [
        ("Why", one.why),
        ("Cost", cost_text(one, report.run)),
        ("Next", one.next),
        ("Command", one.next_command),
        ("Ranks", ranks_text(one.ranks) if one.ranks else "none is accused"),
        ("Since", f"step {one.onset_step:,}" if one.onset_step else time_text(one.onset_ms)),
        ("Waiting", ranks_text(one.victims) if one.victims else ""),
        ("Sure", one.confidence_text),
        ("Disproved if", one.would_be_wrong_if),
        ("Ruled out", "; ".join(one.ruled_out)),
        ("Evidence", "; ".join(evidence.text for evidence in one.evidence)),
        ("Policy", one.policy_hash),
    ]
    rows = "".join(
        f"<dt>{label}</dt><dd>{_code(text) if label == 'Command' else _text(text)}</dd>"
        for label, text in facts
        if text
    )
    head = f'<span class="sev {_text(one.severity)}">{_text(one.severity)}</span> {_text(one.what)}'
    if note:
        head += f' <span class="faint">({_text(note)})</span>'
    return f'<details><summary>{head}</summary><dl class="first">{rows}</dl></details>'


def _budget(budget: Budget) -> str:
    if not budget.rows:
        return ""
    used = [part for part in budget.parts if any(row.parts.get(part) for row in budget.rows)]
    longest = max(row.total_ms for row in budget.rows) or 1.0
    rows = []
    for row in budget.rows:
        pieces = "".join(
            f'<span style="width:{100 * max(0.0, row.parts.get(part, 0.0)) / longest:.2f}%;'
            f'background:var(--t-{_text(part)})"></span>'
            for part in used
        )
        cells = "".join(
            f'<td class="num">{ms_text(row.parts.get(part, 0.0))}</td>' for part in used
        )
        rows.append(
            f'<tr><td>{_text(row.label)}<div class="bar">{pieces}</div></td>'
            f'<td class="num">{ms_text(row.total_ms)}</td>{cells}</tr>'
        )
    heads = "".join(
        f'<th class="num key"><i style="background:var(--t-{_text(part)})"></i>{_text(part)}</th>'
        for part in used
    )
    return (
        f"<h2>Where a step goes, steps {budget.step_lo:,} to {budget.step_hi:,}</h2>"
        f'<table><tr><th></th><th class="num">total</th>{heads}</tr>{"".join(rows)}</table>'
        f'<p class="faint">{_text(budget.text)}</p>'
    )


def _coverage(report: Report) -> str:
    rows = "".join(f"<li>{_text(row)}</li>" for row in report.not_measured)
    body = f"<ul>{rows}</ul>" if rows else "<p>Every detector had its input.</p>"
    ran = "; ".join(
        f"{detector.name}{f' ({detector.reason})' if detector.reason else ''}"
        for detector in report.detectors
        if detector.state == "ran"
    )
    looked = f'<p class="faint">Looked: {_text(ran)}.</p>' if ran else ""
    return f"<h2>Not measured</h2><p>{_text(report.coverage.text)}.</p>{body}{looked}"


def _ranks(report: Report) -> str:
    rows = [
        (
            str(row.rank), row.host, row.exit_text or row.state, f"{row.step:,}", row.phase or "",
            time_text(row.last_seen_ms),
        )
        for row in report.ranks
    ]  # fmt: skip
    heads = ("rank", "host", "state", "step", "phase", "last seen")
    return _table(f"Ranks{_cut(report.ranks_capped)}", heads, rows)


def _errors(report: Report) -> str:
    if not report.errors:
        return ""
    rows = "".join(
        f"<details><summary>{_text(error.role)}: {_text(ranks_text(error.ranks))}: "
        f"{_text(error.type)}: {_text(error.message)}</summary>"
        f"<p>{_text(error.why_role)}; {_text(error.why_grouped)}</p>"
        f"<pre>{_text(error.traceback)}</pre></details>"
        for error in report.errors
    )
    return f"<h2>Errors, the first one first</h2>{rows}"


def _environment(report: Report) -> str:
    found = report.environment
    rows = [
        (
            difference.severity,
            difference.fact,
            f"{value.value or 'not set'}",
            ranks_text(value.ranks),
        )
        for difference in found.differences
        for value in difference.values
    ]
    text = _table("Environment", ("severity", "fact", "value", "ranks"), rows)
    if not rows:
        text = "<h2>Environment</h2>"
    common = "".join(
        f"<tr><td>{_text(fact.fact)}</td><td>{_text(fact.value)}</td></tr>" for fact in found.common
    )
    shared = f"<details><summary>Same on all ranks</summary><table>{common}</table></details>"
    return f"{text}<p>{_text(found.text)}</p>{shared if common else ''}"


def _lines(report: Report) -> str:
    if not report.lines:
        return ""
    rows = "\n".join(
        f"{time_text(line.time_ms)[:19]} {ranks_text(line.ranks) if line.rank >= 0 else 'node'} "
        f"{line.level} {line.message}"
        for line in report.lines
    )
    return f"<h2>Last log lines{_cut(report.lines_capped)}</h2><pre>{_text(rows)}</pre>"


def _cut(capped: Capped | None) -> str:
    return f" ({capped.shown:,} of {capped.total:,})" if capped is not None else ""


def _table(head: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    if not body:
        return ""
    names = "".join(f"<th>{_text(name)}</th>" for name in columns) if any(columns) else ""
    return f"<h2>{_text(head)}</h2><table>{f'<tr>{names}</tr>' if names else ''}{body}</table>"
