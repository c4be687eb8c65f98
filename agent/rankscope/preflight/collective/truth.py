"""Which address gloo really takes: torch makes its device, and the kernel shows where it listens.

Runs in the child. Emulating gloo's rules is a guess; this is the answer of the library itself.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from rankscope.preflight.facts.choice import Choice

_LISTEN = "0A"  # TCP_LISTEN, include/net/tcp_states.h
_MAX_PROBLEM_CHARACTERS = 200
# gloo/common/logging.h: "[enforce fail at FILE:LINE] CONDITION. " is before each message
_ENFORCE = re.compile(r"^\[enforce fail at [^\]]*\] .*?\. ")


def ask_gloo(environ: Mapping[str, str]) -> tuple[Choice, ...]:
    """Make gloo's devices as torch would, and return the address of each."""
    from torch.distributed import ProcessGroupGloo

    named = environ.get("GLOO_SOCKET_IFNAME", "")
    if not named:
        # `create_default_device` ignores the variable: only where it is unset it is the truth
        return (_made(ProcessGroupGloo.create_default_device, ""),)
    return tuple(
        _made(lambda name=name: ProcessGroupGloo.create_device(interface=name), name)
        for name in named.split(",")
    )


def listening(root: Path = Path("/proc/self")) -> dict[str, str]:
    """Return the addresses at which this process listens, by the inode of the socket."""
    own = set(_inodes(root / "fd"))
    found: dict[str, str] = {}
    for name in ("net/tcp", "net/tcp6"):
        try:
            lines = (root / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == _LISTEN and words[9] in own:
                found[words[9]] = readable(words[1].partition(":")[0])
    return found


def readable(address: str) -> str:
    """Return an address of /proc/net/tcp as people write it: words in the order of the machine."""
    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def _made(make: object, interface: str) -> Choice:
    before = listening()
    how = f"GLOO_SOCKET_IFNAME={interface}" if interface else "gloo's own choice"
    try:
        device = make()  # type: ignore[operator]
    except RuntimeError as error:
        problem = _ENFORCE.sub("", str(error).splitlines()[0])[:_MAX_PROBLEM_CHARACTERS]
        return Choice(interface=interface, how=how, problem=problem)
    addresses = [address for inode, address in listening().items() if inode not in before]
    del device
    if not addresses:
        return Choice(interface=interface, how=how, problem="no listening socket was seen")
    return Choice(interface=interface or _interface_of(addresses[0]), address=addresses[0], how=how)


def _inodes(directory: Path) -> Iterable[str]:
    for name in os.listdir(directory):
        try:
            link = os.readlink(directory / name)
        except OSError:
            continue  # closed since, as the one that lists the directory is
        if link.startswith("socket:["):
            yield link[8:-1]


def _interface_of(address: str) -> str:
    if ipaddress.ip_address(address).is_loopback:
        address = "127.0.0.1"  # the loopback interface has all of 127.0.0.0/8
    for name, rows in psutil.net_if_addrs().items():
        if any(row.address.partition("%")[0] == address for row in rows):
            return name
    return ""
