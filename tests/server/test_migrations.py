"""Databases of older versions: brought up to date wholly, with all their data, or refused.

`first_version/` holds the database of a server of the first version, after a run of
`tests/server/seed.py` and log lines of three hosts, and what that server answered about it.
"""

from __future__ import annotations

import json
import logging
import lzma
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from rankscope_server.api.app import create_app
from rankscope_server.cli import EXIT_CANNOT_START, serve
from rankscope_server.settings import Settings
from rankscope_server.store import engine as engine_module
from rankscope_server.store import tables
from rankscope_server.store.engine import _configuration, open_engines
from rankscope_server.store.packing import pack
from rankscope_server.store.search import LogQuery, Search
from tests.server.conftest import TestClient

FIRST = "788e2c394a6a"
FOLDER = Path(__file__).parent / "first_version"
NAME = "rankscope.db"


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A database that a server of the first version left."""
    path = tmp_path / NAME
    path.write_bytes(lzma.decompress((FOLDER / f"{NAME}.xz").read_bytes()))
    return path


@pytest.fixture
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / NAME}"
    url: str = request.getfixturevalue("postgres").create()
    return url


on_both = pytest.mark.parametrize("empty_url", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture
def opened() -> Iterator[Any]:
    """Opens stores that are closed at the end."""
    engines: list[sa.Engine] = []

    def open_store(url: str | Path) -> sa.Engine:
        address = url if isinstance(url, str) else f"sqlite:///{url}"
        writer, reader = open_engines(address, "normal")
        engines.extend((writer, reader))
        return writer  # the reader of PostgreSQL takes binary values, but for our tables alone

    yield open_store
    for engine in engines:
        engine.dispose()


def version(path: Path) -> str:
    with sqlite3.connect(path) as database:
        (found,) = database.execute("SELECT version_num FROM alembic_version").fetchone()
    database.close()
    return str(found)


def differences(engine: sa.Engine) -> list[Any]:
    """Return what differs between the tables that there are and those of the code."""

    def ours(name: str | None, kind: str, parents: object) -> bool:  # the index keeps shadow tables
        return not (kind == "table" and str(name).startswith(("log_index", "alembic")))

    with engine.connect() as connection:
        options = {"compare_type": True, "include_name": ours}
        context = MigrationContext.configure(connection, opts=options)
        return list(compare_metadata(context, tables.metadata))


def shapes(engine: sa.Engine) -> dict[str, Any]:
    """Return columns with their defaults, keys and indexes of all tables."""
    found = sa.inspect(engine)
    return {
        name: (
            sorted(
                (one["name"], str(one["type"]), one["nullable"], one["default"])
                for one in found.get_columns(name)
            ),
            found.get_pk_constraint(name)["constrained_columns"],
            sorted(tuple(one["column_names"]) for one in found.get_unique_constraints(name)),
            sorted((one["name"], tuple(one["column_names"])) for one in found.get_indexes(name)),
        )
        for name in tables.metadata.tables
    }


@on_both
def test_migrations_build_exactly_the_tables(
    empty_url: str, opened: Any, request: pytest.FixtureRequest
) -> None:
    engine = opened(empty_url)
    assert differences(engine) == []
    url = "sqlite://"
    if engine.dialect.name == "postgresql":
        url = request.getfixturevalue("postgres").create()
        url = url.replace("postgresql:", "postgresql+psycopg:")
    made = sa.create_engine(url, poolclass=sa.StaticPool)
    tables.metadata.create_all(made)
    assert shapes(engine) == shapes(made)
    made.dispose()


def test_what_a_server_answers_is_the_same_before_and_after(first: Path) -> None:
    before = json.loads(lzma.decompress((FOLDER / "answers.json.xz").read_bytes()))
    settings = Settings(data_dir=str(first.parent), look_seconds=3600.0, disk_reserve_bytes=0)
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8787") as client:
        for path, answer in before.items():
            now = client.get(path)
            assert now.status_code == 200, path
            assert only(answer, path) == like(only(answer, path), now.json())


def only(answer: Any, path: str) -> Any:
    """Return what of an old answer still has to be: not the ids of lines, nor names of groups.

    Rows of the map list their ranks now, ranks of an ended run "reported", and the sentences of the
    map, of collectives and of the agent say more.
    """
    if isinstance(answer, dict) and "coverage" in answer:
        coverage = answer["coverage"]
        said = coverage["text"].replace("reporting", "reported")
        answer = answer | {"coverage": coverage | {"text": said}}
    if "/map" in path:
        rows = [
            {"label": row["label"], "host": row["host"],
             "ranks": list(range(row["rank_lo"], row["rank_hi"] + 1))}
            for row in answer["rows"]
        ]  # fmt: skip
        answer = answer | {"rows": rows}
    if "/map" in path or "/collectives" in path or path.endswith("/agent"):
        return {name: value for name, value in answer.items() if name != "text"}
    if "/logs?" not in path:
        return answer
    lines = [{k: v for k, v in line.items() if k != "id"} for line in answer["lines"]]
    return {"total": answer["total"], "facets": answer["facets"], "lines": lines}


def like(old: Any, new: Any) -> Any:
    """Return the new answer with the fields of the old one alone."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {name: like(value, new.get(name, "missing")) for name, value in old.items()}
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [like(*pair) for pair in zip(old, new, strict=True)]
    return new


