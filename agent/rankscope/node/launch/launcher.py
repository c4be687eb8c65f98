"""From the command line to the exit code: start, watch, pass on, end, say where to look."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rankscope.address import AddressError, read_address
from rankscope.files import identity, run_directory, run_directory_choice
from rankscope.files.start_collector import ATTACH_SITE
from rankscope.http import HttpError, get
from rankscope.node.launch import naming
from rankscope.node.launch.output import OutputRecords
from rankscope.node.launch.status import Progress, StatusLine
from rankscope.node.launch.supervisor import Left, Supervisor
from rankscope.node.launch.tee import STDOUT, Tee
from rankscope.node.launch.tracking import Tracking, trackers_of
from rankscope.node.launch.verdicts import Conclusion, Verdicts, of_files
from rankscope.node.processes import exits
from rankscope.node.ranks import launchers
from rankscope.output.lines import Stream
from rankscope.process import environment
from rankscope.process.family import job_tags, process_start_ticks
from rankscope.settings import Settings, tags_of, to_environment
from rankscope.wire import schema

DRAIN_SECONDS = 10.0
_CONCLUDE_SECONDS = 8.0
_READ_SECONDS = 60.0  # of the files of a run without a server; 3 s for what 8 ranks left
_HEALTH_SECONDS = 3.0
_TRACK_SECONDS = 30.0
_TERMINATE_SECONDS = 6.0
NOT_FOUND, NOT_EXECUTABLE = 127, 126
_INTERRUPTS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
# what ends a process that does not handle it, for example of Slurm's --signal; without those that
# report a fault of the process itself
_PASSED_ON = (
    *_INTERRUPTS, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU,
    signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO, signal.SIGPWR, signal.SIGSTKFLT,
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)  # fmt: skip
Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """How a launched command ended and where its record is."""

    run_id: str
    exit_code: int
    directory: Path
    url: str  # empty without a server
    left: Left | None  # what did not reach the server
    conclusion: Conclusion | None = None  # of the server, where it answered, or of the files


class Launcher:
    """One launched command. `say` gets lines for people, without the program's name.

    What the command writes to its stdout is sent to our descriptor `stdout`.
    """

    def __init__(
        self,
        command: list[str],
        settings: Settings,
        environ: Mapping[str, str],
        say: Say,
        stdout: int = STDOUT,
    ) -> None:
        self._stdout = stdout
        shared = naming.shared_run_id(command, environ, settings.run_id)
        self.run_id = shared or naming.new_run_id()
        self._is_split = not shared and naming.spans_nodes(command)
        self._command = command
        self._settings = settings
        self._say_below = say
        self._status: StatusLine | None = None
        self._environ = _child_environment(environ, settings, self.run_id)
        self._no_directory: run_directory_choice.NoDirectoryError | None = None
        try:
            chosen = run_directory_choice.choose(self._environ)
            self._environ["RANKSCOPE_DIR"] = str(chosen.base)
        except run_directory_choice.NoDirectoryError as error:
            chosen, self._no_directory = run_directory_choice.DirectoryChoice(Path("/")), error
        self._directory_note = chosen.note
        self.directory = run_directory.run_directory(chosen.base, self.run_id)
        self._node = run_directory.node_directory(self.directory)
        self._own = launchers.own_directory(self.directory)
        self._supervisor = Supervisor(self.directory, self._environ, self._say)
        # under srun and the like each task may have a launcher: its lines are that rank's
        # (a launcher's number there is its node's)
        is_rank = naming.launcher_kind(command) == "python"
        who = identity.likely(environ) if is_rank else None
        self._own_rank = schema.NODE_RANK if who is None else who.rank
        self._process: subprocess.Popen[bytes] | None = None
        self._interrupted = False

    def run(self) -> Outcome:
        """Run the command to its end, watched if at all possible."""
        try:
            self._prepare()
            records = OutputRecords(self.directory, self._own, self._own_rank)
        except OSError as error:
            self._say(
                f"not watched: {error}; the command still runs. Set --dir DIR to a disk with "
                "free space"
            )
            return Outcome(self.run_id, self._run_command(None), self.directory, "", None)
        self._warn_early()
        records.write(self._run_started())
        if self._settings.collector:
            self._supervisor.start()
        roles = tuple({"default", naming.option(self._command, "--role") or "default"})

        def not_indexed(stream: Stream, error: Exception) -> None:
            why = f"{type(error).__name__}: {error}"
            records.not_indexed(stream, why)
            with contextlib.suppress(OSError):  # the reader of our stderr is gone
                self._say(f"{stream} is passed on, its lines are no longer recorded ({why})")

        tee = Tee(lambda stream: records.indexer(stream, roles), not_indexed, self._stdout)
        self._status = tee.status
        verdicts = Verdicts(self._settings.server, self._settings.token, self.run_id, self._say)
        if self._settings.server:
            verdicts.start()
        tracking = self._tracking()
        try:
            with self._progress(verdicts):
                code = self._run_command(tee)
            records.write(_command_ended(code))
        finally:
            records.close()
            with contextlib.suppress(OSError):
                (self._own / launchers.FINISHED).touch()
            verdicts.stop()
        left = self._drain() if self._settings.collector else None
        conclusion = self._concluded(verdicts) if left is None or self._interrupted else None
        if tracking is not None and not self._interrupted:
            with contextlib.suppress(KeyboardInterrupt):
                tracking.finish(_TRACK_SECONDS, self._say)
        return Outcome(self.run_id, code, self.directory, self._url, left, conclusion)

    def _tracking(self) -> Tracking | None:
        """Begin to write the run into trackers; None where none is asked for, or another does."""
        names = trackers_of(self._settings)
        if not names or self._own_rank > 0:
            return None
        tracking = Tracking(names, self.run_id, self._own, self._environ)
        try:
            tracking.start()
        except OSError as error:
            self._say(f"not written to {', '.join(names)}: {error}")
        return tracking

    def _say(self, text: str) -> None:
        if self._status is None:
            self._say_below(text)
        else:
            self._status.above(self._say_below, text)

    @contextlib.contextmanager
    def _progress(self, verdicts: Verdicts) -> Iterator[None]:
        """Keep the status line for as long as the command runs."""
        if self._status is None:
            yield
            return
        progress = Progress(self._status, self.directory, verdicts)
        progress.start()
        try:
            yield
        finally:
            progress.stop()

    @property
    def _url(self) -> str:
        """Address of the run's page, empty without a server."""
        server = self._settings.server
        return f"{read_address(server).url}/runs/{self.run_id}" if server else ""

    def _concluded(self, verdicts: Verdicts) -> Conclusion | None:
        """Return the verdict of a run whose records all arrived; Ctrl-C waits for none."""
        if self._interrupted:
            return verdicts.seen
        try:
            if self._settings.server:
                return verdicts.last(_CONCLUDE_SECONDS)
            is_one_of_many = self._own_rank > 0  # each task of the node has a launcher: one says it
            if is_one_of_many or not run_directory.rank_directories(self.directory):
                return None
            return of_files(self.directory, _READ_SECONDS)
        except KeyboardInterrupt:
            return None

    def _drain(self) -> Left | None:
        """Wait for the collector; a user who interrupted us does not want to leave one behind."""
        left: Left | None = self._supervisor.left()
        try:
            left = self._supervisor.drain(DRAIN_SECONDS)
        except KeyboardInterrupt:
            self._interrupted = True
        if left is not None and self._interrupted:
            self._supervisor.terminate(_TERMINATE_SECONDS)
            left = self._supervisor.left()
        return left

    # --- before --------------------------------------------------------------------------

    def _warn_early(self) -> None:
        if self._directory_note:
            self._say(self._directory_note)
        if not self._settings.server:
            self._say(
                f"no server is set: this run is recorded to {self.directory}, the verdict comes at "
                "its end. To watch it start `rankscope serve` and pass --server http://HOST:PORT"
            )
        else:
            self._say(f"dashboard: {self._url}")
            # beside the start of the command: a server that is away must not delay it
            threading.Thread(target=self._check_server, daemon=True).start()
        if self._is_split:
            self._say(
                "the command spans nodes without a shared run id: pass the same --run-id on "
                "each node, or the server shows a separate run for each"
            )

    def _check_server(self) -> None:
        path = "/api/v1/health"
        try:
            answer = get(self._settings.server, path, timeout_seconds=_HEALTH_SECONDS)
            if answer.status == 200:
                return
            why = f"it answers {answer.status} to {read_address(self._settings.server).url}{path}"
        except (HttpError, AddressError) as error:
            why = str(error)
        self._say(
            f"the server {self._settings.server} does not answer ({why}); the command starts "
            f"anyway, up to {self._settings.spool_bytes >> 20} MiB wait in {self._node / 'spool'}"
        )

    def _prepare(self) -> None:
        if self._no_directory is not None:
            raise self._no_directory
        run_directory.make_private(self._node)
        run_directory.make_private(self._own)
        (self._own / launchers.FINISHED).unlink(missing_ok=True)

    def _run_started(self) -> schema.RunStarted:
        return schema.RunStarted(
            attempt=0,
            rank=schema.NODE_RANK,
            time_ns=time.time_ns(),
            name=self._settings.name or naming.title(self._command),
            command=environment.command(self._command),
            launcher=naming.launcher_kind(self._command),
            tags=job_tags(self._environ) | tags_of(self._settings),
        )

    # --- the command ---------------------------------------------------------------------

    def _run_command(self, tee: Tee | None) -> int:
        with self._signals(tee):
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdout=tee.child_stdout if tee else self._stdout,
                    stderr=tee.child_stderr if tee else None,
                    env=self._environ | naming.tee_variables(self._command, self._environ)
                    if tee
                    else self._environ,
                )
            except OSError as error:
                if tee is not None:
                    tee.close_unused()
                self._say(f"cannot start {self._command[0]!r}: {error.strerror}")
                return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            if tee is not None:
                tee.start()
            code = self._wait(self._process)
            if tee is not None:
                tee.finish()
        return code if code >= 0 else 128 - code

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the command; its exit is written down before it is reaped."""
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        ticks = process_start_ticks(process.pid)
        code = process.wait()
        with contextlib.suppress(OSError):
            status = exits.from_code(code, "the launcher, its parent")
            exits.append(self._node / exits.EXITS_FILE, process.pid, status, ticks)
        return code

    @contextlib.contextmanager
    def _signals(self, tee: Tee | None) -> Iterator[None]:
        """Pass signals on to the command for as long as it runs, but for those that are ignored.

        The command ignores what we were started to ignore, as under nohup.
        """

        def pass_on(number: int, frame: object) -> None:
            self._interrupted |= number in (*_INTERRUPTS, signal.SIGTERM)
            # a key at the terminal reaches the whole foreground group, the command included
            if self._process is not None and not (number in _INTERRUPTS and _in_foreground()):
                self._process.send_signal(number)

        before = {
            number: signal.signal(number, pass_on)
            for number in _PASSED_ON
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        if tee is not None:
            resize = tee.resize
            before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda number, frame: resize())
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _command_ended(code: int) -> schema.Event:
    return schema.Event(
        attempt=0,
        rank=schema.NODE_RANK,
        time_ns=time.time_ns(),
        name=schema.COMMAND_ENDED,
        fields={"exit_code": str(code)},
    )


def _child_environment(
    environ: Mapping[str, str], settings: Settings, run_id: str
) -> dict[str, str]:
    """Return the environment of the command: the agent on, its settings, its entry point first."""
    site = str(ATTACH_SITE)
    others = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path != site]
    variables = {
        **environ,
        **to_environment(settings),
        "RANKSCOPE": "1",
        "RANKSCOPE_RUN_ID": run_id,
    }
    variables.pop("RANKSCOPE_ATTACHED", None)  # of an agent in this process: the ranks are others
    variables["PYTHONPATH"] = os.pathsep.join([site, *(path for path in others if path)])
    return variables


def _in_foreground() -> bool:
    """Return whether we are in the foreground group of a terminal."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
