"""What assistants may ask of a server: one class for each tool, its fields are the arguments.

The docstring is the description that an assistant reads. All of them read and change nothing; what
they answer is cleaned and cut to its bytes by `mcp_answer`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar
from urllib.parse import quote, urlencode

from msgspec import Meta, Struct

from rankscope.cli import tables
from rankscope.cli.diff import Side, path_of, side_of
from rankscope.cli.storage import StorageClient
from rankscope.cli.watch import Watching
from rankscope.http import Client

_EXPLAIN_SECONDS = 60.0
_SQL_SECONDS, _SQL_MEMORY_BYTES, _SQL_MOST_EVENTS = 30.0, 512 << 20, 2_000_000
_LINES_TO_EXPLAIN = 2_000
_NUMBERS = {"own_ratio": "own_ratio", "own_ms": "own_ms", "waiting_ratio": "waiting_ratio",
            "rank_memory": "memory_bytes"}  # fmt: skip
_FACETS, _FACET_VALUES = ("rank", "level", "host", "run"), 5

_Run = Annotated[str, Meta(min_length=1, max_length=400, description="id of a run, from list_runs")]
_MaybeRun = Annotated[str, Meta(max_length=400, description="id of a run; empty: of all runs")]
_Limit = Annotated[int, Meta(ge=1, le=500, description="most entries of the answer")]
_Query = Annotated[str, Meta(max_length=4_000, description="in the language of the search box")]
_Log = Annotated[str, Meta(max_length=256 << 10, description="lines of a log, at most 256 KiB")]
_Select = Annotated[str, Meta(min_length=1, max_length=8_000, description="one SELECT of DuckDB")]
_Steps = Annotated[str, Meta(max_length=40, description="only these steps, as 400-500; empty: all")]
_Ranks = Annotated[str, Meta(max_length=400, description="only these ranks, as 0-7,12; empty: all")]
_Side = Annotated[
    str,
    Meta(max_length=500, description="the earlier run; empty: the run before of the same name"),
]


class ToolFailed(Exception):
    """There is no answer; the message says why and what to do. `field`: the argument at fault."""

    def __init__(self, text: str, field: str = "") -> None:
        super().__init__(text)
        self.field = field


class Asked:
    """One server, asked for one tool."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.storage = StorageClient(client)

    def get(self, path: str, **asked: Any) -> dict[str, Any]:
        """Return an answer of the API; arguments that are empty are left out.

        Raises StorageFailed.
        """
        query = urlencode({name: value for name, value in asked.items() if value not in ("", None)})
        return self.storage.ask("GET", path + (f"?{query}" if query else ""))

    def page(self, link: str) -> str | None:
        """Return the address of a page of the dashboard, None for none."""
        return f"{self.client.address.url}/{link}" if link else None


class Tool(Struct, frozen=True, forbid_unknown_fields=True):
    """One tool; the class docstring is what an assistant reads of it."""

    name: ClassVar[str]
    title: ClassVar[str]

    def answer(self, server: Asked) -> dict[str, Any]:
        """Return the answer. Raises ToolFailed, StorageFailed."""
        raise NotImplementedError


class ListRuns(Tool, frozen=True):
    """List training runs, the newest first: id, name, status, step, and the verdict in a sentence.

    Begin here: every other tool wants the id of a run. `query` looks into ids, names, commands,
    tags and hosts; `status` is one of starting, running, stuck, ended, failed, silent.
    """

    name: ClassVar[str] = "list_runs"
    title: ClassVar[str] = "Runs"

    query: Annotated[str, Meta(max_length=400, description="text to find; empty: all runs")] = ""
    status: Annotated[str, Meta(max_length=40, description="only this status; empty: all")] = ""
    limit: _Limit = 20

    def answer(self, server: Asked) -> dict[str, Any]:
        """Return the runs."""
        page = server.get("/runs", q=self.query, status=self.status, limit=self.limit)
        return {"total": page["total"], "runs": [_run(row) for row in page["runs"]]}


