"""All checks and all tests: each group runs whatever became of the others; one summary.

The checks run beside the first group, which needs no quiet machine.

    python -m tests.run check                    lint, types, import contracts, vendored files
    python -m tests.run test [WORDS ...]         the same and all tests, or what pytest selects
    python -m tests.run --fresh test             and the first command in a bare system

Where a few tests of a group failed, those run once more, alone. One that passes then counts as
passed and is told as unsteady: a bug to be found, not a reason to distrust all others.

It ends with the slowest tests and files, then the skips, each with the command that would make it
run, then what was unsteady and what failed, then the line "N passed, N failed, N skipped". A check
counts as one test. Exit codes: 0 nothing failed, 1 something did, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tests import capabilities, outcomes
from tests.outcomes import Outcome

ROOT = Path(__file__).parents[1]
CLOSING = ROOT / "artifacts" / "closing"  # the last line, for who ran this below something else
_BIN = Path(sys.executable).parent
_NOTHING_COLLECTED = 5
_SLOWEST, _SLOW = 30, 1.0  # as many are listed, if they take as many seconds
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


CHECKS = (
    Check("ruff check", ("ruff", "check", ".")),
    Check("ruff format", ("ruff", "format", "--check", ".")),
    Check("mypy", ("mypy",)),
    Check("import contracts", ("lint-imports",)),
    Check("vendored files", ("python", ".ci/vendor_web.py", "check")),
    Check("types, lint and units of the web", (".ci/check-web",), needs=("node",)),
)
FRESH = Check("make fresh", ("make", "fresh", "FRESH=--again --unkept"), needs=("bare-root",))

# Tests of one process that need no quiet machine: as many at once as there are processors.
ALONE = (
    "tests/analysis", "tests/book", "tests/score", "tests/server", "tests/simulator",
    "tests/preflight",
)  # fmt: skip
# Hosts of namespaces: several laboratories at once, by themselves.
LABORATORY = (
    "tests/preflight/test_laboratory.py", "tests/preflight/test_choice_truth.py",
    "tests/preflight/test_preflight_over_a_server.py",
    "tests/preflight/smoke/test_smoke_laboratory.py",
)  # fmt: skip
# Real agents of preflight and their torch, by themselves too.
AGENTS = (
    "tests/preflight/test_preflight_alive.py", "tests/preflight/smoke",
    "tests/preflight/board/test_ssh.py",
)  # fmt: skip


# Real ranks wait for each other half of the time: more of them at once than there are processors.
_AT_ONCE = min(8, 1 + (os.cpu_count() or 1))


def _without(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"--ignore={path}" for path in paths)


GROUPS = (
    Group(
        "one process",
        ("--numprocesses", "logical", "--maxprocesses", "8", *ALONE,
         *_without((*LABORATORY, *AGENTS))),
    ),
    Group("laboratory of preflight", LABORATORY, in_user_namespace=True),
    Group("agents of preflight", (*AGENTS, *_without(LABORATORY))),
    Group(
        "runs",
        ("--numprocesses", str(_AT_ONCE), "--dist", "worksteal", "-m", "not quiet",
         *_without(ALONE)),
    ),
    Group("quiet runs", ("-m", "quiet", *_without(ALONE))),
)  # fmt: skip


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
    tests = tuple(str(group.root / name) for name in failed)
    again = _run(replace(group, name=f"{group.name}, once more", words=tests))
    passed = {outcome.name for outcome in again if outcome.state == "passed"}
    return [
        replace(outcome, state="passed", is_unsteady=True) if outcome.name in passed else outcome
        for outcome in found
    ]


def _run(group: Group) -> list[Outcome]:
    with tempfile.TemporaryDirectory(prefix="rankscope-tests.") as folder:
        path = Path(folder) / "outcomes.jsonl"
        command = (
            str(_BIN / "python"), "-m", "pytest", f"--rootdir={group.root}",
            "-p", "tests.outcomes", f"--outcomes={path}",
        )  # fmt: skip
        code = _call(group.name, (*_prefix(group), *command, *group.words))
        found, has_ended = outcomes.read(path)
    if code == _NOTHING_COLLECTED or not found:
        found.append(Outcome(group.name, "failed", "no test was found"))
    elif not has_ended or (code != 0 and not any(o.state == "failed" for o in found)):
        found.append(Outcome(group.name, "failed", f"pytest ended early, with {code}"))
    return found


def _prefix(group: Group) -> tuple[str, ...]:
    """Return what puts a group into a user namespace where it gains from it."""
    if not group.in_user_namespace or os.geteuid() == 0 or capabilities.lacks("user-namespaces"):
        return ()
    return capabilities.IN_USER_NAMESPACE


def _call(name: str, command: Sequence[str], *, is_beside: bool = False) -> int:
    title = f"\n== {name}: {shlex.join(command)}\n"
    environ = os.environ | {"PATH": f"{_BIN}{os.pathsep}{capabilities.search_path()}"}
    if is_beside:
        done = subprocess.run(
            command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            check=False,
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
    parser.add_argument("--fresh", action="store_true", help="also `make fresh`, at the end")
    parser.add_argument("what", choices=("check", "test"))
    parser.add_argument("words", nargs=argparse.REMAINDER, help="for pytest, in place of all tests")
    chosen = parser.parse_args()
    groups: Sequence[Group] = ()
    if chosen.what == "test":
        groups = (Group("chosen", tuple(chosen.words)),) if chosen.words else GROUPS
    found: list[Outcome] = []
    code = 0
    beside = ThreadPoolExecutor(1)  # most checks take one processor
    try:
        checks = [beside.submit(run_check, check, is_beside=True) for check in CHECKS]
        for group in groups:
            found += run_group(group)
        for check in checks:
            found += check.result()
        if chosen.fresh:
            found += run_check(FRESH)
    except KeyboardInterrupt:
        code = 130
    finally:
        beside.shutdown(cancel_futures=True)
    text = summary(found)
    CLOSING.parent.mkdir(exist_ok=True)
    CLOSING.write_text(closing(found) + "\n")
    sys.stdout.write(text + "\n")
    return code or int(any(outcome.state == "failed" for outcome in found))


if __name__ == "__main__":
    sys.exit(main())
