"""Reports through a directory that all nodes see: one file each, replaced in one step.

Others may write there too. So each file is signed with the run's secret, and holds a number that
this agent drew and those that it has read of the others: a report counts for us only once its
author has shown our own number, which no file of an earlier preflight can.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote, unquote

import msgspec

from rankscope.preflight.exchange.blocking import in_thread
from rankscope.preflight.exchange.carrier import CarrierError
from rankscope.preflight.exchange.intake import name
from rankscope.preflight.key import RunKey, tag
from rankscope.preflight.model import NodeReport

LIMIT_S = 3.0  # of one exchange: a hung network disk is reported, and tried again
TOUCH_S = 5.0  # an agent that lives writes its file at least so often
# A file not written for so long is from an earlier preflight: an agent that lives is twelve
# times as quick, and the caches of NFS hide a change for up to 30 s (nfs(5), acdirmin).
STALE_S = 60.0
_MAX_REPORT_BYTES = 64 * 2**20  # 1,000 nodes: 24 kB
_MARK_BYTES = 64
_MOST_NAMED = 6
_OVER = ".left"  # a mark beside a report: its node has read all that it wanted


class _File(msgspec.Struct, frozen=True):
    report: NodeReport
    number: str  # that its author drew
    shown: dict[str, str]  # by node: the number that its author has read


_FILES = msgspec.json.Decoder(_File)  # at import: two first users at once crash msgspec


class ShareCarrier:
    """A directory; ages are those of the file server, so that no clock has to agree."""

    name: ClassVar[str] = "share"

    def __init__(self, directory: str | Path, key: RunKey) -> None:
        self._directory = Path(directory) / f"rankscope-preflight-{quote(key.run_id, safe='')}"
        self._key = key.derived("share")
        self._number = secrets.token_hex(16)
        self._shown_by: dict[str, str] = {}  # by node: the number in its newest file
        self._foreign: set[str] = set()  # files of one who has another secret
        self._is_reported = False
        self._begun = math.inf  # time of the file server at our first exchange
        self._shown = str(directory)
        self._written: tuple[object, float] = ((), 0.0)  # what, time of the file server
        self._read: dict[str, tuple[tuple[int, int, int], _File]] = {}  # by file
        self._old: set[tuple[str, float]] = set()  # (node, started) of an earlier preflight
        self._own, self._inode = "", 0  # of our file
        self._is_first = True

    async def exchange(self, mine: NodeReport, have: Mapping[str, int]) -> list[NodeReport]:
        """Write our report and read the others'. Raises CarrierError."""
        return await self._limited(lambda: self._exchange(mine, have))

    async def close(self) -> None:
        """Say that we are done; the last one to leave removes the directory."""
        with contextlib.suppress(CarrierError):
            await self._limited(self._leave)

    async def _limited(self, call: Callable[[], list[NodeReport]]) -> list[NodeReport]:
        try:
            return await in_thread(call, LIMIT_S)
        except TimeoutError as error:
            text = f"{self._shown} does not answer in {LIMIT_S:g} s: is the network disk there?"
            raise CarrierError(text) from error
        except OSError as error:
            raise CarrierError(f"{self._shown}: {error.strerror or error}") from error

    def _exchange(self, mine: NodeReport, have: Mapping[str, int]) -> list[NodeReport]:
        namesake = self._namesake(mine)
        now = self._write(mine)
        self._begun = min(self._begun, now)
        reports = [namesake] if namesake is not None else []
        for path in sorted(self._directory.glob("*.json")):
            if path.name == self._own:
                continue
            with contextlib.suppress(FileNotFoundError):  # its node has just left
                report = self._news(path, now)
                if report is not None and report.version > have.get(report.node, -1):
                    reports.append(report)
        self._write(mine)  # at once, if there are numbers to show
        self._is_first = False
        self._report()
        return reports

    def _report(self) -> None:
        """Say once whose reports are not believed. Raises CarrierError."""
        if self._foreign and not self._is_reported:
            self._is_reported = True
            files = sorted(map(unquote, self._foreign))
            named = [one for one in files if name(one) == one][:_MOST_NAMED]  # others are no nodes
            more = f" and {len(files) - len(named)} more" if len(named) < len(files) else ""
            names = f"{', '.join(named) or 'files'}{more}"
            raise CarrierError(
                f"{self._shown}: written with another secret, and not believed: {names}"
            )

    def _namesake(self, mine: NodeReport) -> NodeReport | None:
        """Return the report of another agent of our name, which has replaced our file."""
        path = self._directory / self._own
        try:
            stat = path.stat()
        except FileNotFoundError:
            return None
        if self._is_first or stat.st_ino == self._inode:
            return None
        found = self._decoded(path, stat.st_size)
        if found is None or found.report.started_unix_s == mine.started_unix_s:
            return None
        return found.report if self._is_fresh(found) else None

    def _is_fresh(self, found: _File) -> bool:
        """Return whether the author of a file has read ours."""
        self._shown_by[found.report.node] = found.number
        return found.shown.get(unquote(self._own.removesuffix(".json"))) == self._number

    def _write(self, mine: NodeReport) -> float:
        """Replace our file if it is due; return the file server's time."""
        self._own = f"{quote(mine.node, safe='')}.json"
        path = self._directory / self._own
        probe = self._directory / f".{self._own}.{os.getpid()}"
        self._directory.mkdir(parents=True, exist_ok=True)
        what, at = (mine.version, dict(self._shown_by)), self._written[1]
        probe.touch()
        now = probe.stat().st_mtime
        if what == self._written[0] and now - at < TOUCH_S and path.exists():
            probe.unlink()
            return now
        data = msgspec.json.encode(_File(mine, self._number, self._shown_by))
        probe.write_bytes(self._signed(data, path.name))
        (self._directory / f"{self._own}{_OVER}").unlink(missing_ok=True)
        probe.replace(path)
        self._written, self._inode = (what, now), path.stat().st_ino
        return now

    def _news(self, path: Path, now: float) -> NodeReport | None:
        """Return the report if it belongs to this preflight; unchanged files are not read."""
        stat = path.stat()
        if now - stat.st_mtime > STALE_S:
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}{_OVER}").unlink(missing_ok=True)
            return None
        mark = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        known, found = self._read.get(path.name, (None, None))
        if found is None or known != mark:
            found = self._decoded(path, stat.st_size)
            if found is None:
                return None
            self._read[path.name] = (mark, found)
        report = found.report
        # a node cannot be done before it has met us: this is its report of the last time
        if self._is_first and (report.stage == "done" or report.is_leaving):
            self._old.add((report.node, report.started_unix_s))
        is_old = (report.node, report.started_unix_s) in self._old
        return report if not is_old and self._is_fresh(found) else None

    def _leave(self) -> list[NodeReport]:
        if not self._own or not (self._directory / self._own).exists():
            return []
        (self._directory / f"{self._own}{_OVER}").touch()
        names = {path.name for path in self._directory.iterdir()}
        reports = {name for name in names if name.endswith(".json")}
        if all(f"{name}{_OVER}" in names for name in reports):
            for name in names:
                (self._directory / name).unlink(missing_ok=True)
            self._directory.rmdir()
        return []

    def _decoded(self, path: Path, size: int) -> _File | None:
        """Return what is in a file; None if a stranger or another version wrote it."""
        if size > _MAX_REPORT_BYTES:
            return None
        data = _read(path)
        report = data[: -_MARK_BYTES - 1]
        if not hmac.compare_digest(self._signed(report, path.name), data):
            if path.stat().st_mtime > self._begun:  # of an agent that lives
                self._foreign.add(path.stem)
            return None
        self._foreign.discard(path.stem)
        try:
            found = _FILES.decode(report)
        except msgspec.MsgspecError:
            return None
        return found if f"{quote(found.report.node, safe='')}.json" == path.name else None

    def _signed(self, report: bytes, name: str) -> bytes:
        """Return the content of a file: the report, and a line that proves who may write it."""
        return report + b"\n" + tag(self._key, name, report).hex().encode()


def _read(path: Path) -> bytes:
    """Read a file of a directory in which others may write: through no link, from no device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(descriptor, "rb") as file:
        return file.read(_MAX_REPORT_BYTES + 1)
