"""Answers about what is stored and what goes."""

from __future__ import annotations

from typing import Literal

from rankscope_server.answers import Capped, Schema


class DiskAnswer(Schema, frozen=True):
    """The disk of the embedded store; null what is not known of a database elsewhere."""

    free_bytes: int | None
    total_bytes: int | None
    database_bytes: int | None
    wal_bytes: int
    reusable_bytes: int | None  # free within the database file
    reserve_bytes: int
    full: str  # why no data is taken; empty while it is


class KindSize(Schema, frozen=True):
    """What there is of a kind, and how long it is kept; 0 is no limit."""

    kind: str
    label: str
    rows: int
    bytes: int
    keep_days: float
    keep_bytes: int


class RunSize(Schema, frozen=True):
    """What a run holds, largest first."""

    run_id: str
    name: str
    status: str
    is_live: bool
    is_pinned: bool
    received_ms: float | None
    rows: int
    bytes: int
    kinds: dict[str, int]  # bytes by kind


class PlannedRow(Schema, frozen=True):
    """What would be removed now."""

    run_id: str
    name: str
    kind: str  # "run": all of it
    reason: Literal["age", "size"]
    rows: int
    bytes: int


class DeletionRow(Schema, frozen=True):
    """A deleted run: its id is refused; `finished_ms` null while its data is being removed."""

    run_id: str
    name: str
    reason: Literal["asked", "age", "size"]
    asked_ms: float | None
    finished_ms: float | None
    rows: int
    bytes: int
    rows_at_start: int
    bytes_at_start: int


class RetentionProgress(Schema, frozen=True):
    """What retention does now."""

    state: Literal["idle", "counting", "removing", "giving back"]
    run_id: str
    kind: str
    rows: int
    rows_to_go: int
    began_ms: float | None
    round_ended_ms: float | None
    failure: str


class StorageAnswer(Schema, frozen=True):
    """What is stored, by kind and by run. Sizes are of content, without indexes."""

    text: str
    disk: DiskAnswer
    rows: int
    bytes: int
    kinds: list[KindSize]
    runs: list[RunSize]
    capped: Capped | None


class RetentionAnswer(Schema, frozen=True):
    """What retention would remove now, what it does, and what was deleted."""

    text: str
    are_any: bool  # whether a setting says that anything goes
    rows: int
    bytes: int
    planned: list[PlannedRow]
    unmet: list[str]  # limits that stay exceeded: pinned and live runs are not touched
    progress: RetentionProgress
    deletions: list[DeletionRow]
    capped: Capped | None


class PinAnswer(Schema, frozen=True):
    """Whether retention and deletions leave a run alone."""

    run_id: str
    is_pinned: bool


class ReleaseAnswer(Schema, frozen=True):
    """The id of a deleted run may be used again."""

    run_id: str
    is_released: bool


class RemovedRow(Schema, frozen=True):
    """What retention took from a run that is still there."""

    kind: str
    text: str
    rows: int
    bytes: int
    received_before_ms: float | None
    removed_ms: float | None
