"""Preflight in the laboratory under one fault: what each node answered, what is wrong with it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from rankscope.preflight.model import CheckFinding, LaunchVerdict
from rankscope.preflight.verdict.engine import ABSENCES, open_questions
from tests.capabilities import NOBODY, is_root
from tests.preflight.faults import BY_NAME, Expected, Fault
from tests.preflight.injections_machine import training_script
from tests.preflight.nslab import Lab, reexec_in_userns
from tests.preflight.scene import Mode, Scene, base_environment

ROOT = Path(__file__).parents[2]
_LIGHT = "light"  # directory of the packages without torch
_TIMED = frozenset(("net.latency", "net.jitter", "net.loss", "net.bandwidth", "coll.pair"))
LIMIT_S = 90.0  # of one preflight, far above what any takes
_PACKAGES = (
    "msgspec", "psutil", "numpy", "pynvml", "rich", "markdown_it", "mdurl", "pygments",
    "urllib3",
    *(("backports.zstd",) if sys.version_info < (3, 14) else ()),
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What one node's preflight said."""

    node: str
    exit_code: int | None  # None: it had to be killed
    elapsed_s: float
    verdict: LaunchVerdict | None
    screen: str

    @property
    def loud(self) -> tuple[CheckFinding, ...]:
        """Return what it complains about."""
        return self.verdict.findings if self.verdict is not None else ()


@dataclass(frozen=True)
class Trial:
    """All answers of one run."""

    fault: Fault
    answers: tuple[Answer, ...]

    @property
    def elapsed_s(self) -> float:
        """Return when the last node had answered."""
        return max(answer.elapsed_s for answer in self.answers)


@dataclass(frozen=True)
class Way:
    """How preflight is started."""

    mode: Mode = "static"
    options: str = ""  # beside those of the fault
    skip: tuple[str, ...] = ()  # checks to be left out
    is_user: bool = False  # as an ordinary user
    has_torch: bool = True
    is_forked: bool = True  # else with the imports, for programs beside it that begin with theirs
    num_hosts: int = 3
    environment: dict[str, str] = field(default_factory=dict)


def attempt(fault: Fault, way: Way | None = None) -> Trial:
    """Break a laboratory and run preflight on all its hosts at once."""
    way = way or Way()
    way = replace(
        way,
        mode=fault.mode if way.mode == "static" else way.mode,
        is_user=way.is_user or fault.is_user,
        has_torch=way.has_torch or fault.needs_torch,
    )
    with Lab(
        way.num_hosts, wire=fault.wire, mtu=fault.mtu, net=fault.net, base=base_environment()
    ) as lab:
        scene = Scene(lab, way.mode)
        fault.build(scene)
        return ask_all(scene, fault, way)


def ask_all(scene: Scene, fault: Fault, way: Way) -> Trial:
    """Run preflight on all hosts of a scene at once."""
    if not way.has_torch:
        _make_light(scene.lab)
    if way.is_user:
        reveal(scene.lab)
    present = [number for number in scene.everywhere if number not in scene.missing]
    with ThreadPoolExecutor(len(present)) as pool:
        answers = list(pool.map(lambda number: _ask(scene, number, fault, way), present))
    return Trial(fault, tuple(answers))


