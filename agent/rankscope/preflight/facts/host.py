"""Which machine this is, and in what kind of box the process runs."""

from __future__ import annotations

import ctypes
import math
import os
import pwd
import re
import sys

import msgspec

from rankscope.preflight.system import System


class HostFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Identity of the machine and of the namespaces the process sees."""

    hostname: str
    machine_id: str = ""
    boot_id: str = ""
    network_namespace: int = 0  # inode of /proc/self/ns/net
    kernel: str = ""
    os_name: str = ""  # for who reads the JSON report
    is_root: bool = False
    user: str = ""
    container: str = ""  # docker, podman, kubernetes, apptainer ...; empty: none seen
    is_host_network: bool | None = None
    clock_is_synchronised: bool | None = None  # adjtimex(0): STA_UNSYNC is not set
    num_cores: int = 0  # usable by this process
    firewall_tools: tuple[str, ...] = ()  # of ufw, firewalld, nft, iptables and its legacy kind


def collect(system: System) -> HostFacts:
    """Read who this machine is. What cannot be read stays empty or None."""
    uid = os.geteuid()
    container = _container(system)
    return HostFacts(
        hostname=system.hostname(),
        machine_id=_line(system, "/etc/machine-id") or _line(system, "/var/lib/dbus/machine-id"),
        boot_id=_line(system, "/proc/sys/kernel/random/boot_id"),
        network_namespace=_namespace(system, "/proc/self/ns/net"),
        kernel=_line(system, "/proc/sys/kernel/osrelease"),
        os_name=_os_name(system),
        is_root=uid == 0,
        user=user_name(uid),
        container=container,
        is_host_network=_is_host_network(system),
        clock_is_synchronised=clock_is_synchronised(),
        num_cores=_num_cores(system),
        firewall_tools=_firewall_tools(system),
    )


def user_name(uid: int) -> str:
    """Return the name of a user; its number if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _line(system: System, path: str) -> str:
    return (system.read(path) or "").strip()


def _namespace(system: System, path: str) -> int:
    """Return the inode of a namespace: its link reads "net:[4026531840]"."""
    digits = system.link(path).partition("[")[2].rstrip("]")
    return int(digits) if digits.isdigit() else 0


def _os_name(system: System) -> str:
    for line in (system.read("/etc/os-release") or "").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip("\"'")
    return sys.platform


_CONTAINER_FILES = (("/.dockerenv", "docker"), ("/run/.containerenv", "podman"))
_CONTAINER_VARIABLES = (
    ("KUBERNETES_SERVICE_HOST", "kubernetes"), ("APPTAINER_CONTAINER", "apptainer"),
    ("SINGULARITY_CONTAINER", "singularity"), ("ENROOT_ROOTFS", "enroot"),
)  # fmt: skip
_CGROUP_WORDS = ("kubepods", "docker", "libpod", "containerd", "lxc")


def _container(system: System) -> str:
    for variable, kind in _CONTAINER_VARIABLES:
        if system.environ.get(variable):
            return kind
    for path, kind in _CONTAINER_FILES:
        if system.read(path) is not None:
            return kind
    cgroup = system.read("/proc/self/cgroup") or ""
    hit = next((word for word in _CGROUP_WORDS if f"/{word}" in cgroup), "")
    # set by systemd-nspawn, lxc and podman for the first process of the container
    return hit or system.environ.get("container", "")


def _is_host_network(system: System) -> bool | None:
    """Evaluate by the hardware: a container's own network has no device, but one end of a pair."""
    names = [n for n in system.names("/sys/class/net") if n not in ("lo", "bonding_masters")]
    if any(system.names(f"/sys/class/net/{name}/device") for name in names):
        return True
    ends = [
        [system.read_int(f"/sys/class/net/{name}/{part}") for part in ("iflink", "ifindex")]
        for name in names
    ]
    if ends and all(link is not None and link != own for link, own in ends):
        return False
    return None


_STA_UNSYNC = 0x0040  # linux/timex.h: the kernel's clock is not disciplined
_TIMEX_BYTES = 512  # struct timex has 208 on 64-bit Linux; asked with modes = 0 it only reads
_STATUS_OFFSET = 5 * ctypes.sizeof(ctypes.c_long)  # behind modes, offset, freq and two errors


def clock_is_synchronised() -> bool | None:
    """Return whether something like chrony keeps the clock; None where that cannot be asked."""
    if not sys.platform.startswith("linux"):
        return None
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    status = ctypes.c_int.from_buffer(buffer, _STATUS_OFFSET).value
    return not status & _STA_UNSYNC


def _num_cores(system: System) -> int:
    """Return the cores that the scheduler gives this process: its affinity, cut by its cgroup."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        allowed = os.cpu_count() or 0
    quotas = [quota for quota in _quotas(system) if quota > 0]
    return min([allowed, *(max(1, math.ceil(quota)) for quota in quotas)])


def _quotas(system: System) -> list[float]:
    """Return the cpu.max of this process's cgroup and all above it, in cores."""
    found = []
    for line in (system.read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            folder = "/".join(parts[:depth])
            if not controllers:
                words = (system.read(f"/sys/fs/cgroup/{folder}/cpu.max") or "").split()
            elif "cpu" in controllers.split(","):
                base = f"/sys/fs/cgroup/cpu/{folder}"
                words = [_line(system, f"{base}/cpu.cfs_{part}_us") for part in ("quota", "period")]
            else:
                continue
            if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
                found.append(int(words[0]) / int(words[1]))
    return found


_LEGACY_MODULE = re.compile(r"^ip6?table_(filter|mangle|nat|raw|security) ", re.MULTILINE)
_TOOL_FOLDERS = ("/usr/sbin", "/sbin", "/usr/bin", "/bin", "/usr/local/sbin")


def _firewall_tools(system: System) -> tuple[str, ...]:
    """Return the tools that are there, the one that rules first: what it did not open is shut."""
    there = {name for folder in _TOOL_FOLDERS for name in system.names(folder)}
    tools = []
    if "firewall-cmd" in there and _runs(system, "firewalld"):
        tools.append("firewalld")
    if "ufw" in there and "ENABLED=yes" in (system.read("/etc/ufw/ufw.conf") or ""):
        tools.append("ufw")
    is_legacy = system.link("/etc/alternatives/iptables").endswith("iptables-legacy")
    if "nft" in there:
        tools.append("nft")
    if "iptables" in there and not is_legacy:
        tools.append("iptables")
    if "iptables-legacy" in there and (is_legacy or _has_legacy_rules(system)):
        tools.append("iptables-legacy")
    return tuple(tools)


def _has_legacy_rules(system: System) -> bool:
    """Return whether the older kind of tables is in use, of which nft and iptables-nft see nothing.

    Their names are for root; others see that the kernel has loaded what they need.
    """
    if any(_line(system, f"/proc/net/{ip}_tables_names") for ip in ("ip", "ip6")):
        return True
    return _LEGACY_MODULE.search(system.read("/proc/modules") or "") is not None


def _runs(system: System, command: str) -> bool:
    pids = (name for name in system.names("/proc") if name.isdigit())
    return any(_line(system, f"/proc/{pid}/comm") == command for pid in pids)
