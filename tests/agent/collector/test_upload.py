from __future__ import annotations

import contextlib
import json
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.node.offsets import Offsets
from rankscope.node.upload.server import Server, ServerAnswer
from rankscope.node.upload.spool import Spool, SpoolEntry, SpoolHeader
from rankscope.node.upload.uploader import Uploader
from rankscope.wire import schema, zstd
from tests.agent.collector.processes import wait_for
from tests.agent.collector.receiver import Receiver
from tests.damage import damaged


def batch(sequence: int) -> bytes:
    body = schema.encode(
        schema.Batch(
            schema_version=1, run_id="r", producer="p", sequence=sequence, host="h", sent_ns=1
        )
    )
    return zstd.pack(body)


@pytest.mark.parametrize(
    "url", ["ftp://host", "http://", "http://host:port", "http://host:99999", "//"]
)
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ValueError, match=r"RANKSCOPE_SERVER|[Pp]ort"):
        Server(url, "")


def test_the_address_may_leave_out_what_is_clear(receiver: Receiver) -> None:
    for url in (receiver.url, receiver.url + "/", receiver.url.removeprefix("http://")):
        server = Server(url, "")
        assert server.post(batch(1)).status == 200
        server.close()


def test_a_batch_goes_with_what_the_clock_shows_when_it_is_sent(receiver: Receiver) -> None:
    server = Server(receiver.url, "")
    for number in (1, 2):
        before_ns = time.time_ns()
        assert server.post(batch(number)).status == 200
        assert before_ns <= int(receiver.headers[schema.CLOCK_HEADER]) <= time.time_ns()
    server.close()


def test_the_connection_is_kept_and_mended(receiver: Receiver) -> None:
    server = Server(receiver.url, "")
    assert server.post(batch(1)).status == 200
    first = server._client._connection
    assert server.post(batch(2)).status == 200
    assert server._client._connection is first
    receiver.drop_answers = 1  # stored, and closed without an answer
    assert server.post(batch(3)).status == 200
    assert len(receiver.batches) == 3
    server.close()


def test_the_collector_takes_the_proxy_that_the_environment_names(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "no_proxy", "NO_PROXY", "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", receiver.url)
    server = Server("scope.example:8787", "")
    assert server.post(batch(1)).status == 200
    assert len(receiver.batches) == 1
    server.close()


def test_network_errors_are_answers(receiver: Receiver) -> None:
    assert Server("http://127.0.0.1:1", "").post(b"").status == 0
    receiver.delay_seconds = 0.5
    answer = Server(receiver.url, "", timeout_seconds=0.1).post(batch(1))
    assert answer.status == 0
    assert "timed out" in answer.text


OURS = json.dumps({"error": {"what": "not a batch", "field": "body", "remedy": "pack it again"}})


@pytest.mark.parametrize(
    ("status", "refusal"),
    [(400, True), (410, True), (413, True), (415, True), (422, True), (401, False), (403, False),
     (404, False), (405, False), (407, False), (408, False), (421, False), (425, False),
     (429, False), (451, False), (500, False), (503, False), (302, False), (0, False)],
)  # fmt: skip
def test_what_is_a_refusal(status: int, refusal: bool) -> None:
    assert ServerAnswer(status, OURS).is_refusal is refusal


@pytest.mark.parametrize("text", ["", "<html>400 Bad Request</html>", '{"error": "nginx"}', "[]"])
def test_a_proxy_refuses_only_what_is_too_large_for_it(text: str) -> None:
    refused = [s for s in range(300, 600) if ServerAnswer(s, text).is_refusal]
    assert refused == [413]


@pytest.mark.parametrize("status", [400, 404, 405, 407, 410, 421, 425, 451])
def test_batches_wait_while_something_on_the_way_answers(
    receiver: Receiver, tmp_path: Path, status: int
) -> None:
    spool = Spool(tmp_path, 1 << 20)
    refused: list[tuple[int, str]] = []
    for sequence in (1, 2):
        spool.offer(SpoolEntry(sequence, 1, 1, None, batch(sequence)))
    receiver.answer = (status, "<html>no such site</html>")
    uploader = Uploader(
        Server(receiver.url, ""), spool, lambda *what: refused.append(what), lambda: 0.0
    )
    uploader.start()
    wait_for(lambda: receiver.num_posts >= 2)
    assert (spool.waiting()[0], refused) == (2, [])
    receiver.answer = None
    wait_for(lambda: spool.waiting()[0] == 0)
    assert sorted(receiver.batches) == [("p", 1), ("p", 2)]
    assert refused == []


