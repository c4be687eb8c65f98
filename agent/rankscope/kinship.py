"""Whether this process is a rank's child and no rank itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from rankscope.attach.start import ATTACHED


def is_inherited(environ: Mapping[str, str]) -> bool:
    """Return whether this process only inherited the variables of an attached rank."""
    attached = environ.get(ATTACHED, "")
    return bool(attached and attached != str(os.getpid())) or is_child()


def is_child() -> bool:
    """Return whether `multiprocessing` started this process."""
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing is not None and multiprocessing.parent_process() is not None