class GetVerdict(Tool, frozen=True):
    """Say what is wrong with a run: which rank or host is at fault, since when, why, at what cost,
    what to do next, on which evidence, what was ruled out and what would disprove it.

    The first tool to ask about a run. Without a culprit `answer` says so: healthy, advice without a
    fault, waiting for more steps, or unknown and why. Ranks in `victims` only wait and are not
    at fault. `coverage` says how many ranks report: what is not measured is not healthy.
    """

    name: ClassVar[str] = "get_verdict"
    title: ClassVar[str] = "Verdict"

    run: _Run

    def answer(self, server: Asked) -> dict[str, Any]:
        """Return the verdict with its evidence."""
        page = server.get(_of(self.run))
        verdict = page["verdict"]
        return {
            "run": _run(page["run"]),
            "answer": page["answer"]["text"],
            "detail": page["answer"]["detail"],
            "verdict": None if verdict is None else _finding(verdict, server),
            "explains": [] if verdict is None else [row["what"] for row in verdict["folded"]],
            "numbers": page["numbers"],
            "coverage": {"text": page["coverage"]["text"], "notes": page["coverage"]["notes"]},
            "page": server.page(f"runs/{quote(self.run, safe='')}"),
        }


class GetFindings(Tool, frozen=True):
    """List all findings of a run, not the verdict alone: those that are open, worst first, then
    those that recovered, each with its evidence, its cost, what was ruled out and what would
    disprove it; and the detectors that could not look, with the reason.
    """

    name: ClassVar[str] = "get_findings"
    title: ClassVar[str] = "Findings"

    run: _Run
    limit: _Limit = 10

    def answer(self, server: Asked) -> dict[str, Any]:
        """Return the findings."""
        page = server.get(f"{_of(self.run)}/findings")
        skipped = [row for row in page["detectors"] if row["state"] == "skipped"]
        return {
            "num_open": len(page["open"]),
            "num_recovered": len(page["recovered"]),
            "open": [_finding(row, server) for row in page["open"][: self.limit]],
            "recovered": [_finding(row, server) for row in page["recovered"][: self.limit]],
            "not_looked_for": [
                {"detector": row["name"], "reason": row["reason"], "remedy": row["remedy"]}
                for row in skipped
            ],
        }


class ListRanks(Tool, frozen=True):
    """List the ranks of a run, worst first: stuck and lost ones, those at fault, then slow ones.

    For each: host, state, step, phase, how it ended, and over the newest steps `own_ratio` (how
    many times as long it works as the others of its role), `own_ms` (its self time, without
    waiting for others), `waiting_ratio` (the share of its time that it waits; high for victims).
    """

    name: ClassVar[str] = "list_ranks"
    title: ClassVar[str] = "Ranks"

    run: _Run
    limit: _Limit = 32

    def answer(self, server: Asked) -> dict[str, Any]:
        """Return the ranks."""
        seen = Watching(server.storage, self.run).look()
        names = ("rank", "host", "node_rank", "state", "step", "phase", "exit_text", "stage")
        rows = [
            {name: row[name] for name in names}
            | {"last_seen": _time(row["last_seen_ms"])}
            | {_NUMBERS[name]: value for name, value in seen.numbers.get(row["rank"], {}).items()}
            for row in seen.worst_first()[: self.limit]
        ]
        return {"num_ranks": len(seen.ranks), "coverage": seen.page["coverage"]["text"],
                "ranks": rows}  # fmt: skip


