"""Answers about the machines of a run."""

from __future__ import annotations

from typing import Literal

from rankscope_server.answers import Capped, Shape


class MachineSource(Shape, frozen=True):
    """One source of samples on one machine. `skipped` is not healthy: it is not known."""

    source: str
    state: Literal["works", "slowed", "skipped", "fails", "stuck", "starting", "unknown"]
    reason: str


class MachineGpu(Shape, frozen=True):
    """One GPU; `slowed` is the share of the newest samples by reason for lower clocks."""

    gpu: int
    name: str
    uuid: str
    bus_id: str
    slowed: dict[str, float]


class MachineEvent(Shape, frozen=True):
    """Something that happened to a machine: an Xid, a process killed for memory, a link down."""

    time_ms: float | None
    host: str
    rank: int | None
    name: str
    text: str
    fields: dict[str, str]


class Machine(Shape, frozen=True):
    """One machine of a run."""

    host: str
    ranks: list[int]
    kinds: list[str]  # of samples that it has sent
    first_ms: float | None
    last_ms: float | None
    driver: str
    sources: list[MachineSource]
    gpus: list[MachineGpu]


class Machines(Shape, frozen=True):
    """The machines of a run, and what happened to them, newest first."""

    text: str
    machines: list[Machine]
    events: list[MachineEvent]
    capped: Capped | None = None
