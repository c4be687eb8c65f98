"""The page of resources: its sentence, bands with the worst pinned, one cursor over all charts."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from tests.server.seed import seed_run
from tests.web.accessibility import violations
from tests.web.conftest import FRESH, SLOW, Site, Watched

pytestmark = pytest.mark.browser
WITH_GPUS, RANKS = "with-gpus", 16


@pytest.fixture(scope="module")
def gpus(site: Site) -> str:
    seed_run(
        site.url, run_id=WITH_GPUS, ranks=RANKS, ranks_per_node=8, steps=120, fault="none",
        steps_per_batch=120, gpus=True,
    )  # fmt: skip
    return WITH_GPUS


def test_the_sentence_is_that_of_the_api_and_keys_lead_there(
    site: Site, gpus: str, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{gpus}")
    page = watched.page
    page.keyboard.press("g")
    page.keyboard.press("t")
    page.wait_for_url(f"**/runs/{gpus}/resources")
    watched.settled()
    answer = site.ask(f"runs/{gpus}/resources")
    page.locator("h1", has_text=answer["text"]).wait_for()
    titles = page.locator(".bandchart figcaption b").all_inner_texts()
    assert titles == [chart["title"] for chart in answer["charts"]]
    assert page.get_by_text("Nothing was sent of:").inner_text().count("Memory of the process") == 1
    first = page.locator(".bandchart", has_text="GPU utilisation")
    assert "Of each GPU: 16 GPUs" in first.inner_text()
    assert "NVML" in first.inner_text()
    watched.check()


def test_one_cursor_reads_all_charts_by_keyboard_and_by_pointer(
    site: Site, gpus: str, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{gpus}/resources")
    page = watched.page
    data = site.ask(f"runs/{gpus}/resources?width=300")
    page.get_by_role("application").focus()
    page.keyboard.press("Home")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    step = data["step"][3]
    pills = page.locator(".bands .tools .pill")
    pills.first.filter(has_text=f"step {step}").wait_for()
    assert len(set(pills.all_inner_texts())) == 1, "all cards are at one time"
    page.locator("[aria-live=polite]", has_text=f"step {step}").wait_for()
    loss = next(chart for chart in data["charts"] if chart["key"] == "loss")
    reading = page.locator(".bandchart", has_text="Loss of backward()").locator(".faint .faint")
    assert reading.inner_text() == f"{loss['median'][3]:.2f}".rstrip("0").rstrip(".")
    box = page.locator(".bandchart .u-over").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 2, box["y"] + 20)
    pills.first.filter(has_text=f"step {data['step'][-1]}").wait_for()
    page.keyboard.press("Escape")
    pills.first.filter(has_text="newest").wait_for()
    watched.check()


def test_more_that_stand_apart_than_are_drawn_are_counted(
    site: Site, gpus: str, open_page: Callable[..., Watched]
) -> None:
    data = site.ask(f"runs/{gpus}/resources?width=300")
    chart = next(one for one in data["charts"] if one["scope"] == "gpu")
    chart["pinned_capped"] = {"shown": 3, "total": 1_024}
    watched = open_page()
    path = re.compile(rf"/api/v1/runs/{gpus}/resources(\?.*)?$")
    watched.page.route(path, lambda route: route.fulfill(json=data))
    watched.go(f"runs/{gpus}/resources")
    card = watched.page.locator(".bandchart", has_text=chart["title"]).first
    card.get_by_text("First 3 of 1,024 GPUs that are outliers.", exact=True).wait_for()
    assert watched.page.get_by_text("that are outliers.").count() == 1  # of no other chart
    watched.check()


def test_ranks_are_pinned_in_the_address_and_drawn(
    gpus: str, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{gpus}/resources")
    page = watched.page
    page.get_by_label("Pin ranks").fill("12")
    page.keyboard.press("Enter")
    page.wait_for_url("**ranks=12")
    line = page.locator(".bandchart", has_text="Memory of the node").locator(".pinnedlines li")
    line.filter(has_text="asked for").wait_for()
    assert "node-b" in line.filter(has_text="asked for").inner_text()
    page.get_by_label("Pin ranks").fill("1,2,3,4,5")
    page.keyboard.press("Enter")
    page.get_by_role("alert").wait_for()
    assert "ranks=12" in page.url
    watched.check()


def test_a_line_is_drawn_in_a_colour_of_its_own(
    gpus: str, open_page: Callable[..., Watched]
) -> None:
    def orange(page: object) -> int:
        shot = page.locator(".bandchart", has_text="Memory of the node").locator("canvas")  # type: ignore[attr-defined]
        pixels = shot.evaluate(
            "c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
        )
        rgb = np.array(pixels, np.int64).reshape(-1, 4)
        red, green, blue, alpha = rgb.T
        return int(((red > 190) & (green > 80) & (green < 190) & (blue < 110) & (alpha > 99)).sum())

    without = open_page(f"runs/{gpus}/resources")
    pinned = open_page(f"runs/{gpus}/resources?ranks=12")
    pinned.page.locator(".pinnedlines li", has_text="asked for").first.wait_for()
    assert orange(pinned.page) > 100
    assert orange(pinned.page) >= orange(without.page)


def test_the_table_twin_and_empty_runs(gpus: str, open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"runs/{gpus}/resources")
    page = watched.page
    page.keyboard.press("t")
    table = page.get_by_role("region", name="Quantities in numbers")
    table.wait_for()
    assert "1 of 16" in table.locator("tr", has_text="Loss of backward()").inner_text()
    assert violations(page) == []
    watched.check()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 1440, 2560])
def test_all_sizes_and_themes_hold_it(
    gpus: str, open_page: Callable[..., Watched], theme: str, width: int
) -> None:
    watched = open_page(f"runs/{gpus}/resources?ranks=3,12", theme=theme, width=width)
    page = watched.page
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert violations(page) == []
    watched.check()


@pytest.mark.parametrize("run", [SLOW, FRESH])
def test_other_runs_hold_it(run: str, open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"runs/{run}/resources?span=all")
    assert watched.sentence().strip()
    watched.check()
