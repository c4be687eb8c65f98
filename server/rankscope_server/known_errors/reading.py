"""Reads logs in blocks: each line that may mean something is recognised, placed and counted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from rankscope_server.known_errors.entry import KnownError
from rankscope_server.known_errors.line_owner import LineOwner, is_srun, owner_of, rank_of_path
from rankscope_server.known_errors.load import KnownErrors, order
from rankscope_server.known_errors.prefilter import prefilter
from rankscope_server.known_errors.tally import Group, Tally
from rankscope_server.known_errors.templates import template
from rankscope_server.known_errors.tracebacks import HEADER, MAX_BYTES, Traceback, read_traceback

_MAX_LINE = 8_000  # of a longer one only both ends are read: some patterns take its square
_BAR_END = re.compile(rb"\r(?!\n)")  # a progress bar writes over its own line
_MAX_BUFFER = 32 << 20  # of a file without line ends
# What a line that no entry knows looks like if it reports a fault.
_SIGNS = (HEADER, "error", "exception", "nccl warn", "fatal", "what():")
_EXCEPTION = re.compile(
    r"(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure|Timeout)(?:: |:?$)"
)
# A line of source that a traceback shows: it holds the words of an error and reports none.
_SOURCE = re.compile(
    r"\s+(?:raise|assert|return|print|warnings\.warn|log(?:ger|ging)?\.\w+|TORCH_CHECK)\b"
    r"|\s*│\s*(?:❱\s*)?\d+\s*│|\s*-{2,}> \d+ "  # of rich, of IPython
)
_LOGGED = re.compile(  # an exception behind the time and the place that a logger writes
    r"\b(?:ERROR|CRITICAL|FATAL)\b.{0,200}?[\s\])|:>-]"
    r"((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): .+)"
)
_WHAT = re.compile(r"\s*what\(\): +(\S.*)")  # of a C++ exception that was not caught
_RANKS = re.compile(rb"(?:^|\n)\[(?:rank|\d+,)(\d{1,7})\]")  # of torch, of Open MPI
_NCCL_WARN = re.compile(r"\bNCCL WARN (.*)")
_FATAL = re.compile(r"\bFATAL\b|\bFatal (?:Python )?error\b|^F\d{4,8} ")
_ERROR = re.compile(r"\bERROR\b|^E\d{4,8} |^\[E\d* |\[error\]|^error: ", re.IGNORECASE)


@dataclass(slots=True)
class _At:
    """Where the reader is in one source."""

    number: int
    owner: LineOwner  # that the name of the file gives
    is_from_srun: bool = False
    offset: int = 0


class Reader:
    """Takes logs in any number of sources and fills a tally."""

    def __init__(self, known_errors: KnownErrors, num_sources: int = 1) -> None:
        self.tally = Tally()
        self._known_errors = known_errors
        self.is_alone = num_sources == 1  # then a local rank says who speaks
        self._prefilter = prefilter(sorted({*known_errors.literals, *_SIGNS}))

    @property
    def engine(self) -> str:
        """The name of the library that searches the texts."""
        return self._prefilter.name

    def read(self, chunks: Iterable[bytes], name: str) -> None:
        """Read one source to its end. `name` is its path, which may hold the rank."""
        at = _At(self.tally.begin_source(name), rank_of_path(name, self.is_alone))
        if at.owner.rank is not None:
            self.tally.ranks.add(at.owner.rank)
        buffer = b""
        for chunk in chunks:
            if at.offset == 0 and not buffer:
                at.is_from_srun = is_srun(chunk)
                self.tally.ranks.update(int(found) for found in _RANKS.findall(chunk))
            buffer += _BAR_END.sub(b"\n", chunk) if b"\r" in chunk else chunk
            cut = buffer.rfind(b"\n", 0, max(len(buffer) - MAX_BYTES, 0)) + 1
            if cut == 0 and len(buffer) > _MAX_BUFFER:
                cut = len(buffer)
            if cut:
                self._block(buffer, cut, at)
                buffer = buffer[cut:]
                at.offset += cut
        if buffer:
            self._block(buffer, len(buffer), at)

    def _block(self, buffer: bytes, cut: int, at: _At) -> None:
        """Read the lines that begin before `cut`; a traceback may go on behind it."""
        finals: dict[int, Traceback] = {}
        for start, end in self._prefilter.lines(buffer[:cut]):
            self.tally.num_lines_seen += 1
            for begin, stop in _ends(start, end):
                line = buffer[begin:stop].decode(errors="replace").rstrip("\r")
                self._line(buffer, begin, line, at, finals)
        for start, trace in finals.items():  # what was raised has no sign that the filter knows
            self._line(buffer, start, trace.final, at, {start: trace})

    def _line(
        self, buffer: bytes, start: int, line: str, at: _At, finals: dict[int, Traceback]
    ) -> None:
        owner, text = owner_of(line, at.is_from_srun)
        trace = finals.pop(start, None)
        if _SOURCE.match(text):
            return
        lowered = text.lower()
        if HEADER in lowered:
            found = read_traceback(buffer, start, at.is_from_srun)
            if found is not None:
                finals[found.final_at] = found
            return
        matches = [
            (e, m) for e in self._known_errors.candidates(lowered) if (m := e.match(text, lowered))
        ]
        first = (at.number, at.offset + start)
        for entry, match in matches:  # whether they count is known at the end of all logs
            if entry.role == "note" or entry.is_conditional:
                self._add(_known(entry, line, first), owner, at, match)
        faults = [(e, m) for e, m in matches if e.role != "note" and not e.is_conditional]
        if faults:
            entry, match = min(faults, key=lambda pair: order(pair[0]))
            self._add(_known(entry, line, first), owner, at, match)
        elif not matches and (group := _unknown(text, line, first, trace)) is not None:
            self._add(group, owner, at, None)

    def _add(self, group: Group, owner: LineOwner, at: _At, match: re.Match[str] | None) -> None:
        named = match.groupdict() if match is not None else {}
        rank = _first(owner.rank, at.owner.rank, _number(named.get("rank")))
        if rank is None and self.is_alone:
            rank = _first(owner.local_rank, at.owner.local_rank)
        is_varied = match is not None and group.entry is not None and group.entry.differs
        value = match.group(1) if match is not None and is_varied else None
        self.tally.add(group, rank, _number(named.get("culprit")), value)


def _ends(start: int, end: int) -> list[tuple[int, int]]:
    """Return a line as it is, or both ends of one that is too long."""
    if end - start <= _MAX_LINE:
        return [(start, end)]
    return [(start, start + _MAX_LINE), (max(start + _MAX_LINE, end - _MAX_LINE), end)]


def _first(*numbers: int | None) -> int | None:
    return next((number for number in numbers if number is not None), None)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and len(text) < 9 else None


def _known(entry: KnownError, line: str, first: tuple[int, int]) -> Group:
    return Group(entry.id, entry.role, entry.family, entry.strength, line, first, entry)


def _unknown(text: str, line: str, first: tuple[int, int], trace: Traceback | None) -> Group | None:
    """Return the group of a line that no entry knows, None if it reports no fault."""
    if trace is not None:
        key = f"? {trace.type} {template(trace.message)} {' > '.join(trace.frames)}"
        why = f"same exception type, same message but for numbers, raised at {_where(trace)}"
        return Group(key, "initiating", "user_exception_one_rank", 1, line, first,
                     why_grouped=why, what=text.strip())  # fmt: skip
    why = "same words but for numbers, addresses and paths"
    if _EXCEPTION.match(text):
        return Group(f"? {template(text)}", "initiating", "user_exception_one_rank", 1, line,
                     first, why_grouped=why, what=text.strip())  # fmt: skip
    if (found := _LOGGED.search(text)) is not None:
        return Group(f"? {template(found[1])}", "initiating", "user_exception_one_rank", 1, line,
                     first, why_grouped=why, what=found[1].strip())  # fmt: skip
    if (found := _WHAT.match(text)) is not None:
        return Group(f"? {template(found[1])}", "initiating", "other", 1, line, first,
                     why_grouped=why, what=found[1].strip())  # fmt: skip
    if (found := _NCCL_WARN.search(text)) is not None:
        return Group(f"? nccl {template(found[1])}", "initiating", "other", 1, line, first,
                     why_grouped=why)  # fmt: skip
    if _FATAL.search(text):
        return Group(f"? {template(text)}", "initiating", "other", 1, line, first, why_grouped=why)
    if _ERROR.search(text):
        return Group(f"? {template(text)}", None, "other", 1, line, first, why_grouped=why)
    return None


def _where(trace: Traceback) -> str:
    return trace.frames[-1] if trace.frames else "an unknown place"
