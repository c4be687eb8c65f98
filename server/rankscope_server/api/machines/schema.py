"""Answers about the machines of a run."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from rankscope_server.answers import Capped, LeftOut, Schema

SourceState: TypeAlias = Literal[
    "works", "slowed", "skipped", "fails", "stuck", "starting", "unknown"
]


class MachineSource(Schema, frozen=True):
    """One source of samples on one machine. `skipped` is not healthy: it is not known."""

    source: str
    state: SourceState
    reason: str


class MachineGpu(Schema, frozen=True):
    """One GPU; `slowed` is the share of the newest samples by reason for lower clocks."""

    gpu: int
    name: str
    uuid: str
    bus_id: str
    slowed: dict[str, float]


class MachineEvent(Schema, frozen=True):
    """Something that happened to a machine: an Xid, a process killed for memory, a link down."""

    time_ms: float | None
    host: str
    rank: int | None
    name: str
    text: str
    fields: dict[str, str]


class Machine(Schema, frozen=True):
    """One machine of a run."""

    host: str
    ranks: list[int]
    kinds: list[str]  # of samples that it has sent
    first_ms: float | None
    last_ms: float | None
    driver: str
    sources: list[MachineSource]
    gpus: list[MachineGpu]


class Machines(Schema, frozen=True):
    """The machines of a run, and what happened to them, newest first."""

    text: str
    machines: list[Machine]
    events: list[MachineEvent]
    capped: Capped | None = None


class SampleSeries(Schema, frozen=True):
    """Least and largest value per slice of time; what is missing is null.

    A counter is shown as its rate. `label` says which device, interface or process it is.
    """

    host: str
    gpu: int | None
    label: str
    name: str
    unit: str
    time_ms: list[float]
    min: list[float | None]
    max: list[float | None]


class Samples(Schema, frozen=True):
    """Samples of one kind, of the machines of a run."""

    hosts: list[str]
    names: list[str]
    series: list[SampleSeries]
    capped: Capped | None = None
    left_out: list[LeftOut] = msgspec.field(default_factory=list)
