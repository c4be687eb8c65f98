"""Every page in Firefox: its answer is there, nothing fails, nothing leaves the origin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import capabilities
from tests.web.conftest import Site
from tests.web.firefox import Firefox, firefox
from tests.web.pages import PAGES, page_of, path_of

pytestmark = [pytest.mark.browser, pytest.mark.needs("firefox")]
FIRST = {page_of(path): name for name, path in reversed(PAGES.items())}  # one state of each page


@pytest.fixture(scope="module")
def browser() -> Iterator[Firefox]:
    with firefox(str(capabilities.find("firefox"))) as browser:
        yield browser


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("page", sorted(FIRST))
def test_page_is_whole(site: Site, browser: Firefox, page: str) -> None:
    assert browser.open(f"{site.url}/{path_of(site, FIRST[page])}")
    assert browser.evaluate("document.title").endswith("rankscope")
    over = "document.documentElement.scrollWidth - innerWidth"
    assert browser.evaluate(over) <= 0, "nothing is wider than the window"
    assert not browser.problems
    inside = (site.url, "data:", "blob:")
    assert browser.requests
    assert [url for url in browser.requests if not url.startswith(inside)] == []


def test_what_fails_is_seen(site: Site, browser: Firefox) -> None:
    """The tests above can fail: an error, a warning and what the policy forbids are noticed."""
    browser.open(f"{site.url}/runs")
    assert browser.problems == []
    browser.evaluate("console.warn('a warning')")
    browser.evaluate("setTimeout(() => { throw new Error('an error'); })")
    browser.evaluate(
        """new Promise((done) => {
          const image = new Image();
          image.onerror = () => setTimeout(() => done(''));
          image.src = 'http://127.0.0.1:9/elsewhere.png';
        })"""
    )
    said = "\n".join(browser.problems)
    assert "a warning" in said
    assert "an error" in said
    assert "forbids http://127.0.0.1:9/elsewhere.png" in said
