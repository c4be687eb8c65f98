"""Where libraries of the job keep what they download and compile, and whether that can be written.

Only places that a job writes to by itself: that of torch.hub always, others where their package is
there or their variable is set.
"""

from __future__ import annotations

import os.path
import pwd
from collections.abc import Iterator
from importlib.util import find_spec

import msgspec

from rankscope.preflight.system import System


class Cache(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One place, by the variable that moves it."""

    variable: str
    path: str
    is_set: bool = False  # by that variable; else it follows from HOME or XDG_CACHE_HOME
    closed: str = ""  # why nothing can be written there


def places(system: System) -> Iterator[Cache]:
    """Yield the caches that a job would write to on this machine."""
    environ = system.environ
    home = environ.get("HOME") or _home()
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    if environ.get("TMPDIR"):
        yield Cache(variable="TMPDIR", path=environ["TMPDIR"], is_set=True)
    yield _place(system, "TORCH_HOME", os.path.join(cache, "torch"))
    is_offline = environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "ON", "YES")
    if not is_offline and ("HF_HOME" in environ or _has("huggingface_hub")):
        yield _place(system, "HF_HOME", os.path.join(cache, "huggingface"))
    if environ.get("TORCHINDUCTOR_CACHE_DIR"):
        yield _place(system, "TORCHINDUCTOR_CACHE_DIR", "")
    has_gpu = bool({"nvidia0", "kfd"} & set(system.names("/dev")))
    if environ.get("TRITON_CACHE_DIR") or (has_gpu and _has("triton")):
        base = environ.get("TRITON_HOME") or home
        yield _place(system, "TRITON_CACHE_DIR", os.path.join(base, ".triton", "cache"))


def _place(system: System, variable: str, default: str) -> Cache:
    said = system.environ.get(variable, "")
    return Cache(variable=variable, path=said or default, is_set=bool(said))


def _home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return "/"


def _has(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False
