"""The records that a line of output makes: itself, and the failure that it tells of."""

from __future__ import annotations

from rankscope.output.blocks import summary_fields
from rankscope.output.lines import Line
from rankscope.output.native_errors import recognise
from rankscope.wire import schema

FAILURE_SUMMARY = "torchrun failure summary"
_MAX_TOLD = 1000


class LineRecords:
    """Makes records of lines; an error that several lines repeat is told once."""

    def __init__(self) -> None:
        self._told: set[object] = set()

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
        """Return the records of one line, said by `rank` (schema.NODE_RANK: nobody knows)."""
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
        is_known = rank != schema.NODE_RANK  # an error of nobody would be told as somebody's
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
        if key in self._told or len(self._told) >= _MAX_TOLD:
            return False
        self._told.add(key)
        return True


def _summary(line: Line, attempt: int, fields: dict[str, str]) -> schema.Event:
    """Return what torchrun found out, on the page of the rank that failed first."""
    rank = int(fields["rank"]) if "rank" in fields else schema.NODE_RANK
    return schema.Event(
        attempt=attempt, rank=rank, time_ns=line.time_ns, name=FAILURE_SUMMARY, fields=fields
    )
