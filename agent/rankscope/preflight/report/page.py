"""The answer as one file of HTML: no script, nothing from elsewhere, for light, dark and paper."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from rankscope.preflight.model import CheckFinding
from rankscope.preflight.report.matrix import MEANINGS, MILD, NOT_TESTED, OK, SOME, Matrix
from rankscope.preflight.report.summary import Summary, fixes, nodes_text
from rankscope.preflight.report.words import clean, clean_command

# The browser itself refuses whatever is not in this file, should a text ever look like markup.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLES = Path(__file__).with_name("page.css")


def page(summary: Summary) -> str:
    """Return the whole file."""
    verdict = summary.verdict
    title = f"Preflight {clean(verdict.run_id)}: {summary.outcome}"
    families = "".join(
        f'<li class="{one.status}">{_text(one.name)}: {one.status}</li>' for one in summary.families
    )
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title>",
        f"<style>{_STYLES.read_text()}</style></head><body>",
        f"<h1>{_text(title)}</h1>",
        f'<p class="faint">{_text(" · ".join(summary.heading))}</p>',
        f'<p class="faint">{_text(summary.counts)}</p>',
        f"<p>{_text(verdict.coverage)}</p>" if verdict.coverage else "",
        f'<ul class="families">{families}</ul>',
        *(_finding(number, one) for number, one in enumerate(summary.findings, 1)),
        _unknown(summary.unknown),
        _matrix(summary.matrix),
        _nodes(summary),
        _checks(summary),
        '<p class="faint">Unknown and skipped are not healthy: they were not evaluated.</p>',
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _text(text: str) -> str:
    return escape(clean(text), quote=True)


def _finding(number: int, finding: CheckFinding) -> str:
    lines = "".join(f"<li>{_text(line)}</li>" for line in finding.lines)
    rows = [("If launched", finding.impact), ("Unless", finding.unless)]
    rows += [("Explains", text) for text in finding.explains]
    facts = "".join(f"<p><b>{label}:</b> {_text(text)}</p>" for label, text in rows if text)
    repairs = "".join(
        f'<p class="faint">Fix ({_text(nodes)}, {owner}):</p>'
        f"<pre>{escape(chr(10).join(clean_command(command)))}</pre>"
        for nodes, owner, command in fixes(finding)
    )
    return (
        f'<article class="{finding.status}"><h3><span class="{finding.status}">'
        f"{finding.status.upper()} {number}</span> {_text(finding.title)}</h3>"
        f'<p class="faint">{_text(finding.id)}, {finding.confidence}</p>'
        f"{f'<ul>{lines}</ul>' if lines else ''}{facts}{repairs}</article>"
    )


def _unknown(findings: Iterable[CheckFinding]) -> str:
    rows = [(one.id, one.title) for one in findings]
    return _table("Tried, without an answer", ("check", "why"), rows)


def _matrix(matrix: Matrix | None) -> str:
    if matrix is None:
        return ""
    heads = "".join(f"<th>{_text(name)}</th>" for name in matrix.names)
    rows = "".join(
        f"<tr><th>{_text(name)}</th>"
        + "".join(
            f'<td class="{_kind(cell)}">{_text(cell + matrix.value(row, column))}</td>'
            for column, cell in enumerate(cells)
        )
        + "</tr>"
        for row, (name, cells) in enumerate(zip(matrix.names, matrix.cells, strict=True))
    )
    legend = [f"{one} {MEANINGS[one]}" for one in matrix.letters]
    legend += [f"{SOME} only some of them", matrix.note] if matrix.others else []
    return (
        '<h2>Paths, from row to column</h2><div class="scroll"><table class="matrix"><thead><tr>'
        f"<th></th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        f'<p class="faint">{_text(" · ".join(part for part in legend if part))}</p>'
    )


def _kind(cell: str) -> str:
    letter = cell.rstrip(SOME)
    if letter in ("", " ", OK, NOT_TESTED):
        return "ok" if letter == OK else "skipped"
    return "warn" if letter in MILD else "fail"


def _nodes(summary: Summary) -> str:
    verdict = summary.verdict
    missing = tuple(name for name in verdict.expected if name not in verdict.reported)
    rows = [("reported", nodes_text(verdict.reported)), ("missing", nodes_text(missing))]
    return _table("Nodes", ("", ""), [row for row in rows if row[1]])


def _checks(summary: Summary) -> str:
    rows = [(one.family, one.id, one.status, one.reason) for one in summary.verdict.results]
    return _table("Checks", ("family", "check", "status", "reason"), rows)


def _table(head: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    if not body:
        return ""
    names = "".join(f"<th>{_text(name)}</th>" for name in columns) if any(columns) else ""
    return f"<h2>{_text(head)}</h2><table>{f'<tr>{names}</tr>' if names else ''}{body}</table>"
