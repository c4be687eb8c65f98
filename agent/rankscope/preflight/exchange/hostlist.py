"""Lists of nodes as schedulers write them: Slurm's compressed form, host files."""

from __future__ import annotations

import re
from ipaddress import ip_address
from itertools import product

MAX_NODES = 65_536  # of one list; a longer one is a typing mistake, and must not eat the memory
_MAX_HOST_CHARACTERS = 253  # RFC 1035, as text
_MAX_LABEL_CHARACTERS = 63  # RFC 1035, of the part between two dots
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")


class HostListError(ValueError):
    """A list of nodes that cannot be read; the message says where."""


def why_no_host(name: str) -> str:
    """Return why `name` cannot be a host name or an address; "" if it can.

    Letters of any script, digits, "-" and "_" pass: what resolvers answer for. A resolver that is
    asked for a label of 64 characters, or for an empty one, raises instead of answering.
    """
    bare = name.removesuffix(".")
    if _is_address(name):
        return ""
    if "://" in name:
        return "it is a URL"
    if len(bare) > _MAX_HOST_CHARACTERS:
        return f"it has {len(bare)} characters, and {_MAX_HOST_CHARACTERS} are the most"
    if bare.endswith("."):
        return "it ends with two dots"
    if name.startswith("."):
        return "it begins with a dot"
    labels = bare.split(".")
    if not all(labels):
        return "there is nothing between two dots" if bare else "it is empty"
    long = next((label for label in labels if len(label) > _MAX_LABEL_CHARACTERS), "")
    if long:
        return f"a part of it has {len(long)} characters, and {_MAX_LABEL_CHARACTERS} are the most"
    odd = next((c for c in bare if not (c.isalnum() or c in "-_.")), "")
    if odd == ":":
        return "a port is written apart, as MASTER_PORT or --master-port"
    if odd:
        return f"{odd!r} cannot be part of a name"
    return "it begins with a dash" if name.startswith("-") else ""


def _is_address(text: str) -> bool:
    try:
        ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def same_host(name: str) -> str:
    """Return the form in which two spellings of one name are equal: no final dot, no capitals."""
    return name.lower().removesuffix(".")


def read_list(text: str) -> tuple[str, ...]:
    """Return the nodes as a person writes them: with commas, blanks, newlines, or brackets.

    A node that stands there twice is refused: it is a mistake of who wrote it, and of two nodes
    with one name one would be left out. Raises HostListError.
    """
    names: list[str] = []
    for item in _split(text, also=" \t\n\r;"):
        if _is_address(item.strip("[]")):
            item = item.strip("[]")  # "[fd00::1]"
        names += expand(item) if "[" in item or "]" in item else [item]
    for name in names:
        if why := why_no_host(name):
            raise HostListError(f"{name[:80]!r} is no host name: {why}")
    names = [name.removesuffix(".") for name in names]
    forms = [same_host(name) for name in names]
    twice = [n for i, n in enumerate(names) if forms[i] in forms[:i]]
    if twice:
        some = ", ".join(dict.fromkeys(twice))
        raise HostListError(f"{some[:80]} is in the list twice: name each node once")
    return tuple(names)


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
        if not host or (why := why_no_host(host)):
            why = f": {why}" if host else ""
            raise HostListError(f"line {number}: {words[0][:80]!r} is no host name{why}")
        host = host.removesuffix(".")
        hosts[host] = None
        if len(hosts) > MAX_NODES:
            raise HostListError(f"more than {MAX_NODES} nodes")
    return tuple(hosts)


def read_counted(text: str) -> tuple[str, ...]:
    """Return the hosts of LSF's variables, each once: "a 2 b 2" (LSB_MCPU_HOSTS) or "a a b b"."""
    return tuple(dict.fromkeys(word for word in text.split() if not word.isdecimal()))


def _split(text: str, also: str = "") -> list[str]:
    """Cut at the commas that stand outside of brackets, and at the characters of `also`."""
    items, depth, item = [], 0, ""
    for character in text:
        depth += (character == "[") - (character == "]")
        if (character == "," or character in also) and depth <= 0:
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
