"""`rankscope ask`: ask the ranks of a live run for something, through the server."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from rankscope.cli import EXIT_USAGE
from rankscope.cli.ranklist import read_ranks
from rankscope.settings import SettingError, from_environment
from rankscope.wire.schema import MAX_PROFILE_STEPS

EXIT_REFUSED, EXIT_UNREACHABLE = 1, 2
DEFAULT_SERVER = "http://127.0.0.1:8787"
_POLL_SECONDS = 0.5
_COPY_BYTES = 1 << 18
_KINDS = {"stacks": "stacks", "profile": "profile", "off": "agent_off", "on": "agent_on"}


class AskFailed(Exception):
    """The question was not answered; the message says why, `exit_code` how bad it is."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class AskCommand:
    """Ask ranks of a live run: stacks, a profile of some steps, recording off or on.

    The server hands the request to the collectors, which answer within a second or two; a
    profile and a switch wait for the next steps. Training goes on in any case.

    Examples:
      rankscope ask stacks my-run --ranks 3,5
      rankscope ask profile my-run --ranks 0 --steps 3 --output trace.json.gz
      rankscope ask off my-run
      rankscope ask on my-run

    A profile without --ranks is taken of the first rank of each node, the others of all ranks.
    Open a trace in ui.perfetto.dev or chrome://tracing.

    Exit codes: 0 every rank did it; 1 a rank refused, or its time was over; 2 the server cannot
    be reached or does not know the run; 64 wrong usage.
    A token for the server is taken from RANKSCOPE_TOKEN only.
    """

    name: ClassVar[str] = "ask"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("what", choices=tuple(_KINDS), help="what to ask for")
        parser.add_argument("run", metavar="RUN", help="id of the run")
        parser.add_argument(
            "--ranks", default="", metavar="LIST", help="ranks, as in 0,3-5; default: see above"
        )
        parser.add_argument(
            "--steps", type=int, default=3, metavar="N",
            help=f"steps to profile, 1 to {MAX_PROFILE_STEPS}; default 3",
        )  # fmt: skip
        parser.add_argument(
            "--output", "-o", type=Path, metavar="FILE",
            help="where a trace goes, by default RUN-rankN.trace.json.gz; of several ranks the "
            "rank is put into the name",
        )  # fmt: skip
        parser.add_argument(
            "--server", metavar="URL", help=f"default $RANKSCOPE_SERVER, else {DEFAULT_SERVER}"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")

    def run(self, arguments: argparse.Namespace) -> int:
        """Ask, wait for the answers, print them. Returns the exit code."""
        try:
            ranks = read_ranks(arguments.ranks)
            if not 1 <= arguments.steps <= MAX_PROFILE_STEPS:
                raise ValueError(f"--steps: from 1 to {MAX_PROFILE_STEPS}")
            settings = from_environment(os.environ)
        except (ValueError, SettingError) as error:
            sys.stderr.write(f"rankscope ask: {error}\n")
            return EXIT_USAGE
        url = arguments.server or settings.server or DEFAULT_SERVER
        asking = _Asking(url, settings.token, arguments.run)
        try:
            made = asking.ask(_KINDS[arguments.what], ranks, arguments.steps)
            if not arguments.json:
                print(f"asked: {made['text']}", flush=True)
            done = asking.wait(made)
            files = asking.fetch(done, arguments.output)
            stacks = asking.stacks(done)
        except AskFailed as error:
            sys.stderr.write(f"rankscope ask: {error}\n")
            return error.exit_code
        if arguments.json:
            print(json.dumps({**done, "stacks": stacks, "files": files}))
        else:
            _tell(done, stacks, files)
        return 0 if all(rank["state"] == "done" for rank in done["ranks"]) else EXIT_REFUSED


class _Asking:
    """One question to one server."""

    def __init__(
        self, url: str, token: str, run: str, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._url = url if "//" in url else f"http://{url}"
        self._run = f"{self._url.rstrip('/')}/api/v1/runs/{quote(run, safe='')}"
        self._name = run
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._sleep = sleep

    def ask(self, kind: str, ranks: list[int], steps: int) -> dict[str, Any]:
        """Make the command and return it."""
        question: dict[str, Any] = {"kind": kind, "ranks": ranks}
        if kind == "profile":
            question["num_steps"] = steps
        return self._json("/commands", json.dumps(question).encode())

    def wait(self, command: dict[str, Any]) -> dict[str, Any]:
        """Return the command once every rank has answered, or its time is over."""
        while command["is_open"]:
            self._sleep(_POLL_SECONDS)
            command = self._json(f"/commands/{command['id']}")
        return command

    def stacks(self, command: dict[str, Any]) -> dict[str, str]:
        """Return the stacks that came, by rank."""
        if command["kind"] != "stacks":
            return {}
        found = {}
        for rank in (one["rank"] for one in command["ranks"] if one["state"] == "done"):
            taken = self._json(f"/ranks/{rank}")["stacks"]
            text = [one["text"] for one in taken if one["command_id"] == command["id"]]
            found[str(rank)] = text[0] if text else ""
        return found

    def fetch(self, command: dict[str, Any], output: Path | None) -> dict[str, str]:
        """Write the traces that came to files; return their paths by rank."""
        with_trace = [one["rank"] for one in command["ranks"] if one["trace"]]
        files = {}
        for rank in with_trace:
            path = output or Path(f"{self._name}-rank{rank}.trace.json.gz")
            if output is not None and len(with_trace) > 1:
                path = output.with_name(f"rank{rank}-{output.name}")
            address = f"{self._run}/commands/{command['id']}/ranks/{rank}/trace"
            try:
                with self._open(address) as reply, path.open("wb") as file:
                    while block := reply.read(_COPY_BYTES):
                        file.write(block)
            except OSError as error:
                raise AskFailed(f"{path} was not written: {error}", EXIT_REFUSED) from error
            files[str(rank)] = str(path)
        return files

    def _json(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        with self._open(self._run + path, body) as reply:
            answer: dict[str, Any] = json.load(reply)
            return answer

    def _open(self, address: str, body: bytes | None = None) -> Any:
        headers = self._headers | ({"Content-Type": "application/json"} if body else {})
        try:
            request = urllib.request.Request(address, body, headers)
            return urllib.request.urlopen(request, timeout=30)
        except urllib.error.HTTPError as error:
            with error:
                code = EXIT_REFUSED if error.code == 409 else EXIT_UNREACHABLE
                raise AskFailed(_what(error.read(65_536)), code) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise AskFailed(f"{self._url} does not answer: {error}", EXIT_UNREACHABLE) from error


def _tell(done: dict[str, Any], stacks: dict[str, str], files: dict[str, str]) -> None:
    for one in done["ranks"]:
        rank = str(one["rank"])
        line = f"rank {rank}: {one['state']}" + (f", {one['reason']}" if one["reason"] else "")
        print(line + (f", {files[rank]}" if rank in files else ""))
        if rank in stacks:
            print(stacks[rank] + "\n")
        for row in one["operators"][:8]:
            own = row["total_ms"] if row["self_ms"] is None else row["self_ms"]
            print(f"  {own:10.3f} ms  {row['count']:6d} x  {row['name']}")


def _what(text: bytes) -> str:
    try:
        error = json.loads(text)["error"]
        return f"{error['what']}" + (f"; {error['remedy']}" if error["remedy"] else "")
    except (ValueError, KeyError, TypeError):
        return text[:200].decode(errors="replace")
