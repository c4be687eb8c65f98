"""All checks and all tests, whatever became of the others; one summary.

The checks run beside the tests, which several processes share (`tests/lanes.py`).

    python -m tests.run check                    lint, types, import contracts, vendored files
    python -m tests.run test [WORDS ...]         the same and the tests, or what pytest selects
    python -m tests.run all                      the same and all tests, however long they take
    python -m tests.run quick                    what takes a moment within a process, and one run
    python -m tests.run --fresh test             and the first command in a bare system

`test` takes a quarter of an hour on two processors: of what is long (tests/lanes.py) it runs a part
that each commit draws anew, and says how much it left out. `all` resumes where it was stopped at
the same state of the code, and writes what became of it to tests/all.json, which is committed.

Where a few tests failed, those run once more, alone. One that passes then counts as passed and is
shown as unsteady: a bug to be found, not a reason to distrust all others.

It ends with the slowest tests and files, then the skips, each with the command that would make it
run, then what was unsteady and what failed, then the line "N passed, N failed, N skipped". A check
counts as one test. Exit codes: 0 nothing failed, 1 something did, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tests import capabilities, integrations, outcomes
from tests.lanes import LEFT_OUT
from tests.outcomes import Outcome
from tests.tree import tree

ROOT = Path(__file__).parents[1]
CLOSING = ROOT / "artifacts" / "closing"  # the last line, for who ran this below something else
ALL = ROOT / "tests" / "all.json"  # what became of all tests when they last ran
MINUTES = 11.0  # of tests; what is installed and tried beside them takes the rest of 15
_BIN = Path(sys.executable).parent
_NOTHING_COLLECTED = 5
_SLOWEST, _SLOW = 25, 1.0  # as many are listed, if they take as many seconds
_MOST_UNSTEADY = 3  # failures in one group; more than that are no accident


@dataclass(frozen=True)
class Check:
    """A command that is right if it ends with 0; counted as one test."""

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """Tests that run in one call of pytest."""

    name: str
    words: tuple[str, ...]
    in_user_namespace: bool = False  # of an ordinary user, who is "root" there
    root: Path = ROOT  # what the names of its tests start from
    kept: Path | None = None  # outcomes, where what passed does not run again


CHECKS = (
    Check("ruff check", ("ruff", "check", ".")),
    Check("ruff format", ("ruff", "format", "--check", ".")),
    Check("mypy", ("mypy",)),
    Check("import contracts", ("lint-imports",)),
    Check("vendored files", ("python", ".ci/vendor_web.py", "check")),
    Check("recipe of the image", ("hadolint", "deploy/container/Dockerfile")),
    Check(
        "schema of the compose files",
        (
            "check-jsonschema",
            "--builtin-schema",
            "vendor.compose-spec",
            "deploy/container/compose.yaml",
            "deploy/container/fleet.yaml",
        ),
    ),
    Check("types, lint and units of the web", (".ci/check-web",), needs=("node",)),
)
FRESH = Check("make fresh", ("make", "fresh", "FRESH=--again --unkept"), needs=("bare-root",))
# Real ranks wait for each other half of the time: more of them at once than there are processors.
_LANES = ("-p", "tests.lanes", "--lanes", str(min(8, 1 + (os.cpu_count() or 1))))


def groups(minutes: float = 0.0, kept: Path | None = None) -> list[Group]:
    """Return all tests, within so many minutes or (0) all of what is long, too.

    Hosts of namespaces are a group where only a user namespace allows them.
    """
    lanes = (*_LANES, "--minutes", str(minutes), *(("--remember",) if kept else ()))
    if not _needs_user_namespace():
        return [Group("all tests", (*lanes, "tests"), kept=kept)]
    laboratory = kept.with_suffix(".laboratory.jsonl") if kept else None
    return [
        Group("all tests", (*lanes, "-m", "not laboratory", "tests"), kept=kept),
        Group(
            "laboratory", (*lanes, "-m", "laboratory", "tests/preflight"), in_user_namespace=True,
            kept=laboratory,
        ),
    ]  # fmt: skip


def _needs_user_namespace() -> bool:
    return os.geteuid() != 0 and not capabilities.lacks("user-namespaces")


def run_check(check: Check, *, is_beside: bool = False) -> list[Outcome]:
    """Run one check; `is_beside` something else, its output comes at its end."""
    for name in check.needs:
        why = capabilities.reason(name)
        if why:
            is_required = name in capabilities.required()
            return [Outcome(check.name, "failed" if is_required else "skipped", why)]
    code = _call(check.name, check.command, is_beside=is_beside)
    return [Outcome(check.name, "passed" if code == 0 else "failed")]


def run_group(group: Group) -> list[Outcome]:
    """Run one group; one that died or found no test is a failure of its own."""
    found = _run(group)
    failed = [outcome.name for outcome in found if outcome.state == "failed"]
    if not 0 < len(failed) <= _MOST_UNSTEADY or not all("::" in name for name in failed):
        return found
    parts = (name.partition("::") for name in failed)  # a name may hold an address
    tests = tuple(f"{group.root / path}{colons}{name}" for path, colons, name in parts)
    again = _run(replace(group, name=f"{group.name}, once more", words=tests, kept=None))
    passed = {outcome.name for outcome in again if outcome.state == "passed"}
    return [
        replace(outcome, state="passed", is_unsteady=True) if outcome.name in passed else outcome
        for outcome in found
    ]


def _run(group: Group) -> list[Outcome]:
    with tempfile.TemporaryDirectory(prefix="rankscope-tests.") as folder:
        path = group.kept or Path(folder) / "outcomes.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        command = (
            str(_BIN / "python"), "-m", "pytest", f"--rootdir={group.root}",
            "-p", "tests.outcomes", f"--outcomes={path}", *(("--resume",) if group.kept else ()),
        )  # fmt: skip
        prefix = capabilities.IN_USER_NAMESPACE if group.in_user_namespace else ()
        code = _call(group.name, (*prefix, *command, *group.words))
        found, has_ended = outcomes.read(path)
    is_nothing_left = code == _NOTHING_COLLECTED and bool(group.kept) and bool(found)
    if (code == _NOTHING_COLLECTED and not is_nothing_left) or not found:
        found.append(Outcome(group.name, "failed", "no test was found"))
    elif not has_ended or not (code == 0 or is_nothing_left or any(map(_has_failed, found))):
        found.append(Outcome(group.name, "failed", f"pytest ended early, with {code}"))
    return found


def _has_failed(outcome: Outcome) -> bool:
    return outcome.state == "failed"


def _call(name: str, command: Sequence[str], *, is_beside: bool = False) -> int:
    title = f"\n== {name}: {shlex.join(command)}\n"
    environ = os.environ | {"PATH": f"{_BIN}{os.pathsep}{capabilities.search_path()}"}
    # Containers often set it; then each of some thousand processes compiles what it imports.
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if is_beside:
        done = subprocess.run(
            ("nice", *command), cwd=ROOT, env=environ, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        sys.stdout.flush()
        sys.stdout.buffer.write(title.encode() + done.stdout)  # bytes: the terminal may be ASCII
        sys.stdout.flush()
        return done.returncode
    sys.stdout.write(title)
    sys.stdout.flush()
    process = subprocess.Popen(command, cwd=ROOT, env=environ)
    try:
        return process.wait()
    except KeyboardInterrupt:  # it was told too: let it say what it knows
        process.wait()
        raise


def summary(found: Sequence[Outcome]) -> str:
    """Return the slowest tests and files, the table of skips, the failures and the closing line."""
    lines: list[str] = []
    by_test = {outcome.name: outcome.seconds for outcome in found}
    by_file: dict[str, float] = defaultdict(float)
    for name, seconds in by_test.items():
        by_file[name.partition("::")[0]] += seconds
    lines += _slowest("Slowest tests", by_test) + _slowest("Slowest files", by_file)
    skips = Counter(outcome.reason for outcome in found if outcome.state == "skipped")
    if skips:
        lines += ["", "Skipped, and what would make it run:"]
    for reason, count in skips.most_common():
        lines.append(f"{count:6}  {reason}")
        if reason == LEFT_OUT:
            lines.append(f"{'':6}    make test-all{_last_time()}")
        capability = capabilities.of_reason(reason)
        if capability is not None and capability.enable():
            lines.append(f"{'':6}    {capability.enable()}")
    unsteady = [outcome.name for outcome in found if outcome.is_unsteady]
    if unsteady:
        lines += ["", "Unsteady (failed, then passed alone; find out why):"]
    lines += [f"  {name}" for name in unsteady]
    failures = [outcome for outcome in found if outcome.state == "failed"]
    if failures:
        lines += ["", "Failed:"]
    lines += [f"  {f.name}{': ' if f.reason else ''}{f.reason}" for f in failures]
    return "\n".join([*lines, "", closing(found)])


def _last_time() -> str:
    """Return what became of all tests when they last ran, in words."""
    if not ALL.exists():
        return ""
    last = json.loads(ALL.read_text())
    took = f", {last['minutes']:.0f} min on {last['cores']} processors" if last["minutes"] else ""
    return f" (last at {last['tree']}, {last['date']}: {last['closing']}{took})"


def _write_all(found: Sequence[Outcome], minutes: float | None) -> None:
    skips = Counter(outcome.reason for outcome in found if outcome.state == "skipped")
    what = {
        "tree": tree(), "date": datetime.date.today().isoformat(), "cores": os.cpu_count(),
        "minutes": minutes and round(minutes, 1),  # null: it was stopped and went on
        "closing": closing(found),
        "failed": sorted(outcome.name for outcome in found if outcome.state == "failed"),
        "unsteady": sorted(outcome.name for outcome in found if outcome.is_unsteady),
        "skipped": dict(skips.most_common()),
    }  # fmt: skip
    ALL.write_text(json.dumps(what, indent=1) + "\n")
    integrations.remember(found)


def _slowest(title: str, seconds: Mapping[str, float]) -> list[str]:
    slow = [(took, name) for name, took in seconds.items() if took >= _SLOW]
    slow.sort(reverse=True)
    heading = ["", f"{title}, in seconds:"] if slow else []
    return [*heading, *(f"{took:6.0f}  {name}" for took, name in slow[:_SLOWEST])]


def closing(found: Sequence[Outcome]) -> str:
    """Return the last line."""
    states = Counter(outcome.state for outcome in found)
    return ", ".join(f"{states[state]} {state}" for state in ("passed", "failed", "skipped"))


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="also `make fresh`")
    parser.add_argument("what", choices=("check", "quick", "test", "all"))
    parser.add_argument("words", nargs=argparse.REMAINDER, help="for pytest, in place of all tests")
    chosen = parser.parse_args()
    wanted: list[Group] = []
    if chosen.words:
        wanted = [Group("chosen", tuple(chosen.words))]
    elif chosen.what == "quick":
        wanted = [Group("quick tests", (*_LANES, "--quick", "tests"))]
    elif chosen.what == "test":
        wanted = groups(MINUTES)
    elif chosen.what == "all":
        wanted = groups(kept=CLOSING.with_name("all") / f"{tree()}.jsonl")
    is_resumed = any(group.kept and group.kept.exists() for group in wanted)
    started = time.monotonic()
    found: list[Outcome] = []
    code = 0
    beside = ThreadPoolExecutor(1)  # most checks take one processor
    try:
        with _fresh_beside(beside, is_wanted=chosen.fresh) as later:
            checks = CHECKS if chosen.what != "quick" else ()
            later += [beside.submit(run_check, check, is_beside=True) for check in checks]
            for group in wanted:
                found += run_group(group)
        for check in later:
            found += check.result()
    except KeyboardInterrupt:
        code = 130
    finally:
        beside.shutdown(cancel_futures=True)
    text = summary(found)
    CLOSING.parent.mkdir(exist_ok=True)
    CLOSING.write_text(closing(found) + "\n")
    if chosen.what == "all" and not chosen.words and code == 0:
        _write_all(found, None if is_resumed else (time.monotonic() - started) / 60.0)
    sys.stdout.write(text + "\n")
    return code or int(any(outcome.state == "failed" for outcome in found))


@contextlib.contextmanager
def _fresh_beside(beside: Executor, *, is_wanted: bool) -> Iterator[list[Future[list[Outcome]]]]:
    """Build and install the bare system beside the tests; its command waits until they are over."""
    with tempfile.TemporaryDirectory(prefix="rankscope-hold.") as folder:
        hold = Path(folder) / "go"
        command = (*FRESH.command[:-1], f"{FRESH.command[-1]} --hold {hold}")
        fresh = replace(FRESH, command=command)
        own = ThreadPoolExecutor(1)
        later = [own.submit(run_check, fresh, is_beside=True)] if is_wanted else []
        try:
            yield list(later)
        finally:
            hold.touch()
            for check in later:
                check.result()
            own.shutdown()


if __name__ == "__main__":
    sys.exit(main())
