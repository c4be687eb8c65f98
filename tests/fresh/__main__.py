"""The README's two commands on bare systems: nothing there but Python, git and make.

    python -m tests.fresh                     the smallest system, `make demo`
    python -m tests.fresh --all --test        every row, and `make test` where it is hardest
    python -m tests.fresh --row root --seeds 3    and the demo of each fault, 24 in all
    python -m tests.fresh --row ascii --test --tests "tests/preflight"
    python -m tests.fresh --list

Needs root: each row is a Debian by mmdebstrap, unpacked for it, in namespaces of its own. What is
committed is tried. `--all` leaves out `make test` in a row of which another one takes away more:
the table shows that one's. A row that was done at the same tree is not run again (--again does),
so an interrupted table goes on where it stopped. Results: benchmarks/results/fresh.jsonl; table:
docs/fresh.md; output of the commands: artifacts/fresh. Exit codes: 0 all right, 1 not all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tests import capabilities
from tests.fresh.rows import ROWS, SMALLEST, Row, harder
from tests.fresh.system import CannotBuild, System, unpacked
from tests.tree import tree

CHECKOUT = Path(__file__).parents[2]
RESULTS = CHECKOUT / "benchmarks" / "results" / "fresh.jsonl"
TABLE = CHECKOUT / "docs" / "fresh.md"
LOGS = CHECKOUT / "artifacts" / "fresh"
DEMO, TEST = "demo", "test"
FAULTS = ("slow_compute", "slow_data", "hang", "crash")
STRATEGIES = ("ddp", "pipeline")
INSTALL_LIMIT_S, DEMO_LIMIT_S, TEST_LIMIT_S = 1800.0, 1800.0, 4 * 3600.0
_TRUTH = re.compile(r"The truth: .*?The verdict is (?:right|wrong)\.", re.DOTALL)
_CLOSING = re.compile(r"^\d+ passed, \d+ failed, \d+ skipped$", re.MULTILINE)
_SKIP = re.compile(r"^ {0,5}(\d+)  (\S.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """What became of one command in one row."""

    row: str
    part: str  # demo, with its flags if there are any, or test
    tree: str  # of what was tried
    tests: str  # what of the tests; empty: all
    code: int
    seconds: float
    told: str  # the verdict, or the closing line
    skips: dict[str, int] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Return whether the command did what the README says."""
        return self.code == 0 and bool(self.told)

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what was tried where."""
        return self.row, self.part, self.tests


def results() -> list[Result]:
    """Return all results that were kept, oldest first."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return [Result(**json.loads(line)) for line in lines]


def demos(seeds: int) -> list[str]:
    """Return the demo of each fault with each strategy, so many times."""
    return [
        f"{DEMO} --fault {fault} --strategy {strategy} --seed {seed}"
        for seed, fault, strategy in itertools.product(range(1, seeds + 1), FAULTS, STRATEGIES)
    ]


