"""Every page, both themes: its answer stands first, nothing fails, nothing leaves the origin."""

from __future__ import annotations

import gzip
import re
import urllib.request
from collections.abc import Callable

import pytest

from tests.web.accessibility import DESKTOP_WIDTHS, check_width, violations
from tests.web.conftest import CRASH, FRESH, HEALTHY, SLOW, Site, Watched

pytestmark = pytest.mark.browser
PAGES = {
    "runs": "runs",
    "overview": f"runs/{SLOW}",
    "overview-healthy": f"runs/{HEALTHY}",
    "overview-fresh": f"runs/{FRESH}",
    "overview-crash": f"runs/{CRASH}",
    "findings": f"runs/{SLOW}/findings",
    "finding": f"runs/{SLOW}/findings/first",
    "ranks": f"runs/{SLOW}/ranks?sel=5@200",
    "rank": f"runs/{SLOW}/ranks/5",
    "step": f"runs/{SLOW}/steps/200?sel=5@200&at=0:90000",
    "step-healthy": f"runs/{HEALTHY}/steps/100",
    "step-first": f"runs/{FRESH}/steps/1",
    "ranks-worst": f"runs/{SLOW}/ranks?order=worst",
    "ranks-by-node": f"runs/{SLOW}/ranks?order=node",
    "collectives": f"runs/{SLOW}/collectives",
    "collectives-open": f"runs/{SLOW}/collectives?call=all_reduce@default_pg@8388608&steps=200-260",
    "collectives-nothing": f"runs/{SLOW}/collectives?steps=900-950",
    "resources": f"runs/{SLOW}/resources?ranks=5",
    "resources-fresh": f"runs/{FRESH}/resources?span=all",
    "hang-over": f"runs/{HEALTHY}/hang",
    "hang-crash": f"runs/{CRASH}/hang",
    "hang-fresh": f"runs/{FRESH}/hang?ranks=1",
    "errors": f"runs/{CRASH}/errors",
    "logs": f"runs/{SLOW}/logs",
    "environment": f"runs/{SLOW}/environment",
    "agent": f"runs/{FRESH}/agent?for=1",
    "agent-over": f"runs/{SLOW}/agent",
    "machines": f"runs/{SLOW}/machines",
    "search": "search?q=kind%3Dslow_compute%20OR%20step%20OR%20error",
    "search-nothing": "search?q=nosuchwordanywhere",
    "search-empty": "search",
    "compare": f"compare?a={HEALTHY}&b={SLOW}",
    "compare-within": f"compare?a={SLOW}&b={SLOW}&a_steps=11-120&b_steps=121-300",
    "compare-nothing": "compare",
    "compare-alone": f"compare?b={HEALTHY}",
}
MAX_MODULES, MAX_REQUESTS, MAX_FIRST_ROUTE_BYTES = 25, 30, 150 * 1024


def path_of(site: Site, name: str) -> str:
    path = PAGES[name]
    if path.endswith("/first"):
        found = site.ask(f"runs/{SLOW}/findings")
        listed = found["open"] + found["recovered"]
        assert listed, "the seeded run has a slow rank: a server that finds nothing is a failure"
        path = path.replace("first", str(listed[0]["id"]))
    return path


@pytest.mark.parametrize("name", PAGES)
def test_page_is_whole_and_accessible_in_both_themes(
    site: Site, open_page: Callable[..., Watched], name: str
) -> None:
    watched = open_page(path_of(site, name), theme="dark")
    page = watched.page
    assert watched.sentence().strip()
    assert page.title().endswith("rankscope")
    for width in DESKTOP_WIDTHS:
        check_width(page, width)
    page.set_viewport_size({"width": 1440, "height": 900})
    assert violations(page) == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="light", reduced_motion="reduce")
    page.wait_for_timeout(100)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    watched.settled()
    assert violations(page) == []
    watched.check()


@pytest.mark.parametrize("run", [SLOW, HEALTHY, CRASH, FRESH])
def test_first_sentence_is_the_one_of_the_api(
    site: Site, open_page: Callable[..., Watched], run: str
) -> None:
    watched = open_page(f"runs/{run}")
    for _ in range(20):  # the live run may have moved between the two answers
        if watched.sentence() == site.sentence(run):
            break
        watched.page.wait_for_timeout(250)
    assert watched.sentence() == site.sentence(run)
    assert site.sentence(run)[:40] in watched.page.title()


def test_first_route_holds_its_budget(site: Site, open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"runs/{SLOW}")
    watched.page.wait_for_timeout(800)
    own = [url for url in watched.requests if url.startswith(site.url)]
    modules = [url for url in own if url.endswith(".js")]
    assert len(modules) <= MAX_MODULES, modules
    assert len(own) <= MAX_REQUESTS, own
    code = sum(len(gzip.compress(read(url))) for url in own if re.search(r"\.(js|css|woff2)$", url))
    assert code <= MAX_FIRST_ROUTE_BYTES, f"{code} bytes"


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20) as reply:
        content: bytes = reply.read()
    return content


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("runs/no-such-run", "There is no run"),
        (f"runs/{SLOW}/ranks/99", "There is no rank 99"),
        (f"runs/{SLOW}/findings/999999", "There is no finding"),
        (f"runs/{SLOW}/steps/9999", "There is no step 9,999"),
        (f"runs/{SLOW}/steps/200?ranks=99", "There are no such ranks"),
        (f"runs/{SLOW}/nothing-here", "There is no such page"),
    ],
)
def test_what_does_not_exist_says_so(
    open_page: Callable[..., Watched], path: str, words: str
) -> None:
    watched = open_page()
    watched.page.goto(f"{watched.origin}/{path}")
    heading = watched.page.locator("main h1").first
    heading.wait_for()
    assert words in heading.inner_text()
    assert watched.page.locator("main a").count() > 0, "there is a way on"


def test_a_server_with_a_token_asks_for_it_once(
    token_site: str, open_page: Callable[..., Watched]
) -> None:
    watched = open_page()
    watched.origin = token_site
    page = watched.go("runs?q=x").page
    page.wait_for_url("**/sign-in?next=*")
    watched.settled()
    assert violations(page) == []
    page.get_by_label("Token").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("alert").wait_for()
    page.get_by_label("Token").fill("open sesame")
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/runs?q=x")
    watched.settled()
    assert "open sesame" not in page.url + str(page.evaluate("JSON.stringify({...localStorage})"))
