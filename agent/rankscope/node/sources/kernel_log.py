"""The kernel's log: Xid errors, processes killed for memory, hung tasks, hardware errors.

Reads /dev/kmsg, else follows the journal. Only what is logged from now on is reported. A process id
in the log is that of the host: within a container it may name another process, or none.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from typing import ClassVar

from rankscope.node.sources.base import Limiter, Row, Skipped
from rankscope.node.sources.machine import Lane, Machine, SampleSource
from rankscope.wire.nvidia_codes import xid_words
from rankscope.wire.redaction import redact
from rankscope.wire.schema import ChunkKind

_READ_BYTES = 1 << 16  # a record has at most 8 KiB; a smaller buffer gets EINVAL
_MAX_READS = 1000  # in one turn
_MAX_EVENTS, _PER_SECONDS = 60, 60.0
_MAX_TEXT = 1000
_JOURNAL = ("--dmesg", "--follow", "--lines=0", "--output=json",
            "--output-fields=MESSAGE,__REALTIME_TIMESTAMP")  # fmt: skip
_PCI = r"\(PCI:(?P<pci>[0-9a-fA-F:.]+)\)"
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("xid", re.compile(rf"NVRM: Xid {_PCI}: (?P<number>\d+)(?:, pid='?(?P<pid>\d+))?")),
    ("switch xid", re.compile(rf"SXid {_PCI}: (?P<number>\d+)")),
    ("oom kill", re.compile(r"Killed process (?P<pid>\d+) \((?P<process>[^)]*)\)")),
    ("task hung", re.compile(r"task (?P<process>.*?):(?P<pid>\d+) blocked for more than \d+ s")),
    ("segmentation fault", re.compile(r"(?P<process>\S+)\[(?P<pid>\d+)\]: segfault at ")),
    ("hardware error", re.compile(r"\[Hardware Error\]|EDAC .*\b[CU]E\b|AER: .*error", re.I)),
    ("link down", re.compile(r"(?P<device>\S+):? (?:NIC )?Link is Down", re.I)),
)


class KernelLogSource(SampleSource):
    """Xid errors, kills for memory, hung tasks, hardware errors, from /dev/kmsg or the journal."""

    name: ClassVar[str] = "kernel-log"
    kind: ClassVar[ChunkKind | None] = None
    lane: ClassVar[Lane] = "kernel"
    every: ClassVar[int] = 1

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._descriptor = -1
        self._journal: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._limiter = Limiter(_MAX_EVENTS, _PER_SECONDS)

    def open(self) -> None:
        """Begin at the end of the log. Raises Skipped where neither log can be read."""
        self.close()
        try:
            self._descriptor = os.open(
                self._machine.kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError as error:
            self._open_journal(f"{self._machine.kernel_log}: {error.strerror}")
            return
        with contextlib.suppress(OSError):  # a pipe cannot be sought
            os.lseek(self._descriptor, 0, os.SEEK_END)

    def _open_journal(self, why: str) -> None:
        command = shutil.which("journalctl")
        if command is None:
            raise Skipped(f"{why}; there is no journalctl either")
        self._journal = subprocess.Popen(
            [command, *_JOURNAL],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self._journal.stdout is not None
        self._descriptor = self._journal.stdout.fileno()
        os.set_blocking(self._descriptor, False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._journal.wait(0.2)  # it ends at once where it may not read
            self._check_journal(why)

    def _check_journal(self, why: str) -> None:
        journal = self._journal
        if journal is None or journal.poll() is None:
            return
        _, said = journal.communicate()
        self.close()
        text = said.decode(errors="replace").strip().splitlines()
        raise Skipped(f"{why}; journalctl: {text[-1] if text else 'it ended'}")

    def close(self) -> None:
        """End the journal's process, if there is one."""
        if self._journal is not None:
            self._journal.kill()
            self._journal.communicate()
            self._journal = None
        elif self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._rest = b""

    def sample(self) -> Iterable[Row]:
        """Report what was logged since the last call; there are no rows."""
        self._check_journal("the journal cannot be followed")
        for line in self._lines():
            time_ns, text = self._parse(line)
            if text:
                self._look_at(text, time_ns)
        return ()

    def _lines(self) -> Iterator[bytes]:
        """Yield whole lines; a record of /dev/kmsg is one line, with further ones behind it."""
        for _ in range(_MAX_READS):
            try:
                data = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EPIPE:  # EPIPE: records were overwritten, go on
                    raise
                continue
            if not data:
                return
            *whole, self._rest = (self._rest + data).split(b"\n")
            self._rest = self._rest[-_READ_BYTES:]
            yield from whole

    def _parse(self, line: bytes) -> tuple[int, str]:
        """Return time and text of a record; an empty text for what is none."""
        if self._journal is not None:
            try:
                entry = json.loads(line)
                text, when = entry["MESSAGE"], int(entry["__REALTIME_TIMESTAMP"]) * 1000
            except (ValueError, KeyError, TypeError):
                return 0, ""
            return when, text if isinstance(text, str) else ""
        # "6,1234,5678901,-;text": priority, number, microseconds since boot
        head, found, text = line.decode(errors="replace").partition(";")
        fields = head.split(",")
        if not found or len(fields) < 4 or not fields[2].isdecimal() or line.startswith(b" "):
            return 0, ""
        age_ns = time.monotonic_ns() - int(fields[2]) * 1000
        return self._machine.wall_ns() - max(age_ns, 0), text

    def _look_at(self, text: str, time_ns: int) -> None:
        for name, pattern in _PATTERNS:
            match = pattern.search(text)
            if match is None:
                continue
            if not self._limiter.passes():
                return
            fields = {key: value for key, value in match.groupdict().items() if value}
            fields |= {"seen_in": "kernel log", "text": redact(text[:_MAX_TEXT])}
            if name == "xid":
                fields |= self._xid(fields)
            if suppressed := self._limiter.take_suppressed():
                fields["suppressed_before"] = str(suppressed)
            self._machine.report_of(name, fields, int(fields.get("pid", 0)), time_ns)
            return

    def _xid(self, fields: dict[str, str]) -> dict[str, str]:
        more = {"meaning": xid_words(int(fields["number"]))}
        index = self._machine.nvml.index_of(fields["pci"])
        if index is not None:
            more["gpu"] = str(index)
        return {name: value for name, value in more.items() if value}
