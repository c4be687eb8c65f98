"""Faults of the wall clock of one process, as on a host without a time service.

A small C function, compiled when it is needed, shifts it (`clockshift.c`). Everything that reads
the time in this process reads the wrong one, an observer too: that is the fault, as on such a host.
The manifest's times are true, but not those of other faults that begin or end meanwhile on this
rank.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.fault import Fault, FaultContext, Magnitude, Place

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings

SOURCE = Path(__file__).with_name("clockshift.c")
REMEDY = "Install one, or leave the fault out"


class ShiftedClock:
    """The compiled function, loaded; the clock is right until `set`."""

    def __init__(self) -> None:
        """Compile and load, or raise a SettingError that says why not."""
        with tempfile.TemporaryDirectory(prefix="clockshift-") as folder:
            library = Path(folder, "clockshift.so")
            command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True)
            except FileNotFoundError as error:
                problem = "a wrong clock needs a C compiler (cc), there is none"
                raise SettingError("fault", problem, REMEDY) from error
            except subprocess.CalledProcessError as error:
                problem = f"the C compiler failed: {error.stderr.strip()[-300:]}"
                raise SettingError("fault", problem, REMEDY) from error
            self._set = ctypes.CDLL(str(library)).clockshift_set
        self._set.argtypes = (ctypes.c_longlong, ctypes.c_double)
        self._set.restype = ctypes.c_int

    def set(self, *, offset_ns: int = 0, drift_ppm: float = 0.0) -> None:
        """Let the clock be wrong by so much, and by so much more as time passes, from now on."""
        if not self._set(offset_ns, drift_ppm):
            raise RuntimeError("no call of the clock was found in this process")


class _ClockFault(Fault):
    place = Place.STEP

    def check(self, settings: Settings, world_size: int) -> None:
        """There must be a compiler."""
        self._clock = ShiftedClock()

    def end(self, context: FaultContext) -> None:
        """Set it right."""
        self._clock.set()


class ClockOffset(_ClockFault):
    """The wall clock of the rank's process jumps ahead, and stays there."""

    name = "clock_offset"
    finding = "clock_offset"
    default_size = Magnitude(seconds=0.2)
    size_is = "time ahead"

    def begin(self, context: FaultContext) -> None:
        """Shift the clock."""
        self._clock.set(offset_ns=round(context.size() * 1e9))


class ClockDrift(_ClockFault):
    """The wall clock of the rank's process runs too fast, and is more wrong from step to step."""

    name = "clock_drift"
    finding = "clock_drift"
    default_size = Magnitude(ppm=200.0)
    size_is = "too fast by"

    def begin(self, context: FaultContext) -> None:
        """Let the clock run away."""
        self._clock.set(drift_ppm=context.size())
