"""What is taken of a report that came from another node: data, and nothing that acts.

Every text is cut to a length and loses the characters that end lines, move cursors or turn what
stands beside them. What is a name (of a node, an interface, a variable) or an address keeps only
what such a name can hold, for names stand in commands. A report that is too large, or whose numbers
cannot be, is refused with the reason.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rankscope.preflight.facts.edges import EdgeFacts
from rankscope.preflight.model import Facts, NodeReport, acts, encode

MOST_TEXT, MOST_NAME = 16_384, 255  # characters; the longest path has 4,096
_BASE_BYTES, _NODE_BYTES = 2 << 20, 8 << 10  # of the report of one of n nodes
_MOST_UNKNOWN = 1024  # nodes in a report, where it is not known how many there are
_MOST_KNOWN = 1024  # texts that were looked at lately: most come again
_INERT = frozenset({int, float, bool, type(None)})
_PORTS = range(1 << 16)
# What a shell acts on, a blank, and a dash that would begin an option.
_NO_NAME = re.compile(r"[^A-Za-z0-9_.:%@/+=^,~\[\]-]|^-")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_KEPT = "\n\t"  # of texts of several lines

# Fields that are names wherever they stand; a dictionary so called has names as keys.
_NAMES = frozenset({
    "node", "hostname", "master_addr", "rendezvous_id", "rendezvous_backend", "backend", "backends",
    "container", "firewall_tools", "user", "governor", "huge_pages", "address", "local_address",
    "gone", "seen_address", "source_address", "reverse_of", "interface", "bond_slaves", "duplex",
    "device", "uuid", "bus_id", "answered_by", "again_with", "heard", "part", "gid",
    "torch", "torch_cuda", "torch_hip", "torch_git", "nccl", "python", "kernel", "driver",
    "cuda_driver", "visible", "machine_id", "boot_id", "nodes", "only", "skip",
    "names", "digest", "full_name", "canonical", "local_addr",
    "gateway", "prefix", "mac", "variable",
})  # fmt: skip
_NAMES_OF = frozenset({"Interface.name", "Resolved.name", "Endpoint.name", "SmokeFacts.store"})
_NAMED_VALUES = frozenset({"packages"})  # dictionaries whose values are names, too: versions
_ADDRESSES = frozenset({"addresses"})
_WITH_PREFIX = frozenset({"Interface"})  # their addresses are "10.0.0.5/24"
_ADDRESS_OF = frozenset({
    "Choice.address", "Dial.local_address", "Dial.seen_address", "EdgeFacts.source_address",
    "NameFacts.reverse_of", "Route.address", "Route.gateway", "Route.source", "Neighbour.address",
})  # fmt: skip


class RefusedReportError(Exception):
    """A report that is not taken; the message says why."""


@dataclass
class _Seen:
    """Parts of a node's last report as they came, and as they were taken."""

    parts: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    edges: dict[str, tuple[EdgeFacts, EdgeFacts]] = field(default_factory=dict)


class Intake:
    """Takes the reports of a run; what did not change since the last one is not looked at again."""

    def __init__(self, num_nodes: int = 0) -> None:
        self._num_nodes = num_nodes
        self._seen: dict[str, _Seen] = {}

    def take(self, report: NodeReport) -> NodeReport:
        """Return what is taken of a report. Raises RefusedReportError."""
        self._check(report)
        return self.clean(report)

    def clean(self, report: NodeReport) -> NodeReport:
        """Return a report with nothing in it that acts."""
        seen = self._seen.setdefault(report.node, _Seen())
        changed = {
            name: clean
            for name in report.__struct_fields__
            if name not in ("edges", "facts")
            and (clean := _kept(seen.parts, name, getattr(report, name), _part(name)))
            is not getattr(report, name)
        }
        edges = {name(p): _kept(seen.edges, p, e, cleaned) for p, e in report.edges.items()}
        if report.claims:
            claims = changed.get("claims", report.claims)
            changed["claims"] = {n: agents for n, agents in claims.items() if len(agents) > 1}
        facts = {
            part: _kept(seen.parts, f"facts.{part}", getattr(report.facts, part), cleaned)
            for part in report.facts.__struct_fields__
        }
        return msgspec.structs.replace(report, edges=edges, facts=Facts(**facts), **changed)

    def _check(self, report: NodeReport) -> None:
        if not report.node or name(report.node) != report.node:
            raise RefusedReportError(f"{name(report.node)[:60]!r} is no name of a node")
        num_nodes = self._num_nodes or _MOST_UNKNOWN
        size, most = len(encode(report)), _BASE_BYTES + num_nodes * _NODE_BYTES
        if size > most:
            raise RefusedReportError(f"it has {size:,} bytes, at most {most:,} are taken")
        num = max(len(report.edges), len(report.claims), len(report.heard), len(report.gone))
        if num > 4 * num_nodes + 64:
            raise RefusedReportError(f"it names {num:,} nodes, of {num_nodes:,} there can be")
        heard = report.listening
        if any(
            p not in _PORTS
            for p in (heard.master, heard.mesh, heard.udp, heard.shut, *heard.ephemeral)
        ):
            raise RefusedReportError("it listens on a port that there is not")


