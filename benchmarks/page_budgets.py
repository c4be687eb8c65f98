"""What pages cost: until the verdict stands, of each frame, in memory, and of the server.

    python benchmarks/page_budgets.py [--only tunnel,map,timeline,logs,hour,viewers]
    python benchmarks/page_budgets.py --table

Each topic starts servers of its own and real Chromium; CPU is that of the renderer's main thread
(tasks: script, style, layout, recording of the canvas), read over the DevTools protocol, less what
idle keys cost. Resumes where it was stopped; results are in benchmarks/results/page_budgets.jsonl,
the table is written to docs/pages.md. Exit code 1 where a budget is not held.

- tunnel: the overview of a run of 1,024 ranks, cold, through a tunnel of 40 ms and 50 Mbit/s
- map: frames of zooming and moving over 1,024 ranks by 10,000 steps
- timeline: the same of one step with 100,000 slices on 64 lanes
- logs: scrolling through a million lines
- hour: the heap of the overview and of logs over 720 batches, one each 5 s of the page's clock
- viewers: CPU of the server of a live run with 200 viewers of its overview
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from playwright.sync_api import Browser, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import one_bad_cell
import timeline
from pages import write_docs
from rows import RESULTS, Rows, code_label, newest
from screenshots import CHROMIUM
from tunnel import tunnel

from rankscope.wire import schema, zstd
from rankscope_server.api.app import create_app
from rankscope_server.settings import Settings
from tests.server import seed
from tests.server.conftest import TestClient
from tests.web.conftest import ARGUMENTS, serving

KEYS = ("topic", "measure")
KIB, MB = 1024.0, 1e6
ROUND_TRIP_MS, MBIT = 40.0, 50.0
NUM_LINES = 1_000_000
ROUNDS, ROUND_MS = 720, 5_000  # an hour
NUM_VIEWERS, WATCH_SECONDS = 200, 60.0
CHUNK_LINES = 50_000
# When the first sentence stands on the page: at the frame after its text is there.
WATCH_VERDICT = """
new MutationObserver((_, observer) => {
  if (!document.querySelector('#verdict')?.textContent) return;
  observer.disconnect();
  requestAnimationFrame(() => { window.verdictAt = performance.now(); });
}).observe(document, { subtree: true, childList: true, characterData: true });
"""


@dataclass(frozen=True)
class Budget:
    """What a measure may be at most."""

    topic: str
    measure: str
    unit: str
    most: float
    text: str


BUDGETS = (
    Budget("tunnel", "first paint", "ms", 1_000, "first contentful paint, 40 ms tunnel, cold"),
    Budget("tunnel", "verdict", "ms", 1_500, "the verdict stands, 40 ms tunnel, cold"),
    Budget("tunnel", "bytes", "KiB", 300, "all that the overview loads, as sent"),
    Budget("map", "frame", "ms", 8, "CPU of a frame of the map, 1,024 ranks by 10,000 steps"),
    Budget("timeline", "frame", "ms", 8, "CPU of a frame of the timeline, 100,000 slices"),
    Budget("logs", "frame", "ms", 4, "CPU of a frame of scrolling in a million log lines"),
    Budget("hour", "overview", "MB", 150, "heap of the overview after an hour live"),
    Budget("hour", "overview growth", "MB", 2, "its growth in the second half of that hour"),
    Budget("hour", "logs", "MB", 150, "heap of logs after an hour live"),
    Budget("hour", "logs growth", "MB", 2, "its growth in the second half of that hour"),
    Budget("viewers", "server", "% of a core", 25, "the server more with 200 viewers than without"),
)
Values = dict[str, list[float]]


def call(session: Any, name: str) -> float:
    found = session.send("Performance.getMetrics")["metrics"]
    return float(next(one["value"] for one in found if one["name"] == name))


@contextmanager
def a_server(*flags: str) -> Iterator[str]:
    """Run a server of its own; ranks do not fall silent while it is looked at."""
    with tempfile.TemporaryDirectory() as folder:
        with serving(Path(folder), "--silent-after-seconds", "86400", *flags) as url:
            yield url


def measure_tunnel(browser: Browser) -> Values:
    """Open the overview in a new browser context each time."""
    found: Values = {"first paint": [], "verdict": [], "bytes": []}
    with a_server() as url:
        seed.seed_run(
            url, run_id="run", ranks=1_024, ranks_per_node=64, steps=60, steps_per_batch=30,
            fault="slow_compute", slow_rank=5,
        )  # fmt: skip
        seed.wait_until_judged(url, 300)
        there = urlsplit(url)
        assert there.hostname
        assert there.port
        with tunnel(there.hostname, there.port, ROUND_TRIP_MS, MBIT) as origin:
            for _ in range(15):
                for name, value in cold(browser, f"{origin}/runs/run").items():
                    found[name].append(value)
    return found


def cold(browser: Browser, address: str) -> dict[str, float]:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.add_init_script(WATCH_VERDICT)
    session, sizes = context.new_cdp_session(page), list[float]()
    session.on("Network.loadingFinished", lambda one: sizes.append(one["encodedDataLength"]))
    session.send("Network.enable")
    page.goto(address)
    page.locator("#verdict").wait_for()
    while page.locator(".skeleton").count():
        page.wait_for_timeout(50)
    page.wait_for_timeout(1_000)
    painted = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    values = {
        "first paint": page.evaluate(painted),
        "verdict": page.evaluate("window.verdictAt"),
        "bytes": sum(sizes) / KIB,
    }
    context.close()
    return values


def frames(page: Any, act: Callable[[int], None], count: int) -> list[float]:
    """Return what each act cost the main thread until its frame was drawn, ms."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    found = []
    for at in range(count):
        before = call(session, "TaskDuration")
        act(at)
        page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        found.append((call(session, "TaskDuration") - before) * 1e3)
    return found


