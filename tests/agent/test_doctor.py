"""`rankscope doctor` and the building of the native probe, as people call them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from rankscope.native.binaries import SWITCH
from rankscope.native.probe import build, installed, ready
from rankscope.rank.hooks import HOOKS
from rankscope.rank.hooks.collectives import SOURCES
from tests import capabilities
from tests import doctor as forked_doctor

COMPILED = {SWITCH: "0"}  # as if none were ready-made


def doctor(*arguments: str, **variables: str) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    """Run the command and return its exit code and its rows by (part, name)."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith("RANKSCOPE")}
    done = forked_doctor.run("--json", *arguments, env=clean | variables)
    assert done.returncode != 64, done.stderr
    document = json.loads(done.stdout)
    assert document["exit_code"] == done.returncode
    return done.returncode, {(row["part"], row["name"]): row for row in document["rows"]}


def advised(rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> int:
    """Return the exit code that the rows call for: 1 where one is advice or fails."""
    return int(any(row["state"] in ("advice", "fails") for row in rows.values()))


def test_names_every_source_and_hook(tmp_path: Path) -> None:
    if build.is_needed():
        capabilities.need("compiler")
        build.build()
    code, rows = doctor(RANKSCOPE_DIR=str(tmp_path))
    assert code == advised(rows)
    assert rows["collectives", "probe"]["state"] == "used"
    assert {name for part, name in rows if part == "collectives"} == {s.name for s in SOURCES}
    named = {name for part, name in rows if part == "hooks"}
    assert named == {hook.name for hook in HOOKS} - {"collectives"}
    assert rows["records", "directory"]["detail"].startswith(str(tmp_path))
    assert all(row["detail"] for row in rows.values())


def test_what_works_is_one_line_and_all_of_it_on_demand(tmp_path: Path) -> None:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("RANKSCOPE")}
    own = clean | {"RANKSCOPE_DIR": str(tmp_path)}
    started = subprocess.run(
        [sys.executable, "-m", "rankscope", "doctor"],
        env=own, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    short = started.stdout.splitlines()
    whole = forked_doctor.run("--all", env=own).stdout.splitlines()
    assert re.match(
        r"Recorded here: collectives by \w+, \d+ of \d+ hooks, \d+ of \d+ sources", short[0]
    )
    table = "\n".join(whole)
    _, rows = doctor(RANKSCOPE_DIR=str(tmp_path))
    assert (len(short) > 1) == bool(advised(rows))
    assert all(hook.name in table for hook in HOOKS if hook.name != "collectives")


def test_without_a_compiler_another_source_is_used(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    code, rows = doctor(RANKSCOPE_CACHE=str(tmp_path), PATH=str(tmp_path / "bin"), **COMPILED)
    assert rows["collectives", "probe"]["state"] == "skipped"
    assert "no C++ compiler" in rows["collectives", "probe"]["detail"]
    states = {name: row["state"] for (part, name), row in rows.items() if part == "collectives"}
    has_hooks = tuple(map(int, version("torch").split(".")[:2])) >= (2, 14)
    best = "official" if has_hooks else "kernels"
    assert [name for name, state in states.items() if state == "used"] == [best]
    (used,) = (
        row for row in rows.values() if row["part"] == "collectives" and row["state"] == "used"
    )
    assert (
        "better: probe, about 2 us: install g++ and run `rankscope doctor --build`"
        in used["detail"]
    )
    assert code == advised(rows)


def test_with_a_ready_made_probe_nothing_is_compiled(tmp_path: Path) -> None:
    try:
        ready.find(installed.torch(), {})
    except ready.Unfit as reason:
        pytest.skip(str(reason))
    _, rows = doctor("--build", RANKSCOPE_CACHE=str(tmp_path / "cache"), CXX="/bin/false")
    assert rows["collectives", "probe"]["state"] == "used"
    assert rows["collectives", "probe"]["detail"].startswith("ready-made for PyTorch 2.")
    assert not (tmp_path / "cache").exists()


def test_a_failing_compiler_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    _, rows = doctor("--build", RANKSCOPE_CACHE=str(tmp_path), CXX=str(compiler), **COMPILED)
    assert rows["collectives", "probe"]["state"] == "advice"
    assert "no such thing" in rows["collectives", "probe"]["detail"]
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.BuildError, match="no such thing"):
        build.build({"RANKSCOPE_CACHE": str(tmp_path)})


@pytest.mark.parametrize("server", ["http://127.0.0.1:9", "127.0.0.1:9"])
def test_a_server_that_is_away_is_advice(server: str, tmp_path: Path) -> None:
    code, rows = doctor(RANKSCOPE_SERVER=server, RANKSCOPE_DIR=str(tmp_path))
    assert code == 1
    assert rows["server", server]["detail"] == "cannot be reached: [Errno 111] Connection refused"


@pytest.mark.needs("compiler")
def test_built_once_however_many_ask(tmp_path: Path) -> None:
    environ = {"RANKSCOPE_CACHE": str(tmp_path)}
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: build.build(environ), range(3)))
    (path,) = set(paths)
    assert path.stat().st_size > 50_000
    made_ns = path.stat().st_mtime_ns
    assert build.build(environ).stat().st_mtime_ns == made_ns
    assert installed.torch().tag in str(path)


@pytest.mark.needs("compiler")
def test_what_others_could_have_written_is_not_loaded(tmp_path: Path) -> None:
    path = build.path_of({"RANKSCOPE_CACHE": str(tmp_path)})
    path.parent.mkdir(parents=True)
    path.write_bytes(build.build().read_bytes())
    path.chmod(0o777)
    _, rows = doctor(RANKSCOPE_CACHE=str(tmp_path), **COMPILED)
    assert rows["collectives", "probe"]["state"] == "skipped"
    assert "not loaded" in rows["collectives", "probe"]["detail"]


@pytest.mark.needs("compiler")
def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(build.BuildError, match="RANKSCOPE_CACHE"):
        build.build({"RANKSCOPE_CACHE": str(blocked)})
