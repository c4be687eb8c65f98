"""Which layers a pipeline stage holds, and which stages a rank.

    stage_layers = "1,3,2,2"    as given
    balance = "even"            as many layers for each stage, the first ones take the rest
    balance = "profile"         measured: the slowest stage shall take as little time as possible

A pipeline is as fast as its slowest stage. Equal numbers of layers are not equal times: the first
stage also holds the embedding, the last one the head and the loss. So `profile` lets rank 0 time
the forward and backward of each layer and send all ranks the split. A resumed run takes the split
of its checkpoint, as another measurement might come out differently.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rankscope_trainer.checkpoint_folder import newest_shape
from rankscope_trainer.model import next_byte_loss, stage_layers
from rankscope_trainer.strategies.strategy import build_model

if TYPE_CHECKING:
    from rankscope_trainer.settings import Settings
    from rankscope_trainer.world import World

REPEATS = 5  # timings of each layer, of which the median counts

logger = logging.getLogger("rankscope_trainer")


def agree_on_split(settings: Settings, world: World, num_stages: int) -> list[range]:
    """Return the layers of each stage, the same on all ranks; all of them call this."""
    even = [stage_layers(settings.layers, stage, num_stages) for stage in range(num_stages)]
    sizes = [len(layers) for layers in even]
    if settings.stage_layers:
        sizes = [int(float(size)) for size in settings.stage_layers.split(",")]
    elif settings.balance == "profile":
        if world.rank == 0:
            sizes = _written_split(settings, num_stages) or _measured_split(
                settings, world.device, num_stages
            )
        agreed = torch.tensor(sizes, device=world.device)
        dist.broadcast(agreed, src=0)
        sizes = agreed.tolist()
    if world.rank == 0:
        logger.info("layers of each stage: %s", write_split(sizes))
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def write_split(sizes: Sequence[int]) -> str:
    """Write a split the way the setting `stage_layers` wants it."""
    return ",".join(map(str, sizes))


def split_by_time(
    layer_seconds: Sequence[float],
    num_stages: int,
    *,
    first_seconds: float = 0.0,
    last_seconds: float = 0.0,
) -> list[int]:
    """Return how many consecutive layers each stage takes so that the slowest is fastest.

    `first_seconds` and `last_seconds` are what the first and the last stage do beside their layers.
    """
    seconds = list(layer_seconds)
    seconds[0] += first_seconds
    seconds[-1] += last_seconds
    until = [0.0, *itertools.accumulate(seconds)]
    # best[n]: the slowest stage's time, and the sizes, of the best split of the first n layers.
    best = {n: (until[n], [n]) for n in range(1, len(seconds) + 1)}
    for stages in range(2, num_stages + 1):
        best = {
            n: min(
                (max(best[k][0], until[n] - until[k]), [*best[k][1], n - k])
                for k in range(stages - 1, n)
            )
            for n in range(stages, len(seconds) + 1)
        }
    return best[len(seconds)][1]


def _written_split(settings: Settings, num_stages: int) -> list[int]:
    """Return the split of the checkpoint that this run goes on from, if there is one."""
    if not settings.checkpoint_dir or not settings.resume:
        return []
    written = newest_shape(Path(settings.checkpoint_dir)).get("stage_layers", "")
    sizes = [int(size) for size in written.split(",")] if written else []
    fits = len(sizes) == num_stages and sum(sizes) == settings.layers
    return sizes if fits else []


def _measured_split(settings: Settings, device: torch.device, num_stages: int) -> list[int]:
    model = build_model(settings).to(device)
    assert model.embedding is not None
    assert model.head is not None
    shape = (settings.batch_size, settings.context)
    blank_BT = torch.zeros(shape, dtype=torch.long, device=device)
    x_BTD = torch.randn((*shape, settings.width), device=device)
    head = model.head
    embedding_seconds = _seconds(model.embedding, blank_BT)
    layer_seconds = [_seconds(block, x_BTD) for block in model.blocks.values()]
    head_seconds = _seconds(lambda x_BTD: next_byte_loss(head(x_BTD), blank_BT), x_BTD)
    layers = " ".join(f"{1000 * seconds:.2f}" for seconds in layer_seconds)
    text = "measured ms: embedding %.2f, layers %s, head %.2f"
    logger.info(text, 1000 * embedding_seconds, layers, 1000 * head_seconds)
    return split_by_time(
        layer_seconds, num_stages, first_seconds=embedding_seconds, last_seconds=head_seconds
    )


def _seconds(compute: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the median time of a forward and backward of one microbatch."""
    taken = []
    for _ in range(1 + REPEATS):
        own_input = x.detach().requires_grad_(x.is_floating_point())
        _wait_for(x.device)
        started = time.perf_counter()
        compute(own_input).sum().backward()
        _wait_for(x.device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])  # the first one also prepares


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clip_parts(model: torch.nn.Module, max_norm: float) -> float:
    """Clip by the norm of the whole model's gradient, of which each rank holds its own part."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    squares = torch.nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return float(norm)
