"""`rankscope track`: write a run's verdict and step numbers into the trackers that people use."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from urllib.parse import quote

from rankscope.address import AddressError
from rankscope.cli import EXIT_INTERRUPTED, EXIT_USAGE
from rankscope.cli.storage import StorageClient, StorageFailed, client_of
from rankscope.settings import SettingError, from_environment
from rankscope.terminal import shown
from rankscope.trackers import (
    PREFIX,
    Conclusion,
    StepNumbers,
    Target,
    Tracker,
    TrackerError,
    load,
)
from rankscope.wire.trackers import TITLES

EXIT_REFUSED, EXIT_UNREACHABLE = 1, 2
DEFAULT_SERVER = "http://127.0.0.1:8787"
_OVER = ("ended", "failed")
_NUMBERS = ("step_ms", "waiting_ratio", "slowest_rank", "slowest_ratio")
_LATE_STEPS = 20  # behind the newest, a step is written without the ranks that have not sent it
_FIRST_STEPS = 5  # a script that logs elsewhere has begun to by then
_ALL_STEPS = 10_000  # up to here each step is written, up to twice as many each second one, ...
_DOWN_SECONDS = 60.0  # a server that answers nothing for so long is gone


class TrackCommand:
    """Write a run's verdict and numbers of its steps into a tracker, with a link to its page.

    Of each step: how long it took, which share of the ranks' time was waiting for others, the
    slowest rank and how much slower than its peers it worked; and of the run the verdict with the
    share of the throughput that it costs. They go beside what the script logs: into its own run of
    MLflow, into a run of their own in the same project or folder of the others. Where that is,
    the ranks have said; --store, --project and --into name another place.

    Examples:
      rankscope track my-run --to mlflow
      rankscope track my-run --to tensorboard --store runs/my-run
      rankscope track my-run --to wandb --to mlflow --follow      a live run, to its end
      rankscope run --track mlflow -- torchrun train.py           the same, from its begin

    Exit codes: 0 written; 1 a tracker is not installed or refused; 2 the server cannot be reached
    or does not know the run; 64 wrong usage; 130 Ctrl-C.
    A token for the server is taken from RANKSCOPE_TOKEN only; trackers read their own variables.
    """

    name: ClassVar[str] = "track"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("run", metavar="RUN", help="id of the run")
        parser.add_argument(
            "--to", action="append", choices=TITLES, required=True, help="which tracker; several"
        )
        parser.add_argument(
            "--store", default="", metavar="URL|DIR", help="the tracker's server or folder"
        )
        parser.add_argument("--project", default="", help="project or experiment of the tracker")
        parser.add_argument("--into", default="", metavar="ID", help="the tracker's run")
        parser.add_argument("--follow", action="store_true", help="write until the run is over")
        parser.add_argument(
            "--only-on-host-of-rank-0", action="store_true", help="on other hosts write nothing"
        )
        parser.add_argument(
            "--server", default="", metavar="URL",
            help=f"default $RANKSCOPE_SERVER, else {DEFAULT_SERVER}",
        )  # fmt: skip
        parser.add_argument("--json", action="store_true", help="print one JSON object at the end")

    def run(self, arguments: argparse.Namespace) -> int:
        """Write what is known, or until the run is over. Returns the exit code."""
        if len(arguments.to) > 1 and (arguments.store or arguments.into or arguments.project):
            return _refuse("--store, --project and --into are of one tracker", EXIT_USAGE)
        try:
            settings = from_environment(os.environ)
            url = arguments.server or settings.server or DEFAULT_SERVER
            client = client_of(url, settings.token)
        except (SettingError, AddressError) as error:
            return _refuse(str(error), EXIT_USAGE)
        with contextlib.closing(client):
            source = RunSource(StorageClient(client), arguments.run)
            writing = _Writing(source, arguments, client.address.url)
            try:
                writing.write()
            except StorageFailed as error:
                return _refuse(str(error), EXIT_UNREACHABLE)
            except KeyboardInterrupt:
                return EXIT_INTERRUPTED
            finally:
                writing.close()
        if arguments.json:
            print(json.dumps({"run": arguments.run, "written": writing.written}))
        return EXIT_REFUSED if writing.has_failed else 0


class RunSource:
    """What a server says of a run, step by step."""

    def __init__(
        self, client: StorageClient, run: str, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._client, self._sleep = client, sleep
        self._path = f"/runs/{quote(run, safe='')}"
        self._next_step = 1

    def looks(self, *, follow: bool, every_seconds: float = 5.0) -> Iterator[dict[str, Any]]:
        """Yield the overview, again and again until the run is over. Raises StorageFailed.

        A run that is not there yet and a server that starts again are waited for.
        """
        silent_since: float | None = None
        while True:
            try:
                page = self._client.ask("GET", self._path)
                silent_since = None
            except StorageFailed as error:
                silent_since = silent_since or time.monotonic()
                is_gone = time.monotonic() - silent_since > _DOWN_SECONDS
                if not follow or is_gone or error.status not in (0, 404):
                    raise
            else:
                yield page
                if not follow or is_over(page):
                    return
            self._sleep(every_seconds)

    def new_steps(self, *, is_over: bool) -> Iterator[list[StepNumbers]]:
        """Yield the steps that are whole and were not yielded yet. Raises StorageFailed."""
        while True:
            part = self._client.ask("GET", f"{self._path}/steps?from={self._next_step}")
            found = []
            for row in part["steps"]:
                is_whole = row["num_ranks"] >= part["num_expected"]
                if not (is_over or is_whole or row["step"] <= part["last_step"] - _LATE_STEPS):
                    break
                self._next_step = row["step"] + 1
                if is_written(row["step"]):
                    found.append(numbers_of(row))
            else:
                self._next_step = part["next_step"] or self._next_step
                if part["next_step"] is not None:
                    yield found
                    continue
            yield found
            return

    def host_of_rank_0(self) -> str:
        """Return where rank 0 is, empty while that is not known. Raises StorageFailed."""
        ranks = self._client.ask("GET", f"{self._path}/ranks")["ranks"]
        return next((str(row["host"]) for row in ranks if row["rank"] == 0), "")


def is_written(step: int) -> bool:
    """Return whether a step is among those that are written: of very many one in 2, 4, 8, ..."""
    return step % (1 << max((step - 1) // _ALL_STEPS, 0).bit_length()) == 0


def is_over(page: dict[str, Any]) -> bool:
    """Return whether nothing more is to come."""
    return page["run"]["status"] in _OVER


def trackers_of(page: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of trackers that the ranks log to; a server from before knows of none."""
    found: list[dict[str, Any]] = page.get("trackers", [])
    return found


