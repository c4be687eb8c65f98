"""A run of a server, opened from Python: `rankscope.open("my-run")`."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec
import pyarrow as pa

from rankscope.address import AddressError
from rankscope.data.batches import batch_of_rows, batches_of
from rankscope.data.kinds import (
    EVERYTHING,
    KINDS,
    LOG_COLUMNS,
    DataError,
    Part,
    Progress,
    Range,
    schema_of,
)
from rankscope.data.pictures import Map, Verdict
from rankscope.http import Client, HttpAnswer, HttpError
from rankscope.settings import SettingError, from_environment
from rankscope.wire.chunk import ChunkError
from rankscope.wire.schema import CHUNK_COLUMNS
from rankscope.wire.stored import LOGS, ROW_COLUMNS, ChunkPage, RowPage

DEFAULT_SERVER = "http://127.0.0.1:8787"
_TIMEOUT_SECONDS, _MOST_BYTES = 120.0, 128 << 20
_LINES = 5_000
_Page = TypeVar("_Page", ChunkPage, RowPage)
_decode_chunks = msgspec.msgpack.Decoder(ChunkPage).decode
_decode_rows = msgspec.json.Decoder(RowPage).decode


class Run:
    """A run that a server stores. Close it, or use it in a `with` block.

    Tables are fetched when they are asked for. Their columns are in docs/data.md.
    """

    def __init__(self, run: str, client: Client) -> None:
        self.id, self._client = run, client
        self._path = f"/api/v1/runs/{quote(run, safe='')}"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<rankscope run {self.id!r} of {self._client.address.url}>"

    def close(self) -> None:
        """Close the connection to the server."""
        self._client.close()

    @property
    def tables(self) -> tuple[str, ...]:
        """Return the names of all tables; those of what was not recorded have no rows."""
        return KINDS

    def summary(self) -> dict[str, Any]:
        """Return what the overview shows: the verdict, its answer, numbers, attempts, coverage.

        Raises DataError.
        """
        return self._fields(self._ask(""))

    @property
    def verdict(self) -> Verdict:
        """Return the verdict in one sentence, with its reasons in a notebook. Raises DataError."""
        return Verdict(self.summary())

    def map(
        self, metric: str = "own_work", *, steps: Range | None = None, order: str = "worst",
        lanes: int = 32, columns: int = 240,
    ) -> Map:  # fmt: skip
        """Return the map of ranks by steps, the ranks that deviate most first. Raises DataError.

        `metric` and `order` are those of the page Ranks (docs/api.md); of more ranks than `lanes`
        and more steps than `columns` several are one.
        """
        asked: dict[str, Any] = {"metric": metric, "order": order, "lanes": lanes, "width": columns}
        if steps is not None:
            asked |= {"from": steps[0], "to": steps[1]}
        return Map(self._fields(self._ask(f"/map?{urlencode(asked)}")))

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        verdict, drawn = self.verdict, self.map()
        return {
            "text/html": f"{verdict._repr_html_()}{drawn._repr_svg_()}",
            "text/plain": f"{verdict}\n{drawn!r}",
        }

    def batches(
        self,
        table: str,
        part: Part = EVERYTHING,
        *,
        progress: Progress = lambda done, total: None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a table as they arrive, in memory that is bounded by one page.

        `progress` gets after each page the events that were read by now, and of how many if that
        is known. Raises DataError.
        """
        schema_of(table)
        if table in CHUNK_COLUMNS:
            pages = self._chunks(table, part, progress)
        elif table in ROW_COLUMNS:
            pages = self._rows(table, progress)
        else:
            pages = self._lines(progress)
        for page in pages:
            yield from page

    def arrow(
        self, table: str, *, steps: Range | None = None, ranks: Sequence[int] = (),
        attempt: int | None = None,
    ) -> pa.Table:  # fmt: skip
        """Return a table of Arrow: rows of some steps (first, last), ranks, and one attempt.

        Raises DataError.
        """
        part = Part(steps, [(rank, rank) for rank in ranks], attempt)
        found = pa.Table.from_batches(self.batches(table, part), schema_of(table))
        return found.unify_dictionaries()

    def pandas(self, table: str, **part: Any) -> Any:
        """Return a table of pandas; the options are those of `arrow`. Raises DataError."""
        with _installed("pandas"):
            return self.arrow(table, **part).to_pandas()

    def polars(self, table: str, **part: Any) -> Any:
        """Return a table of polars; the options are those of `arrow`. Raises DataError."""
        with _installed("polars"):
            import polars

            return polars.from_arrow(self.arrow(table, **part))

    def sql(self, query: str, *, steps: Range | None = None, ranks: Sequence[int] = (),
            attempt: int | None = None, seconds: float = 300.0) -> pa.Table:  # fmt: skip
        """Return what a SELECT over the tables finds; only tables that it names are fetched.

        The dialect is that of DuckDB. Raises DataError where it is wrong, does anything but read
        the tables, or takes longer than `seconds`.
        """
        from rankscope.data.sql import Tables

        part = Part(steps, [(rank, rank) for rank in ranks], attempt)
        with Tables(lambda table, progress: self.batches(table, part, progress=progress)) as tables:
            return tables.select(query, seconds=seconds).to_arrow_table()

    # --- asking ------------------------------------------------------------------------------

    def _chunks(self, table: str, part: Part, progress: Progress) -> Iterator[list[pa.RecordBatch]]:
        after, done, total = None, 0, None
        while True:
            asked = {"kind": table} | part.query | ({} if after is None else {"after": after})
            page = self._page("/chunks", asked, _decode_chunks)
            total = page.num_events if after is None else total
            try:
                yield batches_of(table, page.chunks, part.steps, part.ranks)
            except ChunkError as error:
                raise DataError(f"a chunk of {table} is damaged: {error}") from error
            if page.num_unread:
                chunks = "chunk is" if page.num_unread == 1 else "chunks are"
                warnings.warn(
                    f"{table} is not complete: the data of {page.num_unread} {chunks} missing or "
                    "damaged at the server",
                    RuntimeWarning,
                    stacklevel=2,
                )
            done += sum(chunk.count for chunk in page.chunks)
            progress(done, total)
            after = page.after
            if after is None:
                return

    def _rows(self, table: str, progress: Progress) -> Iterator[list[pa.RecordBatch]]:
        after, done = "", 0
        while True:
            page = self._page("/rows", {"kind": table, "after": after}, _decode_rows)
            yield [batch_of_rows(table, page)]
            done += len(page.rows)
            progress(done, None)
            if page.after is None:
                return
            after = page.after

    def _lines(self, progress: Progress) -> Iterator[list[pa.RecordBatch]]:
        """Yield log lines, the newest first, each on its own."""
        cursor, done = None, 0
        while True:
            asked = {"limit": _LINES, "fold": "false"} | ({"cursor": cursor} if cursor else {})
            page = self._fields(self._ask(f"/logs?{urlencode(asked)}"))
            rows = [
                [row[name] for name in LOG_COLUMNS]
                for row in (
                    line | {"time_ns": round(line["time_ms"] * 1e6),
                            "fields": json.dumps(line["fields"])}
                    for line in page["lines"]
                )
            ]  # fmt: skip
            yield [batch_of_rows(LOGS, RowPage(list(LOG_COLUMNS), rows, None))]
            done += len(rows)
            progress(done, None)
            cursor = page["next_cursor"]
            if cursor is None:
                return

    def _page(self, path: str, asked: dict[str, Any], decode: Callable[[bytes], _Page]) -> _Page:
        answer = self._ask(f"{path}?{urlencode(asked)}")
        try:
            return decode(answer.body)
        except msgspec.MsgspecError as error:
            raise DataError(
                f"{self._client.address.url} answers in a form that this version does not know; "
                f"use the version of the server: {error}"
            ) from error

    def _fields(self, answer: HttpAnswer) -> dict[str, Any]:
        if not answer.fields:
            raise DataError(f"{self._client.address.url}: no rankscope server answers there")
        return answer.fields

    def _ask(self, path: str) -> HttpAnswer:
        # chunks are compressed already
        headers = {"Accept-Encoding": "identity"} if path.startswith("/chunks") else {}
        try:
            answer = self._client.request("GET", self._path + path, headers=headers)
        except HttpError as error:
            raise DataError(f"{self._client.address.url} does not answer: {error}") from error
        if answer.status != 200:
            raise DataError(answer.why())
        return answer


def open_run(run: str, *, server: str = "", token: str = "") -> Run:
    """Open a run of a server; see `Run`. The run has to be there.

    Without `server` and `token` they are those of RANKSCOPE_SERVER and RANKSCOPE_TOKEN.
    Raises DataError.
    """
    try:
        settings = from_environment(os.environ)
        client = Client(
            server or settings.server or DEFAULT_SERVER, token or settings.token,
            timeout_seconds=_TIMEOUT_SECONDS, max_answer_bytes=_MOST_BYTES,
        )  # fmt: skip
    except (SettingError, AddressError) as error:
        raise DataError(str(error)) from error
    found = Run(run, client)
    try:
        found.summary()
    except DataError:
        found.close()
        raise
    return found


@contextlib.contextmanager
def _installed(package: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise DataError(f"{package} is not installed: pip install {package}") from error
