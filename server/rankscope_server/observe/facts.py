"""What detectors know of an attempt beside its steps: numbers, memory, machines, environments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rankscope.wire.schema import (
    COMMAND_ENDED,
    DATA_LOADER,
    IMPORTED,
    LOSS_SCALE,
    MAX_RANK,
    OPTIMIZER_USED,
    RECORDING,
    REGROUPED,
    THINNING_CHANGED,
    AnyRecord,
    Environment,
    Event,
    Metrics,
    RunStarted,
)
from rankscope_server.observe.data_passes import PASS, DataPasses
from rankscope_server.observe.environment_table import EnvironmentTable
from rankscope_server.observe.machine_table import MachineTable
from rankscope_server.observe.memory_table import MemoryTable
from rankscope_server.observe.number_table import NumberTable
from rankscope_server.observe.regroups import Regroups
from rankscope_server.observe.resume import ScriptSteps
from rankscope_server.observe.thinning import Thinning, thinning_of
from rankscope_server.observe.time_sums import TimeSums
from rankscope_server.observe.version_table import VersionTable

SLOWDOWN_FIELDS = ("slowdown", "step_ms", "ideal_ms")
_MAX_SAVES = 4096
_MAX_LOADERS = 16
_MAX_PASSES = 1 << 20
_MAX_CLASSES = 8


@dataclass(frozen=True, slots=True)
class Save:
    """One checkpoint as one rank saved it: how long it held the rank, and how."""

    rank: int
    step: int
    time_ns: int
    seconds: float
    how: str


@dataclass(frozen=True, slots=True)
class ReplayedSlowdown:
    """What a replay of all recorded operations says of a job: S, and the step behind it."""

    ratio: float
    step_ms: float
    ideal_ms: float  # if all ranks did each kind of operation equally fast


@dataclass(frozen=True, slots=True, order=True)
class LossScale:
    """How a rank scales the loss of the backward passes that make one step."""

    time_ns: int
    step: int
    passes: int
    local: int  # passes whose gradients stay on the rank (no_sync)
    factors: tuple[float, ...]  # that it is divided by, the last one first
    reduction: str  # of the loss before that: "mean", "sum", or empty where not known


@dataclass(frozen=True, slots=True, order=True)
class UsedOptimizer:
    """The optimizer of a rank, and what its learning rate can be compared with."""

    time_ns: int
    classes: tuple[str, ...]  # its own one and those above it
    given_rate: float  # by the command line, 0 where it gives none
    replicas: int  # that share the batch, 0 where not known


@dataclass(slots=True)
class Facts:
    """Tables that do not depend on the order in which records come, or on doubled ones."""

    machines: MachineTable = field(default_factory=MachineTable)
    environments: EnvironmentTable = field(default_factory=EnvironmentTable)
    numbers: NumberTable = field(default_factory=NumberTable)
    memory: MemoryTable = field(default_factory=MemoryTable)
    versions: VersionTable = field(default_factory=VersionTable)
    sums: TimeSums = field(default_factory=TimeSums)
    thinning: dict[int, Thinning] = field(default_factory=dict)  # the newest word of each rank
    loaders: dict[int, set[tuple[tuple[str, str], ...]]] = field(default_factory=dict)
    loss_scales: dict[int, LossScale] = field(default_factory=dict)  # the newest of each rank
    optimizers: dict[int, UsedOptimizer] = field(default_factory=dict)  # the newest of each rank
    passes: DataPasses = field(default_factory=DataPasses)
    saves: dict[tuple[int, int, int], Save] = field(default_factory=dict)
    script_steps: ScriptSteps = field(default_factory=ScriptSteps)
    launched_ns: int = 0  # when the first launcher began, 0 where none said so
    is_recording: bool = False  # of a run without the agent: nothing more will come of it
    slowdown: ReplayedSlowdown | None = None  # of a recording that holds single operations
    lacks_dates: bool = False  # the recording says when in a step, not on which day
    regroups: Regroups = field(default_factory=Regroups)
    left_ns: int = 0  # when the last launcher's command ended
    left_code: int | None = None  # its exit code; of several the first that is not 0

    def take(self, record: AnyRecord) -> None:
        """Take one record; most kinds are not for these tables."""
        if isinstance(record, Metrics):
            self._take_metrics(record)
        elif isinstance(record, Environment):
            self.environments.put(record)
        elif isinstance(record, Event) and record.name == RECORDING:
            self._take_recording(record.fields)
        elif isinstance(record, Event) and record.name == PASS:
            self.passes.take(record)
        elif isinstance(record, Event) and record.name == LOSS_SCALE:
            self._take_loss_scale(record)
        elif isinstance(record, Event) and record.name == OPTIMIZER_USED:
            self._take_optimizer(record)
        elif isinstance(record, Event) and record.name == REGROUPED:
            self.regroups.take(record)
        elif isinstance(record, Event):
            self._take_event(record)
        elif isinstance(record, RunStarted):
            self.launched_ns = min(self.launched_ns or record.time_ns, record.time_ns)
            self.is_recording |= record.launcher == IMPORTED

    def _take_metrics(self, record: Metrics) -> None:
        if record.rank < 0:
            return
        values: Mapping[str, float] = record.values
        self.numbers.put(record.rank, record.step, record.time_ns, values)
        self.memory.put(record.rank, record.step, values)
        self.versions.put(record.rank, record.step, values)
        self.script_steps.take(record)

    def _take_event(self, event: Event) -> None:
        if event.name == DATA_LOADER:
            found = self.loaders.setdefault(event.rank, set())
            if len(found) < _MAX_LOADERS:
                found.add(tuple(sorted(event.fields.items())))
        elif event.name == "checkpoint":
            try:
                seconds = float(event.fields.get("seconds", "nan"))
            except ValueError:
                return
            key = (event.time_ns, event.rank, event.step)
            how = event.fields.get("how", "")
            self.saves[key] = Save(event.rank, event.step, event.time_ns, seconds, how)
            if len(self.saves) > _MAX_SAVES:
                del self.saves[min(self.saves)]
        elif event.name == THINNING_CHANGED:
            said, known = thinning_of(event), self.thinning.get(event.rank)
            if said is not None and (known is None or said > known):
                self.thinning[event.rank] = said
        elif event.name == COMMAND_ENDED:
            self.left_ns = max(self.left_ns, event.time_ns)
            code = event.fields.get("exit_code", "")
            if not self.left_code and code.lstrip("-").isdigit():
                self.left_code = int(code)
        else:
            self.machines.take_event(event)

    def _take_loss_scale(self, event: Event) -> None:
        said = event.fields
        try:
            factors = tuple(float(word) for word in said.get("factors", "").split()[:16])
            passes, local = int(said["passes"]), int(said["local"])
        except (KeyError, ValueError):
            return
        if not 0 <= local <= passes <= _MAX_PASSES:
            return
        reduction = said.get("reduction", "")
        found = LossScale(event.time_ns, event.step, passes, local, factors, reduction)
        known = self.loss_scales.get(event.rank)
        self.loss_scales[event.rank] = found if known is None else max(found, known)

    def _take_optimizer(self, event: Event) -> None:
        said = event.fields
        try:
            given, replicas = float(said.get("given") or 0), int(said.get("replicas") or 0)
        except ValueError:
            return
        if not (0 <= given < math.inf and 0 <= replicas <= MAX_RANK):
            return
        classes = tuple(said.get("classes", "").split()[:_MAX_CLASSES])
        found = UsedOptimizer(event.time_ns, classes, given, replicas)
        known = self.optimizers.get(event.rank)
        self.optimizers[event.rank] = found if known is None else max(found, known)

    def _take_recording(self, fields: Mapping[str, str]) -> None:
        self.lacks_dates |= fields.get("dates") == "none"
        try:
            found = ReplayedSlowdown(*(float(fields[name]) for name in SLOWDOWN_FIELDS))
        except (KeyError, ValueError):
            return
        if all(0 < value < math.inf for value in (found.ratio, found.step_ms, found.ideal_ms)):
            self.slowdown = found
