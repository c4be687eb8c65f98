"""Loads the native twin of this package where a ready-made one fits: one binary per machine."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rankscope.files import ring
from rankscope.native.binaries import MANIFEST, SWITCH, unsupported
from rankscope.native.hotpath import clock, waits
from rankscope.wire import schema

MODULE = "rankscope_hotpath"
HERE = Path(__file__).parent
DIRECTORY = HERE / "ready"
SOURCES = (
    HERE / "hotpath.cpp",
    HERE / "python_types.hpp",
    HERE.parent / "probe" / "python.hpp",  # its C API serves both
)
LAYOUT = " | ".join(
    " ".join(f"{name}:{code}" for name, _, code in fields)
    for fields in (ring.COLLECTIVE_FIELDS, ring.STEP_FIELDS)
)
# In the order of `Constants` in hotpath.cpp.
CONSTANTS: tuple[int, ...] = (
    ring.HEADER_BYTES, ring.HEAD_AT, ring.HEARTBEAT_AT, ring.PHASE_SINCE_AT, ring.PHASE_AT,
    ring.CLOCK_AT, ring.BLOCKED_AT, ring.LATEST_END_AT, ring.ENGINE_NUMBER_AT,
    ring.ENGINE_ARRIVED_AT, ring.ENGINE_SITE_AT, ring.THINNED_AT,
    schema.ENDED, schema.FLAG_BY_ENGINE, schema.STEP_CHECKPOINT, schema.STEP_EVALUATION,
    clock.RENEW_CLOCK_NS,
    waits.AT_ONCE, waits.MOST_LOOKED_AT, waits.FIRST_PASSES, waits.LONGER, waits.SHORTER,
    waits.MOST_COPIED, waits.SIZES_HOLD, waits.NO_ENGINE,
)  # fmt: skip


class Unfit(RuntimeError):
    """The native twin cannot be used here; the message says why."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was made, and from what: `.ci/build_probes.py` writes it."""

    sources_sha256: str
    recipe_sha256: str
    binaries: dict[str, str]  # digest by machine


def file_of(machine: str) -> str:
    """Return the name of the binary for a machine."""
    return f"hotpath-{machine}.so"


def sources_digest() -> str:
    """Return the digest of the native sources as they are now."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()


def load(environ: Mapping[str, str] = os.environ, directory: Path = DIRECTORY) -> Any:
    """Return the module, configured with the layouts of the rings. Raises Unfit."""
    if environ.get(SWITCH, "1") == "0":
        raise Unfit(f"switched off by {SWITCH}=0")
    if sys.implementation.name != "cpython" or unsupported():
        raise Unfit(unsupported() or f"made for CPython, not {sys.implementation.name}")
    machine = os.uname().machine
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
        if machine not in manifest.binaries:
            raise Unfit(f"there is none for {machine}")
        if manifest.sources_sha256 != sources_digest():
            raise Unfit("it was made from other sources")
        path = directory / file_of(machine)
        if hashlib.sha256(path.read_bytes()).hexdigest() != manifest.binaries[machine]:
            raise Unfit(f"{path} is not the file that the manifest names")
        module = _import(path)
    except (OSError, ImportError, ValueError, msgspec.DecodeError) as error:
        raise Unfit(str(error)) from None
    tried = module.ClockCore()
    tried.thread = threading.get_ident()
    if not tried.is_ours():
        raise Unfit("this Python names its threads in another way")
    return module


def _import(path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module: Any = importlib.util.module_from_spec(spec)
    module.configure(LAYOUT, CONSTANTS)
    return module
