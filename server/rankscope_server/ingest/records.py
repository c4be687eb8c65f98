"""Validates records one by one: decodes, checks ranges, cuts what is too long.

What comes out fits the database as it is: numbers within 64 bits, text without NUL, bounded.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, TypeAlias

import msgspec

from rankscope.wire import schema
from rankscope.wire.schema import MAX_RANK, AnyRecord, GroupState, PeerState, Record

MAX_STEP = 1 << 48
MAX_TIME_NS = 1 << 62
_WIDE = (-(1 << 62), 1 << 62)
# Least and largest value of integer fields; others must fit 63 bits.
_RANGES: dict[str, tuple[int, int]] = {
    "attempt": (0, 1 << 20),
    "rank": (schema.NODE_RANK, MAX_RANK),
    "world_size": (0, MAX_RANK),
    "local_world_size": (0, MAX_RANK),
    "local_rank": (-1, MAX_RANK),
    "node_rank": (-1, MAX_RANK),
    "step": (0, MAX_STEP),
    "last_step": (0, MAX_STEP),
    "level": (0, 10_000),
    "issued": (0, MAX_TIME_NS),
    "ended": (0, MAX_TIME_NS),
    "count": (0, 1 << 40),  # so that all of a run can be added up
    "pid": (0, 1 << 40),
    "offset_ns": _WIDE,
    "stage": (-1, MAX_RANK),
    "p2p_peer": (-1, MAX_RANK),
    "self_ns": (-1, MAX_TIME_NS),
}
# Most characters; longer text is cut with a mark. Of others 4,096.
_LENGTHS = {"message": 65_536, "detail": 65_536, "traceback": 262_144, "text": 262_144}
_LENGTH = 4_096
_IDENTITIES = {"group": 256, "host": 255, "name": 256, "source": 64, "reason": 256}
_MAX_ENTRIES = 4_096
_Struct: TypeAlias = Record | GroupState | PeerState | schema.OperatorTime
_RANK_KINDS = (schema.RankRegistered, schema.RankEnded, schema.RankState)


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A record or chunk that was not stored, and why."""

    index: int  # place in `part`
    kind: str | None
    field: str | None
    reason: str
    remedy: str
    part: str = "records"


