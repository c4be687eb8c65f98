"""The agent of one training process: installs hooks, opens the recorder when the rank is known.

Under a launcher that sets RANK the recorder opens at start. Without it (a plain script, ranks
made by `torch.multiprocessing`) it opens at the first process group or the first optimizer step,
so that launchers, data-loader workers and tools that merely import torch record nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rankscope.files import (
    flight_recorder as flight,
)
from rankscope.files import (
    identity,
    ring,
    run_directory,
    run_directory_choice,
)
from rankscope.process import environment, family
from rankscope.rank import inherited
from rankscope.rank.attach.imports import when_imported
from rankscope.rank.attach.start import ATTACHED
from rankscope.rank.control import Control
from rankscope.rank.events import GroupMade, Moments
from rankscope.rank.governor import Governor
from rankscope.rank.guard import guarded, to_the_end
from rankscope.rank.hooks import chosen, collectives
from rankscope.rank.hooks.base import Hook, HookSkipped
from rankscope.rank.hooks.collectives.last_calls import let_threads_through
from rankscope.rank.optimizer_cycle import OptimizerCycle
from rankscope.rank.origins import leave_out_of_warnings
from rankscope.rank.recorder import Recorder
from rankscope.rank.sampling_schedule import Grid
from rankscope.rank.step_metrics import Sheet
from rankscope.rank.steps import EndedStep, StepClock
from rankscope.settings import Settings
from rankscope.wire import schema
from rankscope.wire.redaction import clean

if TYPE_CHECKING:
    from rankscope.rank.hooks.collectives.outside import Outside

_WATCH_COLLECTOR_NS = 5_000_000_000


class Agent:
    """Everything of one process: settings, step clock, hooks, and the recorder once it is open."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        self.settings = settings
        self.clock = StepClock()
        self.clock.on_end = self.step_ended
        self.moments = Moments()
        self.cycle = OptimizerCycle(self.clock)
        self.sheet = Sheet(self)
        self.replicated: weakref.WeakSet[Any] = weakref.WeakSet()  # models under DDP
        self.recorder: Recorder | None = None
        self.sources: dict[str, str] = {}
        self.engine_code: Any = None  # code object of the autograd engine's entry
        self.undo: list[Callable[[], Any]] = []  # what takes the hooks out again
        self.grids: dict[str, Grid] = {}  # of sampled numbers, by hook: they outlive a switch
        self.has_group = False  # a process group was made here
        self.before_exit: list[Callable[[], Any]] = []
        self.undo_collectives: list[Callable[[], Any]] = []  # of their source alone
        # the same of what sees step boundaries: it stays in while recording is switched off
        self.undo_boundary: list[Callable[[], Any]] = []
        self.is_off = False
        self.control = Control(self)
        self.governor = Governor(self)
        self.outside: Outside | None = None  # of a source that leaves out thinned steps
        self._staying: set[str] = set()  # hooks that stay in while it is off
        self._times_on = 0
        self._kept_patches: set[tuple[Any, str]] = set()  # the script has wrapped these
        self._environ = environ
        self._description: dict[str, Any] = {}
        self._when_recorder: list[Callable[[Agent], None]] = []
        self._gave_up = False
        self._knows_backend = False
        self._knows_steps = False
        self.data_facts: dict[str, str] = {}  # of the first loader that gave a batch
        self._collector_due_ns = 0

    # --- start -------------------------------------------------------------------------------

    def start(self) -> None:
        """Install the hooks, now or when their modules are imported; open what can be opened."""
        self.install_hooks()
        atexit.register(guarded(self._finish))
        os.register_at_fork(after_in_child=guarded(self._forked))
        group = identity.of_process_group()
        who = identity.from_environment(self._environ)
        if group is not None:  # we come late
            self.world_known(*group)
        elif who is not None and not inherited.is_inherited(self._environ):
            self.open(who)

    def install_hooks(self) -> None:
        """Install the hooks that the settings name. Raises ValueError for an unknown name."""
        collectives.check_name(self.settings.collectives)
        flight.check_mode(self.settings.flight_recorder)
        self._times_on += 1
        for hook_class in chosen(self.settings.hooks):
            if hook_class.name in self._staying:
                continue
            hook = hook_class()
            self.sources[hook.name] = f"waits for import of {hook.needs}"
            when_imported(hook.needs, guarded(self._installer(hook)))

    def _installer(self, hook: Hook) -> Callable[[], None]:
        times_on = self._times_on

        def install() -> None:
            if self.is_off or times_on != self._times_on:
                return  # its module was imported while recording was off, or since
            num_undo, num_boundary = len(self.undo), len(self.undo_boundary)
            self.sources[hook.name] = "failed"
            try:
                self.sources[hook.name] = hook.install(self)
            except HookSkipped as reason:
                self.sources[hook.name] = f"skipped: {reason}"
            if len(self.undo_boundary) > num_boundary:
                self.undo_boundary += self.undo[num_undo:]
                del self.undo[num_undo:]
            if len(self.undo) == num_undo:
                self._staying.add(hook.name)

        install.__qualname__ = f"install of hook {hook.name}"
        return install

    def open(self, who: identity.RankIdentity) -> None:
        """Open the recorder for this rank. A full disk costs the record, never the run."""
        if self.recorder is not None or self._gave_up:
            return
        try:
            chosen = run_directory_choice.choose(self._environ)
            run = run_directory.run_directory(chosen.base, who.run_id)
            directory = run_directory.rank_directory(
                run, who.attempt, who.rank, who.pid, ring.is_of_another
            )
            recorder = Recorder(directory, who, self.settings)
        except OSError as error:
            self._gave_up = True
            os.environ[ATTACHED] = str(who.pid)
            sys.stderr.write(
                f"rankscope: rank {who.rank} records nothing: {error}. Set RANKSCOPE_DIR to a "
                "directory on a disk with room; training goes on\n"
            )
            return
        os.environ[ATTACHED] = str(who.pid)
        self.recorder = recorder
        self.clock.recorder = recorder
        recorder.set_training_thread(self.clock.native_id)
        recorder.on_group = self.group_defined
        recorder.begin_step(self.clock.step)
        self._register()
        if chosen.note and who.local_rank == 0:
            sys.stderr.write(f"rankscope: {chosen.note}\n")
            fields = {"reason": chosen.note}
            recorder.record(schema.Event(**self.here(), name="other directory", fields=fields))
        for action in self._when_recorder:
            action(self)
        self._watch_collector(run)
        if family.is_child():  # these may leave without `atexit`
            finalize = sys.modules["multiprocessing.util"].Finalize
            finalize(None, to_the_end, args=(self.settle,), exitpriority=0)

    def patch(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace an attribute of a class or module until `remove_hooks`.

        What the script has put over it meanwhile stays, and ours inside it.
        """
        if (owner, name) in self._kept_patches:
            return
        original = owner.__dict__[name] if name in owner.__dict__ else getattr(owner, name)

        def restore() -> None:
            if owner.__dict__.get(name) is replacement:
                setattr(owner, name, original)
            else:
                self._kept_patches.add((owner, name))

        leave_out_of_warnings(replacement)
        setattr(owner, name, replacement)
        self.undo.append(restore)

    def remove_hooks(self) -> None:
        """Take every hook out again, last one first; what was recorded stays."""
        for undo in (self.undo, self.undo_collectives, self.undo_boundary):
            while undo:
                undo.pop()()
        self._staying.clear()
        self.sources = dict.fromkeys(self.sources, "removed")

    def switch_off(self) -> None:
        """Record nothing any more, but where the rank is. Between two steps, in the main thread."""
        self.is_off = True
        for undo in (self.undo, self.undo_collectives):
            while undo:
                guarded(undo.pop())()  # one that fails must not leave the others in
        self.clock.recorder = None
        for name in self.sources:
            if name not in self._staying:
                self.sources[name] = "switched off"
        self._tell_switch("agent switched off")

    def switch_on(self, *, is_alone: bool) -> None:
        """Record again. `is_alone`: other collectives were left out here than in the peers."""
        self.is_off = False
        if self.recorder is not None:
            if is_alone:
                self.recorder.forget_groups()
            self.clock.resume(self.recorder)
        self.install_hooks()
        self._tell_switch("agent switched on")

    def _tell_switch(self, name: str) -> None:
        if self.recorder is not None:
            self._register()
            self.recorder.record(
                schema.Event(**self.here(), name=name, step=self.clock.step), urgent=True
            )

    def on_recorder(self, action: Callable[[Agent], None]) -> None:
        """Run `action` when the recorder is open, at once if it is."""
        self._when_recorder.append(guarded(action))
        if self.recorder is not None:
            self._when_recorder[-1](self)

    # --- what hooks tell ---------------------------------------------------------------------

    @guarded
    def world_known(self, rank: int, world_size: int) -> None:
        """Open the recorder for a rank that only init_process_group could tell."""
        if self.recorder is None:
            self.open(identity.build(self._environ, rank, world_size))

    def group_defined(self, made: GroupMade) -> None:
        """Register again when the first group shows the backend, and describe the machine."""
        for listener in self.moments.group:
            listener(made)
        if not self._knows_backend:
            self._knows_backend = True
            self.describe(backend=made.backend)
            self._snapshot()

    def first_work(self) -> None:
        """Open the recorder of a script that trains alone, at its first optimizer step."""
        if (
            self.recorder is None
            and not self._gave_up
            and not inherited.is_inherited(self._environ)
        ):
            self.open(identity.likely(self._environ) or identity.build(self._environ, 0, 1))

    def step_ended(self, ended: EndedStep) -> None:
        """Collect and write the numbers of the step that just ended."""
        if self.is_off:
            return
        for listener in self.moments.step_due if self.sheet.due else self.moments.step:
            listener(ended)
        self.sheet.step_ended(ended)

    def step_boundary(self) -> None:
        """Do what may be done once a step: describe the machine, look after the collector."""
        if self.recorder is None:
            return
        if not self._knows_steps:  # the first has ended: seeded, on its device, data chosen
            self._knows_steps = True
            self._snapshot()
        now_ns = time.monotonic_ns()
        if now_ns > self._collector_due_ns:
            self._watch_collector(self.recorder.directory.parents[1])
        self.governor.at_boundary(now_ns)
        if self.settings.commands:
            self.control.at_boundary(now_ns)
        if self.outside is not None:
            self.outside.at_boundary()

    def describe(self, **facts: Any) -> None:
        """Register this rank again with more facts, for example its pipeline stage."""
        self._description |= facts
        if self.recorder is not None:
            self._register()

    def here(self) -> dict[str, Any]:
        """Return attempt, rank and time, as every record carries them."""
        assert self.recorder is not None
        who = self.recorder.identity
        return {"attempt": who.attempt, "rank": who.rank, "time_ns": time.time_ns()}

    def event(self, name: str, fields: dict[str, str]) -> None:
        """Record something that happened once."""
        if self.recorder is not None:
            step = self.recorder.step
            self.recorder.record(
                schema.Event(**self.here(), name=name, step=step, fields=fields), urgent=True
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
                    **self.here(),
                    type=kind,
                    message=clean(message),
                    traceback=clean(traceback),
                    where=where,
                    step=self._step_of_now(),
                ),
                urgent=True,
            )

    def _step_of_now(self) -> int:
        """Return the step in progress, 0 where nothing was learnt yet: the rank is in none."""
        assert self.recorder is not None
        clock = self.clock
        has_begun = clock.num_backwards or clock.saw_optimizer or clock.step > 1
        return self.recorder.step if has_begun else 0

    def exception_left(self) -> None:
        """Mark that the script ends by an exception, and in which step."""
        if self.recorder is not None:
            self.recorder.begin_step(self._step_of_now())
            self.recorder.end(ring.EXCEPTION)

    # --- inside ------------------------------------------------------------------------------

    def _register(self) -> None:
        assert self.recorder is not None
        who = self.recorder.identity
        self.recorder.record(
            schema.RankRegistered(
                **self.here(),
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
        if who.local_rank == 0 and not self._description:
            self.recorder.record(
                schema.RunStarted(
                    **self.here(),
                    name=self.settings.name or environment.title(environment.own_command()),
                    command=environment.command(environment.own_command()),
                    launcher=family.launcher(self._environ),
                    world_size=who.world_size,
                )
            )

    def _snapshot(self) -> None:
        assert self.recorder is not None
        facts = environment.snapshot(self._environ)
        if self._knows_steps:
            facts |= environment.settled_facts() | self.data_facts
        self.recorder.record(schema.Environment(**self.here(), facts=facts), urgent=True)

    def _watch_collector(self, run: Path) -> None:
        """See that a collector runs: whoever comes first starts it, and again should it die."""
        self._collector_due_ns = time.monotonic_ns() + _WATCH_COLLECTOR_NS
        if self.settings.collector:
            from rankscope.files.start_collector import ensure_collector

            ensure_collector(run, self._environ)

    def _forked(self) -> None:
        self.clock.begin_anew()  # also its counts of CPU and faults begin at 0
        if self.recorder is not None:
            self.recorder.disown()
            self.recorder = None  # a group of its own makes it a rank
            self.control = Control(self)  # a profile is the parent's to end
        self.has_group = False

    def _finish(self) -> None:
        to_the_end(self._end_record, self.settle, self.control.close)

    def _end_record(self) -> None:
        if self.recorder is not None:
            if not self.recorder.has_ended:  # an exception left the step that it came from
                self.recorder.begin_step(self.clock.last_step)
            self.recorder.end(ring.CLEAN)

    @guarded
    def settle(self) -> None:
        """Wait until threads of the process groups have told the last ends, a second at most."""
        if self.recorder is not None:
            for action in self.before_exit:
                action()
        if self.has_group:
            let_threads_through()
