"""The machines of a run: which sources work there, their GPUs, and what happened to them."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, get_args

import numpy as np
import sqlalchemy as sa

from rankscope.wire.nvidia_codes import THROTTLE_SLOWDOWNS, throttle_words
from rankscope_server.answers import capped, json_object, of_row, to_ms
from rankscope_server.api.machines.saturation import saturation_text
from rankscope_server.api.machines.schema import (
    Machine,
    MachineEvent,
    MachineGpu,
    Machines,
    MachineSource,
    SourceState,
)
from rankscope_server.store import tables
from rankscope_server.store.chunks import PLACE, decoded
from rankscope_server.text import plural

HOST_FIELD = "host"  # events of a machine say which
SOURCE_FIELD = "source."  # and then the name: what state it is in
SOURCES_EVENT, GPUS_EVENT = "machine sources", "gpus"
# what happened to a machine -> its place in the first sentence, the worst first
EVENTS: dict[str, int] = {
    "xid": 0,
    "gpu does not answer": 0,
    "gpu ecc error": 0,
    "oom kill": 1,
    "hardware error": 1,
    "switch xid": 1,
    "task hung": 2,
    "segmentation fault": 2,
    "link down": 2,
    "gpu answers again": 3,
}
MAX_EVENTS = 500
MAX_GPU_CHUNKS = 64  # of each machine: the newest minutes
_STATES: tuple[SourceState, ...] = get_args(SourceState)


def machines(connection: sa.Connection, run: sa.Row[Any]) -> Machines:
    """Return the machines of a run."""
    spans: dict[str, list[sa.Row[Any]]] = defaultdict(list)
    table = tables.sample_span
    for row in connection.execute(
        sa.select(table).where(table.c.run_id == run.run_id).order_by(table.c.host, table.c.kind)
    ):
        spans[row.host].append(row)
    ranks = _ranks(connection, run)
    states = _newest(connection, run.run_id, SOURCES_EVENT)
    gpus = _newest(connection, run.run_id, GPUS_EVENT)
    events, total = _events(connection, run.run_id)
    hosts = {*spans, *ranks, *states, *(event.host for event in events)} - {""}
    rows = [
        _machine(
            connection, run.run_id, host, spans.get(host, []), ranks.get(host, []),
            states.get(host, {}), gpus.get(host, {}),
        )
        for host in sorted(hosts)
    ]  # fmt: skip
    newest_ns = max((span.time_hi_ns for one in spans.values() for span in one), default=0)
    return Machines(
        text=_text(rows, events, saturation_text(connection, run.run_id, newest_ns)),
        machines=rows,
        events=events,
        capped=capped(len(events), total),
    )


def _machine(
    connection: sa.Connection,
    run_id: str,
    host: str,
    spans: list[sa.Row[Any]],
    ranks: list[int],
    states: dict[str, str],
    gpus: dict[str, str],
) -> Machine:
    slowed = _slowdowns(connection, run_id, host) if any(s.kind == "gpu" for s in spans) else {}
    numbers = sorted({int(key.partition(".")[0]) for key in gpus if key[0].isdecimal()} | {*slowed})
    return Machine(
        host=host,
        ranks=ranks,
        kinds=[span.kind for span in spans],
        first_ms=to_ms(min((span.time_lo_ns for span in spans), default=None)),
        last_ms=to_ms(max((span.time_hi_ns for span in spans), default=None)),
        driver=gpus.get("driver", ""),
        sources=[
            _source(name.removeprefix(SOURCE_FIELD), text)
            for name, text in states.items()
            if name.startswith(SOURCE_FIELD)
        ],
        gpus=[
            MachineGpu(
                gpu=number,
                name=gpus.get(f"{number}.name", ""),
                uuid=gpus.get(f"{number}.uuid", ""),
                bus_id=gpus.get(f"{number}.bus_id", ""),
                slowed=slowed.get(number, {}),
            )
            for number in numbers
        ],
    )


def _source(name: str, text: str) -> MachineSource:
    state, _, reason = text.partition(": ")
    known: Any = state if state in _STATES else "unknown"
    return MachineSource(source=name, state=known, reason=reason)


def _ranks(connection: sa.Connection, run: sa.Row[Any]) -> dict[str, list[int]]:
    table = tables.rank.c
    found: dict[str, list[int]] = defaultdict(list)
    for host, rank in connection.execute(
        sa.select(table.host, table.rank)
        .where(table.run_id == run.run_id, table.attempt == run.attempt, table.host != "")
        .order_by(table.rank)
    ):
        found[host].append(rank)
    return found


def _newest(connection: sa.Connection, run_id: str, name: str) -> dict[str, dict[str, str]]:
    """Return the fields of the newest event of this name, by host."""
    table = tables.event.c
    rows = connection.execute(
        sa.select(table.fields)
        .where(table.run_id == run_id, table.name == name)
        .order_by(table.time_ns, table.id)
    )
    found: dict[str, dict[str, str]] = {}
    for (text,) in rows:
        fields = json_object(text) or {}
        found[fields.pop(HOST_FIELD, "")] = fields
    return found


def _events(connection: sa.Connection, run_id: str) -> tuple[list[MachineEvent], int]:
    table = tables.event.c
    where = (table.run_id == run_id, table.name.in_(EVENTS))
    total = connection.scalar(sa.select(sa.func.count()).select_from(tables.event).where(*where))
    rows = connection.execute(
        sa.select(tables.event).where(*where).order_by(table.time_ns.desc()).limit(MAX_EVENTS)
    )
    return [_event(row) for row in rows], int(total or 0)


def _event(row: sa.Row[Any]) -> MachineEvent:
    fields: dict[str, str] = json_object(row.fields) or {}
    return of_row(
        MachineEvent,
        row,
        host=fields.get(HOST_FIELD, ""),
        rank=row.rank if row.rank >= 0 else None,
        text=_event_text(row.name, fields),
        fields=fields,
    )


def _event_text(name: str, fields: dict[str, str]) -> str:
    """Return one event in words, for example "GPU 3: Xid 79, GPU has fallen off the bus"."""
    gpu = f"GPU {fields['gpu']}" if "gpu" in fields else fields.get("pci", "")
    who = fields.get("process", "") or (f"pid {fields['pid']}" if "pid" in fields else "")
    words = {
        "xid": f"Xid {fields.get('number', '?')}",
        "switch xid": f"NVSwitch SXid {fields.get('number', '?')}",
        "oom kill": f"killed for memory: {who or fields.get('cgroup', 'a process')}",
        "link down": f"link down: {fields.get('device', '?')}",
    }
    text = words.get(name, " ".join(part for part in (name, who) if part))
    if fields.get("meaning"):
        text += f", {fields['meaning']}"
    return f"{gpu}: {text}" if gpu else text


def _slowdowns(connection: sa.Connection, run_id: str, host: str) -> dict[int, dict[str, float]]:
    """Return for each GPU the share of the newest samples in which something slowed it."""
    table = tables.chunk.c
    rows = connection.execute(
        sa.select(*PLACE)
        .where(table.run_id == run_id, table.kind == "gpu", table.host == host)
        .order_by(table.time_hi_ns.desc())
        .limit(MAX_GPU_CHUNKS)
    ).all()
    reasons: dict[int, list[int]] = defaultdict(list)
    for _, columns in decoded(connection, rows, {"gpu", "throttle_reasons"}):
        gpus, bits = (np.asarray(columns[name]).tolist() for name in ("gpu", "throttle_reasons"))
        for gpu, value in zip(gpus, bits, strict=True):
            reasons[gpu].append(value)
    found: dict[int, dict[str, float]] = {}
    for gpu, values in reasons.items():
        known = [value for value in values if value >= 0]
        shares: dict[str, float] = defaultdict(float)
        for value in known:
            for word in throttle_words(value & THROTTLE_SLOWDOWNS):
                shares[word] += 1 / len(known)
        found[gpu] = {word: round(share, 4) for word, share in shares.items()}
    return found


def _text(rows: list[Machine], events: list[MachineEvent], saturation: str) -> str:
    if not rows:
        return "No machine has sent samples yet."
    failing = [
        f"{source.source} on {row.host}"
        for row in rows
        for source in row.sources
        if source.state in ("fails", "stuck")
    ]
    if events:
        worst = min(events, key=lambda event: (EVENTS[event.name], -(event.time_ms or 0)))
        more = f", and {plural(len(events) - 1, 'other event')}" if len(events) > 1 else ""
        return f"{worst.host or 'A machine'}: {worst.text}{more}."
    text = f"{plural(len(rows), 'machine')}: none reported a hardware error or a kill for memory."
    if saturation:
        text = f"{saturation}. {text}"
    return f"{text} Not sampled: {', '.join(failing[:3])}." if failing else text
