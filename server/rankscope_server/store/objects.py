"""Data of chunks in objects: a folder, memory, or a store that speaks S3, all through obstore.

Parts that are put together and are of one folder share an object, and are read by their ranges. A
store that does not answer is not asked by each batch and page: until it answers again, they are
refused at once.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import sqlalchemy as sa

from rankscope_server.store import tables
from rankscope_server.store.blobs import CAUSE, Blobs, ColumnBlobs, Place, keep_in
from rankscope_server.store.engine import StoreUnavailableError, upsert

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_Done = TypeVar("_Done")
# Of one request. PostgreSQL ends a transaction in which nothing is done for 5 s.
TIMEOUT_SECONDS, CONNECT_SECONDS = 3.0, 1.0
MAX_OBJECT_BYTES = 8 << 20  # arrives within that time at 3 MB/s; larger groups are several objects
NEAR_BYTES = 256 << 10  # what is read between two ranges takes less time than another request
AT_ONCE = 16  # requests of all pages and batches
_LISTED = 1_000
_AGAIN_SECONDS = 1.0
_AWAY = "the store of objects does not answer"


class _Span(NamedTuple):
    """A range of an object that is read at once, and which places are in it."""

    object: str
    start: int
    end: int
    places: list[int]


@contextmanager
def open_blobs(
    url: str, writer: sa.Engine, reader: sa.Engine, *, is_synced: bool
) -> Iterator[Blobs]:
    """Let the connections of a store keep the data of chunks at an address; empty: in its rows.

    Raises ImportError where the client of objects is not installed, OSError where their folder
    cannot be made.
    """
    if url:
        blobs: Blobs = open_objects(url, _owner(writer), is_synced=is_synced)
    else:
        blobs = ColumnBlobs(_unset(reader))
    keep_in(blobs, writer, reader)
    try:
        yield blobs
    finally:
        blobs.close()


def _owner(writer: sa.Engine) -> str:
    """Return the name of this database among those that share a store of objects."""
    table = tables.object_owner
    with writer.begin() as connection:
        upsert(connection, table, [{"number": 1, "owner": secrets.token_hex(8)}])
        return str(connection.scalar(sa.select(table.c.owner)))


def _unset(reader: sa.Engine) -> str:
    """Return why not all data can be read without a store of objects; empty where it can."""
    table = tables.chunk.c
    with reader.connect() as connection:
        named = connection.scalar(sa.select(table.object).where(table.object.is_not(None)).limit(1))
    if named is None:
        return ""
    reason = "data of chunks is in objects, and no store of objects is set: set --blobs as it was"
    log.warning(reason)
    return reason


def open_objects(url: str, owner: str, *, is_synced: bool = False) -> ObjectBlobs:
    """Return the objects of one database (`owner`) at an address that settings may hold.

    With `is_synced` a folder survives a loss of power, as S3 does. Raises ImportError where obstore
    is not installed, OSError where a folder cannot be made.
    """
    try:
        from obstore.store import LocalStore, MemoryStore, S3Store
    except ImportError as error:
        raise ImportError(
            "objects need their client: pip install 'rankscope[server,objects]'"
        ) from error
    parts = urlsplit(url)
    if parts.scheme == "memory":
        return ObjectBlobs(MemoryStore(), owner)
    if parts.scheme == "file":
        folder = Path(unquote(parts.path))
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return ObjectBlobs(LocalStore(folder), owner, folder if is_synced else None)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    store = S3Store(
        parts.netloc,
        prefix=parts.path.strip("/") or None,
        **({"endpoint": endpoint} if endpoint else {}),  # type: ignore[arg-type]
        client_options={
            "timeout": timedelta(seconds=TIMEOUT_SECONDS),
            "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
            "allow_http": endpoint.startswith("http://"),
        },
        retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=TIMEOUT_SECONDS)},
    )
    return ObjectBlobs(store, owner)


class ObjectBlobs:
    """Keeps data in objects below the name of their database. `close` at the end."""

    def __init__(self, store: ObjectStore, owner: str, synced: Path | None = None) -> None:
        """`synced` is the folder of a local store that must survive a loss of power."""
        import obstore

        self._obstore, self._store, self._synced = obstore, store, synced
        self._root, self._owner = f"{owner}/chunks", owner
        self._errors = (obstore.exceptions.BaseError, OSError)
        self._pool = ThreadPoolExecutor(AT_ONCE, "rankscope-objects")
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._reason = ""  # why nothing is asked of it now

    def admit(self) -> None:
        """Raise StoreUnavailableError while it does not answer."""
        if self._reason:
            raise _unavailable(self._reason)

    def put(self, parts: Sequence[tuple[str, bytes]]) -> list[Place]:
        """Keep data, that of a folder in as few objects as have a bounded size."""
        if not parts:
            return []
        self.admit()
        packs = list(_packed(parts))
        names = [f"{self._root}/{folder}/{_new_name()}" for folder, _ in packs]
        self._all(
            lambda pack: self._write(pack[0], [parts[at][1] for at in pack[1]]),
            [(name, numbers) for name, (_, numbers) in zip(names, packs, strict=True)],
        )
        places: list[Place] = [Place(b"")] * len(parts)
        for name, (_, numbers) in zip(names, packs, strict=True):
            start = 0
            for at in numbers:
                data = parts[at][1]
                places[at] = Place(b"", name, start, len(data), zlib.crc32(data))
                start += len(data)
        return places

    def get(self, places: Sequence[Place]) -> list[bytes | None]:
        """Return what is in rows and in objects, near ranges of an object in one request."""
        found: list[bytes | None] = [place.data for place in places]
        spans = list(_spans(places))
        if spans:
            self.admit()
        for span, body in zip(spans, self._all(self._read, spans), strict=True):
            for at in span.places:
                place = places[at]
                data = body[place.start - span.start :][: place.num_bytes]
                found[at] = data if zlib.crc32(data) == place.crc32 else None
        return found

    def delete(self, objects: Collection[str]) -> None:
        """Delete objects, each by itself: a missing one ends what is deleted together."""
        if objects:
            self.admit()
        self._all(self._delete, list(objects))

    def objects_before(self, time_ns: int) -> Iterator[list[str]]:
        """Yield the objects that were written before a time, by the clock of the store."""
        self.admit()
        before = datetime.fromtimestamp(time_ns / 1e9, UTC)
        try:
            for metas in self._obstore.list(self._store, self._root, chunk_size=_LISTED):
                old = [meta["path"] for meta in metas if meta["last_modified"] < before]
                if old:
                    yield old
        except self._errors as error:
            raise self._failed(error) from error

    def unready(self) -> str:
        """Return why nothing can be kept, empty where a small object was."""
        if not self._reason:
            try:
                self._probe()
            except self._errors as error:
                self._failed(error)
        return self._reason

    def close(self) -> None:
        """End its threads."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _all(self, work: Callable[[_Item], _Done], items: Sequence[_Item]) -> list[_Done]:
        """Return what the work gives for each, some at a time. Raises what the first raises."""
        if len(items) < 2:
            return [work(item) for item in items]
        futures = [self._pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise

    def _write(self, name: str, parts: Iterable[bytes]) -> None:
        try:
            self._obstore.put(self._store, name, b"".join(parts))
            if self._synced is not None:
                _sync(self._synced, name)
        except self._errors as error:
            raise self._failed(error) from error

    def _read(self, span: _Span) -> bytes:
        """Return a range, shorter or empty where the object ends before it or is missing."""
        try:
            found = self._obstore.get_range(
                self._store, span.object, start=span.start, end=span.end
            )
        except FileNotFoundError:
            return b""
        except self._errors as error:
            if self._is_short(span):
                return b""
            raise self._failed(error) from error
        return found.to_bytes()

    def _is_short(self, span: _Span) -> bool:
        """Return whether a range could not be read because the object ends before it."""
        try:
            return self._obstore.head(self._store, span.object)["size"] <= span.start
        except self._errors:
            return False

    def _delete(self, name: str) -> None:
        try:
            self._obstore.delete(self._store, name)
        except FileNotFoundError:
            return
        except self._errors as error:
            raise self._failed(error) from error

    def _probe(self) -> None:
        self._obstore.put(self._store, f"{self._owner}/probe", b"is written to see that it is well")

    def _failed(self, error: Exception) -> StoreUnavailableError:
        """Note that it does not answer, and ask until it does."""
        reason = _reason_of(error)
        with self._lock:
            is_new, self._reason = not self._reason, reason
        if is_new:
            log.warning("%s: %s", reason, str(error).partition("\n")[0])
            threading.Thread(target=self._watch, name="rankscope-watch", daemon=True).start()
        return _unavailable(reason)

    def _watch(self) -> None:
        while True:
            try:
                self._probe()
            except self._errors as error:
                self._reason = _reason_of(error)
            else:
                with self._lock:
                    self._reason = ""
                log.warning("the store of objects answers again")
                return
            if self._closed.wait(_AGAIN_SECONDS):
                return


def _unavailable(reason: str) -> StoreUnavailableError:
    return StoreUnavailableError(reason, "look at the store of --blobs; senders retry", CAUSE)


def _reason_of(error: Exception) -> str:
    """Return what is wrong, without names of places: readiness is open to all."""
    text = str(error).lower()
    if "nosuchbucket" in text:
        return "the bucket is not there: make it"
    if isinstance(error, PermissionError) or "permission" in text or "access denied" in text:
        return "the store of objects refuses this server"
    if "no space" in text or "insufficient storage" in text:
        return "the store of objects is full"
    return _AWAY


def _packed(parts: Sequence[tuple[str, bytes]]) -> Iterator[tuple[str, list[int]]]:
    """Yield a folder, and the numbers of the parts of one object of it."""
    by_folder: dict[str, list[int]] = {}
    for at, (folder, _) in enumerate(parts):
        by_folder.setdefault(folder, []).append(at)
    for folder, numbers in by_folder.items():
        pack, size = list[int](), 0
        for at in numbers:
            length = len(parts[at][1])
            if pack and size + length > MAX_OBJECT_BYTES:
                yield folder, pack
                pack, size = [], 0
            pack.append(at)
            size += length
        yield folder, pack


def _spans(places: Sequence[Place]) -> Iterator[_Span]:
    """Yield ranges that hold all places which are in objects, near ones together."""
    numbers = [at for at, place in enumerate(places) if place.object and place.num_bytes]
    numbers.sort(key=lambda at: (str(places[at].object), places[at].start))
    span = _Span("", 0, 0, [])
    for at in numbers:
        _, name, start, num_bytes, _ = places[at]
        end = start + num_bytes
        is_near = start <= span.end + NEAR_BYTES and end - span.start <= MAX_OBJECT_BYTES
        if name == span.object and is_near:
            span = span._replace(end=max(end, span.end), places=[*span.places, at])
            continue
        if span.places:
            yield span
        span = _Span(str(name), start, end, [at])
    if span.places:
        yield span


def _new_name() -> str:
    """Return a name that no other object has, in the order of time."""
    return f"{time.time_ns():020d}-{secrets.token_hex(6)}"


def _sync(root: Path, name: str) -> None:
    """Write an object and the folders in which it is to the disk."""
    path: Any = root / name
    while path != root.parent:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        path = path.parent
