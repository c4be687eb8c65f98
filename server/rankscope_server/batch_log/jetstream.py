"""The log in NATS JetStream: a stream for each partition, on several servers.

Readers say from which position on they read, and are not known to the log: a consumer would be
one more thing that can die with its server. The numbers of a stream begin with the time at which
it was made, in us: those of one that was made anew, as all disks were lost, are above those of
before, so that a position means one message for good.
"""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote

import msgspec
from nats.aio.msg import Msg
from nats.js.api import DiscardPolicy, StreamConfig
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from rankscope_server.batch_log.answering import Answering
from rankscope_server.batch_log.interface import Appended, Head, Origin, ReadBatch, unavailable
from rankscope_server.batch_log.nats_client import CALL_SECONDS, FAILURES, NatsClient
from rankscope_server.batch_log.partitions import partition_of
from rankscope_server.ingest.batch import ReadBatch as Unpacked
from rankscope_server.ingest.batch import read_batch
from rankscope_server.problems import Problem
from rankscope_server.settings import Settings

_DUPLICATE_SECONDS = 120.0  # in which the log itself knows a batch again; later the store does
_RETRY_SECONDS, _PREPARE_SECONDS = 0.1, 1.0
_NAME_IN_USE = 10058  # error of JetStream: another process was quicker
_HEADER_BYTES = 4096  # of a message, with the envelope around the batch
MOST_MESSAGES, MOST_BYTES = 256, 4 << 20  # of one read


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A message of the log: a batch as it came, and what its request said."""

    run_id: str
    producer: str
    sequence: int
    encoding: str
    project: str | None
    waited_ns: int  # at its collector; -1: not known
    appended_ns: int  # clock of the gateway
    body: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entry).decode


@dataclass(frozen=True, slots=True)
class Packed:
    """A batch that is passed on as it came."""

    head: Head
    body: bytes
    encoding: str
    unpacked: Unpacked | None  # where commands are wanted


class JetStream:
    """The streams of all partitions. Functions that wait are for threads of their own."""

    def __init__(self, settings: Settings, client: NatsClient) -> None:
        self._client, self._settings = client, settings
        self._streams: set[int] = set()  # that are there, as far as is known
        self._making, self._is_prepared = asyncio.Lock(), False

    def start(self) -> None:
        """Begin to make what is not there."""
        self._client.submit(self._prepare())

    @property
    def num_partitions(self) -> int:
        """Return how many there are."""
        return self._settings.log_partitions

    @property
    def max_batch_bytes(self) -> int:
        """Return the largest batch that the servers take."""
        return max(self._client.max_payload_bytes - _HEADER_BYTES, 0)

    def failure(self) -> str:
        """Return why it takes and gives nothing now; empty where it does."""
        if not self._client.is_connected:
            return "no server of NATS is reached"
        return "" if self._is_prepared else "its partitions are not there yet"

    async def append(self, partition: int, entry: Entry) -> bool:
        """Append an entry; return whether it was there before. Raises StoreUnavailableError.

        Is done when most servers have it.
        """
        return await asyncio.wrap_future(self._client.submit(self._append(partition, entry)))

    def read(self, partition: int, after: int) -> list[tuple[int, Entry]]:
        """Return the next entries after a position, with theirs; none where none is there.

        Raises StoreUnavailableError.
        """
        return self._client.submit(self._read(partition, after)).result(3 * CALL_SECONDS)

    def first_position(self, partition: int) -> int:
        """Return the position of the oldest entry that is there. Raises StoreUnavailableError."""
        return self._client.submit(self._first_position(partition)).result(3 * CALL_SECONDS)

    def forget(self, partition: int, upto: int) -> None:
        """Remove entries that are in the store. Raises StoreUnavailableError."""
        self._client.submit(self._forget(partition, upto)).result(3 * CALL_SECONDS)

    def _stream(self, partition: int) -> str:
        return f"{self._settings.log_name}-{partition}"

    def _subject(self, partition: int) -> str:
        return f"{self._settings.log_name}.batches.{partition}"

    async def _append(self, partition: int, entry: Entry) -> bool:
        if not self._client.is_connected:
            raise unavailable(self.failure())
        name = quote(entry.producer, safe="")
        headers = {"Nats-Msg-Id": f"{entry.run_id}/{name}/{entry.sequence}"}
        stream, body = self._client.client.jetstream(timeout=CALL_SECONDS), _encode(entry)
        until = time.monotonic() + CALL_SECONDS
        while True:
            try:
                await self._make_once(partition)
                done = await stream.publish(self._subject(partition), body, headers=headers)
                return bool(done.duplicate)
            except NoStreamResponseError as error:
                # It has no leader for a moment, or it was lost: then the next turn makes it anew.
                self._streams.discard(partition)
                if time.monotonic() > until:
                    raise unavailable("most of its servers are away") from error
                await asyncio.sleep(_RETRY_SECONDS)
            except FAILURES as error:
                raise unavailable(str(error) or "most of its servers are away") from error

    async def _make_once(self, partition: int) -> None:
        if partition not in self._streams:
            async with self._making:
                if partition not in self._streams:
                    await self._make(partition)
                    self._streams.add(partition)

    async def _prepare(self) -> None:
        """Make all streams, or find that they are there, however long that takes."""
        for partition in range(self.num_partitions):
            while True:
                try:
                    await self._make_once(partition)
                    break
                except FAILURES as error:
                    self._client.say(error)
                    await asyncio.sleep(_PREPARE_SECONDS)
        self._is_prepared = True

    async def _make(self, partition: int) -> None:
        """Make the stream of a partition where there is none."""
        manager = self._client.client.jsm(timeout=CALL_SECONDS)
        try:
            await manager.stream_info(self._stream(partition))
        except NotFoundError:
            settings = self._settings
            config = StreamConfig(
                name=self._stream(partition),
                subjects=[self._subject(partition)],
                num_replicas=settings.log_replicas,
                max_bytes=settings.log_partition_bytes,
                discard=DiscardPolicy.NEW,  # a full log takes no batch, rather than to lose one
                duplicate_window=_DUPLICATE_SECONDS,
                allow_direct=True,
                first_seq=time.time_ns() // 1_000,
            )
            try:
                await manager.add_stream(config)
            except APIError as error:
                if error.err_code != _NAME_IN_USE:
                    raise

    async def _read(self, partition: int, after: int) -> list[tuple[int, Entry]]:
        client = self._client.client
        wanted = {"seq": after + 1, "batch": MOST_MESSAGES, "max_bytes": MOST_BYTES}
        inbox = client.new_inbox()
        found: list[tuple[int, Entry]] = []
        try:
            answers = await client.subscribe(inbox, pending_bytes_limit=-1)
            try:
                subject = f"$JS.API.DIRECT.GET.{self._stream(partition)}"
                await client.publish(subject, json.dumps(wanted).encode(), reply=inbox)
                while (message := await answers.next_msg(CALL_SECONDS)) is not None:
                    position = _position_of(message)
                    if position is None or (found and position != found[-1][0] + 1):
                        return found
                    found.append((position, _decode(message.data)))
            finally:
                await answers.unsubscribe()
        except FAILURES as error:
            if not found:  # what came is there
                raise unavailable(error) from error
        return found

    async def _first_position(self, partition: int) -> int:
        manager = self._client.client.jsm(timeout=CALL_SECONDS)
        try:
            info = await manager.stream_info(self._stream(partition))
        except FAILURES as error:
            raise unavailable(error) from error
        return int(info.state.first_seq)

    async def _forget(self, partition: int, upto: int) -> None:
        manager = self._client.client.jsm(timeout=CALL_SECONDS)
        try:
            await manager.purge_stream(self._stream(partition), seq=upto + 1)
        except FAILURES as error:
            raise unavailable(error) from error


class JetStreamLog:
    """Checks what is cheap to check, and publishes. Workers (`followers.py`) do the rest."""

    def __init__(self, settings: Settings, streams: JetStream, answering: Answering) -> None:
        self._max_unpacked_bytes = settings.max_unpacked_bytes
        self._streams, self._answering = streams, answering
        self._reader = ThreadPoolExecutor(1, "rankscope-read")

    async def read(
        self, body: bytes, encoding: str, *, takes_commands: bool, is_urgent: bool = False
    ) -> Packed:
        """Return a body as a batch whose parts are not looked at. Raises Problem.

        What is urgent has its place in the order of the log as all else.
        """
        most = self._streams.max_batch_bytes
        if len(body) > most > 0:  # 0: not known now
            raise Problem(
                413, f"the log takes batches of at most {most} bytes", "body",
                "raise max_payload of its servers, or send smaller batches",
            )  # fmt: skip
        read = partial(
            read_batch, body, encoding, self._max_unpacked_bytes, takes_commands=takes_commands
        )
        unpacked = await asyncio.get_running_loop().run_in_executor(self._reader, read)
        envelope = unpacked.envelope
        head = Head(
            envelope.run_id, envelope.producer, envelope.sequence, envelope.sent_ns,
            len(envelope.records), len(unpacked.chunks.chunks), unpacked.chunks.num_events,
        )  # fmt: skip
        return Packed(head, body, encoding, unpacked if takes_commands else None)

    async def append(self, batch: ReadBatch, origin: Origin) -> Appended:
        """Publish a batch. Raises Problem, StoreUnavailableError."""
        packed = batch
        assert isinstance(packed, Packed)
        head = packed.head
        await self._answering.check(head.run_id)
        entry = Entry(
            head.run_id, head.producer, head.sequence, packed.encoding, origin.project,
            origin.clock_ns - head.sent_ns if origin.clock_ns else -1, time.time_ns(), packed.body,
        )  # fmt: skip
        partition = partition_of(head.run_id, self._streams.num_partitions)
        is_known = await self._streams.append(partition, entry)
        commands = []
        if packed.unpacked is not None:
            commands = await self._answering.commands(head.run_id, packed.unpacked)
        return Appended(is_known, is_durable=False, commands=commands)

    def failure(self) -> str:
        """Return why it takes no batches now."""
        return self._streams.failure()


def _position_of(message: Msg) -> int | None:
    """Return the position of an entry; None of what says that there are no more."""
    position = (message.headers or {}).get("Nats-Sequence")
    return None if position is None else int(position)
