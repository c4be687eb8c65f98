"""Reads the inputs by the known errors, with progress, and prints the answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from rankscope.terminal import SafeConsole, shown
from rankscope_server.explain import recorded
from rankscope_server.explain.answer import answer
from rankscope_server.explain.inputs import (
    InputError,
    Inputs,
    LogSource,
    Skipped,
    find_sources,
    read_source,
)
from rankscope_server.explain.screen import show
from rankscope_server.known_errors.evaluation import evaluate
from rankscope_server.known_errors.load import EntryFileError, read_entries
from rankscope_server.known_errors.prefilter import NO_LIBRARY
from rankscope_server.known_errors.reading import Reader
from rankscope_server.known_errors.tally import Tally

EXIT_NO_FAULT, EXIT_FAULT = 0, 1
_MAX_NAMED = 6
_SLOW_BYTES = 256 << 20  # about a minute without the library
_SHOW_PROGRESS_BYTES = 64 << 20  # less is read before a bar could be seen


class ExplainError(Exception):
    """The logs or the known errors cannot be read; the text says what to do."""


def explain(paths: Sequence[str], own_entries: Sequence[str], is_json: bool, is_full: bool) -> int:
    """Explain the logs and print it. Returns the exit code. Raises `ExplainError`."""
    try:
        reader = Reader(read_entries([Path(name) for name in own_entries]))
        inputs = find_sources(paths)
        sources, skipped = inputs.sources, list(inputs.skipped)
        reader.is_alone = len(sources) == 1
        _read(reader, sources)
    except (EntryFileError, InputError) as error:
        raise ExplainError(str(error)) from error
    result = answer(evaluate(reader.tally))
    jobs, unread = recorded.read(inputs.recordings) if inputs.recordings else ([], [])
    if inputs.recordings and not jobs and not sources:
        raise ExplainError(unread[0].reason)
    skipped += unread
    nothing = answer(evaluate(Tally()))
    others = [(job.name, recorded.merge(nothing, job.look)) for job in jobs[1:]]
    if jobs:
        result = recorded.merge(result, jobs[0].look)
    if is_json:
        result["skipped"] = [{"name": skip.name, "reason": skip.reason} for skip in skipped]
        result["other_jobs"] = [{"name": name, **one} for name, one in others]
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        console = SafeConsole(soft_wrap=False)
        read = jobs[0].name if others else _what_was_read(inputs)
        for name, one in ((read, result), *others):
            show(one, name, is_full, console)
        _report_left_out(skipped, len(inputs.skipped))
    return EXIT_NO_FAULT if result["root"] is None else EXIT_FAULT


def _report_left_out(skipped: Sequence[Skipped], num_no_logs: int) -> None:
    """Name recordings that could not be used; files that are no logs are counted in the title."""
    unread = skipped[num_no_logs:]
    for skip in unread[:_MAX_NAMED]:
        sys.stderr.write(f"left out: {shown(skip.reason)}\n")
    if len(unread) > _MAX_NAMED:
        sys.stderr.write(f"left out: {len(unread) - _MAX_NAMED} more files\n")


def _read(reader: Reader, sources: Sequence[LogSource]) -> None:
    total = sum(source.size_bytes for source in sources)
    is_shown = sys.stderr.isatty() and (total >= _SHOW_PROGRESS_BYTES or any(
        source.path is None for source in sources
    ))  # fmt: skip
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    if total >= _SLOW_BYTES and reader.engine == NO_LIBRARY:
        SafeConsole(stderr=True).print(
            "reading is slow without google-re2: pip install 'rankscope[server]'"
        )
    with Progress(
        *columns, console=SafeConsole(stderr=True), disable=not is_shown, transient=True
    ) as bar:
        task = bar.add_task("", total=total or None)
        for source in sources:
            reader.read(read_source(source, lambda size: bar.advance(task, size)), source.name)


def _what_was_read(inputs: Inputs) -> str:
    sources, recordings = inputs.sources, inputs.recordings
    parts = []
    if recordings:
        one = len(recordings) == 1
        parts.append(str(recordings[0]) if one else f"{len(recordings):,} dumps or traces")
    if len(sources) == 1:
        parts.append("standard input" if sources[0].path is None else sources[0].name)
    elif sources:
        parts.append(f"{len(sources):,} logs")
    skipped = inputs.skipped
    left_out = f" ({len(skipped):,} files that are no logs left out)" if skipped else ""
    return " and ".join(parts) + left_out
