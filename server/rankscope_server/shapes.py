"""The answers of the API, field by field as docs/api.md says; OpenAPI is made from these.

Times and durations are milliseconds, `None` means not known.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from rankscope_server.ingest.records import Refused

RunStatus: TypeAlias = Literal["starting", "running", "stuck", "ended", "failed", "silent"]
RankStatus: TypeAlias = Literal["running", "silent", "ended", "failed", "stuck"]
AnswerState: TypeAlias = Literal["culprit", "healthy", "waiting", "unknown"]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every answer."""


class IngestAnswer(Shape, frozen=True):
    """What was stored of a batch."""

    accepted_records: int
    accepted_chunks: int
    duplicate: bool
    refused: list[Refused] = []


class Health(Shape, frozen=True):
    """The server answers."""

    status: Literal["ok"]
    version: str


class SettingValue(Shape, frozen=True):
    """One setting in force."""

    name: str
    value: str | int | float | bool
    default: str | int | float | bool
    flag: str
    variable: str
    text: str


class SettingsAnswer(Shape, frozen=True):
    """All settings; secrets say only whether they are set."""

    settings: list[SettingValue]


class Session(Shape, frozen=True):
    """Whether this server wants a token, and whether this request carried it."""

    required: bool
    signed_in: bool


class Capped(Shape, frozen=True):
    """A list was cut."""

    shown: int
    total: int


class ShortVerdict(Shape, frozen=True):
    """The verdict in a list of runs."""

    kind: str
    severity: str
    what: str
    cost_throughput_ratio: float | None = None


class RunSummary(Shape, frozen=True):
    """One run in a list."""

    run_id: str
    name: str
    status: RunStatus
    status_text: str
    started_ms: float | None
    ended_ms: float | None
    last_seen_ms: float | None
    world_size: int | None
    num_nodes: int | None
    hosts: list[str]
    attempt: int
    step: int
    command: list[str]
    launcher: str
    tags: dict[str, str]
    verdict: ShortVerdict | None


class Runs(Shape, frozen=True):
    """A page of runs, newest first."""

    total: int
    runs: list[RunSummary]


class SilentRank(Shape, frozen=True):
    """A rank that said nothing for a while."""

    rank: int
    last_seen_ms: float | None
    step: int


class LossRow(Shape, frozen=True):
    """What an agent lost."""

    host: str
    rank: int
    source: str
    reason: str
    count: int


class Coverage(Shape, frozen=True):
    """How much of the run is seen."""

    expected: int
    registered: int
    reporting: int
    silent: list[SilentRank]
    losses: list[LossRow]
    refused: int
    missing_batches: int
    text: str


class Answer(Shape, frozen=True):
    """The first sentence of the page, with or without a verdict."""

    state: AnswerState
    text: str
    detail: str


class Evidence(Shape, frozen=True):
    """One fact behind a finding; `link` is relative to the dashboard's root."""

    text: str
    link: str = ""


class Folded(Shape, frozen=True):
    """A finding that the verdict explains."""

    id: int | None
    what: str


class Finding(Shape, frozen=True):
    """What a detector found: who, since when, why, at what cost, what to do."""

    id: int
    detector: str
    kind: str
    severity: str
    state: str
    attempt: int
    ranks: list[int] = []
    hosts: list[str] = []
    group: str | None = None
    onset_step: int | None = None
    onset_ms: float | None = None
    ended_step: int | None = None
    cost_throughput_ratio: float | None = None
    cost_rank_hours_per_day: float | None = None
    confidence: float | None = None
    confidence_text: str = ""
    what: str = ""
    why: str = ""
    next: str = ""
    next_command: str = ""
    evidence: list[Evidence] = []
    ruled_out: list[str] = []
    would_be_wrong_if: str = ""
    explained_by: int | None = None
    victims: list[int] = []
    opened_ms: float | None = None
    updated_ms: float | None = None
    recovered_ms: float | None = None
    policy_hash: str = ""


class Verdict(Finding, frozen=True):
    """The finding that explains the run best, with those folded under it."""

    folded: list[Folded] = []


class HistoryEvent(Shape, frozen=True):
    """Something that happened to a finding."""

    time_ms: float
    event: str
    text: str


class FindingDetail(Finding, frozen=True):
    """A finding with its history."""

    history: list[HistoryEvent] = []


class Detector(Shape, frozen=True):
    """Whether a detector could look."""

    name: str
    text: str = ""
    state: str = ""
    reason: str = ""
    remedy: str = ""


