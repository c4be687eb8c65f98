"""What a fault is: where in a step it acts, how large it is, and one method that fires it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import ClassVar, Protocol


class Place(enum.Enum):
    """A place of the training loop where faults may act."""

    DATA = "data"  # while the data loader puts a batch together: once in a step
    BEFORE_FORWARD = "before_forward"  # between data and the first forward: once in a step
    FORWARD = "forward"  # inside the model's forward: once for each microbatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Magnitude:
    """The size of a delay: `seconds` of a step, or a multiple (`ratio`) of a step's compute."""

    seconds: float | None = None
    ratio: float | None = None

    def __str__(self) -> str:
        """Write it the way it is written on the command line."""
        return f"{self.ratio:g}" if self.seconds is None else f"{self.seconds * 1000:g}ms"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultContext:
    """All that a fault may know about the moment in which it fires."""

    rank: int
    step: int
    magnitude: Magnitude | None
    compute_seconds: float  # this rank's own compute of one step: median, without injected delays
    visits: int  # how often the fault's place is passed in one step
    sleep: Callable[[float], None]

    def delay_seconds(self) -> float:
        """Return this visit's share of the extra time that the fault adds to a step."""
        if self.magnitude is None:
            return 0.0
        if self.magnitude.seconds is not None:
            return self.magnitude.seconds / self.visits
        assert self.magnitude.ratio is not None
        return self.magnitude.ratio * self.compute_seconds / self.visits


class Fault(Protocol):
    """One way of breaking a run; the first line of the class docstring is its help text."""

    name: ClassVar[str]
    finding: ClassVar[str]  # the kind of finding that the diagnosis must name
    place: ClassVar[Place]
    default_size: ClassVar[Magnitude | None]  # None: the fault has no size

    def fire(self, context: FaultContext) -> None:
        """Do the damage once."""
