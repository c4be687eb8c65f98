"""Where the data of chunks is kept: one contract for the database and every store of objects."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import obstore
import pytest
import sqlalchemy as sa

from rankscope_server.store import tables
from rankscope_server.store.blobs import Blobs, ColumnBlobs, Place, keep_in
from rankscope_server.store.chunks import PLACE, counting, data_of, insert_chunks
from rankscope_server.store.engine import StoreUnavailableError, open_engines
from rankscope_server.store.objects import MAX_OBJECT_BYTES, ObjectBlobs, open_objects
from tests.server.object_stores import BUCKET, SeaweedFS

KINDS = ("column", "memory", "folder", "S3")
CHANCE = np.random.default_rng(7)


def noise(size: int) -> bytes:
    return CHANCE.bytes(size)


@pytest.fixture(params=KINDS)
def blobs(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Blobs]:
    """Each of them, empty."""
    if request.param == "column":
        yield ColumnBlobs()
        return
    url = {"memory": "memory:", "folder": f"file://{tmp_path}/a folder", "S3": f"s3://{BUCKET}/a/b"}
    if request.param == "S3":
        seaweed: SeaweedFS = request.getfixturevalue("seaweed")
        for name, text in seaweed.environ.items():
            monkeypatch.setenv(name, text)
    opened = open_objects(url[request.param], f"owner-{time.time_ns()}")
    yield opened
    opened.close()


def objects_of(blobs: Blobs) -> list[str]:
    return [name for names in blobs.objects_before(time.time_ns() + 10**12) for name in names]


def test_what_is_put_is_got(blobs: Blobs) -> None:
    """Of any size, of several folders, in any order, and by many at a time."""
    sizes = [1, 0, 70_000, 3 << 20, 200, 7 << 20, 5]
    parts = [(f"run-{at % 2}/steps", noise(size)) for at, size in enumerate(sizes)]
    places = blobs.put(parts)
    assert blobs.put([]) == []
    assert blobs.get([]) == []
    assert blobs.get(places) == [data for _, data in parts]
    chosen = [5, 0, 3, 3]
    assert blobs.get([places[at] for at in chosen]) == [parts[at][1] for at in chosen]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda at: blobs.get([places[at % 7]])[0], range(56)))
    assert found == [parts[at % 7][1] for at in range(56)]
    assert blobs.unready() == ""
    blobs.admit()


def test_what_is_put_together_shares_objects_of_a_bounded_size(blobs: Blobs) -> None:
    parts = [("run/steps", noise(50_000)) for _ in range(100)]
    parts += [("run/steps", noise(MAX_OBJECT_BYTES - 1)), ("run/samples", noise(10))]
    places = blobs.put(parts)
    objects = {place.object for place in places} - {None}
    assert sorted(objects_of(blobs)) == sorted(map(str, objects))
    if isinstance(blobs, ColumnBlobs):
        assert objects == set()
        assert [place.data for place in places] == [data for _, data in parts]
        return
    assert len(objects) == 3
    assert {place.data for place in places} == {b""}


def test_rows_keep_where_it_is(blobs: Blobs, database_url: str, tmp_path: Path) -> None:
    """With both databases; what is in rows stays readable when objects are chosen later."""
    engines = open_engines(database_url or f"sqlite:///{tmp_path / 'x.db'}", "normal")
    made = [noise(1_000 + at) for at in range(600)]
    rows = [
        {"run_id": "a run", "kind": "steps", "batch_id": at, "data": data}
        for at, data in enumerate(made)
    ]
    with engines[0].begin() as connection:
        insert_chunks(connection, "a run", rows[:300])
    keep_in(blobs, *engines)
    with engines[0].begin() as connection:
        insert_chunks(connection, "a run", rows[300:])
    table = tables.chunk.c
    with engines[1].connect() as connection:
        unread = counting(connection)
        found = connection.execute(sa.select(table.batch_id, *PLACE).order_by(table.id)).all()
        assert [row.batch_id for row, _ in data_of(connection, found)] == list(range(600))
        assert [data for _, data in data_of(connection, found)] == made
    assert unread.count == 0
    for engine in engines:
        engine.dispose()


def test_what_is_deleted_is_gone(blobs: Blobs) -> None:
    places = blobs.put([("one/steps", noise(100)), ("two/steps", noise(100))])
    objects = [place.object for place in places if place.object is not None]
    blobs.delete(objects[:1])
    blobs.delete(objects[:1])  # again, as after a crash
    assert objects_of(blobs) == objects[1:]
    missing = [data is None for data in blobs.get(places)]
    assert missing == ([True, False] if objects else [False, False])


@pytest.mark.parametrize("blobs", KINDS[1:], indirect=True)
@pytest.mark.parametrize("damage", ["changed", "short", "empty"])
def test_a_damaged_object_is_known(blobs: Blobs, damage: str) -> None:
    """Only what the damage hit is lost: never other bytes in its place."""
    assert isinstance(blobs, ObjectBlobs)
    made = [noise(500_000) for _ in range(4)]
    places = blobs.put([("run/steps", data) for data in made])
    (name,) = {place.object for place in places}
    whole = bytearray(b"".join(made))
    whole[1_200_000] ^= 1
    damaged = {"changed": bytes(whole), "short": bytes(whole[:1_200_000]), "empty": b""}[damage]
    obstore.put(blobs._store, str(name), damaged)
    left = {"changed": {0, 1, 3}, "short": {0, 1}, "empty": set()}[damage]
    assert blobs.get(places) == [data if at in left else None for at, data in enumerate(made)]
    alone = [blobs.get([place])[0] for place in places]
    assert alone == [data if at in left else None for at, data in enumerate(made)]
    assert blobs.unready() == ""


def test_only_what_is_older_is_listed(tmp_path: Path) -> None:
    """Objects of another database in the same folder are never listed."""
    url = f"file://{tmp_path}/shared"
    ours, others = open_objects(url, "ours"), open_objects(url, "others")
    for blobs in (ours, others):
        assert blobs.unready() == ""  # leaves an object that is none of a chunk
        blobs.put([("run/steps", b"new")])
    (old,) = ours.put([("run/steps", b"old")])
    path = tmp_path / "shared" / str(old.object)
    os.utime(path, (time.time() - 100_000,) * 2)
    yesterday_ns = time.time_ns() - 86_400 * 10**9
    assert list(ours.objects_before(yesterday_ns)) == [[old.object]]
    assert list(others.objects_before(yesterday_ns)) == []
    for blobs in (ours, others):
        blobs.close()


def test_objects_without_their_store_are_not_missing() -> None:
    """A server without the setting says so; it does not say that data is lost."""
    place = Place(b"", "owner/chunks/run/steps/x", 0, 1, 0)
    with pytest.raises(StoreUnavailableError, match="no store of objects is set") as caught:
        ColumnBlobs().get([place])
    assert caught.value.cause == "blobs"


def test_a_store_that_refuses_the_key_is_said(
    seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (seaweed.environ | {"AWS_SECRET_ACCESS_KEY": "another"}).items():
        monkeypatch.setenv(name, text)
    blobs = open_objects(f"s3://{BUCKET}", "owner")
    assert blobs.unready() == "the store of objects refuses this server"
    with pytest.raises(StoreUnavailableError, match="refuses this server"):
        blobs.put([("run/steps", b"x")])
    blobs.close()
