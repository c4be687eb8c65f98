"""Ways to share a model: the axes of a mesh, what is cut on each, and the order of work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rankscope.planning.errors import PlanError
from rankscope.planning.machine import Machine
from rankscope.planning.model import Model

FAMILIES = {
    "ddp": "each rank holds the whole model, gradients are reduced in buckets",
    "zero1": "as ddp, each rank updates its part: optimizer state is cut (ZeRO-1)",
    "zero2": "gradients are cut as well (ZeRO-2)",
    "fsdp": "weights as well: gathered before use (FSDP, ZeRO-3)",
    "hsdp": "fsdp inside of each node, copies on the others (hybrid sharding)",
    "tensor": "every layer is cut over all ranks",
    "pipeline": "each rank holds some layers, microbatches pass through",
    "tensor+data": "layers cut inside of groups, groups are copies",
    "pipeline+data": "pipelines that are copies of each other",
    "tensor+pipeline": "stages whose layers are cut",
    "tensor+pipeline+data": "all three",
    "parameter_server": "servers keep the weights, workers send gradients and take weights",
}
# What computes another gradient than one process would; planned where it is asked for by name.
ASYNCHRONOUS = {
    "local_sgd": "each rank trains alone, weights are averaged now and then",
    "pipedream": "a pipeline that never runs empty, on weights of some updates ago",
    "model_parallel": "layers on several ranks, one of which works at a time",
    "hogwild": "ranks of one node write into the same weights without locks",
}
SCHEDULES = {
    "gpipe": "all forwards, then all backwards",
    "1f1b": "one forward, one backward: as much idle time, less memory",
    "interleaved": "several stages on each rank: less idle time, more messages",
    "zero_bubble": "backward in two halves, the second fills gaps (ZB-H1)",
    "zero_bubble_v": "the same with two stages on each rank, laid out as a V",
    "pipedream": "never runs empty; weights are some updates old",
}
BUCKET_BYTES = 25 << 20  # bucket_cap_mb of DistributedDataParallel
_MOST_CHUNKS = 4
_MOST_SAMPLES = 64  # of a microbatch; more gains nothing that a device could use


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to share a model. Ranks are numbered by tensor, then data, then pipeline."""

    family: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    shard: int = 0  # 1: state of the optimizer is cut over data ranks, 2: gradients too, 3: weights
    replicas: int = 1  # of the data axis: copies of the cut weights
    microbatches: int = 1
    samples: int = 1  # of a microbatch
    schedule: str = ""
    chunks: int = 1  # stages on each rank
    recomputes: bool = False  # activations inside of a layer
    sequence_parallel: bool = False
    servers: int = 0
    bucket_bytes: float = BUCKET_BYTES
    overlaps: bool = True  # messages of the data axis are sent while the rank computes
    reduces_each: bool = True  # of cut gradients: after each microbatch, not only after the last
    keeps_weights: bool = False  # of cut weights: gathered once in a step
    average_every: int = 1
    has_bucket_copies: bool = False  # DDP without gradient_as_bucket_view
    has_receive_buffers: bool = True  # one for each microbatch, as in torch.distributed.pipelining
    gradient_copies: int = 0  # further ones, for a reduction by hand

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.data * self.tensor * self.pipeline + self.servers

    @property
    def batch(self) -> int:
        """Return the samples of a step over all ranks."""
        return self.data * self.microbatches * self.samples

    @property
    def shards(self) -> int:
        """Return over how many ranks weights or state are cut."""
        return self.data // self.replicas

    @property
    def axes(self) -> int:
        """Return how many kinds of parallelism it combines: how hard it is to set up."""
        return sum(size > 1 for size in (self.data, self.tensor, self.pipeline)) + self.shard // 3

    @property
    def text(self) -> str:
        """Return it in words."""
        axes = {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}
        parts = [" \u00d7 ".join(f"{name} {size}" for name, size in axes.items() if size > 1)]
        if self.servers:
            parts.append(f"{self.servers} server{'s' if self.servers > 1 else ''}")
        if self.replicas > 1:
            parts.append(f"{self.replicas} copies")
        if self.shard and self.family not in ("zero1", "zero2", "fsdp", "hsdp"):
            parts.append(f"ZeRO-{self.shard}")
        if self.pipeline > 1:
            chunks = f" of {self.chunks}" if self.chunks > 1 else ""
            parts.append(f"{self.schedule}{chunks}")
        parts.append(f"{self.microbatches} \u00d7 {self.samples}")
        if self.recomputes:
            parts.append("recompute")
        return ", ".join(part for part in parts if part)


