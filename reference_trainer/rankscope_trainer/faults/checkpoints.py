"""Faults at checkpoints: they take long, fail, or are written too rarely."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.fault import (
    DelayFault,
    Fault,
    FaultContext,
    Magnitude,
    Place,
    SettingsFault,
)

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings

CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
KIB = 1024


class SlowCheckpoint(DelayFault):  # slow storage of one rank; its peers wait for it
    """Each checkpoint takes the rank longer to write."""

    name = "slow_checkpoint"
    finding = "slow_checkpoint"
    place = Place.CHECKPOINT
    default_size = Magnitude(seconds=2.0)
    size_is = "extra time of a write"


class RareCheckpoint(SettingsFault):
    """Checkpoints are written so many times more rarely than the settings say."""

    name = "rare_checkpoint"
    finding = "checkpoint_interval"
    default_size = Magnitude(count=10)
    size_is = "times rarer"

    def check(self, settings: Settings, world_size: int) -> None:
        """Only a run that writes any can write fewer."""
        if not settings.checkpoint_dir:
            problem = "rare_checkpoint has no effect on a run that writes none"
            raise SettingError("fault", problem, "Give a checkpoint_dir")

    def changes(self, settings: Settings, context: FaultContext) -> dict[str, Any]:
        """Make the interval longer."""
        every = settings.checkpoint_every * int(context.size())
        context.add(checkpoint_every=every)
        return {"checkpoint_every": every}


class DiskFull(Fault):
    """The file system of the checkpoints is full after so much, and the write fails."""

    name = "disk_full"
    finding = "crash"
    place = Place.CHECKPOINT
    default_size = Magnitude(mib=0.0625)
    size_is = "space that is left"

    def check(self, settings: Settings, world_size: int) -> None:
        """Without checkpoints nothing is written."""
        if not settings.checkpoint_dir:
            remedy = "Name a checkpoint_dir"
            raise SettingError("fault", "disk_full acts on checkpoints", remedy)

    def fire(self, context: FaultContext) -> None:
        """Put a small disk in the place of the folder, seen by this thread alone.

        That needs the right to mount. Without it the process may only write small files: the
        kernel then says `File too large` instead of `No space left on device`.
        """
        left_kib = max(1, int(context.size() * KIB))
        folder = Path(context.parts().settings.checkpoint_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if mount_small_disk(folder, left_kib):
            context.note(mechanism="tmpfs")
        else:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (left_kib * KIB, hard))
            context.note(mechanism="RLIMIT_FSIZE")


def mount_small_disk(folder: Path, size_kib: int) -> bool:
    """Mount a memory disk on the folder in a mount namespace of this thread's own, if allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        return False
    if libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None):
        return False
    options = f"size={size_kib}k".encode()
    return not libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options)
