"""Answers about what a run would take if it were otherwise."""

from __future__ import annotations

from typing import Literal

from rankscope_server.answers import Schema


class WhatIfInput(Schema, frozen=True):
    """A number that the answers rest on; without a value it is not known. `source`: from where."""

    name: str
    label: str
    value: float | str | None
    unit: str
    source: str


class WhatIfFactor(Schema, frozen=True):
    """What makes the planner's step of now the measured one."""

    name: str
    value: float
    what: str  # a sentence


class WhatIfNow(Schema, frozen=True):
    """The run as it was recorded; `parts` are ms of a step and add up to it."""

    text: str
    ranks: int
    nodes: int
    strategy: str
    microbatches: int | None
    step_ms: float | None
    parts: dict[str, float]
    memory_bytes: float | None  # of the fullest rank
    memory_source: str


class WhatIfAnswer(Schema, frozen=True):
    """One change, or several together; without a step it is not answered: `why_not` says why.

    Throughput is that of samples, over that of now.
    """

    key: str  # as its query parameters
    label: str
    step_ms: float | None
    step_low_ms: float | None
    step_high_ms: float | None
    throughput_ratio: float | None
    throughput_low: float | None
    throughput_high: float | None
    ranks: int | None
    parts: dict[str, float]  # ms of a step; empty where a replay answers
    memory_bytes: float | None
    no_memory: str  # why it is not known
    by: Literal["planner", "replay", "both", ""]
    assumptions: list[str]
    band: str  # where the band is from
    why_not: str


class WhatIf(Schema, frozen=True):
    """What changes would give: those that were asked for together, else each that makes sense."""

    text: str
    attempt: int
    step_lo: int
    step_hi: int
    num_steps: int
    now: WhatIfNow
    answers: list[WhatIfAnswer]  # the most throughput of a rank first, what is not known last
    inputs: list[WhatIfInput]
    factors: list[WhatIfFactor]
