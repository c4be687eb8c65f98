"""Lines of logs beside their fields, their step, and the errors of the run."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

import msgspec
import pytest
from playwright.sync_api import expect

from rankscope.wire import schema, zstd
from tests.server.seed import post_body
from tests.web.accessibility import violations
from tests.web.conftest import CRASH, SLOW, Site, Watched

pytestmark = pytest.mark.browser
RUN = "json-lines"
RANKS, STEPS = 64, 20
START_NS = 1_790_000_000 * 10**9
ROWS_SHOWN = """() => [...document.querySelectorAll('.vrow')].map(row => [
  Number(row.getAttribute('aria-posinset')), Number(row.getAttribute('aria-setsize')),
  row.textContent])
"""
# Blocks in their order on the page: of rows, or of one text with a line for each.
PASSING = """() => [...document.querySelectorAll('.vblock')]
  .sort((a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top)
  .map(block => block.children.length
    ? ['rows', [...block.children].map(row => row.textContent)]
    : ['plain', block.textContent.split('\\n')])
"""
AT_REST = """() => [...document.querySelectorAll('.vblock')].every(block => block.children.length)
  && !document.querySelector('.vrows').style.pointerEvents"""


@pytest.fixture(scope="module")
def sent(site: Site) -> str:
    """Send lines: of rank 0 one JSON object a step, of another one an `extra`, one of all alike."""
    records = [
        schema.LogLine(
            attempt=0, rank=0, time_ns=START_NS + step * 10**9, level=20, step=step, logger="train",
            message=json.dumps({"loss": 4 - step / 10, "optimizer": {"lr": 0.001}, "note": "a, b"}),
        )
        for step in range(1, STEPS + 1)
    ]  # fmt: skip
    records += [
        schema.LogLine(
            attempt=0, rank=1, time_ns=START_NS + 21 * 10**9, level=20, step=0, logger="save",
            message="checkpoint written", fields={"seconds": "3.5"},
        )
    ]  # fmt: skip
    records += [
        schema.LogLine(
            attempt=0, rank=rank, time_ns=START_NS + 22 * 10**9 + rank, level=30, step=7,
            message="low on memory", logger="memory",
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    body = {
        "schema_version": schema.SCHEMA_VERSION, "run_id": RUN, "producer": "p", "sequence": 1,
        "host": "node-a", "sent_ns": time.time_ns(), "records": records, "chunks": [],
    }  # fmt: skip
    post_body(site.url, zstd.pack(msgspec.msgpack.encode(body), 3), "")
    return f"runs/{RUN}/logs"


def test_fields_are_columns_and_stay_in_the_address(
    open_page: Callable[..., Watched], sent: str
) -> None:
    watched = open_page(sent)
    page = watched.page
    rows = page.locator(".vrow")
    rows.first.wait_for()
    page.keyboard.press("c")  # the field of most lines stands first; Tab leads to the others
    fields = page.get_by_role("group", name="Fields as columns")
    expect(fields.get_by_role("button").first).to_be_focused()
    fields.get_by_role("button", name="loss").press("Enter")
    fields.get_by_role("button", name="optimizer.lr").press("Enter")
    heads = page.locator(".columnheads")
    expect(heads.get_by_role("button", name="Drop the column loss")).to_be_visible()
    row = rows.filter(has_text="step 12")
    expect(row.locator(".l-field")).to_have_text(["2.8", "0.001"])
    saved = rows.filter(has_text="checkpoint written")
    expect(saved.locator(".l-field"), "not known is not zero").to_have_text(["\u2013", "\u2013"])
    assert page.url.endswith("?cols=loss,optimizer.lr")
    assert violations(page) == []

    page.reload()
    watched.settled()
    expect(row.locator(".l-field")).to_have_text(["2.8", "0.001"])
    heads.get_by_role("button", name="Drop the column loss").click()
    expect(row.locator(".l-field")).to_have_count(1)
    row.click()
    panel = page.get_by_role("complementary", name="The whole line")
    expect(panel.locator("dl")).to_contain_text("a, b")
    watched.check()


def test_a_line_of_all_ranks_is_one_and_leads_to_its_step(
    open_page: Callable[..., Watched], sent: str
) -> None:
    watched = open_page(f"{sent}?level=WARNING")
    page = watched.page
    row = page.locator(".vrow")
    expect(row).to_have_count(1)
    expect(row.locator(".l-rank")).to_have_text(f"{RANKS} ranks")
    expect(row).to_contain_text(f"\u00d7{RANKS}")
    row.click()
    page.keyboard.press("s")
    page.wait_for_url(re.compile(rf"/runs/{RUN}/steps/7\?sel=\d+@7$"))
    page.go_back()
    row.locator(".l-step").click()
    page.wait_for_url(re.compile(rf"/runs/{RUN}/steps/7\?sel=\d+@7$"))


def test_rows_stay_in_order_and_are_the_lines_they_say_however_far_they_scroll(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    """Rows leave at one edge and come in at the other, as text alone while they pass."""
    watched = open_page(f"runs/{SLOW}/logs")
    page = watched.page
    page.locator(".vrow").first.wait_for()
    page.locator(".vlist").hover()
    lines = site.ask(f"runs/{SLOW}/logs?limit=500")["lines"][::-1]
    kinds = set()
    for wheel in (-240, -900, 130, -2000, 400):
        page.mouse.wheel(0, wheel)
        page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        passing = page.evaluate(PASSING)
        kinds |= {kind for kind, _ in passing}
        texts = [text for _, lines_of in passing for text in lines_of]
        page.wait_for_function(AT_REST)
        rows = page.evaluate(ROWS_SHOWN)
        if len(texts) == len(rows):  # unless older lines came between
            assert [text in row[2] for text, row in zip(texts, rows, strict=True)] == [True] * len(
                rows
            )
        places = [place for place, _, _ in rows]
        assert places == list(range(places[0], places[0] + len(places)))
        count = rows[0][1]  # of the lines that the page holds: those are the newest
        assert count <= len(lines)
        held = lines[len(lines) - count :]
        for place, _, text in rows:
            assert held[place - 1]["message"].split("\n")[0] in text
    assert "plain" in kinds
    row = page.locator(".vrow").nth(12)
    message = row.locator(".l-text").inner_text()
    row.click()
    panel = page.get_by_role("complementary", name="The whole line")
    expect(panel.locator("pre")).to_contain_text(message)
    expect(page.locator(".vrow.active")).to_have_count(1)
    expect(page.locator(".vrow.active .l-text")).to_have_text(message)
    watched.check()


def test_lines_are_copied_as_they_stand_there_and_all_as_csv(
    open_page: Callable[..., Watched], sent: str
) -> None:
    watched = open_page(f"{sent}?level=WARNING")
    page = watched.page
    watched.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator(".vrow").first.wait_for()
    page.keyboard.press("x")
    page.get_by_role("menu").wait_for()
    page.keyboard.press("m")
    page.get_by_text("Markdown copied").first.wait_for()
    text = page.evaluate("navigator.clipboard.readText()")
    assert re.search(rf"```text\n[\d:.]+  WARN  {RANKS} ranks  step 7  .*low on memory", text)
    with page.expect_download() as download:
        page.keyboard.press("C")
    assert download.value.suggested_filename == f"{RUN}-64-of-85-lines-match.csv"
    assert "low on memory" in download.value.path().read_text()
    watched.check()


def test_errors_are_marked_over_the_histogram(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{CRASH}/logs")
    page = watched.page
    first = site.ask(f"runs/{CRASH}/errors")["groups"][0]
    assert first["role"] == "initiating"
    marks = page.get_by_role("list", name="Errors").get_by_role("button")
    mark = marks.filter(has=page.locator(".is-critical")).first
    expect(mark).to_have_attribute("title", re.compile(rf"{first['type']} on rank"))
    bars = page.locator(".histbars").bounding_box()
    box = mark.bounding_box()
    span = site.ask(f"runs/{CRASH}/logs?limit=1")["histogram"]
    share = (first["first_ms"] - span["from_ms"]) / (span["to_ms"] - span["from_ms"])
    assert abs(box["x"] + box["width"] / 2 - (bars["x"] + share * bars["width"])) <= 13
    assert violations(page) == []
    mark.click()
    page.get_by_role("button", name="Drop the filter time").wait_for()
    expect(
        page.locator(".vrow.active, .vrow", has_text=first["message"][:20]).first
    ).to_be_visible()
    watched.check()


@pytest.mark.parametrize("path", [f"runs/{CRASH}/ranks", f"runs/{CRASH}"])
def test_errors_are_marked_on_the_map_where_they_happened(
    site: Site, open_page: Callable[..., Watched], path: str
) -> None:
    watched = open_page(path)
    page = watched.page
    groups = site.ask(f"runs/{CRASH}/errors")["groups"]
    wanted = {(str(rank), str(one["step"])) for one in groups for rank in one["ranks"]}
    marks = page.locator(".rankmap .errormark")
    expect(marks).to_have_count(sum(len(one["ranks"]) for one in groups))
    found = [
        (one.get_attribute("data-rank"), one.get_attribute("data-step")) for one in marks.all()
    ]
    assert set(found) == wanted
    first = groups[0]
    mark = page.locator(f".errormark[data-rank='{first['ranks'][0]}']").first.bounding_box()
    lane = page.locator(".gutter .lanename", has_text=f"Rank {first['ranks'][0]}").last
    box = lane.bounding_box()
    assert box["y"] <= mark["y"] + mark["height"] / 2 <= box["y"] + box["height"]
    plot = page.locator(".plotregion")
    assert "kinds of errors marked" in plot.get_attribute("aria-label")
    watched.check()
