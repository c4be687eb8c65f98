"""The matrix of nodes as lines of a terminal."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from rankscope.preflight.report.matrix import MEANINGS, MILD, NOT_TESTED, OK, SOME, Matrix
from rankscope.preflight.report.words import clean, cut

_LABEL_COLUMNS = 24
_NUMBER_COLUMNS = 3


def fits(matrix: Matrix, width: int) -> bool:
    """Return whether each column has room at least for its number."""
    return _label_columns(matrix) + 5 + _NUMBER_COLUMNS * len(matrix.names) <= width


def lines(matrix: Matrix, width: int) -> list[Text]:
    """Return heading, rows and legend. Columns have names where there is room, else numbers."""
    labels = [cut(clean(name), _LABEL_COLUMNS) for name in matrix.names]
    columns = [max(_NUMBER_COLUMNS, cell_len(label) + 2) for label in labels]
    left = _label_columns(matrix)
    if 2 + left + sum(columns) <= width:
        heads, starts = labels, [label.ljust(left) for label in labels]
    else:
        heads = [str(number) for number in range(1, len(labels) + 1)]
        starts = [
            f"{head:>2} {label}".ljust(left + 3) for head, label in zip(heads, labels, strict=True)
        ]
        columns = [_NUMBER_COLUMNS] * len(labels)
    top = " " * (2 + cell_len(starts[0]))
    for head, size in zip(heads, columns, strict=True):
        top += _centred(head, size)
    drawn = [Text(top.rstrip(), style="dim")]
    for row, (start, cells) in enumerate(zip(starts, matrix.cells, strict=True)):
        line = Text("  " + start)
        for column, (cell, size) in enumerate(zip(cells, columns, strict=True)):
            shown = cell + matrix.value(row, column)
            line.append(_centred(shown if len(shown) < size else cell, size), _style(cell))
        line.rstrip()
        drawn.append(line)
    return [*drawn, *_legend(matrix, width)]


def _label_columns(matrix: Matrix) -> int:
    return max(min(_LABEL_COLUMNS, cell_len(clean(name))) for name in matrix.names)


def _centred(text: str, size: int) -> str:
    left = (size - cell_len(text) + 1) // 2
    return " " * left + text + " " * (size - cell_len(text) - left)


def _style(cell: str) -> str:
    letter = cell.rstrip(SOME)
    if letter in ("", " ", OK, NOT_TESTED):
        return ""
    return "bold yellow" if letter in MILD else "bold red"


def _legend(matrix: Matrix, width: int) -> list[Text]:
    parts = ["from row to column:", *(f"{one} {MEANINGS[one]}" for one in matrix.letters)]
    if any(SOME in cell for row in matrix.cells for cell in row):
        parts.append(f"{SOME} only some of them")
    if matrix.note:
        parts.append(f"({matrix.note})")
    legend = [""]
    for part in parts:
        longer = f"{legend[-1]}   {part}" if legend[-1] else f"  {part}"
        if cell_len(longer) > width and legend[-1]:
            legend.append(f"  {part}")
        else:
            legend[-1] = longer
    return [Text(line, style="dim") for line in legend]
