"""What a preflight was asked to do, what one agent makes of it, and where it reports progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rankscope.preflight.checks.base import Check
from rankscope.preflight.exchange.carrier import Carrier
from rankscope.preflight.exchange.discover import Asked, Discovery
from rankscope.preflight.key import RunKey
from rankscope.preflight.options import Options
from rankscope.preflight.secret import Secret
from rankscope.preflight.system import System

WAIT_S = 60.0
UNNAMED = "preflight"  # a run of several nodes that was given no name


class UsageError(Exception):
    """What was asked cannot be done; the message names the option and the remedy."""


class StandsAside(Exception):
    """This process has nothing to do; the message says which one does it."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked on the command line, before anything was looked up."""

    who: Asked = field(default_factory=Asked)
    options: Options = field(default_factory=Options)
    run_id: str = ""
    wait_s: float = WAIT_S
    timeout_s: float = 0.0
    command: Sequence[str] = ()
    is_mesh: bool = True
    token_file: str = ""  # that holds the secret
    is_insecure: bool = False  # no secret: all who reach a node may take part


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that the runner needs; made by the command line."""

    run_id: str
    key: RunKey  # what agents of one run share: strangers get nothing but a close
    secret: Secret  # that the key is made of
    who: Discovery
    options: Options = field(default_factory=Options)
    wait_s: float = WAIT_S  # for nodes that have not reported
    timeout_s: float = 0.0  # of everything after that; 0: by tier and number of nodes
    command: Sequence[str] = ()  # that will be launched, where it is known
    carriers: Sequence[Carrier] = ()  # beside the mesh
    is_mesh: bool = True  # False: no port is opened and no node is called
    foreign: Sequence[Check] = ()  # checks of other packages
    system: System = field(default_factory=System)


class Progress(Protocol):
    """Where the runner reports its progress."""

    def stage(self, name: str, detail: str = "") -> None:
        """Show what is being done; called again as `detail` changes."""
        ...

    def note(self, text: str) -> None:
        """Show a line that stays, on this node's terminal and in no report."""
        ...


class Silent:
    """Shows nothing."""

    def stage(self, name: str, detail: str = "") -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""
