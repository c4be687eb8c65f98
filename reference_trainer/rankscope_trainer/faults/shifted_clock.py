"""Makes this process's own wall clock wrong, as that of a host without a time service is.

A small C function, compiled when it is needed, does it (`clockshift.c`). Whoever reads the time in
this process reads the wrong one, an observer too: that is the fault, as on such a host. The
manifest's times are true, but those of other faults that begin or end meanwhile on this rank.
"""

import ctypes
import subprocess
import tempfile
from pathlib import Path

from rankscope_trainer.errors import SettingError

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
