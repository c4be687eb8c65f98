"""Every page, both themes: its answer stands first, nothing fails, nothing leaves the origin."""

from __future__ import annotations

import gzip
import re
import urllib.request
from collections.abc import Callable

import pytest

from tests.web.accessibility import EVERY_WIDTH, check_width, violations
from tests.web.conftest import CRASH, FRESH, HEALTHY, SLOW, Site, Watched
from tests.web.pages import PAGES, all_pages, of_all, of_run, page_of, path_of

pytestmark = pytest.mark.browser
MAX_MODULES, MAX_REQUESTS, MAX_FIRST_ROUTE_BYTES = 25, 30, 150 * 1024


def test_no_page_of_the_registry_is_left_out() -> None:
    assert len(all_pages()) > 20, "the registry was read"
    assert {page_of(path) for path in PAGES.values()} == all_pages()


@pytest.mark.usefixtures("kept")
def test_none_is_left_out_where_all_states_are_tried_and_photographed(site: Site) -> None:
    listed = [*of_run(site.ask, SLOW), *of_all(site.ask)]
    assert {page_of(path) for _, path in listed} == all_pages()


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", PAGES)
def test_page_is_whole_and_accessible_in_both_themes(
    site: Site, open_page: Callable[..., Watched], name: str
) -> None:
    watched = open_page(path_of(site, name), theme="dark")
    page = watched.page
    assert watched.sentence().strip()
    assert page.title().endswith("rankscope")
    for width in EVERY_WIDTH:
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
