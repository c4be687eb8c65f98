"""What the rank writes to stdout and stderr, from the best source that cannot harm it.

The launcher's tee sees every byte. Without it, a stream that is written to a regular file (torchrun
--redirects and --log-dir, Slurm, `> log`) is read there by the collector, C and C++ writers too.
What remains is a terminal or a pipe, where only its owner may read: a pipe of ours in
between would stop the rank when its reader dies. There the writes of Python code are kept.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rankscope.files import journal
from rankscope.files.run_directory import OUTPUTS, is_of_each_process
from rankscope.output.lines import TEE_VARIABLE
from rankscope.output.log_limits import Bucket
from rankscope.rank.context import Context
from rankscope.rank.guard import guarded
from rankscope.rank.hooks.logs import state
from rankscope.wire.redaction import redact

_DESCRIPTORS = dict(zip(journal.STREAMS, (1, 2), strict=True))
MAX_PART = 16_000  # characters of one line without its end
_MAX_BODY = journal.MAX_BODY_BYTES - 100  # bytes of text in one frame
_BYTES_PER_SECOND, _BURST_BYTES = 256 << 10, 2 << 20
_PYTHON_ONLY = "writes of Python code (C and C++ are not seen; use rankscope run, or redirect it)"


class Output:
    """Lines of stdout and stderr, and files that NCCL and torchrun write for this rank."""

    name: ClassVar[str] = "output"
    needs: ClassVar[str] = "sys"

    def install(self, context: Context) -> str:
        """Choose a source for each stream."""
        chosen = {
            name: source_of(descriptor, os.environ) for name, descriptor in _DESCRIPTORS.items()
        }
        for name, source in list(chosen.items()):
            if source == "python":
                chosen[name] = _wrap(context, name)
        files = [
            describe_file(name, descriptor, os.environ)
            for name, descriptor in _DESCRIPTORS.items()
            if chosen[name] == "file"
        ]
        context.on_recorder(lambda context: _announce(context, files))
        words = {"launcher": "rankscope run", "file": "its file, read by the collector"}
        return "; ".join(f"{name}: {words.get(source, source)}" for name, source in chosen.items())


def source_of(descriptor: int, environ: Mapping[str, str]) -> str:
    """Return "launcher", "file", "python" or "closed" for one of our streams."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return "closed"
    tee = environ.get(TEE_VARIABLE, "")
    if stat.S_ISREG(status.st_mode):
        return "launcher" if tee == "files" else "file"
    if tee and not os.path.samestat(status, os.stat(os.devnull)):
        return "launcher"
    return "python"


def describe_file(name: str, descriptor: int, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return where the collector finds a stream, and from which byte on it is this rank's."""
    return {
        "stream": name,
        "path": os.readlink(f"/proc/self/fd/{descriptor}"),
        "offset": os.fstat(descriptor).st_size,
        "is_shared": environ.get("LOCAL_WORLD_SIZE", "1") != "1" and _is_parents(descriptor),
    }


def _is_parents(descriptor: int) -> bool:
    """Return whether the file is the parent's too, and so that of all its ranks."""
    try:
        parents = [os.stat(f"/proc/{os.getppid()}/fd/{number}") for number in _DESCRIPTORS.values()]
    except OSError:
        return True
    return any(os.path.samestat(os.fstat(descriptor), status) for status in parents)


def _announce(context: Context, files: list[dict[str, Any]]) -> None:
    """Announce to the collector which files it should read for this rank."""
    assert context.recorder is not None
    who = context.recorder.identity
    # a file that all ranks of the node share is announced by the first one
    announced = [file for file in files if not (file["is_shared"] and who.local_rank)]
    paths = {file["path"] for file in announced}
    if len(paths) < len(announced):  # 2>&1: one file, read once
        announced = announced[:1]
    if path := os.environ.get("NCCL_DEBUG_FILE"):
        path = path.replace("%h", socket.gethostname()).replace("%p", str(who.pid))
        path = os.path.abspath(path)
        if not is_of_each_process(path):  # /dev/stdout is one of the streams above
            announced.append({
                "stream": "stdout", "path": path, "offset": 0, "logger": "nccl",
                "is_shared": "%p" not in os.environ["NCCL_DEBUG_FILE"],
            })  # fmt: skip
    text = json.dumps(
        {"files": announced, "error_file": os.environ.get("TORCHELASTIC_ERROR_FILE", "")}
    )
    path_of_text: Path = context.recorder.directory / OUTPUTS
    path_of_text.write_text(text)


def _wrap(context: Context, name: str) -> str:
    """Keep what is written to a stream of Python; the stream itself stays what it is."""
    stream = getattr(sys, name)
    if stream is None or not hasattr(stream, "write"):
        return "none"
    original = stream.write
    take = Writes(context, name).take

    def write(*args: Any, **kwargs: Any) -> Any:  # a stream of the script's own may take more
        result = original(*args, **kwargs)
        if args:
            take(args[0])
        return result

    try:
        context.patch(stream, "write", write)
    except (AttributeError, TypeError):
        return "skipped: this stream cannot be watched"
    return _PYTHON_ONLY


class Writes:
    """Takes the writes of one stream apart into lines and appends them to the journal."""

    def __init__(self, context: Context, stream: str) -> None:
        self._context = context
        self._stream = stream
        self._index = [str(known) for known in journal.STREAMS].index(stream)
        self._parts: list[str] = []
        self._bucket = Bucket(_BURST_BYTES, _BYTES_PER_SECOND, time.monotonic())
        self._suppressed = 0

    @guarded
    def take(self, text: Any) -> None:
        """Take in one write; what logging or warnings print is in the record already."""
        recorder = self._context.recorder
        if recorder is None or getattr(state, "recorded", False) or not isinstance(text, str):
            return
        parts = self._parts
        parts.append(text)
        if "\n" not in text and len(text) < MAX_PART:
            if text.startswith("\r"):  # a progress bar draws itself anew
                del parts[:-1]
            elif len(parts) > 200:
                parts[:] = ["".join(parts)[-MAX_PART:]]
            return
        taken = parts[:]
        del parts[: len(taken)]  # another thread may have appended meanwhile
        whole, end, rest = "".join(taken).rpartition("\n")
        if not end:
            whole, rest = rest, ""
        if rest:
            parts.insert(0, rest)
        self._append(recorder, whole)

    def _append(self, recorder: Any, whole: str) -> None:
        if len(whole) > _MAX_BODY:  # at white space, as half a secret is not known for one
            whole = next(iter(whole[:_MAX_BODY].rsplit(None, 1)), "")
        num_bytes = len(whole.encode(errors="replace"))
        if not self._bucket.take(time.monotonic(), num_bytes + journal.OUTPUT_HEAD.size):
            self._suppressed += whole.count("\n") + 1
            recorder.count_drop("too many alike")
            return
        data = redact(whole).encode(errors="replace")[:_MAX_BODY]
        if self._suppressed:
            self._report()
        head = journal.OUTPUT_HEAD.pack(time.time_ns(), recorder.step & 0xFFFFFFFF, self._index)
        if not recorder.journal.append(journal.OUTPUT, head + data):
            recorder.count_drop("journal full")

    def _report(self) -> None:
        count, self._suppressed = self._suppressed, 0
        message = f"suppressed {count:,} lines of {self._stream}: too many at once"
        fields = {"suppressed": str(count)}
        self._context.log_line(logging.WARNING, message, stream="agent", fields=fields)
