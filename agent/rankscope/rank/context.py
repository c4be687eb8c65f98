"""What the hooks of one rank share: its clock, events, metrics and records, and how they patch.

The runtime makes it and hands it to each hook, to the governor and to the commands of the server.
What they ask of the runtime is in the protocol `Runtime`; nothing here knows more of it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any, ClassVar, Literal, Protocol

from rankscope.files import identity, ring
from rankscope.rank.events import Events
from rankscope.rank.guard import guarded
from rankscope.rank.optimizer_cycle import OptimizerCycle
from rankscope.rank.patches import UndoScope, leave_out_of_warnings
from rankscope.rank.recorder import Recorder
from rankscope.rank.step_metrics import SamplingSchedule, StepMetrics
from rankscope.rank.steps import EndedStep, StepClock
from rankscope.settings import Settings
from rankscope.wire import schema
from rankscope.wire.redaction import clean


class Hook(Protocol):
    """One thing that the agent watches; the class docstring says what it records.

    `needs` is the module that must be imported before `install` can run; the runtime calls
    `install` as soon as it is. A hook that cannot do its work raises `HookSkipped`.
    """

    name: ClassVar[str]
    needs: ClassVar[str]

    def install(self, context: Context) -> str:
        """Begin to watch, and return in a few words which source is used."""


class HookSkipped(Exception):
    """This hook does not apply here; the message is the reason that people read."""


class Governed(Protocol):
    """What the governor must know of a source of collectives."""

    name: ClassVar[str]
    # cost of one call outside our own code, cold; measured once, see docs
    outside_us: ClassVar[float]

    def set_call_sites(self, wanted: bool) -> None:
        """Record from now on which line of the user's code calls, or not."""


class Outside(Protocol):
    """A source of collectives that leaves the dispatcher in thinned steps."""

    stays: str  # why it does not leave; empty: it may

    @property
    def is_out(self) -> bool:
        """Whether it has left the dispatcher."""

    def at_boundary(self) -> object:
        """A step begins."""

    def new_group(self) -> object:
        """A process group is about to be made."""


class Runtime(Protocol):
    """What hooks may ask of the runtime."""

    def world_known(self, rank: int, world_size: int) -> object:
        """Open the recorder for a rank that only init_process_group could name."""

    def first_work(self) -> None:
        """Open the recorder of a script that trains alone, at its first optimizer step."""

    def step_boundary(self) -> None:
        """Do what is done between two steps: thinning, commands of the server."""

    def settle(self) -> object:
        """Wait until threads of the process groups have reported the last ends, 1 s at most."""

    def govern(self, source: Governed) -> None:
        """Keep what this source of collectives costs below the budget."""


