"""What one agent is to do, and whom it tells how far it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rankscope.preflight.checks.base import Check
from rankscope.preflight.exchange.base import Carrier
from rankscope.preflight.exchange.discover import Discovery
from rankscope.preflight.model import Options
from rankscope.preflight.system import System

WAIT_S = 60.0
UNNAMED = "preflight"  # a run of several nodes of which nobody said the name


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that the runner needs; made by the command line."""

    run_id: str
    token: str  # what agents of one run share: strangers get nothing but a close
    who: Discovery
    options: Options = field(default_factory=Options)
    wait_s: float = WAIT_S  # for nodes that have not reported
    timeout_s: float = 0.0  # of everything after that; 0: by tier and number of nodes
    command: Sequence[str] = ()  # that will be launched, where it is known
    carriers: Sequence[Carrier] = ()  # beside the mesh
    is_mesh: bool = True  # False: no port is opened and nobody is called
    foreign: Sequence[Check] = ()  # checks of other packages
    system: System = field(default_factory=System)


class Progress(Protocol):
    """Where the runner says how far it is."""

    def stage(self, name: str, detail: str = "") -> None:
        """Tell what is being done; called again as `detail` changes."""
        ...


class Silent:
    """Tells nobody."""

    def stage(self, name: str, detail: str = "") -> None:
        """Do nothing."""
