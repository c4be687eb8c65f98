"""Photograph every page of the dashboard in both themes and at four widths, for a look by eye.

    python benchmarks/screenshots.py                               also `make screenshots`
    python benchmarks/screenshots.py --url http://127.0.0.1:8787 [--run RUN] [--only step,logs]
    python benchmarks/screenshots.py --url ... --run RUN --overview docs/overview.png

Without `--url` a server of its own gets runs that fill every page (`shown_runs.py`: real ones of
the reference trainer beside simulated ones), and each of them is photographed. A picture that is
there is not taken again, so that it resumes where it was stopped. With `--overview FILE` it takes
one picture of the run's overview for the README instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import shown_runs

from tests import capabilities
from tests.web.conftest import ARGUMENTS, serving
from tests.web.pages import of_all, of_run

CHROMIUM = capabilities.find("chromium")
THEMES = ("dark", "light")
HEIGHT, TALL = 900, 2400


def asking(url: str) -> Callable[[str], Any]:
    """Return what asks the API of a server."""

    def ask(path: str) -> Any:
        with urllib.request.urlopen(f"{url}/api/v1/{path}", timeout=10) as reply:
            return json.load(reply)

    return ask


def pages(ask: Callable[[str], Any], runs: list[str], before: str) -> Iterator[tuple[str, str]]:
    """Yield a name and a path for each page; those of further runs have their run's in front."""
    for run in runs:
        prefix = "" if run == runs[0] else f"{run}-"
        for name, path in of_run(ask, run):
            earlier = f"&a={before}" if name == "compare" and before and not prefix else ""
            yield f"{prefix}{name}", path + earlier
    yield from of_all(ask)


def settle(page: Page) -> None:
    """Wait until the page holds its data and its fonts."""
    page.locator("#verdict, .problem, main h1").first.wait_for(timeout=60_000)
    page.evaluate("document.fonts.ready.then(() => true)")
    # Parts mount when they come near the screen: a tall window brings them all.
    size = page.viewport_size or {"width": 1440, "height": HEIGHT}
    is_tall = page.locator(".logs").count() == 0
    if is_tall:
        page.set_viewport_size({"width": size["width"], "height": TALL})
    for _ in range(300):  # the policy of the page forbids wait_for_function
        if page.locator(".skeleton").count() == 0:
            break
        page.wait_for_timeout(100)
    page.wait_for_timeout(300)
    if is_tall:
        page.set_viewport_size(size)
    page.wait_for_timeout(200)


def photograph(browser: Browser, address: str, files: dict[int, Path], theme: Any) -> None:
    """Open a page once, and photograph it whole at each width."""
    context = browser.new_context(
        viewport={"width": max(files), "height": HEIGHT}, color_scheme=theme,
        reduced_motion="reduce",
    )  # fmt: skip
    page = context.new_page()
    page.on("console", lambda message: report(address, message.type, message.text))
    page.on("pageerror", lambda error: report(address, "error", str(error)))
    page.goto(address)
    for width in sorted(files, reverse=True):
        page.set_viewport_size({"width": width, "height": HEIGHT})
        settle(page)
        page.screenshot(path=files[width], full_page=True)
        print(files[width], flush=True)
    context.close()


reported: set[tuple[str, str]] = set()


def report(address: str, kind: str, text: str) -> None:
    if kind in {"error", "warning"} and (address, text) not in reported:
        reported.add((address, text))
        print(f"{address}: {kind}: {text}", file=sys.stderr)


def photograph_all(browser: Browser, url: str, chosen: argparse.Namespace, runs: list[str]) -> None:
    """Photograph what was chosen and is not there yet."""
    chosen.out.mkdir(parents=True, exist_ok=True)
    wanted = set(chosen.only.split(",")) - {""}
    widths = [int(width) for width in chosen.widths.split(",")]
    for name, path in pages(asking(url), runs, chosen.before):
        for theme in THEMES if not wanted or name in wanted else ():
            files = {width: chosen.out / f"{name}-{theme}-{width}.png" for width in widths}
            missing = {width: file for width, file in files.items() if not file.exists()}
            if missing:
                photograph(browser, f"{url}/{path}", missing, theme)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="", help="address of the server; default: one of its own")
    parser.add_argument("--run", default="", help="run id; default is the newest run")
    parser.add_argument("--out", type=Path, default=Path("artifacts/screenshots"))
    parser.add_argument("--before", default="", help="run to compare with; default by name")
    parser.add_argument("--only", default="", help="names of pages, separated by commas")
    parser.add_argument("--widths", default="420,1024,1440,2560", help="in pixels, with commas")
    parser.add_argument("--overview", type=Path, help="write one picture for the README here")
    chosen = parser.parse_args()
    with sync_playwright() as playwright, ExitStack() as stack:
        url = chosen.url.rstrip("/")
        if url:
            runs = [chosen.run or asking(url)("runs?limit=1")["runs"][0]["run_id"]]
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url = stack.enter_context(serving(folder, "--silent-after-seconds", "86400"))
            runs, chosen.before = shown_runs.fill(url), shown_runs.BEFORE
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        if chosen.overview:
            photograph(browser, f"{url}/runs/{runs[0]}", {1280: chosen.overview}, "dark")
            print(f"{chosen.overview}: {chosen.overview.stat().st_size:,} bytes")
            return
        photograph_all(browser, url, chosen, runs)


if __name__ == "__main__":
    main()
