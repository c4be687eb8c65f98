"""Answers about how the ranks of a run share the work."""

from __future__ import annotations

from typing import Literal, TypeAlias

from rankscope_server.answers import Capped, LeftOut, Schema

Unit: TypeAlias = Literal["times", "ratio", "ms", "bytes", "tokens/s", ""]


class MeshAxis(Schema, frozen=True):
    """One direction of the mesh; `family` is the place of its groups, null where it has none."""

    name: str
    size: int
    family: int | None


class MeshValue(Schema, frozen=True):
    """A number of every rank, in their order; null where it is not known."""

    key: str
    title: str
    unit: Unit  # "times" is of the peers
    what: str  # how it is measured
    values: list[float | None]
    lo: float | None  # where its colours begin and end; null for "times"
    hi: float | None
    num_known: int


class Mesh(Schema, frozen=True):
    """Where each rank is: its coordinates, one on each axis, the outermost axis first."""

    text: str
    axes: list[MeshAxis]
    rank: list[int]
    host: list[int]  # a place in `hosts`; -1: not known
    stage: list[int | None]
    at: list[list[int]]
    hosts: list[str]
    values: list[MeshValue]
    ranks_capped: Capped | None


class GroupFamily(Schema, frozen=True):
    """Groups of one kind."""

    name: str
    text: str
    num_groups: int
    size: int  # ranks of the first of its groups
    backend: str
    descriptions: list[str]  # as their makers called them
    is_axis: bool
    num_calls: int
    blocked_ratio: float | None  # of all time blocked in collectives; null where none is known


class PipelineStage(Schema, frozen=True):
    """One place of the pipeline; ms are medians over steps and its ranks."""

    stage: int
    num_ranks: int
    ranks_text: str
    own_ms: float | None  # of a step
    forward_ms: float | None  # of a microbatch
    backward_ms: float | None
    idle_ratio: float | None
    others_ratio: float | None  # its self time over the mean of the others
    longest_rank: int | None
    longest_ratio: float | None  # over its stage


class Pipeline(Schema, frozen=True):
    """How much a pipeline idles, and which stage works longest."""

    num_stages: int  # of the model
    num_ranks: int  # from the first to the last place
    num_chunks: int  # stages on each
    num_microbatches: int | None
    schedule: str
    step_lo: int
    step_hi: int
    step_ms: float | None
    idle_ratio: float | None  # measured
    ideal_ratio: float | None
    ideal_text: str  # its formula, or why there is none
    even_gain: float | None  # of a step, at most
    stages: list[PipelineStage]


class StaleRank(Schema, frozen=True):
    """How old the gradients of a rank were when they were applied, in versions."""

    rank: int
    num_gradients: int
    p50: int
    p95: int
    most: int
    mean: float
    num_mismatched: int  # whose backward used other weights than their forward


class Staleness(Schema, frozen=True):
    """Ages of gradients; `bound` is what the job declares, -1 none, null not declared."""

    text: str
    bound: int | None
    ranks: list[StaleRank]


class BearingFinding(Schema, frozen=True):
    """A finding about what the page shows."""

    id: int
    what: str
    severity: str


class Parallelism(Schema, frozen=True):
    """How the ranks share the work; without a pipeline, `no_pipeline` says so."""

    text: str
    attempt: int
    world_size: int
    step_lo: int  # the steps that are measured
    step_hi: int
    mesh: Mesh
    families: list[GroupFamily]
    families_capped: Capped | None
    pipeline: Pipeline | None
    no_pipeline: str
    staleness: Staleness | None
    findings: list[BearingFinding]
    left_out: list[LeftOut]


class PlacedRank(Schema, frozen=True):
    """A rank with its place and its numbers, for the table twin."""

    rank: int
    host: str
    stage: int | None
    place: str
    own_ratio: float | None
    own_ms: float | None
    step_ms: float | None
    blocked_ratio: float | None
    waiting_ratio: float | None
    communication_ratio: float | None
    rank_memory: float | None
    cuda_allocated: float | None
    loss: float | None
    gradient_norm: float | None
    gradient_norm_local: float | None
    tokens_per_second: float | None
    mfu_ratio: float | None


def placed_ranks(mesh: Mesh) -> list[PlacedRank]:
    """Return one row for each rank."""
    values = {one.key: one.values for one in mesh.values}
    nothing: list[float | None] = [None] * len(mesh.rank)
    names = PlacedRank.__struct_fields__[4:]
    return [
        PlacedRank(
            rank=rank,
            host=mesh.hosts[mesh.host[row]] if mesh.host[row] >= 0 else "",
            stage=mesh.stage[row],
            place=", ".join(
                f"{axis.name} {place}" for axis, place in zip(mesh.axes, mesh.at[row], strict=True)
            ),
            **{name: values.get(name, nothing)[row] for name in names},
        )
        for row, rank in enumerate(mesh.rank)
    ]
