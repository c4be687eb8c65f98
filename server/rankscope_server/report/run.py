"""Finds the run that is meant, makes its report, and writes it in the forms that were asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from rankscope.address import AddressError, read_address
from rankscope.files.run_directory import clean_run_id
from rankscope.http import HttpAnswer, HttpError, get
from rankscope.node.offline import OfflineRun, is_run_directory
from rankscope.terminal import SafeConsole, shown_json
from rankscope_server.api.report.parts import Origin
from rankscope_server.api.report.schema import Report
from rankscope_server.report.bundle import write_bundle
from rankscope_server.report.cleaning import cleaned
from rankscope_server.report.errors import ReportError
from rankscope_server.report.page import page
from rankscope_server.report.screen import show

_TIMEOUT_SECONDS = 60
_MAX_ANSWER_BYTES = 256 << 20
_SILENT_AFTER_SECONDS = 10.0
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a reader asked for."""

    targets: tuple[str, ...]  # one id of a run, or directories
    run_id: str = ""
    server: str = ""
    token: str = ""
    is_json: bool = False
    html: Path | None = None
    bundle: Path | None = None


def make_report(wanted: Wanted) -> None:
    """Make a report and write it. Raises `ReportError`."""
    report = cleaned(read_report(wanted))
    try:
        if wanted.html is not None:
            wanted.html.write_text(page(report), encoding="utf-8")
        if wanted.bundle is not None:
            write_bundle(report, wanted.bundle)
    except OSError as error:
        raise ReportError(f"{error.filename}: not written, {error.strerror}") from error
    if wanted.is_json:
        sys.stdout.write(shown_json(msgspec.json.encode(report).decode()) + "\n")
        return
    show(report, SafeConsole(soft_wrap=False))
    for path in (wanted.html, wanted.bundle):
        if path is not None:
            SafeConsole().print(f"written: {path}", highlight=False, soft_wrap=True)


def read_report(wanted: Wanted) -> Report:
    """Return the report of what was named. Raises `ReportError`."""
    paths = [Path(target) for target in wanted.targets]
    folders = [path for path in paths if path.exists()]
    if not folders:
        if len(paths) > 1:
            missing = ", ".join(str(path) for path in paths)
            raise ReportError(
                f"{missing}: no such files or directories; of one run give the id alone"
            )
        return _from_server(wanted)
    if len(folders) < len(paths):
        missing = ", ".join(str(path) for path in paths if path not in folders)
        raise ReportError(f"{missing}: no such file or directory; give one directory for each node")
    return from_folders(folders, wanted.run_id, _report)


def _report(*of: Any) -> Report:
    from rankscope_server.report.store import report_view

    return report_view(*of)


def _from_server(wanted: Wanted) -> Report:
    path = f"/api/v1/runs/{quote(wanted.targets[0], safe='')}/report"
    try:
        url = read_address(wanted.server).url
        answer = get(
            wanted.server, path, wanted.token,
            timeout_seconds=_TIMEOUT_SECONDS, max_answer_bytes=_MAX_ANSWER_BYTES,
        )  # fmt: skip
    except AddressError as error:
        raise ReportError(str(error)) from error
    except HttpError as error:
        raise ReportError(
            f"{url} does not answer: {error}; is the server up, or did you mean a directory?"
        ) from error
    if answer.status != 200:
        raise ReportError(f"{url}: {_refusal(answer)}")
    try:
        report = msgspec.json.decode(answer.body, type=Report)
    except (msgspec.MsgspecError, ValueError) as error:  # ValueError: not UTF-8
        raise ReportError(f"{url}: the answer is no report of this version: {error}") from error
    return msgspec.structs.replace(report, source=url)


def _refusal(answer: HttpAnswer) -> str:
    if "error" in answer.fields:
        return answer.why()
    return f"status {answer.status}; a server of an older version has no reports"


def from_folders(folders: Sequence[Path], run_id: str, view: Callable[..., _Answer]) -> _Answer:
    """Return what a view, see `store.View`, shows of a run in folders. Raises `ReportError`."""
    try:
        from rankscope_server.report import store
    except ImportError as error:
        raise ReportError(
            f"reading a directory needs the server's packages ({error.name}): "
            "pip install 'rankscope[server]'"
        ) from error
    first = folders[0]
    if (first / store.DATABASE).is_file():
        return store.view_of_database(first, run_id, _SILENT_AFTER_SECONDS, view)
    directories, notes = _run_directories(folders, run_id)
    if not directories:
        return _from_recordings(folders, view)
    run_id = clean_run_id(directories[0].resolve().name)
    run = OfflineRun(directories, run_id)
    return store.view_of_batches(
        run_id,
        run.batches(),
        lambda: run.now_ns,
        lambda: Origin(
            f"run director{'y' if len(directories) == 1 else 'ies'} "
            f"{', '.join(map(str, directories))}",
            (*notes, *run.notes),
            run.is_open_ended,
        ),
        view,
    )


def _from_recordings(paths: Sequence[Path], view: Callable[..., _Answer]) -> _Answer:
    """Return what is seen of what other tools recorded: dumps, traces."""
    from rankscope.importers.batches import batches
    from rankscope_server.importers.recordings import (
        LOOK_AFTER_NS,
        RecordingError,
        newest_ns,
        read_recordings,
    )
    from rankscope_server.report import store

    try:
        recording = read_recordings(paths)
    except RecordingError as error:
        raise ReportError(
            f"{paths[0]}: holds no run: {error}; give a run's directory (it has a folder for each "
            "attempt), the folder that $RANKSCOPE_DIR names, a server's data folder, or dumps "
            "and traces as for rankscope import"
        ) from error
    run_id = clean_run_id(paths[0].resolve().name)
    kinds = ", ".join(recording.formats)
    left_out = tuple(f"left out: {text}" for text in recording.left_out)
    return store.view_of_batches(
        run_id,
        batches(run_id, recording.found),
        lambda: newest_ns(recording.found) + LOOK_AFTER_NS,
        lambda: Origin(f"{', '.join(map(str, paths))} ({kinds})", left_out),
        view,
    )


def _run_directories(folders: Sequence[Path], run_id: str) -> tuple[list[Path], list[str]]:
    """Return the directories of one run, none where there is no run; of several the newest."""
    if all(is_run_directory(folder) for folder in folders):
        return list(folders), []
    inside = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
    runs = sorted(
        (path for path in inside if is_run_directory(path)), key=lambda path: path.stat().st_mtime
    )
    if not runs:
        return [], []
    name = run_id or runs[-1].name
    chosen = [run for run in runs if run.name == name]
    names = list(dict.fromkeys(run.name for run in reversed(runs)))
    if not chosen:
        raise ReportError(f"{folders[0]}: no run {name!r}; it holds {', '.join(names[:8])}")
    notes = []
    if not run_id and len(names) > 1:
        notes.append(
            f"the newest of {len(names)} runs; --run takes another: {', '.join(names[1:9])}"
        )
    return chosen, notes