def test_an_answer_nested_without_end_is_none_and_batches_wait(
    receiver: Receiver, tmp_path: Path
) -> None:
    answer = ServerAnswer(502, "[" * 100_000)
    assert (answer.is_refusal, answer.is_ours, answer.reason) == (False, False, "[" * 200)
    spool = Spool(tmp_path, 1 << 20)
    spool.offer(SpoolEntry(1, 1, 1, None, batch(1)))
    receiver.answer = (502, "[" * 100_000)
    Uploader(Server(receiver.url, ""), spool, lambda items, why: None, lambda: 0.0).start()
    wait_for(lambda: receiver.num_posts >= 2)
    receiver.answer = None
    wait_for(lambda: spool.waiting()[0] == 0)


def test_a_server_that_answers_later_than_the_limit_is_given_longer(receiver: Receiver) -> None:
    receiver.delay_seconds = 1.0
    server = Server(receiver.url, "", timeout_seconds=0.4)
    answers = [server.post(batch(1)) for _ in range(4)]
    assert [answer.status for answer in answers] == [0, 0, 200, 200]  # 0.4, 0.8, 1.6 s
    receiver.delay_seconds = 0.0
    assert [server.post(batch(number)).status for number in (2, 3)] == [200, 200]
    receiver.delay_seconds = 1.0
    assert server.post(batch(4)).status == 0  # as short as before, once it is quick again
    server.close()


def test_where_a_server_was_moved_to_is_said(receiver: Receiver) -> None:
    receiver.answer, receiver.location = (308, ""), "https://new.example/api/v1/ingest"
    answer = Server(receiver.url, "").post(batch(1))
    assert (answer.status, answer.is_refusal) == (308, False)
    assert answer.reason == f"moved to {receiver.location}: set RANKSCOPE_SERVER"


class BrokenServer(Server):
    """A fault of ours, in every second request."""

    def __init__(self, url: str) -> None:
        super().__init__(url, "")
        self.num_posts = 0

    def post(self, body: bytes, *, has_waited: bool = True, held_from: int = 0) -> ServerAnswer:
        self.num_posts += 1
        if self.num_posts % 2:
            raise LookupError("a fault of ours")
        return super().post(body, has_waited=has_waited, held_from=held_from)


def test_an_error_of_ours_does_not_end_the_upload(
    receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path, 1 << 20)
    server = BrokenServer(receiver.url)
    Uploader(server, spool, lambda items, why: None, lambda: 0.0).start()
    for sequence in (1, 2):
        spool.offer(SpoolEntry(sequence, 1, 1, None, batch(sequence)))
        wait_for(lambda: spool.waiting()[0] == 0)
    assert sorted(receiver.batches) == [("p", 1), ("p", 2)]
    (said,) = [record for record in caplog.records if "batches wait" in record.message]
    assert "LookupError: a fault of ours" in said.message
    assert said.exc_info is not None


def test_a_proxy_that_says_200_to_everything_is_not_believed(
    receiver: Receiver, tmp_path: Path
) -> None:
    spool = Spool(tmp_path, 1 << 20)
    spool.offer(SpoolEntry(1, 1, 1, None, batch(1)))
    uploader = Uploader(Server(receiver.url, ""), spool, lambda items, why: None, lambda: 0.0)
    real = receiver.take
    receiver.take = lambda body: None  # type: ignore[method-assign]
    receiver.answer = (200, "<html>welcome to the hotel</html>")
    uploader.start()
    wait_for(lambda: receiver.num_posts >= 2)
    assert spool.waiting()[0] == 1
    receiver.take, receiver.answer = real, None  # type: ignore[method-assign]
    wait_for(lambda: spool.waiting()[0] == 0)
    assert list(receiver.batches) == [("p", 1)]


def test_parts_that_the_server_refuses_are_counted(tmp_path: Path, receiver: Receiver) -> None:
    spool = Spool(tmp_path, 1 << 20)
    spool.offer(SpoolEntry(1, 5, 1, None, batch(1)))
    refused: list[tuple[int, str]] = []
    parts = [{"index": 0, "kind": "steps", "field": "step"}, {"index": 1}, "noise"]
    receiver.answer = (200, json.dumps({"accepted_records": 3, "refused": parts}))
    server = Server(receiver.url, "")
    Uploader(server, spool, lambda *what: refused.append(what)).start()
    wait_for(lambda: len(refused) == 2)
    assert spool.waiting() == (0, 0)
    assert refused == [(1, "refused steps: step"), (1, "refused None: None")]


