"""The native probe: which binary is taken, what each fits, how a thinned step is recorded."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from rankscope.native.binaries import MANIFEST, SWITCH
from rankscope.native.probe import build, installed, ready
from rankscope.rank.context import HookSkipped
from rankscope.rank.hooks.collectives import probe as source
from rankscope.wire import schema
from tests.agent import recorded
from tests.agent.shipped import builder

__all__ = ["builder"]

ROOT = Path(__file__).parents[2]
HERE = installed.torch()
ALLREDUCE = schema.OPERATIONS.index("all_reduce")
MOST_BYTES = 150_000  # of one binary: they are kept in the repository


def shipped() -> list[ready.Binary]:
    return ready.read_manifest().binaries


def needs_ready() -> None:
    """Skip where no binary is made for the PyTorch that the tests run on."""
    try:
        ready.find(HERE, {})
    except ready.Unfit as reason:
        pytest.skip(str(reason))


# --- choosing -----------------------------------------------------------------------------------

TORCH = installed.Torch("2.13.0+cu128", "x86_64", new_abi=True)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A directory with one binary for TORCH, made from the sources as they are."""
    (tmp_path / "probe.so").write_bytes(b"binary")
    write_manifest(tmp_path)
    return tmp_path


def write_manifest(directory: Path, **differently: Any) -> None:
    binary = ready.Binary(
        "probe.so", "2.13", "2.13.0", "x86_64", True, hashlib.sha256(b"binary").hexdigest()
    )
    manifest = ready.Manifest(ready.sources_digest(), "", [binary])
    manifest = msgspec.structs.replace(manifest, **differently)
    (directory / MANIFEST).write_bytes(msgspec.json.encode(manifest))


@pytest.mark.parametrize(
    "version", ["2.13.0", "2.13.1", "2.13.0+cpu", "2.13.0+cu128", "2.13.0+rocm6.3", "2.13.0+xpu"]
)
def test_every_release_of_the_minor_version_is_served(made: Path, version: str) -> None:
    path, binary = ready.find(replace(TORCH, version=version), {}, made)
    assert path == made / "probe.so"
    assert binary.torch == "2.13"


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        (replace(TORCH, version="2.12.1"), "none for PyTorch 2.12 on x86_64"),
        (replace(TORCH, version="2.1.3"), "none for PyTorch 2.1 on x86_64"),
        (replace(TORCH, machine="ppc64le"), "none for PyTorch 2.13 on ppc64le"),
        (replace(TORCH, new_abi=False), "on x86_64, old C\\+\\+ ABI"),
        (replace(TORCH, version="2.13.0a0+git1a2b3c4"), "not a release"),
        (replace(TORCH, version="2.13.0a0+7c8ec84dab.nv25.03"), "not a release"),
        (replace(TORCH, version="2.13.0.dev20260101+cu128"), "not a release"),
        (replace(TORCH, version="2.13.0rc1"), "not a release"),
        (replace(TORCH, version="2.13.0+mine"), "not a release"),
        (replace(TORCH, version="2.13"), "not a release"),
    ],
)
def test_another_torch_is_not_served(made: Path, torch: installed.Torch, reason: str) -> None:
    with pytest.raises(ready.Unfit, match=reason):
        ready.find(torch, {}, made)


def test_what_does_not_fit_the_manifest_is_not_loaded(made: Path) -> None:
    with pytest.raises(ready.Unfit, match="switched off"):
        ready.find(TORCH, {SWITCH: "0"}, made)
    (made / "probe.so").write_bytes(b"Binary")
    with pytest.raises(ready.Unfit, match="not the file that the manifest names"):
        ready.find(TORCH, {}, made)
    (made / "probe.so").unlink()
    with pytest.raises(ready.Unfit, match="No such file"):
        ready.find(TORCH, {}, made)
    write_manifest(made, sources_sha256="0" * 64)
    with pytest.raises(ready.Unfit, match="other sources"):
        ready.find(TORCH, {}, made)
    (made / MANIFEST).write_text('{"binaries": 3}')
    with pytest.raises(ready.Unfit, match="cannot be read"):
        ready.find(TORCH, {}, made)