def _ask(scene: Scene, number: int, fault: Fault, way: Way) -> Answer:
    node, lab = scene.lab.names[number], scene.lab
    document = scene.answers / f"{node}.json"
    given = f"{fault.options} {way.options}".format(
        shared=scene.shared, script=training_script(scene)
    )
    document.unlink(missing_ok=True)
    nodes = scene.nodes.get(number, ",".join(lab.names))
    argv = [*_interpreter(way), "-m", "rankscope", "preflight"]
    argv += ["--nodes", nodes] if nodes else []  # else as the launch says it
    argv += ["--json", str(document), *shlex.split(given)]
    argv += ["--skip", ",".join(way.skip)] if way.skip else []
    started = time.monotonic()
    environment = {**lab.environment(number), **way.environment, **_python_path(lab, number, way)}
    if way.is_user:  # root's is closed to it, and that would be a true finding
        home = scene.answers / f"home.{node}"
        home.mkdir(exist_ok=True)
        home.chmod(0o777)
        environment["HOME"] = str(home)
    start = scene.run_preflight if way.is_forked else scene.start
    child = start(
        number, [*_as_user(way), *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        errors="replace", env=environment,
    )  # fmt: skip
    try:
        screen, _ = child.communicate(timeout=LIMIT_S)
        code: int | None = child.returncode
    except subprocess.TimeoutExpired:
        screen, code = "", None
    elapsed_s = time.monotonic() - started
    return Answer(node, code, elapsed_s, _verdict(document), screen)


def _verdict(document: Path) -> LaunchVerdict | None:
    if not document.exists():
        return None
    read: dict[str, Any] = msgspec.json.decode(document.read_bytes())
    return msgspec.convert(read["verdict"], LaunchVerdict)


def _interpreter(way: Way) -> list[str]:
    return [sys.executable] if way.has_torch else [sys.executable, "-S"]


def _python_path(lab: Lab, number: int, way: Way) -> dict[str, str]:
    """Return where modules come from: this checkout, and without torch nothing but our needs."""
    agent = str(ROOT / "agent")
    site = str(lab.folder / _LIGHT) if not way.has_torch else ""
    given = lab.env[number].get("PYTHONPATH", "") or (
        "" if site else lab.base.get("PYTHONPATH", "")
    )
    return {"PYTHONPATH": os.pathsep.join(filter(None, (given, agent, site)))}


def _make_light(lab: Lab) -> None:
    """Make a directory of packages that has all the agent needs, and no torch."""
    site = lab.folder / _LIGHT
    if site.exists():
        return
    site.mkdir()
    for name in _PACKAGES:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        place = Path(spec.origin)
        place = place.parent if place.name == "__init__.py" else place
        folder = site.joinpath(*name.split(".")[:-1])
        folder.mkdir(exist_ok=True)
        (folder / place.name).symlink_to(place)
        libraries = place.with_name(f"{place.name}.libs")  # what a wheel brings along
        if libraries.exists():
            (site / libraries.name).symlink_to(libraries)


def reveal(lab: Lab) -> None:
    """Let ordinary users of the laboratory reach this Python and this checkout.

    Where one lies below a directory that is closed to them, another is laid over that one.
    """
    lines = []
    for number, folder in enumerate(dict.fromkeys((Path(sys.base_prefix), ROOT))):
        kept = lab.folder / f"kept{number}"
        kept.mkdir(exist_ok=True)
        lines.append((folder, kept, _closed(folder)))
    commands = [f"mount --bind {quote(folder)} {quote(kept)}" for folder, kept, _ in lines]
    for closed in dict.fromkeys(closed for _, _, closed in lines if closed is not None):
        commands.append(f"mount -t tmpfs -o mode=755 tmpfs {quote(closed)}")
    for folder, kept, closed in lines:
        if closed is not None:
            commands.append(
                f"mkdir -p {quote(folder)} && mount --bind {quote(kept)} {quote(folder)}"
            )
    for host in lab.hosts:
        host.run(" && ".join(commands))


def quote(path: Path) -> str:
    """Return a path as one word of a shell."""
    return shlex.quote(str(path))


def _closed(folder: Path) -> Path | None:
    """Return the first directory above `folder` that ordinary users may not pass."""
    parents = reversed(folder.parents)
    return next((parent for parent in parents if not parent.stat().st_mode & 0o001), None)


def _as_user(way: Way) -> list[str]:
    return list(NOBODY) if way.is_user and is_root() else []


def misses(trial: Trial) -> list[str]:
    """Return what the answers got wrong, one line each; nothing if all are right."""
    fault, wrong = trial.fault, []
    wanted = {expected.id for expected in fault.expected}
    for answer in trial.answers:
        if answer.verdict is None:
            wrong.append(
                f"{answer.node} gave no verdict (exit {answer.exit_code}): {answer.screen[-600:]}"
            )
            continue
        told = [finding.id for finding in answer.loud]
        for finding in answer.loud:
            if finding.id not in wanted | set(fault.also):
                wrong.append(f"{answer.node}: a stray finding: {describe(finding)}")
        for expected in fault.expected:
            same = [finding for finding in answer.loud if finding.id == expected.id]
            if len(same) != 1:
                wrong.append(f"{answer.node}: {len(same)} times {expected.id} among {told}")
            else:
                wrong += [f"{answer.node}: {text}" for text in _unlike(expected, same[0])]
        code = _code(fault)
        if answer.exit_code != code and not (code == 0 and _is_too_busy(answer)):
            wrong.append(f"{answer.node}: exit {answer.exit_code}, not {code}")
    verdicts = {_essence(answer) for answer in trial.answers}
    if fault.agree and len(verdicts) > 1:
        wrong.append(f"the nodes disagree: {sorted(verdicts)}")
    return wrong


def _unlike(expected: Expected, found: CheckFinding) -> list[str]:
    wrong = []
    if found.status != expected.status:
        wrong.append(f"{found.status}, not {expected.status}")
    if expected.nodes is not None and set(found.nodes) != set(expected.nodes):
        wrong.append(f"about {found.nodes}, not {expected.nodes}")
    if expected.edges is not None:
        pairs = {frozenset(edge) for edge in found.edges}
        if pairs != {frozenset(edge) for edge in expected.edges}:
            wrong.append(f"pairs {found.edges}, not {expected.edges}")
    commands = [fix.command for fix in found.fix]
    if expected.remedy and not any(re.search(expected.remedy, command) for command in commands):
        wrong.append(f"no remedy like {expected.remedy!r} in {commands}")
    return [f"{found.id}: {text} ({found.title})" for text in wrong]


def _code(fault: Fault) -> int:
    failed = {expected.id for expected in fault.expected if expected.status == "fail"}
    if failed - set(ABSENCES):
        return 2
    return 3 if failed else 0


def _is_too_busy(answer: Answer) -> bool:
    """Return whether exit 3 says no more than that this machine had no time to time a path."""
    verdict = answer.verdict
    return (
        verdict is not None and answer.exit_code == 3
        and len(verdict.reported) == len(verdict.expected)
        and set(open_questions(verdict)) <= _TIMED
    )  # fmt: skip


def _essence(answer: Answer) -> str:
    return "; ".join(sorted(f"{f.id} {f.status} {','.join(f.nodes)}" for f in answer.loud))


def describe(finding: CheckFinding) -> str:
    """Return a finding in one line."""
    return (
        f"{finding.status} {finding.id} {','.join(finding.nodes)} {finding.edges}: {finding.title}"
    )


def main() -> int:
    """Try the faults that were named, and show what is wrong with the answers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="all of them, if none is named")
    parser.add_argument("--light", action="store_true", help="without torch")
    parser.add_argument("--user", action="store_true", help="preflight runs as an ordinary user")
    parser.add_argument("--options", default="", help="more options for preflight")
    parser.add_argument("--screen", action="store_true", help="show every screen")
    chosen = parser.parse_args()
    reexec_in_userns()
    way = Way(options=chosen.options, is_user=chosen.user, has_torch=not chosen.light)
    num_wrong = 0
    for name in chosen.faults or list(BY_NAME):
        trial = attempt(BY_NAME[name], way)
        wrong = misses(trial)
        num_wrong += bool(wrong)
        lines = [f"{name}: {'WRONG' if wrong else 'right'}, {trial.elapsed_s:.1f} s", *wrong]
        lines += [answer.screen for answer in trial.answers if chosen.screen]
        sys.stdout.write("\n    ".join(lines) + "\n")
        sys.stdout.flush()
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
