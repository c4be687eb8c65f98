"""What tests want of a machine: how it is tried, why it is missing, the command that enables it.

    python3 tests/capabilities.py             what is there and what is not
    python3 tests/capabilities.py packages    Debian packages of commands that are missing

A test says what it needs, `@pytest.mark.needs("namespaces", "tun")`, or calls `need("mount")`. It
is skipped where that is missing, and fails where $RANKSCOPE_REQUIRE says that it must be there:
names with commas, or `ci` for what continuous integration must have.

Standard library only: the system's Python runs this before anything is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIRE = "RANKSCOPE_REQUIRE"
TUN = "RANKSCOPE_TUN"  # the device of taps, where it is another than /dev/net/tun
# Where even root may not, it is a container that holds it back.
AS_ROOT = "sudo make test" if os.geteuid() else "start the container with --privileged"
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all")
CONTAINER = ("unshare", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child")
IN_USER_NAMESPACE = ("unshare", "-U", "-r", "-n", "-m", "--propagation", "private")
_LIMIT_S = 60.0
_NOBODY_ID = 65534
_NAMES = {
    # The first takes 40 % less of the processors: it has no window to draw.
    "chromium": ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"),
    "firefox": ("firefox-esr", "firefox"),
}
_PACKAGE_OF = {
    "cc": "gcc", "c++": "g++", "mount": "mount", "umount": "mount", "unshare": "util-linux",
    "nsenter": "util-linux", "setpriv": "util-linux", "ip": "iproute2", "tc": "iproute2",
    "ss": "iproute2", "nft": "nftables", "iptables": "iptables", "iptables-legacy": "iptables",
    "ethtool": "ethtool", "hostname": "hostname", "man": "man-db", "groff": "groff",
    "sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client",
    "mpirun": "openmpi-bin", "mpiexec.hydra": "mpich", "slurmctld": "slurmctld",
    "slurmd": "slurmd", "srun": "slurm-client", "sinfo": "slurm-client", "munged": "munge",
    "chromium": "chromium-headless-shell", "firefox": "firefox-esr", "strace": "strace",
    "prometheus": "prometheus", "promtool": "prometheus",
    "buildah": "buildah", "systemd-analyze": "systemd", "systemd-sysusers": "systemd",
    "haproxy": "haproxy", "nginx": "nginx", "openssl": "openssl",
}  # fmt: skip
_OLDEST_POSTGRES = 14


@dataclass(frozen=True)
class Capability:
    """One thing that a machine has or lacks."""

    name: str
    meaning: str
    tools: tuple[str, ...] = ()
    probe: Callable[[], str] = str  # returns why it does not work; empty if it does
    remedy: str = ""  # where more is missing than packages
    packages: tuple[str, ...] = ()  # where no command tells that they are missing
    in_ci: bool = False

    def missing(self) -> str:
        """Return why it is not there, in words; empty if it is. Tried once in a process."""
        return _missing(self)

    def enable(self) -> str:
        """Return the one command that would bring it."""
        packages = self.missing_packages()
        return f"sudo apt-get install {' '.join(packages)}" if packages else self.remedy

    def missing_packages(self) -> tuple[str, ...]:
        """Return the Debian packages that it lacks."""
        absent = [_PACKAGE_OF.get(tool, "") for tool in self.tools if find(tool) is None]
        absent = list(filter(None, absent))  # what is not in Debian, or too old there
        if not absent and self.packages and self.missing():
            absent = list(self.packages)
        return tuple(dict.fromkeys(absent))


@functools.cache
def _missing(capability: Capability) -> str:
    absent = [tool for tool in capability.tools if find(tool) is None]
    if absent:
        return f"command not found: {', '.join(absent)}"
    try:
        return capability.probe()
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


def search_path() -> str:
    """Return PATH with the places of tools that distributions keep from ordinary users."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))