class Context:
    """The state of one rank that hooks read and write; main thread only, except for records."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], runtime: Runtime) -> None:
        self.settings = settings
        self.clock = StepClock()
        self.clock.on_end = self._step_ended
        self.events = Events()
        self.cycle = OptimizerCycle(self.clock)
        self.metrics = StepMetrics(settings, self.clock, self.record_metrics)
        self.recorder: Recorder | None = None
        self.is_off = False  # recording is switched off
        self.sources: dict[str, str] = {}  # by hook: what it uses, or why it does not work
        self.replicated: weakref.WeakSet[Any] = weakref.WeakSet()  # models under DDP
        self.engine_code: Any = None  # code object of the autograd engine's entry
        self.data_facts: dict[str, str] = {}  # of the first loader that gave a batch
        self.has_group = False  # a process group was made here
        self.before_exit: list[Callable[[], Any]] = []
        self.outside: Outside | None = None
        # where `patch`, `listen` and `add_undo` put what takes a hook out again: it is closed when
        # recording is switched off
        self.scope = UndoScope()
        self.source_scope = self.scope  # of the source of collectives, closed last
        self.lasting_scope = self.scope  # of what sees step boundaries while recording is off
        # bound once: hooks call them in each step
        self.world_known, self.first_work = runtime.world_known, runtime.first_work
        self.step_boundary, self.settle = runtime.step_boundary, runtime.settle
        self.govern = runtime.govern
        self._environ = environ
        self._schedules: dict[str, SamplingSchedule] = {}
        self._foreign: set[tuple[Any, str]] = set()  # attributes that the script has wrapped
        self._description: dict[str, Any] = {}
        self._when_recorder: list[Callable[[Context], None]] = []

    # --- patches and listeners ---------------------------------------------------------------

    def patch(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace an attribute of a class or module until the scope is closed.

        A function gets the name, the signature and the attributes of the one that it replaces.
        What the script has put over it meanwhile stays, and ours inside it.
        """
        if (owner, name) in self._foreign:
            return
        original = owner.__dict__[name] if name in owner.__dict__ else getattr(owner, name)

        def restore() -> None:
            if owner.__dict__.get(name) is replacement:
                setattr(owner, name, original)
            else:
                self._foreign.add((owner, name))

        if isinstance(replacement, FunctionType):
            functools.update_wrapper(replacement, original)
            leave_out_of_warnings(replacement)
        setattr(owner, name, replacement)
        self.scope.add(restore)

    def patch_all(self, owners: Iterable[Any], name: str, replacement: Any) -> None:
        """Replace a function in its module, the first owner, and where packages repeat it."""
        known = list(owners)
        original = getattr(known[0], name)
        for owner in known:
            if getattr(owner, name, None) is original:
                self.patch(owner, name, replacement)

    def on_new(self, kind: Any, made: Callable[[Any], Any]) -> None:
        """Call `made`, guarded, with each new instance of a class."""
        original, safe = kind.__init__, guarded(made)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            safe(self)

        self.patch(kind, "__init__", __init__)

    def listen(self, event: str, listener: Callable[[Any], Any], *, sampled: bool = False) -> None:
        """Call `listener` at each event of this name until the scope is closed: see `Events`."""
        self.scope.add(self.events.listen(event, listener, sampled=sampled))

    def add_undo(self, undo: Callable[[], Any]) -> None:
        """Run `undo` when the scope is closed."""
        self.scope.add(undo)

    @contextlib.contextmanager
    def within(self, scope: UndoScope) -> Iterator[None]:
        """Let what is patched inside belong to this scope."""
        before, self.scope = self.scope, scope
        try:
            yield
        finally:
            self.scope = before

    def schedule(self, name: str, every: int, budget_share: float) -> SamplingSchedule:
        """Return the sampling schedule of a hook; what it learnt of costs outlives a switch.

        `budget_share`: of what sampled metrics may cost.
        """
        budget = self.settings.numbers_budget_ratio * budget_share
        return self._schedules.setdefault(name, SamplingSchedule(every, budget))

    # --- records -----------------------------------------------------------------------------

    def on_recorder(self, action: Callable[[Context], None]) -> None:
        """Run `action` when the recorder is open, at once if it is."""
        self._when_recorder.append(guarded(action))
        if self.recorder is not None:
            self._when_recorder[-1](self)

    def recorder_opened(self, recorder: Recorder) -> None:
        """Record from now on."""
        self.recorder = recorder
        self.clock.recorder = recorder
        recorder.set_training_thread(self.clock.native_id)
        recorder.begin_step(self.clock.step)

    def run_waiting(self) -> None:
        """Run what waits for the recorder."""
        for action in self._when_recorder:
            action(self)

    def describe(self, **facts: Any) -> None:
        """Register this rank again with more facts, for example its pipeline stage."""
        self._description |= facts
        if self.recorder is None:
            return
        who = self.recorder.identity
        self.recorder.record(
            schema.RankRegistered(
                **self.recorder.here(),
                world_size=who.world_size,
                local_rank=who.local_rank,
                local_world_size=who.local_world_size,
                node_rank=who.node_rank,
                host=who.host,
                pid=who.pid,
                role=who.role,
                sources=dict(self.sources),
                **self._description,
            ),
            urgent=True,
        )

    def declare(self, **facts: Any) -> None:
        """Describe this rank as its script does, once however often that says the same."""
        if any(self._description.get(name) != value for name, value in facts.items()):
            self.describe(**facts)

    def event(self, name: str, fields: dict[str, str] | None = None) -> None:
        """Record something that happened once."""
        recorder = self.recorder
        if recorder is not None:
            recorder.record(
                schema.Event(**recorder.here(), name=name, step=recorder.step, fields=fields or {}),
                urgent=True,
            )

    def record_metrics(self, step: int, values: dict[str, float]) -> None:
        """Record metrics of a step as the agent counts steps."""
        if self.recorder is not None and values:
            self.recorder.record(schema.Metrics(**self.recorder.here(), step=step, values=values))

    def record_given(self, step: int, values: dict[str, float]) -> None:
        """Record metrics of a step that the script numbers, beside the agent's own count."""
        recorder = self.recorder
        if recorder is not None:
            counted = recorder.step
            recorder.record(
                schema.Metrics(**recorder.here(), step=step, values=values, counted_step=counted)
            )

    def log_line(self, level: int, message: str, *, urgent: bool = False, **more: Any) -> None:
        """Record a line of a log, without secrets; `more` are fields of `LogLine`."""
        recorder = self.recorder
        if recorder is not None:
            recorder.record(
                schema.LogLine(
                    **{"step": recorder.step} | recorder.here() | more,
                    level=level,
                    message=clean(message),
                ),
                urgent=urgent,
            )

    def error(
        self,
        kind: str,
        message: str,
        traceback: str = "",
        where: Literal["main", "thread", "training", "collective"] = "main",
    ) -> None:
        """Record an exception, also of a launched rank that did not come to its first group."""
        if where == "main" and identity.likely(self._environ) is not None:
            self.first_work()
        if self.recorder is not None:
            self.recorder.record(
                schema.ErrorRaised(
                    **self.recorder.here(),
                    type=kind,
                    message=clean(message),
                    traceback=clean(traceback),
                    where=where,
                    step=self._step_of_now(self.recorder),
                ),
                urgent=True,
            )

    def exception_left(self) -> None:
        """Mark that the script ends by an exception, and in which step."""
        if self.recorder is not None:
            self.recorder.begin_step(self._step_of_now(self.recorder))
            self.recorder.end(ring.EXCEPTION)

    def training_over(self) -> None:
        """Mark that training ended well, whatever ends the process after that."""
        if self.recorder is not None and not self.recorder.has_ended:
            self.settle()
            self.recorder.begin_step(self.clock.last_step)
            self.recorder.end(ring.FINISHED)

    def _step_of_now(self, recorder: Recorder) -> int:
        """Return the step in progress, 0 where nothing was learnt yet: the rank is in none."""
        clock = self.clock
        has_begun = clock.num_backwards or clock.saw_optimizer or clock.step > 1
        return recorder.step if has_begun else 0

    def _step_ended(self, ended: EndedStep) -> None:
        """Collect and write the metrics of the step that just ended."""
        if self.is_off:
            return
        metrics = self.metrics
        for listener in self.events.step_due if metrics.due else self.events.step:
            listener(ended)
        metrics.step_ended(ended)
