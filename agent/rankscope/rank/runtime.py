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
from collections.abc import Callable, Mapping
from pathlib import Path

from rankscope.files import flight_recorder as flight
from rankscope.files import identity, ring, run_directory, run_directory_choice
from rankscope.files.start_collector import ensure_collector
from rankscope.process import environment, family
from rankscope.rank.context import Context, Governed, Hook, HookSkipped
from rankscope.rank.control import Control
from rankscope.rank.governor import Governor
from rankscope.rank.group import GroupMade
from rankscope.rank.guard import guarded, say, to_the_end
from rankscope.rank.hooks import chosen, collectives
from rankscope.rank.hooks.collectives.last_calls import let_threads_through
from rankscope.rank.hooks.logs import level_of
from rankscope.rank.imports import when_imported
from rankscope.rank.patches import UndoScope
from rankscope.rank.recorder import Recorder
from rankscope.settings import Settings, tags_of
from rankscope.wire import schema

_WATCH_COLLECTOR_NS = 5_000_000_000


class Agent:
    """Starts, switches and ends what watches one process; its state is in `context`."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        self.context = Context(settings, environ, self)
        self._governor = Governor(self.context)
        self._control = self._new_control()
        self._scope = UndoScope()  # until the hooks are removed
        self._recording = self._scope.nested()  # until recording is switched off
        self._staying: set[str] = set()  # hooks that stay in while it is off
        self._times_on = 0
        self._environ = environ
        self._gave_up = False
        self._knows_backend = False
        self._knows_steps = False
        self._collector_due_ns = 0
        self._no_collector = ""  # why the last one could not be started

    def _new_control(self) -> Control:
        control = Control(self.context, self)
        self._governor.is_agreed = control.will_thin
        return control

    # --- start -------------------------------------------------------------------------------

    def start(self) -> None:
        """Install the hooks, now or when their modules are imported; open what can be opened."""
        self.install_hooks()
        atexit.register(guarded(self._finish))
        os.register_at_fork(after_in_child=guarded(self._forked))
        group = identity.of_process_group()
        who = identity.from_environment(self._environ)
        if group is not None:  # the agent starts late
            self.world_known(*group)
        elif who is not None and not family.is_inherited(self._environ):
            self.open(who)

    def install_hooks(self) -> None:
        """Install the hooks that the settings name. Raises ValueError for an unknown word."""
        context = self.context
        collectives.check_name(context.settings.collectives)
        flight.check_mode(context.settings.flight_recorder)
        level_of(context.settings.log_level)
        self._times_on += 1
        self._recording = context.scope = self._scope.nested()
        context.source_scope, context.lasting_scope = self._recording.nested(), self._scope
        for hook_class in chosen(context.settings.hooks):
            if hook_class.name in self._staying:
                continue
            hook = hook_class()
            context.sources[hook.name] = f"waits for import of {hook.needs}"
            when_imported(hook.needs, guarded(self._installer(hook)))

    def _installer(self, hook: Hook) -> Callable[[], None]:
        context, times_on = self.context, self._times_on

        def install() -> None:
            if context.is_off or times_on != self._times_on:
                return  # its module was imported while recording was off, or since
            context.sources[hook.name] = "failed"
            with context.within(self._recording.nested()):
                try:
                    context.sources[hook.name] = hook.install(context)
                except HookSkipped as reason:
                    context.sources[hook.name] = f"skipped: {reason}"
                if not context.scope.is_used:
                    self._staying.add(hook.name)

        install.__qualname__ = f"install of hook {hook.name}"
        return install

    @guarded
    def open(self, who: identity.RankIdentity) -> None:
        """Open the recorder for this rank. A full disk costs the record, never the run."""
        context = self.context
        if context.recorder is not None or self._gave_up:
            return
        try:
            directory_choice = run_directory_choice.choose(self._environ)
            run = run_directory.run_directory(directory_choice.base, who.run_id)
            directory = run_directory.rank_directory(
                run, who.attempt, who.rank, who.pid, ring.is_of_another
            )
            recorder = Recorder(directory, who, context.settings)
        except OSError as error:
            self._gave_up = True
            os.environ[family.ATTACHED] = str(who.pid)
            say(
                f"rank {who.rank} records nothing: {error}. Set RANKSCOPE_DIR to a "
                "directory on a disk with free space; training continues"
            )
            return
        os.environ[family.ATTACHED] = str(who.pid)
        recorder.on_group = self._group_defined
        context.recorder_opened(recorder)
        self._register_run(recorder)
        if directory_choice.note and who.local_rank == 0:
            say(directory_choice.note)
            context.event("other directory", {"reason": directory_choice.note})
        context.run_waiting()
        self._watch_collector(run)
        if family.is_child():  # these may leave without `atexit`
            finalize = sys.modules["multiprocessing.util"].Finalize
            finalize(None, to_the_end, args=(self.settle,), exitpriority=0)

    def _register_run(self, recorder: Recorder) -> None:
        """Record that this rank is there; the first one of a node records the run too."""
        self.context.describe()
        who, command = recorder.identity, environment.own_command()
        if who.local_rank == 0:
            recorder.record(
                schema.RunStarted(
                    **recorder.here(),
                    name=self.context.settings.name or environment.title(command),
                    command=environment.command(command),
                    launcher=family.launcher(self._environ),
                    world_size=who.world_size,
                    tags=family.job_tags(self._environ) | tags_of(self.context.settings),
                )
            )

    # --- recording off and on ----------------------------------------------------------------

    def remove_hooks(self) -> None:
        """Take every hook out again, last one first; what was recorded stays."""
        self._scope.close()
        self._staying.clear()
        self.context.sources = dict.fromkeys(self.context.sources, "removed")

    def switch_off(self) -> None:
        """Record only where the rank is. Between two steps, in the main thread."""
        context = self.context
        context.is_off = True
        self._recording.close()
        context.clock.recorder = None
        for name in context.sources.keys() - self._staying:
            context.sources[name] = "switched off"
        context.describe()
        context.event("agent switched off")

    def switch_on(self, *, is_alone: bool) -> None:
        """Record again. `is_alone`: other collectives were left out here than in the peers."""
        context = self.context
        context.is_off = False
        if context.recorder is not None:
            if is_alone:
                context.recorder.forget_groups()
            context.clock.resume(context.recorder)
        self.install_hooks()
        context.describe()
        context.event("agent switched on")

    # --- what hooks ask for ------------------------------------------------------------------

    @guarded
    def world_known(self, rank: int, world_size: int) -> None:
        """Open the recorder for a rank that only init_process_group could name."""
        if self.context.recorder is None:
            self.open(identity.build(self._environ, rank, world_size))

    def first_work(self) -> None:
        """Open the recorder of a script that trains alone, at its first optimizer step."""
        if (
            self.context.recorder is None
            and not self._gave_up
            and not family.is_inherited(self._environ)
        ):
            self.open(identity.likely(self._environ) or identity.build(self._environ, 0, 1))

    def step_boundary(self) -> None:
        """Do what may be done once a step: describe the machine, look after the collector."""
        context = self.context
        recorder = context.recorder
        if recorder is None:
            return
        if not self._knows_steps:  # the first has ended: seeded, on its device, data chosen
            self._knows_steps = True
            self._snapshot(recorder)
        now_ns = time.monotonic_ns()
        if now_ns > self._collector_due_ns:
            self._watch_collector(recorder.directory.parents[1])
        self._governor.at_boundary(now_ns)
        if context.settings.commands:
            self._control.at_boundary(now_ns)
        if context.outside is not None:
            context.outside.at_boundary()

    @guarded
    def settle(self) -> None:
        """Wait until threads of the process groups have reported the last ends, 1 s at most."""
        if self.context.recorder is not None:
            for action in self.context.before_exit:
                action()
        if self.context.has_group:
            let_threads_through()

    def govern(self, source: Governed) -> None:
        """Keep what this source of collectives costs below the budget."""
        self._governor.govern(source)

    def thin(self, level: int) -> None:
        """Put a level of thinning in force that all ranks have agreed on."""
        self._governor.take(level, is_alone=False)

    def thin_for_server(self, level: int, why: str) -> None:
        """Put the level in force that a server needs, `why` being its words; 0 takes it back."""
        self._governor.take_for_server(level, why)

    # --- inside ------------------------------------------------------------------------------

    def _group_defined(self, made: GroupMade) -> None:
        """Register again when the first group shows the backend, and describe the machine."""
        for listener in self.context.events.group:
            listener(made)
        if not self._knows_backend:
            self._knows_backend = True
            self.context.describe(backend=made.backend)
            if self.context.recorder is not None:
                self._snapshot(self.context.recorder)

    def _snapshot(self, recorder: Recorder) -> None:
        facts = environment.snapshot(self._environ)
        if self._knows_steps:
            facts |= environment.settled_facts() | self.context.data_facts
        recorder.record(schema.Environment(**recorder.here(), facts=facts), urgent=True)

    def _watch_collector(self, run: Path) -> None:
        """See that a collector runs: the first rank of a node starts it, and again if it died."""
        self._collector_due_ns = time.monotonic_ns() + _WATCH_COLLECTOR_NS
        if not self.context.settings.collector:
            return
        try:
            ensure_collector(run, self._environ)
        except OSError as error:  # no room, no process or descriptor left: it is tried again
            if str(error) != self._no_collector:
                self._no_collector = str(error)
                self.context.event("no collector", {"reason": self._no_collector})

    def _forked(self) -> None:
        context = self.context
        context.clock.begin_anew()  # also its counts of CPU and faults begin at 0
        if context.recorder is not None:
            context.recorder.disown()
            context.recorder = None  # a group of its own makes it a rank
            self._control = self._new_control()  # a profile is the parent's to end
        context.has_group = False

    def _finish(self) -> None:
        to_the_end(self._end_record, self.settle, lambda: self._control.close())

    def _end_record(self) -> None:
        recorder = self.context.recorder
        if recorder is not None:
            if not recorder.has_ended:  # an exception left the step that it came from
                recorder.begin_step(self.context.clock.last_step)
            recorder.end(ring.CLEAN)
