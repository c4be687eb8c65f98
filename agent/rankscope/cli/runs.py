"""`rankscope runs`: what a server stores of each run; pin one, delete one, apply retention."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar
from urllib.parse import quote

from rankscope.address import AddressError
from rankscope.cli import EXIT_USAGE
from rankscope.cli.storage import (
    StorageClient,
    StorageFailed,
    client_of,
    kinds_table,
    plan_table,
    runs_table,
    size,
)
from rankscope.settings import SettingError, from_environment
from rankscope.terminal import SafeConsole, shown

EXIT_REFUSED, EXIT_UNREACHABLE = 1, 2
DEFAULT_SERVER = "http://127.0.0.1:8787"
_ACTIONS = ("list", "pin", "unpin", "delete", "release", "clean")
_OF_ONE_RUN = ("pin", "unpin", "delete", "release")
_POLL_SECONDS = 0.5
_MOST_LISTED = 1_000


class RunsCommand:
    """Show what a server stores of each run; pin or delete one; apply the limits of retention.

    list      sizes by kind and by run
    pin       neither retention nor `delete` touches the run; unpin ends that
    delete    delete a run for good; it asks for the id of the run, or takes it from --yes
    release   let the id of a deleted run be used again
    clean     remove now what the limits of the server (--keep-...) say; --dry-run only shows it

    A live run cannot be deleted. What a deleted run still sends is refused, and its collectors
    say so; a new run needs another id, or `release`.

    Examples:
      rankscope runs list
      rankscope runs pin my-run
      rankscope runs delete my-run
      rankscope runs clean --dry-run

    Exit codes: 0 done; 1 the server refused; 2 the server cannot be reached or does not know the
    run; 64 wrong usage.
    A token for the server is taken from RANKSCOPE_TOKEN only.
    """

    name: ClassVar[str] = "runs"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("action", choices=_ACTIONS, help="what to do")
        parser.add_argument("run", nargs="?", default="", metavar="RUN", help="id of the run")
        parser.add_argument(
            "--yes", default="", metavar="RUN", help="the id again: delete it without a question"
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="with clean: show what would go, remove nothing"
        )
        parser.add_argument(
            "--no-wait", action="store_true", help="do not wait until the data is removed"
        )
        parser.add_argument(
            "--server", metavar="URL", help=f"default $RANKSCOPE_SERVER, else {DEFAULT_SERVER}"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it and return the exit code."""
        problem = _problem(arguments)
        try:
            settings = from_environment(os.environ)
            client = client_of(
                arguments.server or settings.server or DEFAULT_SERVER, settings.token
            )
        except (SettingError, AddressError) as error:
            problem = problem or str(error)
        if problem:
            sys.stderr.write(f"rankscope runs: {shown(problem)}\n")
            return EXIT_USAGE
        with contextlib.closing(client):
            try:
                answer = _Doing(StorageClient(client), arguments).act()
            except StorageFailed as error:
                sys.stderr.write(f"rankscope runs: {shown(str(error))}\n")
                return EXIT_REFUSED if error.status in (409, 410, 422) else EXIT_UNREACHABLE
        if arguments.json:
            print(json.dumps(answer))
        return 0


def _problem(arguments: argparse.Namespace) -> str:
    """Return what is wrong with the arguments, empty for nothing."""
    if arguments.action in _OF_ONE_RUN and not arguments.run:
        return f"{arguments.action} wants the id of a run; `rankscope runs list` shows them"
    if arguments.action not in _OF_ONE_RUN and arguments.run:
        return f"{arguments.action} takes no run"
    if arguments.yes and arguments.yes != arguments.run:
        return f"--yes names {arguments.yes!r}, not {arguments.run!r}: nothing is deleted"
    return ""


class _Doing:
    """One action at one server."""

    def __init__(
        self, client: StorageClient, arguments: argparse.Namespace,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._client, self._arguments, self._sleep = client, arguments, sleep
        self._console = SafeConsole(highlight=False, quiet=arguments.json)
        self._run = quote(arguments.run, safe="")

    def act(self) -> dict[str, Any]:
        """Return the server's last answer. Raises StorageFailed."""
        actions = {
            "list": self._list, "pin": self._pin, "unpin": self._pin, "delete": self._delete,
            "release": self._release, "clean": self._clean,
        }  # fmt: skip
        return actions[self._arguments.action]()

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def _list(self) -> dict[str, Any]:
        storage = self._client.ask("GET", "/storage")
        self._say(storage["text"])
        self._console.print(kinds_table(storage))
        self._console.print()
        self._console.print(runs_table(storage, _MOST_LISTED))
        return storage

    def _pin(self) -> dict[str, Any]:
        is_pin = self._arguments.action == "pin"
        answer = self._client.ask("PUT" if is_pin else "DELETE", f"/runs/{self._run}/pin")
        self._say(f"{self._arguments.run} is {'pinned' if is_pin else 'not pinned'}")
        return answer

    def _delete(self) -> dict[str, Any]:
        run = self._arguments.run
        if not self._arguments.yes:
            sys.stderr.write(f"What is deleted cannot be brought back. Type {run} to delete it: ")
            sys.stderr.flush()
            if sys.stdin.readline().strip() != run:
                raise StorageFailed("nothing is deleted", 422)
        row = self._client.ask("DELETE", f"/runs/{self._run}?confirm={self._run}")
        while row["finished_ms"] is None and not self._arguments.no_wait:
            self._sleep(_POLL_SECONDS)
            row = self._client.ask("GET", f"/deletions/{self._run}")
        is_over = row["finished_ms"] is not None
        self._say(
            f"{run} is deleted: {size(row['bytes'])}, {row['rows']:,} rows"
            if is_over
            else f"{run} is gone from all pages; its data is being removed"
        )
        return row

    def _release(self) -> dict[str, Any]:
        answer = self._client.ask("DELETE", f"/deletions/{self._run}")
        self._say(f"{self._arguments.run} may be used as the id of a run again")
        return answer

    def _clean(self) -> dict[str, Any]:
        is_dry = self._arguments.dry_run
        plan = self._client.ask("GET" if is_dry else "POST", "/retention")
        self._say(plan["text"])
        if plan["planned"]:
            self._console.print(plan_table(plan, _MOST_LISTED))
        for text in plan["unmet"]:
            self._say(text)
        began_ms = plan["progress"]["round_ended_ms"] or 0
        while not (is_dry or self._arguments.no_wait):
            progress = self._client.ask("GET", "/retention")["progress"]
            if progress["failure"]:
                raise StorageFailed(f"it goes on by itself: {progress['failure']}", 409)
            if (progress["round_ended_ms"] or 0) > began_ms:
                self._say("done")
                break
            self._sleep(_POLL_SECONDS)
        return plan
