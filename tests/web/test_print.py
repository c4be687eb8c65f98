"""Paper: light in every theme, without what only a screen can use, no wider than a sheet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.web.conftest import SLOW, Watched
from tests.web.map_pixels import lanes, neutral_of

pytestmark = pytest.mark.browser
SHEET = {"width": 1032, "height": 703}  # A4 across, less its margins, in CSS pixels
PATHS = {
    "overview": f"runs/{SLOW}",
    "ranks": f"runs/{SLOW}/ranks",
    "findings": f"runs/{SLOW}/findings",
    "collectives": f"runs/{SLOW}/collectives",
    "resources": f"runs/{SLOW}/resources",
}


def paper(page: Any) -> None:
    page.set_viewport_size(SHEET)
    page.emulate_media(media="print", color_scheme="dark")
    page.wait_for_timeout(400)


@pytest.mark.parametrize("name", PATHS)
def test_a_page_on_paper(open_page: Callable[..., Watched], name: str) -> None:
    watched = open_page(PATHS[name], theme="dark")
    page = watched.page
    paper(page)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("#verdict").is_visible()
    for screen_only in (".side", ".actions", ".skip"):
        assert not page.locator(screen_only).first.is_visible(), screen_only
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    cut = page.evaluate(
        "[...document.querySelectorAll('.card')].filter("
        "(card) => getComputedStyle(card).breakInside !== 'avoid').length"
    )
    assert cut == 0
    assert page.pdf()[:5] == b"%PDF-"
    watched.check()


def test_the_map_is_drawn_light_on_paper_and_dark_again_after(
    open_page: Callable[..., Watched],
) -> None:
    page = open_page(f"runs/{SLOW}/ranks", theme="dark").page
    assert max(neutral_of(lanes(page))) < 64
    paper(page)
    assert min(neutral_of(lanes(page))) > 200
    page.emulate_media(media="screen", color_scheme="dark")
    page.wait_for_timeout(400)
    assert max(neutral_of(lanes(page))) < 64


def test_what_was_not_loaded_is_said_on_paper(open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"runs/{SLOW}", theme="light")
    page = watched.page
    note = page.locator(".onpaper").last
    assert note.count() == 1, "the last card is below the screen"
    assert not note.is_visible()
    page.emulate_media(media="print")
    assert note.is_visible()
