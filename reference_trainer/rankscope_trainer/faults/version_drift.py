"""A rank that runs with another version of a library than the others."""

import importlib
import importlib.metadata
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

from rankscope_trainer.faults.fault import Fault, FaultContext, Place

PACKAGE = "filelock"  # small, pure Python, and wherever torch is


class VersionDrift(Fault):
    """Another version of `filelock` stands first on the rank's path, and is the one loaded."""

    name: ClassVar[str] = "version_drift"
    finding: ClassVar[str] = "version_drift"
    place: ClassVar[Place] = Place.START

    def begin(self, context: FaultContext) -> None:
        """Put a copy that calls itself 0.0.1 higher before the installed one, and load it."""
        installed = importlib.metadata.distribution(PACKAGE)
        version = installed.version
        other = re.sub(r"\d+$", lambda last: str(int(last[0]) + 1), version)
        self._folder = Path(tempfile.mkdtemp(prefix="version-drift-"))
        shutil.copytree(str(installed.locate_file(PACKAGE)), self._folder / PACKAGE)
        for source in (self._folder / PACKAGE).glob("*version*.py"):
            source.write_text(source.read_text().replace(version, other))
        metadata = self._folder / f"{PACKAGE}-{other}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {other}\n")
        sys.path.insert(0, str(self._folder))
        importlib.invalidate_caches()
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        loaded = importlib.import_module(PACKAGE)
        context.tell(package=PACKAGE, installed=version, loaded=loaded.__version__)

    def end(self, context: FaultContext) -> None:
        """Remove the copy; what is loaded stays loaded."""
        sys.path.remove(str(self._folder))
        shutil.rmtree(self._folder)