def _kept(seen: dict[str, tuple[Any, Any]], key: str, raw: Any, clean: Callable[[Any], Any]) -> Any:
    before = seen.get(key)
    if before is None or before[0] != raw:
        before = seen[key] = (raw, clean(raw))
    return before[1]


def _part(part: str) -> Callable[[Any], Any]:
    return lambda value: _field(value, part, "NodeReport")


def cleaned(value: Any) -> Any:
    """Return a struct of a report with nothing in it that acts; the same one if there was none."""
    if not isinstance(value, msgspec.Struct):
        return _field(value, "", "")
    kind = type(value).__name__
    changed = {}
    for one in value.__struct_fields__:
        raw = getattr(value, one)
        if raw.__class__ in _INERT or not raw:
            continue
        clean = _field(raw, one, kind)
        if clean is not raw and clean != raw:
            changed[one] = clean
    return msgspec.structs.replace(value, **changed) if changed else value


def _field(value: Any, called: str, of: str) -> Any:
    if isinstance(value, str):
        return _rule(called, of)(value)
    if isinstance(value, msgspec.Struct):
        return cleaned(value)
    if isinstance(value, list | tuple | set | frozenset):
        is_listed, may_be_net = called in _ADDRESSES, of in _WITH_PREFIX
        kept = [one for one in value if not is_listed or _is_address(one, may_be_net)]
        return type(value)(_field(one, called, of) for one in kept)
    if isinstance(value, Mapping):
        inner = "node" if called in _NAMED_VALUES else ""
        return {_key(key): _field(one, inner, "") for key, one in value.items()}
    return value


@functools.cache
def _rule(called: str, of: str) -> Callable[[str], str]:
    if f"{of}.{called}" in _ADDRESS_OF:
        return _address
    return name if called in _NAMES or f"{of}.{called}" in _NAMES_OF else text


def _address(raw: str) -> str:
    return raw if _is_address(raw) else ""


def _key(key: Any) -> Any:
    """Return a key: of a path what is text there, else a name."""
    if not isinstance(key, str):
        return key
    return text(key)[:MOST_NAME] if key.startswith(("/", "~")) else name(key)


def text(raw: str) -> str:
    """Return a text without what acts, and no longer than any that is meant."""
    if len(raw) <= MOST_NAME:
        return _known_text(raw)
    return _text(f"{raw[:MOST_TEXT]}..." if len(raw) > MOST_TEXT else raw)


def name(raw: str) -> str:
    """Return a name, with "_" for what no name holds."""
    return _known_name(raw[:MOST_NAME])


def _text(raw: str) -> str:
    if raw.isascii() and raw.isprintable():
        return raw
    raw = _ESCAPES.sub("", raw)
    return "".join(one for one in raw if one in _KEPT or not acts(one))


# Short ones alone are kept, so that a report cannot fill the memory.
_known_text = functools.lru_cache(_MOST_KNOWN)(_text)


@functools.lru_cache(_MOST_KNOWN)
def _known_name(raw: str) -> str:
    return _NO_NAME.sub("_", _text(raw))


def _is_address(one: str, may_have_prefix: bool = False) -> bool:
    is_short = len(one) <= MOST_NAME and (may_have_prefix or "/" not in one)
    return is_short and _is_known_address(one)


@functools.lru_cache(_MOST_KNOWN)
def _is_known_address(one: str) -> bool:
    try:
        ipaddress.ip_interface(one.partition("%")[0])
    except ValueError:
        return False
    return True
