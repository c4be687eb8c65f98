"""A laboratory of fake nodes on one Linux machine, from namespaces. Nothing of the caller changes.

    python tests/preflight/nslab.py        build both wires, break each, see it (exit 77: not here)

    with Lab(3, wire="tap") as lab:
        lab.link(0, 1).delay = 0.05            # seconds, one way
        print(lab.run(0, "getent hosts node1").stdout)

Each host is a set of namespaces (network, host name, mounts, processes) with its own eth0, name,
/etc/hosts, /etc/resolv.conf, /proc and /sys. Two kinds of wire: "veth" is a kernel bridge in a
switch namespace, with faults by nft, tbf and MTU; "tap" passes every frame through `TapSwitch`.

It works as root, and without root in a fresh user namespace: `reexec_in_userns()`. What it needs
are the capabilities "namespaces" and, for the tap wire, "tun".
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.capabilities import IN_USER_NAMESPACE, lacks, search_path
from tests.command_server import Forked
from tests.preflight.tap_switch import Link, TapSwitch

Wire = Literal["veth", "tap"]
Command = str | Sequence[str]
_COMMAND_LIMIT_S = 60.0
# The first process of a host: it ends with the laboratory, however that ends, because then its
# input does. The shell, while it waits, also reaps what was orphaned.
_HOLDER = "mount -t proc proc /proc; echo up; cat > /dev/null"


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": search_path()}


def reexec_in_userns() -> None:
    """Without root, start this program again as "root" of a user and a network namespace."""
    if os.geteuid() == 0:
        return
    words = [*IN_USER_NAMESPACE, sys.executable, *sys.orig_argv[1:]]
    os.execvp(words[0], words)


class Host:
    """A set of namespaces, kept by a first process; whatever runs in it ends with that."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._keeper = subprocess.Popen(
            ["unshare", "-n", "-u", "-m", "-p", "--fork", "--kill-child", "--propagation",
             "private", "sh", "-c", _HOLDER],
            stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline().strip() != "up":
            self.close()
            raise RuntimeError(f"the namespaces of {name} were refused")
        children = f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children"
        self.pid = int(Path(children).read_text().split()[0])
        self.run(f"hostname {name}; ip link set lo up")
        self.run("mount -t sysfs sysfs /sys", check=False)  # else it shows the caller's interfaces

    def argv(self, command: Command) -> list[str]:
        """Return `command` (of a shell, if it is one text) as it runs in this host."""
        inner = ["sh", "-c", command] if isinstance(command, str) else list(command)
        enter = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--pid"]
        return [*enter, "--", *inner]

    def run(
        self, command: Command, *, check: bool = True, input: str | None = None,
        env: Mapping[str, str] | None = None, limit_s: float = _COMMAND_LIMIT_S,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run `command` to its end. Raises `RuntimeError` with its words if it fails."""
        done = subprocess.run(
            self.argv(command), text=True, capture_output=True, input=input,
            env=env or _environment(),
            timeout=limit_s, errors="replace",
        )  # fmt: skip
        if check and done.returncode:
            said = done.stderr.strip() or done.stdout.strip()
            raise RuntimeError(f"{self.name}: {command!r} ended with {done.returncode}: {said}")
        return done

    def close(self) -> None:
        """End the first process, and with it all others of this host."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._keeper.pid, signal.SIGKILL)
        self._keeper.wait()
        for stream in (self._keeper.stdin, self._keeper.stdout):
            if stream is not None:
                stream.close()


class Lab:
    """Some hosts on one wire, named node0, node1, ... with the addresses NET.1, NET.2, ..."""

    def __init__(
        self, num_hosts: int = 3, *, wire: Wire = "veth", mtu: int = 1500, net: str = "10.77.0",
        base: Mapping[str, str] | None = None, tails: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.num_hosts, self.wire, self.mtu, self.net = num_hosts, wire, mtu, net
        self.tails = tuple(tails) or tuple(range(1, num_hosts + 1))  # last numbers of addresses
        self.names = [f"node{number}" for number in range(num_hosts)]
        self.hosts: list[Host] = []
        self.base = dict(os.environ if base is None else base)  # environment of all programs
        self.env: list[dict[str, str]] = [{} for _ in range(num_hosts)]  # and of one host's
        self.folder = Path(tempfile.mkdtemp(prefix="nslab."))
        self.folder.chmod(0o755)
        self._switch: Host | None = None
        self._taps: TapSwitch | None = None
        self._started: list[subprocess.Popen[str]] = []
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def ip(self, number: int) -> str:
        """Return the address of a host."""
        return f"{self.net}.{self.tails[number]}"

    @property
    def switch(self) -> Host:
        """Return the namespace with the bridge (veth)."""
        assert self._switch is not None, "the tap wire has no bridge"
        return self._switch

    def environment(self, number: int) -> dict[str, str]:
        """Return the environment of what runs on a host."""
        return {**self.base, **self.env[number]}

    def link(self, start: int, end: int) -> Link:
        """Return the faults of one direction (tap), to be set."""
        assert self._taps is not None, "the veth wire has no links"
        return self._taps.link(start, end)

    def run(
        self,
        number: int,
        command: Command,
        *,
        check: bool = True,
        limit_s: float = _COMMAND_LIMIT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` on a host to its end."""
        return self.hosts[number].run(
            command, check=check, env=self.environment(number), limit_s=limit_s
        )

    def popen(self, number: int, command: Command, **settings: Any) -> subprocess.Popen[str]:
        """Start `command` on a host, in its own session; it ends with the laboratory."""
        settings.setdefault("env", self.environment(number))
        settings.setdefault("stdin", subprocess.DEVNULL)
        child = subprocess.Popen(
            self.hosts[number].argv(command), start_new_session=True, text=True, **settings
        )
        self._started.append(child)
        return child

    def fork(self, number: int, argv: Sequence[str], **settings: Any) -> subprocess.Popen[str]:
        """Start a command of ours on a host as `popen` does, without its imports."""
        settings.setdefault("env", self.environment(number))
        inside, has_torch = self.hosts[number].pid, "-S" not in argv
        child = Forked(argv, inside=inside, has_torch=has_torch, **settings)
        self._started.append(child)
        return child

    def signal(self, child: subprocess.Popen[str], number: signal.Signals) -> None:
        """Send a signal to what `popen` started, past the `nsenter` that waits for it."""
        if isinstance(child, Forked):
            child.send_signal(number)
            return
        for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split():
            os.kill(int(pid), number)

    def own_etc(self) -> None:
        """Give every host an /etc of its own, as it sees it now: what repairs write stays there."""
        for name, host in zip(self.names, self.hosts, strict=True):
            folder = self.folder / f"{name}.etc"
            if not folder.exists():  # ordinary users may not copy all of it
                host.run(f"cp -a /etc {folder} 2> /dev/null; mount --bind {folder} /etc")

    def write_etc(self, number: int, name: str, text: str) -> None:
        """Give a host its own /etc/NAME. In place: the mount keeps to the inode."""
        path = self.folder / f"{self.names[number]}.{name.replace('/', '-')}"
        is_new = not path.exists()
        path.write_text(text)
        if is_new:
            self.hosts[number].run(f"mount --bind {path} /etc/{name}")

    def set_hosts(self, number: int, changed: Mapping[str, str] | None = None) -> None:
        """Write /etc/hosts; `changed` gives other lines for some names ("" leaves it out)."""
        lines = ["127.0.0.1 localhost"]
        for peer, name in enumerate(self.names):
            line = (changed or {}).get(name, f"{self.ip(peer)} {name}")
            lines += [line] if line else []
        self.write_etc(number, "hosts", "\n".join(lines) + "\n")

    def close(self) -> None:
        """End all hosts, and with them all that runs there."""
        if self._taps is not None:
            self._taps.stop()
        for host in [*self.hosts, *([self._switch] if self._switch else [])]:
            host.close()
        for child in self._started:
            child.wait()
            for stream in (child.stdout, child.stderr):
                if stream is not None:
                    stream.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _build(self) -> None:
        if self.wire == "veth":
            self._switch = Host("switch")
            self._switch.run(
                f"ip link add br0 type bridge mcast_snooping 0; ip link set br0 mtu {self.mtu} up"
            )
        else:
            self._taps = TapSwitch()
        for number, name in enumerate(self.names):
            host = Host(name)
            self.hosts.append(host)
            self._plug_in(number, host)
            address = f"{self.ip(number)}/24"
            host.run(f"ip addr add {address} dev eth0 && ip link set eth0 mtu {self.mtu} up")
            self.write_etc(number, "hostname", name + "\n")
            self.write_etc(number, "resolv.conf", "# none\noptions timeout:1 attempts:1\n")
            self.write_etc(number, "nsswitch.conf", "hosts: files dns\n")
            if Path("/etc/machine-id").exists():
                self.write_etc(number, "machine-id", f"{number + 1:032x}\n")
            self._give_boot_id(number)
            self.set_hosts(number)
        if self._taps is not None:
            self._taps.start()

    def _give_boot_id(self, number: int) -> None:
        """Let each host have booted by itself, as far as /proc may be changed here."""
        path = self.folder / f"{self.names[number]}.boot_id"
        path.write_text(f"{uuid.uuid4()}\n")
        target = "/proc/sys/kernel/random/boot_id"
        self.hosts[number].run(f"mount --bind {path} {target}", check=False)

    def _plug_in(self, number: int, host: Host) -> None:
        if self._taps is None:
            peer = f"peer name eth0 mtu {self.mtu} netns {host.pid}"
            # `netns PID` is read in the caller's process namespace: only the network is entered
            _call(
                ["nsenter", f"--target={self.switch.pid}", "--net", "ip", "link", "add",
                 f"p{number}", "mtu", str(self.mtu), "type", "veth", *peer.split()]
            )  # fmt: skip
            self.switch.run(f"ip link set p{number} master br0 up")
            return
        tap = self._taps.add_port(number)
        mac = f"02:00:00:00:00:{number + 1:02x}"
        _call(["ip", "link", "set", tap, "address", mac, "netns", str(host.pid)])
        host.run(f"ip link set {tap} name eth0 txqueuelen 2000")


def _call(argv: Sequence[str]) -> None:
    subprocess.run(
        argv, check=True, capture_output=True, timeout=_COMMAND_LIMIT_S, env=_environment()
    )


def self_test(wire: Wire) -> int:
    """Build three hosts, reach a peer by name, break one thing, see it; return the misses."""
    started = time.monotonic()
    misses = 0

    def step(name: str, is_right: bool, note: str = "") -> None:
        nonlocal misses
        misses += not is_right
        sys.stdout.write(f"  {'ok  ' if is_right else 'FAIL'} {name}  {note}\n")

    with Lab(3, wire=wire) as lab:
        sys.stdout.write(f"{wire}: 3 hosts in {time.monotonic() - started:.2f} s\n")
        step("own host name", lab.run(2, "hostname").stdout.strip() == "node2")
        step("peer by name", lab.run(0, "getent hosts node2").stdout.split()[:1] == [lab.ip(2)])
        step("own eth0 in /sys", lab.run(1, "cat /sys/class/net/eth0/mtu").stdout.strip() == "1500")
        lab.popen(1, [sys.executable, "-c", _SERVE])
        time.sleep(0.5)
        outcome, seconds = _dial(lab)
        step("TCP to node1", outcome == "open", f"{outcome} in {seconds * 1e3:.1f} ms")
        if wire == "tap":
            lab.link(0, 1).delay = lab.link(1, 0).delay = 0.05
            outcome, seconds = _dial(lab)
            step("100 ms round trip", outcome == "open" and seconds > 0.09, f"{seconds:.3f} s")
        else:
            lab.hosts[1].run(["nft", "-f", "-"], input=_DROP)
            outcome, seconds = _dial(lab)
            step("firewall drops", outcome == "TimeoutError", f"{outcome} after {seconds:.1f} s")
    return misses


_SERVE = "import socket; s = socket.create_server(('', 29500))\nwhile True: s.accept()[0].close()"
_DROP = """table inet fw { chain in { type filter hook input priority 0;
tcp dport 29500 drop
}
}
"""
_DIAL = """
import socket, time
started, outcome = time.monotonic(), "open"
try:
    socket.create_connection(("node1", 29500), 1.5)
except OSError as error:
    outcome = type(error).__name__
print(outcome, time.monotonic() - started)
"""


def _dial(lab: Lab) -> tuple[str, float]:
    outcome, seconds = lab.run(0, [sys.executable, "-c", _DIAL]).stdout.split()
    return outcome, float(seconds)


def main() -> int:
    """Test the laboratory itself."""
    if os.geteuid() and not lacks("user-namespaces"):
        reexec_in_userns()
    reason = lacks("namespaces") or lacks("tun")
    if reason:
        sys.stderr.write(f"skipped: {reason}\n")
        return 77
    misses = self_test("veth") + self_test("tap")
    sys.stdout.write(f"{misses} steps failed\n" if misses else "all ok\n")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
