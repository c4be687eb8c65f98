"""What NVML says of every GPU, in a process that may hang in the driver: prints JSON.

Run by path. NVML itself is `pynvml`; where RANKSCOPE_PREFLIGHT_NVML names a recording
(`nvml_recording.py`, beside this file), that answers in its place, and the facts say so: this is
how a GPU machine, healthy or sick, is played on one that has none. A question that a GPU does not
support is left out; any other error of the driver is kept as text, by the name of the function.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
VARIABLE = "RANKSCOPE_PREFLIGHT_NVML"
_MAX_GPUS, _MAX_LINKS, _MAX_PROCESSES = 64, 18, 32
# what a driver answers to a question that it does not have, or that this user may not put
_NO_ANSWER = ("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION", "INVALID_ARGUMENT",
              "NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "DEPRECATED")  # fmt: skip
_LINK_ERRORS = {
    "replay": "NVML_NVLINK_ERROR_DL_REPLAY",
    "recovery": "NVML_NVLINK_ERROR_DL_RECOVERY",
    "crc": "NVML_NVLINK_ERROR_DL_CRC_FLIT",
}
_P2P_WORDS = ("ok", "chipset", "gpu", "topology", "disabled", "not supported", "unknown")
_RECOVERY = ("none", "gpu reset", "node reboot", "drain p2p", "drain and reset",
             "recover imex domain", "bus reset", "system reboot")  # fmt: skip
_COMPUTE = ("default", "exclusive thread", "prohibited", "exclusive process")
_FABRIC = ("not supported", "not started", "in progress", "completed")


class Reader:
    """Asks one GPU, and keeps what went wrong."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self.handle = nvml, handle
        self.errors: dict[str, str] = {}

    def ask(self, name: str, *arguments: Any, take: Callable[[Any], Any] = lambda x: x) -> Any:
        """Return what nvmlDeviceGet<name> says through `take`; None where it does not say."""
        nvml = self._nvml
        try:
            function = getattr(nvml, f"nvmlDeviceGet{name}")
            values = [getattr(nvml, a) if isinstance(a, str) else a for a in arguments]
            return take(function(self.handle, *values))
        except AttributeError:  # a pynvml that is older than the question
            return None
        except nvml.NVMLError as error:
            if error.value not in quiet_codes(nvml):
                self.errors[f"nvmlDeviceGet{name}"] = str(error)
            return None

    def field(self, name: str) -> int | None:
        """Return one field value, by the end of its constant."""
        number = getattr(self._nvml, f"NVML_FI_DEV_{name}", None)
        if number is None:
            return None
        found = self.ask("FieldValues", [number], take=lambda rows: rows[0])
        if found is None or found.nvmlReturn != 0:
            return None
        return int(found.value.uiVal)


def quiet_codes(nvml: Any) -> set[int]:
    """Return the codes of errors that only say that there is no answer."""
    return {getattr(nvml, f"NVML_ERROR_{name}", -1) for name in _NO_ANSWER}


