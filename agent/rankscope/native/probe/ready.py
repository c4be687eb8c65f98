"""The ready-made probes: binaries in this package, for machines without a compiler.

`.ci/build_probes.py` makes them, one for each minor version of PyTorch, machine and C++ ABI; any
Python from 3.11 on can load them. The manifest names each with its digest and the digest of the
sources, so that none is loaded that is damaged, or of another probe than this one.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rankscope.native.binaries import MANIFEST, SWITCH
from rankscope.native.probe.installed import Torch

DIRECTORY = Path(__file__).with_name("ready")
SOURCES = tuple(Path(__file__).with_name(name) for name in ("probe.cpp", "python.hpp"))
# The project's own releases, as it labels them. Others, and what comes before a release, may lay
# out C++ objects in another way under the same number.
_RELEASE = re.compile(r"(\d+\.\d+)\.\d+(\+(cpu|cu\d+|rocm[\d.]+|xpu))?")


class Unfit(RuntimeError):
    """No ready-made probe fits; the message says why."""


class Binary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of them, and what it was made for."""

    file: str
    torch: str  # minor version
    headers: str  # the release whose headers were taken
    machine: str
    new_abi: bool
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of them, and what they were made from."""

    sources_sha256: str
    recipe_sha256: str  # of the compiler's name and flags: `.ci/build_probes.py`
    binaries: list[Binary]


def sources_digest() -> str:
    """Return the digest of the probe's sources as they are now."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()


def read_manifest(directory: Path = DIRECTORY) -> Manifest:
    """Read the list of what is there. Raises Unfit."""
    try:
        return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise Unfit(f"the list of ready-made probes cannot be read: {error}") from None


def find(
    torch: Torch, environ: Mapping[str, str] = os.environ, directory: Path = DIRECTORY
) -> tuple[Path, Binary]:
    """Return the ready-made probe for this PyTorch. Raises Unfit."""
    if environ.get(SWITCH, "1") == "0":
        raise Unfit(f"switched off by {SWITCH}=0")
    release = _RELEASE.fullmatch(torch.version)
    if release is None:
        raise Unfit(f"PyTorch {torch.version} is not a release of the PyTorch project")
    manifest = read_manifest(directory)
    wanted = (release[1], torch.machine, torch.new_abi)
    fitting = [
        each for each in manifest.binaries if (each.torch, each.machine, each.new_abi) == wanted
    ]
    if not fitting:
        abi = "" if torch.new_abi else ", old C++ ABI"
        raise Unfit(f"there is none for PyTorch {release[1]} on {torch.machine}{abi}")
    if manifest.sources_sha256 != sources_digest():
        raise Unfit("they were made from other sources of the probe")
    path = directory / fitting[0].file
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise Unfit(f"{path}: {error.strerror}") from None
    if digest != fitting[0].sha256:
        raise Unfit(f"{path} is not the file that the manifest names")
    return path, fitting[0]
