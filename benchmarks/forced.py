"""One run of the trainer with a source of collectives by force, on a server of its own."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from real_ranks import Case, Server, run_case, run_name

from rankscope.demo.processes import Api
from rankscope.demo.result import Recording, recording
from rankscope.native.probe import build
from rankscope.rank.context import HookSkipped
from rankscope.rank.hooks.collectives import choose
from tests.score.real import RealRun

BARE = "bare"  # as on a slim image: no compiler, and nothing left from before
SOURCES = ("probe", "official", "kernels", BARE)


@dataclass(frozen=True)
class ForcedRun:
    """What became of a run, by which source it was really recorded, and where its record lies."""

    outcome: RealRun
    recording: Recording
    run_directory: Path


@contextlib.contextmanager
def forced_run(
    source: str, case: Case, seed: int, environment: Mapping[str, str]
) -> Iterator[ForcedRun]:
    """Run a case with a source; its record is there inside the context, and gone after it."""
    with tempfile.TemporaryDirectory(prefix="rankscope-forced-") as scratch:
        directory = Path(scratch)
        server = Server(directory)
        try:
            forced = {**environment, **environment_of(source, directory)}
            outcome = run_case(server, case, seed, directory, environment=forced)
            name = run_name(case, seed)
            how = recording(Api(server.url), name)
            yield ForcedRun(outcome, how, directory / name / "run" / name)
        finally:
            server.close()


def environment_of(source: str, empty: Path) -> dict[str, str]:
    """Return what forces a source. `empty` is a directory in which new ones can be made."""
    if source != BARE:
        cache = os.environ.get("RANKSCOPE_CACHE")
        return {"RANKSCOPE_COLLECTIVES": source} | ({"RANKSCOPE_CACHE": cache} if cache else {})
    folders = {name: empty / f"bare {name.lower()}" for name in ("HOME", "RANKSCOPE_CACHE")}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    return {"CXX": "/bin/false"} | {name: str(folder) for name, folder in folders.items()}


def available(sources: Iterable[str]) -> list[str]:
    """Return those of the sources that this machine and this PyTorch have; name the others."""
    found = []
    for source in sources:
        try:
            if source == SOURCES[0]:
                build.build()  # as `rankscope run` does
            if source != BARE:
                choose(source)
        except (HookSkipped, build.BuildError, OSError) as reason:
            print(f"{source}: no such source here: {reason}", flush=True)
        else:
            found.append(source)
    return found
