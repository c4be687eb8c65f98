"""What a strategy asks of the settings and the world size; nothing here imports torch."""

from __future__ import annotations

import itertools
import math
import os
from typing import TYPE_CHECKING

from rankscope_trainer.errors import SettingError
from rankscope_trainer.strategies.parameter_server.layout import parse_shares
from rankscope_trainer.strategies.stages import placement

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings


def ddp(settings: Settings, world_size: int) -> None:
    """Ranks without batches mirror plain reductions only. Raises SettingError."""
    others = (
        "comm_hook",
        "static_graph",
        "global_batch",
        "patience",
        "keep_best",
        "check_batches",
        "grace_seconds",
        "data_path",
        "least_seconds",
    )
    for name in others if settings.uneven_ratio else ():
        if getattr(settings, name) not in ("none", "", 0):
            problem = f"ranks that ran out of batches cannot take part in {name}"
            raise SettingError("uneven_ratio", problem, f"Leave out either uneven_ratio or {name}")


def pipeline(settings: Settings, world_size: int) -> None:
    """Every stage needs a layer, and a schedule its microbatches. Raises SettingError."""
    stages = placement.num_stages(settings, world_size)
    _layers_of_stages(settings, stages)
    microbatches = settings.microbatches_for(world_size)
    if settings.schedule == "1f1b" and microbatches < world_size:
        raise SettingError(
            "microbatches",
            f"schedule 1f1b keeps {world_size} stages busy with as many microbatches,"
            f" there are {microbatches}",
            f"Give at least {world_size}, or choose schedule gpipe",
        )
    rounds = max(1, microbatches // world_size)
    if settings.schedule in ("interleaved", "zero_bubble") and microbatches % rounds:
        problem = f"schedule {settings.schedule} runs {microbatches} in {rounds} equal rounds"
        raise SettingError("microbatches", problem, f"Give a multiple of {world_size}")
    if settings.schedule == "zero_bubble_v" and settings.virtual_stages != 2:
        raise SettingError(
            "virtual_stages", f"a V has 2 on each rank, not {settings.virtual_stages}", "Give 2"
        )
    ranks = [placement.rank_of_stage(settings, stage, world_size) for stage in range(stages)]
    if settings.validate_every and any(rank == other for rank, other in itertools.pairwise(ranks)):
        raise SettingError(
            "validate_every",
            "PyTorch's schedules cannot run forwards only where one rank holds neighbouring stages",
            "Give 0, or choose another schedule",
        )


def model_parallel(settings: Settings, world_size: int) -> None:
    """Every rank needs a layer, and the batch stays in one piece. Raises SettingError."""
    _layers_of_stages(settings, world_size)
    if settings.microbatches > 1:
        problem = "model_parallel does not cut its batch"
        raise SettingError("microbatches", problem, "Raise batch_size, or choose pipeline")


def _layers_of_stages(settings: Settings, stages: int) -> None:
    if settings.layers < stages:
        problem = f"{settings.layers} layers cannot fill {stages} pipeline stages"
        remedy = f"Give at least {stages} layers, or start fewer ranks"
        raise SettingError("layers", problem, remedy)
    if not settings.stage_layers:
        return
    sizes = _numbers("stage_layers", settings.stage_layers)
    is_whole = all(size >= 1 and size == int(size) for size in sizes)
    if not is_whole or len(sizes) != stages or sum(sizes) != settings.layers:
        raise SettingError(
            "stage_layers",
            f"{settings.stage_layers!r} does not split {settings.layers} layers"
            f" into {stages} stages",
            f"Give {stages} whole numbers from 1, which add up to {settings.layers}",
        )


def layer_seconds(settings: Settings) -> None:
    """The layers' times are one for all, or one for each. Raises SettingError."""
    seconds = _numbers("layer_seconds", settings.layer_seconds)
    if len(seconds) not in (1, settings.layers) or not all(0 <= each < 60 for each in seconds):
        problem = f"{settings.layer_seconds!r} is no time for each of {settings.layers} layers"
        remedy = f"Give one number of seconds, or {settings.layers} separated by commas"
        raise SettingError("layer_seconds", problem, remedy)


def _numbers(name: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        remedy = "Separate numbers by commas"
        raise SettingError(name, f"{text!r} is no list of numbers", remedy) from error


def pipedream(settings: Settings, world_size: int) -> None:
    """Every stage needs a layer; any number of microbatches will do. Raises SettingError."""
    if settings.layers < world_size:
        problem = f"{settings.layers} layers cannot fill {world_size} stages"
        remedy = f"Give at least {world_size} layers, or start fewer ranks"
        raise SettingError("layers", problem, remedy)


def hogwild(settings: Settings, world_size: int) -> None:
    """All ranks share the memory of one host. Raises SettingError."""
    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if on_this_host != world_size:
        raise SettingError(
            "strategy",
            "hogwild shares the memory of one host,"
            f" which has {on_this_host} of {world_size} ranks",
            "Start all ranks on one host with one torchrun, or choose another strategy",
        )


def global_batch(settings: Settings, world_size: int) -> None:
    """A fixed global batch is cut into microbatches, at least one for each rank."""
    if settings.strategy not in ("ddp", "fsdp", "ring"):
        remedy = "Leave it out, or choose ddp, fsdp or ring"
        raise SettingError("global_batch", f"{settings.strategy} has none", remedy)
    microbatches, rest = divmod(settings.global_batch, settings.batch_size)
    if rest or microbatches < world_size:
        raise SettingError(
            "global_batch",
            f"{settings.global_batch} sequences are not whole microbatches of"
            f" {settings.batch_size}, at least one for each of {world_size} ranks",
            f"Give a multiple of {settings.batch_size}, and enough for all ranks",
        )
    if settings.strategy == "fsdp" and microbatches % world_size:
        raise SettingError(
            "global_batch",
            f"{microbatches} microbatches are not equally many on {world_size} ranks, which"
            " gather weights together for each",
            f"Give a multiple of {settings.batch_size * world_size}",
        )


def regroup(settings: Settings) -> None:
    """What is left of a group trains on where all hold the same. Raises SettingError."""
    if not settings.regroup:
        for name in ("samples", "ask_advice"):
            if getattr(settings, name):
                raise SettingError(name, "only regroup has it", "Give regroup as well")
    if settings.obey_advice and not settings.ask_advice:
        raise SettingError("obey_advice", "none is asked for", "Give ask_advice as well")
    if not settings.regroup:
        return
    is_doubled = settings.strategy == "fsdp" and settings.replicas > 1
    if settings.strategy not in ("ddp", "ring") and not is_doubled:
        problem = f"{settings.strategy} loses with a rank what no other rank holds"
        remedy = "Leave it out, or choose ddp, ring, or fsdp with replicas"
        raise SettingError("regroup", problem, remedy)
    if settings.comm_hook in ("powersgd", "fp8"):
        problem = f"regroup loses with a rank the errors that {settings.comm_hook} still owes"
        raise SettingError("comm_hook", problem, "Choose none, fp16 or bf16, or leave out regroup")
    others = (
        "uneven_ratio", "static_graph", "patience", "keep_best", "check_batches", "data_path",
        "grace_seconds", "least_seconds", "loader_workers",
    )  # fmt: skip
    for name in others:
        if getattr(settings, name):
            problem = "with regroup ranks agree on nothing but whether a step is trained"
            raise SettingError(name, problem, f"Leave out either regroup or {name}")


def fsdp(settings: Settings, world_size: int) -> None:
    """Every replica has the same number of ranks. Raises SettingError."""
    if world_size % settings.replicas:
        problem = f"{world_size} ranks cannot form {settings.replicas} equal replicas"
        raise SettingError("replicas", problem, "Give a number that divides the number of ranks")


def parameter_server(settings: Settings, world_size: int) -> None:
    """Beside the servers there are workers, more than need not be waited for. SettingError."""
    num_workers = world_size - settings.servers
    if num_workers < 1:
        problem = f"{settings.servers} of {world_size} ranks leave no worker"
        remedy = f"Start at least {settings.servers + 1} ranks, or have fewer servers"
        raise SettingError("servers", problem, remedy)
    parse_shares(settings)
    if settings.backup_workers >= num_workers:
        raise SettingError(
            "backup_workers",
            f"without {settings.backup_workers} of {num_workers} workers a step has no gradient",
            f"Give at most {num_workers - 1}",
        )
    for name in ("backup_workers", "reassign"):
        if getattr(settings, name) and settings.consistency != "sync":
            raise SettingError(
                name, f"{settings.consistency} has no common step", "Choose --consistency sync"
            )
    meetings = (
        "check_batches",
        "grace_seconds",
        "data_path",
        "patience",
        "keep_best",
        "least_seconds",
    )
    for name in meetings:
        if settings.backup_workers and getattr(settings, name):
            problem = "all ranks meet for it, and backup_workers lets some of them be late"
            raise SettingError(name, problem, "Choose one of the two")
    if settings.exchange == "calls" and settings.reassign:
        problem = "microbatches are handed over by messages, and calls are none"
        raise SettingError("reassign", problem, "Choose --exchange messages")
    if settings.backup_workers and settings.reassign:
        problem = "a microbatch that was handed over must not be dropped"
        raise SettingError("reassign", problem, "Choose either backup_workers or reassign")


def tensor(settings: Settings, world_size: int) -> None:
    """The ranks share heads evenly, and positions too. Raises SettingError."""
    _cut_of_layers(settings, world_size)


def hybrid(settings: Settings, world_size: int) -> None:
    """The three axes fill the world, and each of them can be cut so. Raises SettingError."""
    axes = settings.data_parallel, settings.pipeline_parallel, settings.tensor_parallel
    if math.prod(axes) != world_size:
        problem = f"{axes[0]} x {axes[1]} x {axes[2]} ranks are not the {world_size} that there are"
        remedy = "Let data_parallel x pipeline_parallel x tensor_parallel be the number of ranks"
        raise SettingError("data_parallel", problem, remedy)
    stages = settings.pipeline_parallel
    if settings.layers < stages:
        problem = f"{settings.layers} layers cannot fill {stages} pipeline stages"
        raise SettingError("layers", problem, f"Give at least {stages} layers")
    microbatches = settings.microbatches_for(world_size)
    if microbatches < stages:
        raise SettingError(
            "microbatches",
            f"1F1B keeps {stages} stages busy with as many microbatches, there are {microbatches}",
            f"Give at least {stages}",
        )
    _cut_of_layers(settings, settings.tensor_parallel)


def _cut_of_layers(settings: Settings, ranks: int) -> None:
    if settings.heads % ranks:
        problem = f"{ranks} ranks cannot share {settings.heads} heads evenly"
        raise SettingError("heads", problem, f"Give a multiple of {ranks}")
    if settings.sequence_parallel and settings.context % ranks:
        problem = f"{ranks} ranks cannot share {settings.context} positions evenly"
        raise SettingError("context", problem, f"Give a multiple of {ranks}")
    if settings.dropout and not settings.sequence_parallel and ranks > 1:
        problem = "ranks that all hold the whole residual stream would drop other parts of it"
        raise SettingError("dropout", problem, "Give 0, or choose sequence_parallel")
