"""Reports through a directory that all nodes see: one file each, replaced in one step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

import msgspec

from rankscope.preflight.exchange.blocking import in_thread
from rankscope.preflight.exchange.carrier import CarrierError
from rankscope.preflight.model import NodeReport, decode_report, encode

LIMIT_S = 3.0  # of one exchange: a hung network disk is reported, and tried again
TOUCH_S = 5.0  # an agent that lives writes its file at least so often
# A file not written for so long is from an earlier preflight: an agent that lives is twelve
# times as quick, and the caches of NFS hide a change for up to 30 s (nfs(5), acdirmin).
STALE_S = 60.0
_MAX_REPORT_BYTES = 64 * 2**20  # 1,000 nodes: 24 kB
_OVER = ".left"  # a mark beside a report: its node has read all that it wanted


class ShareCarrier:
    """A directory; ages are those of the file server, so that no clock has to agree."""

    name: ClassVar[str] = "share"

    def __init__(self, directory: str | Path, run_id: str) -> None:
        self._directory = Path(directory) / f"rankscope-preflight-{quote(run_id, safe='')}"
        self._shown = str(directory)
        self._written: tuple[int, float] = (-1, 0.0)  # version, time of the file server
        self._read: dict[str, tuple[tuple[int, int, int], NodeReport]] = {}  # by file
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
        reports = [namesake] if namesake is not None else []
        for path in sorted(self._directory.glob("*.json")):
            if path.name == self._own:
                continue
            with contextlib.suppress(FileNotFoundError):  # its node has just left
                report = self._news(path, now)
                if report is not None and report.version > have.get(report.node, -1):
                    reports.append(report)
        self._is_first = False
        return reports

    def _namesake(self, mine: NodeReport) -> NodeReport | None:
        """Return the report of another agent of our name, which has replaced our file."""
        path = self._directory / self._own
        try:
            stat = path.stat()
        except FileNotFoundError:
            return None
        if self._is_first or stat.st_ino == self._inode:
            return None
        report = _decoded(path, stat.st_size)
        is_other = report is not None and report.started_unix_s != mine.started_unix_s
        return report if is_other else None

    def _write(self, mine: NodeReport) -> float:
        """Replace our file if it is due; return the file server's time."""
        self._own = f"{quote(mine.node, safe='')}.json"
        path = self._directory / self._own
        probe = self._directory / f".{self._own}.{os.getpid()}"
        self._directory.mkdir(parents=True, exist_ok=True)
        version, at = self._written
        probe.touch()
        now = probe.stat().st_mtime
        if mine.version == version and now - at < TOUCH_S and path.exists():
            probe.unlink()
            return now
        probe.write_bytes(encode(mine))
        (self._directory / f"{self._own}{_OVER}").unlink(missing_ok=True)
        probe.replace(path)
        self._written, self._inode = (mine.version, now), path.stat().st_ino
        return now

    def _news(self, path: Path, now: float) -> NodeReport | None:
        """Return the report if it belongs to this preflight; unchanged files are not read."""
        stat = path.stat()
        if now - stat.st_mtime > STALE_S:
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}{_OVER}").unlink(missing_ok=True)
            return None
        mark = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        known, report = self._read.get(path.name, (None, None))
        if report is None or known != mark:
            report = _decoded(path, stat.st_size)
            if report is None:
                return None
            self._read[path.name] = (mark, report)
        # a node cannot be done before it has met us: this is its report of the last time
        if self._is_first and (report.stage == "done" or report.is_leaving):
            self._old.add((report.node, report.started_unix_s))
        return None if (report.node, report.started_unix_s) in self._old else report

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


def _decoded(path: Path, size: int) -> NodeReport | None:
    """Return the report; None if another version of this program wrote it."""
    if size > _MAX_REPORT_BYTES:
        return None
    try:
        return decode_report(path.read_bytes())
    except msgspec.MsgspecError:
        return None
