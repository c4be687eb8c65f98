"""Reports through a shared directory."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from rankscope.preflight.exchange import share
from rankscope.preflight.exchange.carrier import CarrierError
from rankscope.preflight.exchange.share import ShareCarrier
from rankscope.preflight.key import RunKey
from rankscope.preflight.model import NodeReport

KEY = RunKey.of("a secret of the tests, long enough", "7")
OTHER = RunKey.of("another secret of the tests, as long", "7")


def report(node: str, version: int = 0, **more: object) -> NodeReport:
    return NodeReport(node=node, version=version, **more)  # type: ignore[arg-type]


def test_reports_go_both_ways_and_only_when_they_are_news(tmp_path: Path) -> None:
    async def meet() -> None:
        a, b = ShareCarrier(tmp_path, KEY), ShareCarrier(tmp_path, KEY)
        assert await a.exchange(report("a/x"), {}) == []
        assert await b.exchange(report("b", 3), {"b": 3}) == []  # a has not read its file
        assert await a.exchange(report("a/x"), {"a/x": 0}) == [report("b", 3)]
        assert await b.exchange(report("b", 3), {"b": 3}) == [report("a/x")]
        assert await b.exchange(report("b", 3), {"b": 3, "a/x": 0}) == []
        assert await a.exchange(report("a/x", 1), {"a/x": 1}) == [report("b", 3)]
        for _ in range(2):  # whoever has not taken it is offered it again
            assert await b.exchange(report("b", 3), {"a/x": 0}) == [report("a/x", 1)]

    asyncio.run(meet())


def test_the_last_one_to_leave_removes_all(tmp_path: Path) -> None:
    async def meet() -> None:
        carriers = {name: ShareCarrier(tmp_path, KEY) for name in "abc"}
        for name, carrier in carriers.items():
            await carrier.exchange(report(name), {})
        for name, carrier in carriers.items():
            await carrier.exchange(report(name), {})
        await carriers["a"].close()
        await carriers["b"].close()
        assert len(list(tmp_path.rglob("*.json"))) == 3  # c may still want to read
        assert len(await carriers["c"].exchange(report("c"), {})) == 2
        await carriers["c"].close()

    asyncio.run(meet())
    assert list(tmp_path.iterdir()) == []


def test_another_run_is_another_directory(tmp_path: Path) -> None:
    async def meet() -> None:
        await ShareCarrier(tmp_path, KEY).exchange(report("a"), {})
        assert await ShareCarrier(tmp_path, RunKey(KEY.secret, "8")).exchange(report("b"), {}) == []

    asyncio.run(meet())


def test_what_an_earlier_preflight_left_is_ignored(tmp_path: Path) -> None:
    async def meet() -> None:
        old = ShareCarrier(tmp_path, KEY)
        await old.exchange(report("a", 9, stage="done", started_unix_s=1.0), {})
        await ShareCarrier(tmp_path, KEY).exchange(report("dead", 9, stage="pairs"), {})
        (dead,) = tmp_path.rglob("dead.json")
        os.utime(dead, (0, time.time() - share.STALE_S - 5))
        new = ShareCarrier(tmp_path, KEY)
        assert await new.exchange(report("b"), {}) == []
        assert await new.exchange(report("b"), {}) == []
        assert not dead.exists()
        again = ShareCarrier(tmp_path, KEY)
        await again.exchange(report("a", 1, started_unix_s=2.0), {})
        assert [r.started_unix_s for r in await new.exchange(report("b"), {})] == [2.0]

    asyncio.run(meet())


def test_a_broken_file_and_a_report_of_another_version_hold_nobody_up(tmp_path: Path) -> None:
    async def meet() -> None:
        carrier = ShareCarrier(tmp_path, KEY)
        await carrier.exchange(report("a"), {})
        (directory,) = tmp_path.iterdir()
        (directory / "broken.json").write_bytes(b'{"node": ')
        await ShareCarrier(tmp_path, KEY).exchange(report("b"), {})
        with pytest.raises(CarrierError, match="another secret, and not believed: broken"):
            await carrier.exchange(report("a"), {})  # once
        assert await carrier.exchange(report("a"), {}) == [report("b")]

    asyncio.run(meet())


def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CarrierError, match="Not a directory"):
        asyncio.run(ShareCarrier(tmp_path / "file", KEY).exchange(report("a"), {}))


def test_a_network_disk_that_hangs_is_told_and_does_not_hang_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share, "LIMIT_S", 0.2)
    os.mkfifo(tmp_path / "fifo")  # opening it blocks in the kernel, as a dead NFS server does

    async def meet() -> None:
        carrier = ShareCarrier(tmp_path, KEY)
        await carrier.exchange(report("a"), {})
        (directory,) = (p for p in tmp_path.iterdir() if p.is_dir())
        os.mkfifo(directory / "b.json")
        with pytest.raises(CarrierError, match="does not answer"):
            await carrier.exchange(report("a"), {})
        writer = os.open(directory / "b.json", os.O_WRONLY)  # lets the thread go
        os.close(writer)

    asyncio.run(meet())


def test_another_agent_of_our_name_is_seen_though_both_write_one_file(tmp_path: Path) -> None:
    async def work() -> None:
        first, second = ShareCarrier(tmp_path, KEY), ShareCarrier(tmp_path, KEY)
        mine = NodeReport(node="a", version=1, started_unix_s=1.0, pid=1)
        other = NodeReport(node="a", version=1, started_unix_s=2.0, pid=2)
        assert await first.exchange(mine, {}) == []
        assert await second.exchange(other, {}) == []  # the file may be of an earlier preflight
        assert await first.exchange(mine, {}) == []  # nor is it known that it has read ours
        assert await second.exchange(other, {}) == [mine]
        assert await first.exchange(mine, {}) == [other]

    asyncio.run(work())


def test_a_report_with_another_secret_or_changed_is_told_and_not_believed(tmp_path: Path) -> None:
    async def work() -> None:
        mine, stranger, peer = (ShareCarrier(tmp_path, key) for key in (KEY, OTHER, KEY))
        await mine.exchange(report("a"), {})
        await peer.exchange(report("c"), {})
        await stranger.exchange(report("b"), {})
        (path,) = tmp_path.rglob("c.json")
        signed = path.read_bytes()
        path.write_bytes(signed.replace(b'"node":"c"', b'"node":"c","is_leaving":true'))
        path.with_name("d.json").write_bytes(signed)  # of another node
        with pytest.raises(CarrierError, match="not believed: b, c, d"):
            await mine.exchange(report("a"), {})

    asyncio.run(work())


def test_a_file_of_an_earlier_preflight_that_is_put_there_again_is_not_believed(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        first, peer = ShareCarrier(tmp_path, KEY), ShareCarrier(tmp_path, KEY)
        for version, stage in enumerate(("facts", "done")):
            await first.exchange(report("a", version, stage=stage), {})
            await peer.exchange(report("c", version, stage=stage), {})
        found = await first.exchange(report("a", 1, stage="done"), {})
        assert found == [report("c", 1, stage="done")]
        (path,) = tmp_path.rglob("c.json")
        recorded = path.read_bytes()
        path.unlink()
        later = ShareCarrier(tmp_path, KEY)
        await later.exchange(report("a", started_unix_s=9.0), {})
        path.write_bytes(recorded)
        for _ in range(3):
            assert await later.exchange(report("a", started_unix_s=9.0), {}) == []

    asyncio.run(work())
