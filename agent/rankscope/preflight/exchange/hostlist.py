"""Lists of nodes as schedulers write them: Slurm's compressed form, host files."""

from __future__ import annotations

import re
from itertools import product

MAX_NODES = 65_536  # of one list; a longer one is a typing mistake, and must not eat the memory
_MAX_HOST_CHARACTERS = 253  # RFC 1035, as text
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")


class HostListError(ValueError):
    """A list of nodes that cannot be read; the message says where."""


def expand(text: str) -> tuple[str, ...]:
    """Return the names in Slurm's compressed form: "gpu[01-03,7],login" and the like.

    Several brackets in a name multiply, leading zeros are kept, repetitions are dropped: as
    `scontrol show hostnames` does, which is absent in most containers.
    """
    names: list[str] = []
    for item in _split(text):
        choices: list[list[str]] = []
        position = 0
        for match in _PART.finditer(item):
            if match.start() != position:
                break
            position = match.end()
            inner, plain = match.groups()
            choices.append([plain] if inner is None else _numbers(inner, item))
        if position != len(item):
            raise HostListError(f"{item!r}: brackets do not match")
        size = 1
        for choice in choices:
            size *= len(choice)
        if len(names) + size > MAX_NODES:
            raise HostListError(f"{item!r}: more than {MAX_NODES} nodes")
        names += ["".join(parts) for parts in product(*choices)]
    return tuple(dict.fromkeys(names))


def read_hostfile(text: str) -> tuple[str, ...]:
    """Return the hosts of a host file, each once, in its order.

    Read are the forms of Open MPI and DeepSpeed ("node1 slots=8"), MPICH ("node1:8"), SGE
    ("node1 8 queue ...") and the plain list of PBS and LSF, which repeats a host per slot.
    """
    hosts: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        host = _without_slots(words[0].rpartition("@")[2])
        if not host or len(host) > _MAX_HOST_CHARACTERS or "=" in host:
            raise HostListError(f"line {number}: {words[0]!r} is no host name")
        hosts[host] = None
        if len(hosts) > MAX_NODES:
            raise HostListError(f"more than {MAX_NODES} nodes")
    return tuple(hosts)


def _split(text: str) -> list[str]:
    """Cut at the commas that stand outside of brackets."""
    items, depth, item = [], 0, ""
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            items.append(item)
            item = ""
        else:
            item += character
    return [stripped for part in (*items, item) if (stripped := part.strip())]


def _numbers(inner: str, item: str) -> list[str]:
    found: list[str] = []
    for span in inner.split(","):
        low, dash, high = span.strip().partition("-")
        high = high if dash else low
        if not (low.isdecimal() and high.isdecimal()) or int(high) < int(low):
            raise HostListError(f"{item!r}: {span!r} is no range")
        if int(high) - int(low) >= MAX_NODES:
            raise HostListError(f"{item!r}: more than {MAX_NODES} nodes")
        found += [f"{n:0{len(low)}d}" for n in range(int(low), int(high) + 1)]
    return found


def _without_slots(word: str) -> str:
    """Return the host of "host:8", and an IPv6 address whole, with or without brackets."""
    if word.startswith("["):
        return word[1:].partition("]")[0]
    return word.partition(":")[0] if word.count(":") == 1 else word
