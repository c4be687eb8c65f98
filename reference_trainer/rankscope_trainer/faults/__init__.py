"""Faults that can be injected: one file each, named in one tuple.

A fault acts on the real thing (a slow forward, a slow data loader, a rank that never arrives)
and never on the instruments that are to find it.
"""

from rankscope_trainer.faults.abort import Abort
from rankscope_trainer.faults.bitflip_gradient_after import BitflipGradientAfter
from rankscope_trainer.faults.bitflip_gradient_before import BitflipGradientBefore
from rankscope_trainer.faults.bitflip_weight import BitflipWeight
from rankscope_trainer.faults.collective_doubled import CollectiveDoubled
from rankscope_trainer.faults.collective_skipped import CollectiveSkipped
from rankscope_trainer.faults.collectives_swapped import CollectivesSwapped
from rankscope_trainer.faults.crash import Crash
from rankscope_trainer.faults.different_seeds import DifferentSeeds
from rankscope_trainer.faults.disk_full import DiskFull
from rankscope_trainer.faults.exploding_loss import ExplodingLoss
from rankscope_trainer.faults.fault import Fault
from rankscope_trainer.faults.hang import Hang
from rankscope_trainer.faults.hang_gil import HangGil
from rankscope_trainer.faults.hang_lock import HangLock
from rankscope_trainer.faults.hang_stopped import HangStopped
from rankscope_trainer.faults.nan_data import NanData
from rankscope_trainer.faults.os_exit import OsExit
from rankscope_trainer.faults.out_of_memory import OutOfMemory
from rankscope_trainer.faults.port_in_use import PortInUse
from rankscope_trainer.faults.replica_drift import ReplicaDrift
from rankscope_trainer.faults.segfault import Segfault
from rankscope_trainer.faults.sigkill import SigKill
from rankscope_trainer.faults.slow_compute import SlowCompute
from rankscope_trainer.faults.slow_data import SlowData
from rankscope_trainer.faults.swallowed_exception import SwallowedException
from rankscope_trainer.faults.wrong_dtype import WrongDtype
from rankscope_trainer.faults.wrong_op import WrongOp
from rankscope_trainer.faults.wrong_shape import WrongShape

FAULTS: tuple[Fault, ...] = (
    SlowCompute(),
    SlowData(),
    Hang(),
    Crash(),
    HangLock(),
    HangGil(),
    HangStopped(),
    CollectiveSkipped(),
    CollectiveDoubled(),
    CollectivesSwapped(),
    WrongShape(),
    WrongDtype(),
    WrongOp(),
    SwallowedException(),
    OsExit(),
    SigKill(),
    Segfault(),
    Abort(),
    OutOfMemory(),
    DiskFull(),
    PortInUse(),
    NanData(),
    ExplodingLoss(),
    BitflipWeight(),
    BitflipGradientBefore(),
    BitflipGradientAfter(),
    ReplicaDrift(),
    DifferentSeeds(),
)