def test_its_tables_are_those_of_a_new_database_and_its_index_finds_lines(
    first: Path, opened: Any
) -> None:
    engine = opened(first)
    assert differences(engine) == []
    with engine.connect() as connection:
        assert len(connection.execute(sa.select(tables.alert_rule)).all()) == 5
        assert connection.scalar(sa.select(tables.run.c.project)) == "default"
        assert connection.exec_driver_sql("PRAGMA auto_vacuum").scalar() == 2  # it can shrink
        sealed = tables.log_block.c.sealed
        assert connection.scalar(sa.select(sa.func.count()).where(sealed == 0)) > 0


@on_both
def test_rows_of_every_table_of_the_first_version_are_there_afterwards(
    empty_url: str, opened: Any
) -> None:
    address = empty_url.replace("postgresql:", "postgresql+psycopg:")
    engine = sa.create_engine(address, poolclass=sa.NullPool)
    found = sa.MetaData()
    with engine.begin() as connection:
        config = _configuration()
        config.attributes["connection"] = connection
        command.upgrade(config, FIRST)
        found.reflect(connection)
        tables_before = [
            table
            for table in found.sorted_tables
            if not table.name.startswith(("log_index", "alembic", "log_block"))
        ]
        for table in tables_before:
            connection.execute(sa.insert(table), [row_of(table, number) for number in (1, 2, 3)])
        blocks = [first_block(number, 512) for number in range(1, 7)] + [first_block(7, 100)]
        connection.execute(sa.insert(found.tables["log_block"]), blocks)
        before = {
            table.name: sorted(map(tuple, connection.execute(sa.select(table))), key=repr)
            for table in tables_before
        }
    engine.dispose()
    engine = opened(empty_url)
    with engine.connect() as connection:
        for table in tables_before:
            after = sorted(map(tuple, connection.execute(sa.select(table))), key=repr)
            assert after == before[table.name], table.name
        sealed = tables.log_block.c.sealed
        assert connection.scalar(sa.select(sa.func.count()).where(sealed == 1)) > 0
        page = Search(connection, "run-1", LogQuery()).page(5000)
    lines = [tuple(found.line) for found in page.lines]
    expected = [line for block in blocks for line in lines_of_block(block["id"], block["count"])]
    assert lines == expected[::-1]
    assert differences(engine) == []


def row_of(table: sa.Table, number: int) -> dict[str, Any]:
    """Return a row of made-up values, different in each column."""
    return {
        column.name: value_of(column, 100 * number + place, number)
        for place, column in enumerate(table.columns)
    }


def value_of(column: sa.Column[Any], value: int, number: int) -> Any:
    if column.name == "id" and isinstance(column.type, sa.Integer):
        return number
    if column.name == "run_id":
        return f"run-{number}"
    if isinstance(column.type, sa.LargeBinary):
        return bytes([value % 256, 0, 255])
    if isinstance(column.type, sa.Float):
        return value / 3
    if isinstance(column.type, sa.Integer):
        return (1 << 40) + value
    return f"{column.name} Größe {value}"[: getattr(column.type, "length", None) or 99]


def lines_of_block(block: int, count: int) -> list[tuple[Any, ...]]:
    return [
        (
            10**18 + 1000 * block + n, (10, 20, 30)[n % 3], 1, n % 5, n, ("a", "b")[n % 2],
            ("train", "data")[n % 2], "stderr", f"message {block} {n} straße",
            {"loss": str(n)} if n % 7 == 0 else {},
        )
        for n in range(count)
    ]  # fmt: skip


