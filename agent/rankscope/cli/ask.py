"""`rankscope ask`: ask the ranks of a live run for something, through the server."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from rankscope.address import AddressError
from rankscope.cli import EXIT_USAGE
from rankscope.http import Client, HttpAnswer, HttpError
from rankscope.settings import SettingError, from_environment
from rankscope.terminal import shown
from rankscope.wire.schema import MAX_PROFILE_STEPS, MAX_RANK

_PART = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")


def read_ranks(text: str) -> list[int]:
    """Return the ranks in order, none for an empty text. Raises ValueError with the reason."""
    ranks: set[int] = set()
    for part in (part.strip() for part in text.split(",") if text.strip()):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"--ranks: {part!r} is no rank; write 0,3-5")
        low, high = int(match[1]), int(match[2] or match[1])
        if low > high or high > MAX_RANK:
            raise ValueError(f"--ranks: {part!r} is no range of ranks")
        ranks.update(range(low, high + 1))
    return sorted(ranks)


EXIT_REFUSED, EXIT_UNREACHABLE = 1, 2
DEFAULT_SERVER = "http://127.0.0.1:8787"
_POLL_SECONDS = 0.5
_TIMEOUT_SECONDS = 30.0
_MAX_ANSWER_BYTES = 64 << 20
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
            help="where to write a trace, by default RUN-rankN.trace.json.gz; of several ranks the "
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
            sys.stderr.write(f"rankscope ask: {shown(str(error))}\n")
            return EXIT_USAGE
        url = arguments.server or settings.server or DEFAULT_SERVER
        try:
            client = Client(
                url, settings.token, timeout_seconds=_TIMEOUT_SECONDS,
                max_answer_bytes=_MAX_ANSWER_BYTES,
            )  # fmt: skip
        except AddressError as error:
            sys.stderr.write(f"rankscope ask: {shown(str(error))}\n")
            return EXIT_UNREACHABLE
        with contextlib.closing(client):
            return self._ask(_Asking(client, arguments.run), arguments, ranks)

    def _ask(self, asking: _Asking, arguments: argparse.Namespace, ranks: list[int]) -> int:
        try:
            made = asking.ask(_KINDS[arguments.what], ranks, arguments.steps)
            if not arguments.json:
                print(f"asked: {shown(made['text'])}", flush=True)
            done = asking.wait(made)
            files = asking.fetch(done, arguments.output)
            stacks = asking.stacks(done)
        except AskFailed as error:
            sys.stderr.write(f"rankscope ask: {shown(str(error))}\n")
            return error.exit_code
        if arguments.json:
            print(json.dumps({**done, "stacks": stacks, "files": files}))
        else:
            _print_result(done, stacks, files)
        return 0 if all(rank["state"] == "done" for rank in done["ranks"]) else EXIT_REFUSED


class _Asking:
    """One question to one server."""

    def __init__(
        self, client: Client, run: str, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._client = client
        self._run = f"/api/v1/runs/{quote(run, safe='')}"
        self._name = run
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
        stacks = {}
        for rank in (row["rank"] for row in command["ranks"] if row["state"] == "done"):
            taken = self._json(f"/ranks/{rank}")["stacks"]
            text = [row["text"] for row in taken if row["command_id"] == command["id"]]
            stacks[str(rank)] = text[0] if text else ""
        return stacks

    def fetch(self, command: dict[str, Any], output: Path | None) -> dict[str, str]:
        """Write the traces that came to files; return their paths by rank."""
        with_trace = [row["rank"] for row in command["ranks"] if row["trace"]]
        files = {}
        for rank in with_trace:
            path = output or Path(f"{self._name}-rank{rank}.trace.json.gz")
            if output is not None and len(with_trace) > 1:
                path = output.with_name(f"rank{rank}-{output.name}")
            address = f"{self._run}/commands/{command['id']}/ranks/{rank}/trace"
            try:
                with self._refusals():
                    _check(self._client.download(address, path))
            except OSError as error:
                raise AskFailed(f"{path} was not written: {error}", EXIT_REFUSED) from error
            files[str(rank)] = str(path)
        return files

    def _json(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} if body else {}
        method = "POST" if body else "GET"
        with self._refusals():
            answer = self._client.request(method, self._run + path, body, headers)
        _check(answer)
        fields = answer.fields
        if not fields:
            text = f"{self._client.address.url}: no rankscope server answers there"
            raise AskFailed(text, EXIT_UNREACHABLE)
        return fields

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except HttpError as error:
            url = self._client.address.url
            raise AskFailed(f"{url} does not answer: {error}", EXIT_UNREACHABLE) from error


def _check(answer: HttpAnswer) -> None:
    """Raise AskFailed for an answer that is a refusal, or that no server of ours gives."""
    if answer.status != 200:
        code = EXIT_REFUSED if answer.status == 409 else EXIT_UNREACHABLE
        raise AskFailed(answer.why(), code)


def _print_result(done: dict[str, Any], stacks: dict[str, str], files: dict[str, str]) -> None:
    for row in done["ranks"]:
        rank = str(row["rank"])
        line = f"rank {rank}: {row['state']}" + (f", {row['reason']}" if row["reason"] else "")
        print(shown(line + (f", {files[rank]}" if rank in files else "")))
        if rank in stacks:
            print(shown(stacks[rank]) + "\n")
        for operator in row["operators"][:8]:
            self_ms = operator["self_ms"]
            took_ms = operator["total_ms"] if self_ms is None else self_ms
            print(f"  {took_ms:10.3f} ms  {operator['count']:6d} x  {shown(operator['name'])}")
