"""Reports as lines of JSON on stdin and stdout: how an agent talks to the one that started it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import BinaryIO, ClassVar

import msgspec

from rankscope.preflight.exchange.blocking import in_thread
from rankscope.preflight.exchange.carrier import CarrierError
from rankscope.preflight.model import NodeReport, decode_report, encode

WRITE_LIMIT_S = 3.0


class LineCarrier:
    """The agent's end of a pipe: writes each new report of ours, reads those of the others."""

    name: ClassVar[str] = "lines"

    def __init__(
        self, reading: BinaryIO, writing: BinaryIO, on_end: Callable[[], None] = lambda: None
    ) -> None:
        self._reading, self._writing, self._on_end = reading, writing, on_end
        self._sent = -1
        self._got: dict[str, NodeReport] = {}
        self._has_ended = False
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="preflight-lines", daemon=True).start()

    async def exchange(self, mine: NodeReport, have: Mapping[str, int]) -> list[NodeReport]:
        """Write our report if it is new; return what came since. Raises CarrierError."""
        if mine.version > self._sent:
            try:
                await in_thread(lambda: self._write(mine), WRITE_LIMIT_S)
            except (OSError, TimeoutError) as error:
                text = f"the one that started this agent does not read its reports: {error}"
                raise CarrierError(text) from error
            self._sent = mine.version
        with self._lock:
            got = list(self._got.values())
        if self._has_ended and not got:
            raise CarrierError("the one that started this agent is gone")
        return [report for report in got if report.version > have.get(report.node, -1)]

    async def close(self) -> None:
        """Nothing to leave behind: the pipe belongs to the one that started us."""

    def _write(self, mine: NodeReport) -> None:
        self._writing.write(encode(mine) + b"\n")
        self._writing.flush()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed while it was being read
            for line in self._reading:
                with contextlib.suppress(msgspec.MsgspecError):
                    report = decode_report(line)
                    with self._lock:
                        self._got[report.node] = report
        self._has_ended = True
        self._on_end()
