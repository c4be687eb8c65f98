"""Panels are taken along: as a link, Markdown, CSV, the API's answer, a picture."""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.web.accessibility import violations
from tests.web.conftest import SLOW, SLOW_RANK, Site, Watched

pytestmark = pytest.mark.browser
NO_CLIPBOARD = "Object.defineProperty(navigator, 'clipboard', {value: undefined});"
# What a picture holds: its size, the colour of its edge, and how many colours are in a part of it.
LOOK = """async ([data, [left, top, right, bottom]]) => {
  const image = new Image();
  image.src = `data:image/png;base64,${data}`;
  await image.decode();
  const canvas = document.createElement('canvas');
  [canvas.width, canvas.height] = [image.width, image.height];
  const context = canvas.getContext('2d', {willReadFrequently: true});
  context.drawImage(image, 0, 0);
  const [x, y] = [Math.round(left * image.width), Math.round(top * image.height)];
  const to = [Math.round((right - left) * image.width), Math.round((bottom - top) * image.height)];
  const part = context.getImageData(x, y, ...to).data;
  const colours = new Set();
  for (let i = 0; i < part.length; i += 4) colours.add(`${part[i]},${part[i + 1]},${part[i + 2]}`);
  const edge = [...context.getImageData(Math.round(image.width / 2), 3, 1, 1).data];
  return {size: [image.width, image.height], edge, colours: [...colours]};
}"""
# The colours of whole pixels that the map has most of; of a copy, as reading often is warned of.
DRAWN = """() => {
  const canvas = document.querySelector('.rankmap canvas');
  const copy = document.createElement('canvas');
  [copy.width, copy.height] = [canvas.width, canvas.height];
  copy.getContext('2d').drawImage(canvas, 0, 0);
  const data = copy.getContext('2d').getImageData(0, 0, copy.width, copy.height).data;
  const counts = {};
  for (let i = 0; i < data.length; i += 4) {
    const key = `${data[i]},${data[i + 1]},${data[i + 2]}`;
    if (data[i + 3] === 255) counts[key] = (counts[key] ?? 0) + 1;
  }
  return Object.keys(counts).sort((a, b) => counts[b] - counts[a]).slice(0, 6);
}"""


def panel_of(page: Any, title: str) -> Any:
    return page.locator(".card", has=page.get_by_role("heading", name=title, exact=True))


def copied(page: Any, panel: Any, item: str) -> str:
    """Choose an item of the panel's menu; return the clipboard once it is said to be in it."""
    panel.get_by_role("button", name="Share").press("Enter")  # what is above may still load
    panel.get_by_role("menuitem", name=item).press("Enter")
    panel.get_by_text(f"{item.split()[-1]} copied".replace("link", "Link")).wait_for()
    page.keyboard.press("Escape")
    expect(panel.get_by_role("menu")).to_have_count(0)
    return str(page.evaluate("navigator.clipboard.readText()"))


