"""What the kernel knows of the GPUs: the bus, kernel modules, the log of the driver."""

from __future__ import annotations

import re

import msgspec

from rankscope.preflight.system import System

_NVIDIA, _DISPLAY_CLASSES, _BRIDGE_CLASS = "0x10de", ("0x0302", "0x0300"), "0x0604"
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
_MAX_XIDS, _LOG_LIMIT_S = 50, 2.0
_PCI = "/sys/bus/pci/devices"


class Xid(msgspec.Struct, frozen=True, kw_only=True):
    """An error that the driver wrote to the kernel log since boot."""

    number: int
    bus_id: str
    count: int


class GpuHostFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """GPUs beside NVML. None: not known."""

    num_on_bus: int = 0  # NVIDIA display and compute devices
    has_kernel_driver: bool = False
    is_open_driver: bool | None = None  # the open kernel modules: they offer dma-buf
    has_peermem: bool = False
    iommu_types: tuple[str, ...] = ()  # of the groups that hold a GPU: DMA, DMA-FQ, identity
    num_acs_bridges: int | None = None  # bridges that redirect; None: needs root to be read
    xids: tuple[Xid, ...] = ()
    xid_problem: str = ""  # why the log was not read


def collect(system: System, has_gpus: bool) -> GpuHostFacts:
    """Look at the bus, and where there are GPUs at modules and the kernel log."""
    devices = {name: _device(system, name) for name in system.names(_PCI)}
    nvidia = {name: kind for name, (vendor, kind) in devices.items() if vendor == _NVIDIA}
    gpus = [name for name, kind in nvidia.items() if kind.startswith(_DISPLAY_CLASSES)]
    version = system.read("/proc/driver/nvidia/version")
    if not gpus and not has_gpus and version is None:
        return GpuHostFacts()
    xids, problem = _xids(system)
    types = {(system.read(f"{_PCI}/{gpu}/iommu_group/type") or "").strip() for gpu in gpus}
    bridges = [name for name, (_, kind) in devices.items() if kind.startswith(_BRIDGE_CLASS)]
    return GpuHostFacts(
        num_on_bus=len(gpus),
        has_kernel_driver=version is not None,
        is_open_driver=None if version is None else "Open Kernel Module" in version,
        has_peermem=bool(system.names("/sys/module/nvidia_peermem")),
        iommu_types=tuple(sorted(types - {""})),
        num_acs_bridges=_acs(system, bridges),
        xids=xids,
        xid_problem=problem,
    )


def _device(system: System, name: str) -> tuple[str, str]:
    vendor, kind = (system.read(f"{_PCI}/{name}/{file}") for file in ("vendor", "class"))
    return (vendor or "").strip(), (kind or "").strip()


def _acs(system: System, bridges: list[str]) -> int | None:
    """Return how many bridges send traffic between GPUs up to the root (PCIe 6.12.1.1)."""
    count, is_readable = 0, False
    for bridge in bridges:
        data = system.read_bytes(f"{_PCI}/{bridge}/config") or b""
        if len(data) < 4096:
            continue  # 64 bytes are all that others than root may read
        is_readable = True
        offset = 0x100
        while offset:
            head = int.from_bytes(data[offset : offset + 4], "little")
            if head & 0xFFFF == 0x000D:  # access control services
                control = int.from_bytes(data[offset + 6 : offset + 8], "little")
                count += bool(control & 0b1101)  # source validation, request, completion redirect
                break
            following = head >> 20
            offset = following if following > offset else 0
    return count if is_readable else None


def _xids(system: System) -> tuple[tuple[Xid, ...], str]:
    """Return the errors of this boot, from the journal or from the kernel's own buffer."""
    problem = ""
    for argv in (
        ["journalctl", "-k", "-b", "-q", "--no-pager", "-o", "cat", "-g", "NVRM: Xid"],
        ["dmesg"],
    ):
        done = system.run(argv, _LOG_LIMIT_S)
        # journalctl ends with 1 where nothing matches, and says nothing to a stranger
        if done.code == 0 or (argv[0] == "journalctl" and done.code == 1 and not done.err):
            counts: dict[tuple[int, str], int] = {}
            for bus_id, number in _XID.findall(done.out):
                key = (int(number), bus_id)
                counts[key] = counts.get(key, 0) + 1
            if counts or argv[0] == "dmesg":
                rows = sorted(counts.items())[:_MAX_XIDS]
                return tuple(Xid(number=n, bus_id=b, count=c) for (n, b), c in rows), ""
        else:
            problem = (done.err.strip().splitlines() or [f"exit code {done.code}"])[0]
    return (), f"the kernel log cannot be read: {problem}"
