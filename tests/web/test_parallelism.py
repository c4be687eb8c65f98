"""The page of parallelism: the mesh in colours, by keys and as a table; a pipeline's idle time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tests.server.jobs_sent import send_job
from tests.server.seed import post_body, wait_until_judged
from tests.simulator.job import Fault, Job
from tests.web.accessibility import WIDTHS, check_sizes_and_themes
from tests.web.conftest import FRESH, HEALTHY, SLOW, SLOW_RANK, Site, Watched, serving

pytestmark = pytest.mark.browser
MESH, WIDE = "mesh", "wide"
MESH_SLOW = 22
TIMES = "\N{MULTIPLICATION SIGN}"
MESH_JOB = Job(
    data=4, tensor=2, pipeline=4, steps=40, microbatches=6, ranks_per_host=4,
    faults=(Fault("slow_compute", rank=MESH_SLOW, start=5, size=0.6),),
)  # fmt: skip
WIDE_JOB = Job(data=32, tensor=1, pipeline=16, steps=12, microbatches=12, ranks_per_host=8)


@pytest.fixture(scope="module")
def meshes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server of its own: other tests count runs."""
    with serving(tmp_path_factory.mktemp("meshes")) as url:
        for name, job in ((MESH, MESH_JOB), (WIDE, WIDE_JOB)):
            send_job(lambda body: post_body(url, body, ""), name, job)
        wait_until_judged(url)
        yield Site(url)


@pytest.fixture
def open_mesh(meshes: Site, open_page: Callable[..., Watched]) -> Callable[..., Watched]:
    def make(path: str, **more: object) -> Watched:
        watched = open_page(**more)
        watched.origin = meshes.url
        return watched.go(path)

    return make


@pytest.mark.parametrize(
    "path",
    [f"runs/{MESH}/parallelism?sel={MESH_SLOW}", f"runs/{WIDE}/parallelism?metric=blocked_ratio"],
)
def test_the_page_is_whole_and_accessible_in_both_themes(
    open_mesh: Callable[..., Watched], path: str
) -> None:
    watched = open_mesh(path, theme="dark")
    check_sizes_and_themes(watched.page, WIDTHS)
    watched.check()


@pytest.mark.parametrize("run", [SLOW, HEALTHY, FRESH])
def test_without_a_pipeline_it_says_so_and_shows_the_mesh(
    site: Site, open_page: Callable[..., Watched], run: str
) -> None:
    watched = open_page(f"runs/{run}/parallelism", theme="dark")
    answer = site.ask(f"runs/{run}/parallelism")
    assert watched.sentence() == answer["text"]
    assert answer["text"].startswith("No pipeline: ")
    assert watched.page.get_by_text("None: no rank holds a stage of a pipeline.").is_visible()
    region = watched.page.get_by_role("application", name=re.compile("^Mesh of "))
    assert region.bounding_box()["height"] > 20
    check_sizes_and_themes(watched.page, WIDTHS)
    watched.check()


def colours_at(watched: Watched, *points: tuple[float, float]) -> list[list[int]]:
    """Return the colours of the mesh's picture at some points of it, read at once."""
    found: list[list[int]] = watched.page.evaluate(
        """points => {
          const canvas = document.querySelector('.mesh canvas');
          const { data, width } = canvas.getContext('2d')
            .getImageData(0, 0, canvas.width, canvas.height);
          return points.map(([x, y]) => {
            const [column, row] = [x, y].map((one) => Math.round(one * devicePixelRatio));
            const at = 4 * (row * width + column);
            return [...data.slice(at, at + 3)];
          });
        }""",
        points,
    )
    return found


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_slow_rank_stands_out_where_the_mesh_has_it(
    meshes: Site, open_mesh: Callable[..., Watched], theme: str
) -> None:
    watched = open_mesh(f"runs/{MESH}/parallelism?sel={MESH_SLOW}", theme=theme)
    answer = meshes.ask(f"runs/{MESH}/parallelism")
    assert watched.sentence() == answer["text"]
    assert f"rank {MESH_SLOW} works 1." in answer["text"]
    page = watched.page
    mesh = page.locator(".mesh").bounding_box()
    box = page.locator(".mesh .cellbox").bounding_box()
    corner = (box["x"] - mesh["x"] + 7, box["y"] - mesh["y"] + 7)  # beside the number in the cell
    pitch = box["width"] - 2
    slow, usual = colours_at(watched, corner, (corner[0], corner[1] - pitch))
    assert sum(abs(a - b) for a, b in zip(slow, usual, strict=True)) > 100, (slow, usual)
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    stage, data, tensor = MESH_JOB.place(MESH_SLOW)
    tip = page.locator(".mesh .tip").inner_text()
    assert tip.startswith(f"Rank {MESH_SLOW} on {MESH_JOB.host(MESH_SLOW)}")
    assert f"pipeline {stage}, data {data}, tensor {tensor}" in tip
    assert re.search(r"\+5\d %|\+6\d %", tip), tip
    watched.check()