def find(tool: str) -> str | None:
    """Return where a command is, None if it is not installed."""
    names = _NAMES.get(tool, (tool,))
    paths = (shutil.which(name, path=search_path()) for name in names)
    return next(filter(None, paths), None)


def is_root() -> bool:
    """Return whether this is root who may become somebody else: not root of its own namespace."""
    if os.geteuid() != 0:
        return False
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/uid_map").read_text().splitlines()
        ranges = [map(int, line.split()) for line in lines]
        return any(first <= _NOBODY_ID < first + count for first, _, count in ranges)
    return True


def lacks(capability: str) -> str:
    """Return why a capability is missing, empty if it is there."""
    return BY_NAME[capability].missing()


def required() -> frozenset[str]:
    """Return the names of what must be there."""
    asked = os.environ.get(REQUIRE, "")
    if asked == "ci":
        return frozenset(c.name for c in CAPABILITIES if c.in_ci)
    names = frozenset(name.strip() for name in asked.split(",") if name.strip())
    unknown = names - BY_NAME.keys()
    if unknown:
        raise ValueError(f"{REQUIRE}: no such capability: {', '.join(sorted(unknown))}")
    return names


def reason(name: str) -> str:
    """Return why what needs a capability is skipped, with its name in front; empty if it runs."""
    why = lacks(name)
    return f"needs {name}: {why}" if why else ""


def of_reason(text: str) -> Capability | None:
    """Return the capability that a reason names."""
    name = text.removeprefix("needs ").partition(":")[0]
    return BY_NAME.get(name) if text.startswith("needs ") else None


def need(*names: str) -> None:
    """Skip the test that runs where a capability is missing; fail it where it must be there."""
    import pytest

    for name in names:
        why = reason(name)
        if why and name in required():
            pytest.fail(f"{why} ({REQUIRE} says that it must run here)", pytrace=False)
        if why:
            pytest.skip(why)


# ---- how each is tried


def _try(command: Sequence[str], *, cwd: Path = ROOT) -> str:
    """Run a command; return what it said if it failed."""
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, cwd=cwd,
        stdin=subprocess.DEVNULL, env={**os.environ, "PATH": search_path()}, check=False,
    )  # fmt: skip
    if done.returncode == 0:
        return ""
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"{command[0]} ended with {done.returncode}"


def _strace() -> str:
    return _try(("strace", "-qq", "-o", os.devnull, "true"))


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="capability.") as name:
        yield Path(name)


def _compiler() -> str:
    sources = {
        "c": ("cc", "#include <stdlib.h>\nint f(void) { return abs(-1); }\n"),
        "cpp": ("c++", "#include <string>\nint f() { return int(std::string{}.size()); }\n"),
    }
    with _folder() as folder:
        for suffix, (compiler, text) in sources.items():
            source = folder / f"three.{suffix}"
            source.write_text(text)
            command = [compiler, "-shared", "-fPIC", str(source), "-o", str(folder / "three.so")]
            why = _try(command)
            if why:
                return why
    return ""


_HOST = (
    "mount -t proc proc /proc && hostname capability && ip link add br0 type bridge"
    " && ip link add v0 type veth peer name v1 && nft add table inet capability"
    " && tc qdisc add dev v0 root tbf rate 1mbit burst 16kb latency 50ms"
)


def _namespaces() -> str:
    command = ["unshare", "-n", "-u", "-m", "-p", "--fork", "--propagation", "private"]
    return _try([*command, "sh", "-c", _HOST])


def _iptables() -> str:
    return _try(["unshare", "-n", "iptables", "-S"])


def _iptables_legacy() -> str:
    return _try(["unshare", "-n", "iptables-legacy", "-S"])


def _user_namespaces() -> str:
    become = NOBODY if is_root() else ()
    return _try([*become, *IN_USER_NAMESPACE, "true"], cwd=Path("/"))


def _containers() -> str:
    return _try([*CONTAINER, "true"])


