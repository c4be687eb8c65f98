"""The NVIDIA management library, opened once for all sources that ask it.

A question that a GPU or a driver does not answer is None; one that it will never answer is not
asked again. The library runs no code on the GPU and makes no context there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rankscope.node.sources.base import Skipped

_BUS_ID = re.compile(r"([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)")
_MAX_GPUS = 64


@dataclass(frozen=True)
class Gpu:
    """One GPU of the node, whichever of them the ranks may see."""

    index: int  # NVML's order, that of nvidia-smi
    handle: Any
    name: str
    uuid: str
    bus_id: str


class Nvml:
    """The library and its GPUs. `module` is pynvml unless a test gives another."""

    def __init__(self, module: Any = None) -> None:
        self._module = module
        self._never: set[tuple[int, str, tuple[Any, ...]]] = set()
        self.driver = ""
        self.gpus: list[Gpu] = []

    def open(self) -> None:
        """Find the GPUs, unless that is done. Raises Skipped where there is none."""
        if self.gpus:
            return
        self._module = self._module or _import_pynvml()
        try:
            self._module.nvmlInit()
            count = min(self._module.nvmlDeviceGetCount(), _MAX_GPUS)
            self.driver = str(self._module.nvmlSystemGetDriverVersion())
            self.gpus = [self._gpu(index) for index in range(count)]
        except self._module.NVMLError as error:
            self.gpus = []
            raise Skipped(f"NVML: {error}") from error
        if not self.gpus:
            raise Skipped("NVML finds no GPU")

    def _gpu(self, index: int) -> Gpu:
        module = self._module
        handle = module.nvmlDeviceGetHandleByIndex(index)
        bus_id = module.nvmlDeviceGetPciInfo(handle).busId
        return Gpu(
            index=index,
            handle=handle,
            name=str(module.nvmlDeviceGetName(handle)),
            uuid=str(module.nvmlDeviceGetUUID(handle)),
            bus_id=bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id),
        )

    def ask(self, gpu: Gpu, question: str, *arguments: Any) -> Any:
        """Return the answer of nvmlDeviceGet<question>, None where there is none.

        An argument may be the name of a constant. Raises Skipped if the driver went away.
        """
        return self.call(gpu, f"nvmlDeviceGet{question}", *arguments)

    def call(self, gpu: Gpu, name: str, *arguments: Any) -> Any:
        """Return what a function of NVML returns for this GPU, None where it does not answer."""
        key = (gpu.index, name, arguments)
        if key in self._never:
            return None
        module = self._module
        try:
            values = [
                getattr(module, value) if isinstance(value, str) else value for value in arguments
            ]
            return getattr(module, name)(gpu.handle, *values)
        except AttributeError:  # a pynvml that is older than the question
            self._never.add(key)
        except module.NVMLError as error:
            if error.value in (
                module.NVML_ERROR_UNINITIALIZED,
                module.NVML_ERROR_DRIVER_NOT_LOADED,
            ):
                self.gpus = []
                raise Skipped(f"NVML: {error}") from error
            if error.value in (
                module.NVML_ERROR_NOT_SUPPORTED, module.NVML_ERROR_FUNCTION_NOT_FOUND,
                module.NVML_ERROR_NO_PERMISSION, module.NVML_ERROR_INVALID_ARGUMENT,
            ):  # fmt: skip
                self._never.add(key)
        return None

    def fields(self, gpu: Gpu, wanted: list[tuple[str, int]]) -> list[int | float | None]:
        """Return values by (constant without NVML_FI_DEV_, scope); None for what is not known."""
        numbers = [(self._field(name), scope) for name, scope in wanted]
        known = [pair for pair in numbers if pair[0] is not None]
        key = (gpu.index, "fields", tuple(known))
        answers: dict[Any, int | float | None] = {}
        if known and key not in self._never:
            try:
                found = self._module.nvmlDeviceGetFieldValues(gpu.handle, known)
                answers = {pair: _value(one) for pair, one in zip(known, found, strict=True)}
            except self._module.NVMLError:
                self._never.add(key)
        return [answers.get(pair) for pair in numbers]

    def _field(self, name: str) -> int | None:
        number = getattr(self._module, f"NVML_FI_DEV_{name}", None)
        return None if number is None else int(number)

    @property
    def module(self) -> Any:
        """pynvml itself, for what has no simple question."""
        return self._module

    def index_of(self, bus_id: str) -> int | None:
        """Return the number of the GPU at a PCI address as the kernel writes it, if known."""
        wanted = _address(bus_id)
        found = (gpu.index for gpu in self.gpus if _address(gpu.bus_id) == wanted)
        return next(found, None) if wanted else None


def _address(bus_id: str) -> tuple[int, ...]:
    match = _BUS_ID.match(bus_id)
    return tuple(int(part, 16) for part in match.groups()) if match else ()


def _value(field: Any) -> int | float | None:
    """Return the number of one field value; its type says which part of the union holds it."""
    if field.nvmlReturn != 0:
        return None
    parts = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    if not 0 <= field.valueType < len(parts):
        return None
    value: int | float = getattr(field.value, parts[field.valueType])
    return value


def _import_pynvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise Skipped(f"pynvml cannot be imported: {error}") from error
    return pynvml