def test_keys_go_from_rank_to_rank_and_colour_by_another_number(
    meshes: Site, open_mesh: Callable[..., Watched]
) -> None:
    watched = open_mesh(f"runs/{MESH}")
    page = watched.page
    page.keyboard.press("g")
    page.keyboard.press("i")
    page.wait_for_url(f"**/runs/{MESH}/parallelism")
    watched.settled()
    mesh = page.locator(".mesh")
    mesh.focus()
    said = page.locator("[aria-live=polite]").first
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):  # the first one shows the cursor
        page.keyboard.press(key)
    rank = next(r for r in range(32) if MESH_JOB.place(r) == (1, 0, 1))
    said.get_by_text(
        f"Rank {rank} on {MESH_JOB.host(rank)}: pipeline 1, data 0, tensor 1;"
    ).wait_for()
    page.keyboard.press("Space")
    page.wait_for_url(f"**sel={rank}")
    page.keyboard.press("c")
    page.wait_for_url("**metric=own_ms**")
    values = {
        value["key"]: value for value in meshes.ask(f"runs/{MESH}/parallelism")["mesh"]["values"]
    }
    assert page.get_by_label("What colours the mesh").input_value() == "own_ms"
    assert "Self time" in mesh.get_attribute("aria-label")
    page.keyboard.press("t")
    table = page.get_by_role("region", name="The mesh as a table")
    first = table.locator("tbody tr").first.inner_text().split("\t")
    assert first[0] == f"Rank {MESH_SLOW}"
    assert [int(one) for one in first[2:5]] == list(MESH_JOB.place(MESH_SLOW))
    assert float(first[6].split()[0]) == pytest.approx(
        values["own_ms"]["values"][MESH_SLOW], rel=0.02
    )
    page.keyboard.press("t")
    mesh.wait_for()
    mesh.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/runs/{MESH}/ranks/{rank}")
    watched.check()


def test_bubble_and_stages_are_those_of_the_api(
    meshes: Site, open_mesh: Callable[..., Watched]
) -> None:
    watched = open_mesh(f"runs/{MESH}/parallelism")
    found = meshes.ask(f"runs/{MESH}/parallelism")["pipeline"]
    bars = watched.page.locator(".bubbles .bar")
    whole = watched.page.locator(".bubbletrack").first.bounding_box()["width"]
    for bar, share in zip(bars.all(), (found["idle_ratio"], found["ideal_ratio"]), strict=True):
        assert f"{share * 100:.0f} % idle" in bar.inner_text()
        assert bar.locator(".fall").bounding_box()["width"] == pytest.approx(share * whole, abs=2)
    assert watched.page.get_by_text("p = 4 ranks, m = 6 microbatches").is_visible()
    rows = watched.page.get_by_role("region", name="Stages of the pipeline").locator("tbody tr")
    for row, stage in zip(rows.all(), found["stages"], strict=True):
        text = row.inner_text()
        assert text.startswith(f"Stage {stage['stage']}")
        assert f"{stage['others_ratio']:.2f}{TIMES}" in text
        assert f"Rank {stage['longest_rank']}" in text
    watched.check()


def test_all_ranks_of_a_seeded_run_are_one_group(
    site: Site, open_page: Callable[..., Watched]
) -> None:
    watched = open_page(f"runs/{SLOW}/parallelism")
    groups = watched.page.get_by_role("region", name="Process groups by kind").locator("tbody tr")
    assert groups.count() == 1
    assert "all 8 ranks" in groups.first.inner_text()
    watched.page.keyboard.press("t")
    table = watched.page.get_by_role("region", name="The mesh as a table")
    assert table.locator("tbody tr").first.inner_text().startswith(f"Rank {SLOW_RANK}")
    watched.check()


def test_kinds_of_groups_that_were_cut_are_counted(
    meshes: Site, open_mesh: Callable[..., Watched]
) -> None:
    data = meshes.ask(f"runs/{MESH}/parallelism")
    assert data["families_capped"] is None
    data["families_capped"] = {"shown": len(data["families"]), "total": 90}
    watched = open_mesh("")
    path = re.compile(rf"/api/v1/runs/{MESH}/parallelism$")
    watched.page.route(path, lambda route: route.fulfill(json=data))
    watched.go(f"runs/{MESH}/parallelism")
    note = f"First {len(data['families'])} of 90 kinds of groups."
    watched.page.get_by_text(note, exact=True).wait_for()
    watched.check()
