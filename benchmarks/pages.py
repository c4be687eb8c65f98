"""Is every page whole in a real browser, whatever the size of the run and its state?

    python benchmarks/pages.py [--ranks 1,4,1024,8192] [--states live,ended] [--pages ranks,step]
    python benchmarks/pages.py --table

Every page in both themes, of runs of 1, 4, 1,024 and 8,192 ranks that are live, really trained (by
the reference trainer, of 1 and 4 ranks), ended, imported, without steps, partial (ranks that were
never heard of, batches missing, records lost), and with a server that does not answer; pages that
are of no single run with all of these runs, without any, and without an answer. All through a proxy
under a prefix of the path that the server does not know.
Of each: no error on the console, no request that leaves the origin, a strict policy, no violation
of the rules of accessibility (WCAG 2.2 A and AA), nothing wider than the window at 420 and 1440 px.
Resumes where it was stopped; results are in benchmarks/results/pages.jsonl, the table is written
to docs/pages.md. Exit code 1 if anything was found.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rows import RESULTS, ROOT, Key, Rows, code_label, newest
from screenshots import CHROMIUM, THEMES, asking, settle
from shown_runs import train

from rankscope import cli
from rankscope.wire import schema
from tests.agent.dumps import dump, entry
from tests.server import seed
from tests.web.accessibility import too_wide_px, violations
from tests.web.conftest import ARGUMENTS, Watched, serving, watch
from tests.web.pages import of_all, of_run
from tests.web.prefix import proxy
from tests.web.preflights import keep_two

KEYS = ("page", "ranks", "state", "theme")
RANKS = (1, 4, 1_024, 8_192)
STATES = ("live", "trained", "ended", "imported", "empty", "partial", "offline")
STATES_OF_ALL = ("live", "empty", "offline")  # of pages that are of no single run
WIDTHS = (420, 1440)
PREFIX = "/user/ana/proxy/8787"
STEPS = {1: 200, 4: 200, 1_024: 40, 8_192: 12}
MOST_TRAINED = 4  # processes that this machine can train on
CALLS = 6  # of each rank of an imported run
MEMBERS = 64  # of a group in one: a dump names all of them
NO_ANSWER = "net::ERR_FAILED"  # what the browser itself says of a request that was cut off
DOCS = ROOT / "docs" / "pages.md"


@dataclass(frozen=True)
class Cell:
    """One page of one run, or of none."""

    page: str
    ranks: int
    state: str
    path: str

    def key(self, theme: str) -> Key:
        return (self.page, self.ranks, self.state, theme)


def plan_of(run: str, ranks: int, **more: Any) -> seed.Plan:
    per_node = 512 if ranks > 1_024 else max(1, min(64, ranks // 2))
    steps = STEPS.get(ranks, 40)
    return seed.Plan(
        run_id=run, ranks=ranks, steps=steps, ranks_per_node=per_node, steps_per_batch=steps // 2,
        **more,
    )  # fmt: skip


def seed_live(url: str, ranks: int) -> None:
    seed.seed_run(url, **vars(plan_of("live", ranks, fault="slow_compute", end=False)))


def seed_trained(url: str, ranks: int) -> None:
    """Train on so many processes, one of which is slow."""
    train(url, "trained", ranks, "--steps", "120", "--fault", "slow_compute:rank=0,start=50")


def seed_ended(url: str, ranks: int) -> None:
    seed.seed_run(url, **vars(plan_of("ended", ranks, fault="crash")))


def seed_empty(url: str, ranks: int) -> None:
    """Send who the ranks are, and no step of them."""
    plan = plan_of("empty", ranks, fault="none", end=False)
    nodes = seed.make_nodes(plan)
    seed.register(plan, seed.make_steps(plan), nodes)
    for node in nodes:
        seed.post_body(url, seed.next_batch(plan.run_id, node))


def seed_partial(url: str, ranks: int) -> None:
    """Leave out every second node and one batch of the others; say that records were lost."""
    plan = plan_of("partial", ranks, fault="none", end=False)
    times, nodes = seed.make_steps(plan), seed.make_nodes(plan)
    seed.register(plan, times, nodes)
    for node in nodes[::2]:
        seed.post_body(url, seed.next_batch(plan.run_id, node))
        seed.add_steps(plan, times, node, 0, plan.steps // 3)
        seed.next_batch(plan.run_id, node)  # never arrives
        seed.add_steps(plan, times, node, plan.steps // 3, plan.steps)
        node.records.append(
            schema.Loss(
                attempt=0, rank=node.ranks[0], time_ns=time.time_ns(), source="collectives",
                reason="overwritten", count=412,
            )
        )  # fmt: skip
        seed.post_body(url, seed.next_batch(plan.run_id, node))


def seed_imported(url: str, ranks: int) -> None:
    """Import a Flight Recorder dump of each rank; the last one never came to the last call."""
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            first = rank - rank % MEMBERS
            group = f"[{', '.join(map(str, range(first, min(first + MEMBERS, ranks))))}]"
            calls = CALLS - (rank == ranks - 1 and ranks > 1)
            text = json.dumps(dump([entry(number) for number in range(calls)], group))
            Path(folder, f"dump_{rank}.json").write_text(text)
        if cli.main(["import", folder, "--run", "imported", "--server", url, "--json"]):
            raise RuntimeError(f"the dumps of {ranks} ranks were not imported")


SEEDS: dict[str, Callable[[str, int], None]] = {
    "live": seed_live, "trained": seed_trained, "ended": seed_ended, "imported": seed_imported,
    "empty": seed_empty, "partial": seed_partial,
}  # fmt: skip


def cells(url: str, ranks: int, states: Iterable[str]) -> Iterator[Cell]:
    """Yield all cells of a server with runs of this size; seeds the runs that are not there."""
    ask = asking(url)
    there = {run["run_id"] for run in ask("runs")["runs"]}
    keep_two(url, "live")
    for state in states:
        if state == "trained" and ranks > MOST_TRAINED:
            continue
        run = "ended" if state == "offline" else state
        if run not in there:
            began = time.monotonic()
            SEEDS[run](url, ranks)
            seed.wait_until_judged(url, 600)
            there.add(run)
            print(
                f"{ranks:>6} ranks, {run}: seeded in {time.monotonic() - began:.0f} s", flush=True
            )
        for name, path in of_run(ask, run):
            yield Cell(name, ranks, state, path)
        if state in STATES_OF_ALL and state != "empty":
            for name, path in of_all(ask):
                yield Cell(name, ranks, state, path)


def cells_without_runs(url: str) -> Iterator[Cell]:
    """Yield the pages that are of no single run, of a server that has none."""
    for name, path in (*of_all(asking(url)), ("compare", "compare")):
        yield Cell(name, 0, "empty", path)


def look(browser: Browser, origin: str, cell: Cell) -> Iterator[tuple[str, dict[str, Any]]]:
    """Open a page and yield what is wrong with it, theme by theme."""
    watched = watch(browser, origin)
    page = watched.page
    if cell.state == "offline":
        page.route("**/api/v1/**", lambda route: route.abort())
    began = time.monotonic()
    reply = page.goto(f"{origin}/{cell.path}")
    faults = policy_faults(reply.headers.get("content-security-policy", ""))
    try:
        settle(page)
        seconds = time.monotonic() - began
        for theme in THEMES:
            page.emulate_media(color_scheme=theme, reduced_motion="reduce")
            page.wait_for_timeout(100)
            found = [*faults, *faults_of(page), *faults_seen(watched, cell.state)]
            yield theme, {"problems": found, "seconds": round(seconds, 1),
                          "requests": len(watched.requests)}  # fmt: skip
    finally:
        watched.context.close()


def faults_of(page: Any) -> list[str]:
    """Return what is wrong with a page as it is shown now."""
    found = []
    for width in WIDTHS:
        over = too_wide_px(page, width)
        if over > 0:
            found.append(f"{over} px too wide at {width}")
    return found + [f"accessibility: {text}" for text in violations(page)]


def faults_seen(watched: Watched, state: str) -> list[str]:
    """Return what was reported since the page was opened."""
    said = [text for text in watched.problems if not (state == "offline" and NO_ANSWER in text)]
    return [*said, *(f"left the origin: {url}" for url in watched.strangers())]


def policy_faults(policy: str) -> list[str]:
    """Return why a content security policy is not strict."""
    parts = {
        name: rest for name, _, rest in (one.strip().partition(" ") for one in policy.split(";"))
    }
    strict = {
        "default-src": r"'self'", "script-src": r"'self' 'sha256-[\w+/=]+'", "style-src": r"'self'",
        "connect-src": r"'self'", "object-src": r"'none'", "frame-ancestors": r"'none'",
    }  # fmt: skip
    return [
        f"policy: {name} is {parts.get(name)!r}"
        for name, wanted in strict.items()
        if not re.fullmatch(wanted, parts.get(name, ""))
    ]


def run_all(chosen: argparse.Namespace, rows: Rows) -> None:
    """Look at what has no row yet; with `--again` also at what was not well."""
    wanted = set(chosen.pages.split(",")) - {""}
    done = {
        tuple(row[key] for key in KEYS)
        for row in rows.all()
        if not (chosen.again and row["problems"])
    }
    with sync_playwright() as playwright, ExitStack() as stack:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        stack.callback(browser.close)
        for ranks in (0, *map(int, chosen.ranks.split(","))):
            with ExitStack() as servers:
                folder = Path(servers.enter_context(tempfile.TemporaryDirectory()))
                if chosen.data:
                    folder = chosen.data / str(ranks)
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / "ready.json").unlink(missing_ok=True)
                url = servers.enter_context(serving(folder, "--silent-after-seconds", "86400"))
                origin = servers.enter_context(proxy(url, PREFIX))
                states = chosen.states.split(",")
                for cell in cells(url, ranks, states) if ranks else cells_without_runs(url):
                    is_known = all(cell.key(theme) in done for theme in THEMES)
                    if is_known or (wanted and cell.page not in wanted):
                        continue
                    for theme, values in look(browser, origin, cell):
                        rows.add(cell.key(theme), values)
                        print(f"{ranks:>6} {cell.state:<9}{cell.page:<14}{theme:<6}"
                              f"{values['seconds']:>6} s  {len(values['problems'])} problems",
                              *values["problems"], sep="\n    ", flush=True)  # fmt: skip


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return pages by ranks and state: how many of both themes are well."""
    rows = list(rows)
    columns = sorted({(row["ranks"], STATES.index(row["state"])) for row in rows})
    lines = [
        f"{len(rows):,} cells, {sum(not row['problems'] for row in rows):,} without a fault.",
        "",
        "| ranks | " + " | ".join(STATES) + " |",
        "|" + "---|" * (len(STATES) + 1),
    ]
    for ranks in sorted({ranks for ranks, _ in columns}):
        cells_of = []
        for state in STATES:
            mine = [row for row in rows if (row["ranks"], row["state"]) == (ranks, state)]
            good = sum(not row["problems"] for row in mine)
            pages = len({row["page"] for row in mine})
            text = f"{good} of {len(mine)}, {pages} pages" if mine else "-"
            cells_of.append(text)
        lines.append(f"| {f'{ranks:,}' if ranks else 'no run'} | " + " | ".join(cells_of) + " |")
    bad = [row for row in rows if row["problems"]]
    lines += [""] * bool(bad)
    lines += [
        f"- {row['page']}, {row['ranks']:,} ranks, {row['state']}, {row['theme']}: "
        f"{'; '.join(row['problems'])[:300]}"
        for row in bad
    ]
    return "\n".join(lines)


def write_docs(text: str, name: str) -> None:
    """Put what a benchmark found between its marks."""
    begin, end = f"<!-- made by benchmarks/{name}.py -->\n", f"<!-- end of {name} -->"
    before, _, rest = DOCS.read_text().partition(begin)
    DOCS.write_text(f"{before}{begin}\n{text}\n\n{rest[rest.index(end) :]}")


def main() -> int:
    """Look at what is missing, write the table, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="with commas between")
    parser.add_argument("--states", default=",".join(STATES), help="with commas between")
    parser.add_argument("--pages", default="", help="only these, with commas between")
    parser.add_argument("--again", action="store_true", help="also what was not well")
    parser.add_argument("--data", type=Path, help="folder that keeps the seeded runs")
    parser.add_argument("--label", default=code_label("web"), help="of the code")
    parser.add_argument("--out", type=Path, default=RESULTS / "pages.jsonl")
    parser.add_argument("--table", action="store_true", help="look at nothing")
    chosen = parser.parse_args()
    rows = Rows(chosen.out, KEYS, chosen.label)
    if not chosen.table:
        run_all(chosen, rows)
    found = newest(chosen.out, KEYS)
    write_docs(table(found), "pages")
    print(table(found))
    return int(any(row["problems"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
