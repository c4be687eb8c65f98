"""The map: the slow rank can be seen, a healthy run stays quiet, a pinned cell has an address."""

from __future__ import annotations

import json
import math
import re
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.jobs_sent import send_job
from tests.server.seed import post_body, seed_run, wait_until_judged
from tests.simulator.job import Job
from tests.web.accessibility import WIDTHS, check_sizes_and_themes, violations
from tests.web.conftest import HEALTHY, SLOW, SLOW_FROM, SLOW_RANK, STEPS, Site, Watched, serving
from tests.web.map_pixels import lanes, neutral_of

pytestmark = pytest.mark.browser
VISIBLE = 10.0  # CIELAB distance that an eye does not miss


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as reply:
        return bytes(reply.read())


def lab(colour: tuple[int, int, int]) -> tuple[float, float, float]:
    """Return CIELAB of sRGB, D65."""
    linear = [
        (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4)
        for v in (part / 255 for part in colour)
    ]
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(m * c for m, c in zip(row, linear, strict=True)) for row in rows]
    f = [
        (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116)
        for v in (xyz[0] / 0.9505, xyz[1], xyz[2] / 1.089)
    ]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def distance(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    return float(sum((x - y) ** 2 for x, y in zip(lab(a), lab(b), strict=True)) ** 0.5)


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("scale", [1, 2])
def test_the_slow_rank_is_visible(
    open_page: Callable[..., Watched], theme: str, scale: int
) -> None:
    watched = open_page(f"runs/{SLOW}/ranks", theme=theme, device_scale_factor=scale)
    found = lanes(watched.page)
    neutral = neutral_of(found)
    lane = found[SLOW_RANK]
    start = int(len(lane) * (SLOW_FROM + 1) / STEPS)
    seen = [distance(pixel, neutral) >= VISIBLE for pixel in lane[start:-2]]
    assert sum(seen) / len(seen) >= 0.95
    calm = lane[: int(len(lane) * (SLOW_FROM - 2) / STEPS)]
    assert sum(distance(pixel, neutral) >= VISIBLE for pixel in calm) / len(calm) < 0.05
    watched.check()


def test_a_healthy_run_stays_quiet(open_page: Callable[..., Watched]) -> None:
    found = lanes(open_page(f"runs/{HEALTHY}/ranks").page)
    neutral = neutral_of(found)
    # The first step is work of its own kind on every rank, yet alike on all: it stays neutral too.
    pixels = [pixel for lane in found.values() for pixel in lane]
    coloured = sum(distance(pixel, neutral) >= VISIBLE for pixel in pixels) / len(pixels)
    assert coloured < 0.005


def test_a_click_pins_the_cell_and_its_address_restores_it(
    open_page: Callable[..., Watched],
) -> None:
    watched = open_page(f"runs/{SLOW}/ranks?steps=101-200")
    page = watched.page
    box = page.locator(".plotregion").bounding_box()
    lane = page.locator(".gutter .lanename", has_text=f"Rank {SLOW_RANK}").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.505, lane["y"] + lane["height"] / 2)
    page.locator(".cellpanel").wait_for()
    assert f"sel={SLOW_RANK}@151" in page.url
    assert "steps=101-200" in page.url
    page.locator(".cellname", has_text="on node").wait_for()
    told = page.locator(".cellname").inner_text()
    again = open_page(page.url.removeprefix(f"{watched.origin}/"))
    again.page.locator(".cellname", has_text="on node").wait_for()
    assert again.page.locator(".cellname").inner_text() == told
    assert again.page.locator(".cellbox").is_visible()
    assert "steps 101 to 200" in again.page.locator(".plotregion").get_attribute("aria-label")
    again.page.keyboard.press("Escape")
    assert again.page.locator(".cellpanel").count() == 0
    assert "sel=" not in again.page.url
    again.check()


def drag(page: Any, begin: tuple[float, float], end: tuple[float, float]) -> None:
    """Drag over the map, from and to a share of its width and a height of the page."""
    box = page.locator(".plotregion").bounding_box()
    page.mouse.move(box["x"] + box["width"] * begin[0], begin[1])
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * end[0], end[1], steps=4)
    page.mouse.up()


def middle(page: Any, rank: int) -> float:
    name = page.get_by_text(f"Rank {rank}", exact=True)
    lane = page.locator(".gutter .lanename").filter(has=name).bounding_box()
    return float(lane["y"] + lane["height"] / 2)