def numbers_of(row: dict[str, Any]) -> StepNumbers:
    """Return the numbers of a step that are known."""
    values = {f"{PREFIX}{name}": float(row[name]) for name in _NUMBERS if row[name] is not None}
    return StepNumbers(row["step"], int(row["time_ms"] or time.time() * 1e3), values)


def conclusion_of(page: dict[str, Any]) -> Conclusion:
    """Return what an overview concludes. Nothing is lost only where it says that all is well."""
    run, verdict, answer = page["run"], page["verdict"], page["answer"]
    cost = None if verdict is None else verdict["cost_throughput_ratio"]
    return Conclusion(
        step=run["step"],
        time_ms=int(run["last_seen_ms"] or time.time() * 1e3),
        status=run["status"],
        answer=answer["text"],
        kind="" if verdict is None else verdict["kind"],
        lost_ratio=0.0 if answer["state"] == "healthy" and cost is None else cost,
    )


class _Writing:
    """The trackers that one run is written to."""

    def __init__(self, source: RunSource, arguments: argparse.Namespace, url: str) -> None:
        self._source, self._arguments = source, arguments
        self._page = f"{url}/runs/{quote(arguments.run, safe='')}"
        self._open: dict[str, Tracker] | None = None  # None: it is not time yet
        self._concluded: Conclusion | None = None
        self._status = ""
        self.has_failed = False
        self.written: list[dict[str, str]] = []

    def write(self) -> None:
        """Write until the run is over, or once. Raises StorageFailed."""
        wants_host = self._arguments.only_on_host_of_rank_0
        for page in self._source.looks(follow=self._arguments.follow):
            self._status = page["run"]["status"]
            if self._open is None and self._is_time(page):
                if wants_host and self._source.host_of_rank_0() != os.uname().nodename:
                    return
                self._open = self._opened(page)
            if self._open is None:
                continue
            for steps in self._source.new_steps(is_over=is_over(page)):
                self._each(_writer_of(steps))
            conclusion = conclusion_of(page)
            if conclusion != self._concluded:
                self._concluded = conclusion
                self._each(_saying(conclusion))
            if not self._open:
                return

    def close(self) -> None:
        """Write what is left, and say where it is."""
        self._each(lambda tracker: tracker.close(failed=self._status == "failed"))
        for name, tracker in (self._open or {}).items():
            self.written.append({"tracker": name, "place": tracker.place})
            sys.stderr.write(f"rankscope track: {TITLES[name]}: {shown(tracker.place)}\n")

    def _is_time(self, page: dict[str, Any]) -> bool:
        """Return whether it is known where to write, or is not to be known."""
        missing = set(self._arguments.to) - {one["tracker"] for one in trackers_of(page)}
        is_last = is_over(page) or not self._arguments.follow
        return not missing or is_last or page["run"]["step"] >= _FIRST_STEPS

    def _opened(self, page: dict[str, Any]) -> dict[str, Tracker]:
        """Return the trackers that can be written to; of others say why they cannot."""
        own = {one["tracker"]: one for one in trackers_of(page)}
        given, found = self._arguments, {}
        for name in dict.fromkeys(given.to):
            target = Target(
                run_id=given.run, name=page["run"]["name"], page=self._page,
                own=own.get(name, {}), into=given.into, store=given.store, project=given.project,
            )  # fmt: skip
            try:
                kind = load(name)
            except TrackerError as error:
                self._failed(name, error)
                continue
            try:
                found[name] = kind(target)
            except (TrackerError, *kind.failures) as error:
                self._failed(name, error)
        return found

    def _each(self, act: Callable[[Tracker], object]) -> None:
        """Do something with each tracker; one that fails is left."""
        for name, tracker in list((self._open or {}).items()):
            try:
                act(tracker)
            except tracker.failures as error:
                assert self._open is not None
                del self._open[name]
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        self.has_failed = True
        sys.stderr.write(f"rankscope track: {TITLES[name]}: {shown(str(error))}\n")


def _writer_of(steps: list[StepNumbers]) -> Callable[[Tracker], None]:
    def write(tracker: Tracker) -> None:
        tracker.write([one for one in steps if one.step > tracker.written_to])

    return write


def _saying(conclusion: Conclusion) -> Callable[[Tracker], None]:
    return lambda tracker: tracker.conclude(conclusion)


def _refuse(text: str, exit_code: int) -> int:
    sys.stderr.write(f"rankscope track: {shown(text)}\n")
    return exit_code