class SearchLogs(Tool, frozen=True):
    """Search the log lines of one run or of all runs, the newest first.

    The query: words (all must match), "a phrase", prefix*, -not, OR, /regex/, and filters
    rank:3-7 host:node-b level:>=warning step:400..500 since:-10m logger:train stream:stderr, and
    over all runs run:ddp-* project:research. Without words all lines. Exceptions, ends of ranks
    and findings are lines too (stream:error, stream:event, stream:finding). Lines alike of several
    ranks are one, with `ranks` and `count`.
    """

    name: ClassVar[str] = "search_logs"
    title: ClassVar[str] = "Search in logs"

    query: _Query = ""
    run: _MaybeRun = ""
    limit: _Limit = 50

    def answer(self, server: Asked) -> dict[str, Any]:
        """Return the lines."""
        path = f"{_of(self.run)}/logs" if self.run else "/search"
        page = server.get(path, q=self.query, limit=self.limit, fold="true")
        return {
            "total": page["total"],
            "is_at_least": page["is_at_least"],
            "facets": {
                name: page["facets"][name][:_FACET_VALUES]
                for name in _FACETS
                if page["facets"].get(name)
            },
            "wider_query": page.get("suggestion"),
            "lines": [_line(row) for row in page["lines"]],
        }


class GetErrors(Tool, frozen=True):
    """List the exceptions of a run, grouped, the first in time first, with their tracebacks.

    `role` says which began it (initiating) and which followed from it (cascade).
    """

    name: ClassVar[str] = "get_errors"
    title: ClassVar[str] = "Errors"

    run: _Run
    limit: _Limit = 10

    def answer(self, server: Asked) -> dict[str, Any]:
        """Return the groups."""
        groups = server.get(f"{_of(self.run)}/errors")["groups"]
        return {"num_groups": len(groups), "groups": [_timed(row) for row in groups[: self.limit]]}


class CompareRuns(Tool, frozen=True):
    """Say what changed from one run to another: the step and its parts beside the noise of both,
    then code, packages, drivers, settings and findings that differ.

    `run` is the later one. Either may name an attempt and steps: RUN@ATTEMPT:FROM-TO.
    """

    name: ClassVar[str] = "compare_runs"
    title: ClassVar[str] = "Compare"

    run: _Run
    before: _Side = ""

    def answer(self, server: Asked) -> dict[str, Any]:
        """Return the comparison."""
        before: Side | None = side_of(self.before) if self.before else None
        page = server.get(path_of(before, side_of(self.run)))
        names = ("text", "not_comparable", "noise_text", "step", "parts", "rates", "facts",
                 "findings", "num_common_facts", "unknown_facts")  # fmt: skip
        sides = {
            side: page[side] and {name: page[side][name] for name in ("run_id", "attempt",
                                                                     "step_lo", "step_hi")}
            for side in ("before", "after")
        }  # fmt: skip
        return sides | {name: page[name] for name in names} | {"not_counted": page["left_out"]}


class GetCost(Tool, frozen=True):
    """Say where the time of all ranks went: what share was kept, what was lost to what, what a step
    consists of before and now, and what the run would take without its slow rank.
    """

    name: ClassVar[str] = "get_cost"
    title: ClassVar[str] = "Cost and time budget"

    run: _Run

    def answer(self, server: Asked) -> dict[str, Any]:
        """Return the ledger and the budget of a step."""
        cost = server.get(f"{_of(self.run)}/cost")
        budget = server.get(f"{_of(self.run)}/budget")
        names = ("text", "rank_hours", "num_ranks", "lost_steps", "ettr", "parts", "slow_ranks",
                 "price_per_rank_hour", "currency", "notes", "what_if", "no_what_if")  # fmt: skip
        return {
            "cost": {name: cost[name] for name in names},
            "step": {name: budget[name] for name in ("text", "step_lo", "step_hi", "rows")},
        }


