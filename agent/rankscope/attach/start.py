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
_agent: Agent | None = None


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
    if os.environ.get("RANKSCOPE") != "1" or _agent is not None:
        return
    from rankscope.settings import from_environment

    try:
        start(from_environment(os.environ))
    except ValueError as error:
        if os.environ.setdefault(ATTACHED, str(os.getpid())) != str(os.getpid()):
            return  # a child of the process that has said so
        sys.stderr.write(f"rankscope: not attached: {error}\n")
