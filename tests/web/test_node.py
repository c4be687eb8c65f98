"""The page of one node: what names it, its ranks and samples, and the ways that lead to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.server.seed import seed_run
from tests.web.accessibility import EVERY_WIDTH, check_width, violations
from tests.web.conftest import SLOW, SLOW_RANK, Site, Watched

pytestmark = pytest.mark.browser


@pytest.fixture
def host(site: Site) -> str:
    """Return the node of the slow rank."""
    ranks = site.ask(f"runs/{SLOW}/ranks")["ranks"]
    return str(ranks[SLOW_RANK]["host"])


def test_what_names_it_its_ranks_and_its_samples(
    site: Site, open_page: Callable[..., Watched], host: str
) -> None:
    watched = open_page(f"runs/{SLOW}/nodes/{host}")
    page = watched.page
    assert watched.sentence() == site.sentence(SLOW)
    own = {one["rank"] for one in site.ask(f"runs/{SLOW}/ranks")["ranks"] if one["host"] == host}
    rows = page.get_by_role("region", name="Ranks", exact=True).locator("tbody tr")
    expect(rows).to_have_count(len(own))
    expect(rows.first).to_contain_text(f"Rank {SLOW_RANK}")
    expect(page.get_by_role("region", name="Findings")).to_contain_text(site.sentence(SLOW))
    page.get_by_role("heading", name=f"Where the samples of {host} come from").wait_for()
    for width in EVERY_WIDTH:
        check_width(page, width)
    assert violations(page) == []
    page.get_by_role("link", name="Its logs").click()
    page.wait_for_url(f"**/runs/{SLOW}/logs?host={host}")
    watched.settled()
    expect(page.locator("#verdict")).to_contain_text("lines match")
    watched.check()


def test_a_node_that_no_finding_names_says_so(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    named = {host for one in site.ask(f"runs/{SLOW}/findings")["open"] for host in one["hosts"]}
    ranks = site.ask(f"runs/{SLOW}/ranks")["ranks"]
    other = next(one["host"] for one in ranks if one["host"] not in named)
    count = sum(one["host"] == other for one in ranks)
    watched = open_page(f"runs/{SLOW}/nodes/{other}")
    assert watched.sentence() == (
        f"{other}: {count} ranks, none failed or fell silent; no finding names it"
    )
    watched.check()


def test_a_node_that_is_not_there_is_not_healthy(open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"runs/{SLOW}/nodes/nowhere")
    assert watched.sentence() == "There is no node nowhere in this run"
    watched.page.get_by_role("link", name="All machines").click()
    watched.page.wait_for_url("**/machines")
    watched.check()


def test_machines_the_fleet_and_the_palette_lead_to_it(
    open_page: Callable[..., Watched], host: str
) -> None:
    watched = open_page(f"runs/{SLOW}/machines")
    page = watched.page
    row = page.get_by_role("region", name="Machines").locator("tr", has_text=host)
    row.get_by_role("link", name="Its page").click()
    page.wait_for_url(f"**/runs/{SLOW}/nodes/{host}")
    watched.go("fleet")
    row = page.locator(f"tr[data-host='{host}']")
    row.get_by_role("link", name="the node").first.click()
    page.wait_for_url(f"**/nodes/{host}")
    watched.go(f"runs/{SLOW}")
    page.keyboard.press("Control+k")
    page.keyboard.type(host)
    page.locator(".palette [role=option]", has_text="its ranks, findings and samples").wait_for()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/runs/{SLOW}/nodes/{host}")
    watched.check()


BANDED, RANKS, RANKS_PER_NODE = "banded", 384, 96


@pytest.fixture(scope="module")
def banded(site: Site) -> str:
    """Send a run of more ranks than have a name beside their lanes."""
    seed_run(
        site.url, run_id=BANDED, ranks=RANKS, ranks_per_node=RANKS_PER_NODE, steps=20,
        fault="none", end=False,
    )  # fmt: skip
    return f"runs/{BANDED}/ranks"


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_bands_of_the_map_have_the_names_of_their_nodes(
    site: Site, open_page: Callable[..., Watched], banded: str, theme: str
) -> None:
    ranks = site.ask(banded)["ranks"]
    hosts = [ranks[first]["host"] for first in range(0, RANKS, RANKS_PER_NODE)]
    watched = open_page(f"{banded}?bands=node", theme=theme)
    page = watched.page
    names = page.locator(".gutter .bandname")
    expect(names).to_have_text(hosts)
    bands = page.locator(".gutter .groupband").all()
    for name, band in zip(names.all(), bands, strict=True):
        own, beside = name.bounding_box(), band.bounding_box()
        assert abs(own["y"] - beside["y"]) < 1, "a name is where its band is"
        assert own["x"] + own["width"] <= beside["x"]
        lanes = page.locator(".gutter .lanename > *").all()
        over = [one.bounding_box() for one in lanes if one.is_visible()]
        for one in over:
            apart = one["x"] + one["width"] <= own["x"]
            assert (
                apart
                or one["y"] + one["height"] <= own["y"]
                or one["y"] >= own["y"] + own["height"]
            )
    assert violations(page) == []
    names.last.get_by_role("link").click()
    page.wait_for_url(f"**/runs/{BANDED}/nodes/{hosts[-1]}")
    watched.go(f"{banded}?order=node&bands=node")
    page.get_by_role("link", name=hosts[1], exact=True).first.click()
    page.wait_for_url(f"**/runs/{BANDED}/nodes/{hosts[1]}")
    watched.check()
