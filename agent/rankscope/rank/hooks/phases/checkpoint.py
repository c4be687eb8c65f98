"""Checkpoints: the time that saving takes from the main thread, and what was saved where."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, ClassVar

from rankscope.rank.context import Context
from rankscope.rank.guard import guarded
from rankscope.rank.hooks.phases.timed import in_phase
from rankscope.rank.steps import CHECKPOINT


class Checkpointing:
    """Time in torch.save, and the fact that a step saved a checkpoint."""

    name: ClassVar[str] = "checkpoint"
    needs: ClassVar[str] = "torch.serialization"

    def install(self, context: Context) -> str:
        """Patch torch.save, under both names that people use."""

        @guarded
        def saved(args: Any, kwargs: Any, result: Any, duration_ns: int) -> None:
            file = args[1] if len(args) > 1 else kwargs.get("f")
            context.event("checkpoint", _file_facts("torch.save", file, duration_ns))

        _patch(context, "torch.serialization", "torch", "save", saved)
        return "torch.save"


class DistributedCheckpointing:
    """Time in torch.distributed.checkpoint: save, and what async_save takes before it returns."""

    name: ClassVar[str] = "distributed-checkpoint"
    needs: ClassVar[str] = "torch.distributed.checkpoint.state_dict_saver"

    def install(self, context: Context) -> str:
        """Patch both functions, under both names."""

        @guarded
        def saved(args: Any, kwargs: Any, result: Any, duration_ns: int) -> None:
            context.event("checkpoint", _dcp_facts("dcp.save", kwargs, duration_ns))

        @guarded
        def staged(args: Any, kwargs: Any, result: Any, duration_ns: int) -> None:
            facts = _dcp_facts("dcp.async_save", kwargs, duration_ns)
            context.event("checkpoint", facts)
            future = getattr(result, "upload_completion", result)
            if hasattr(future, "add_done_callback"):
                future.add_done_callback(guarded(lambda done: written(facts, done)))

        def written(facts: dict[str, str], done: Any) -> None:
            failure = None if done.cancelled() else done.exception()
            outcome = "cancelled" if done.cancelled() else repr(failure) if failure else "done"
            context.event("checkpoint written", facts | {"outcome": outcome[:500]})

        package = "torch.distributed.checkpoint"
        _patch(context, self.needs, package, "save", saved)
        _patch(context, self.needs, package, "async_save", staged)
        return "torch.distributed.checkpoint"


class Safetensors:
    """Time in safetensors.torch.save_file."""

    name: ClassVar[str] = "safetensors"
    needs: ClassVar[str] = "safetensors.torch"

    def install(self, context: Context) -> str:
        """Patch the function in its module."""

        @guarded
        def saved(args: Any, kwargs: Any, result: Any, duration_ns: int) -> None:
            file = args[1] if len(args) > 1 else kwargs.get("filename")
            context.event("checkpoint", _file_facts("safetensors", file, duration_ns))

        _patch(context, self.needs, "safetensors", "save_file", saved)
        return "safetensors.torch.save_file"


def _patch(context: Context, module_name: str, package_name: str, name: str, after: Any) -> None:
    """Time a function as a checkpoint, in its module and where its package repeats it."""
    module, package = sys.modules[module_name], sys.modules.get(package_name)
    original: Callable[..., Any] = getattr(module, name)
    timed = in_phase(context.clock, CHECKPOINT, original, after=after, returns=True)
    context.patch_all((module, package), name, timed)


def _file_facts(how: str, file: Any, duration_ns: int) -> dict[str, str]:
    """Describe a saved file; a buffer in memory has no path, its size is its position."""
    facts = {"how": how, "seconds": f"{duration_ns / 1e9:.6f}"}
    path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
    if isinstance(path, str | os.PathLike):
        facts["path"] = os.fspath(path)
        if isinstance(file, str | os.PathLike):
            facts["bytes"] = str(os.stat(path).st_size)
    elif hasattr(file, "getbuffer"):
        facts["bytes"] = str(file.tell())
    return facts


def _dcp_facts(how: str, kwargs: dict[str, Any], duration_ns: int) -> dict[str, str]:
    facts = {"how": how, "seconds": f"{duration_ns / 1e9:.6f}"}
    place = kwargs.get("checkpoint_id") or getattr(kwargs.get("storage_writer"), "path", None)
    if place is not None:
        facts["path"] = str(place)
    return facts