def try_row(
    row: Row, parts: Sequence[str], tests: str, name: str, hold: Path | None = None
) -> Iterator[Result]:
    """Run the commands of the README in one row; yield each result as it comes.

    With `hold` what the demo needs is installed first, and the rest waits until there is that file.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    with unpacked(row, CHECKOUT) as system:
        folder = shlex.quote(row.folder)
        enter = f"git clone --quiet /src.git {folder} && cd {folder} &&"
        torch = f" TORCH={shlex.quote(row.torch)}" if row.torch else ""
        started = time.monotonic()
        if not row.ipv6:
            log = LOGS / f"{row.name}.install.log"
            system.run(f"{enter} make install{torch}", log, INSTALL_LIMIT_S, online=True)
            enter = f"cd {folder} &&"
        if hold is not None:
            log = LOGS / f"{row.name}.ready.log"
            system.run(f"{enter} make .venv/.ready{torch}", log, INSTALL_LIMIT_S, online=True)
            enter = f"cd {folder} &&"
            while not hold.exists() and hold.parent.exists():
                time.sleep(1.0)
        for part in parts:
            try_part = _try_test if part == TEST else _try_demo
            result = try_part(system, row, part, f"{enter} make{torch}", tests)
            seconds = round(time.monotonic() - started, 1)
            yield replace(result, tree=name, seconds=seconds)
            enter, started = f"cd {folder} &&", time.monotonic()


def _try_demo(system: System, row: Row, part: str, make: str, _: str) -> Result:
    flags = "--once" + part.removeprefix(DEMO)
    code, text = _run(system, f"{make} demo DEMO={shlex.quote(flags)}", row, part, DEMO_LIMIT_S)
    truth = _TRUTH.search(text)
    verdict = " ".join(truth[0].split()) if truth else _last_line(text)
    return Result(row.name, part, "", "", code, 0.0, verdict)


def _try_test(system: System, row: Row, part: str, make: str, tests: str) -> Result:
    words = f" TESTS={shlex.quote(tests)}" if tests else ""
    code, text = _run(system, f"{make} test{words}", row, part, TEST_LIMIT_S)
    closings, (_, _, table) = _CLOSING.findall(text), text.rpartition("\nSkipped, and ")
    skips = {reason: int(count) for count, reason in _SKIP.findall(table)}
    told = closings[-1] if closings else ""
    return Result(row.name, part, "", tests, code, 0.0, told, skips)


def _run(system: System, command: str, row: Row, part: str, limit_s: float) -> tuple[int, str]:
    log = LOGS / f"{row.name}.{part.replace(' --', '.').replace(' ', '-')}.log"
    code = system.run(command, log, limit_s)
    return code, log.read_text(errors="replace").replace("\r\n", "\n")


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def table(kept: Sequence[Result]) -> str:
    """Return the page: the latest result of each row."""
    lines = [
        "# On a fresh machine",
        "",
        "What the two commands of the README do on systems that have nothing but Python, git and",
        "make. Made by",
        "",
        "```sh",
        'make fresh FRESH="--all --test"',
        "```",
        "",
        "as root; each row is a Debian of its own, unpacked for it. Seconds are from the clone to",
        "the end of the command, downloads included. A column names the tree that was tried. Where",
        "a row names another one, that is the same system with more taken away, and it was not",
        "tried itself, or went wrong before.",
        "",
        "| system | `make demo` | s | `make test` | skipped | tree |",
        "|---|---|---|---|---|---|",
    ]
    skips: dict[str, set[str]] = {}
    newest = {result.key: result for result in kept}
    tested = {one.row: one for one in kept if one.key == (one.row, TEST, "")}
    at = {id(one): place for place, one in enumerate(kept)}
    for row in ROWS:
        demo, own = newest.get((row.name, DEMO, "")), tested.get(row.name)
        tried = [tested[one.name] for one in (row, *harder(row)) if one.name in tested]
        test = (
            own if own and own.is_right else max(tried, key=lambda one: at[id(one)], default=None)
        )
        where = f" in **{test.row}**" if test and test is not own else ""
        for reason in test.skips if test and not where else ():
            skips.setdefault(reason, set()).add(row.name)
        latest = own if own and not where else demo
        cells = [
            f"**{row.name}**: {row.words()}",
            _cell(demo),
            "" if demo is None else f"{demo.seconds:.0f}",
            _test_cell(test) + where,
            "" if test is None or where else str(sum(test.skips.values())),
            "" if latest is None else f"`{latest.tree}`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if skips:
        lines += ["", "Why tests were skipped:", ""]
    for reason, names in sorted(skips.items()):
        lines.append(f"- {reason} ({', '.join(sorted(names))})")
    return "\n".join([*lines, *_demo_lines(newest.values())]) + "\n"


def _demo_lines(newest: Iterable[Result]) -> list[str]:
    """Return the table of the demos of each fault."""
    tried = [result for result in newest if result.part.startswith(f"{DEMO} ")]
    if not tried:
        return []
    lines = [
        "",
        "The demo of each fault and strategy, with the flag `--seeds 3`:",
        "",
        "| system | right | s, median and most | tree |",
        "|---|---|---|---|",
    ]
    for name in dict.fromkeys(result.row for result in tried):
        mine = [result for result in tried if result.row == name]
        seconds = [result.seconds for result in mine]
        right = sum(result.is_right for result in mine)
        trees = ", ".join(f"`{tree}`" for tree in sorted({result.tree for result in mine}))
        lines.append(
            f"| **{name}** | {right} of {len(mine)} | {statistics.median(seconds):.0f}, "
            f"{max(seconds):.0f} | {trees} |"
        )
    wrong = [f"- {r.row}, `{r.part}`: {r.told}" for r in tried if not r.is_right]
    return [*lines, "", *wrong] if wrong else lines


def _cell(result: Result | None) -> str:
    if result is None:
        return "not tried"
    return "right" if result.is_right else f"**wrong** ({result.told})"


def _test_cell(result: Result | None) -> str:
    if result is None or result.is_right:
        return _cell(result)
    return f"**{result.told or 'no end'}**"


def keep(result: Result) -> None:
    """Append a result, and write the page again."""
    with RESULTS.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")
    TABLE.write_text(table(results()))


def _parser() -> argparse.ArgumentParser:
    words, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=words, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="all rows")
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS], default=[])
    parser.add_argument("--test", action="store_true", help="`make test` too, some hours a row")
    parser.add_argument("--seeds", type=int, default=0, help="of the demo of each fault")
    parser.add_argument("--tests", default="", help="only these of the tests, as TESTS of make")
    parser.add_argument("--again", action="store_true", help="also what was done at this tree")
    parser.add_argument("--list", action="store_true", help="show the rows")
    parser.add_argument("--hold", type=Path, help="install, and wait for this file")
    parser.add_argument("--unkept", action="store_true", help="write no results")
    return parser


def main() -> int:
    """Try the chosen rows."""
    chosen = _parser().parse_args()
    if chosen.list:
        sys.stdout.write("".join(f"{row.name:20}{row.words()}\n" for row in ROWS))
        return 0
    why = capabilities.reason("bare-root")
    if why:
        sys.stdout.write(f"{why}: {capabilities.BY_NAME['bare-root'].enable()}\n")
        return 1
    easy = {row.name for row in ROWS if chosen.all and row != SMALLEST and harder(row)}
    rows = ROWS if chosen.all else [row for row in ROWS if row.name in chosen.row] or [SMALLEST]
    parts = [DEMO, *demos(chosen.seeds), *[TEST] * chosen.test]
    name = tree()
    known = [] if chosen.again else results()
    done = {result.key for result in known if result.tree == name and result.is_right}
    is_right = True
    for row in rows:
        mine = parts if row.name not in easy else [part for part in parts if part != TEST]
        wanted = [p for p in mine if (row.name, p, chosen.tests * (p == TEST)) not in done]
        if not wanted:
            sys.stdout.write(f"{row.name}: done at this tree\n")
            continue
        sys.stdout.write(f"{row.name}: {row.words()}\n")
        sys.stdout.flush()
        try:
            for result in try_row(row, wanted, chosen.tests, name, chosen.hold):
                is_right &= result.is_right
                word = "right" if result.is_right else f"WRONG (exit code {result.code})"
                sys.stdout.write(f"  {result.part} {word}, {result.seconds:.0f} s: {result.told}\n")
                sys.stdout.flush()
                if not chosen.unkept:
                    keep(result)
        except CannotBuild as error:
            is_right = False
            sys.stdout.write(f"  {error}\n")
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
