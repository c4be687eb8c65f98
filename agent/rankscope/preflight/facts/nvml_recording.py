"""NVML played from a file: the same questions, recorded answers.

The file is JSON: `system` holds answers of functions without a GPU, `gpus` one object per GPU, by
name of the function, "nvmlDeviceGetClockInfo(1)" where an argument matters. An answer is a value,
{"error": "GPU_IS_LOST"}, or {"fields": {...}} for a structure; what is absent is NOT_SUPPORTED.
{"like": 0} begins with the answers of another GPU. Constants and errors are those of pynvml.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

_STRUCTURES = {"nvmlDeviceGetGpuFabricInfoV"}  # the answer goes into what the caller hands in


class Recording:
    """Stands in for the module pynvml."""

    def __init__(self, path: str) -> None:
        recorded = json.loads(Path(path).read_text())
        self._system: dict[str, Any] = recorded.get("system", {})
        self._gpus: list[dict[str, Any]] = []
        for gpu in recorded.get("gpus", []):
            like = self._gpus[gpu["like"]] if "like" in gpu else {}
            self._gpus.append(like | gpu)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("nvmlDeviceGet", "nvmlSystemGet", "nvmlInit")):
            return self._answer(name)
        return getattr(pynvml, name)

    def nvmlDeviceGetCount(self) -> int:
        """Return the number of GPUs."""
        return int(_value(self._system.get("nvmlDeviceGetCount", len(self._gpus))))

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        """Return the index as the handle; raises what is recorded for it."""
        _value(self._gpus[index].get("nvmlDeviceGetHandleByIndex", 0))
        return index

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        """Return the index."""
        return handle

    def nvmlDeviceGetFieldValues(self, handle: int, numbers: list[int]) -> list[SimpleNamespace]:
        """Return what is recorded by number of the field."""
        recorded = self._gpus[handle].get("nvmlDeviceGetFieldValues", {})
        return [
            SimpleNamespace(
                nvmlReturn=0 if str(number) in recorded else pynvml.NVML_ERROR_NOT_SUPPORTED,
                value=SimpleNamespace(uiVal=recorded.get(str(number), 0)),
            )
            for number in numbers
        ]

    def _answer(self, name: str) -> Callable[..., Any]:
        def answer(*arguments: Any) -> Any:
            if name == "nvmlInit":
                return _value(self._system.get(name, 0))
            if name.startswith("nvmlSystem"):
                return _value(self._system.get(name, {"error": "NOT_SUPPORTED"}))
            recorded = self._gpus[arguments[0]]
            if name in _STRUCTURES:
                return _fill(arguments[1].contents, recorded.get(name))
            exact = f"{name}({','.join(map(str, arguments[1:]))})"
            return _value(recorded.get(exact, recorded.get(name, {"error": "NOT_SUPPORTED"})))

        return answer


def _fill(structure: Any, recorded: Any) -> int:
    for name, value in (recorded or {"error": "NOT_SUPPORTED"}).items():
        if name == "error":
            _value(recorded)
        setattr(structure, name, value)
    return 0


def _value(recorded: Any) -> Any:
    if isinstance(recorded, list):
        return [_value(one) for one in recorded]
    if not isinstance(recorded, dict):
        return recorded
    if "error" in recorded:
        raise pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{recorded['error']}"))
    return SimpleNamespace(**recorded.get("fields", recorded))
