"""DDP: what its constructor sends, its buckets, its buffers, and communication hooks."""

import math
from typing import Any

import torch
import torch.distributed as dist
from ledger import Ledger, quiet, zeros
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

WIDTH, LAYERS = 16, 3
LAYER_BYTES = WIDTH * WIDTH * 4
BUCKET_MIB = 0.0009  # each layer fills a bucket
LONG, INT = torch.int64, torch.int32


def run(ledger: Ledger) -> None:
    _buckets(ledger)
    _buffers(ledger)
    _hook(ledger, "fp16", None, default_hooks.fp16_compress_hook)
    _hook(ledger, "python", None, _own_hook)
    with quiet():
        state = powerSGD_hook.PowerSGDState(
            dist.group.WORLD, matrix_approximation_rank=1, start_powerSGD_iter=2,
            min_compression_rate=1,
        )  # fmt: skip
    _hook(ledger, "powersgd", state, powerSGD_hook.powerSGD_hook)


def _model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def _reduced(
    ledger: Ledger, num_bytes: int, dtype: torch.dtype = torch.float32, from_callback: bool = False
) -> None:
    flat = zeros(num_bytes, dtype)
    ledger.did(
        "all_reduce", [flat], [flat], reduce="sum", waited="c++", from_callback=from_callback
    )


def _from_rank_0(ledger: Ledger, num_bytes: int, dtype: torch.dtype) -> None:
    flat = zeros(num_bytes, dtype)
    ledger.did("broadcast", [flat] * (ledger.rank == 0), [flat], peer=0, waited="c++")


def _constructed(ledger: Ledger, model: nn.Module) -> None:
    """Number of parameters, their sizes and strides, then the weights and buffers of rank 0."""
    number, parameters = zeros(8, LONG), list(model.parameters())
    ledger.did("all_gather", [number], [number] * ledger.size, waited="c++")
    _from_rank_0(ledger, 8 * sum(2 * parameter.dim() for parameter in parameters), LONG)
    _state(ledger, [*parameters, *model.buffers()])


def _state(ledger: Ledger, tensors: list[torch.Tensor]) -> None:
    """Flattened, one broadcast per dtype."""
    by_dtype: dict[torch.dtype, int] = {}
    for tensor in tensors:
        by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.nbytes
    for dtype, num_bytes in by_dtype.items():
        _from_rank_0(ledger, num_bytes, dtype)


def _regrouped(ledger: Ledger, num_parameters: int, num_buckets: int) -> None:
    """Once, as the second step begins: rank 0 tells the order and the sizes of the buckets."""
    _from_rank_0(ledger, 4 * (num_parameters + 1), INT)
    _from_rank_0(ledger, 4 * num_buckets, INT)


def _buckets(ledger: Ledger) -> None:
    model = _model()
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB)
    _constructed(ledger, model)
    for step in range(3):
        if step == 1:
            with parallel.no_sync():  # nothing is sent
                parallel(torch.ones(2, WIDTH)).sum().backward()
        parallel(torch.ones(2, WIDTH)).sum().backward()
        if step == 0:
            _reduced(ledger, LAYERS * LAYER_BYTES)
        else:
            if step == 1:
                _regrouped(ledger, LAYERS, LAYERS)
            for _ in range(LAYERS):
                _reduced(ledger, LAYER_BYTES)


def _buffers(ledger: Ledger) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    parallel = nn.parallel.DistributedDataParallel(model)
    _constructed(ledger, model)
    for step in range(2):
        parallel(torch.ones(3, 4)).sum().backward()
        if step == 1:
            _regrouped(ledger, len(list(model.parameters())), 1)
        _state(ledger, list(model.buffers()))
        _reduced(ledger, sum(parameter.nbytes for parameter in model.parameters()))


def _own_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce at once: a callback on the future of the work hangs the engine of PyTorch 2.9."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _hook(ledger: Ledger, name: str, state: Any, hook: Any) -> None:
    model = _model()
    parallel = nn.parallel.DistributedDataParallel(model)
    _constructed(ledger, model)
    parallel.register_comm_hook(state, hook)
    for step in range(4):
        parallel(torch.ones(2, WIDTH)).sum().backward()
        if step == 1:
            _regrouped(ledger, LAYERS, 1)
        if name == "fp16":
            _reduced(ledger, LAYERS * LAYER_BYTES // 2, torch.float16)
        elif name == "powersgd" and step >= 2:
            _reduced(ledger, 0)  # what it does not compress: nothing
            side = math.isqrt(LAYER_BYTES // 4)
            _reduced(ledger, LAYERS * side * 4, from_callback=True)  # P, then Q
            _reduced(ledger, LAYERS * side * 4, from_callback=True)
        else:
            _reduced(ledger, LAYERS * LAYER_BYTES)
