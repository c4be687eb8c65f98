"""The printed commands of a verdict, executed as they are by their owners on their nodes.

Each node has one shell session: what a command exports, unlimits or tells torchrun counts for the
launch that follows, as it would in a terminal. Tools that a namespace cannot have are stood in for
by programs that do the same to the laboratory: `sudo`, `hostnamectl`, `chronyc`, and `torchrun`
and `docker`, which note how they were started.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rankscope.preflight.model import CheckFinding, Fix
from tests.preflight.scene import Scene

_LIMIT_S = 60.0
_SHIMS = {
    "sudo": 'while [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"',
    "hostnamectl": '[ "$1" = set-hostname ] && hostname "$2" && echo "$2" > /etc/hostname',
    "chronyc": 'echo clock >> "$DRAWN_NOTES"',
    "torchrun": 'for word; do printf "torchrun\\t%s\\n" "$word"; done >> "$DRAWN_NOTES"',
    "docker": 'for word; do printf "docker\\t%s\\n" "$word"; done >> "$DRAWN_NOTES"',
    "rankscope": 'for word; do printf "rankscope\\t%s\\n" "$word"; done >> "$DRAWN_NOTES"',
}
# An option of torchrun -> what the laboratory's launch calls it.
_OPTIONS = {
    "node-rank": "node_rank", "master-port": "master_port", "master-addr": "master_addr",
    "nnodes": "num_nodes", "rdzv-endpoint": "endpoint",
}  # fmt: skip


@dataclass(frozen=True)
class Executed:
    """One printed line, and what became of it."""

    node: str
    owner: str
    command: str
    exit_code: int | None  # None: words for a person, or it did not end
    said: str = ""

    @property
    def is_person(self) -> bool:
        """Return whether it says what a person must do."""
        return is_sentence(self.command)


def is_sentence(command: str) -> bool:
    """Return whether this is no command but a sentence."""
    return command.startswith("# ")


def flaws(command: str) -> list[str]:
    """Return why a command may not be printed as it is."""
    wrong = []
    if not command.isprintable():
        wrong.append(f"unprintable characters in {command!r}")
    try:
        shlex.split(re.sub(r"(^|\s)#.*", "", command))
    except ValueError as error:
        wrong.append(f"{error} in {command!r}")
    return wrong


def execute(scene: Scene, findings: Iterable[CheckFinding]) -> list[Executed]:
    """Execute the remedies of all findings, in their order."""
    shims = _write_shims(scene)
    scene.lab.own_etc()
    done = []
    for finding in findings:
        for fix in finding.fix:
            names = scene.lab.names
            for name in [fix.node] if fix.node in names else names if not fix.node else []:
                done.append(_execute(scene, names.index(name), fix, shims))
    return done


def _write_shims(scene: Scene) -> Path:
    folder = scene.lab.folder / "shims"
    folder.mkdir(exist_ok=True)
    for name, body in _SHIMS.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    return folder


def _execute(scene: Scene, number: int, fix: Fix, shims: Path) -> Executed:
    lab = scene.lab
    told = (lab.names[number], fix.owner, fix.command)
    if is_sentence(fix.command):
        return Executed(*told, exit_code=None)
    notes, state = lab.folder / f"notes{number}", lab.folder / f"state{number}"
    notes.write_text("")
    state.unlink(missing_ok=True)
    before = {
        **lab.environment(number), "DRAWN_NOTES": str(notes),
        "PATH": f"{shims}{os.pathsep}{lab.base['PATH']}",
    }  # fmt: skip
    keep = f"(env -0; ulimit -Sn; ulimit -Hn) > {state}"
    limits = scene.limits.get(number)
    prefix = ["prlimit", *limits.split()] if limits else []
    try:
        done = lab.hosts[number].run(
            [*prefix, "bash", "-c", f"{fix.command}\ncode=$?\n{keep}\nexit $code"], check=False,
            env=before, limit_s=_LIMIT_S,
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001  (it is the answer)
        return Executed(*told, exit_code=None, said=repr(error)[:300])
    if state.exists():
        _take_state(scene, number, before, state.read_text())
    _take_notes(scene, number, notes.read_text())
    return Executed(*told, done.returncode, (done.stdout + done.stderr).strip()[-300:])


def _take_state(scene: Scene, number: int, before: dict[str, str], text: str) -> None:
    """Let what the shell exported count for what is started next."""
    *pairs, limits = text.split("\0")
    after = dict(pair.partition("=")[::2] for pair in pairs if "=" in pair)
    own = scene.lab.env[number]
    kept = {"PATH", "DRAWN_NOTES", "_", "SHLVL", "PWD", "OLDPWD"}
    for name in after.keys() - kept:
        if before.get(name) != after[name]:
            own[name] = after[name]
    for name in before.keys() - after.keys() - kept:
        own.pop(name, None)
        scene.lab.base.pop(name, None)
    if number in scene.limits:
        soft, hard = limits.split()
        if soft != hard or f"={soft}:" not in scene.limits[number]:
            scene.limits[number] = f"--nofile={soft}:{hard}"


def _take_notes(scene: Scene, number: int, text: str) -> None:
    for name, value in _options(text, "torchrun"):
        word = _OPTIONS.get(name.removeprefix("--").replace("_", "-"))
        if word and scene.mode != "env":  # there is no torchrun there
            scene.say(number, **{word: value})
    for name, value in _options(text, "docker"):
        if name == "--ulimit" and value.startswith("nofile="):
            scene.limits.pop(number, None)  # as much as this machine has
        if name == "--shm-size":
            scene.lab.run(number, f"mount -o remount,size={value} /dev/shm")
    if "clock" in text.splitlines():
        scene.lab.env[number].pop("LD_PRELOAD", None)
    if "rankscope\tpreflight" in text.splitlines():
        scene.missing.discard(number)
        given = dict(_options(text, "rankscope"))
        if "--nodes" in given:
            scene.nodes[number] = given["--nodes"]


def _options(text: str, program: str) -> list[tuple[str, str]]:
    """Return the options, each with its value, with which a program was started."""
    lines = (line.split("\t") for line in text.splitlines())
    words = [line[1] for line in lines if line[0] == program and len(line) > 1]
    split = [part for word in words for part in _parts(word)]
    return [(name, value) for name, value in itertools.pairwise(split) if name.startswith("--")]


def _parts(word: str) -> list[str]:
    name, equals, value = word.partition("=")
    return [name, value] if equals and name.startswith("--") else [word]
