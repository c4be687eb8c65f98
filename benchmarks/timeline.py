"""What a frame of the timeline of one step costs the browser's main thread, with 100,000 slices.

    python benchmarks/timeline.py                 # 64 ranks, about 1,560 slices each

Starts a server of its own with one step of many collectives, opens the page in Chromium, and zooms
and moves by keyboard. The CPU of the renderer's main thread (tasks, so script, style and canvas
recording together) is read over the DevTools protocol; a frame is one key.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Browser, sync_playwright
from screenshots import CHROMIUM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rankscope.wire import schema
from tests.server.steps_sent import BEGIN_NS, Job, call_chunk, chunk
from tests.web.conftest import ARGUMENTS, serving

US = 1_000
STEP_US = 2_000_000
KEYS = "wwwwddddaaaassss" * 4
IDLE = "q" * 32  # a key that does nothing: what measuring takes


def post(url: str, sequence: int, records: list[Any], chunks: list[Any]) -> None:
    body = schema.encode(
        schema.Batch(
            schema_version=schema.SCHEMA_VERSION, run_id="many", producer="p", sequence=sequence,
            host="node-0", sent_ns=BEGIN_NS, records=[], chunks=chunks,
        )
    )  # fmt: skip
    if records:
        plain = schema.encode(
            {
                "schema_version": schema.SCHEMA_VERSION, "run_id": "many", "producer": "p",
                "sequence": sequence, "host": "node-0", "sent_ns": BEGIN_NS, "records": records,
                "chunks": [],
            }
        )  # fmt: skip
        body = plain
    headers = {"Content-Type": "application/msgpack"}
    request = urllib.request.Request(f"{url}/api/v1/ingest", body, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.status == 200


def send(url: str, ranks: int, calls: int) -> None:
    """Send one step in which each rank waits in so many collectives, some of them long."""
    rng = np.random.default_rng(3)
    post(url, 1, Job(ranks=ranks).records(), [])
    each = STEP_US // calls
    arrived = np.arange(calls) * each + rng.integers(each // 8, each // 2, (ranks, calls))
    ended = (np.arange(calls) + 1) * each - each // 8
    for rank in range(ranks):
        rows = [
            {
                "arrived_ns": BEGIN_NS + int(at) * US, "duration_ns": int(end - at) * US,
                "blocked_ns": int(end - at) * US, "sequence": n + 1, "step": 1, "size_bytes": 4096,
            }
            for n, (at, end) in enumerate(zip(arrived[rank], ended, strict=True))
        ]  # fmt: skip
        blocked = sum(row["blocked_ns"] for row in rows)
        known = {
            "step": 1, "started_ns": BEGIN_NS, "duration_ns": STEP_US * US, "forward_ns": 10 * US,
            "backward_ns": STEP_US * US - 10 * US, "backward_blocked_ns": blocked,
            "microbatches": 1, "num_collectives": calls,
        }  # fmt: skip
        columns: dict[str, Any] = {
            name: np.array([known.get(name, 0)]) for name in schema.STEP_COLUMNS
        }
        chunks = [
            chunk("steps", rank, "node-0", "started_ns", columns),
            call_chunk(rank, "node-0", rows, "all_reduce"),
        ]
        post(url, rank + 2, [], chunks)


def metrics(session: Any) -> dict[str, float]:
    found = session.send("Performance.getMetrics")["metrics"]
    return {one["name"]: one["value"] * 1000 for one in found}


Frames = list[dict[str, float]]


def measure(browser: Browser, url: str, ranks: int) -> tuple[int, Frames, Frames]:
    """Return how many slices there are, and what idle keys and frames took, ms."""
    with urllib.request.urlopen(f"{url}/api/v1/runs/many/steps/1?ranks=0-{ranks - 1}") as reply:
        answer = json.load(reply)
    count = len(answer["slices"]["lane"])
    page = browser.new_page(viewport={"width": 1440, "height": 1200})
    page.goto(f"{url}/runs/many/steps/1?ranks=0-{ranks - 1}")
    page.locator(".timeline canvas").wait_for()
    page.locator(".timeline .plotregion").focus()
    page.keyboard.press("Home")
    page.wait_for_timeout(1500)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    idle, drawn = ([frame(page, session, key) for key in keys] for keys in (IDLE, KEYS))
    page.close()
    return count, idle, drawn


def frame(page: Any, session: Any, key: str) -> dict[str, float]:
    before = metrics(session)
    page.keyboard.press(key)
    page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    after = metrics(session)
    return {name: after[name] - before[name] for name in ("TaskDuration", "ScriptDuration")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--calls", type=int, default=521, help="collectives of each rank")
    choices = parser.parse_args()
    with ExitStack() as stack:
        url = stack.enter_context(serving(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        send(url, choices.ranks, choices.calls)
        chromium = stack.enter_context(sync_playwright()).chromium
        browser = chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        count, idle, frames = measure(browser, url, choices.ranks)
        browser.close()
    print(
        f"{count:,} slices on {choices.ranks} lanes, {len(frames)} frames, CPU of the main thread"
    )
    for name in frames[0]:
        nothing = statistics.median(one[name] for one in idle)
        values = sorted(one[name] - nothing for one in frames)
        low, high = values[len(values) // 4], values[3 * len(values) // 4]
        print(
            f"{name}: median {statistics.median(values):.1f} ms ({low:.1f} to {high:.1f}), longest "
            f"{values[-1]:.1f} ms; measuring alone {nothing:.1f} ms, taken off"
        )


if __name__ == "__main__":
    main()
