#!/usr/bin/env python3
# ruff: noqa: T201 - a command prints
"""Build the ready-made binaries: a probe for each minor version of PyTorch, machine and C++ ABI,
and the hot path of steps for each machine.

    make probes
    .venv/bin/python .ci/build_probes.py [--torch 2.13.0] [--cache DIRECTORY]

Takes the headers out of PyTorch's wheels (any wheel of a release has the same), compiles for this
machine and, by Debian's cross compiler, for the other, and writes the binaries with their manifest
into the package. What was built from the same sources before is taken from the cache. Needs g++,
g++-aarch64-linux-gnu and binutils; about 10 s for each binary, 5 GB of the cache.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from rankscope.native.binaries import MANIFEST
from rankscope.native.hotpath import native
from rankscope.native.probe import build, ready

# The newest release of each minor version. Its binary is loaded by every release of that version:
# patch releases of PyTorch keep the classes that its headers show.
RELEASES = (
    "2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0",
)  # fmt: skip
COMPILERS = {"x86_64": "g++", "aarch64": "aarch64-linux-gnu-g++"}
# Official wheels have the new ABI; those of 2.6 for x86-64 with older CUDA had the old one.
OLD_ABI = (("2.6", "x86_64"),)
COMPAT = Path(__file__).with_name("probe_compat.cpp")
EXPORTS = "{ global: PyInit_rankscope_probe; local: *; };\n"
EXTRA_FLAGS = (
    "-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections", "-Wl,--build-id=none", "-s",
    "-Wl,-z,noseparate-code",
)  # fmt: skip
HOTPATH_EXPORTS = EXPORTS.replace("probe", native.MODULE.removeprefix("rankscope_"))
HOTPATH_FLAGS = (
    *build.flags(build.STANDARDS[-1], True, Path()), *EXTRA_FLAGS, "-Wl,-z,now",
)  # fmt: skip
# PyTorch's own wheels ask for no more: manylinux_2_28.
NEWEST_SYMBOLS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rankscope" / "ready"


class CannotBuild(Exception):
    """A binary could not be made; the message says why."""


@dataclass(frozen=True)
class Target:
    """One binary to make."""

    torch: str  # minor version
    headers: str
    machine: str
    new_abi: bool

    @property
    def file(self) -> str:
        """Its name in the package."""
        return f"probe-{self.torch}-{self.machine}{'' if self.new_abi else '-old_abi'}.so"


def targets() -> Iterator[Target]:
    """List everything that is shipped."""
    for release in RELEASES:
        minor = release.rpartition(".")[0]
        for machine in COMPILERS:
            if (minor, machine) in OLD_ABI:
                yield Target(minor, release, machine, new_abi=False)
            yield Target(minor, release, machine, new_abi=True)


def recipe_digest() -> str:
    """Return the digest of all that is not the probe's sources: flags and what is linked in."""
    flags = build.flags("", True, Path()), build.LIBRARIES, EXTRA_FLAGS, EXPORTS
    return hashlib.sha256(COMPAT.read_bytes() + repr(flags).encode()).hexdigest()