class RefusalError(ValueError):
    """This record is not stored; carries the field, the reason and the remedy."""

    def __init__(self, field: str, reason: str, remedy: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason, self.remedy = field, reason, remedy


class _Kind(msgspec.Struct):
    kind: str


_decode_kind = msgspec.msgpack.Decoder(_Kind).decode
_KNOWN = {record.__struct_config__.tag for record in schema.RECORD_KINDS}


def validate_records(raw: list[msgspec.Raw]) -> tuple[list[AnyRecord], list[Refused]]:
    """Return the records that can be stored, cleaned, and the refused ones with the reason."""
    valid: list[AnyRecord] = []
    refused: list[Refused] = []
    for index, data in enumerate(raw):
        try:
            valid.append(clean(schema.decode_record(data)))
        except RefusalError as error:
            refused.append(_refused(index, data, error))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            refused.append(_refused(index, data, _undecodable(data, error)))
    return valid, refused


def clean(record: AnyRecord) -> AnyRecord:
    """Return the record fit for storing. Raises RefusalError."""
    if isinstance(record, schema.LogLine) and _is_plain(record):
        return record
    if isinstance(record, _RANK_KINDS) and record.rank < 0:
        raise RefusalError("rank", f"{record.rank} is not a rank", "send the global rank, from 0")
    changes = _changes(record)
    return msgspec.structs.replace(record, **changes) if changes else record


_MAX_LEVEL, _MAX_MESSAGE = _RANGES["level"][1], _LENGTHS["message"]


def _is_plain(line: schema.LogLine) -> bool:
    """Return whether a line is surely fit as it is: most are, and there are many."""
    return (
        0 <= line.time_ns <= MAX_TIME_NS
        and 0 <= line.step <= MAX_STEP
        and 0 <= line.level <= _MAX_LEVEL
        and 0 <= line.attempt <= MAX_RANK
        and schema.NODE_RANK <= line.rank <= MAX_RANK
        and len(line.message) <= _MAX_MESSAGE
        and len(line.logger) <= _LENGTH
        and "\x00" not in line.message
        and "\x00" not in line.logger
        and (not line.fields or _are_plain(line.fields))
    )


def _are_plain(fields: dict[str, str]) -> bool:
    return len(fields) <= _MAX_ENTRIES and all(
        len(name) <= _IDENTITIES["name"]
        and len(value) <= _LENGTH
        and "\x00" not in name
        and "\x00" not in value
        for name, value in fields.items()
    )


def place_of(error: Exception) -> str:
    """Return the field that a decoding error names, or an empty string."""
    _, found, rest = str(error).partition("`$.")
    return rest.partition("`")[0] if found else ""


class _Field(NamedTuple):
    """What a field may hold as it is, whatever type it has."""

    name: str
    least: int
    most: int
    length: int
    default: object  # it is fit


@functools.cache
def _fields_of(kind: type[_Struct]) -> tuple[_Field, ...]:
    return tuple(
        _Field(
            field.name, *_range_of(field.name),
            _IDENTITIES.get(field.name, _LENGTHS.get(field.name, _LENGTH)), field.default,
        )
        for field in msgspec.structs.fields(kind)
    )  # fmt: skip


def _range_of(name: str) -> tuple[int, int]:
    default = (0, MAX_TIME_NS) if name.endswith(("_ns", "_bytes")) else _WIDE
    return _RANGES.get(name, default)


def _changes(record: _Struct) -> dict[str, Any]:
    """Return the fields that must be another value. Nearly all are fit as they are."""
    changes: dict[str, Any] = {}
    values = msgspec.structs.astuple(record)
    for (name, least, most, length, default), value in zip(
        _fields_of(type(record)), values, strict=True
    ):
        if value is default:  # as most are
            continue
        kind = type(value)
        if kind is int:
            if not least <= value <= most:
                raise RefusalError(
                    name, f"{value} is outside {least}..{most}", "send a value in this range"
                )
        elif kind is str:
            if len(value) > length or "\x00" in value:
                changes[name] = clean_text(name, value)
        elif kind is not bool and value is not None:
            cleaned = _clean_value(record, name, value)
            if cleaned is not value:
                changes[name] = cleaned
    return changes


def _clean_value(record: _Struct, name: str, value: Any) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RefusalError(name, "is not a finite number", "send a number or leave it out")
        return value
    if isinstance(value, list):
        return _clean_list(name, value)
    if isinstance(value, dict):
        return _clean_dict(record, name, value)
    return value


def clean_text(name: str, text: str) -> str:
    """Return text without NUL, cut to what its field may hold. Raises RefusalError."""
    if (limit := _IDENTITIES.get(name)) is not None and name in {"group", "host"}:
        # Cutting an identity could make two things one.
        if len(text) > limit:
            raise RefusalError(name, f"has {len(text)} characters", f"use at most {limit}")
        if "\x00" in text:
            raise RefusalError(name, "holds a NUL character", "remove it")
        return text
    limit = _IDENTITIES.get(name, _LENGTHS.get(name, _LENGTH))
    if "\x00" in text:
        text = text.replace("\x00", "\N{SYMBOL FOR NULL}")
    if len(text) <= limit:
        return text
    mark = f" [cut: {len(text) - limit} more characters]"
    return text[: max(limit - len(mark), 0)] + mark


def _clean_list(name: str, values: list[Any]) -> list[Any]:
    if name == "ranks":
        is_wrong = len(values) > MAX_RANK or min(values, default=0) < 0
        if is_wrong or max(values, default=0) >= MAX_RANK:
            raise RefusalError(name, "holds what is not a rank", f"use 0 to {MAX_RANK}")
        return values
    if len(values) > _MAX_ENTRIES:
        values = values[:_MAX_ENTRIES]
    if values and isinstance(values[0], GroupState | PeerState | schema.OperatorTime):
        changes = list(map(_changes, values))
        if not any(changes):
            return values
        return [
            msgspec.structs.replace(value, **new) if new else value
            for value, new in zip(values, changes, strict=True)
        ]
    return [clean_text("", value) if isinstance(value, str) else value for value in values]


def _clean_dict(record: _Struct, name: str, values: dict[str, Any]) -> dict[str, Any]:
    if len(values) > _MAX_ENTRIES:
        raise RefusalError(name, f"has {len(values)} entries", f"send at most {_MAX_ENTRIES}")
    if isinstance(record, schema.Metrics):
        # NaN and infinity are news here: a loss that diverged. They are stored as "not a number".
        return {clean_text("name", key): value for key, value in values.items()}
    return {clean_text("name", key): clean_text("", value) for key, value in values.items()}


def _undecodable(data: msgspec.Raw, error: Exception) -> RefusalError:
    kind = _kind(data)
    if kind is not None and kind not in _KNOWN:
        return RefusalError(
            "kind", f"kind {kind[:64]!r} is not known to this server", "update the server"
        )
    return RefusalError(place_of(error) or "record", str(error)[:300], "send it as the schema says")


def _kind(data: msgspec.Raw) -> str | None:
    try:
        return _decode_kind(data).kind
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _refused(index: int, data: msgspec.Raw, error: RefusalError) -> Refused:
    kind = _kind(data)
    return Refused(
        index=index, kind=kind[:64] if kind else None, field=error.field, reason=error.reason,
        remedy=error.remedy,
    )  # fmt: skip
