"""What retention would remove now: the same plan for a dry run and for the work.

Whole runs first, those longest without news before others; then raw data of a kind from the runs
that stay, oldest first. How old something is, is when this server received it. Nothing of a
pinned run is planned, and of a live one nothing that its analysis would read after a restart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import sqlalchemy as sa

from rankscope_server.retention.kinds import RAW_KINDS, RAW_PARTS, Cut, Part, RawKind
from rankscope_server.retention.sizes import SETTLED_NS, Size, Sizes
from rankscope_server.settings import Settings
from rankscope_server.store import tables
from rankscope_server.store.deletion import is_live
from rankscope_server.text import size_text

DAY_NS = 86_400 * 10**9
_PAGE_ROWS = 5_000
_ALL = Cut(0, {})
Reason: TypeAlias = Literal["age", "size"]


@dataclass(frozen=True, slots=True)
class Limit:
    """How long and how much of a kind is kept; 0 is no limit."""

    days: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Rules:
    """What the settings say."""

    raw: Mapping[RawKind, Limit]
    runs: Limit
    live_ns: int  # a run that was heard of since is live
    replay_ns: int  # data of a live run that is younger stays

    @property
    def are_any(self) -> bool:
        """Return whether anything is ever removed by itself."""
        return any(limit.days or limit.bytes for limit in (*self.raw.values(), self.runs))


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a plan asks of a run."""

    run_id: str
    name: str
    status: str
    received_ns: int
    is_live: bool
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class Removal:
    """Rows of one run and kind that go, up to a cut; or the whole run."""

    run_id: str
    name: str
    kind: RawKind | Literal["run"]
    reason: Reason
    rows: int
    bytes: int
    cut: Cut


def rules_of(settings: Settings) -> Rules:
    """Return the rules that the settings say."""
    return Rules(
        raw={
            kind: Limit(
                getattr(settings, f"keep_{kind}_days"), getattr(settings, f"keep_{kind}_bytes")
            )
            for kind in RAW_KINDS
        },
        runs=Limit(settings.keep_runs_days, settings.keep_runs_bytes),
        live_ns=int(settings.forget_after_seconds * 1e9),
        replay_ns=int(settings.replay_hours * 3600e9),
    )


def facts_of(connection: sa.Connection, rules: Rules, now_ns: int) -> dict[str, RunFacts]:
    """Return the runs there are, longest without news first."""
    run, pin = tables.run.c, tables.pin.c
    rows = connection.execute(
        sa.select(
            run.run_id, run.name, run.status, run.launcher, run.received_ns,
            pin.run_id.is_not(None).label("is_pinned"),
        )
        .join(tables.pin, pin.run_id == run.run_id, isouter=True)
        .order_by(run.received_ns, run.run_id)
    )  # fmt: skip
    since_ns = now_ns - rules.live_ns
    return {
        row.run_id: RunFacts(
            row.run_id, row.name or row.run_id, row.status, row.received_ns,
            is_live(row.status, row.launcher, row.received_ns, since_ns), bool(row.is_pinned),
        )
        for row in rows
    }  # fmt: skip


def plan(connection: sa.Connection, rules: Rules, sizes: Sizes, now_ns: int) -> list[Removal]:
    """Return what would be removed now."""
    return _Planning(connection, rules, sizes, now_ns).all()


def unmet(rules: Rules, sizes: Sizes, removals: list[Removal]) -> list[str]:
    """Return which limits of size stay exceeded, as pinned and live runs are not touched."""
    going = {one.run_id for one in removals if one.kind == "run"}
    left = {kind: _total(sizes, kind, going) for kind in RAW_KINDS}
    for one in removals:
        if one.kind != "run":
            left[one.kind] -= one.bytes
    says = [
        _stays(kind, left[kind] - rules.raw[kind].bytes)
        for kind in RAW_KINDS
        if 0 < rules.raw[kind].bytes < left[kind]
    ]
    runs = sum(size.bytes for kinds in sizes.values() for size in kinds.values())
    runs -= sum(one.bytes for one in removals)
    if 0 < rules.runs.bytes < runs:
        says.append(_stays("runs", runs - rules.runs.bytes))
    return says


