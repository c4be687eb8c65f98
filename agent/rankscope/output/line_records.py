"""The records that a line of output makes: itself, and the failure that it reports."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rankscope.output.blocks import summary_fields
from rankscope.output.lines import Line
from rankscope.wire import schema

_HINTS = (
    "atchdog", "Heartbeat monitor", "taking the entire process down", "terminate called",
    "Fatal Python error: ",
)  # fmt: skip
_RANK = re.compile(r"\bRank (\d{1,9})\]")
_WORK = re.compile(r"SeqNum=(\d+), OpType=(\w+)")
_RAN_FOR = re.compile(r"ran for (\d+) milliseconds")
_TERMINATE = re.compile(r"terminate called after throwing an instance of '([^']{1,200})'")
_WHAT = re.compile(r"(?m)^\s*what\(\):\s*(.*)$")
Where = Literal["collective", "fatal_signal"]


@dataclass(frozen=True)
class NativeError:
    """What a line says. `key` is the same for all lines that report the same of one rank."""

    type: str
    message: str
    where: Where
    rank: int | None = None

    @property
    def key(self) -> tuple[str, str, int | None]:
        """What makes one error differ from another."""
        work = _WORK.search(self.message)
        return self.type, work[0] if work else "", self.rank


def recognise(text: str) -> NativeError | None:
    """Return the error that a line or block of output reports, None for every other one."""
    if not any(hint in text for hint in _HINTS):
        return None
    if text.startswith("Fatal Python error: "):  # faulthandler that the script switched on
        first = text.partition("\n")[0]
        kind = first.partition(": ")[2]
        return NativeError(kind[:200], first, "fatal_signal")
    if match := _TERMINATE.search(text):
        what = _WHAT.search(text)
        # what the backend throws is the consequence of another rank's trouble more often than not
        is_backends = "Dist" in match[1] or "atchdog" in text
        where: Where = "collective" if is_backends else "fatal_signal"
        return NativeError(match[1], what[1] if what else text, where, _rank(text))
    if "terminate called without an active exception" in text:
        return NativeError("std::terminate", text, "fatal_signal", _rank(text))
    return _of_watchdog(text)


def _of_watchdog(text: str) -> NativeError | None:
    rank = _rank(text)
    if "Watchdog caught collective operation timeout" in text:
        return NativeError("NCCL watchdog timeout", _of_work(text), "collective", rank)
    if "Watchdog caught" in text or "watchdog thread terminated with exception" in text:
        return NativeError("NCCL watchdog error", text, "collective", rank)
    if "Heartbeat monitor timed out" in text or "watchdog got stuck" in text:
        return NativeError("NCCL heartbeat monitor", text, "collective", rank)
    if "taking the entire process down" in text:
        return NativeError("NCCL takes the process down", text, "collective", rank)
    return None


def _rank(text: str) -> int | None:
    ranks = _RANK.findall(text)
    return int(ranks[-1]) if ranks else None


def _of_work(text: str) -> str:
    """Return for example "ALLREDUCE SeqNum=3 ran for 600012 ms" in front of a watchdog's line."""
    work, ran = _WORK.search(text), _RAN_FOR.search(text)
    if work is None:
        return text
    duration = f" ran for {ran[1]} ms" if ran else ""
    return f"{work[2]} SeqNum={work[1]}{duration}: {text}"


FAILURE_SUMMARY = "torchrun failure summary"
_MAX_REPORTED = 1000


class LineRecords:
    """Makes records of lines; an error that several lines repeat is recorded once."""

    def __init__(self) -> None:
        self._reported: set[object] = set()

    def of(
        self,
        line: Line,
        attempt: int,
        rank: int,
        *,
        logger: str = "",
        step: int = 0,
        fields: dict[str, str] | None = None,
    ) -> list[schema.Record]:
        """Return the records of one line, written by `rank` (schema.NODE_RANK: not known)."""
        error = recognise(line.text)
        if error is not None and error.rank is not None and rank == schema.NODE_RANK:
            rank = error.rank
        records: list[schema.Record] = [
            schema.LogLine(
                attempt=attempt,
                rank=rank,
                time_ns=line.time_ns,
                level=line.level,
                message=line.text,
                logger=logger,
                stream=line.stream,
                step=step,
                fields=fields or {},
            )
        ]
        is_known = rank != schema.NODE_RANK  # an error of no known rank would be taken for one's
        if error is not None and is_known and self._is_new((attempt, rank, error.key)):
            records.append(
                schema.ErrorRaised(
                    attempt=attempt,
                    rank=rank,
                    time_ns=line.time_ns,
                    type=error.type,
                    message=error.message,
                    traceback=line.text,
                    where=error.where,
                    step=step,
                )
            )
        if line.kind == "summary" and (summary := summary_fields(line.text)):
            records.append(_summary(line, attempt, summary))
        return records

    def _is_new(self, key: object) -> bool:
        if key in self._reported or len(self._reported) >= _MAX_REPORTED:
            return False
        self._reported.add(key)
        return True


def _summary(line: Line, attempt: int, fields: dict[str, str]) -> schema.Event:
    """Return what torchrun found out, on the page of the rank that failed first."""
    rank = int(fields["rank"]) if "rank" in fields else schema.NODE_RANK
    return schema.Event(
        attempt=attempt, rank=rank, time_ns=line.time_ns, name=FAILURE_SUMMARY, fields=fields
    )
