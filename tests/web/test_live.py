"""Pages follow a run while it goes on: in many tabs, under a prefix, also without a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.seed import seed_run
from tests.web.conftest import SLOW, Site, Watched
from tests.web.prefix import proxy

pytestmark = pytest.mark.browser


def start(site: Site, run: str, steps: int = 40) -> None:
    """Begin a run, or continue it up to `steps`; the seed makes it a new collector's batches."""
    seed_run(
        site.url, run_id=run, ranks=4, steps=steps, fault="none", end=False, start_ns=BEGAN,
        seed=steps, steps_per_batch=100,
    )  # fmt: skip


BEGAN = 1_800_000_000_000_000_000


def last_step(page: Any) -> str:
    return str(page.locator(".plotregion").get_attribute("aria-label"))


def wait_for_step(page: Any, step: int) -> None:
    page.locator(f".plotregion[aria-label*='to {step}.']").wait_for(timeout=15_000)


@pytest.mark.core
def test_new_steps_and_lines_appear_without_reload(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    start(site, "growing")
    overview = open_page("runs/growing")
    logs = open_page("runs/growing/logs")
    wait_for_step(overview.page, 40)
    overview.page.evaluate("window.notReloaded = true")
    overview.page.locator(".status[data-freshness=live]").wait_for(timeout=10_000)
    start(site, "growing", 80)
    wait_for_step(overview.page, 80)
    assert overview.page.evaluate("window.notReloaded") is True
    logs.page.locator(".vrow", has_text="step 80 took").first.wait_for(timeout=15_000)
    overview.check()
    logs.check()


def test_a_live_change_does_not_move_what_the_reader_points_at(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    start(site, "pointed")
    page = open_page("runs/pointed/ranks").page
    wait_for_step(page, 40)
    box = page.locator(".plotregion").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 100)
    page.mouse.move(box["x"] + 205, box["y"] + 100)
    page.locator(".status[data-freshness=live]").wait_for(timeout=10_000)
    start(site, "pointed", 80)
    page.locator(".heldnote").wait_for(timeout=10_000)
    assert "to 40." in last_step(page)
    page.mouse.move(5, 5)
    wait_for_step(page, 80)


def test_scrolling_up_stops_the_tail(site: Site, open_page: Callable[..., Watched]) -> None:
    start(site, "tailed", 400)
    page = open_page("runs/tailed/logs").page
    page.locator(".vrow", has_text="step 400 took").first.wait_for(timeout=15_000)
    page.locator(".vlist").evaluate("list => { list.scrollTop = 100 }")
    page.locator(".jump").wait_for()
    before = page.locator(".vlist").evaluate("list => list.scrollTop")
    start(site, "tailed", 440)
    page.locator(".jump", has_text="new").wait_for(timeout=15_000)
    assert page.locator(".vlist").evaluate("list => list.scrollTop") == before
    page.locator(".jump").click()
    page.locator(".vrow", has_text="step 440 took").first.wait_for()


def test_eight_tabs_share_one_stream(site: Site, open_page: Callable[..., Watched]) -> None:
    first = open_page(f"runs/{SLOW}/environment")
    pages = [first.page]
    for _ in range(7):
        page = first.context.new_page()
        page.goto(f"{site.url}/runs/{SLOW}/environment", timeout=20_000)
        page.locator("#verdict").wait_for(timeout=20_000)
        pages.append(page)
    status = pages[-1].evaluate(
        "fetch(document.baseURI + 'api/v1/health').then(reply => reply.status)"
    )
    assert status == 200, "the eighth tab still has a connection"


def test_without_a_shared_worker_the_tab_streams_itself(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    start(site, "alone")
    watched = open_page()
    watched.context.add_init_script("delete window.SharedWorker")
    page = watched.go("runs/alone").page
    page.locator(".status[data-freshness=live]").wait_for(timeout=10_000)
    start(site, "alone", 60)
    wait_for_step(page, 60)
    watched.check()


def test_without_any_stream_it_polls_and_says_so(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    start(site, "polled")
    watched = open_page()
    watched.context.add_init_script("delete window.SharedWorker; delete window.EventSource")
    watched.context.add_init_script(
        "window.EventSource = class { constructor() {} close() {} addEventListener() {} }"
    )
    page = watched.go("runs/polled").page
    page.locator(".status", has_text="polling").wait_for(timeout=12_000)
    start(site, "polled", 60)
    wait_for_step(page, 60)


def test_deep_pages_work_under_nested_prefixes(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page()
    with proxy(site.url, "/user/proxy/8787") as url:
        watched.origin = url
        watched.go(f"runs/{SLOW}/ranks/5")
        watched.page.locator("nav.side a", has_text="Logs").click()
        watched.settled()
        assert watched.page.url.startswith(f"{url}/runs/{SLOW}/logs")
        watched.go(f"runs/{SLOW}/steps/200?t=1000-90000")
        watched.page.locator(".timeline canvas").wait_for()
        trace = watched.page.get_by_role("link", name="Trace for Perfetto").get_attribute("href")
        assert watched.page.request.get(f"{url}/{trace}").json()["otherData"]["run"] == SLOW
        watched.page.reload()
        watched.settled()
        for key in ("c", "d"):  # communication; comparison, which is a page of no run
            watched.page.keyboard.press("g")
            watched.page.keyboard.press(key)
            watched.page.wait_for_url("**/collectives" if key == "c" else "**/compare?b=*")
            watched.settled()
            assert watched.page.url.startswith(url)
        watched.check()
