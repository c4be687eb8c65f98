"""The picture of a finding: drawn with its gap and its onset, in words, and as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.jobs_sent import send_job
from tests.server.seed import post_body, wait_until_judged
from tests.simulator.job import Fault, Job
from tests.web.accessibility import check_sizes_and_themes
from tests.web.conftest import Site, Watched, serving

pytestmark = pytest.mark.browser
WIDTHS = (420, 720, 1440, 2560)
NAN, LEAK = "nan", "leak"
RANK, START = 5, 60
FAULTS = {NAN: Fault("nan", rank=RANK, start=START),
          LEAK: Fault("leak", rank=RANK, start=START, size=40.0)}  # fmt: skip
KINDS = {NAN: "nan", LEAK: "memory_growth"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with serving(tmp_path_factory.mktemp("pictures")) as url:
        for name, fault in FAULTS.items():
            job = Job(data=8, steps=160, tells_numbers=True, ranks_per_host=4, faults=(fault,))
            send_job(lambda body: post_body(url, body, ""), name, job)
        wait_until_judged(url)
        yield Site(url)


@pytest.fixture
def finding(runs: Site, open_page: Callable[..., Watched]) -> Callable[..., Any]:
    def make(run: str, **more: Any) -> tuple[Watched, dict[str, Any]]:
        found = runs.ask(f"runs/{run}/findings")
        one = next(one for one in found["open"] if one["kind"] == KINDS[run])
        watched = open_page(**more)
        watched.origin = runs.url
        watched.go(f"runs/{run}/findings/{one['id']}")
        return watched, one | runs.ask(f"runs/{run}/findings/{one['id']}/picture")

    return make


@pytest.mark.parametrize("run", [NAN, LEAK])
def test_it_is_whole_and_accessible_in_both_themes(finding: Callable[..., Any], run: str) -> None:
    watched, found = finding(run, theme="dark")
    pictures = watched.page.locator(".picture")
    pictures.first.locator("canvas").wait_for()
    assert pictures.count() == len(found["charts"])
    for picture, chart in zip(pictures.all(), found["charts"], strict=True):
        label = picture.get_by_role("img").get_attribute("aria-label")
        assert label == f"{chart['text']}."
        assert picture.get_by_text(label).is_visible()  # and not for those alone who cannot see
    check_sizes_and_themes(watched.page, WIDTHS)
    watched.check()


def orange_columns(watched: Watched) -> list[int]:
    """Return the columns of the first picture with the colour of the named rank, in CSS px."""
    found: list[int] = watched.page.evaluate(
        """() => {
          const canvas = document.querySelector('.picture canvas');
          const probe = document.createElement('span');
          probe.style.color = 'var(--t-wait)';
          document.body.append(probe);
          const wanted = getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).map(Number);
          probe.remove();
          const { data, width, height } = canvas.getContext('2d')
            .getImageData(0, 0, canvas.width, canvas.height);
          const columns = new Set();
          for (let i = 0; i < width * height; i += 1)
            if (wanted.every((part, k) => Math.abs(data[4 * i + k] - part) < 24)
              && data[4 * i + 3] > 200) columns.add(Math.round((i % width) / devicePixelRatio));
          return [...columns].sort((a, b) => a - b);
        }"""
    )
    return found


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_is_no_number_is_a_gap_after_the_onset(
    finding: Callable[..., Any], theme: str
) -> None:
    watched, found = finding(NAN, theme=theme)
    loss = found["charts"][0]
    assert loss["onset"] == START
    watched.page.locator(".picture canvas").first.wait_for()
    watched.page.wait_for_timeout(200)
    columns = orange_columns(watched)
    over = watched.page.locator(".picture .u-over").first
    place = over.evaluate("node => [node.offsetLeft, node.offsetWidth]")
    steps = loss["x"]
    at = place[0] + place[1] * (START - steps[0]) / (steps[-1] - steps[0])
    drawn = [column for column in columns if abs(column - at) > 4]  # beside the mark itself
    assert len(drawn) > 0.8 * (at - place[0])
    assert max(drawn) < at, "drawn where there is no number"
    watched.check()


def test_its_table_holds_the_same_and_marks_the_onset(finding: Callable[..., Any]) -> None:
    watched, found = finding(NAN)
    page = watched.page
    page.locator(".picture canvas").first.wait_for()
    page.keyboard.press("t")
    chart = found["charts"][0]
    table = page.get_by_role("region", name=f"{chart['title']} in numbers")
    rows = table.locator("tbody tr")
    assert rows.count() == len(chart["x"])
    here = table.locator("tr.here")
    assert here.count() == 1
    cells = here.locator("td").all_inner_texts()
    assert cells[:2] == [str(START), "no value"]
    at = chart["x"].index(START)
    assert float(cells[3]) == pytest.approx(chart["median"][at], rel=0.01)
    page.keyboard.press("t")
    page.locator(".picture canvas").first.wait_for()
    watched.check()


def test_memory_is_drawn_in_bytes_over_the_others(finding: Callable[..., Any]) -> None:
    watched, found = finding(LEAK)
    chart = found["charts"][0]
    assert chart["unit"] == "bytes"
    text = watched.page.locator(".picture").inner_text()
    assert f"rank {RANK}" in text
    assert "the 7 other ranks, and their median" in text
    assert "GiB since the onset" in text
    watched.page.get_by_role("button", name="Table").click()
    row = watched.page.get_by_role("region", name="Memory of the process in numbers")
    assert "GiB" in row.locator("tbody tr").last.inner_text()
    watched.check()