class Findings(Shape, frozen=True):
    """Every finding of a run, and what looked for them."""

    open: list[Finding]
    recovered: list[Finding]
    detectors: list[Detector]
    steps: int


class Number(Shape, frozen=True):
    """A key number of the overview."""

    key: str
    label: str
    value: float | None
    unit: str
    change_ratio: float | None = None
    reference_text: str = ""


class Attempt(Shape, frozen=True):
    """One (re)start of a run."""

    attempt: int
    started_ms: float | None
    ended_ms: float | None
    last_seen_ms: float | None
    world_size: int | None
    step_lo: int | None
    step_hi: int | None
    exit_text: str


class Counts(Shape, frozen=True):
    """How many of what there are."""

    findings_open: int
    findings_recovered: int
    errors: int
    log_lines: int
    environment_differences: int


class Overview(Shape, frozen=True):
    """The first page of a run."""

    run: RunSummary
    coverage: Coverage
    verdict: Verdict | None
    answer: Answer
    numbers: list[Number]
    attempts: list[Attempt]
    counts: Counts


class RankRow(Shape, frozen=True):
    """One rank: where it is."""

    rank: int
    host: str
    node_rank: int | None
    local_rank: int | None
    pid: int | None
    attempt: int
    state: RankStatus
    step: int
    phase: str | None
    phase_since_ms: float | None
    last_seen_ms: float | None
    exit_text: str
    stage: int | None
    sources: dict[str, str]
    cpu_seconds: float | None
    rss_bytes: int | None


class Ranks(Shape, frozen=True):
    """Every rank of the newest attempt, or of the one asked for."""

    ranks: list[RankRow]


class GroupRow(Shape, frozen=True):
    """Where one rank stands in one process group."""

    group: str
    description: str
    backend: str
    ranks: list[int]
    issued: int | None
    ended: int | None
    operation: str
    size_bytes: int | None
    issued_ms: float | None
    call_site: str


class CollectiveRecord(Shape, frozen=True):
    """One collective or point-to-point operation of one rank."""

    attempt: int
    rank: int
    step: int
    group: str
    sequence: int
    operation: str
    dtype: str
    size_bytes: int
    num_tensors: int
    peer_rank: int | None
    arrived_ms: float
    duration_ms: float | None
    returned_ms: float | None
    blocked_ms: float | None
    state: str
    is_async: bool
    is_p2p: bool
    end_is_upper_bound: bool
    call_site: str


class CollectiveRecords(Shape, frozen=True):
    """Raw records, newest first."""

    rows: list[CollectiveRecord]
    capped: Capped | None = None


class StackRow(Shape, frozen=True):
    """Python stacks of one rank, innermost frame first."""

    time_ms: float
    reason: str
    text: str


class RankDetail(RankRow, frozen=True):
    """One rank in full."""

    role: str
    backend: str
    local_world_size: int | None
    world_size: int | None
    num_stages: int | None
    num_microbatches: int | None
    schedule: str
    registered_ms: float | None
    ended_ms: float | None
    end_reason: str | None
    exit_code: int | None
    exit_signal: int | None
    end_detail: str
    groups: list[GroupRow]
    collectives: list[CollectiveRecord]
    stacks: list[StackRow]


class MapRow(Shape, frozen=True):
    """One lane of the map."""

    label: str
    rank_lo: int
    rank_hi: int
    host: str


class PinnedRow(Shape, frozen=True):
    """A lane that stands above the map at every zoom."""

    rank: int
    label: str
    host: str
    why: str
    max_ratio: float | None
    cells: str
    missing: str


class Mark(Shape, frozen=True):
    """A step worth a tick."""

    step: int
    kind: Literal["onset", "checkpoint", "attempt", "first"]
    text: str


class Map(Shape, frozen=True):
    """Ranks by steps, one byte a cell; a bin shows its worst cell."""

    metric: str
    unit: Literal["ratio", "ms"]
    reference: Literal["peers", "own"] | None
    reference_text: str
    value_lo: float | None
    value_hi: float | None
    step_lo: int
    step_hi: int
    bin: int
    columns: int
    rank_bin: int
    rows: list[MapRow]
    cells: str
    missing: str
    pinned: list[PinnedRow]
    marks: list[Mark]
    time_ms: list[float | None]
    world_size: int
    text: str


class Cell(Shape, frozen=True):
    """Exact numbers of one rank in one step."""

    rank: int
    step: int
    host: str
    ratio: float | None
    reference_ms: float | None
    own_work_ms: float | None
    step_ms: float | None
    phases: dict[str, float | None]
    blocked_ms: float | None
    cpu_ms: float | None
    time_ms: float | None
    flags: list[str]


