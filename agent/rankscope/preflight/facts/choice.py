"""Which interface gloo and NCCL will take: their rules, worked out before they run.

Read in NCCL 2.30.7 (src/misc/socket.cc, src/os/linux.cc: ncclFindInterfaces, ncclOsFindInterfaces)
and in torch 2.13 (ProcessGroupGloo.cpp: createDefaultDevice; gloo transport/tcp/device.cc). The
smoke test asks gloo itself; where the two differ, gloo is right.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence

import msgspec

from rankscope.preflight.links import Link
from rankscope.preflight.system import System

_MAX_NCCL_INTERFACES = 16  # MAX_IFS
NCCL_CONF_FILES = (
    "/etc/nccl.conf",
    "~/.nccl.conf",
)  # the later one wins, the environment over both


class Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The interface that a library takes, and by which of its rules."""

    interface: str = ""
    address: str = ""  # which it advertises
    how: str = ""  # "GLOO_SOCKET_IFNAME=eth0", "the host name node1 resolves to it"
    problem: str = ""  # why it cannot be used: "no interface is named eth9"


def gloo(system: System, links: Sequence[Link]) -> tuple[Choice, ...]:
    """Return what gloo takes: the named interfaces, else what the host name means."""
    text = system.environ.get("GLOO_SOCKET_IFNAME", "")
    if text:
        return tuple(_gloo_named(name, text, links) for name in text.split(",") if name)
    hostname = system.hostname()
    own = {address: link.name for link in links for address in _bare(link)}
    for address in system.resolve(hostname).addresses:
        bare = address.partition("%")[0]
        if bare in own:
            how = f"the host name {hostname} resolves to {bare}"
            return (Choice(interface=own[bare], address=bare, how=how),)
        if _is_loopback(bare):  # all of 127/8 can be bound, on whichever address lo has
            how = f"the host name {hostname} resolves to {bare}"
            return (Choice(interface=_loopback(links), address=bare, how=how),)
    problem = f"the host name {hostname} resolves to no address of this machine"
    how = "gloo falls back to loopback"
    return (Choice(interface=_loopback(links), address="127.0.0.1", how=how, problem=problem),)


def _gloo_named(name: str, text: str, links: Sequence[Link]) -> Choice:
    """One name of GLOO_SOCKET_IFNAME: exact, and its first address, whatever the family."""
    how = f"GLOO_SOCKET_IFNAME={text}"
    for link in links:
        if link.name == name:
            addresses = _bare(link)
            problem = "" if addresses else f"{name} has no address"
            address = addresses[0] if addresses else ""
            return Choice(interface=name, address=address, how=how, problem=problem)
    problem = f"no interface is named {name}"
    if name[0] in "^=":
        problem += f": {name[0]} is NCCL's syntax, gloo takes exact names"
    return Choice(interface=name, how=how, problem=problem)


def nccl(system: System, links: Sequence[Link]) -> tuple[Choice, ...]:
    """Return what NCCL takes, in its order; the first one also carries the bootstrap."""
    settings = nccl_settings(system.environ, conf_files(system))
    family = {"AF_INET": 4, "AF_INET6": 6}.get(settings.get("NCCL_SOCKET_FAMILY", ""))
    text = settings.get("NCCL_SOCKET_IFNAME", "")
    if len(text) > 1:  # NCCL ignores a value of one character
        found = _matching(text, links, family)
        how = f"NCCL_SOCKET_IFNAME={text}"
        if not found:
            problem = f"no running interface with an address matches {text}"
            return (Choice(how=how, problem=problem),)
        return tuple(_choice(pair, how) for pair in found)
    found = _matching("ib", links, family)
    if found:
        return tuple(_choice(pair, "names that begin with ib come first") for pair in found)
    comm_id = settings.get("NCCL_COMM_ID", "")
    if len(comm_id) > 1:
        found = _same_subnet(system, comm_id, links)
        if found:
            return (_choice(found[0], f"the subnet of NCCL_COMM_ID={comm_id}"),)
    for pattern, how in _FALLBACKS:
        found = _matching(pattern, links, family)
        if found:
            return tuple(_choice(pair, how) for pair in found)
    return (Choice(problem="no running interface has an address"),)


_FALLBACKS = (
    ("^docker,lo,virbr", "all but names that begin with docker, lo, virbr"),
    ("docker", "nothing else is there: names that begin with docker"),
    ("lo", "nothing else is there: names that begin with lo"),
    ("virbr", "nothing else is there: names that begin with virbr"),
)


def nccl_settings(environment: Mapping[str, str], files: Mapping[str, str]) -> dict[str, str]:
    """Return NCCL's variables as it sees them: its files, then the environment."""
    settings: dict[str, str] = {}
    for text in files.values():
        for line in text.splitlines():
            name, sign, value = line.strip().partition("=")
            if sign and not name.startswith("#"):
                settings[name.strip()] = value.strip()
    return settings | {k: v for k, v in environment.items() if k.startswith("NCCL_")}


def conf_files(system: System) -> dict[str, str]:
    """Return the text of the files that NCCL reads, by the path as people write it."""
    paths = list(NCCL_CONF_FILES)
    if system.environ.get("NCCL_CONF_FILE"):
        paths[1] = system.environ["NCCL_CONF_FILE"]  # in place of the one in the home directory
    home = system.environ.get("HOME", "")
    texts = {path: system.read(re.sub(r"^~", home, path)) for path in paths}
    return {path: text for path, text in texts.items() if text is not None}


def matches(name: str, pattern: str) -> bool:
    """Return whether NCCL_SOCKET_IFNAME=`pattern` takes an interface of this name."""
    is_not = pattern.startswith("^")
    rest = pattern[1:] if is_not else pattern
    is_exact = rest.startswith("=")
    words = [word.partition(":")[0] for word in (rest[1:] if is_exact else rest).split(",")]
    words = [word for word in words if word]
    hit = not words or any(name == word if is_exact else name.startswith(word) for word in words)
    return hit != is_not


def _matching(pattern: str, links: Sequence[Link], family: int | None) -> list[tuple[Link, str]]:
    found: list[tuple[Link, str]] = []
    for version in (4, 6):  # getifaddrs lists all IPv4 addresses before the IPv6 ones
        for link in links:
            if "running" not in link.flags or any(link is taken for taken, _ in found):
                continue
            address = next((a for a in _bare(link) if _usable(a, version, family)), "")
            if address and matches(link.name, pattern):
                found.append((link, address))
    return found[:_MAX_NCCL_INTERFACES]


def _usable(address: str, version: int, family: int | None) -> bool:
    parsed = ipaddress.ip_address(address)
    is_skipped = parsed.version == 6 and parsed.is_loopback
    return parsed.version == version and family in (None, version) and not is_skipped


def _same_subnet(system: System, comm_id: str, links: Sequence[Link]) -> list[tuple[Link, str]]:
    host = comm_id[1:].partition("]")[0] if comm_id[0] == "[" else comm_id.partition(":")[0]
    addresses = system.resolve(host).addresses
    if not addresses:
        return []
    target = ipaddress.ip_address(addresses[0].partition("%")[0])
    return [
        (link, text.partition("/")[0])
        for link in links
        for text in link.addresses
        if target in ipaddress.ip_interface(text).network
    ]


def _choice(pair: tuple[Link, str], how: str) -> Choice:
    link, address = pair
    return Choice(interface=link.name, address=address, how=how)


def _bare(link: Link) -> list[str]:
    return [address.partition("/")[0] for address in link.addresses]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _loopback(links: Sequence[Link]) -> str:
    return next((link.name for link in links if "loopback" in link.flags), "lo")
