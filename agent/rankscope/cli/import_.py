"""`rankscope import`: give a server what other tools recorded of a run."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from rankscope.cli import EXIT_USAGE
from rankscope.cli.ask import DEFAULT_SERVER, EXIT_REFUSED, EXIT_UNREACHABLE
from rankscope.files.run_directory import clean_run_id
from rankscope.importers.batches import batches
from rankscope.importers.flight_records import Imported
from rankscope.node.upload.server import Server
from rankscope.settings import SettingError, from_environment
from rankscope.terminal import SafeConsole, shown
from rankscope.wire import schema, zstd

_MAX_NAMED = 10
_SHOW_PROGRESS_BYTES = 16 << 20


class ImportCommand:
    """Import what other tools recorded: the detectors then look at it as at a recorded run.

    PATH is a file or a directory: Flight Recorder dumps (pickle or JSON, NCCL or gloo), traces of
    PyTorch's profiler (JSON, also gzip, one of each rank), logs of NCCL (NCCL_DEBUG=INFO), the
    open trace in Parquet, output of nccl-tests, the timeline of Horovod. The format is recognised
    by content. The rank of a dump is the last number in its file's name. Nothing that is in a
    pickle is executed. The run is given to a server, which must be up: rankscope serve.

    Examples:
      rankscope import /tmp/nccl_trace_rank_*
      rankscope import dumps/ --run crash-of-tuesday
      rankscope import traces/ --run profile-of-tuesday
      rankscope import nccl-logs/
      rankscope import trace.parquet
      rankscope import all_reduce_perf.txt --format nccl-tests
      rankscope import timeline.json

    Exit codes: 0 imported; 1 nothing in PATH could be read, or the server refused some of it;
    2 the server cannot be reached; 64 wrong usage.
    A token for the server is taken from RANKSCOPE_TOKEN only.
    """

    name: ClassVar[str] = "import"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="file or directory")
        parser.add_argument(
            "--run", default="", metavar="RUN",
            help="id of the run to make; by default from the name of the first path",
        )  # fmt: skip
        parser.add_argument(
            "--server", metavar="URL", help=f"default $RANKSCOPE_SERVER, else {DEFAULT_SERVER}"
        )
        parser.add_argument(
            "--format", default="", metavar="FORMAT",
            help="take every file for this one: flight-recorder, open-trace, profiler, nccl-tests, "
            "nccl-log, horovod",
        )  # fmt: skip
        parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")

    def run(self, arguments: argparse.Namespace) -> int:
        """Read, convert, send. Returns the exit code."""
        try:
            settings = from_environment(os.environ)
            server = Server(arguments.server or settings.server or DEFAULT_SERVER, settings.token)
        except (SettingError, ValueError) as error:
            sys.stderr.write(f"rankscope import: {shown(str(error))}\n")
            return EXIT_USAGE
        # by name: the agent package imports no other; this part of the server needs no extra
        readers = importlib.import_module("rankscope_server.importers.recordings")
        if arguments.format and arguments.format not in readers.FORMATS:
            known = ", ".join(readers.FORMATS)
            sys.stderr.write(f"rankscope import: --format: one of {known}\n")
            return EXIT_USAGE
        try:
            with _progress(arguments.paths) as on_bytes:
                recording = readers.read_recordings(
                    arguments.paths, arguments.format or None, on_bytes
                )
        except readers.RecordingError as error:
            sys.stderr.write(f"rankscope import: {shown(str(error))}\n")
            return EXIT_REFUSED
        left_out = recording.left_out
        for line in left_out[:_MAX_NAMED]:
            sys.stderr.write(f"left out: {shown(line)}\n")
        if len(left_out) > _MAX_NAMED:
            sys.stderr.write(f"left out: {len(left_out) - _MAX_NAMED} more files\n")
        imported: Imported = recording.found
        run_id = clean_run_id(arguments.run or arguments.paths[0].resolve().name)
        with contextlib.closing(server):
            exit_code, problem = _send(server, run_id, imported)
        if problem:
            sys.stderr.write(f"rankscope import: {shown(str(problem))}\n")
            return exit_code
        document = {
            "run_id": run_id, "ranks": recording.num_ranks, "world_size": imported.world_size,
            "open": imported.num_open, "formats": recording.formats, "left_out": left_out,
            "link": f"{server.url}/runs/{quote(run_id)}",
        }  # fmt: skip
        if arguments.json:
            print(json.dumps(document))
        else:
            print(
                f"{recording.num_ranks} of {imported.world_size} ranks from "
                f"{', '.join(recording.formats)}, {imported.num_open} open operations: "
                f"{document['link']}"
            )
        return 0


@contextlib.contextmanager
def _progress(paths: Sequence[Path]) -> Iterator[Callable[[int], None]]:
    """Show how much is read, on a terminal and where it takes a while."""
    files = [one for path in paths for one in (path.rglob("*") if path.is_dir() else [path])]
    total = sum(path.stat().st_size for path in files if path.is_file())
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    is_shown = sys.stderr.isatty() and total >= _SHOW_PROGRESS_BYTES
    with Progress(
        *columns, console=SafeConsole(stderr=True), disable=not is_shown, transient=True
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda size: bar.advance(task, size)


def _send(server: Server, run_id: str, imported: Imported) -> tuple[int, str]:
    """Send all batches; return the exit code and what went wrong."""
    for batch in batches(run_id, imported):
        answer = server.post(zstd.pack(schema.encode(batch)))
        if not answer.is_ours:
            code = EXIT_REFUSED if answer.is_refusal else EXIT_UNREACHABLE
            return code, f"status {answer.status}: {answer.text[:300]}"
        refused = answer.fields.get("refused") or []
        if refused:
            return EXIT_REFUSED, f"the server refused {len(refused)} parts, first: {refused[0]}"
    return 0, ""
