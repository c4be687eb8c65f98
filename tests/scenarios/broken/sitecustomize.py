"""Attaches an agent of which every guarded function fails, in the way that BROKEN says.

`before`: it raises before its work; `after`: it does its work and raises then. The guard never
gives up on a function, so that each call of each function fails. Their names go to BROKEN_NAMES.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from rankscope.rank import guard

HOW = os.environ["BROKEN"]
INSTALLING = ("install of hook", "Collectives.install.<locals>.before", "runtime.Agent.open")
fired: Counter[str] = Counter()
sound = guard.guarded


class BrokenOnPurposeError(Exception):
    """Must never be seen by the script."""


def breaking(function: Callable[..., Any]) -> Callable[..., Any]:
    name = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def fails(*args: Any, **kwargs: Any) -> Any:
        # to attach and to install are left whole: a hook that is not there breaks nothing
        whole = name.startswith("rankscope.rank.attach") or any(part in name for part in INSTALLING)
        if whole or HOW == "after":
            result = function(*args, **kwargs)
            if whole:
                return result
        fired[name] += 1
        raise BrokenOnPurposeError(name)

    return sound(fails)


def write_names() -> None:
    path = f"{os.environ['BROKEN_NAMES']}.{os.getpid()}"
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(f"{name}\n" for name in fired)


guard.guarded = guard.guarded_one = guard.guarded_two = breaking
guard.MAX_FAILURES = 1 << 60
guard._LOG_EVERY_SECONDS = 1e9
atexit.register(write_names)

from rankscope.rank.attach.start import attach_from_environment  # noqa: E402 - behind the breaking

os.environ["RANKSCOPE"] = "1"
attach_from_environment()
os.environ["RANKSCOPE"] = "0"  # of an installed package: its own line comes before this file
