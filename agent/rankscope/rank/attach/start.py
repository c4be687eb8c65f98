"""Start the agent of this process, once; called by every way of attaching."""

from __future__ import annotations

import os
import sys

from rankscope.process.family import ATTACHED, is_inherited, is_rank, name_family
from rankscope.rank.guard import guarded, say
from rankscope.rank.imports import when_imported

TYPE_CHECKING = False  # see rankscope/__init__.py
if TYPE_CHECKING:
    from rankscope.rank.context import Context
    from rankscope.rank.runtime import Agent
    from rankscope.settings import Settings

_OWN = ("rankscope", "rankscope.", "rankscope_server")  # our own programs are not watched
# their processes have variables of a rank at most by chance, for example those of their pod
_LAUNCHERS = frozenset({
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate",
    "accelerate-launch", "deepspeed", "deepspeed.pt",
})  # fmt: skip
_LAUNCHER_PACKAGES = ("accelerate.commands", "deepspeed.launcher")
_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"", "0", "false", "no", "off"})
_agent: Agent | None = None
_tried = False  # a .pth line and a sitecustomize may both come by


def agent() -> Agent | None:
    """Return the agent of this process, None where none was started."""
    return _agent


def context() -> Context | None:
    """Return what the agent of this process shares with its hooks, None where none was started."""
    return None if _agent is None else _agent.context


def start(settings: Settings) -> Agent:
    """Start the agent, or return the one that runs. Raises ValueError for a bad setting."""
    global _agent
    if _agent is None:
        from rankscope.rank.runtime import Agent

        name_family(os.environ)
        _agent = Agent(settings, os.environ)
        try:
            _agent.start()
        except ValueError:
            _agent = None  # the next call, with what exists, starts it
            raise
    return _agent


@guarded
def attach_from_environment() -> None:
    """Attach if RANKSCOPE says so. A bad setting is one line on stderr, never an error."""
    global _tried
    value = os.environ.get("RANKSCOPE", "").strip().lower()
    if value in _NO or _tried or _is_our_own(sys.orig_argv):
        return
    _tried = True
    name_family(os.environ)
    if _is_launcher(sys.orig_argv):
        return
    if value not in _YES:
        _say_why(f"RANKSCOPE={value!r}: set 1 or 0")
        return
    if is_rank(os.environ) and not is_inherited(os.environ):
        _start_by_environment()
    else:  # perhaps a tool that the job or a rank runs: it pays nothing
        when_imported("torch", _start_by_environment)


@guarded
def _start_by_environment() -> None:
    from rankscope.settings import from_environment

    try:
        start(from_environment(os.environ))
    except ValueError as error:
        _say_why(str(error))


def _say_why(reason: str) -> None:
    if os.environ.setdefault(ATTACHED, str(os.getpid())) != str(os.getpid()):
        return  # a child of the process that has printed it
    say(f"not attached: {reason}")


def _is_our_own(argv: list[str]) -> bool:
    """Return whether this process is the launcher, the collector, the server or another command."""
    program = _program(argv)
    return program == _OWN[0] or program.startswith(_OWN[1:])


def _is_launcher(argv: list[str]) -> bool:
    """Return whether this process only starts ranks; the variables that it has are not its own."""
    program = _program(argv)
    return program in _LAUNCHERS or program.startswith(_LAUNCHER_PACKAGES)


def _program(argv: list[str]) -> str:
    """Return the module, or the file name of the script, that this interpreter runs."""
    words = argv[1:]
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        words = words[2 if words[0] in ("-W", "-X") else 1 :]
    if words[:1] == ["-c"]:
        return ""
    if words[:1] == ["-m"]:
        return words[1] if len(words) > 1 else ""
    return os.path.basename(words[0]) if words else ""
