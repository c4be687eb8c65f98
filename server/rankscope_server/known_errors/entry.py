"""One known error, and the check that makes it from a table of a TOML file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from rankscope_server.search.literals import NoLiteralError, literals_of

Role: TypeAlias = Literal["initiating", "cascade", "teardown", "benign", "note"]
ROLES: tuple[Role, ...] = get_args(Role)
FAMILIES = (
    "backend_missing", "bad_device_index", "benign", "collective_timeout_hang",
    "connection_lost", "connection_refused", "dataloader", "ddp_unused_params",
    "desync_mismatch", "disk_full", "dns", "driver_runtime_mismatch", "duplicate_gpu", "ecc",
    "fabric_manager", "firewall_or_unroutable", "gpu_hardware_xid", "ib_rdma",
    "library_symbol", "memlock_ulimit", "nccl_version_mismatch", "numerics", "oom_gpu",
    "oom_host", "other", "p2p_acs_iommu", "permission", "port_in_use", "process_killed",
    "rendezvous_timeout", "shm_exhausted", "user_exception_one_rank", "wrong_interface",
)  # fmt: skip
MAX_STRENGTH = 3  # 3 a cause in itself, 2 a known failure, 1 a line that leaves much open
_TEXTS = ("id", "family", "role", "cause", "remedy", "check", "since")
_LISTS = ("patterns", "sources", "when", "unless")
_MIN_SENTENCE = 8


class EntryError(ValueError):
    """An entry is not as it must be; the text names the field and says what is right."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownError:
    """A known failure: how its lines read, what they mean and what helps.

    `patterns` are regular expressions, case ignored, any of which recognises a line. The groups
    `rank` and `culprit` in them name the rank that speaks and the rank that is at fault.
    """

    id: str
    family: str
    role: Role
    patterns: tuple[re.Pattern[str], ...]
    literals: tuple[tuple[str, ...], ...]  # for each pattern: lower-case texts, one is in a match
    cause: str = ""
    remedy: str = ""
    check: str = ""  # what to look at next
    since: str = ""  # the version that first says so
    sources: tuple[str, ...] = ()
    strength: int = 2
    min_count: int = 1  # fewer lines than that are no finding
    when: tuple[str, ...] = ()  # counts only if one of these entries was seen too
    unless: tuple[str, ...] = ()  # does not count if one of these was seen
    differs: bool = False  # counts only if the first group takes two values or more
    file: str = ""

    @property
    def is_conditional(self) -> bool:
        """Whether other lines decide if this entry counts."""
        return bool(self.when or self.unless or self.differs)

    def match(self, text: str, lowered: str) -> re.Match[str] | None:
        """Return where the entry recognises a line, None if it does not."""
        for pattern, literals in zip(self.patterns, self.literals, strict=True):
            if any(literal in lowered for literal in literals):
                found = pattern.search(text)
                if found is not None:
                    return found
        return None


def entry_of(table: Mapping[str, Any], file: str) -> KnownError:
    """Return the entry that a TOML table describes. Raises `EntryError`."""
    name = table.get("id")
    who = f"entry {name!r}" if isinstance(name, str) and name else "an entry without id"
    try:
        return _checked(table, file)
    except EntryError as error:
        raise EntryError(f"{file}: {who}: {error}") from error


def _checked(table: Mapping[str, Any], file: str) -> KnownError:
    allowed = {*_TEXTS, *_LISTS, "strength", "min_count", "differs"}
    unknown = sorted(set(table) - allowed)
    if unknown:
        known = ", ".join(sorted(allowed))
        raise EntryError(f"field {unknown[0]!r} is not known; known are {known}")
    texts = {key: _text(table, key) for key in _TEXTS}
    lists = {key: _strings(table, key) for key in _LISTS}
    role = _role(texts["role"] or "initiating")
    _check_texts(texts, role)
    if not lists["patterns"]:
        raise EntryError("field 'patterns' is missing; give a list of regular expressions")
    patterns = tuple(_pattern(text, index) for index, text in enumerate(lists["patterns"]))
    differs = table.get("differs", False)
    if not isinstance(differs, bool):
        raise EntryError("field 'differs' must be true or false")
    if differs and any(pattern.groups < 1 for pattern in patterns):
        raise EntryError("field 'patterns' needs a group (...) where 'differs' is true")
    return KnownError(
        **{key: texts[key] for key in ("id", "family", "cause", "remedy", "check", "since")},
        role=role,
        patterns=patterns,
        literals=tuple(_literals(p, index) for index, p in enumerate(lists["patterns"])),
        sources=lists["sources"],
        strength=_number(table, "strength", 2, MAX_STRENGTH),
        min_count=_number(table, "min_count", 1, 1_000_000),
        when=lists["when"],
        unless=lists["unless"],
        differs=differs,
        file=file,
    )


def _check_texts(texts: Mapping[str, str], role: Role) -> None:
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", texts["id"]):
        raise EntryError("field 'id' must be lower-case words with dashes, as in \"disk-full\"")
    if texts["family"] not in FAMILIES:
        names = ", ".join(FAMILIES)
        raise EntryError(f"field 'family' is {texts['family']!r}; it must be one of {names}")
    for key in ("cause", "remedy"):
        if role not in ("benign", "note") and len(texts[key]) < _MIN_SENTENCE:
            raise EntryError(f"field {key!r} is missing; write a sentence that helps")


def _number(table: Mapping[str, Any], key: str, default: int, most: int) -> int:
    value = table.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise EntryError(f"field {key!r} is {value!r}; it must be a number from 1 to {most}")
    return value


def _role(name: str) -> Role:
    role = next((role for role in ROLES if role == name), None)
    if role is None:
        raise EntryError(f"field 'role' is {name!r}; it must be one of {', '.join(ROLES)}")
    return role


def _text(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key, "")
    if not isinstance(value, str):
        raise EntryError(f"field {key!r} must be a text in quotes")
    return " ".join(value.split())


def _strings(table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise EntryError(f"field {key!r} must be a list of texts, as in {key} = ['...']")
    return tuple(value)


def _pattern(text: str, index: int) -> re.Pattern[str]:
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise EntryError(f"field 'patterns', number {index + 1}: {text!r}: {error}") from error


def _literals(text: str, index: int) -> tuple[str, ...]:
    try:
        return literals_of(text)
    except NoLiteralError as error:
        raise EntryError(f"field 'patterns', number {index + 1}: {text!r}: {error}") from error