def test_a_spool_file_that_is_damaged_is_counted(tmp_path: Path, receiver: Receiver) -> None:
    spool = Spool(tmp_path, 1 << 20)
    path = tmp_path / "1.batch"
    path.write_bytes(b"noise")
    refused: list[tuple[int, str]] = []
    spool.offer(SpoolEntry(1, 7, 5, path))
    spool.offer(SpoolEntry(2, 7, 5, tmp_path / "gone.batch"))
    spool.offer(SpoolEntry(3, 1, 1, None, batch(3)))
    uploader = Uploader(Server(receiver.url, ""), spool, lambda *what: refused.append(what))
    uploader.start()
    wait_for(lambda: receiver.batches)
    assert refused == [(7, "spool file unreadable: not a spool file")]
    wait_for(lambda: not path.exists())


@pytest.fixture
def no_descriptors() -> Iterator[Callable[[], None]]:
    """Take all descriptors of this process; the call gives them back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []

    def give_back() -> None:
        while taken:
            os.close(taken.pop())
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard)
    )
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    yield give_back
    give_back()


def test_a_batch_waits_while_its_file_cannot_be_opened(
    tmp_path: Path, receiver: Receiver, request: pytest.FixtureRequest
) -> None:
    spool = Spool(tmp_path, 1 << 20)
    entry = spool.write(SpoolHeader("p", 1, 3, Offsets("p", 1)), batch(1))
    spool.offer(entry)
    assert entry.path is not None
    refused: list[tuple[int, str]] = []
    waits = threading.Event()

    def jitter() -> float:
        waits.set()
        return 0.0

    uploader = Uploader(Server(receiver.url, ""), spool, lambda *what: refused.append(what), jitter)
    give_back = request.getfixturevalue("no_descriptors")
    uploader.start()
    has_waited = waits.wait(30)
    is_there = entry.path.exists()
    give_back()
    assert (has_waited, is_there, refused) == (True, True, [])
    wait_for(lambda: spool.waiting()[0] == 0)
    assert list(receiver.batches) == [("p", 1)]


def test_a_file_that_cannot_be_read_at_the_start_is_no_damage(tmp_path: Path) -> None:
    entry = Spool(tmp_path, 1 << 20).write(SpoolHeader("p", 1, 3, Offsets("p", 1)), batch(1))
    assert entry.path is not None
    entry.path.rename(tmp_path / "kept")
    (tmp_path / entry.path.name).mkdir()  # it can be seen, and not be read
    spool = Spool(tmp_path, 1 << 20)
    assert (spool.waiting()[0], spool.num_damaged) == (1, 0)
    (tmp_path / entry.path.name).rmdir()
    (tmp_path / "kept").rename(entry.path)
    found = spool.take(0.0)
    assert found is not None
    assert found.body() == batch(1)


def test_a_batch_is_done_when_all_that_was_refused_of_it_is_counted(
    tmp_path: Path, receiver: Receiver
) -> None:
    spool = Spool(tmp_path, 1 << 20)
    spool.offer(SpoolEntry(1, 5, 1, None, batch(1)))
    parts = [{"index": 0, "kind": "steps", "field": "step"}]
    receiver.answer = (200, json.dumps({"accepted_records": 3, "refused": parts}))
    waiting: list[int] = []
    uploader = Uploader(
        Server(receiver.url, ""), spool, lambda *what: waiting.append(spool.waiting()[0])
    )
    uploader.start()
    wait_for(lambda: spool.waiting()[0] == 0)
    assert waiting == [1]


def test_of_a_refusal_by_a_proxy_only_the_status_is_counted(
    tmp_path: Path, receiver: Receiver
) -> None:
    spool = Spool(tmp_path, 1 << 20)
    spool.offer(SpoolEntry(1, 5, 1, None, batch(1)))
    refused: list[tuple[int, str]] = []
    receiver.answer = (413, "<html>too large, request id 5f2a</html>")
    Uploader(Server(receiver.url, ""), spool, lambda *what: refused.append(what)).start()
    wait_for(lambda: spool.waiting()[0] == 0)
    assert refused == [(5, "HTTP 413")]


@given(st.data())
def test_of_damaged_spool_files_the_readable_ones_are_taken_up(
    tmp_path: Path, data: st.DataObject
) -> None:
    for path in tmp_path.glob("*"):
        path.unlink()
    spool = Spool(tmp_path, 1 << 20)
    for sequence in (1, 2):
        entry = spool.write(SpoolHeader("p", sequence, 3, Offsets("p", sequence)), b"body")
    assert entry.path is not None
    entry.path.write_bytes(data.draw(damaged(entry.path.read_bytes())))
    after = Spool(tmp_path, 1 << 20)
    assert after.waiting()[0] + after.num_damaged == 2
    first = after.take(0.0)
    assert first is not None
