"""Answers about all runs together."""

from __future__ import annotations

from rankscope_server.answers import Capped, Schema
from rankscope_server.api.runs.schema import ShortVerdict


class LiveRun(Schema, frozen=True):
    """A live run: its status and its verdict."""

    run_id: str
    name: str
    project: str
    status: str
    status_text: str
    sentence: str  # the first sentence about it; of a run with a verdict, the verdict
    needs_attention: bool
    world_size: int | None
    num_hosts: int
    step: int
    started_ms: float | None
    received_ms: float | None  # the server's clock
    verdict: ShortVerdict | None
    productive_share: float | None  # of its ranks' time; None: not known yet


class SilentAgent(Schema, frozen=True):
    """A host of a live run of which some ranks have not ended and send nothing."""

    run_id: str
    host: str
    num_silent: int
    num_ranks: int
    received_ms: float | None  # the newest of those ranks


class HostRun(Schema, frozen=True):
    """A run in which a finding named a host."""

    run_id: str
    name: str
    finding: int
    kind: str
    what: str
    started_ms: float | None


class FleetHost(Schema, frozen=True):
    """A host over the runs that it was in together with others.

    Of `num_alone` runs it was the only host: nothing says there whether it or the job was slow.
    """

    host: str
    num_runs: int
    num_alone: int
    num_slow: int  # runs in which a finding calls ranks of it slow
    num_failed: int  # runs in which a finding of a crash or a hang names it
    named: list[HostRun]  # the newest first
    num_named: int
    last_ms: float | None  # when its newest run began


class FleetHours(Schema, frozen=True):
    """Where the time of the ranks of some runs went, and how busy their machines were.

    What a run that is live took is that until now. A utilisation is null where no machine of the
    runs was measured; it is that of all GPUs or processors of their hosts, over the time in which
    they were sampled.
    """

    num_runs: int
    num_unknown: int  # runs whose cost is not known: they are in no sum
    num_live: int  # runs that have not ended: their sums still grow
    rank_hours: float
    productive_rank_hours: float
    kept_rank_hours: float  # in steps that are kept, but for waiting there for other ranks
    lost_rank_hours: float  # straggling, bubble, waiting, restart, done again, stuck
    other_rank_hours: float  # start-up, checkpoints, after the end
    unknown_rank_hours: float
    lost_by_cause: dict[str, float]  # rank-hours
    gpu_utilization_ratio: float | None
    num_gpu_known: int  # runs of which it is known
    cpu_utilization_ratio: float | None
    num_cpu_known: int


class FleetProject(FleetHours, frozen=True):
    """The runs of one project that began in a week."""

    project: str


class FleetWeek(FleetHours, frozen=True):
    """The runs that began in a week (from Monday, UTC)."""

    begin_ms: float
    is_over: bool
    projects: list[FleetProject]  # most rank-hours first


class Fleet(Schema, frozen=True):
    """All runs together; lists that were cut say so."""

    text: str
    live: list[LiveRun]
    live_capped: Capped | None
    num_quiet: int  # runs that never ended, and of which nothing came for a day
    silent: list[SilentAgent]
    silent_capped: Capped | None
    hosts: list[FleetHost]
    hosts_capped: Capped | None
    runs_capped: Capped | None  # of the runs by which hosts are compared
    weeks: list[FleetWeek]
    weeks_capped: Capped | None  # of the runs in the weeks
