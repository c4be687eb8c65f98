"""Start the agent of this process, once; called by every way of attaching."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from rankscope.guard import guarded

if TYPE_CHECKING:
    from rankscope.runtime import Agent
    from rankscope.settings import Settings

ATTACHED = "RANKSCOPE_ATTACHED"  # pid of the attached rank: its children are not that rank
_OWN = ("rankscope", "rankscope.", "rankscope_server")  # our own programs are not watched
_agent: Agent | None = None
_tried = False  # a .pth line and a sitecustomize may both come by


def agent() -> Agent | None:
    """Return the agent of this process, None where none was started."""
    return _agent


def start(settings: Settings) -> Agent:
    """Start the agent, or return the one that runs. Raises ValueError for a bad setting."""
    global _agent
    if _agent is None:
        from rankscope.runtime import Agent

        _agent = Agent(settings, os.environ)
        _agent.start()
    return _agent


@guarded
def attach_from_environment() -> None:
    """Attach if RANKSCOPE=1 says so. A bad setting is one line on stderr, never an error."""
    global _tried
    if os.environ.get("RANKSCOPE") != "1" or _tried or _is_our_own(sys.orig_argv):
        return
    _tried = True
    from rankscope.settings import from_environment

    try:
        start(from_environment(os.environ))
    except ValueError as error:
        if os.environ.setdefault(ATTACHED, str(os.getpid())) != str(os.getpid()):
            return  # a child of the process that has said so
        sys.stderr.write(f"rankscope: not attached: {error}\n")


def _is_our_own(argv: list[str]) -> bool:
    """Return whether this process is the launcher, the collector, the server or another command."""
    words = argv[1:]
    if "-m" in words[:-1]:
        module = words[words.index("-m") + 1]
        return module == _OWN[0] or module.startswith(_OWN[1:])
    return bool(words) and os.path.basename(words[0]) == _OWN[0]
