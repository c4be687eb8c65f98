"""Traffic and errors of each NVLink of each GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rankscope.node.sources.base import Row, Skipped
from rankscope.node.sources.machine import Lane, Machine, SampleSource
from rankscope.node.sources.nvml import Gpu
from rankscope.wire.schema import ChunkKind

_KIB = 1 << 10
# field (NVML_FI_DEV_...), asked for each link -> column and factor
_FIELDS: dict[str, tuple[str, int]] = {
    "NVLINK_THROUGHPUT_DATA_TX": ("sent_bytes_total", _KIB),
    "NVLINK_THROUGHPUT_DATA_RX": ("received_bytes_total", _KIB),
    "NVLINK_GET_SPEED": ("speed_bytes_per_second", 10**6),
    "NVLINK_ERROR_DL_CRC": ("crc_errors_total", 1),
    "NVLINK_ERROR_DL_REPLAY": ("replay_errors_total", 1),
    "NVLINK_ERROR_DL_RECOVERY": ("recovery_errors_total", 1),
}
# what GPUs before Hopper answer: column -> counter
_OLDER = {
    "crc_errors_total": "NVML_NVLINK_ERROR_DL_CRC_FLIT",
    "replay_errors_total": "NVML_NVLINK_ERROR_DL_REPLAY",
    "recovery_errors_total": "NVML_NVLINK_ERROR_DL_RECOVERY",
}
_MAX_LINKS = 36


class NvlinkSource(SampleSource):
    """State, traffic and errors of each NVLink of each GPU."""

    name: ClassVar[str] = "nvlink"
    kind: ClassVar[ChunkKind | None] = "nvlink"
    lane: ClassVar[Lane] = "driver"
    every: ClassVar[int] = 5

    def __init__(self, machine: Machine) -> None:
        self._nvml = machine.nvml
        self._links: dict[int, list[int]] = {}  # of each GPU

    def open(self) -> None:
        """Find the links. Raises Skipped where no GPU has one."""
        self._nvml.open()
        for gpu in self._nvml.gpus:
            count = self._nvml.fields(gpu, [("NVLINK_LINK_COUNT", 0)])[0]
            most = _MAX_LINKS if count is None else min(int(count), _MAX_LINKS)
            links = []
            for link in range(most):
                if self._nvml.ask(gpu, "NvLinkState", link) is None:
                    break
                links.append(link)
            self._links[gpu.index] = links
        if not any(self._links.values()):
            raise Skipped("no GPU of this node has an NVLink")

    def sample(self) -> Iterable[Row]:
        """Return one row for each link."""
        return [row for gpu in self._nvml.gpus for row in self._rows(gpu)]

    def _rows(self, gpu: Gpu) -> list[Row]:
        links = self._links.get(gpu.index, [])
        wanted = [(name, link) for link in links for name in _FIELDS]
        answers = dict(zip(wanted, self._nvml.fields(gpu, wanted), strict=True))
        rows: list[Row] = []
        for link in links:
            row: dict[str, float | str] = {"gpu": gpu.index, "link": link}
            state = self._nvml.ask(gpu, "NvLinkState", link)
            if state is not None:
                row["is_up"] = int(state)
            for name, (column, factor) in _FIELDS.items():
                value = answers[name, link]
                if value is not None:
                    row[column] = int(value) * factor
            for column, counter in _OLDER.items():
                if column not in row:
                    value = self._nvml.ask(gpu, "NvLinkErrorCounter", link, counter)
                    if value is not None:
                        row[column] = int(value)
            rows.append(row)
        return rows