def _tun() -> str:
    program = "from tests.preflight.tap_switch import TapSwitch; TapSwitch().add_port(0)"
    enter = ("unshare", "-n") if os.geteuid() == 0 else IN_USER_NAMESPACE
    return _try([*enter, sys.executable, "-c", program])


def _root() -> str:
    return "" if is_root() else "this is an ordinary user"


def _ordinary_user() -> str:
    return "this is root, who may do everything" if os.geteuid() == 0 else ""


def _mount() -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    with _folder() as folder:
        target = os.fsencode(folder)
        if libc.mount(b"capability", target, b"tmpfs", 0, b"size=1m") != 0:
            return f"mounting a small file system: {os.strerror(ctypes.get_errno())}"
        libc.umount2(target, 2)
    return ""


def _fuse() -> str:
    os.close(os.open("/dev/fuse", os.O_RDWR))
    return _mount()


def memory_cgroup() -> Path | None:
    """Return a control group below which groups with a memory limit can be made, if there is one.

    It is the own group, or the topmost where version 2 forbids groups below one with processes.
    """
    top = Path("/sys/fs/cgroup")
    places = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            places += [top / controllers / path.lstrip("/"), top / controllers]
    return next(filter(_limits_memory, places), None)


def _limits_memory(group: Path) -> bool:
    if not os.access(group, os.W_OK):
        return False
    if (group / "memory.limit_in_bytes").exists():  # version 1
        return True
    with contextlib.suppress(OSError):
        return "memory" in (group / "cgroup.subtree_control").read_text().split()
    return False


def limit_memory(group: Path, limit_bytes: int) -> None:
    """Set the memory limit of a control group."""
    first = group / "memory.limit_in_bytes"
    (first if first.exists() else group / "memory.max").write_text(str(limit_bytes))


def _memory_cgroup() -> str:
    place = memory_cgroup()
    if place is None:
        return "no control group for memory can be made here"
    group = place / f"capability-{os.getpid()}"
    group.mkdir()
    try:
        limit_memory(group, 64 << 20)
    finally:
        group.rmdir()
    return ""


def _sshd() -> str:
    if os.geteuid() == 0:  # the directory that it wants of root; packages make it at boot
        with contextlib.suppress(OSError):
            Path("/run/sshd").mkdir(mode=0o755)
    with _folder() as folder:
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host")]
        config = folder / "config"
        config.write_text(f"HostKey {folder}/host\nPidFile none\nUsePAM no\nStrictModes no\n")
        return _try(key) or _try([str(find("sshd")), "-t", "-f", str(config)])


def _chromium() -> str:
    page = "data:text/html,<p>there"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with _folder() as folder:
        profile = f"--user-data-dir={folder}"
        return _try([str(find("chromium")), *options, profile, "--dump-dom", page])


def _firefox() -> str:
    return _try([str(find("firefox")), "--version"])


def postgres_programs() -> Path | None:
    """Return the folder of the newest PostgreSQL server that is installed; None for none."""
    on_path = shutil.which("initdb", path=search_path())
    folders = [Path(on_path).resolve().parent] if on_path else []
    folders += Path("/usr/lib/postgresql").glob("*/bin")  # Debian keeps each version apart
    found = {version: folder for folder in folders if (version := _postgres_version(folder))}
    return found[max(found)] if found else None


def _postgres_version(folder: Path) -> int:
    if not (folder / "initdb").exists():
        return 0
    said = subprocess.run(
        [folder / "postgres", "--version"], capture_output=True, text=True, timeout=_LIMIT_S,
        check=False,
    ).stdout  # fmt: skip
    numbers = re.findall(r"\d+", said)
    return int(numbers[0]) if numbers else 0


def _postgres() -> str:
    folder = postgres_programs()
    if folder is None:
        return "no PostgreSQL server is installed"
    version = _postgres_version(folder)
    if version < _OLDEST_POSTGRES:
        return f"PostgreSQL {version} is installed, {_OLDEST_POSTGRES} is the oldest that is served"
    become = NOBODY if is_root() else ()
    return _try([*become, str(folder / "initdb"), "--version"], cwd=Path("/"))


