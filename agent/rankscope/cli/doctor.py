"""`rankscope doctor`: what would be recorded here, from which source, and why not more."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

from rich.table import Table
from rich.text import Text

from rankscope.cli import EXIT_USAGE
from rankscope.settings import SettingError, Settings, from_environment
from rankscope.terminal import SafeConsole, shown

EXIT_ADVICE, EXIT_NOTHING = 1, 2
State = Literal["used", "ready", "skipped", "advice", "fails"]
_COLOURS = {
    "used": "green", "ready": "default", "skipped": "dim", "advice": "yellow", "fails": "red",
}  # fmt: skip
_NOUNS = {"hooks": "hooks", "machine": "sources of the machine"}
_WATCHED_MODULES = (
    "torch.distributed", "torch.distributed.pipelining.stage", "torch.distributed.checkpoint",
    "torch.distributed.fsdp", "torch.utils.data", "torch.amp", "torch.optim", "torch.compiler",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    part: str
    name: str
    state: State
    detail: str


class DoctorCommand:
    """Show what would be recorded on this machine, from which source, and why not more.

    Looks at PyTorch, the sources of collectives, every hook, the sources of machine samples, the
    directory for the records and the server. It changes nothing, unless you ask it to compile
    the native probe, which makes recording a collective cost about 1 us. Most versions of PyTorch
    need no compiling: their probe is ready-made.

    What works is one line; what does not, and what would be better, are lines of their own.

    Examples:
      rankscope doctor
      rankscope doctor --all                  each hook and source, with the reason
      rankscope doctor --build
      rankscope doctor --server http://127.0.0.1:8787
      RANKSCOPE_SERVER=http://127.0.0.1:8787 rankscope doctor --json

    With --server it is about that server instead: whether each part of it is ready, what it
    stores by kind and by run, and what its retention would remove now.

    Exit codes: 0 all is well; 1 it works, and there is advice; 2 nothing can be recorded, or the
    server does not answer; 64 wrong usage.
    A token for the server is taken from RANKSCOPE_TOKEN only.
    """

    name: ClassVar[str] = "doctor"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument(
            "--build",
            action="store_true",
            help="compile the native probe first, where none is ready-made (some 20 s)",
        )
        parser.add_argument(
            "-a", "--all", action="store_true", help="show each hook and source, with its reason"
        )
        parser.add_argument(
            "--server", metavar="URL", help="examine this server: what it stores, what would go"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(self, arguments: argparse.Namespace) -> int:
        """Examine, print and return the exit code."""
        console = SafeConsole(highlight=False)
        try:
            settings = from_environment(os.environ)
        except SettingError as error:
            sys.stderr.write(f"rankscope doctor: {shown(str(error))}\n")
            return EXIT_USAGE
        if arguments.server:
            return examine_server(arguments.server, settings.token, console, arguments.json)
        if arguments.build:
            _build(SafeConsole(stderr=True))
        rows = list(examine(settings))
        states = {row.state for row in rows}
        nothing = any(row.state == "fails" and row.part == "records" for row in rows)
        code = EXIT_NOTHING if nothing else EXIT_ADVICE if states & {"advice", "fails"} else 0
        if arguments.json:
            document = {"exit_code": code, "rows": [asdict(row) for row in rows]}
            console.print_json(json.dumps(document))
        elif arguments.all:
            console.print(_table(rows))
        else:
            console.print(summary(rows), soft_wrap=True, markup=False)
            suspicious = [row for row in rows if row.state in ("advice", "fails")]
            if suspicious:
                console.print(_table(suspicious))
        return code


def examine_server(url: str, token: str, console: SafeConsole, is_json: bool) -> int:
    """Print what a server stores and would remove, and whether it is ready; return the code."""
    from rankscope.address import AddressError
    from rankscope.cli import storage

    try:
        with contextlib.closing(storage.client_of(url, token)) as client:
            asking = storage.StorageClient(client)
            not_ready = ""
            try:
                ready = asking.ask("GET", "/ready")
            except storage.StorageFailed as error:
                if error.status != 503:
                    raise
                ready, not_ready = {}, str(error)
            stored, retention = asking.ask("GET", "/storage"), asking.ask("GET", "/retention")
    except AddressError as error:
        sys.stderr.write(f"rankscope doctor: {shown(str(error))}\n")
        return EXIT_USAGE
    except storage.StorageFailed as error:
        sys.stderr.write(f"rankscope doctor: {shown(str(error))}\n")
        return EXIT_NOTHING
    code = EXIT_ADVICE if not_ready or retention["unmet"] else 0
    if is_json:
        document = {"exit_code": code, "not_ready": not_ready, "ready": ready}
        console.print_json(json.dumps(document | {"storage": stored, "retention": retention}))
        return code
    lines = [not_ready or "Every part of the server is ready.", stored["text"]]
    console.print("\n".join(lines), soft_wrap=True, markup=False)
    console.print(storage.kinds_table(stored), storage.runs_table(stored), sep="\n\n")
    console.print(f"\n{retention['text']}", soft_wrap=True, markup=False)
    if retention["planned"]:
        console.print(storage.plan_table(retention))
    for text in retention["unmet"]:
        console.print(text, soft_wrap=True, markup=False)
    return code


def summary(rows: Sequence[Row]) -> str:
    """Return what is recorded here in one line; parts of which nothing works are named."""
    used: dict[str, list[str]] = {}
    for row in rows:
        used.setdefault(row.part, [])
        if row.state == "used" or (row.state == "ready" and row.part != "collectives"):
            used[row.part].append(row.name)
    parts = []
    for part, names in used.items():
        if part == "collectives":
            parts.append(f"collectives by {names[0]}" if names else "no collectives")
        elif part in ("hooks", "machine"):
            total = sum(row.part == part for row in rows)
            parts.append(f"{len(names)} of {total} {_NOUNS[part]}")
    left = [row.name for row in rows if row.state == "skipped" and row.part == "machine"]
    without = f"; not here: {', '.join(left)}" if left else ""
    return f"Recorded here: {', '.join(parts)}{without}. Each with its reason: --all"


def examine(settings: Settings) -> Iterator[Row]:
    """Look at everything that recording rests on."""
    yield _torch()
    yield from _collectives(settings)
    yield from _hooks(settings)
    yield from _machine()
    yield _records()
    yield _server(settings)


def _torch() -> Row:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return Row("python", "torch", "skipped", f"cannot be imported: {error}")
    backends = [
        name
        for name in ("gloo", "nccl", "mpi", "ucc", "xccl")
        if dist.is_available() and dist.is_backend_available(name)
    ]
    version = ".".join(map(str, sys.version_info[:3]))
    detail = f"{torch.__version__} on Python {version}; backends: {', '.join(backends) or 'none'}"
    return Row("python", "torch", "used", detail)


def _collectives(settings: Settings) -> Iterator[Row]:
    from rankscope.rank.context import HookSkipped
    from rankscope.rank.hooks import collectives
    from rankscope.rank.hooks.collectives import probe

    part, taken = "collectives", False
    if not _has_torch():
        yield Row(part, "", "skipped", "no torch")
        return
    collectives.check_name(settings.collectives)
    better = ""
    for source in collectives.SOURCES:
        about = (source.__doc__ or "").strip().splitlines()[0].rstrip(".")
        try:
            source.check()
        except HookSkipped as reason:
            is_probe = source.name == "probe"
            can_build = is_probe and str(reason).startswith(("not compiled", "the comp"))
            better = better or (_better(source.outside_us) if is_probe else "")
            yield Row(part, source.name, "advice" if can_build else "skipped", str(reason))
            continue
        if source.name == "probe":
            about = f"{probe.load().origin}: {about}"
        used = not taken and settings.collectives in ("auto", source.name)
        taken = taken or used
        yield Row(part, source.name, "used" if used else "ready", about + better * used)
    if not taken:
        yield Row(part, settings.collectives, "fails", "no source can be used")


def _better(cost_us: float) -> str:
    """Return what would be better than a source other than the probe, and how to get it."""
    from rankscope.native.probe import build

    try:
        remedy = build.remedy()
    except build.BuildError:
        remedy = ""
    return f"; better: probe, about {cost_us:.0f} us: {remedy}" if remedy else ""


def _has_torch() -> bool:
    return "torch" in sys.modules


def _hooks(settings: Settings) -> Iterator[Row]:
    """Install every hook in this process, which ends soon, and see what each says."""
    from rankscope.rank.runtime import Agent

    if not _has_torch():
        return
    for module in _WATCHED_MODULES:
        try:
            importlib.import_module(module)
        except ImportError:
            continue  # this version has none; its hook says so
    agent = Agent(settings, {})
    agent.install_hooks()
    for name, what in sorted(agent.context.sources.items()):
        if name == "collectives" or name.startswith("collectives/"):
            continue
        is_bad = what.startswith(("failed", "skipped"))
        waits = what.startswith("waits")
        state: State = "skipped" if is_bad else "ready" if waits else "used"
        yield Row("hooks", name, state, what.removeprefix("skipped: "))
    agent.remove_hooks()


def _machine() -> Iterator[Row]:
    from rankscope.node import sources

    states: dict[str, State] = {"works": "used", "skipped": "skipped", "fails": "fails"}
    for found in sources.describe():
        yield Row("machine", found.name, states[found.state], found.reason)


def _records() -> Row:
    from rankscope.files import run_directory_choice

    try:
        chosen = run_directory_choice.choose(os.environ)
    except OSError as error:
        return Row("records", "directory", "fails", f"{error}; set RANKSCOPE_DIR to a local disk")
    if chosen.note:
        return Row("records", "directory", "advice", chosen.note)
    return Row("records", "directory", "used", str(chosen.base))


def _server(settings: Settings) -> Row:
    from rankscope.address import AddressError
    from rankscope.http import HttpError, get

    if not settings.server:
        return Row(
            "server", "", "skipped", "RANKSCOPE_SERVER is not set: records stay on this node"
        )
    try:
        answer = get(settings.server, "/api/v1/health")
        session = get(settings.server, "/api/v1/session", settings.token).fields
    except (HttpError, AddressError) as error:
        return Row("server", settings.server, "advice", f"cannot be reached: {error}")
    if answer.status != 200 or not answer.fields:
        return Row("server", settings.server, "advice", f"cannot be reached: {answer.why()}")
    status = answer.fields.get("status", "unknown")
    missing = _missing_access(session, settings.token)
    if missing:
        return Row("server", settings.server, "advice", f"answers: {status}, but {missing}")
    return Row("server", settings.server, "used", f"answers: {status}")


def _missing_access(session: Mapping[str, object], token: str) -> str:
    """Return why a server will not take batches, empty where it will, or does not say."""
    if not session.get("required"):
        return ""
    if not session.get("signed_in"):
        what = "does not take the token in RANKSCOPE_TOKEN" if token else "wants a token"
        return f"it {what}: set one of `rankscope token create NAME --role ingest`"
    roles = session.get("roles", ["ingest"])
    if isinstance(roles, list) and "ingest" not in roles:
        return f"this token may not send: it has {', '.join(map(str, roles))} and not ingest"
    return ""


def _build(console: SafeConsole) -> None:
    from rankscope.native.probe import build
    from rankscope.rank.context import HookSkipped
    from rankscope.rank.hooks.collectives import probe as source

    with contextlib.suppress(HookSkipped):
        loaded = source.load()
        if not loaded.not_ready:
            console.print(f"rankscope: nothing to compile: the native probe is {loaded.origin}")
            return
    try:
        with console.status("compiling the native probe, once for this version of PyTorch ..."):
            path = build.build()
    except build.BuildError as error:
        console.print(f"rankscope: the native probe was not built: {error}", markup=False)
        return
    console.print(f"rankscope: the native probe is {path}", markup=False, soft_wrap=True)


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("part", "name", "state", "what is used, or why not"):
        table.add_column(heading, overflow="fold")
    before = ""
    for row in rows:
        colour = _COLOURS[row.state]
        part = row.part if row.part != before else ""
        table.add_row(part, row.name, Text(row.state, style=colour), Text(row.detail))
        before = row.part
    return table
