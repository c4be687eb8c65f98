"""Faults around the rank's process before it joins the others: versions, variables, ports."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.fault import Fault, FaultContext, Place

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings


class VersionDrift(Fault):
    """Another version of `filelock` stands first on the rank's path, and is the one loaded."""

    name = "version_drift"
    finding = "version_drift"
    place = Place.START
    package = "filelock"  # small, pure Python, and wherever torch is

    def begin(self, context: FaultContext) -> None:
        """Put a copy that calls itself 0.0.1 higher before the installed one, and load it."""
        package = self.package
        installed = importlib.metadata.distribution(package)
        version = installed.version
        other = re.sub(r"\d+$", lambda last: str(int(last[0]) + 1), version)
        self._folder = Path(tempfile.mkdtemp(prefix="version-drift-"))
        shutil.copytree(str(installed.locate_file(package)), self._folder / package)
        for source in (self._folder / package).glob("*version*.py"):
            source.write_text(source.read_text().replace(version, other))
        metadata = self._folder / f"{package}-{other}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {other}\n")
        sys.path.insert(0, str(self._folder))
        importlib.invalidate_caches()
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        loaded = importlib.import_module(package)
        context.note(package=package, installed=version, loaded=loaded.__version__)

    def end(self, context: FaultContext) -> None:
        """Remove the copy; what is loaded stays loaded."""
        sys.path.remove(str(self._folder))
        shutil.rmtree(self._folder)


class EnvironmentDrift(Fault):
    """The rank joins the others with NCCL_PROTO=Simple, which NCCL reads and gloo does not."""

    name = "environment_drift"
    finding = "version_drift"
    place = Place.START
    variable, value = "NCCL_PROTO", "Simple"

    def begin(self, context: FaultContext) -> None:
        """Set the variable before the group is joined."""
        self._before = os.environ.get(self.variable)
        context.note(variable=self.variable, before=self._before or "", value=self.value)
        os.environ[self.variable] = self.value

    def end(self, context: FaultContext) -> None:
        """Restore what was there."""
        if self._before is None:
            del os.environ[self.variable]
        else:
            os.environ[self.variable] = self._before


# Listens until this rank, whose pipe it reads, is gone.
HOLDER = """
import socket, sys
held = socket.create_server(("", 0))
print(held.getsockname()[1], flush=True)
sys.stdin.read()
"""


class PortInUse(Fault):
    """Another process listens on the port at which rank 0 wants to open the rendezvous."""

    name = "port_in_use"
    finding = "failed_start"
    place = Place.START

    def check(self, settings: Settings, world_size: int) -> None:
        """A rank without a launcher needs no rendezvous."""
        if world_size < 2:
            raise SettingError("fault", "port_in_use: one rank needs no port", "Start two or more")

    def is_due(self, context: FaultContext) -> bool:
        """Only rank 0 opens the rendezvous; the others come to it."""
        return context.rank == 0

    def fire(self, context: FaultContext) -> None:
        """Let a process take a port, and name that port as the meeting place.

        torchrun itself listens on its own, so rank 0 is made to open one, as `env://` does
        without torchrun.
        """
        self._holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        port = int(self._holder.stdout.readline())
        context.note(port=port, holder_pid=self._holder.pid)
        os.environ["MASTER_PORT"] = str(port)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