def _haproxy() -> str:
    return _try(["haproxy", "-v"])


def _nginx() -> str:
    return _try(["nginx", "-v"])


def _buildah() -> str:
    with _folder() as folder:
        store = ("--root", f"{folder}/store", "--runroot", f"{folder}/run")
        return _try(["buildah", *store, "--storage-driver", "vfs", "images"])


def _systemd_analyze() -> str:
    unit = "deploy/systemd/rankscope-server.service"  # without a manager: since systemd 250
    return _try(["systemd-analyze", "security", "--offline=true", "--no-pager", unit])


def _mpirun() -> str:
    return _try(["mpirun", "--version"])


def _ipv6() -> str:
    with socket.socket(socket.AF_INET6) as listening:
        listening.bind(("::1", 0))
    return ""


def _bare_root() -> str:
    if not is_root():
        return "building one needs root"
    if find("mmdebstrap") is None and find("apt-get") is None:
        return "command not found: mmdebstrap"
    return _try(["unshare", "--mount", "--pid", "--ipc", "--fork", "mount", "--make-rprivate", "/"])


def _socket_filters() -> str:
    """Hardened kernels keep them from ordinary users."""
    attach_filter, drop_all = 26, struct.pack("HBBI", 6, 0, 0, 0)
    code = ctypes.create_string_buffer(drop_all)
    with socket.socket() as filtered:
        described = struct.pack("HxxxxxxQ", 1, ctypes.addressof(code))
        filtered.setsockopt(socket.SOL_SOCKET, attach_filter, described)
    return ""


def _others() -> str:
    """Those of an earlier list are not enough."""
    place = ROOT / "artifacts" / "others" / "bin" / "python"
    if not place.exists():
        return "not installed"
    names = re.findall(r"^[\w-]+", (ROOT / ".ci" / "others.txt").read_text(), re.MULTILINE)
    ask = "import importlib.metadata, sys; list(map(importlib.metadata.version, sys.argv[1:]))"
    return _try([str(place), "-c", ask, *names])


def _no_gpu() -> str:
    return "a CUDA device is not there" if not Path("/dev/nvidia0").exists() else ""


