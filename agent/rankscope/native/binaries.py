"""What all ready-made native binaries of the agent have in common."""

from __future__ import annotations

import platform
import sysconfig

SWITCH = "RANKSCOPE_PROBE_READY"  # 0: load none, as if there were none
MANIFEST = "manifest.json"


def unsupported() -> str:
    """Return why no native binary can work on this system; empty if one can."""
    if platform.system() != "Linux":
        return f"made for Linux only, this is {platform.system()}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "made for Pythons with the interpreter lock, this one is free-threaded"
    return ""
