"""What PyTorch 2.6 does not support, checked before a run hangs or fails inside the library.

Each function raises SettingError where the installed version lacks what a strategy needs. What is
asked for is the thing itself, not the number of the version.
"""

from __future__ import annotations

import inspect

import torch
import torch.distributed.rpc
from torch.distributed.pipelining import schedules
from torch.distributed.tensor.parallel import parallelize_module

from rankscope_trainer.errors import SettingError

_NEWER = "or install PyTorch 2.9 or newer"


def require_schedule(schedule: str, device: torch.device) -> None:
    """2.6 waits for the last one of the messages that it sends at once; gloo drops the others."""
    if device.type == "cpu" and schedule != "gpipe" and not hasattr(schedules, "_wait_batch_p2p"):
        problem = f"{schedule} of PyTorch {torch.__version__} loses messages on gloo, and hangs"
        raise SettingError("schedule", problem, f"Choose gpipe with strategy pipeline, {_NEWER}")


def require_fully_shard(device: torch.device) -> None:
    """FSDP2 of 2.6 records events on streams of the CPU, which have none there."""
    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        problem = f"fully_shard of PyTorch {torch.__version__} does not run on CPUs"
        raise SettingError("strategy", problem, f"Choose another one, {_NEWER}")


def require_rpc() -> None:
    """Some builds come without it, as those for Windows and macOS."""
    if not torch.distributed.rpc.is_available():
        problem = f"this build of PyTorch {torch.__version__} has no torch.distributed.rpc"
        raise SettingError("exchange", problem, "Choose messages, or another build")


def require_own_weights() -> None:
    """2.6 cuts fewer kinds of layers, and sends the weights of rank 0, which all ranks have."""
    if "src_data_rank" not in inspect.signature(parallelize_module).parameters:
        problem = f"PyTorch {torch.__version__} cannot cut these layers"
        raise SettingError("strategy", problem, f"Choose another one, {_NEWER}")
