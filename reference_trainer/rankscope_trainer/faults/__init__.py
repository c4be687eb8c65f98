"""Faults that can be injected: one file each, named in one tuple.

A fault acts on the real thing (a slow forward, a slow data loader, a rank that never arrives)
and never on the instruments that are to find it.
"""

from rankscope_trainer.faults.abort import Abort
from rankscope_trainer.faults.bad_shard import BadShard
from rankscope_trainer.faults.bitflip_gradient_after import BitflipGradientAfter
from rankscope_trainer.faults.bitflip_gradient_before import BitflipGradientBefore
from rankscope_trainer.faults.bitflip_weight import BitflipWeight
from rankscope_trainer.faults.clock_drift import ClockDrift
from rankscope_trainer.faults.clock_offset import ClockOffset
from rankscope_trainer.faults.collective_doubled import CollectiveDoubled
from rankscope_trainer.faults.collective_skipped import CollectiveSkipped
from rankscope_trainer.faults.collectives_swapped import CollectivesSwapped
from rankscope_trainer.faults.contention import Contention
from rankscope_trainer.faults.corrupt_batch import CorruptBatch
from rankscope_trainer.faults.crash import Crash
from rankscope_trainer.faults.different_seeds import DifferentSeeds
from rankscope_trainer.faults.disk_full import DiskFull
from rankscope_trainer.faults.environment_drift import EnvironmentDrift
from rankscope_trainer.faults.exploding_loss import ExplodingLoss
from rankscope_trainer.faults.fault import Fault
from rankscope_trainer.faults.few_microbatches import FewMicrobatches
from rankscope_trainer.faults.gc_pause import GcPause
from rankscope_trainer.faults.hang import Hang
from rankscope_trainer.faults.hang_gil import HangGil
from rankscope_trainer.faults.hang_lock import HangLock
from rankscope_trainer.faults.hang_stopped import HangStopped
from rankscope_trainer.faults.hiccup import Hiccup
from rankscope_trainer.faults.hot_shard import HotShard
from rankscope_trainer.faults.lossy_link import LossyLink
from rankscope_trainer.faults.memory_leak import MemoryLeak
from rankscope_trainer.faults.nan_data import NanData
from rankscope_trainer.faults.os_exit import OsExit
from rankscope_trainer.faults.out_of_memory import OutOfMemory
from rankscope_trainer.faults.port_in_use import PortInUse
from rankscope_trainer.faults.rare_checkpoint import RareCheckpoint
from rankscope_trainer.faults.replica_drift import ReplicaDrift
from rankscope_trainer.faults.segfault import Segfault
from rankscope_trainer.faults.sigkill import SigKill
from rankscope_trainer.faults.slow_backward import SlowBackward
from rankscope_trainer.faults.slow_checkpoint import SlowCheckpoint
from rankscope_trainer.faults.slow_compute import SlowCompute
from rankscope_trainer.faults.slow_data import SlowData
from rankscope_trainer.faults.slow_epoch_start import SlowEpochStart
from rankscope_trainer.faults.slow_forward import SlowForward
from rankscope_trainer.faults.slow_link import SlowLink
from rankscope_trainer.faults.stale_weights import StaleWeights
from rankscope_trainer.faults.stopped_link import StoppedLink
from rankscope_trainer.faults.swallowed_exception import SwallowedException
from rankscope_trainer.faults.uneven_stages import UnevenStages
from rankscope_trainer.faults.version_drift import VersionDrift
from rankscope_trainer.faults.worker_leak import WorkerLeak
from rankscope_trainer.faults.wrong_dtype import WrongDtype
from rankscope_trainer.faults.wrong_op import WrongOp
from rankscope_trainer.faults.wrong_shape import WrongShape

FAULTS: tuple[Fault, ...] = (
    SlowCompute(),
    SlowForward(),
    SlowBackward(),
    Hiccup(),
    GcPause(),
    Contention(),
    BadShard(),
    SlowEpochStart(),
    MemoryLeak(),
    WorkerLeak(),
    UnevenStages(),
    FewMicrobatches(),
    StaleWeights(),
    HotShard(),
    VersionDrift(),
    EnvironmentDrift(),
    ClockOffset(),
    ClockDrift(),
    SlowCheckpoint(),
    RareCheckpoint(),
    CorruptBatch(),
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
    SlowLink(),
    LossyLink(),
    StoppedLink(),
)
