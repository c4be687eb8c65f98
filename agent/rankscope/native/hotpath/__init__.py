"""What each step goes through, natively where a ready-made binary fits, else in Python.

Both do the same, which a test compares; they differ in what a step costs.
"""

from typing import TYPE_CHECKING

from rankscope.native.hotpath import clock, native, waits

if TYPE_CHECKING:
    from rankscope.native.hotpath.clock import ClockCore
    from rankscope.native.hotpath.waits import WaitCore

try:
    _twin = native.load()
    ORIGIN = "native"
except native.Unfit as reason:
    _twin, ORIGIN = None, f"in Python: {reason}"
if not TYPE_CHECKING:
    ClockCore = clock.ClockCore if _twin is None else _twin.ClockCore
    WaitCore = waits.WaitCore if _twin is None else _twin.WaitCore

__all__ = ["ORIGIN", "ClockCore", "WaitCore"]
