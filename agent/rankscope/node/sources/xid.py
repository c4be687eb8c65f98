"""Xid errors and uncorrectable ECC errors, as the NVIDIA driver reports them through NVML."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from rankscope.node.sources.base import Limiter, Row, Skipped
from rankscope.node.sources.machine import Lane, Machine, SampleSource
from rankscope.wire.nvidia_codes import xid_words
from rankscope.wire.schema import ChunkKind

_MAX_EVENTS, _PER_SECONDS = 60, 60.0
_MAX_WAITS = 200  # in one turn


class XidSource(SampleSource):
    """Xid errors and uncorrectable ECC errors, from the events of NVML."""

    name: ClassVar[str] = "xid"
    kind: ClassVar[ChunkKind | None] = None
    lane: ClassVar[Lane] = "driver"
    every: ClassVar[int] = 1

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._set: Any = None
        self._limiter = Limiter(_MAX_EVENTS, _PER_SECONDS)

    def open(self) -> None:
        """Register for the events. Raises Skipped where no GPU offers them."""
        nvml = self._machine.nvml
        nvml.open()
        module = nvml.module
        wanted = module.nvmlEventTypeXidCriticalError | module.nvmlEventTypeDoubleBitEccError
        try:
            if self._set is not None:
                module.nvmlEventSetFree(self._set)
            self._set = module.nvmlEventSetCreate()
        except module.NVMLError as error:
            self._set = None
            raise Skipped(f"NVML: {error}") from error
        registered, why = 0, "it offers no events"
        for gpu in nvml.gpus:
            offered = nvml.ask(gpu, "SupportedEventTypes") or 0
            if not offered & wanted:
                continue
            try:
                module.nvmlDeviceRegisterEvents(gpu.handle, offered & wanted, self._set)
                registered += 1
            except module.NVMLError as error:
                why = str(error)
        if not registered:
            raise Skipped(f"NVML: {why}")

    def sample(self) -> Iterable[Row]:
        """Report what happened since the last call, without waiting; there are no rows."""
        module = self._machine.nvml.module
        for _ in range(_MAX_WAITS):
            try:
                event = module.nvmlEventSetWait_v2(self._set, 0)
            except module.NVMLError as error:
                if error.value == module.NVML_ERROR_TIMEOUT:  # nothing more
                    return ()
                raise Skipped(f"NVML: {error}") from error
            self._report(event)
        return ()

    def _report(self, event: Any) -> None:
        if not self._limiter.passes():
            return
        module = self._machine.nvml.module
        fields = {"seen_in": "NVML"}
        try:
            fields["gpu"] = str(module.nvmlDeviceGetIndex(event.device))
        except module.NVMLError:
            fields["gpu"] = "unknown"  # a GPU that fell off the bus has lost its number
        if suppressed := self._limiter.take_suppressed():
            fields["suppressed_before"] = str(suppressed)
        if event.eventType & module.nvmlEventTypeXidCriticalError:
            number = int(event.eventData)
            fields |= {"number": str(number), "meaning": xid_words(number)}
            self._machine.report_of("xid", {name: text for name, text in fields.items() if text})
        else:
            self._machine.report_of("gpu ecc error", fields | {"kind": "uncorrectable"})