class ExplainLogs(Tool, frozen=True):
    """Say what began a failure, from log lines: the first cause before its echoes, by a table of
    known errors of NCCL, Gloo, torchrun, CUDA, drivers, kernels, loaders, networks and disks.

    Give either `log`, lines of any job (a prefix such as [rank3]: says whose line it is), or `run`,
    whose newest warnings and errors are then read. `root` is null where no fault is found.
    """

    name: ClassVar[str] = "explain_logs"
    title: ClassVar[str] = "Explain logs"

    log: _Log = ""
    run: _MaybeRun = ""

    def answer(self, server: Asked) -> dict[str, Any]:
        """Return the root, and all that was found."""
        if bool(self.log) == bool(self.run):
            raise ToolFailed("give either log or run", "log")
        log = self.log or self._lines(server)
        # a process of its own: it is ended where a log takes too long
        command = [sys.executable, "-m", "rankscope", "explain", "--json", "-"]
        try:
            done = subprocess.run(
                command, input=log, capture_output=True, encoding="utf-8", errors="replace",
                timeout=_EXPLAIN_SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            text = f"not read within {_EXPLAIN_SECONDS:g} s; give fewer lines"
            raise ToolFailed(text, "log") from error
        answer: dict[str, Any] = json.loads(done.stdout)
        if "error" in answer:
            raise ToolFailed(answer["error"], "log")
        return {name: answer[name] for name in ("root", "findings", "num_ungrouped")}

    def _lines(self, server: Asked) -> str:
        """Return what the run logged at warning or worse, oldest first."""
        page = server.get(
            f"{_of(self.run)}/logs", min_level="warning", limit=_LINES_TO_EXPLAIN, fold="false"
        )
        lines = [row for row in page["lines"] if row["stream"] != "finding"]  # our own words
        return "".join(
            (f"[rank{row['rank']}]: " if row["rank"] >= 0 else "") + part + "\n"
            for row in reversed(lines)
            for part in row["message"].splitlines()
        )


class GetPreflight(Tool, frozen=True):
    """Return the last preflight, the checks of nodes and links before a launch: whether it would
    launch, what failed or warned, at which nodes, with the command that mends it.
    """

    name: ClassVar[str] = "get_preflight"
    title: ClassVar[str] = "Last preflight"

    run: Annotated[str, Meta(max_length=400, description="of this run; empty: the newest")] = ""

    def answer(self, server: Asked) -> dict[str, Any]:
        """Return the newest preflight."""
        rows = server.get("/preflight/runs", run=self.run, limit=1)["preflights"]
        if not rows:
            whose = f"of the run {self.run!r}" if self.run else "on this server"
            raise ToolFailed(f"there is no preflight {whose}; `rankscope preflight --help`", "run")
        page = server.get(f"/preflight/runs/{quote(rows[0]['id'], safe='')}")
        names = ("text", "is_settled", "coverage", "waiting_for", "findings")
        return (
            {"id": rows[0]["id"], "run": rows[0]["run_id"], "time": _time(rows[0]["created_ms"])}
            | {name: page[name] for name in names}
            | {"checks": [row for row in page["checks"] if row["status"] != "ok"]}
        )


class QuerySql(Tool, frozen=True):
    """Ask a run in SQL: every collective, step, sample, metric, log line and finding is a row.

    "show tables" and "describe steps" list what there is. *_ns are nanoseconds, what is not known
    is NULL. Aggregate: an answer has a few hundred rows at most. `steps` and `ranks` narrow what is
    read of collectives and steps, which a large run needs. For example:
    select rank, median(duration_ns) / 1e6 as ms from steps group by rank order by ms desc limit 10
    """

    name: ClassVar[str] = "query_sql"
    title: ClassVar[str] = "SQL over a run"

    run: _Run
    query: _Select
    steps: _Steps = ""
    ranks: _Ranks = ""
    limit: _Limit = 100

    def answer(self, server: Asked) -> dict[str, Any]:
        """Return the rows."""
        try:
            data, sql, kinds = (tables.load(name) for name in ("run", "sql", "kinds"))
        except ImportError as error:
            raise ToolFailed(f"SQL {error}, where `rankscope mcp` runs") from error
        run = data.Run(self.run, server.client)
        (steps,) = _ranges(self.steps, "steps")[:1] or (None,)
        part = kinds.Part(steps, _ranges(self.ranks, "ranks"), None)

        def counted(table: str, _done: int, total: int | None) -> None:
            if (total or 0) > _SQL_MOST_EVENTS:
                raise ToolFailed(
                    f"{table} has {total:,} events, more than {_SQL_MOST_EVENTS:,}: narrow steps "
                    "or ranks", "steps",
                )  # fmt: skip

        try:
            with sql.Tables(
                lambda table, on_page: run.batches(table, part, progress=on_page),
                memory_bytes=_SQL_MEMORY_BYTES, progress=counted,
            ) as fetched:  # fmt: skip
                result = fetched.select(self.query, seconds=_SQL_SECONDS)
                with result.reader() as reader:
                    rows = _first_rows(reader, self.limit + 1)
                    columns = reader.schema.names
        except (kinds.DataError, OSError) as error:
            raise ToolFailed(str(error), "query") from error
        return {
            "columns": columns,
            "rows": rows[: self.limit],
            "has_more": len(rows) > self.limit,
        }


TOOLS: tuple[type[Tool], ...] = (  # in the order in which they are of use
    ListRuns,
    GetVerdict,
    GetFindings,
    ListRanks,
    SearchLogs,
    GetErrors,
    CompareRuns,
    GetCost,
    ExplainLogs,
    GetPreflight,
    QuerySql,
)


def _of(run: str) -> str:
    return f"/runs/{quote(run, safe='')}"


def _ranges(text: str, field: str) -> list[tuple[int, int]]:
    try:
        return tables.ranges(text) if text else []
    except argparse.ArgumentTypeError as error:
        raise ToolFailed(str(error), field) from error


def _first_rows(reader: Any, most: int) -> list[tuple[Any, ...]]:
    batches = (zip(*(one.to_pylist() for one in batch.columns), strict=True) for batch in reader)
    return list(itertools.islice(itertools.chain.from_iterable(batches), most))


def _time(ms: float | None) -> str | None:
    """Return a time as people and assistants read it, in UTC."""
    return None if ms is None else datetime.fromtimestamp(ms / 1e3, UTC).isoformat()


def _timed(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with times in place of milliseconds since the epoch."""
    return {
        name.removesuffix("_ms") if name.endswith("_ms") else name:
        _time(value) if name.endswith("_ms") else value
        for name, value in row.items()
    }  # fmt: skip


def _run(row: dict[str, Any]) -> dict[str, Any]:
    names = ("run_id", "name", "project", "status", "status_text", "world_size", "num_nodes",
             "attempt", "step", "tags")  # fmt: skip
    return {name: row[name] for name in names} | {
        "answer": row["answer"]["text"],
        "started": _time(row["started_ms"]),
        "ended": _time(row["ended_ms"]),
    }


def _finding(row: dict[str, Any], server: Asked) -> dict[str, Any]:
    names = ("what", "why", "next", "next_command", "kind", "severity", "state", "ranks", "hosts",
             "victims", "onset_step", "ended_step", "cost_throughput_ratio", "cost_rank_hours",
             "cost_rank_hours_per_day", "cost_money_per_day", "currency", "confidence",
             "confidence_text", "ruled_out", "would_be_wrong_if")  # fmt: skip
    return {name: row[name] for name in names} | {
        "onset": _time(row["onset_ms"]),
        "evidence": [
            {"text": one["text"], "page": server.page(one["link"])} for one in row["evidence"]
        ],
    }


def _line(row: dict[str, Any]) -> dict[str, Any]:
    names = ("run_id", "host", "level", "logger", "stream", "step", "message", "fields", "count")
    who = row["ranks"] if len(row["ranks"]) > 1 else row["rank"] if row["rank"] >= 0 else "node"
    return {"time": _time(row["time_ms"]), "rank": who} | {name: row[name] for name in names}
