"""Whether this process is a rank's child and no rank itself."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rankscope.process.family import is_child
from rankscope.rank.attach.start import ATTACHED


def is_inherited(environ: Mapping[str, str]) -> bool:
    """Return whether this process only inherited the variables of an attached rank."""
    attached = environ.get(ATTACHED, "")
    return bool(attached and attached != str(os.getpid())) or is_child()