def test_dragging_over_the_throughput_zooms_and_back_undoes_it(
    open_page: Callable[..., Watched],
) -> None:
    page = open_page(f"runs/{SLOW}/ranks").page
    y = page.locator(".plotregion").bounding_box()["y"] + 20
    drag(page, (0.25, y), (0.5, y))
    page.wait_for_url("**/ranks?steps=76-15*")
    page.go_back()
    page.wait_for_url("**/ranks")


def selected(page: Any) -> tuple[str, int, int]:
    """Return the ranks and steps in the address."""
    found = re.search(r"[?&]area=([\d,-]+)@(\d+)-(\d+)", page.url)
    assert found, page.url
    return found[1], int(found[2]), int(found[3])


def test_dragging_over_lanes_selects_them_and_a_link_shows_the_same(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{SLOW}/ranks")
    page = watched.page
    drag(page, (0.5, middle(page, 4)), (0.75, middle(page, 6)))
    page.locator(".areatext").wait_for()
    ranks, lo, hi = selected(page)
    assert (ranks, lo in range(149, 153), hi in range(224, 228)) == ("4-6", True, True)
    answer = site.ask(f"runs/{SLOW}/selection?ranks=4-6&from={lo}&to={hi}")
    assert page.locator(".areatext").inner_text() == answer["text"]
    assert f"rank {SLOW_RANK} is 1.4" in answer["text"]
    page.locator("[aria-live=polite]", has_text="Ranks 4-6").first.wait_for()
    again = open_page(page.url.removeprefix(f"{watched.origin}/"))
    again.page.locator(".areatext").wait_for()
    assert again.page.locator(".areatext").inner_text() == answer["text"]
    box, map_box = (
        again.page.locator(one).first.bounding_box() for one in (".areabox", ".plotregion")
    )
    assert box["width"] - 4 == pytest.approx(map_box["width"] * (hi - lo + 1) / STEPS, abs=3)
    assert box["y"] <= middle(again.page, 4) < middle(again.page, 6) <= box["y"] + box["height"]
    again.page.get_by_role("button", name="Only the slow rank").click()
    again.page.wait_for_url(f"**area={SLOW_RANK}@{lo}-{hi}")
    again.page.go_back()
    again.page.wait_for_url("**area=4-6@*")
    again.page.keyboard.press("z")
    again.page.wait_for_url(f"**steps={lo}-{hi}*")
    again.page.keyboard.press("Escape")
    again.page.wait_for_url(lambda url: "area=" not in url)
    assert again.page.locator(".areapanel, .areabox").count() == 0
    again.check()
    watched.check()


def test_shift_and_arrows_select_and_escape_gives_it_up(
    open_page: Callable[..., Watched],
) -> None:
    watched = open_page(f"runs/{SLOW}/ranks?steps=101-200")
    page = watched.page
    page.locator(".plotregion").focus()
    for key in ("Home", "ArrowDown", "Alt+ArrowRight"):
        page.keyboard.press(key)
    page.locator("[aria-live=polite]", has_text="Rank 1 on node-a, step 151").wait_for()
    for key in ("Shift+ArrowRight", "Shift+ArrowRight", "Shift+ArrowDown"):
        page.keyboard.press(key)
    page.wait_for_url("**area=1-2@151-153")
    page.locator(".areatext", has_text="Ranks 1-2, steps 151-153").wait_for()
    page.keyboard.press("Shift+ArrowUp")
    page.wait_for_url("**area=1@151-153")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Control+Shift+ArrowRight")
    page.wait_for_url("**area=2@153-200")
    page.keyboard.press("Escape")
    page.wait_for_url(lambda url: "area=" not in url)
    assert page.locator(".plotregion").evaluate("one => one === document.activeElement")
    watched.check()


def test_the_lines_of_a_selection_are_those_of_its_link(open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"runs/{SLOW}/ranks?area={SLOW_RANK}@{SLOW_FROM}-{STEPS}")
    page = watched.page
    link = page.get_by_role("link", name="warnings or worse")
    link.wait_for()
    number = link.inner_text().split()[0]
    link.click()
    watched.settled()
    page.locator("#verdict", has_text=re.compile(rf"^{number} of [\d,]+ lines match")).wait_for()
    assert f"rank={SLOW_RANK}&" in page.url
    watched.check()


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_a_selection_is_whole_at_every_width(open_page: Callable[..., Watched], theme: str) -> None:
    watched = open_page(f"runs/{SLOW}/ranks?area=4-6@{SLOW_FROM}-{STEPS}", theme=theme)
    watched.page.locator(".areatext").wait_for()
    check_sizes_and_themes(watched.page, WIDTHS)
    watched.check()


def test_the_cursor_and_the_table_say_ratio_and_robust_z(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{SLOW}/ranks?steps=101-200")
    page = watched.page
    page.locator(".plotregion").focus()
    page.keyboard.press("End")
    for _ in range(SLOW_RANK):
        page.keyboard.press("ArrowDown")
    said = page.locator("[aria-live=polite]", has_text=f"Rank {SLOW_RANK} on").first
    said.wait_for()
    cell = re.search(r"\+(\d+) % from median, robust\sz\s(\d+)", said.inner_text())
    assert cell, said.inner_text()
    noise = site.ask(f"runs/{SLOW}/map?from=101&to=200")["noise"]
    expected = math.log2((1 + int(cell[1]) / 100) / noise["ratio"]) / noise["sigma"]
    assert int(cell[2]) == pytest.approx(expected, abs=1)
    page.locator(".tip", has_text=f"robust z {cell[2]}").wait_for()
    page.keyboard.press("t")
    first = page.locator(".maptable tbody tr").first
    first.wait_for()
    assert re.search(r"\+\d+ %\s+\d\d", first.inner_text())
    watched.check()


ORDER = re.compile("^Order of the map")
WIDE, WIDE_RANKS, WIDE_SLOW = "wide", 512, 389


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that holds a run of more ranks than the map has lanes, on 8 nodes."""
    with serving(tmp_path_factory.mktemp("wide")) as url:
        seed_run(
            url, run_id=WIDE, ranks=WIDE_RANKS, ranks_per_node=64, steps=40, slow_rank=WIDE_SLOW,
            slow_from=20, steps_per_batch=40,
        )  # fmt: skip
        wait_until_judged(url)
        yield url


def open_wide(open_page: Callable[..., Watched], url: str, path: str, **more: Any) -> Watched:
    watched = open_page(**more)
    watched.origin = url
    watched.go(path)
    watched.page.locator(".plotregion canvas").wait_for()
    return watched


def test_a_rank_that_is_pinned_and_not_slow_says_why(
    wide: str, open_page: Callable[..., Watched]
) -> None:
    odd = WIDE_RANKS - 1  # its library differs, and it is as quick as its peers
    watched = open_wide(open_page, wide, f"runs/{WIDE}/ranks")
    reasons = watched.page.locator(".pinreasons li")
    reasons.filter(has_text=f"Rank {odd} is pinned: ").wait_for()
    assert "has nccl.version 2.21.5" in reasons.all_inner_texts()[0]
    assert not reasons.filter(has_text=f"Rank {WIDE_SLOW} is pinned").count(), "its lane shows it"
    watched.check()


MESH = Job(data=4, tensor=4, pipeline=4, steps=30, ranks_per_host=8, backend="gloo")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that holds a run of several dimensions, 8 ranks on a node."""
    with serving(tmp_path_factory.mktemp("mesh")) as url:
        send_job(lambda body: post_body(url, body, ""), "mesh", MESH)
        wait_until_judged(url)
        yield url


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_bands_and_orders_by_group_are_chosen_by_keyboard_and_mouse(
    open_page: Callable[..., Watched], mesh: str, theme: str
) -> None:
    watched = open_wide(open_page, mesh, "runs/mesh/ranks", theme=theme)
    page = watched.page
    bands = page.locator(".groupband")
    assert [one.get_attribute("title") for one in bands.all()] == [
        f"node-000{node}" for node in range(8)
    ]
    page.keyboard.press("B")
    page.wait_for_url("**bands=stage")
    assert [one.get_attribute("title") for one in bands.all()] == [f"Stage {n}" for n in range(4)]
    page.get_by_label("Bands beside the map").select_option("group:data")
    page.wait_for_url("**bands=group:data")
    assert bands.count() == 64, "ranks of a group are 4 apart: each lane has a band"
    tones = [str(one.get_attribute("class")) for one in bands.all()]
    assert tones[:4] == tones[4:8], "a group that comes again has its colour again"
    assert len(set(tones[:4])) == 4
    page.get_by_label(ORDER).select_option("group:data")
    page.wait_for_url("**order=group:data*")
    page.locator(".gutter .lanename", has_text="Ranks 0, 4 and 2 more").first.wait_for()
    assert bands.count() == 16
    page.locator(".plotregion").focus()
    page.keyboard.press("Home")
    page.keyboard.press("Control+ArrowDown")
    page.locator("[aria-live=polite]", has_text="Rank 1, Ranks 1, 5 and 2 more").wait_for()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("o")
    page.wait_for_url("**order=group:pipeline*")
    assert violations(page) == []
    check_sizes_and_themes(page, WIDTHS)
    watched.check()


def names(page: Any) -> list[str]:
    return [str(text) for text in page.locator(".gutter .lanename").all_inner_texts()]


def test_an_order_is_chosen_by_keyboard_and_kept_in_the_address(
    open_page: Callable[..., Watched],
) -> None:
    watched = open_page(f"runs/{SLOW}/ranks")
    page = watched.page
    page.keyboard.press("o")
    page.wait_for_url("**/ranks?order=worst")
    page.locator("[aria-live=polite]", has_text="worst first").wait_for()
    page.locator(".gutter .lanename:not(.strip)").first.get_by_text(f"Rank {SLOW_RANK}").wait_for()
    assert page.get_by_label(ORDER).input_value() == "worst"
    page.get_by_label(ORDER).focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_url("**/ranks?order=node")
    page.locator(".gutter .lanename:not(.strip)").first.get_by_text("Rank 0").wait_for()
    assert page.locator(".groupband").count() == 4
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("g")
    page.keyboard.press("o")
    page.wait_for_url(f"**/runs/{SLOW}?order=node")
    watched.settled()
    page.keyboard.press("o")
    page.keyboard.press("o")
    page.wait_for_url(lambda url: "order=" not in url)
    watched.check()


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_of_many_ranks_the_odd_one_is_first_and_named(
    open_page: Callable[..., Watched], wide: str, theme: str
) -> None:
    watched = open_wide(open_page, wide, f"runs/{WIDE}/ranks?order=worst", theme=theme)
    page = watched.page
    rows = [text for text in names(page) if text.startswith("Rank")]
    assert sum(text.startswith(f"Rank {WIDE_SLOW}") for text in rows) == 2, "pinned and first lane"
    shares = [text for text in rows if " more" in text]
    assert shares, "the others share lanes, and each lane says whose it is"
    assert all(re.match(r"Ranks \d+, \d+ and \d+ more", text) for text in shares)
    colours = lanes(page)[WIDE_SLOW]
    calm, slow = colours[len(colours) // 4], colours[3 * len(colours) // 4]
    assert distance(calm, slow) >= VISIBLE
    page.locator(".plotregion").focus()
    page.keyboard.press("End")
    page.keyboard.press("PageDown")
    page.keyboard.press("PageDown")
    page.keyboard.press("PageDown")
    page.locator("[aria-live=polite]", has_text="Worst: rank").wait_for()
    said = page.locator("[aria-live=polite]").first.inner_text()
    worst = re.search(r"Worst: rank (\d+), step (\d+): ", said)
    assert worst
    page.locator(".tip", has_text=f"rank {worst[1]}, step {worst[2]}: ").wait_for()
    page.keyboard.press("Space")
    page.wait_for_url(f"**sel={worst[1]}@{worst[2]}*")
    page.locator(".cellbox").wait_for()
    assert violations(page) == []
    watched.check()


def test_a_click_on_a_lane_of_many_pins_the_one_that_deviates(
    open_page: Callable[..., Watched], wide: str
) -> None:
    watched = open_wide(open_page, wide, f"runs/{WIDE}?order=node")
    page = watched.page
    bold = page.locator(".gutter .lanename b").all_inner_texts()
    assert [text for text in bold if text.startswith("node-")] == [f"node-{c}" for c in "abcdefgh"]
    bands = page.locator(".groupband")
    assert [band.get_attribute("title") for band in bands.all()] == [
        f"node-{c}" for c in "abcdefgh"
    ]
    answer = json.loads(read(f"{wide}/api/v1/runs/{WIDE}/map?order=node&lanes=78"))
    row = next(i for i, row in enumerate(answer["rows"]) if WIDE_SLOW in row["ranks"])
    own = [i for i, row in enumerate(answer["rows"]) if row["group"] == "node-g"]
    box, band = page.locator(".plotregion").bounding_box(), bands.nth(6).bounding_box()
    y = band["y"] + band["height"] * (row - own[0] + 0.4) / len(own)
    page.mouse.click(box["x"] + box["width"] * 0.9, y)
    page.wait_for_url(f"**sel={WIDE_SLOW}@*")
    watched.check()
