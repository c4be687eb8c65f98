"""What a fault is: where it acts, how large it is, and the methods that the injector calls.

A fault lasts from the first step of its plan to the last. For each of its visits the injector asks
`is_due` and then calls `fire`; before the first it writes the manifest line and calls `begin`, and
after the last it calls `end`. Each plan has its own instance, so a fault may keep what it needs in
`self`. Nothing here imports torch, and faults import it inside their methods: `--help` names them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rankscope_trainer.errors import SettingError

if TYPE_CHECKING:
    from torch import Tensor

    from rankscope_trainer.checkpoint import Checkpoints
    from rankscope_trainer.data import Batches
    from rankscope_trainer.faults.calls import InterceptedCall
    from rankscope_trainer.settings import Settings
    from rankscope_trainer.strategies.strategy import Strategy
    from rankscope_trainer.world import World

MIB = 2**20


class Place(enum.Enum):
    """A place of the training run where faults may act."""

    START = "start"  # before the process group is joined: once; `settings` may be replaced
    STEP = "step"  # as a step begins, before its data: once in a step
    SAMPLE = "sample"  # while one window of the data is read: `sample` is its number
    DATA = "data"  # while the data loader puts a batch together: once in a step
    BATCH = "batch"  # a batch was drawn; `batch` may be changed in place: once in a step
    BEFORE_FORWARD = "before_forward"  # between data and the first forward: once in a step
    FORWARD = "forward"  # inside the model's forward: each microbatch; `tensor` is its output
    BACKWARD = "backward"  # as a backward enters the model: each microbatch; `tensor` its gradient
    # In the last backward of a step, at the parameter that comes last: `tensor` is the gradient
    # of that microbatch, not yet added to the others' and not reduced. Once in a step.
    BEFORE_REDUCE = "before_reduce"
    COLLECTIVE = "collective"  # around a call into torch.distributed: `call` may be changed
    BEFORE_UPDATE = "before_update"  # gradients are reduced, not yet clipped: once in a step
    AFTER_UPDATE = "after_update"  # the optimizer has taken its step: once in a step
    CHECKPOINT = "checkpoint"  # before the rank writes its part of a checkpoint


PLACES_OF_MICROBATCHES = (Place.FORWARD, Place.BACKWARD)
PLACES_OF_LOADING = (Place.SAMPLE, Place.DATA)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Magnitude:
    """The size of a fault, in exactly one of these units."""

    seconds: float | None = None  # of a step, for what slows steps down
    ratio: float | None = None  # the same, as a multiple of a step's own compute
    mib: float | None = None
    mib_per_second: float | None = None
    count: float | None = None  # of what `size_is` names
    share: float | None = None  # 0 to 1, of what `size_is` names
    ppm: float | None = None

    @property
    def unit(self) -> str:
        """Return the name of the one field that is set."""
        return next(name for name, value in dataclasses.asdict(self).items() if value is not None)

    @property
    def value(self) -> float:
        """Return the number in that unit."""
        number: float = getattr(self, self.unit)
        return number

    def __str__(self) -> str:
        """Write it the way it is written on the command line."""
        if self.seconds is not None:
            return f"{self.seconds * 1000:g}ms"
        suffix = {"mib": "MiB", "mib_per_second": "MiB/s", "ppm": "ppm"}.get(self.unit, "")
        return f"{self.value:g}{suffix}"


class Parts(Protocol):
    """The parts of the trainer that a fault may reach; model and optimizer are the strategy's."""

    settings: Settings
    world: World
    strategy: Strategy
    batches: Batches
    checkpoints: Checkpoints | None