def candidates(
    model: Model, machine: Machine, batch: int, *, families: tuple[str, ...] = ()
) -> Iterator[Layout]:
    """Yield every way to share a step of `batch` samples over all ranks of the machine.

    Raises PlanError for a name that is unknown.
    """
    wanted = families or tuple(FAMILIES)
    for name in wanted:
        if name not in FAMILIES and name not in ASYNCHRONOUS:
            known = ", ".join((*FAMILIES, *ASYNCHRONOUS))
            raise PlanError("strategy", f"{name!r} is unknown", f"Known: {known}")
    for layout in _all(model, machine, batch):
        if layout.family in wanted:
            yield layout


def _all(model: Model, machine: Machine, batch: int) -> Iterator[Layout]:
    yield from _replicas(machine, batch)
    yield from _meshes(model, machine, batch)
    yield from _servers(machine, batch)
    yield from _asynchronous(model, machine, batch)


def _replicas(machine: Machine, batch: int) -> Iterator[Layout]:
    ranks = machine.ranks
    for microbatches, samples in _cuts(batch, ranks):
        for recomputes in (False, True):
            for shard, family in enumerate(("ddp", "zero1", "zero2", "fsdp")):
                for each in (True, False) if shard == 3 and microbatches > 1 else (True,):
                    yield Layout(
                        family=family, data=ranks, shard=shard, microbatches=microbatches,
                        samples=samples, recomputes=recomputes, reduces_each=each,
                        has_bucket_copies=family == "ddp" and ranks > 1,
                    )  # fmt: skip
            if machine.nodes > 1 and machine.devices > 1:
                yield Layout(
                    family="hsdp", data=ranks, shard=3, replicas=machine.nodes,
                    microbatches=microbatches, samples=samples, recomputes=recomputes,
                )  # fmt: skip


def _meshes(model: Model, machine: Machine, batch: int) -> Iterator[Layout]:
    for tensor in _divisors(machine.devices):
        if model.heads % tensor or (tensor > 1 and not model.heads):
            continue
        for pipeline in _divisors(machine.ranks // tensor):
            if tensor * pipeline == 1 or pipeline > model.num_layers:
                continue
            data = machine.ranks // tensor // pipeline
            for microbatches, samples in _cuts(batch, data):
                for schedule, chunks in _schedules(model, pipeline, microbatches):
                    for recomputes in (False, True):
                        yield Layout(
                            family=_family(tensor, pipeline, data), data=data, tensor=tensor,
                            pipeline=pipeline, shard=1 if data > 1 else 0,
                            microbatches=microbatches, samples=samples, schedule=schedule,
                            chunks=chunks, recomputes=recomputes,
                            sequence_parallel=tensor > 1,
                        )  # fmt: skip


def _family(tensor: int, pipeline: int, data: int) -> str:
    sizes = {"tensor": tensor, "pipeline": pipeline, "data": data}
    return "+".join(name for name, size in sizes.items() if size > 1)


def _schedules(model: Model, pipeline: int, microbatches: int) -> Iterator[tuple[str, int]]:
    if pipeline == 1:
        yield "", 1
        return
    yield "gpipe", 1
    if microbatches < pipeline:
        return
    yield "1f1b", 1
    yield "zero_bubble", 1
    layers = model.num_layers // pipeline
    for chunks in range(2, min(_MOST_CHUNKS, layers) + 1):
        if microbatches % pipeline == 0 and model.num_layers % (pipeline * chunks) == 0:
            yield "interleaved", chunks


def _servers(machine: Machine, batch: int) -> Iterator[Layout]:
    servers = 1
    while servers <= machine.ranks // 2:
        for microbatches, samples in _cuts(batch, machine.ranks - servers):
            for recomputes in (False, True):
                yield Layout(
                    family="parameter_server", data=machine.ranks - servers, servers=servers,
                    microbatches=microbatches, samples=samples, recomputes=recomputes,
                )  # fmt: skip
        servers *= 2


def _asynchronous(model: Model, machine: Machine, batch: int) -> Iterator[Layout]:
    ranks = machine.ranks
    for microbatches, samples in _cuts(batch, ranks):
        apart = Layout(
            family="local_sgd", data=ranks, microbatches=microbatches, samples=samples,
            average_every=4,
        )  # fmt: skip
        yield apart
        if machine.nodes == 1:
            yield replace(apart, family="hogwild", average_every=1)
    if ranks <= model.num_layers:
        for microbatches, samples in _cuts(batch, 1):
            yield Layout(
                family="pipedream", pipeline=ranks, schedule="pipedream",
                microbatches=microbatches, samples=samples,
            )  # fmt: skip
        yield Layout(family="model_parallel", pipeline=ranks, schedule="gpipe", samples=batch)


def _cuts(batch: int, data: int) -> Iterator[tuple[int, int]]:
    """Yield how often and how much each of the data ranks computes; nothing where it is uneven."""
    if batch % data:
        return
    samples = 1
    while samples <= min(batch // data, _MOST_SAMPLES):
        if batch // data % samples == 0:
            yield batch // data // samples, samples
        samples *= 2


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
