"""Searches over generated lines against a plain evaluation of the query over all of them.

The plain one knows neither index nor blocks nor tallies: it looks at each line, by itself and with
other means (Python's `re`, a loop over characters), so that both are wrong in the same way never.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import sqlalchemy as sa
from hypothesis import given

from rankscope_server.search.parse import parse
from rankscope_server.search.tree import (
    And,
    Names,
    Node,
    Not,
    Numbers,
    Or,
    Regex,
    Text,
    Time,
)
from rankscope_server.store import lines as line_store
from rankscope_server.store import tables
from rankscope_server.store.engine import open_engines
from rankscope_server.store.lines import Line
from rankscope_server.store.search import Cursor, Found, FoundLine, LogQuery, Search, find_line
from rankscope_server.store.unit import Unit
from tests.server.conftest import DATABASES, url_of

START_NS = 1_700_000_000 * 10**9
NOW_NS = START_NS + 100 * 10**9
WORDS = (
    "ncclRemoteError", "RemoteError", "remote", "error", "NCCL", "ProcessGroupNCCL", "out", "of",
    "memory", "OutOfMemory", "loss", "17", "170", "3.14", "grad_norm", "h\u00e9llo", "H\u00c9LLO",
    "stra\u00dfe", "/data/shard-0042.tar", "key=value", "a", "aa", "a a", "(x)", "\u2588\u258c",
    "\n", "step", "Step", "myStep 4", "step 4", "step: 40", "loss=3", "4GiB", "step 4x",
    "aB3dE5fG7hI9jK1lM3nO5", "x" * 70 + "Y", "\u212a", "100%", "ab-ab-ab",
)  # fmt: skip
QUERIES = (
    "remote", "remoteerror", "ncclremote", "error", "moteerr", "*moteerr*", "nccl*", "*error",
    "*Error", "out*", '"out of"', '"of memory"', '"out of mem"*', "1*", "17", "17*", "*7", "3.14",
    "norm", "grad_norm", "h\u00e9llo", "H\u00e9l*", "*\u00e9L*", "stra\u00dfe", "*ra\u00dfe",
    "0042",
    '"step 4"', "step-4", '"step 4"*', "*tep-4", '*"tep 4"*', '"loss 17"', "loss=3", '"step: 40"',
    '"memory 170"', '"error 3.14"', '"mystep 4"', '"step step 4"',
    "/data/shard-0042.tar", "shard-0042*", "a", "aa", '"a a"', "*a*", "%", "*\u2588*", "x*", "*xy",
    "*y*", "ab-ab", "k", "jk1lm3*", "ad3de5fg7hi9jk1lm3no5", "/Remote(Error)?/", "/^out/", "/of$/",
    "/[0-9]{3}/", r"/\bof\b/", "/o.t/i", "/x{70}Y/", "/a a|3.14/", "/memory|loss/", r"/t\s+of/",
    r"/\Aout/", r"/error\z/", "/nccl.*err/i", "/(?i)NCCL/", "/./", "/q?/",
)  # fmt: skip
FILTERS = (
    "rank:1", "rank:0-1", "rank:node", "rank:>1", "level:error", "level:>=warning", "level:<=info",
    "step:3..6", "step:0", "step:>=5", "attempt:1", "host:node-a", "host:node-*", "host:NODE-B",
    "logger:train", "logger:train.*", "stream:stdout,stderr", "since:-95s", "until:-90s",
    "since:-92s", "group:dp", "group:left*",
)  # fmt: skip
LINE = st.builds(
    lambda **values: values,
    time_ns=st.integers(0, 20).map(lambda n: START_NS + n * 10**9),
    level=st.sampled_from([10, 20, 25, 30, 40, 50]),
    attempt=st.integers(0, 1),
    rank=st.integers(-1, 3),
    step=st.integers(0, 8),
    host=st.sampled_from(["node-a", "node-b", "other"]),
    logger=st.sampled_from(["train", "train.data", ""]),
    stream=st.sampled_from(["logging", "stdout", "stderr", "event"]),
    message=st.lists(st.sampled_from(WORDS), max_size=5).flatmap(
        lambda words: st.sampled_from([" ", "", "-", "="]).map(lambda glue: glue.join(words))
    ),
    fields=st.dictionaries(
        st.sampled_from(["a", "shard", "k\u00e9y"]), st.sampled_from(WORDS), max_size=2
    ),
)
LEAF = st.one_of(st.sampled_from(QUERIES), st.sampled_from(FILTERS))
QUERY = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        inner.map(lambda one: f"-({one})"),
        st.tuples(inner, inner).map(" ".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]} OR {pair[1]})"),
    ),
    max_leaves=4,
)
# Of the search over all runs, each line of which names its run in a field.
NAMES = {"all-1": "Llama", "all-2": "llama-2", "all-3": "bert", "all-4": ""}
PROJECTS = {"all-1": "Red", "all-2": "red", "all-3": "blue", "all-4": "blue"}
GROUPLESS = {"all-4"}
RUN_FILTERS = (
    "run:all-1",
    "run:LLAMA",
    "run:llama*",
    "run:all-2",
    "run:bert,all-4",
    "run:nothing",
    "run:all-*",
    "project:red",
    "project:b*",
    "project:red group:dp",
    "run:all-3 group:left",
    "run:be*",
)
GROUPS = {"default_pg": [0, 1, 2, 3], "left": [0, 1], "right": [3]}  # described as "dp"


def plainly(node: Node, line: Line) -> bool:
    """Return whether a line matches, by looking at it."""
    if isinstance(node, And):
        return all(plainly(child, line) for child in node.nodes)
    if isinstance(node, Or):
        return any(plainly(child, line) for child in node.nodes)
    if isinstance(node, Not):
        return not plainly(node.node, line)
    if isinstance(node, Time):
        return (node.from_ns is None or line.time_ns >= node.from_ns) and (
            node.to_ns is None or line.time_ns <= node.to_ns
        )
    if isinstance(node, Numbers):
        return any(lo <= getattr(line, node.field) <= hi for lo, hi in node.ranges)
    if isinstance(node, Names):
        return names_plainly(node, line)
    text = "\n".join([line.message, *(f"{key}={value}" for key, value in line.fields.items())])
    if isinstance(node, Regex):
        flags = re.MULTILINE | (re.IGNORECASE if node.ignores_case else 0)
        return re.search(node.pattern.replace(r"\z", r"\Z"), text, flags) is not None
    return text_plainly(node, text)


def names_plainly(node: Names, line: Line) -> bool:
    if node.field == "group":
        if line.fields.get("run") in GROUPLESS:
            return False
        wanted = [name for name in GROUPS if matches_one(node.names, name)]
        if matches_one(node.names, "dp"):
            wanted = [*wanted, "left", "right"]
        return line.attempt == 0 and any(line.rank in GROUPS[name] for name in wanted)
    if node.field == "run":  # by its id or its name
        run_id = line.fields["run"]
        return matches_one(node.names, run_id) or matches_one(node.names, NAMES[run_id])
    if node.field == "project":
        return matches_one(node.names, PROJECTS[line.fields["run"]])
    return matches_one(node.names, getattr(line, node.field))


def matches_one(patterns: tuple[str, ...], name: str) -> bool:
    return any(
        name.lower().startswith(pattern[:-1].lower())
        if pattern.endswith("*")
        else name.lower() == pattern.lower()
        for pattern in patterns
    )


def text_plainly(node: Text, text: str) -> bool:
    flags = re.IGNORECASE | (re.ASCII if node.text.isascii() else 0)
    ends = ends_of_words(text)
    return any(
        (node.is_open_left or match.start(1) in ends)
        and (node.is_open_right or match.end(1) in ends)
        for match in re.finditer(f"(?=({re.escape(node.text)}))", text, flags)
    )


def ends_of_words(text: str) -> set[int]:
    """Return where words may begin and end: everywhere but within a run, save at its capitals."""
    ends: set[int] = set()
    at = 0
    for is_run, characters in itertools.groupby(text, str.isalnum):
        run = "".join(characters)
        inner = []
        for place in range(1, len(run)):
            before, here, after = run[place - 1], run[place], run[place + 1 : place + 2]
            is_capital = here.isascii() and here.isupper()
            follows_small = before.isascii() and (before.islower() or before.isdigit())
            begins_word = (
                before.isascii() and before.isupper() and after.isascii() and after.islower()
            )
            if is_capital and (follows_small or begins_word):
                inner.append(place)
        if is_run:
            ends |= {at, at + len(run)}
            if len(run) <= 64 and len(inner) < 8:
                ends |= {at + place for place in inner}
        else:
            ends |= set(range(at, at + len(run) + 1))
        at += len(run)
    return ends or {0}


@pytest.fixture(scope="module", params=DATABASES)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[sa.Engine, sa.Engine]]:
    folder = tmp_path_factory.mktemp("search")
    pair = open_engines(url_of(request) or f"sqlite:///{folder / 'x.db'}", "normal")
    yield pair
    for engine in pair:
        engine.dispose()


RUNS = (f"run-{number}" for number in itertools.count())


def store(
    engine: sa.Engine, drawn: list[dict[str, Any]], sizes: list[int]
) -> tuple[str, list[Line]]:
    """Store lines as so many batches; return the run and the lines, each with its number."""
    run_id = next(RUNS)
    lines = [
        Line(**{**values, "fields": {**values["fields"], "n": str(number)}})
        for number, values in enumerate(drawn)
    ]
    at, turn = 0, itertools.cycle(sizes)
    while at < len(lines):
        size = next(turn)
        with engine.begin() as connection:
            unit = Unit(connection)
            for line in lines[at : at + size]:
                unit.lines.add(run_id, line.host, [line])
            unit.flush()
        at += size
    with engine.begin() as connection:
        define_groups(connection, run_id)
    return run_id, lines


def define_groups(connection: sa.Connection, run_id: str) -> None:
    for name, ranks in GROUPS.items():
        connection.execute(
            sa.insert(tables.process_group).values(
                run_id=run_id, attempt=0, group=name, ranks=str(ranks),
                description="" if name == "default_pg" else "dp",
            )
        )  # fmt: skip


def pages(connection: sa.Connection, run_id: str, query: LogQuery, size: int) -> list[Line]:
    """Return all pages of a search, one after the other."""
    found: list[Line] = []
    cursor: Cursor | None = None
    while True:
        page = Search(connection, run_id, query).page(size, cursor)
        found += [line.line for line in page.lines]
        if page.cursor is None:
            return found
        cursor = page.cursor


@given(
    drawn=st.lists(LINE, max_size=60),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    queries=st.lists(QUERY, min_size=1, max_size=6),
    page_size=st.integers(1, 40),
)
def test_a_search_finds_what_a_plain_look_finds(
    engines: tuple[sa.Engine, sa.Engine],
    monkeypatch: pytest.MonkeyPatch,
    drawn: list[dict[str, Any]],
    sizes: list[int],
    queries: list[str],
    page_size: int,
) -> None:
    monkeypatch.setattr(line_store, "LINES_PER_BLOCK", 8)
    run_id, lines = store(engines[0], drawn, sizes)
    for text in queries:
        node = parse(text, NOW_NS)
        wanted = [line for line in lines if plainly(node, line)]
        with engines[1].connect() as connection:
            found = Search(connection, run_id, LogQuery(node)).page(len(lines) + 1)
            assert [numbered.line for numbered in found.lines] == newest_first(found, wanted), text
            check_counts(found, wanted)
            assert pages(connection, run_id, LogQuery(node), page_size) == [
                numbered.line for numbered in found.lines
            ], text
            oldest = Search(connection, run_id, LogQuery(node)).page(
                len(lines) + 1, is_oldest_first=True
            )
            assert oldest.lines == found.lines[::-1], text
            fresh, _, _ = Search(connection, run_id, LogQuery(node)).tail(0, len(lines) + 1)
            assert [one.id for one in fresh] == sorted(one.id for one in found.lines), text
            for one in found.lines[:3]:
                assert find_line(connection, run_id, one.id) == one


def newest_first(found: Found, wanted: list[Line]) -> list[Line]:
    """Return the lines in their order: by time, of one time the last that came first."""
    ids = {numbered.line.fields["n"]: numbered.id for numbered in found.lines}
    return sorted(wanted, key=lambda line: (-line.time_ns, -ids.get(line.fields["n"], 0)))


def check_counts(found: Found, wanted: list[Line]) -> None:
    assert found.is_counted
    assert found.counts.total == len(wanted)
    for name in ("rank", "level", "host", "logger", "stream"):
        assert found.counts.facet(name) == Counter(getattr(line, name) for line in wanted)


@given(
    drawn=st.lists(LINE, min_size=1, max_size=40),
    text=QUERY,
    chosen=st.dictionaries(
        st.sampled_from(["rank", "level", "logger"]), st.integers(0, 40), max_size=2
    ),
)
def test_a_facet_leaves_its_own_filter_out(
    engines: tuple[sa.Engine, sa.Engine],
    monkeypatch: pytest.MonkeyPatch,
    drawn: list[dict[str, Any]],
    text: str,
    chosen: dict[str, int],
) -> None:
    monkeypatch.setattr(line_store, "LINES_PER_BLOCK", 8)
    run_id, lines = store(engines[0], drawn, [13])
    node = parse(text, NOW_NS)
    filters: dict[str, Node] = {}
    for name, number in chosen.items():
        value = getattr(lines[number % len(lines)], name)
        filters[name] = (
            Names("logger", (value,))
            if name == "logger"
            else Numbers("rank" if name == "rank" else "level", ((value, value),))
        )
    with engines[1].connect() as connection:
        found = Search(connection, run_id, LogQuery(node, filters)).page(100)
    matching = [line for line in lines if plainly(node, line)]
    wanted = [line for line in matching if all(plainly(one, line) for one in filters.values())]
    assert found.counts.total == len(wanted) == len(found.lines)
    for name in ("rank", "level", "logger", "host"):
        others = [one for other, one in filters.items() if other != name]
        expected = Counter(
            getattr(line, name) for line in matching if all(plainly(one, line) for one in others)
        )
        counted = found.counts.facet(name)
        # Texts of blocks that no filter leaves are not read for another value's sake.
        assert all(0 < count <= expected[value] for value, count in counted.items())
        if name not in filters:
            assert counted == expected


class Several:
    """A store with some runs of three projects, and the lines of them."""

    def __init__(self, engine: sa.Engine, lines: list[Line]) -> None:
        self.engine, self.lines = engine, lines


@pytest.fixture(scope="module")
def several(engines: tuple[sa.Engine, sa.Engine]) -> Several:
    draw = random.Random(8)
    lines: list[Line] = []
    with engines[0].begin() as connection, pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_store, "LINES_PER_BLOCK", 8)
        for run_id in NAMES:
            values = {"run_id": run_id, "name": NAMES[run_id], "project": PROJECTS[run_id]}
            connection.execute(sa.insert(tables.run).values(values))
            if run_id not in GROUPLESS:
                define_groups(connection, run_id)
        for number in range(300):
            run_id = draw.choice(list(NAMES))
            line = Line(
                time_ns=START_NS + draw.randrange(21) * 10**9, level=draw.choice([20, 30, 40]),
                attempt=draw.randrange(2), rank=draw.randrange(-1, 4), step=draw.randrange(9),
                host=draw.choice(["node-a", "node-b"]), logger=draw.choice(["train", "nccl"]),
                stream=draw.choice(["logging", "stderr", "event", "error", "finding"]),
                message=" ".join(draw.choices(WORDS, k=draw.randrange(1, 6))),
                fields={"run": run_id, "n": str(number)},
            )  # fmt: skip
            lines.append(line)
            unit = Unit(connection)
            unit.lines.add(run_id, line.host, [line])
            unit.flush()
    return Several(engines[1], lines)


@given(
    text=st.recursive(
        st.one_of(LEAF, st.sampled_from(RUN_FILTERS)),
        lambda inner: st.one_of(
            inner.map(lambda one: f"-({one})"),
            st.tuples(inner, inner).map(" ".join),
            st.tuples(inner, inner).map(lambda pair: f"({pair[0]} OR {pair[1]})"),
        ),
        max_leaves=4,
    ),
    project=st.sampled_from(["Red", "red", "blue"]),
    chosen=st.dictionaries(
        st.sampled_from(["run", "level", "host"]), st.integers(0, 299), max_size=2
    ),
    page_size=st.integers(1, 40),
)
def test_a_search_over_all_runs_finds_and_counts_those_of_its_project(
    several: Several,
    text: str, project: str, chosen: dict[str, int], page_size: int,
) -> None:  # fmt: skip
    lines = several.lines
    own = [line for line in lines if PROJECTS[line.fields["run"]] == project]
    node = parse(text, NOW_NS)
    filters: dict[str, Node] = {}
    for name, number in chosen.items():
        line = lines[number]
        if name == "level":
            filters[name] = Numbers("level", ((line.level, line.level),))
        else:
            value = line.fields["run"] if name == "run" else line.host
            filters[name] = Names("run" if name == "run" else "host", (value,))
    matching = [line for line in own if plainly(node, line)]
    wanted = [line for line in matching if all(plainly(one, line) for one in filters.values())]
    query = LogQuery(node, filters, project=project)
    with several.engine.connect() as connection:
        found = Search(connection, None, query).page(len(lines) + 1)
        assert [one.line for one in found.lines] == newest_first(found, wanted)
        assert [one.run_id for one in found.lines] == [
            one.line.fields["run"] for one in found.lines
        ]
        paged = [page.line for page in pages_of_all(connection, query, page_size)]
        assert paged == [one.line for one in found.lines]
        fresh, _, _ = Search(connection, None, query).tail(0, len(lines) + 1)
        assert {one.id for one in fresh} == {one.id for one in found.lines}
    assert (found.is_counted, found.counts.total) == (True, len(wanted))
    for name in ("rank", "level", "host", "logger", "stream", "run", "project"):
        others = [one for other, one in filters.items() if other != name]
        expected = Counter(
            of_line(line, name) for line in matching if all(plainly(one, line) for one in others)
        )
        counted = found.counts.facet(name)
        assert all(0 < count <= expected[value] for value, count in counted.items())
        if name not in filters:
            assert counted == expected


def test_the_facet_of_runs_knows_the_groups_of_those_that_are_not_chosen(several: Several) -> None:
    node = parse("-(project:red group:dp)", NOW_NS)
    other = next(line.fields["run"] for line in several.lines
                 if PROJECTS[line.fields["run"]] != "Red")  # fmt: skip
    query = LogQuery(node, {"run": Names("run", (other,))}, project="Red")
    with several.engine.connect() as connection:
        found = Search(connection, None, query).page(1)
    own = [line for line in several.lines if PROJECTS[line.fields["run"]] == "Red"]
    assert found.counts.facet("run") == Counter(
        line.fields["run"] for line in own if plainly(node, line)
    )


def of_line(line: Line, name: str) -> Any:
    """Return the value of a facet."""
    run_id = line.fields["run"]
    return {"run": run_id, "project": PROJECTS[run_id]}.get(name) or getattr(line, name)


def pages_of_all(connection: sa.Connection, query: LogQuery, size: int) -> Iterator[FoundLine]:
    cursor: Cursor | None = None
    while True:
        page = Search(connection, None, query).page(size, cursor)
        yield from page.lines
        if page.cursor is None:
            return
        cursor = page.cursor
