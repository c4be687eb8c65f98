"""The page of machines: what happened, what is sampled, and what is missing."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.chunk import encode_chunk
from tests.server.seed import sample_columns
from tests.web.conftest import SLOW, Site, Watched

pytestmark = pytest.mark.browser
S = 10**9
NOW = 1_700_000_000 * S
RUN = "broken-machines"


def event(name: str, **fields: str) -> schema.Event:
    fields = {"host": "node-9", **fields}
    return schema.Event(attempt=0, rank=-1, time_ns=NOW, name=name, fields=fields)


@pytest.fixture(scope="module")
def broken(site: Site) -> str:
    """A run of one machine that was not sampled for a while and lost a GPU."""
    at = NOW + np.array([*range(60), *range(120, 180)], np.int64) * S
    told = {"runnable": np.arange(120), "memory_used_bytes": np.where(np.arange(120) < 5, -1, 7)}
    columns = sample_columns("host", at, told)
    chunk = schema.Chunk(
        kind="host", attempt=0, rank=schema.NODE_RANK, host="node-9", count=len(at),
        time_lo_ns=int(at[0]), time_hi_ns=int(at[-1]), data=encode_chunk(columns),
    )  # fmt: skip
    records = [
        event("xid", gpu="3", number="79", meaning="GPU has fallen off the bus", seen_in="NVML"),
        event("machine sources", **{
            "source.gpu": "stuck: no answer for 30 s; its thread waits for it",
            "source.infiniband": "skipped: no adapter",
        }),
    ]  # fmt: skip
    batch = schema.Batch(
        schema_version=schema.SCHEMA_VERSION, run_id=RUN, producer="test", sequence=1,
        host="node-9", sent_ns=NOW, chunks=[chunk],
        records=[msgspec.Raw(schema.encode(record)) for record in records],
    )  # fmt: skip
    request = urllib.request.Request(f"{site.url}/api/v1/ingest", schema.encode(batch))
    with urllib.request.urlopen(request, timeout=20) as reply:
        assert not msgspec.json.decode(reply.read())["refused"]
    return RUN


def test_the_worst_event_and_the_state_of_each_source(
    broken: str, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{broken}/machines")
    page = watched.page
    assert watched.sentence() == "node-9: GPU 3: Xid 79, GPU has fallen off the bus."
    words = page.locator("tr[data-source=gpu]").inner_text().split("\t")
    assert [word.strip() for word in words[1:]] == [
        "stuck", "no answer for 30 s; its thread waits for it",
    ]  # fmt: skip
    assert "no adapter" in page.locator("tr[data-source=infiniband]").inner_text()
    watched.check()


def test_missing_samples_are_a_gap_and_what_is_not_reported_is_named(
    broken: str, site: Site, open_page: Callable[..., Watched]
) -> None:
    (series,) = site.ask(f"runs/{broken}/samples?kind=host&names=runnable")["series"]
    assert series["max"].count(None) == 1
    watched = open_page(f"runs/{broken}/machines")
    page = watched.page
    chart = page.locator("figure.series", has_text="Runnable")
    chart.wait_for()
    assert "Not reported by this machine: CPU user" in page.locator("main").inner_text()
    assert drawn_columns(chart) == pytest.approx(120 / 180, abs=0.12)
    watched.check()


def drawn_columns(chart: Any) -> float:
    """Return the share of the plot's width in which anything of the series is drawn."""
    share = chart.locator("canvas").evaluate(
        """canvas => {
          const { width, height } = canvas;
          const { data } = canvas.getContext('2d').getImageData(0, 0, width, height);
          const isColoured = (at) => {
            const [r, g, b, a] = data.slice(at, at + 4);
            return a > 60 && Math.max(r, g, b) - Math.min(r, g, b) > 40; // axes and grid are grey
          };
          const seen = [];
          for (let x = 0; x < width; x++) {
            let y = 0;
            while (y < height && !isColoured(4 * (y * width + x))) y++;
            if (y < height) seen.push(x);
          }
          return seen.length / (seen[seen.length - 1] - seen[0] + 1);
        }"""
    )
    return float(share)


def test_another_machine_can_be_chosen_and_the_page_has_a_key(
    open_page: Callable[..., Watched],
) -> None:
    watched = open_page(f"runs/{SLOW}")
    page = watched.page
    page.keyboard.press("g")
    page.keyboard.press("m")
    page.wait_for_url("**/machines")
    watched.settled()
    page.get_by_role("link", name="node-b").click()
    page.wait_for_url("**/machines?host=node-b")
    page.get_by_role("heading", name="Where the samples of node-b").wait_for()
    chart = page.locator("figure.series", has_text="CPU user")
    chart.wait_for()
    assert "%" in chart.inner_text()
    page.get_by_role("button", name="Everything").click()
    page.wait_for_url("**/machines?host=node-b&span=all")
    assert page.get_by_role("button", name="Everything").get_attribute("aria-pressed") == "true"
    chart.wait_for()
    watched.check()
