"""By keyboard alone: pages, map, lists, palette, help, and what the live region says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.web.conftest import SLOW, SLOW_RANK, Site, Watched

pytestmark = pytest.mark.browser


def test_letters_lead_to_pages_and_not_out_of_fields(open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"runs/{SLOW}?steps=50-90")
    page = watched.page
    for key, part in (("r", "ranks"), ("l", "logs"), ("u", "environment"), ("f", "findings")):
        page.keyboard.press("g")
        page.keyboard.press(key)
        page.wait_for_url(f"**/runs/{SLOW}/{part}?steps=50-90")
        watched.settled()
    page.keyboard.press("g")
    page.keyboard.press("l")
    watched.settled()
    page.keyboard.press("/")
    page.keyboard.type("gradient")
    page.wait_for_url("**q=gradient*")
    page.locator("h1", has_text="of").wait_for()
    assert "/logs" in page.url, "letters typed into a field are text"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement === document.body")
    watched.check()


def test_the_map_speaks_and_opens(open_page: Callable[..., Watched]) -> None:
    page = open_page(f"runs/{SLOW}/ranks").page
    page.locator(".plotregion").focus()
    for _ in range(SLOW_RANK):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    page.locator("[aria-live=polite]", has_text=f"Rank {SLOW_RANK}").wait_for()
    spoken = page.locator("[aria-live=polite]").first.inner_text()
    assert "step 300" in spoken
    assert "+" in spoken
    assert "from median" in spoken
    page.keyboard.press("Space")
    page.wait_for_url(f"**sel={SLOW_RANK}@300")
    page.keyboard.press("+")
    page.wait_for_url("**steps=*")
    page.keyboard.press("0")
    page.wait_for_url(lambda url: "steps=" not in url)
    page.keyboard.press("t")
    page.locator(".maptable tbody tr").first.wait_for()
    assert f"Rank {SLOW_RANK}" in page.locator(".maptable tbody tr").first.inner_text()
    page.keyboard.press("t")
    page.locator(".plotregion").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/steps/299?sel={SLOW_RANK}@299")


def test_palette_and_help_open_and_close(open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"runs/{SLOW}")
    page = watched.page
    page.keyboard.press("Control+k")
    page.locator(".palette input").wait_for()
    page.keyboard.type("rank 3")
    page.locator(".palette [role=option]", has_text="Rank 3").first.wait_for()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/runs/{SLOW}/ranks/3")
    page.keyboard.press("?")
    page.locator(".help").wait_for()
    assert page.locator(".help").get_by_text("Go to logs").is_visible()
    page.get_by_label("Single keys are shortcuts").uncheck()
    page.keyboard.press("Escape")
    page.locator(".help").wait_for(state="detached")
    page.keyboard.press("g")
    page.keyboard.press("l")
    page.wait_for_timeout(200)
    assert "/logs" not in page.url, "single keys are off"
    watched.check()


def test_logs_list_by_keyboard(open_page: Callable[..., Watched]) -> None:
    page = open_page(f"runs/{SLOW}/logs?q=evaluation").page
    page.locator(".vlist").focus()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.locator(".logpanel").wait_for()
    whole = page.locator(".logpanel pre").inner_text()
    assert "Traceback" in whole
    assert whole.rstrip().endswith("node-b"), "the traceback is kept whole"
    assert "line=" in page.url
    page.keyboard.press("Escape")
    page.locator(".logpanel").wait_for(state="detached")


def test_n_walks_through_findings(site: Site, open_page: Callable[..., Watched]) -> None:
    found = site.ask(f"runs/{SLOW}/findings")["open"]
    assert found, "the seeded run has a slow rank: a server that finds nothing is a failure"
    page = open_page(f"runs/{SLOW}").page
    page.keyboard.press("n")
    page.wait_for_url(f"**/findings/{found[0]['id']}")


def test_theme_is_switched_and_kept(open_page: Callable[..., Watched]) -> None:
    watched = open_page("runs", theme="dark")
    page = watched.page
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Switch to the light theme").click()
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert light != dark
    page.reload()
    watched.settled()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == light


def test_copy_says_copied_only_if_it_was(open_page: Callable[..., Watched]) -> None:
    watched = open_page()
    # As on plain HTTP: no clipboard API, and a browser that refuses the old way too.
    watched.context.add_init_script(
        "Object.defineProperty(navigator, 'clipboard', {value: undefined});"
        "document.execCommand = () => false;"
    )
    page = watched.go(f"runs/{SLOW}/environment").page
    page.locator("button.copy").first.click()
    field = page.locator(".manualcopy")
    field.wait_for()
    assert field.evaluate("field => field.selectionEnd - field.selectionStart") > 0
    assert page.get_by_text("Copied", exact=True).count() == 0