# --- loading, and what comes after --------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache and no compiler, in this process."""
    monkeypatch.setenv("RANKSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "/bin/false")
    source.load.cache_clear()
    yield tmp_path / "cache"
    source.load.cache_clear()


def test_ready_made_is_first_and_needs_no_compiler(cache: Path) -> None:
    needs_ready()
    loaded = source.load()
    assert loaded.origin == f"ready-made for PyTorch {loaded.module.torch_minor}"
    assert loaded.not_ready == ""
    assert source._recursion_at(loaded.module) > 0  # found on every Python that we know
    assert not build.is_needed()
    assert not cache.exists()


def test_one_that_does_not_load_gives_way_to_the_compiled_one(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_ready()
    compiled, (good, binary) = build.path_of(), ready.find(HERE, {})
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    monkeypatch.setattr(ready, "find", lambda *_: (broken, binary))
    with pytest.raises(HookSkipped, match=r"not compiled yet.*; ready-made: .*broken\.so"):
        source.load()
    assert build.is_needed()  # so that the collector compiles one
    compiled.parent.mkdir(parents=True, exist_ok=True)
    compiled.write_bytes(good.read_bytes())  # as good as one that was compiled
    compiled.chmod(0o755)
    loaded = source.load()
    assert loaded.origin == "compiled here"
    assert "broken.so" in loaded.not_ready
    compiled.chmod(0o777)
    source.load.cache_clear()
    with pytest.raises(HookSkipped, match="not yours alone"):
        source.load()


def test_switched_off_and_without_a_compiler_it_is_skipped_with_both_reasons(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(SWITCH, "0")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HookSkipped, match=r"no C\+\+ compiler.*; ready-made: switched off"):
        source.Probe.check()
    assert build.is_needed()
    assert build.remedy() == "install g++ and run `rankscope doctor --build`"


TRY = """
import sys, pathlib
from rankscope.native.probe import installed
from rankscope.rank.context import HookSkipped
from rankscope.rank.hooks.collectives import probe as source
for path in sys.argv[1:]:
    try:
        source._import(pathlib.Path(path), installed.torch())
        print("loaded", flush=True)
    except HookSkipped as reason:
        print("skipped:", " ".join(str(reason).split()), flush=True)
"""


def test_one_for_another_torch_is_refused_and_does_no_harm() -> None:
    own = [platform.machine(), HERE.version.rpartition(".")[0]]
    others = [
        str(ready.DIRECTORY / binary.file)
        for binary in shipped()
        if [binary.machine, binary.torch] != own
    ]
    assert others
    done = subprocess.run(
        [sys.executable, "-c", TRY, *others], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(others)
    assert all(line.startswith("skipped: ") for line in lines), lines


# --- what is shipped ----------------------------------------------------------------------------


def test_the_manifest_fits_sources_recipe_and_files(builder: ModuleType) -> None:
    manifest = ready.read_manifest()
    advice = "the probe was changed: run `make probes` and commit what it makes"
    assert manifest.sources_sha256 == ready.sources_digest(), advice
    assert manifest.recipe_sha256 == builder.recipe_digest(), advice
    assert [binary.file for binary in manifest.binaries] == [
        target.file for target in builder.targets()
    ]
    for binary in manifest.binaries:
        found = hashlib.sha256((ready.DIRECTORY / binary.file).read_bytes()).hexdigest()
        assert found == binary.sha256, binary.file
    there = {path.name for path in ready.DIRECTORY.iterdir()}
    assert there == {MANIFEST, *(binary.file for binary in manifest.binaries)}


@pytest.mark.parametrize("binary", shipped(), ids=lambda binary: str(binary.file))
def test_a_binary_asks_for_no_more_than_torch_itself(
    builder: ModuleType, binary: ready.Binary
) -> None:
    content = (ready.DIRECTORY / binary.file).read_bytes()
    assert len(content) < MOST_BYTES
    assert content[:4] == b"\x7fELF"
    assert {62: "x86_64", 183: "aarch64"}[content[18]] == binary.machine
    assert builder.newer_than_allowed(content) == []
    assert re.search(rb"\0GLIBC_2\.[0-9.]+\0", content)  # the names are there to be read
    needed = {b"libtorch_cpu.so", b"libc10.so"}
    assert needed <= set(re.findall(rb"lib[a-z0-9_]+\.so", content))
    assert str(ROOT).encode() not in content  # built alike wherever it is built


def test_a_symbol_that_is_too_new_is_seen(builder: ModuleType) -> None:
    content = b"\0GLIBC_2.28\0GLIBC_2.34\0GLIBCXX_3.4.25\0GLIBCXX_3.4.29\0CXXABI_1.3.11\0"
    assert builder.newer_than_allowed(content) == ["GLIBCXX_3.4.29", "GLIBC_2.34"]


# --- in a run -----------------------------------------------------------------------------------


def told(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    assert "rankscope:" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.multiproc
def test_ready_made_records_without_compiler_and_home(tmp_path: Path) -> None:
    needs_ready()
    home = tmp_path / "home"
    home.mkdir()
    bare = {"CXX": "/bin/false", "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    done = recorded.run(tmp_path, "steps_and_collectives.py", "1", ranks=2, **bare)
    assert told(done) == []
    for rank in recorded.read(tmp_path):
        sources = rank.of(schema.RankRegistered)[-1].sources
        assert sources["collectives"].startswith("probe: ready-made for PyTorch 2."), sources
        assert "collectives/ready-made" not in sources
        sequences = rank.collectives["sequence"]
        assert sequences.tolist() == list(range(1, len(sequences) + 1))
        calls = rank.collectives[rank.collectives["operation"] == ALLREDUCE]
        assert len(calls) >= 5 * rank.steps["step"].max() > 0
        assert set(calls["input_bytes"].tolist()) == {4000}
        assert set(calls["issued_by"].tolist()) == {schema.ISSUED_BY.index("probe")}
        assert set(calls["state"].tolist()) == {schema.ENDED}
        assert (calls["ended_ns"] >= calls["arrived_ns"]).all()
        sites = {rank.call_sites[int(site)] for site in calls["call_site"]}
        assert all("steps_and_collectives.py" in site for site in sites)
    assert list(home.iterdir()) == []  # nothing was compiled, or left behind


@pytest.mark.multiproc
@pytest.mark.parametrize("source", ["probe", "kernels"])
def test_a_thinned_step_has_no_call_sites_and_only_the_ends_of_waits(
    tmp_path: Path, source: str
) -> None:
    done = recorded.run(tmp_path, "thinned.py", ranks=2, RANKSCOPE_COLLECTIVES=source)
    parts = told(done)
    assert len(parts) == 6
    ranks = {rank.rank: rank for rank in recorded.read(tmp_path)}
    for part in parts:
        rank, thinned = ranks[part["rank"]], bool(part["thinned"])
        calls = rank.collectives[slice(*part["numbers"])]
        assert set(calls["operation"].tolist()) == {ALLREDUCE}
        assert set((calls["flags"] & schema.FLAG_THINNED > 0).tolist()) == {thinned}
        assert (calls["arrived_ns"] > 0).all()
        assert (calls["returned_ns"] >= calls["arrived_ns"]).all()
        # two of the script, one of DDP, then many of the script
        assert calls["input_bytes"].tolist()[:4] == [4000, 4000, 4 * (6 * 5 + 5), 4000]
        of_ddp = calls["flags"] & schema.FLAG_BY_ENGINE > 0
        assert of_ddp.tolist() == [number == 2 for number in range(len(calls))]
        assert part["by_engine"] == part["numbers"][0] + 2  # DDP's, in every step
        assert set(calls["state"][~of_ddp].tolist()) == {schema.ENDED}  # by their waits
        assert set(calls["reduce_op"].tolist()) == {schema.REDUCE_OPS.index("sum")}
        if thinned:
            assert calls["state"][of_ddp].tolist() == [schema.RETURNED]
            assert not calls["call_site"].any()
        else:
            assert calls["state"][of_ddp].tolist() == [schema.ENDED]
            assert calls["call_site"].all()
        measured_whole, measured_thinned = part["measured"]
        assert (measured_whole > 0, measured_thinned > 0) == (not thinned, thinned)
        if part["rank"] == 0:  # it waited for the other
            assert part["blocked_ns"] > 0.3e9
            assert calls["blocked_ns"][1] > 0.3e9
        else:
            assert part["blocked_ns"] < 0.3e9
    for rank in ranks.values():  # over thinned steps the sequence goes on
        sequences = rank.collectives["sequence"]
        assert sequences.tolist() == list(range(1, len(sequences) + 1))