_PERMIT_USER_NAMESPACES = (  # of every kernel, Debian's, Ubuntu's; -e: as far as they are there
    "sudo sysctl -e -w user.max_user_namespaces=10000 kernel.unprivileged_userns_clone=1"
    " kernel.apparmor_restrict_unprivileged_userns=0"
)
CAPABILITIES = (
    Capability("compiler", "builds C and C++", ("cc", "c++"), _compiler, in_ci=True),
    Capability(
        "namespaces", "fake hosts: network, names, mounts and processes of their own",
        ("unshare", "nsenter", "mount", "hostname", "ip", "ss", "tc", "nft", "ethtool"),
        _namespaces,
        remedy=AS_ROOT, in_ci=True,
    ),
    Capability("iptables", "iptables", ("iptables",), _iptables, remedy=AS_ROOT, in_ci=True),
    Capability(
        "iptables-legacy", "tables of the older kind", ("iptables-legacy",), _iptables_legacy,
        remedy="sudo modprobe iptable_filter",
    ),
    # installed by themselves they would shut the ports of a machine that is in use
    Capability("ufw", "ufw", ("ufw",), remedy="install ufw in a container of its own"),
    Capability(
        "firewalld", "firewalld", ("firewalld", "firewall-cmd", "dbus-daemon"),
        remedy="install firewalld in a container of its own",
    ),
    Capability(
        "containers", "processes and mounts of their own", ("unshare", "mount"), _containers,
        remedy=AS_ROOT, in_ci=True,
    ),
    Capability(
        "user-namespaces", "the same for an ordinary user", ("unshare", "setpriv"),
        _user_namespaces, remedy=_PERMIT_USER_NAMESPACES, in_ci=True,
    ),
    Capability(
        "tun", "wires of user space between fake hosts", ("unshare",), _tun,
        remedy="sudo sh -c 'modprobe tun; chmod 666 /dev/net/tun'", in_ci=True,
    ),
    Capability("root", "may become another user", (), _root, remedy=AS_ROOT, in_ci=True),
    Capability(
        "ordinary-user", "may not do everything", (), _ordinary_user,
        remedy="run `make test` as an ordinary user",
    ),
    Capability(
        "mount", "mounts small file systems", ("mount", "umount"), _mount, remedy=AS_ROOT,
        in_ci=True,
    ),
    Capability("fuse", "mounts a file system that hangs", (), _fuse, remedy="sudo modprobe fuse"),
    Capability(
        "memory-cgroup", "limits the memory of a control group", (), _memory_cgroup,
        remedy=AS_ROOT,
    ),
    Capability(
        "sshd", "starts an ssh server", ("sshd", "ssh", "ssh-keygen"), _sshd, in_ci=True,
    ),
    Capability("chromium", "a browser", ("chromium",), _chromium, in_ci=True),
    Capability("firefox", "another browser", ("firefox",), _firefox),
    Capability(
        "postgres", "a PostgreSQL server", (), _postgres, packages=("postgresql",), in_ci=True,
    ),
    Capability("prometheus", "Prometheus", ("prometheus", "promtool"), in_ci=True),
    Capability("man", "reads manual pages", ("man", "groff")),
    Capability("strace", "watches what a process asks of the kernel", ("strace",), _strace),
    Capability("buildah", "builds images", ("buildah",), _buildah),
    Capability("haproxy", "HAProxy", ("haproxy", "openssl"), _haproxy, in_ci=True),
    Capability("nginx", "nginx", ("nginx", "openssl"), _nginx, in_ci=True),
    Capability(
        "systemd-analyze", "checks units", ("systemd-analyze", "systemd-sysusers"),
        _systemd_analyze, in_ci=True,
    ),
    Capability("mpirun", "Open MPI", ("mpirun",), _mpirun, in_ci=True),
    Capability("mpich", "MPICH's launcher", ("mpiexec.hydra",)),
    Capability(
        "slurm", "Slurm", ("slurmctld", "slurmd", "srun", "sinfo", "munged"), in_ci=True,
    ),
    Capability(
        "ipv6", "IPv6 on loopback", (), _ipv6,
        remedy="sudo sysctl -w net.ipv6.conf.lo.disable_ipv6=0",
    ),
    Capability(
        "socket-filters", "throws away what arrives at a socket", (), _socket_filters,
        remedy=AS_ROOT, in_ci=True,
    ),
    Capability(
        "node", "Node.js and npm, for the web's checks", ("node", "npm"),
        remedy="https://nodejs.org, 20 or newer",
    ),
    Capability(
        "others", "programs of others, installed apart", (), _others, remedy="make others",
    ),
    Capability(
        "bare-root", "a bare system in a mount namespace of its own", ("unshare",), _bare_root,
        remedy="sudo make fresh", in_ci=True,
    ),
    Capability("gpu", "a CUDA device", (), _no_gpu, remedy="run on a machine that has one"),
)  # fmt: skip
BY_NAME = {capability.name: capability for capability in CAPABILITIES}


def main() -> int:
    """Show what this machine has, or the packages that it lacks."""
    if sys.argv[1:] == ["packages"]:
        names = (name for c in CAPABILITIES for name in c.missing_packages())
        sys.stdout.write(" ".join(dict.fromkeys(names)) + "\n")
        return 0
    for capability in CAPABILITIES:
        why = capability.missing()
        remedy = f"\n{'':18}{capability.enable()}" if why else ""
        sys.stdout.write(f"{capability.name:16}  {why or 'there'}{remedy}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
