"""The picture of a finding: drawn with its gap and its onset, in words, and as a table."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rankscope_server.report.store import DATABASE
from tests.server.jobs_sent import send_job
from tests.server.seed import post_body, wait_until_judged
from tests.simulator.job import Fault, Job
from tests.web.accessibility import WIDTHS, check_sizes_and_themes
from tests.web.conftest import Site, Watched, serving

pytestmark = pytest.mark.browser
NAN, LEAK, CRASHED, SKIPPED, STAGES = "nan", "leak", "crashed", "skipped", "stages"
RANK, START = 5, 60
FAULTS = {NAN: Fault("nan", rank=RANK, start=START),
          LEAK: Fault("leak", rank=RANK, start=START, size=40.0),
          CRASHED: Fault("crash", rank=RANK, start=START),
          SKIPPED: Fault("skip", rank=RANK, start=START)}  # fmt: skip
KINDS = {NAN: "nan", LEAK: "memory_growth", CRASHED: "crash", SKIPPED: "desync",
         STAGES: "stage_imbalance"}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with serving(tmp_path_factory.mktemp("pictures")) as url:
        for name, fault in FAULTS.items():
            job = Job(data=8, steps=160, tells_numbers=True, ranks_per_host=4, faults=(fault,))
            send_job(lambda body: post_body(url, body, ""), name, job, collectives=name == SKIPPED)
        slow = tuple(Fault("slow_compute", rank=rank, size=0.5) for rank in (4, 5))
        pipeline = Job(data=2, pipeline=4, steps=160, microbatches=8, backend="gloo", faults=slow)
        send_job(lambda body: post_body(url, body, ""), STAGES, pipeline)
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


@pytest.mark.parametrize("run", [CRASHED, SKIPPED, STAGES])
def test_lanes_bars_and_tables_are_whole_and_accessible_too(
    finding: Callable[..., Any], run: str
) -> None:
    watched, found = finding(run, theme="dark")
    page = watched.page
    parts = [*found["lanes"], *found["bars"], *found["tables"]]
    assert parts
    for part in parts:
        picture = page.locator(".picture", has=page.get_by_role("heading", name=part["title"]))
        picture.wait_for()
        text = picture.inner_text()
        assert f"{part['text']}." in text
        assert f"Source: {part['source']}." in text
    check_sizes_and_themes(page, WIDTHS)
    watched.check()


def test_lanes_show_when_a_rank_failed_and_that_nothing_is_known_after(
    finding: Callable[..., Any],
) -> None:
    watched, found = finding(CRASHED)
    (part,) = found["lanes"]
    rows = watched.page.locator(".lanerow:has(.lanetrack)")
    rows.first.wait_for()
    assert rows.locator(".barlabel").all_inner_texts() == [lane["label"] for lane in part["lanes"]]
    track, mark = rows.first.locator(".lanetrack"), rows.first.locator(".t-event")
    box, at = track.bounding_box(), mark.first.bounding_box()
    error = next(span for span in part["lanes"][0]["spans"] if span["state"] == "event")
    share = (error["begin_ms"] - part["begin_ms"]) / (part["end_ms"] - part["begin_ms"])
    assert at["x"] + at["width"] / 2 - box["x"] == pytest.approx(share * box["width"], abs=2)
    last = rows.first.locator(".laneseg").last.bounding_box()
    assert last["x"] + last["width"] < box["x"] + box["width"] - 2, "after its end is no data"
    watched.page.keyboard.press("t")
    table = watched.page.get_by_role("region", name=f"{part['title']}, as a list")
    assert table.locator("tbody tr").count() == sum(len(one["spans"]) for one in part["lanes"])
    watched.check()


def test_bars_have_the_line_that_they_are_compared_with(finding: Callable[..., Any]) -> None:
    watched, found = finding(STAGES)
    (part,) = found["bars"]
    tracks = watched.page.locator(".picturebars .bartrack")
    tracks.first.wait_for()
    most = max(sum(bar["values"]) for bar in part["bars"])
    for track, bar in zip(tracks.all(), part["bars"], strict=True):
        box, line = track.bounding_box(), track.locator(".barlimit").bounding_box()
        share = part["limits"][0]["value"] / most
        assert line["x"] - box["x"] == pytest.approx(share * box["width"], abs=3)
        work = [track.locator(".seg").nth(at).bounding_box() for at in range(3)]
        ends = work[-1]["x"] + work[-1]["width"] - box["x"]
        assert ends == pytest.approx(sum(bar["values"][:3]) / most * box["width"], rel=0.05)
    watched.page.keyboard.press("t")
    table = watched.page.get_by_role("region", name=f"{part['title']} in numbers")
    assert table.locator("tbody tr").count() == len(part["bars"])
    watched.check()


def age(folder: Path) -> None:
    """Let all that a server has stored be as if it had come forty days ago."""
    earlier_ns = time.time_ns() - 40 * 86_400 * 10**9
    with closing(sqlite3.connect(folder / DATABASE)) as database, database:
        database.execute("DELETE FROM received_mark")
        database.execute(
            "INSERT INTO received_mark (time_ns, chunk_id) VALUES (?, (SELECT MAX(id) FROM chunk))",
            (earlier_ns,),
        )
        database.execute("UPDATE run SET received_ns = ?", (earlier_ns,))


def test_what_retention_removed_is_said(tmp_path: Path, open_page: Callable[..., Watched]) -> None:
    """The samples of GPUs go, the steps stay: the picture shows these and says what went."""
    job = Job(data=8, steps=160, ranks_per_host=4, tells_numbers=True,
              faults=(Fault("thermal", rank=RANK, start=START, size=0.6),))  # fmt: skip
    with serving(tmp_path) as url:
        send_job(lambda body: post_body(url, body, ""), "hot", job)
        wait_until_judged(url)
        found = Site(url).ask("runs/hot/findings")
    one = next(one for one in found["open"] if one["kind"] == "thermal_or_power")
    age(tmp_path)
    with serving(tmp_path, "--keep-samples-days", "1", "--retention-seconds", "0.2") as url:
        deadline = time.monotonic() + 60
        while not Site(url).ask(f"runs/hot/findings/{one['id']}/picture")["notes"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        watched = open_page()
        watched.origin = url
        watched.go(f"runs/hot/findings/{one['id']}")
        card = watched.page.locator(".card", has=watched.page.locator(".picture"))
        card.get_by_text("removed by retention").wait_for()
        assert "No sample of the machines around its onset is stored" in card.inner_text()
        assert card.get_by_text("Self time, each step").first.is_visible()
        watched.check()


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
