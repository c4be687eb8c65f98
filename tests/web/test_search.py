"""The search box of the logs page: its language, its mistakes, and what is found, in a browser."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rankscope.wire import schema, zstd
from tests.server.seed import post_body
from tests.web.conftest import SLOW, SLOW_RANK, Site, Watched

pytestmark = pytest.mark.browser
RUN = "searched"
START_NS = 1_790_000_000 * 10**9


@pytest.fixture(scope="module")
def lines(site: Site) -> int:
    """Send lines of four ranks; return how many."""
    records = [
        schema.LogLine(
            attempt=0, rank=number % 4, time_ns=START_NS + number * 10**8, level=20,
            message=f"step {number // 4} took {number % 90} ms, queue 7", step=1 + number // 4,
            logger="train",
        )
        for number in range(2_000)
    ]  # fmt: skip
    records += [
        schema.LogLine(
            attempt=0, rank=rank, time_ns=START_NS + 60 * 10**9 + rank, level=40,
            message="ncclRemoteError: remote process exited", logger="nccl",
        )
        for rank in range(4)
    ]  # fmt: skip
    body = {
        "schema_version": schema.SCHEMA_VERSION, "run_id": RUN, "producer": "p", "sequence": 1,
        "host": "node-a", "sent_ns": time.time_ns(), "records": records, "chunks": [],
    }  # fmt: skip
    post_body(site.url, zstd.pack(msgspec.msgpack.encode(body), 3), "")
    return len(records)


@pytest.fixture
def page(open_page: Callable[..., Watched], lines: int) -> Any:
    return open_page(f"runs/{RUN}/logs").page


def search(page: Any, text: str) -> None:
    page.get_by_label("Search all log lines of this run").fill(text)
    page.keyboard.press("Enter")


def wait_for_sentence(page: Any, text: str) -> None:
    page.locator("#verdict", has_text=text).wait_for(timeout=10_000)


def wait_for_rows(page: Any, count: int) -> None:
    """Wait until the list holds so many lines; their number comes on its own."""
    page.wait_for_function(
        "count => document.querySelectorAll('.vrow').length === count", arg=count, timeout=10_000
    )


def test_words_filters_and_their_counts(page: Any, lines: int) -> None:
    search(page, "took rank:2 step:11..20")
    wait_for_sentence(page, f"10 of {lines:,} lines match")
    wait_for_rows(page, 10)
    search(page, '"took 17 ms" OR /exited$/')
    wait_for_sentence(page, "27 of")
    search(page, "-queue -*remote*")
    wait_for_sentence(page, "0 of")


def test_alike_lines_are_one_row(page: Any) -> None:
    search(page, "ncclremoteerror")
    wait_for_sentence(page, "4 of")
    wait_for_rows(page, 1)
    row = page.locator(".vrow")
    assert "4 ranks" in row.inner_text()
    assert "\u00d74" in row.inner_text()


def test_a_mistake_is_shown_under_its_character(page: Any) -> None:
    search(page, "took levle:error")
    mistake = page.locator(".mistake")
    mistake.wait_for()
    assert mistake.locator("mark").inner_text() == "levle:"
    assert "level: is one" in mistake.inner_text()
    assert page.locator("#verdict").inner_text() == "The search cannot be read"
    wait_for_rows(page, 0)
    assert page.get_by_label("Search all log lines").get_attribute("aria-invalid") == "true"
    search(page, "took level:info")
    mistake.wait_for(state="detached")
    wait_for_sentence(page, "2,000 of")


def test_what_is_no_word_is_offered_within_words(page: Any) -> None:
    search(page, "moteerr")
    offer = page.locator(".loglist button", has_text="*moteerr*")
    offer.wait_for()
    offer.click()
    wait_for_sentence(page, "4 of")
    assert page.get_by_label("Search all log lines").input_value() == "*moteerr*"


def test_facets_narrow_and_are_dropped(page: Any) -> None:
    search(page, "took")
    wait_for_sentence(page, "2,000 of")
    page.locator(".facetvalue", has_text="rank 3").click()
    wait_for_sentence(page, "500 of")
    page.get_by_label("Drop the filter rank").click()
    wait_for_sentence(page, "2,000 of")


def test_lines_around_one_on_its_rank_and_on_all(page: Any) -> None:
    search(page, "ncclremoteerror rank:1")
    wait_for_rows(page, 1)
    page.locator(".vrow").first.click()
    page.get_by_role("button", name="on rank 1").click()
    around = page.locator(".aroundlist li")
    around.first.wait_for()
    texts = around.all_inner_texts()
    assert len(texts) == 21
    assert sum("ncclRemoteError" in text for text in texts) == 1
    assert "ncclRemoteError" in page.locator(".aroundlist li[aria-current]").inner_text()
    page.get_by_role("button", name="on all ranks").click()
    page.locator(".aroundlist .l-rank", has_text="rank 3").first.wait_for()
    assert sum("ncclRemoteError" in text for text in around.all_inner_texts()) == 4


def test_help_gives_examples_that_can_be_pressed(page: Any) -> None:
    page.get_by_role("button", name="Help", exact=True).click()
    panel = page.get_by_label("What can be searched for")
    examples = panel.locator("dt code").all_inner_texts()
    assert len(examples) > 10
    for example in examples:
        panel.get_by_role("button", name=example, exact=True).click()
        page.wait_for_url(re.compile("q="))
        page.wait_for_timeout(50)
        known = "group:" in example  # this run has no process groups
        assert known or page.locator(".mistake").count() == 0, example
    page.keyboard.press("Escape")
    panel.wait_for(state="detached")


def test_a_search_is_saved_used_and_dropped(page: Any) -> None:
    search(page, "took rank:1")
    wait_for_sentence(page, "500 of")
    page.get_by_role("button", name="Saved").click()
    page.get_by_label("Name of this search").fill("slow steps")
    page.get_by_role("button", name="Save", exact=True).click()
    saved = page.locator(".savedlist li", has_text="slow steps")
    saved.wait_for()
    search(page, "")
    wait_for_sentence(page, "log lines")
    saved.get_by_role("button").first.click()
    wait_for_sentence(page, "500 of")
    page.get_by_label("Drop the search slow steps").click()
    saved.wait_for(state="detached")


def test_findings_are_found(open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"runs/{SLOW}/logs?q=stream:finding kind=slow_compute".replace(" ", "%20"))
    row = watched.page.locator(".vrow", has_text=f"rank {SLOW_RANK}")
    row.first.wait_for()
    watched.check()


def test_the_page_of_logs_breaks_nothing(open_page: Callable[..., Watched], lines: int) -> None:
    watched = open_page(f"runs/{RUN}/logs?q=took")
    watched.page.get_by_role("button", name="Help", exact=True).click()
    watched.page.get_by_role("button", name="Saved").click()
    watched.check()


@pytest.fixture
def everywhere(open_page: Callable[..., Watched], lines: int) -> Any:
    return open_page("search").page


def search_everywhere(page: Any, text: str) -> None:
    page.get_by_label("Search the lines of all runs").fill(text)
    page.keyboard.press("Enter")


def test_a_line_of_any_run_leads_into_its_run(everywhere: Any) -> None:
    page = everywhere
    assert page.locator("#verdict").inner_text() == "Search all runs"
    search_everywhere(page, "took step:3")
    wait_for_sentence(page, "4 lines match in 1 run")
    row = page.locator(".foundlines tbody tr").first
    assert RUN in row.inner_text()
    message = row.locator(".l-text a").inner_text()
    row.locator(".l-text a").click()
    panel = page.get_by_label("The whole line")
    panel.wait_for()
    assert panel.locator("pre").inner_text() == message
    assert f"runs/{RUN}/logs" in page.url


def test_more_lines_than_a_page_are_read_on_and_no_line_twice(everywhere: Any) -> None:
    page = everywhere
    search_everywhere(page, "took queue")
    wait_for_sentence(page, "2,000 lines match in 1 run")
    rows = page.locator(".foundlines tbody tr")
    rows.nth(0).wait_for()
    before = rows.count()
    page.get_by_role("button", name="Older lines").click()
    rows.nth(before).wait_for()
    texts = rows.all_inner_texts()
    assert len(set(texts)) == len(texts)
    facet(page, "run").filter(has_text=RUN).click()
    page.get_by_role("link", name=f"The logs of {RUN} with this search").click()
    wait_for_sentence(page, "2,000 of")


def facet(page: Any, name: str) -> Any:
    title = page.locator(".sidetitle", has_text=re.compile(f"^{name}$"))
    return page.locator(".facet", has=title).locator(".facetvalue")


def test_facets_of_all_runs_narrow_and_are_dropped(everywhere: Any) -> None:
    page = everywhere
    search_everywhere(page, f"run:{RUN} (took OR ncclRemoteError)")
    wait_for_sentence(page, "2,004 lines match in 1 run")
    assert page.locator(".histbars").get_attribute("aria-label").endswith("4 ERROR, 2,000 INFO")
    assert facet(page, "level").all_inner_texts() == ["ERROR\n4", "INFO\n2,000"]
    facet(page, "level").filter(has_text="ERROR").click()
    wait_for_sentence(page, "4 lines match in 1 run")
    facet(page, "rank").filter(has_text="rank 2").click()
    wait_for_sentence(page, "1 line matches in 1 run")
    page.get_by_role("button", name="Drop the filter level").click()
    wait_for_sentence(page, "501 lines match in 1 run")
    assert facet(page, "run").all_inner_texts() == [f"{RUN}\n501"]


def test_lines_alike_are_one_or_each_by_a_key(everywhere: Any) -> None:
    page = everywhere
    search_everywhere(page, f"run:{RUN} ncclRemoteError")
    rows = page.locator(".foundlines tbody tr")
    rows.nth(0).wait_for()
    assert "\u00d74" in rows.nth(0).inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("f")
    rows.nth(3).wait_for()
    assert rows.count() == 4
    assert "\u00d7" not in rows.nth(0).inner_text()


def test_new_lines_of_all_runs_come_by_themselves(site: Site, everywhere: Any) -> None:
    page = everywhere
    search_everywhere(page, "freshly")
    wait_for_sentence(page, "No line of any run matches")
    page.keyboard.press("Escape")
    page.keyboard.press("l")
    page.get_by_role("button", name="Live", pressed=True).wait_for()
    rows = page.locator(".foundlines tbody tr")
    for number in range(2):
        record = schema.LogLine(
            attempt=0, rank=0, time_ns=time.time_ns(), level=20, message=f"freshly {number}",
        )  # fmt: skip
        body = {
            "schema_version": schema.SCHEMA_VERSION, "run_id": f"fresh-{number}", "producer": "p",
            "sequence": 1, "host": "node-a", "sent_ns": time.time_ns(), "records": [record],
            "chunks": [],
        }  # fmt: skip
        post_body(site.url, zstd.pack(msgspec.msgpack.encode(body), 3), "")
        rows.filter(has_text=f"freshly {number}").wait_for(timeout=15_000)
    assert f"freshly {1}" in rows.nth(0).inner_text()  # the newest first
    assert rows.count() == 2


def test_searches_of_all_runs_that_find_nothing_or_cannot_be_read(everywhere: Any) -> None:
    page = everywhere
    search_everywhere(page, "nosuchwordanywhere")
    wait_for_sentence(page, "No line of any run matches")
    search_everywhere(page, "group:tp_0")
    wait_for_sentence(page, "The search cannot be read")
    assert page.locator(".mistake mark").inner_text() == "group:tp_0"
    search_everywhere(page, RUN)
    page.locator(".note", has_text="1 run with this in name").get_by_role(
        "link", name=RUN
    ).wait_for()


def test_the_search_of_all_runs_is_two_keys_away(
    open_page: Callable[..., Watched], lines: int
) -> None:
    page = open_page(f"runs/{RUN}/logs?q=took%20queue").page
    page.locator("#verdict").wait_for()
    page.keyboard.press("g")
    page.keyboard.press("/")
    wait_for_sentence(page, "2,000 lines match")
    assert page.get_by_label("Search the lines of all runs").input_value() == "took queue"
