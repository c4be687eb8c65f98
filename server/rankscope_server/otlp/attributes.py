"""What attributes say of who sent something: the run, the rank, its host, the step it was in."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rankscope.wire.redaction import clean_fields
from rankscope.wire.schema import MAX_RANK

_PREFIXES = (
    "rankscope.", "torch.distributed.", "torch.", "distributed.", "dist.", "training.", "train.",
    "trainer.", "process.", "ml.",
)  # fmt: skip
RANK = ("rank", "global_rank", "world_rank")
WORLD_SIZE = ("world_size", "num_ranks")
STEP = (
    "step", "global_step", "step_number", "iteration", "current_iteration", "iter", "iter_id",
)  # fmt: skip
_HOST = ("host.name", "k8s.node.name", "node_name", "hostname")
# The first of these that is there names the run; a service's instance is one process of it.
RUN = ("rankscope.run", "job_id", "job.id", "slurm.job_id", "k8s.job.uid", "k8s.job.name")
_ENVIRONMENT = ("deployment.environment.name", "deployment.environment")
# torchft numbers ranks within each replica group: such a `rank` is that of several processes.
_REPLICA = "replica_id"
_MOST_FIELDS, _MOST_TEXT = 64, 1_024
_NO_ID, _MOST_ID = re.compile(r"[^A-Za-z0-9._-]+"), 128


def value_of(value: Any) -> Any:
    """Return an AnyValue as a value of JSON."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [value_of(one) for one in value.array_value.values]
    if kind == "kvlist_value":
        return {one.key: value_of(one.value) for one in value.kvlist_value.values}
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    return getattr(value, kind)


def values_of(attributes: Iterable[Any]) -> dict[str, Any]:
    """Return attributes by name."""
    return {one.key: value_of(one.value) for one in attributes}


def text_of(value: Any) -> str:
    """Return a value as text."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def fields_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Return attributes as fields of a line, without secrets; what is beyond the limit is said."""
    some = list(values.items())[:_MOST_FIELDS]
    fields = {name[:256]: text_of(value)[:_MOST_TEXT] for name, value in some}
    if len(values) > len(some):
        fields["attributes left out"] = str(len(values) - len(some))
    return clean_fields(fields)


def bare(name: str) -> str:
    """Return the name of an attribute without the words that programs put before it."""
    name = name.lower().replace("-", "_")
    prefix = next((one for one in _PREFIXES if name.startswith(one)), "")
    return name[len(prefix) :]


def number_of(values: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return the whole number that one of the names has, -1 where none has one."""
    for wanted in names:
        for name, value in values.items():
            if bare(name) == wanted and (found := whole(value)) >= 0:
                return found
    return -1


def whole(value: Any) -> int:
    """Return a whole number from 0 on, also as text, as environment variables have it; else -1."""
    if isinstance(value, bool):
        return -1
    if isinstance(value, str):
        return int(value) if value.isdecimal() and len(value) < 16 else -1
    if isinstance(value, float):
        return int(value) if value.is_integer() and 0 <= value < 1 << 53 else -1
    return value if isinstance(value, int) and 0 <= value < 1 << 53 else -1


def rank_of(values: Mapping[str, Any]) -> int:
    """Return the global rank, -1 where it is not said."""
    found = -1 if _REPLICA in values else number_of(values, RANK)
    return found if found < MAX_RANK else -1


def run_id_of(text: str) -> str:
    """Return a text as the id of a run; what is cut off one is in a digest at its end."""
    cleaned = _NO_ID.sub("-", text).strip("-.")
    if len(cleaned) <= _MOST_ID:
        return cleaned
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{cleaned[: _MOST_ID - 1 - len(digest)]}-{digest}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Who a resource is: a process of a run."""

    run_id: str  # empty: no attribute says it
    name: str  # of the run, for people
    attempt: int
    rank: int  # -1: not said
    world_size: int  # 0: not said
    local_rank: int
    local_world_size: int
    node_rank: int
    host: str
    pid: int
    backend: str
    instance: str  # of the process, where its rank is known from another of its spans


def origin_of(values: Mapping[str, Any]) -> Origin:
    """Return who sends, by the attributes of its resource."""
    run = next((text_of(values[name]) for name in RUN if values.get(name)), "")
    service = str(values.get("service.name", ""))
    if service.startswith("unknown_service"):
        service = ""
    if not run and service:
        where = next((str(values[name]) for name in _ENVIRONMENT if values.get(name)), "")
        space = str(values.get("service.namespace", ""))
        run = ".".join(part for part in (space, service, where) if part)
    host = next((str(values[name]) for name in _HOST if values.get(name)), "")
    pid = max(0, whole(values.get("process.pid")))
    instance = str(values.get("service.instance.id") or "")
    attempt = number_of(values, ("attempt", "torchelastic.restart_count", "restart_count"))
    return Origin(
        run_id=run_id_of(run),
        name=(service or run)[:256],
        attempt=attempt if 0 <= attempt < 1 << 20 else 0,
        rank=rank_of(values),
        world_size=min(max(0, number_of(values, WORLD_SIZE)), MAX_RANK),
        local_rank=max(0, number_of(values, ("local_rank",))),
        local_world_size=max(1, number_of(values, ("local_world_size",))),
        node_rank=number_of(values, ("node_rank", "group_rank")),
        host="".join(c for c in host if c.isprintable())[:255] or "unknown",
        pid=pid,
        backend=str(values.get("backend") or values.get("torch.distributed.backend") or "")[:64],
        instance=instance or (f"{host}/{pid}" if pid else ""),
    )