def less_idle(page: Any, act: Callable[[int], None], count: int) -> list[float]:
    """Return frames without what measuring itself takes, as idle keys show it."""
    idle = statistics.median(frames(page, lambda _: page.keyboard.press("q"), 24))
    return [one - idle for one in frames(page, act, count)]


def measure_map(browser: Browser) -> Values:
    """Zoom and move over the map by keyboard, and move the pointer over it."""
    options = argparse.Namespace(seed=17, ranks=1_024, steps=10_000, times=1.5)
    with tempfile.TemporaryDirectory() as folder:
        chosen = Settings(data_dir=folder, look_seconds=3600.0, disk_reserve_bytes=0)
        with TestClient(create_app(chosen), base_url="http://127.0.0.1:8787") as client:
            one_bad_cell.register(client, options.ranks)
        one_bad_cell.fill(folder, options, rank=411, step=5_000)
        with serving(Path(folder)) as url:
            page = browser.new_page(viewport={"width": 1440, "height": 1200})
            page.goto(f"{url}/runs/{one_bad_cell.RUN}/ranks")
            page.locator(".plotregion canvas").first.wait_for()
            page.wait_for_timeout(3_000)
            page.locator(".plotregion").first.focus()
            keys = ["+", "+", "ArrowRight", "ArrowDown", "ArrowRight", "-", "ArrowLeft", "-"] * 8
            found = less_idle(page, lambda at: page.keyboard.press(keys[at]), len(keys))
            page.context.close()
    return {"frame": found}


def measure_timeline(browser: Browser) -> Values:
    """Zoom and move over one step, as `timeline.py` does, with 64 ranks of 521 collectives."""
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as url:
        timeline.send(url, 64, 521)
        _, idle, drawn = timeline.measure(browser, url, 64)
    nothing = statistics.median(one["TaskDuration"] for one in idle)
    return {"frame": [one["TaskDuration"] - nothing for one in drawn]}


def measure_logs(browser: Browser) -> Values:
    """Scroll through the lines of a run that has a million."""
    with a_server("--max-batch-bytes", str(64 << 20)) as url:
        seed.seed_run(url, run_id="run", ranks=4, steps=20, fault="none")
        send_lines(url)
        wait_until_idle(server_of(url))
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"{url}/runs/run/logs")
        page.locator("#verdict").wait_for()
        page.wait_for_timeout(2_000)
        page.mouse.move(700, 650)
        found = less_idle(page, lambda at: page.mouse.wheel(0, -400 if at % 4 else 250), 160)
        page.context.close()
    return {"frame": found}


def wait_until_idle(server: psutil.Process) -> None:
    """Return once it has indexed what it was sent: beside that, a frame takes a third more."""
    while server.cpu_percent(1.0) > 10:
        pass


def send_lines(url: str) -> None:
    """Send a million different lines of four ranks."""
    now_ns = time.time_ns()
    for sequence, first in enumerate(range(0, NUM_LINES, CHUNK_LINES), 1):
        records = [
            schema.LogLine(
                attempt=0, rank=at % 4, time_ns=now_ns - (NUM_LINES - at) * 1_000_000, level=20,
                message=f"step {at // 4}: loss {8 - at / NUM_LINES:.4f}, batch {at:x}",
                logger="train", step=1,
            )
            for at in range(first, first + CHUNK_LINES)
        ]  # fmt: skip
        body = schema.encode(
            {
                "schema_version": schema.SCHEMA_VERSION, "run_id": "run", "producer": "lines",
                "sequence": sequence, "host": "node-a", "sent_ns": now_ns, "records": records,
                "chunks": [],
            }
        )  # fmt: skip
        seed.post_body(url, zstd.pack(body))


