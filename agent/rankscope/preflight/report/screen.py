"""The answer in a terminal: quiet when green, else one cause after another, with its repair."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.cells import cell_len
from rich.text import Text

from rankscope.preflight.model import CheckFinding, Status
from rankscope.preflight.report import grid
from rankscope.preflight.report.summary import Summary, fixes, nodes_text
from rankscope.preflight.report.words import clean, clean_command, count, cut, wrapped
from rankscope.terminal import SafeConsole

MOST_LINES = 50  # one screen; -v prints everything
_MARKS: dict[Status, str] = {"ok": "✓", "fail": "✗", "warn": "!", "unknown": "?", "skipped": "-"}
_PLAIN: dict[Status, str] = {**_MARKS, "ok": "ok", "fail": "FAIL"}  # where ✓ cannot be encoded
_WORDS: dict[Status, str] = {"fail": "FAIL", "warn": "WARN"}
_STYLES: dict[Status, str] = {"fail": "bold red", "warn": "bold yellow"}
_MARGIN = 8  # under "FAIL 1  "
_MOST_TITLE, _MOST_LINES, _MOST_FIXES, _MOST_UNKNOWN = 3, 4, 3, 3
_LEAST_COLUMNS = 40

_MOST_ID = 24

Lines = list[Text]


@dataclass(frozen=True)
class _Page:
    """Columns of the terminal, and those of the longest id on it."""

    width: int
    id_columns: int

    @classmethod
    def of(cls, summary: Summary, width: int) -> _Page:
        shown = [*summary.findings, *summary.unknown[:_MOST_UNKNOWN]]
        longest = max((cell_len(clean(one.id)) for one in shown), default=0)
        return cls(width, min(longest, _MOST_ID))

    def id(self, finding: CheckFinding) -> str:
        text = cut(clean(finding.id), self.id_columns)
        return text + " " * (self.id_columns - cell_len(text) + 2)


def console_of(stream: TextIO) -> SafeConsole:
    """Return a console on `stream`; `| head` may see enough: the exit code is the answer."""
    console = SafeConsole(file=stream, highlight=False, soft_wrap=True)
    console.outlives_reader = True
    return console


def show(summary: Summary, console: SafeConsole, verbose: bool = False) -> None:
    """Print the report; `verbose` adds what is explained, every check and every reason."""
    width = max(console.width, _LEAST_COLUMNS)
    head = [*_heading(summary, width), *_families(summary, width, console.encoding)]
    foot = _foot(summary, width, verbose)
    if verbose:
        body = _everything(summary, width)
    else:
        body = _fitted(summary, width, MOST_LINES - _rows(head, width) - _rows(foot, width))
    for line in [*head, *body, *foot]:
        console.print(line, soft_wrap=True)


def _heading(summary: Summary, width: int) -> Lines:
    parts = ["rankscope preflight", *summary.heading]
    return _packed([Text(part, style="bold") for part in parts], width)


def _families(summary: Summary, width: int, encoding: str) -> Lines:
    """Return one mark for each family; those that do not apply here are among the counts."""
    marks = _MARKS if encoding.lower().startswith("utf") else _PLAIN
    parts = [
        Text(f"{one.name} {marks[one.status]}", style=_STYLES.get(one.status, ""))
        for one in summary.families
        if one.status != "skipped"
    ]
    return [Text("  ").append_text(line) for line in _packed(parts, width - 2)]


def _packed(parts: Iterable[Text], width: int, gap: str = "   ") -> Lines:
    """Return the parts in as few lines as they need, none broken."""
    lines: Lines = []
    for part in parts:
        if lines and lines[-1].cell_len + len(gap) + part.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], gap, part)
        else:
            lines.append(Text(cut(part.plain, width), style=part.style))
    return lines


def _rows(lines: Lines, width: int) -> int:
    """Return how many lines of the terminal those are: commands may be longer than one."""
    return sum(max(1, -(-line.cell_len // width)) for line in lines)


def _fitted(summary: Summary, width: int, room: int) -> Lines:
    """Return findings, open questions and the matrix in at most `room` lines."""
    page = _Page.of(summary, width)
    unknown = _unknown(summary.unknown[:_MOST_UNKNOWN], len(summary.unknown), page)
    room -= _rows(unknown, width) + 1
    drawn = [_Drawn(finding, number, page) for number, finding in enumerate(summary.findings, 1)]
    matrix = _matrix(summary, width, room - sum(one.size for one in drawn))
    findings = _shortened(drawn, room - _rows(matrix, width))
    return [*_gap(findings or unknown), *findings, *unknown, *matrix]


def _gap(following: Sequence[object]) -> Lines:
    return [Text()] if following else []


class _Drawn:
    """A finding in full and in short, and what is said of others like it."""

    def __init__(self, finding: CheckFinding, number: int, page: _Page) -> None:
        self.finding, self.width = finding, page.width
        self.short = _title(finding, number, page, 2) + _fixes(finding, page.width, 1)
        self.lines = self.full = _full(finding, number, page)
        self.alike: Lines = []

    @property
    def size(self) -> int:
        return _rows([*self.lines, *self.alike], self.width)


def _shortened(drawn: list[_Drawn], room: int) -> Lines:
    """Return all findings, in as much detail as fits; the worst keep theirs longest."""
    if not _squeezed(drawn, room):
        drawn = _one_of_each_kind(drawn)
        _squeezed(drawn, room)
    shown = list(drawn)
    size = sum(one.size for one in shown)
    while len(shown) > 1 and size + (len(shown) < len(drawn)) > room:
        size -= shown.pop().size
    lines = [line for one in shown for line in (*one.lines, *one.alike)]
    if len(shown) < len(drawn):
        left = count(len(drawn) - len(shown), "finding")
        lines.append(Text(f"... and {left} more: -v shows all"))
    return lines


def _squeezed(drawn: list[_Drawn], room: int) -> bool:
    """Shorten from the last to the first until all fit; return whether they do."""
    for one in drawn:
        one.lines = one.full
    size = sum(one.size for one in drawn)
    for one in reversed(drawn):
        if size > room:
            size -= one.size
            one.lines = one.short
            size += one.size
    return size <= room


def _one_of_each_kind(drawn: list[_Drawn]) -> list[_Drawn]:
    """Return the first finding of each check, with the number of others that say the same."""
    kinds: dict[tuple[Status, str], list[_Drawn]] = {}
    for one in drawn:
        kinds.setdefault((one.finding.status, one.finding.id), []).append(one)
    for first, *others in kinds.values():
        if others:
            names = tuple(node for one in others for node in one.finding.nodes)
            on = f" on {nodes_text(names)}" if names else ""
            text = f"and {len(others):,} more like it{on}"
            room = first.width - _MARGIN
            first.alike = [Text(" " * _MARGIN + cut(text, room), style="bold")]
    return [those[0] for those in kinds.values()]


def _title(finding: CheckFinding, number: int, page: _Page, most: int) -> Lines:
    """Return number, id, title and confidence; the title continues under itself."""
    word = f"{_WORDS[finding.status]} {number}".ljust(_MARGIN - 1) + " "
    head, width = page.id(finding), page.width
    sure = f"  [{finding.confidence}]"
    indent = _MARGIN + cell_len(head)
    first, *more = _some(finding.title, max(20, width - indent - cell_len(sure)), most)
    gap = " " * max(0, width - indent - cell_len(first) - cell_len(sure))
    line = Text.assemble(
        (word, _STYLES[finding.status]), head, (first, "bold"), (gap + sure, "dim")
    )
    return [line, *(Text(" " * indent + text, style="bold") for text in more)]


def _some(text: str, columns: int, most: int) -> list[str]:
    """Return at most `most` lines of `text`."""
    lines = wrapped(clean(text), columns)
    if len(lines) > most:
        lines = [*lines[: most - 1], cut(" ".join(lines[most - 1 :]), columns)]
    return lines


def _under(label: str, text: str, width: int, most: int = _MOST_TITLE) -> Lines:
    """Return `text` behind `label`, its further lines below its begin, or indented a little."""
    indent = " " * (_MARGIN + (cell_len(label) or 2))
    first, *more = _some(text, max(20, width - len(indent)), most)
    line = Text.assemble(" " * _MARGIN, (label, "dim"), first)
    return [line, *(Text(indent + text) for text in more)]


def _full(finding: CheckFinding, number: int, page: _Page) -> Lines:
    lines, width = _title(finding, number, page, _MOST_TITLE), page.width
    most = _MOST_LINES if finding.status == "fail" else 1
    for text in finding.lines[:most]:
        lines += _under("", text, width)
    if finding.impact:
        lines += _under("if launched:  ", finding.impact, width)
    explained = len(finding.explains)
    if explained:
        lines += _under("", f"this explains {count(explained, 'more finding')}: -v", width)
    return lines + _fixes(finding, width, _MOST_FIXES)


def _fixes(finding: CheckFinding, width: int, most: int) -> Lines:
    """Return the repairs; a command is never cut or broken, so that it can be copied."""
    rows, lines = fixes(finding), []
    for nodes, owner, command in rows[:most]:
        label = f"fix ({cut(nodes, 40)}, {owner}):  "
        commands = clean_command(command)
        if len(commands) == 1 and _MARGIN + cell_len(label + commands[0]) <= width:
            lines.append(Text.assemble(" " * _MARGIN, (label, "dim"), (commands[0], "bold")))
            continue
        lines.append(Text(" " * _MARGIN + label.rstrip(), style="dim"))
        indent = " " * (_MARGIN + 2) if len(commands) == 1 else ""  # a here-document ends flush
        lines += [Text(indent + text, style="bold") for text in commands]
    if len(rows) > most:
        lines += _under("", f"... {count(len(rows) - most, 'more repair')}: -v", width)
    return lines


def _unknown(shown: Sequence[CheckFinding], num: int, page: _Page) -> Lines:
    """Return what was tried and not answered: not a failure, and not healthy either."""
    lines: Lines = []
    for finding in shown:
        head = f"{'?':<{_MARGIN}}{page.id(finding)}"
        first, *more = _some(finding.title, max(20, page.width - cell_len(head)), 2)
        lines.append(Text(head + first))
        lines += [Text(" " * cell_len(head) + text) for text in more]
    if num > len(shown):
        lines.append(Text(f"... and {num - len(shown)} more without an answer: -v shows them"))
    return lines


def _matrix(summary: Summary, width: int, room: int) -> Lines:
    """Return the matrix if a path is bad: of all nodes if there is room, else the small one."""
    whole, small = summary.matrix, summary.small_matrix
    if whole is None or not whole.has_bad:
        return []
    if grid.fits(whole, width):
        lines = grid.lines(whole, width)
        if small is None or _rows(lines, width) + 2 <= room:
            return [Text(), *lines]
    return [Text(), *grid.lines(small, width)] if small is not None else []


def _everything(summary: Summary, width: int) -> Lines:
    """Return what -v shows: nothing is left out or cut."""
    far = 1 << 20
    lines, page = _gap(summary.findings or summary.unknown), _Page.of(summary, width)
    for number, finding in enumerate(summary.findings, 1):
        lines += _title(finding, number, page, far)
        for text in finding.lines:
            lines += _under("", text, width, far)
        labelled = [("if launched:  ", finding.impact), ("unless:       ", finding.unless)]
        labelled += [("explains:     ", text) for text in finding.explains]
        for label, text in labelled:
            lines += _under(label, text, width, far) if text else []
        lines += _fixes(finding, width, far)
    lines += _unknown(summary.unknown, len(summary.unknown), page)
    if summary.matrix is not None:
        whole = summary.matrix if grid.fits(summary.matrix, width) else summary.small_matrix
        lines += [Text(), *grid.lines(whole or summary.matrix, width)]
    lines += [Text(), Text("checks", style="bold")]
    for result in summary.verdict.results:
        head = f"  {result.status:<8} {clean(result.id):<20}  "
        first, *more = wrapped(clean(result.reason), max(20, width - cell_len(head)))
        style = _STYLES.get(result.status, "")
        lines.append(Text((head + first).rstrip(), style=style))
        lines += [Text(" " * cell_len(head) + text, style=style) for text in more]
        for aside in summary.verdict.notes:
            if aside.id == result.id and aside.title != result.reason:
                lines.append(Text(" " * cell_len(head) + clean(aside.title)))
    return lines


def _foot(summary: Summary, width: int, verbose: bool) -> Lines:
    coverage = clean(summary.verdict.coverage)
    counts = f"{summary.counts}; {coverage}" if coverage else summary.counts
    if not summary.findings and not summary.exit_code:
        ended = f"{counts}, exit {summary.exit_code}"
        parts = [*_some(ended, width, 3), summary.url]
        is_quiet = not summary.unknown and not (summary.matrix and summary.matrix.has_bad)
        gap = [] if is_quiet and not verbose else [Text()]
        return [*gap, *(Text(part) for part in parts if part)]
    style = _STYLES["fail"] if summary.exit_code else _STYLES["warn"]
    last = [Text(summary.outcome, style=style)]
    last += [Text(f"report: {summary.url}")] if summary.url else []
    last += [] if verbose else [Text("-v for all checks", style="dim")]
    dim = [Text(part, style="dim") for part in _some(counts, width, 3)]
    return [Text(), *dim, *_packed(last, width)]
