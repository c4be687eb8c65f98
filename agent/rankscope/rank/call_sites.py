"""The places in the user's code that call collectives, numbered in the journal at their first."""

from __future__ import annotations

from types import CodeType, FrameType

from rankscope.files import journal

_MAX_CALL_SITES = 50_000


class CallSites:
    """Numbers the places of one rank. Looked up for each collective: see `known`."""

    def __init__(self, writer: journal.JournalWriter) -> None:
        self._journal = writer
        self._by_line: dict[tuple[CodeType, int], int] = {}
        # (id of the code, place of the instruction) -> number: to find the line of an instruction
        # takes Python time, and so does the hash of a code object. The code is kept for its id.
        self.known: dict[tuple[int, int], tuple[int, CodeType]] = {}

    def of_frame(self, frame: FrameType) -> int:
        """Return the number of where a frame stands, known from then on; 0: there are too many."""
        code = frame.f_code
        number = self.of_line(code, frame.f_lineno)
        if number and len(self.known) < _MAX_CALL_SITES:
            self.known[id(code), frame.f_lasti] = number, code
        return number

    def of_line(self, code: CodeType, line: int) -> int:
        """Return the number of a line, 0 when there are too many."""
        number = self._by_line.get((code, line))
        if number is None:
            if len(self._by_line) >= _MAX_CALL_SITES:
                return 0
            number = self._by_line[code, line] = len(self._by_line) + 1
            text = f"{code.co_filename}:{line} {code.co_name}"
            self._journal.append(
                journal.CALL_SITE, journal.INDEXED.pack(number) + text.encode(), urgent=True
            )
        return number