@dataclasses.dataclass(kw_only=True)
class FaultContext:
    """All that a fault may know about the visit in which it fires, and what it may change."""

    rank: int
    world_size: int
    step: int
    magnitude: Magnitude | None
    compute_seconds: float  # this rank's own compute of one step: median, without injected delays
    visits: int  # how often the fault's place is passed in one step
    place: Place
    sleep: Callable[[float], None]
    peer: int | None = None  # the other end, for faults between two ranks
    trainer: Parts | None = None  # None only before the trainer is built
    settings: Settings | None = None  # START: a fault may put others in their place
    sample: int = 0  # SAMPLE: the number of the window that is read
    batch: tuple[Tensor, Tensor] | None = None  # BATCH: bytes and next bytes, changed in place
    tensor: Tensor | None = None  # FORWARD, BACKWARD, BEFORE_REDUCE: may be replaced
    call: InterceptedCall | None = None  # COLLECTIVE
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)  # see `add`, `note`

    def delay_seconds(self) -> float:
        """Return this visit's share of the extra time that the fault adds to a step."""
        if self.magnitude is None:
            return 0.0
        if self.magnitude.seconds is not None:
            return self.magnitude.seconds / self.visits
        assert self.magnitude.ratio is not None
        return self.magnitude.ratio * self.compute_seconds / self.visits

    def size(self) -> float:
        """Return the size as a number in its own unit."""
        assert self.magnitude is not None
        return self.magnitude.value

    def parts(self) -> Parts:
        """Return the trainer's parts, anywhere but at the start."""
        assert self.trainer is not None
        return self.trainer

    def add(self, **facts: float) -> None:
        """Add up what the fault really did (`paused_seconds`, say) for its end in the manifest."""
        for name, value in facts.items():
            self.facts[name] = self.facts.get(name, 0.0) + value

    def note(self, **facts: Any) -> None:
        """Note what the fault did, for its end in the manifest; later values win."""
        self.facts.update(facts)


class Fault:
    """One way of breaking a run; the first line of the class docstring is its help text."""

    name: ClassVar[str]
    finding: ClassVar[str]  # the kind of finding that the diagnosis must name
    place: ClassVar[Place]
    other_place: ClassVar[Place | None] = None  # for what acts at two
    default_size: ClassVar[Magnitude | None] = None  # None: the fault has no size
    size_is: ClassVar[str] = "none"  # what the size means, for the tables
    on_all_ranks: ClassVar[bool] = False  # True: `rank` is `all`, or left out
    has_peer: ClassVar[bool] = False  # True: `peer` may be given: only between these two ranks

    @property
    def sentence(self) -> str:
        """Return what happens, in one sentence."""
        return (type(self).__doc__ or "").splitlines()[0]

    @property
    def size_text(self) -> str:
        """Return what the size means, and in brackets the one that is taken where none is given."""
        return self.size_is + ("" if self.default_size is None else f" ({self.default_size})")

    def acts_at(self, place: Place) -> bool:
        """Return whether this is one of the fault's places."""
        return place in (self.place, self.other_place)

    def check(self, settings: Settings, world_size: int) -> None:
        """Raise a SettingError if this run, or this machine, cannot show the fault."""

    def prepare(self, rank: int) -> None:
        """Prepare a rank that the fault concerns, before its first step."""

    def is_due(self, context: FaultContext) -> bool:
        """Return whether the fault fires at this visit of its place."""
        return True

    def begin(self, context: FaultContext) -> None:
        """Start what goes on between visits: a thread, a process, a limit."""

    def fire(self, context: FaultContext) -> None:
        """Do the damage once."""

    def act_in_worker(self) -> None:
        """Act in a loader's worker as the last `fire` asked; the worker itself knows no step."""

    def end(self, context: FaultContext) -> None:
        """Undo what `begin` started; also called when the run ends, or fails, before."""


class DelayFault(Fault):
    """Adds time at its place."""

    def fire(self, context: FaultContext) -> None:
        """Sleep for this visit's share of the extra time."""
        context.sleep(context.delay_seconds())


class SettingsFault(Fault):
    """Builds the run with other settings than those that were given."""

    place = Place.START
    on_all_ranks = True
    strategies: ClassVar[tuple[str, ...]] = ()  # that can show it; none: all

    def check(self, settings: Settings, world_size: int) -> None:
        """Refuse a strategy that the other settings mean nothing to."""
        if self.strategies and settings.strategy not in self.strategies:
            problem = f"{self.name} has no effect on strategy {settings.strategy}"
            first, *others = self.strategies
            names = f"one of: {', '.join(self.strategies)}" if others else f"strategy {first}"
            raise SettingError("fault", problem, f"Choose {names}")

    def fire(self, context: FaultContext) -> None:
        """Replace the settings."""
        settings = context.settings
        assert settings is not None
        context.settings = dataclasses.replace(settings, **self.changes(settings, context))

    def changes(self, settings: Settings, context: FaultContext) -> dict[str, Any]:
        """Return the settings that are replaced; raise a SettingError where that cannot be."""
        raise NotImplementedError