def hotpath_recipe() -> str:
    """Return the same of the hot path of steps."""
    return hashlib.sha256(repr((HOTPATH_FLAGS, HOTPATH_EXPORTS)).encode()).hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Build what is missing, then put all that is there into the package."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", action="append", help="only this release; may be given again")
    parser.add_argument("--cache", type=Path, default=CACHE, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        make_hotpath()
        for target in targets():
            if not options.torch or target.headers in options.torch:
                make(target, options.cache)
    except CannotBuild as reason:
        print(f"build_probes: {reason}", file=sys.stderr)
        return 1
    publish(options.cache)
    return 0


def place_of(target: Target, cache: Path) -> Path:
    """Return where a binary is kept: the name holds all that it is made from."""
    key = f"{ready.sources_digest()} {recipe_digest()} {target.headers}"
    return cache / "built" / hashlib.sha256(key.encode()).hexdigest()[:16] / target.file


def make(target: Target, cache: Path) -> None:
    """Compile one binary unless it is there. Raises CannotBuild."""
    path = place_of(target, cache)
    if path.exists():
        return
    print(f"{target.file} ...", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    include = headers(target.headers, cache)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / target.file
        compile_one(target, include, Path(scratch), made)
        too_new = newer_than_allowed(made.read_bytes())
        if too_new:
            raise CannotBuild(f"{target.file} needs {', '.join(too_new)}")
        made.replace(path)


def compile_one(target: Target, include: Path, scratch: Path, output: Path) -> None:
    """Run the compiler, with libraries that have PyTorch's names and nothing inside."""
    compiler = COMPILERS[target.machine]
    for name in ("torch_cpu", "c10"):
        soname = f"lib{name}.so"
        run([compiler, "-shared", "-nostdlib", f"-Wl,-soname,{soname}", "-o",
             str(scratch / soname), "-x", "c", os.devnull])  # fmt: skip
    (scratch / "exports").write_text(EXPORTS)
    for standard in build.STANDARDS:
        command = [
            compiler, *build.flags(standard, target.new_abi, include), *EXTRA_FLAGS,
            f"-ffile-prefix-map={include}=", f"-ffile-prefix-map={ready.SOURCES[0].parent}=",
            f"-Wl,--version-script={scratch / 'exports'}", str(ready.SOURCES[0]), str(COMPAT),
            "-o", str(output), f"-L{scratch}", *build.LIBRARIES,
        ]  # fmt: skip
        try:
            return run(command)
        except CannotBuild:
            if standard == build.STANDARDS[-1]:
                raise


def make_hotpath() -> None:
    """Compile the hot path of steps, which needs nothing of PyTorch, into its package."""
    native.DIRECTORY.mkdir(exist_ok=True)
    digests = {}
    for machine, compiler in COMPILERS.items():
        path = native.DIRECTORY / native.file_of(machine)
        with tempfile.TemporaryDirectory(dir=native.DIRECTORY) as scratch:
            (Path(scratch) / "exports").write_text(HOTPATH_EXPORTS)
            made = Path(scratch) / path.name
            run([compiler, *HOTPATH_FLAGS, f"-ffile-prefix-map={native.HERE}=",
                 f"-Wl,--version-script={Path(scratch) / 'exports'}", str(native.SOURCES[0]),
                 "-o", str(made)])  # fmt: skip
            too_new = newer_than_allowed(made.read_bytes())
            if too_new:
                raise CannotBuild(f"{path.name} needs {', '.join(too_new)}")
            made.replace(path)
        digests[machine] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = native.Manifest(native.sources_digest(), hotpath_recipe(), digests)
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (native.DIRECTORY / MANIFEST).write_bytes(text + b"\n")


def headers(release: str, cache: Path) -> Path:
    """Return the include directory of a release, taken out of its wheel."""
    include = cache / "headers" / release / "include"
    if include.exists():
        return include
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
             "--no-deps", "--only-binary=:all:", "--python-version", "311",
             "--platform", "manylinux_2_28_aarch64", "--platform", "manylinux2014_aarch64",
             "--dest", scratch, f"torch=={release}"])  # fmt: skip
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if name.startswith("torch/include/")]
            archive.extractall(scratch, wanted)
        include.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(Path(scratch) / "torch" / "include", include)
    return include


def newer_than_allowed(binary: bytes) -> list[str]:
    """Return the versions of the C and C++ libraries that a stripped binary asks for in vain."""
    named = set(re.findall(rb"\0(GLIBC|GLIBCXX|CXXABI)_([0-9.]+)(?=\0)", binary))
    return sorted(
        f"{library.decode()}_{version.decode()}"
        for library, version in named
        if tuple(map(int, version.split(b"."))) > NEWEST_SYMBOLS[library.decode()]
    )


def publish(cache: Path) -> None:
    """Copy what was built from the sources as they are into the package, with the manifest."""
    ready.DIRECTORY.mkdir(exist_ok=True)
    for path in ready.DIRECTORY.glob("*.so"):
        path.unlink()
    binaries = []
    for target in targets():
        built = place_of(target, cache)
        if built.exists():
            shutil.copyfile(built, ready.DIRECTORY / target.file)
            digest = hashlib.sha256(built.read_bytes()).hexdigest()
            binaries.append(ready.Binary(file=target.file, sha256=digest, **asdict(target)))
    manifest = ready.Manifest(ready.sources_digest(), recipe_digest(), binaries)
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (ready.DIRECTORY / MANIFEST).write_bytes(text + b"\n")
    print(f"{len(binaries)} of {len(list(targets()))} binaries in {ready.DIRECTORY}")


def run(command: list[str]) -> None:
    """Run a command. Raises CannotBuild with what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CannotBuild(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise CannotBuild(f"{' '.join(command)}\n{done.stderr[-3000:]}")


if __name__ == "__main__":
    sys.exit(main())