class LiveRun:
    """A run that is sent piece by piece."""

    def __init__(self, url: str, ranks: int, rounds: int) -> None:
        self._url = url
        self._plan = seed.Plan(
            run_id="run", ranks=ranks, ranks_per_node=8, steps=rounds * 5, fault="slow_compute",
            slow_rank=1, end=False,
        )  # fmt: skip
        self._times, self._nodes = seed.make_steps(self._plan), seed.make_nodes(self._plan)
        seed.register(self._plan, self._times, self._nodes)
        self._round = 0

    def send(self) -> None:
        """Send what 5 steps bring."""
        for node in self._nodes:
            first = self._round * 5
            seed.add_steps(self._plan, self._times, node, first, first + 5)
            node.records.append(
                seed.log(node.ranks[0], time.time_ns(), 20, f"round {self._round}: all is well")
            )
            seed.post_body(self._url, seed.next_batch(self._plan.run_id, node))
        self._round += 1


def measure_hour(browser: Browser) -> Values:
    """Follow a live run for an hour of the page's clock; the heap after a collection, MB."""
    found: Values = {}
    with a_server() as url:
        run = LiveRun(url, 8, ROUNDS + 2)
        run.send()
        watched = {}
        for name, path in (("overview", "runs/run"), ("logs", "runs/run/logs?tail=1")):
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.clock.install()
            page.goto(f"{url}/{path}")
            page.clock.run_for(1_000)
            page.locator("#verdict").wait_for()
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable")
            watched[name] = (page, session)
        heaps: Values = {name: [] for name in watched}
        for at in range(ROUNDS):
            run.send()
            for name, (page, session) in watched.items():
                page.clock.run_for(ROUND_MS)
                if at % 20 == 19:
                    session.send("HeapProfiler.collectGarbage")
                    heaps[name].append(call(session, "JSHeapUsedSize") / MB)
        for name, values in heaps.items():
            half = len(values) // 2
            grown = statistics.median(values[-5:]) - statistics.median(values[half : half + 5])
            found |= {name: values[-5:], f"{name} growth": [grown]}
            watched[name][0].context.close()
    return found


def paths_of_a_viewer(browser: Browser, url: str, run: LiveRun) -> list[str]:
    """Return what one overview asks for after a change, as the browser asks it."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(f"{url}/runs/run")
    page.locator("#verdict").wait_for()
    page.wait_for_timeout(3_000)
    asked: set[str] = set()
    page.on("request", lambda one: asked.add(one.url))
    for _ in range(3):
        run.send()
        page.wait_for_timeout(2_000)
    page.context.close()
    return sorted(one.removeprefix(url) for one in asked if "/api/v1/runs/" in one)


def measure_viewers(browser: Browser) -> Values:
    """Compare the CPU of the server of a live run, alone and with viewers, in % of a core.

    A viewer follows the stream, and asks after each hint what the page asks, a second apart at
    least, with the ETag of what it has.
    """
    with a_server() as url:
        run = LiveRun(url, 64, 400)
        for _ in range(20):
            run.send()
        seed.wait_until_judged(url, 300)
        paths = paths_of_a_viewer(browser, url, run)
        server = server_of(url)
        alone = [share_of(server, run) for _ in range(3)]
        with ThreadPoolExecutor(1) as pool:  # this thread has the loop of the browser's driver
            shares = pool.submit(asyncio.run, with_viewers(url, paths, server, run)).result()
    print(f"{len(paths)} questions after a change; alone {alone}, with viewers {shares}")
    base = statistics.median(alone)
    return {"server": [one - base for one in shares]}


def server_of(url: str) -> psutil.Process:
    """Return the process that listens there."""
    port = urlsplit(url).port
    pid = next(
        one.pid for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid
    )  # fmt: skip
    return psutil.Process(pid)


def share_of(server: psutil.Process, run: LiveRun) -> float:
    """Send a batch a second for a third of the time; return the server's CPU, % of a core."""
    before, began = sum(server.cpu_times()[:2]), time.monotonic()
    while time.monotonic() - began < WATCH_SECONDS / 3:
        run.send()
        time.sleep(1.0)
    return 100 * (sum(server.cpu_times()[:2]) - before) / (time.monotonic() - began)


async def with_viewers(
    url: str, paths: list[str], server: psutil.Process, run: LiveRun
) -> list[float]:
    """Return the server's CPU while viewers look, % of a core, three times."""
    rounds: list[float] = []
    viewers = [asyncio.create_task(viewer(url, paths, rounds)) for _ in range(NUM_VIEWERS)]
    await asyncio.sleep(20.0)
    rounds.clear()
    shares = [await asyncio.to_thread(share_of, server, run) for _ in range(3)]
    each = len(rounds) / NUM_VIEWERS / WATCH_SECONDS
    print(f"each viewer asked {each:.2f} times a second, {statistics.median(rounds):.2f} s a time")
    for one in viewers:
        one.cancel()
    await asyncio.gather(*viewers, return_exceptions=True)
    return shares


