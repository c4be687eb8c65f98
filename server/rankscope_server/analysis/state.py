"""The analysis of one run: takes records and chunks in any order, answers at any moment."""

from __future__ import annotations

from rankscope.chunk import Column
from rankscope.schema import AnyRecord, Chunk
from rankscope_server.analysis.answers import Answer, Coverage, Look


class RunState:
    """What is known of a run. Applying a record or a chunk twice, or late, changes nothing."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id

    def apply_record(self, record: AnyRecord) -> None:
        """Take one record."""

    def apply_chunk(self, chunk: Chunk, columns: dict[str, Column]) -> None:
        """Take one chunk with its decoded columns; unknown or missing columns are tolerated."""

    def look(self, now_ns: int) -> Look:
        """Return what is known at `now_ns` (wall clock); changes no answer of a later look."""
        return Look(
            findings=[],
            detectors=[],
            verdict=None,
            answer=Answer("waiting", "No verdict yet: nothing was heard from this run"),
            status="starting",
            status_text="",
            coverage=Coverage(0, 0, 0, (), (), "no rank reports yet"),
        )
