"""Faults that can be injected: one file each, named in one tuple.

A fault acts on the real thing (a slow forward, a slow data loader, a rank that never arrives)
and never on the instruments that are to find it.
"""

from rankscope_trainer.faults.crash import Crash
from rankscope_trainer.faults.fault import Fault
from rankscope_trainer.faults.hang import Hang
from rankscope_trainer.faults.slow_compute import SlowCompute
from rankscope_trainer.faults.slow_data import SlowData

FAULTS: tuple[Fault, ...] = (SlowCompute(), SlowData(), Hang(), Crash())