def saved(panel: Any, item: str) -> tuple[str, bytes]:
    """Choose an item of the panel's menu that saves a file; return its name and bytes."""
    panel.get_by_role("button", name="Share").press("Enter")  # what is above may still load
    with panel.page.expect_download() as download:
        panel.get_by_role("menuitem", name=item).press("Enter")
    panel.page.keyboard.press("Escape")

    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def test_a_table_is_copied_as_text_that_others_read(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{SLOW}/ranks?order=worst")
    page = watched.page
    watched.context.grant_permissions(["clipboard-read", "clipboard-write"])
    panel = panel_of(page, "Where every rank was")
    assert copied(page, panel, "Copy link") == page.url

    text = copied(page, panel, "Copy as Markdown")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[0].startswith("| Rank | State | Finding | Host |")
    assert set(lines[1]) == set("| -")
    shown = [line.split("|")[1].strip() for line in lines[2:]]
    assert shown[0] == f"Rank {SLOW_RANK}"  # the worst first
    assert sorted(shown) == [f"Rank {n}" for n in range(8)]
    assert text.startswith("**Where every rank was**")
    assert text.endswith(f"]({page.url})")

    rows = list(csv.reader(copied(page, panel, "Copy as CSV").splitlines()))
    assert len(rows) == 9
    assert len({len(row) for row in rows}) == 1
    answer = json.loads(copied(page, panel, "Copy as JSON"))
    assert {rank["rank"] for rank in answer["ranks"]} == set(range(8))
    watched.check()


def test_the_answer_is_the_one_that_the_panel_was_drawn_from(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{SLOW}")
    panel = panel_of(watched.page, "Where a step goes")
    name, content = saved(panel, "Save as JSON")
    assert name == f"{SLOW}-where-a-step-goes.json"
    assert json.loads(content) == site.ask(f"runs/{SLOW}/budget")
    watched.go(f"runs?q={SLOW}")
    _, content = saved(panel_of(watched.page, "All runs"), "Save as JSON")
    assert [run["run_id"] for run in json.loads(content)["runs"]] == [SLOW], "with its filter"
    watched.go(f"runs/{SLOW}/ranks/{SLOW_RANK}")
    panel = watched.page.locator(".card", has=watched.page.locator(".u-wrap canvas")).first
    answers = json.loads(saved(panel, "Save as JSON")[1])
    kinds = {path.split("?")[0] for path in answers}
    assert kinds == {f"runs/{SLOW}/samples", f"runs/{SLOW}/metrics"}, "drawn from several answers"
    watched.go(f"runs/{SLOW}")
    panel = panel_of(watched.page, "Findings, by cost")
    name, content = saved(panel, "Save as CSV")
    assert name == f"{SLOW}-findings-by-cost.csv"
    assert content.splitlines()[0].startswith(b"id,"), "all rows, as the server has them"
    watched.check()


def verdict_of(watched: Watched) -> Any:
    panel = watched.page.locator("section.verdict")
    panel.wait_for()
    return panel


@pytest.mark.parametrize("path", ["", "/findings"])
def test_a_verdict_is_copied_with_its_reasons_and_what_to_do(
    site: Site, open_page: Callable[..., Watched], path: str
) -> None:
    found = site.ask(f"runs/{SLOW}/findings")["open"][0]
    watched = open_page(f"runs/{SLOW}{path and path + '/' + str(found['id'])}")
    page, panel = watched.page, verdict_of(watched)
    watched.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text = copied(page, panel, "Copy as Markdown")
    blocks = text.split("\n\n")
    assert blocks[0] == f"**{found['what']}**"
    assert blocks[-1].endswith(f"]({page.url})")
    for title in ("Why we think so", "Ruled out", "What to do"):
        assert f"**{title.lower()}**" in text.lower()
    for said in (found["next"], *found["ruled_out"], found["evidence"][0]["text"]):
        assert said.lower() in text.lower()
    answer = json.loads(copied(page, panel, "Copy as JSON"))
    about = answer if path else answer["verdict"]
    assert about["what"] == found["what"]
    panel.get_by_role("button", name="Share").press("Enter")
    expect(panel.get_by_role("menuitem")).to_have_text(
        ["Copy linkl", "Copy as Markdownm", "Copy as JSONj", "Save as JSONJ", "Save as picturep"]
    )
    page.keyboard.press("Escape")
    watched.check()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_verdict_is_a_picture(open_page: Callable[..., Watched], theme: str) -> None:
    watched = open_page(f"runs/{SLOW}", theme=theme)
    panel = verdict_of(watched)
    box = panel.bounding_box()
    name, content = saved(panel, "Save as picture")
    assert name.startswith(f"{SLOW}-rank-{SLOW_RANK}")
    picture = base64.b64encode(content).decode()
    found = watched.page.evaluate(LOOK, [picture, [0, 0, 0.6, 0.3]])
    assert found["size"] == [2 * round(box["width"]), 2 * round(box["height"])]
    assert (sum(found["edge"][:3]) > 3 * 128) == (theme == "light")
    assert len(found["colours"]) > 8, "the letters of the sentence"
    watched.check()


def test_x_shares_the_verdict_of_a_run_first(site: Site, open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"runs/{SLOW}")
    verdict_of(watched)
    watched.page.keyboard.press("x")
    menu = watched.page.locator("section.verdict").get_by_role("menu")
    expect(menu.get_by_role("menuitem", name="Copy link")).to_be_focused()
    assert violations(watched.page) == []
    box, width = menu.bounding_box(), watched.page.viewport_size["width"]
    assert 0 <= box["x"] <= box["x"] + box["width"] <= width
    watched.check()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_picture_shows_the_panel_with_title_and_axes(
    open_page: Callable[..., Watched], theme: str
) -> None:
    watched = open_page(f"runs/{SLOW}/ranks", theme=theme)
    page = watched.page
    panel = page.locator(".card", has=page.locator(".rankmap canvas"))
    box = panel.bounding_box()
    name, content = saved(panel, "Save as picture")
    assert name.startswith(f"{SLOW}-self-time-against-")
    assert name.endswith(".png")

    def look(left: float, top: float, right: float, bottom: float) -> Any:
        picture = base64.b64encode(content).decode()
        return page.evaluate(LOOK, [picture, [left, top, right, bottom]])

    title = look(0, 0, 0.3, 40 / box["height"])
    assert title["size"] == [2 * round(box["width"]), 2 * round(box["height"])]
    assert (sum(title["edge"][:3]) > 3 * 128) == (theme == "light")
    assert len(title["colours"]) > 8, "the letters of the title"
    gutter = page.locator(".rankmap .gutter").bounding_box()
    share = (gutter["x"] + gutter["width"] - box["x"]) / box["width"]
    assert len(look(0, 0.3, share, 0.9)["colours"]) > 8, "the names of the lanes"
    drawn = page.evaluate(DRAWN)
    assert len(drawn) > 4
    assert set(drawn) <= set(look(share, 0.1, 1, 1)["colours"]), "the map in its own colours"
    watched.check()


def test_a_series_is_a_picture_too(open_page: Callable[..., Watched]) -> None:
    watched = open_page(f"runs/{SLOW}/ranks/{SLOW_RANK}")
    page = watched.page
    panel = page.locator(".card", has=page.locator(".u-wrap canvas")).first
    panel.scroll_into_view_if_needed()
    name, content = saved(panel, "Save as picture")
    assert name.startswith(f"{SLOW}-")
    box = panel.bounding_box()
    plot = panel.locator("canvas").first.bounding_box()
    part = [
        (plot["x"] - box["x"]) / box["width"], (plot["y"] - box["y"]) / box["height"],
        (plot["x"] + plot["width"] - box["x"]) / box["width"],
        (plot["y"] + plot["height"] - box["y"]) / box["height"],
    ]  # fmt: skip
    found = page.evaluate(LOOK, [base64.b64encode(content).decode(), part])
    assert len(found["colours"]) > 12, "lines, grid and the numbers of the axes"
    watched.check()


def test_by_keyboard_and_where_the_browser_refuses_to_copy(
    open_page: Callable[..., Watched],
) -> None:
    watched = open_page(f"runs/{SLOW}/ranks")
    page = watched.page
    watched.context.add_init_script(NO_CLIPBOARD)
    page.reload()
    watched.settled()
    spoken = page.locator("[aria-live=polite]").first
    page.keyboard.press("x")
    menu = page.get_by_role("menu")
    expect(menu.get_by_role("menuitem", name="Copy link")).to_be_focused()
    assert violations(page) == []
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")  # as on plain HTTP: the old way of the browser
    expect(spoken).to_have_text("Markdown copied")
    expect(menu).to_be_visible()

    page.evaluate("document.execCommand = () => false")
    page.keyboard.press("j")
    field = page.get_by_role("textbox", name="Press Ctrl C to copy")
    expect(field).to_be_focused()
    assert page.evaluate("getSelection().toString()") == field.input_value()
    expect(spoken).to_contain_text("refused to copy")
    page.keyboard.press("Escape")
    expect(menu).to_have_count(0)
    expect(page.get_by_role("button", name="Share").first).to_be_focused()
    watched.check()