async def viewer(url: str, paths: list[str], rounds: list[float]) -> None:
    """Follow the stream of the run and ask as a page does; notes how long each time took."""
    etags: dict[str, str] = {}
    changed = asyncio.Event()
    changed.set()

    async def ask() -> None:
        connection = await Connection.open(url)
        while True:
            await changed.wait()
            await asyncio.sleep(0.15)
            changed.clear()
            began = time.monotonic()
            for path in paths:
                etags[path] = await connection.get(path, etags.get(path, ""))
            rounds.append(time.monotonic() - began)
            await asyncio.sleep(max(0.0, 1.0 - rounds[-1]))

    asking = asyncio.create_task(ask())
    try:
        stream = await Connection.open(url)
        stream.ask("/api/v1/stream?topics=run:run", "")
        while line := await stream.reader.readline():
            if line.startswith(b"event: change"):
                changed.set()
    finally:
        asking.cancel()


@dataclass
class Connection:
    """A kept connection; a library's client takes more CPU than the server that is measured."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    host: str

    @classmethod
    async def open(cls, url: str) -> Connection:
        there = urlsplit(url)
        reader, writer = await asyncio.open_connection(there.hostname, there.port, limit=1 << 22)
        return cls(reader, writer, there.netloc)

    def ask(self, path: str, etag: str) -> None:
        known = f"If-None-Match: {etag}\r\n" if etag else ""
        head = f"GET {path} HTTP/1.1\r\nHost: {self.host}\r\nAccept-Encoding: gzip\r\n{known}\r\n"
        self.writer.write(head.encode())

    async def get(self, path: str, etag: str) -> str:
        """Return the ETag of the answer, which must be good."""
        self.ask(path, etag)
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        if not re.match(rb"http/1.1 (200|304) ", head):
            raise RuntimeError(head.decode())
        if length := re.search(rb"content-length: (\d+)", head):
            await self.reader.readexactly(int(length[1]))
        found = re.search(rb"etag: (\S+)", head)
        return found[1].decode() if found else ""


TOPICS: dict[str, Callable[[Browser], Values]] = {
    "tunnel": measure_tunnel, "map": measure_map, "timeline": measure_timeline,
    "logs": measure_logs, "hour": measure_hour, "viewers": measure_viewers,
}  # fmt: skip


def row_of(budget: Budget, values: list[float]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {
        "median": round(median, 2), "low": round(low, 2), "high": round(high, 2),
        "worst": round(max(values), 2), "count": len(values), "cores": os.cpu_count(),
        "load": round(os.getloadavg()[1], 1),
    }  # fmt: skip


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return what was measured beside its budget."""
    known = {(row["topic"], row["measure"]): row for row in rows}
    lines = [
        "| what | budget | median | quartiles | worst | samples | cores, load |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in BUDGETS:
        row = known.get((one.topic, one.measure))
        if row is None:
            continue
        kept = "" if row["median"] <= one.most else f" (over by {row['median'] / one.most - 1:.0%})"
        lines.append(
            f"| {one.text} | {one.most:,g} {one.unit} | {row['median']:,g}{kept} | "
            f"{row['low']:,g} to {row['high']:,g} | {row['worst']:,g} | {row['count']} | "
            f"{row['cores']}, {row['load']} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure what is missing, write the table, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(TOPICS), help="topics, with commas between")
    parser.add_argument("--label", default=code_label("web"), help="of the code")
    parser.add_argument("--out", type=Path, default=RESULTS / "page_budgets.jsonl")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    chosen = parser.parse_args()
    rows = Rows(chosen.out, KEYS, chosen.label)
    wanted = () if chosen.table else chosen.only.split(",")
    missing = {key[0] for key in rows.missing((one.topic, one.measure) for one in BUDGETS)}
    with sync_playwright() as playwright:
        for topic in [one for one in wanted if one in missing]:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            values = TOPICS[topic](browser)
            browser.close()
            for budget in [one for one in BUDGETS if one.topic == topic]:
                print(rows.add((topic, budget.measure), row_of(budget, values[budget.measure])))
    found = newest(chosen.out, KEYS)
    write_docs(table(found), "page_budgets")
    print(table(found))
    most = {(one.topic, one.measure): one.most for one in BUDGETS}
    return int(any(row["median"] > most[row["topic"], row["measure"]] for row in found))


if __name__ == "__main__":
    sys.exit(main())