def _stays(kind: str, num_bytes: int) -> str:
    above = f"{size_text(num_bytes)} above --keep-{kind}-bytes stay"
    return f"{above}: live and pinned runs are not touched"


class _Planning:
    """One plan in the making."""

    def __init__(self, connection: sa.Connection, rules: Rules, sizes: Sizes, now_ns: int) -> None:
        self._connection, self._rules, self._now_ns = connection, rules, now_ns
        self._runs = facts_of(connection, rules, now_ns)
        # Of a run that is just being deleted there may be rows, but nothing to plan.
        self._sizes = {name: sizes[name] for name in self._runs if name in sizes}
        self._young = self._marked(now_ns - rules.replay_ns)

    def all(self) -> list[Removal]:
        """Return everything that goes."""
        removals = list(self._whole_runs())
        for one in removals:
            del self._runs[one.run_id]
            self._sizes.pop(one.run_id, None)
        for kind in RAW_KINDS:
            going = self._by_age(kind)
            going |= self._by_size(kind, going)
            removals += (going[name] for name in self._runs if name in going)
        return removals

    def _whole_runs(self) -> Iterator[Removal]:
        limit = self._rules.runs
        oldest_ns = self._now_ns - int(limit.days * DAY_NS)
        total = sum(size.bytes for kinds in self._sizes.values() for size in kinds.values())
        for run in self._runs.values():
            is_old = bool(limit.days) and run.received_ns <= oldest_ns
            is_over = 0 < limit.bytes < total
            if run.is_live or run.is_pinned or not (is_old or is_over):
                continue
            size = Size()
            for one in self._sizes.get(run.run_id, {}).values():
                size.add(one.rows, one.bytes)
            total -= size.bytes
            reason: Reason = "age" if is_old else "size"
            yield Removal(run.run_id, run.name, "run", reason, size.rows, size.bytes, _ALL)

    def _by_age(self, kind: RawKind) -> dict[str, Removal]:
        days = self._rules.raw[kind].days
        if not days:
            return {}
        old = self._marked(self._now_ns - int(days * DAY_NS))
        going: dict[str, Removal] = {}
        for run_id, size in self._held_up_to(kind, old).items():
            run = self._runs.get(run_id)
            if run is None or run.is_pinned:
                continue
            cut = _earlier(old, self._young) if run.is_live else old
            size = size if cut.ids == old.ids else self._size_of(kind, run_id, cut)
            if size.rows:
                going[run_id] = Removal(run_id, run.name, kind, "age", size.rows, size.bytes, cut)
        return going

    def _by_size(self, kind: RawKind, aged: Mapping[str, Removal]) -> dict[str, Removal]:
        """Return what goes beyond what is too old; it replaces the entry of its run."""
        limit = self._rules.raw[kind].bytes
        excess = _total(self._sizes, kind, set()) - sum(one.bytes for one in aged.values()) - limit
        if not limit or excess <= 0:
            return {}
        newest = self._marked(self._now_ns)
        ids: dict[str, dict[str, int]] = defaultdict(dict)
        sizes: dict[str, Size] = defaultdict(Size)
        for part, share in self._shares(kind, excess):
            for run_id, row_id, size in self._oldest(part, share, newest, aged):
                ids[run_id][part.mark] = max(row_id, ids[run_id].get(part.mark, 0))
                sizes[run_id].add(size.rows, size.bytes)
        going = {}
        for run_id, size in sizes.items():
            first = aged.get(run_id)
            before = dict.fromkeys((part.mark for part in RAW_PARTS[kind]), 0)
            if first is not None:
                before |= first.cut.ids
                size.add(first.rows, first.bytes)
            cut, name = Cut(newest.before_ns, before | ids[run_id]), self._runs[run_id].name
            if len(before) < len(RAW_PARTS[kind]):  # tables of one mark go up to the later cut
                size = self._size_of(kind, run_id, cut)
            going[run_id] = Removal(run_id, name, kind, "size", size.rows, size.bytes, cut)
        return going

    def _shares(self, kind: RawKind, excess: int) -> list[tuple[Part, int]]:
        """Return how much goes of each table of a kind: in proportion to what it holds."""
        parts = RAW_PARTS[kind]
        if len(parts) == 1:
            return [(parts[0], excess)]
        held = [
            int(self._connection.scalar(sa.select(sa.func.sum(part.num_bytes()))) or 0)
            for part in parts
        ]
        return [
            (part, -(-excess * each // max(sum(held), 1)))
            for part, each in zip(parts, held, strict=True)
        ]

    def _oldest(
        self, part: Part, excess: int, newest: Cut, aged: Mapping[str, Removal]
    ) -> Iterator[tuple[str, int, Size]]:
        """Yield (run, id, size) of the oldest rows that may go, of `excess` bytes together.

        Rows of one id go together: the numbers of a batch, the parts of a trace.
        """
        at, young = 0, self._young.ids[part.mark]
        while excess > 0:
            page = self._connection.execute(
                sa.select(
                    part.id, part.run_id().label("of_run"), sa.func.count(),
                    sa.func.sum(part.num_bytes()),
                )
                .where(part.id > at, part.received_by(newest), part.of_kind())
                .group_by(part.id, sa.text("of_run"))
                .order_by(part.id)
                .limit(_PAGE_ROWS)
            ).all()  # fmt: skip
            for row_id, run_id, number, num_bytes in page:
                run, first = self._runs.get(run_id), aged.get(run_id)
                is_kept = run is None or run.is_pinned
                is_kept |= run is not None and run.is_live and row_id > young
                if is_kept or (first is not None and row_id <= first.cut.ids[part.mark]):
                    continue
                if excess <= 0:
                    return
                yield run_id, row_id, Size(number, int(num_bytes))
                excess -= int(num_bytes)
            if len(page) < _PAGE_ROWS:
                return
            at = page[-1][0]

    def _held_up_to(self, kind: RawKind, cut: Cut) -> dict[str, Size]:
        """Return what each run has of a kind up to a cut."""
        found: dict[str, Size] = defaultdict(Size)
        for part in RAW_PARTS[kind]:
            run_id = part.run_id().label("of_run")
            rows = self._connection.execute(
                sa.select(run_id, sa.func.count(), sa.func.sum(part.num_bytes()))
                .where(part.received_by(cut), part.of_kind())
                .group_by(run_id)
            )
            for name, number, num_bytes in rows:
                found[name].add(number, int(num_bytes or 0))
        return found

    def _size_of(self, kind: RawKind, run_id: str, cut: Cut) -> Size:
        size = Size()
        for part in RAW_PARTS[kind]:
            number, num_bytes = self._connection.execute(
                sa.select(sa.func.count(), sa.func.sum(part.num_bytes()))
                .where(part.of_run(run_id), part.received_by(cut))
            ).one()  # fmt: skip
            size.add(number, int(num_bytes or 0))
        return size

    def _marked(self, before_ns: int) -> Cut:
        return marked(self._connection, before_ns, self._now_ns)


def marked(connection: sa.Connection, before_ns: int, now_ns: int) -> Cut:
    """Return what came before a time, as far as that is counted."""
    table = tables.received_mark
    before_ns = min(before_ns, now_ns - SETTLED_NS)
    row = connection.execute(
        sa.select(table)
        .where(table.c.time_ns <= before_ns)
        .order_by(table.c.time_ns.desc())
        .limit(1)
    ).first()
    names = [column.name for column in table.c if column.name != "time_ns"]
    return Cut(before_ns, {name: 0 if row is None else row._mapping[name] for name in names})


def _earlier(first: Cut, second: Cut) -> Cut:
    ids = {name: min(number, second.ids[name]) for name, number in first.ids.items()}
    return Cut(min(first.before_ns, second.before_ns), ids)


def _total(sizes: Sizes, kind: RawKind, without: set[str]) -> int:
    return sum(
        kinds[kind].bytes
        for name, kinds in sizes.items()
        if kind in kinds and name not in without
    )  # fmt: skip