class Throughput(Shape, frozen=True):
    """Step times per bin of steps."""

    bin: int
    step: list[int]
    time_ms: list[float | None]
    step_min_ms: list[float | None]
    step_median_ms: list[float | None]
    step_max_ms: list[float | None]
    before_ms: float | None
    now_ms: float | None
    onset_step: int | None


class BudgetRow(Shape, frozen=True):
    """Where the step of one rank goes, as a mean over the steps asked for."""

    label: str
    rank: int | None
    total_ms: float
    parts: dict[str, float]


class Budget(Shape, frozen=True):
    """Where a step goes."""

    step_lo: int
    step_hi: int
    rows: list[BudgetRow]
    parts: list[str]
    text: str


class CollectiveRow(Shape, frozen=True):
    """One operation, group and size."""

    operation: str
    group: str
    num_ranks: int | None
    size_bytes: int
    count: int
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    exposed_ms_per_step: float | None
    open: int


class Collectives(Shape, frozen=True):
    """What was communicated, the most exposed first."""

    rows: list[CollectiveRow]
    text: str
    capped: Capped | None = None


class LogRow(Shape, frozen=True):
    """One line, or one that several ranks wrote alike."""

    id: int
    time_ms: float
    run_id: str
    attempt: int
    rank: int
    host: str
    level: str
    logger: str
    stream: str
    message: str
    step: int
    fields: dict[str, str]
    count: int
    ranks: list[int]


class LogHistogram(Shape, frozen=True):
    """Lines per level and slice of time."""

    from_ms: float
    to_ms: float
    bucket_ms: float
    levels: dict[str, list[int]]


class LogFacets(Shape, frozen=True):
    """How many lines each value would give, its own filter left out."""

    rank: list[tuple[int, int]]
    level: list[tuple[str, int]]
    host: list[tuple[str, int]]
    logger: list[tuple[str, int]]
    stream: list[tuple[str, int]]


class Logs(Shape, frozen=True):
    """A page of lines, newest first; with `after` oldest first."""

    total: int
    lines: list[LogRow]
    histogram: LogHistogram | None
    facets: LogFacets
    next_cursor: str | None
    last_id: int
    capped: Capped | None = None


class SearchAnswer(Shape, frozen=True):
    """Lines of all runs, newest first."""

    total: int
    lines: list[LogRow]
    capped: Capped | None = None


class ErrorGroup(Shape, frozen=True):
    """Errors of one cause."""

    id: str
    type: str
    message: str
    ranks: list[int]
    count: int
    first_ms: float
    last_ms: float
    step: int
    role: Literal["initiating", "cascade", "unknown"]
    traceback: str
    why_grouped: str
    why_role: str


class Errors(Shape, frozen=True):
    """Error groups, first in time first."""

    groups: list[ErrorGroup]


class FactValue(Shape, frozen=True):
    """One value of a fact and the ranks that have it."""

    value: str
    ranks: list[int]


class FactDifference(Shape, frozen=True):
    """A fact on which ranks differ."""

    fact: str
    severity: Literal["critical", "warning", "info"]
    values: list[FactValue]


class Fact(Shape, frozen=True):
    """A fact on which all ranks agree."""

    fact: str
    value: str


class EnvironmentAnswer(Shape, frozen=True):
    """What differs between the ranks' environments, and what they share."""

    text: str
    ranks: list[int]
    missing: list[int]
    differences: list[FactDifference]
    common: list[Fact]


class SampleSeries(Shape, frozen=True):
    """Least and largest value per slice of time; gaps are null."""

    host: str
    gpu: int | None
    name: str
    unit: str
    time_ms: list[float]
    min: list[float | None]
    max: list[float | None]


class Samples(Shape, frozen=True):
    """Host or GPU samples."""

    hosts: list[str]
    names: list[str]
    series: list[SampleSeries]
    capped: Capped | None = None


class MetricSeries(Shape, frozen=True):
    """One number of training; `value` is the last of each bin, null where it was not finite."""

    name: str
    rank: int
    step: list[int]
    value: list[float | None]
    min: list[float | None]
    max: list[float | None]


class MetricsAnswer(Shape, frozen=True):
    """Numbers that the script logged."""

    names: list[str]
    series: list[MetricSeries]
    capped: Capped | None = None


def json_object(text: str | None) -> Any:
    """Return what a JSON column holds; None for an empty one."""
    return msgspec.json.decode(text) if text else None


def to_ms(ns: int | None) -> float | None:
    """Return milliseconds of nanoseconds; zero and None are not known."""
    return ns / 1e6 if ns else None