def first_block(block: int, count: int) -> dict[str, Any]:
    """Return a block of log lines as the first version stored it."""
    columns = list(zip(*lines_of_block(block, count), strict=True))
    types = ("<i8", "<i4", "<i4", "<i4", "<i8")
    head: list[Any] = [
        np.array(column, kind).tobytes() for column, kind in zip(columns, types, strict=False)
    ]
    words = []
    for column in columns[5:8]:
        words.append(list(dict.fromkeys(column)))
        head.append(np.array([words[-1].index(word) for word in column], "<u2").tobytes())
    body = list(zip(columns[8], columns[9], strict=True))
    return {
        "id": block, "run_id": "run-1", "sealed": int(count == 512), "count": count,
        "time_lo_ns": columns[0][0], "time_hi_ns": columns[0][-1], "level_hi": 30,
        "head": pack(msgspec.msgpack.encode([*head, *words])),
        "body": pack(msgspec.msgpack.encode(body)),
    }  # fmt: skip


KILLED_IN_THE_MIDDLE = """
import os, signal, sys
from rankscope_server.store import carried
from rankscope_server.store.engine import open_engines

def flush(writer):
    os.kill(os.getpid(), signal.SIGKILL)

carried.LineWriter.flush = flush
open_engines("sqlite:///" + sys.argv[1], "normal")
"""


def test_a_server_that_is_killed_in_the_middle_finds_the_tables_as_before(
    first: Path, opened: Any
) -> None:
    before = dump(first)
    done = subprocess.run([sys.executable, "-c", KILLED_IN_THE_MIDDLE, str(first)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert version(first) == FIRST
    assert dump(first) == before
    assert differences(opened(first)) == []


def dump(path: Path) -> dict[str, list[Any]]:
    with sqlite3.connect(path) as database:
        found = {
            name: database.execute(f'SELECT * FROM "{name}"').fetchall()  # noqa: S608
            for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            if not name.startswith("log_index")
        }
    database.close()
    return found


def test_a_copy_of_it_is_made_beside(
    first: Path, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before, copy = dump(first), first.with_name(f"{NAME}.{FIRST}")
    with caplog.at_level(logging.WARNING):
        opened(first)
    assert dump(copy) == before
    assert copy.stat().st_mode & 0o077 == 0
    assert f"a copy of it as it was is {copy}; remove it when all is well" in caplog.text
    assert opened(copy)  # it can be served


def test_without_room_for_a_copy_it_is_migrated_and_that_is_logged(
    first: Path, opened: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(first)
    little = usage._replace(free=first.stat().st_size)
    monkeypatch.setattr(engine_module.shutil, "disk_usage", lambda path: little)
    with caplog.at_level(logging.WARNING):
        engine = opened(first)
    assert differences(engine) == []
    assert sorted(path.name for path in first.parent.glob("*.788*")) == []
    assert "there is no room for a copy of it" in caplog.text


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("9999_future", "a newer version of Rankscope made the tables of "),
        ("9999_future", "update Rankscope, or choose another --data-dir"),
        ("0002", "are of version 0002, which no release of Rankscope has; choose another"),
    ],
)
def test_a_database_of_another_version_is_refused_with_a_remedy(
    first: Path, capsys: pytest.CaptureFixture[str], number: str, said: str
) -> None:
    with sqlite3.connect(first) as database:
        database.execute("UPDATE alembic_version SET version_num = ?", (number,))
    database.close()
    before = dump(first)
    assert serve(["--data-dir", str(first.parent), "--port", "0"]) == EXIT_CANNOT_START
    assert said in capsys.readouterr().err
    assert serve(["--data-dir", str(first.parent), "--port", "0", "--check"]) == EXIT_CANNOT_START
    assert said in capsys.readouterr().out
    assert dump(first) == before


def test_a_database_of_another_program_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with sqlite3.connect(tmp_path / NAME) as database:
        database.execute("CREATE TABLE run (run_uuid TEXT)")  # as MLflow and others call theirs
    database.close()
    assert serve(["--data-dir", str(tmp_path), "--port", "0"]) == EXIT_CANNOT_START
    assert "has tables of another program (run); choose another" in capsys.readouterr().err
    assert list(dump(tmp_path / NAME)) == ["run"]


def test_tables_that_lack_a_column_are_refused_by_its_name(
    tmp_path: Path, opened: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    opened(tmp_path / NAME).dispose()
    with sqlite3.connect(tmp_path / NAME) as database:
        database.execute("ALTER TABLE token DROP COLUMN bytes_per_second")
    database.close()
    assert serve(["--data-dir", str(tmp_path), "--port", "0"]) == EXIT_CANNOT_START
    said = capsys.readouterr().err
    assert "column bytes_per_second of token is missing: restore a copy" in said


def test_check_says_what_a_start_would_do_and_does_nothing(
    first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = first.read_bytes()
    serve(["--data-dir", str(first.parent), "--port", "0", "--check"])
    assert f"tables of version {FIRST}, will be brought to 00" in capsys.readouterr().out
    assert first.read_bytes() == before
    assert os.listdir(first.parent) == [NAME]