def read(nvml: Any) -> dict[str, Any]:
    """Return all facts that NVML has."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        names = ("NVML_ERROR_LIBRARY_NOT_FOUND", "NVML_ERROR_DRIVER_NOT_LOADED")
        absent = error.value in [getattr(nvml, name) for name in names]
        return {"absence" if absent else "problem": f"NVML: {error}"}
    answer: dict[str, Any] = {"driver": _text(nvml.nvmlSystemGetDriverVersion())}
    try:
        number = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        answer["cuda_driver"] = f"{number // 1000}.{number % 1000 // 10}"
        count = min(int(nvml.nvmlDeviceGetCount()), _MAX_GPUS)
    except nvml.NVMLError as error:
        return answer | {"problem": f"NVML: {error}"}
    readers: list[Reader] = []
    lost: dict[str, str] = {}
    for index in range(count):
        try:
            readers.append(Reader(nvml, nvml.nvmlDeviceGetHandleByIndex(index)))
        except nvml.NVMLError as error:
            lost[str(index)] = str(error)
    gpus = [_gpu(reader) for reader in readers]
    answer |= {"count": count, "lost": lost, "gpus": gpus}
    return answer | {"pairs": _pairs(nvml, readers)}


def _gpu(reader: Reader) -> dict[str, Any]:
    ask = reader.ask
    pci = ask("PciInfo", take=lambda info: _text(info.busId).lower())
    facts = {
        "index": ask("Index"),
        "name": ask("Name", take=_text),
        "uuid": ask("UUID", take=_text),
        "bus_id": pci,
        "persistence": ask("PersistenceMode", take=bool),
        "mig": ask("MigMode", take=lambda pair: bool(pair[0])),
        "compute_mode": ask("ComputeMode", take=lambda n: _word(_COMPUTE, n)),
        "recovery_action": _recovery(reader),
        "numa_node": ask("NumaNodeId"),
    }
    facts |= _memory(reader) | _errors(reader) | _pace(reader) | _pcie(reader)
    facts |= {"links": _links(reader), **_fabric(reader)}
    known = {name: value for name, value in facts.items() if value is not None}
    return known | ({"errors": reader.errors} if reader.errors else {})


def _memory(reader: Reader) -> dict[str, Any]:
    """Return memory, without what the driver keeps for itself, and who holds it."""
    info = reader.ask("MemoryInfo", "nvmlMemory_v2") or reader.ask("MemoryInfo")
    processes = reader.ask("ComputeRunningProcesses") or []
    return {
        "memory_total_bytes": int(info.total) if info is not None else None,
        "memory_used_bytes": int(info.used) if info is not None else None,
        "processes": [
            {
                "pid": int(one.pid),
                "used_bytes": -1 if one.usedGpuMemory is None else int(one.usedGpuMemory),
                "name": _command(int(one.pid)),
            }
            for one in processes[:_MAX_PROCESSES]
        ],
    }


def _errors(reader: Reader) -> dict[str, Any]:
    ask = reader.ask
    rows = ask("RemappedRows")
    _, uncorrectable, pending, failed = rows if rows is not None else (None,) * 4
    return {
        "ecc": ask("EccMode", take=lambda pair: bool(pair[0])),
        "ecc_uncorrected": ask(
            "TotalEccErrors", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC"
        ),
        "ecc_corrected": ask(
            "TotalEccErrors", "NVML_MEMORY_ERROR_TYPE_CORRECTED", "NVML_VOLATILE_ECC"
        ),
        "rows_remapped": uncorrectable,
        "rows_pending": None if pending is None else bool(pending),
        "rows_failed": None if failed is None else bool(failed),
        "pages_retired": reader.field("RETIRED_DBE"),
        "pages_pending": ask("RetiredPagesPendingStatus", take=bool),
    }


def _recovery(reader: Reader) -> str | None:
    number = reader.field("GET_GPU_RECOVERY_ACTION")
    return None if number is None else _word(_RECOVERY, number)


def _pace(reader: Reader) -> dict[str, Any]:
    ask = reader.ask
    reasons = ask("CurrentClocksEventReasons")
    if reasons is None:
        reasons = ask("CurrentClocksThrottleReasons")
    return {
        "clock_reasons": reasons,
        "sm_clock_mhz": ask("ClockInfo", "NVML_CLOCK_SM"),
        "sm_clock_max_mhz": ask("MaxClockInfo", "NVML_CLOCK_SM"),
        "power_limit_mw": ask("EnforcedPowerLimit"),
        "power_default_mw": ask("PowerManagementDefaultLimit"),
        "temperature_c": ask("Temperature", "NVML_TEMPERATURE_GPU"),
        "slowdown_c": ask("TemperatureThreshold", "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN"),
    }


def _pcie(reader: Reader) -> dict[str, Any]:
    ask = reader.ask
    return {
        "pcie_width": ask("CurrPcieLinkWidth"),
        "pcie_width_max": ask("MaxPcieLinkWidth"),
        "pcie_generation": ask("CurrPcieLinkGeneration"),
        "pcie_generation_max": ask("MaxPcieLinkGeneration"),
        "pcie_replays": ask("PcieReplayCounter"),
    }


def _links(reader: Reader) -> list[dict[str, Any]]:
    """Return the state and the errors of each NVLink; a GPU without has none."""
    links = []
    for number in range(_MAX_LINKS):
        active = reader.ask("NvLinkState", number)
        if active is None:
            break
        errors = {}
        if active:
            for name, constant in _LINK_ERRORS.items():
                errors[name] = reader.ask("NvLinkErrorCounter", number, constant)
        known = {name: value for name, value in errors.items() if value}
        links.append({"number": number, "is_active": bool(active), "errors": known})
    return links


def _fabric(reader: Reader) -> dict[str, Any]:
    """Return the state of the fabric between NVSwitches, as the fabric manager left it."""
    nvml = reader._nvml
    if not hasattr(nvml, "c_nvmlGpuFabricInfo_v2_t"):
        return {}
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    # pynvml hands its argument on to C as it is: the structure itself would be a crash
    if reader.ask("GpuFabricInfoV", ctypes.pointer(info)) is None:
        return {}
    found: dict[str, Any] = {"fabric_state": _word(_FABRIC, info.state)}
    if info.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED:
        found |= {"fabric_status": int(info.status), "fabric_health": int(info.healthMask)}
    return found


def _pairs(nvml: Any, readers: list[Reader]) -> list[dict[str, Any]]:
    """Return what is between each two GPUs, and whether they may read from each other."""
    pairs = []
    for i, one in enumerate(readers):
        for j in range(i + 1, len(readers)):
            row = {
                "first": i, "second": j,
                "level": one.ask("TopologyCommonAncestor", readers[j].handle),
                "p2p": one.ask("P2PStatus", readers[j].handle, "NVML_P2P_CAPS_INDEX_READ",
                               take=lambda n: _word(_P2P_WORDS, n)),
            }  # fmt: skip
            pairs.append({name: value for name, value in row.items() if value is not None})
    return pairs


def _command(pid: int) -> str:
    """Return the command of a process; empty if this user or this container does not see it."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(200).replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _word(words: tuple[str, ...], number: Any) -> str:
    return words[int(number)] if 0 <= int(number) < len(words) else str(number)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _has_library() -> bool:
    """Return whether there is NVML here. To import pynvml takes longer than all else."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


def main() -> None:
    """Print the facts, of a recording if the environment names one."""
    faulthandler.enable()  # a library of the driver may crash: then its caller gets the reason
    recording = os.environ.get(VARIABLE, "")
    sys.stdout.write("started\n")
    sys.stdout.flush()
    if recording:
        sys.path.append(os.path.dirname(os.path.abspath(__file__)))
        module = importlib.import_module("nvml_recording")  # beside this file
        answer = read(module.Recording(recording)) | {"recording": recording}
    elif not _has_library():
        answer = {"absence": "NVML: NVML Shared Library Not Found"}  # pynvml's own words
    else:
        try:
            import pynvml
        except ImportError as error:
            answer = {"absence": f"pynvml cannot be imported: {error}"}
        else:
            answer = read(pynvml)
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
