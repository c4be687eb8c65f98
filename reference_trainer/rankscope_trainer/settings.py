"""Every setting of the trainer, written once: name, default and sentence.

The command line (`--batch-size 4`), the TOML file (`batch_size = 4`) and the help text are made
from the dataclass below, in `command_line.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

# Strategies, and the microbatches of a step where the settings name none; a pipeline's are for
# each stage.
DEFAULT_MICROBATCHES = {
    "ddp": 2,
    "pipeline": 2,
    "model_parallel": 1,
    "pipedream": 1,
    "hogwild": 1,
    "ring": 2,
    "local_sgd": 2,
    "fsdp": 2,
    "tensor": 2,
    "hybrid": 4,
    "parameter_server": 2,
}


def _setting(
    default: Any,
    sentence: str,
    *,
    choices: Sequence[str] = (),
    minimum: float | None = None,
    below: float | None = None,
) -> Any:
    metadata = {"sentence": sentence, "choices": choices, "minimum": minimum, "below": below}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run does. One field is one setting; its type is that of its default."""

    strategy: str = _setting(
        "ddp", "How the model is spread over the ranks.", choices=tuple(DEFAULT_MICROBATCHES)
    )
    steps: int = _setting(200, "Train up to this step, counted from 1.", minimum=1)
    least_seconds: float = _setting(
        0.0,
        "Train on past `steps` until the first step is so long ago; all ranks agree; 0: never.",
        minimum=0.0,
        below=1e6,
    )
    seed: int = _setting(1, "Decides the first weights, the order of the data and dropout.")

    layers: int = _setting(8, "Transformer blocks of the model.", minimum=1)
    width: int = _setting(64, "Numbers that represent one position (d_model).", minimum=1)
    heads: int = _setting(4, "Attention heads; they divide the width evenly.", minimum=1)
    context: int = _setting(64, "Bytes that the model looks back on.", minimum=1)
    dropout: float = _setting(0.0, "Share of activations dropped.", minimum=0.0, below=1.0)
    mask_buffer: bool = _setting(
        False, "Keep the causal mask as a buffer, which DDP sends to all ranks in each step."
    )

    data_bytes: int = _setting(
        4 << 20, "Read at most this many bytes of the standard library.", minimum=1024
    )
    data_path: str = _setting(
        "", "Train on this file, or the files in this folder; empty: the standard library."
    )
    data_wait_seconds: float = _setting(
        300.0, "data_path: wait at most so long for data that went away.", minimum=0.0
    )
    check_batches: bool = _setting(
        False, "Check each batch's checksum; all ranks skip a batch that is corrupt on one."
    )
    loader_workers: int = _setting(
        0, "Processes that load training batches ahead; 0: the rank loads its own.", minimum=0
    )
    validation_ratio: float = _setting(
        0.1, "Share of the bytes, at their end, kept for validation.", minimum=0.0, below=1.0
    )
    validate_every: int = _setting(0, "Validate every this many steps; 0: never.", minimum=0)
    validate_batches: int = _setting(4, "Batches of one validation.", minimum=1)
    patience: int = _setting(
        0, "Stop after so many validations in a row without a better loss; 0: never.", minimum=0
    )

    batch_size: int = _setting(4, "Sequences in one microbatch.", minimum=1)
    microbatches: int = _setting(
        0,
        "Microbatches of a step on each rank: accumulated by ddp, in flight at once in a pipeline;"
        " 0: 2 for ddp, twice the number of stages for a pipeline.",
        minimum=0,
    )
    global_batch: int = _setting(
        0,
        "ddp, fsdp, ring: sequences of a step over all ranks, however many there are;"
        " 0: batch_size times microbatches on each rank.",
        minimum=0,
    )
    optimizer: str = _setting("adamw", "How weights follow gradients.", choices=("adamw", "sgd"))
    learning_rate: float = _setting(1e-3, "Step size of the optimizer.", minimum=0.0)
    weight_decay: float = _setting(0.01, "Weight decay of the optimizer.", minimum=0.0)
    warm_up: int = _setting(0, "Steps in which the learning rate rises to its height.", minimum=0)
    scale_learning_rate: str = _setting(
        "none",
        "How the learning rate grows with the global batch over base_batch.",
        choices=("none", "linear", "sqrt"),
    )
    base_batch: int = _setting(32, "Sequences of a step that learning_rate is for.", minimum=1)
    gradient_norm: bool = _setting(False, "Report the gradient's norm also if it is not clipped.")
    clip: float = _setting(
        0.0, "Largest norm of the whole gradient; 0: gradients are not clipped.", minimum=0.0
    )

    bucket_mib: float = _setting(
        0.5,
        "ddp: gradients are reduced together in buckets of this many MiB.",
        minimum=0.0,
        below=1e6,
    )
    comm_hook: str = _setting(
        "none",
        "ddp: how gradients are made smaller to be sent.",
        choices=("none", "fp16", "bf16", "fp8", "powersgd"),
    )
    powersgd_rank: int = _setting(2, "ddp, powersgd: columns kept of a gradient.", minimum=1)
    static_graph: bool = _setting(False, "ddp: every step uses the same parameters.")
    uneven_ratio: float = _setting(
        0.0, "ddp: share of its batches that the last rank lacks.", minimum=0.0, below=1.0
    )
    schedule: str = _setting(
        "1f1b",
        "pipeline: order of forwards and backwards.",
        choices=("gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_v"),
    )
    virtual_stages: int = _setting(
        2, "pipeline: stages on each rank; not for gpipe and 1f1b, which have one.", minimum=1
    )
    stage_layers: str = _setting(
        "", "pipeline, model_parallel: layers of each stage, as 1,3,2,2; empty: see balance."
    )
    balance: str = _setting(
        "even",
        "pipeline, model_parallel: stages of equally many layers, or of equal measured time.",
        choices=("even", "profile"),
    )
    layer_seconds: str = _setting(
        "", "Let each layer sleep so long in a forward, twice in a backward: 0.02, or 0.02,0,0.01."
    )

    weight_stashing: bool = _setting(
        True, "pipedream: a backward uses the weights that its forward used."
    )
    versions: str = _setting(
        "", "pipedream, hogwild: append the weight versions used to this file as JSON lines."
    )

    reduce_with: str = _setting(
        "ring",
        "ring: what adds up, our ring, our tree or the library.",
        choices=("ring", "tree", "library"),
    )
    average_every: int = _setting(
        4, "local_sgd: steps between two averages of the weights.", minimum=1
    )

    replicas: int = _setting(1, "fsdp: copies of the model, each cut over its ranks.", minimum=1)
    precision: str = _setting(
        "fp32", "fsdp: how weights are sent and used.", choices=("fp32", "bf16", "fp16")
    )
    checkpoint_activations: bool = _setting(False, "fsdp: compute blocks again in backward.")
    sequence_parallel: bool = _setting(False, "tensor, hybrid: a rank holds only its positions.")
    data_parallel: int = _setting(2, "hybrid: shards of the data.", minimum=1)
    pipeline_parallel: int = _setting(2, "hybrid: stages.", minimum=1)
    tensor_parallel: int = _setting(2, "hybrid: ranks that share each layer.", minimum=1)

    servers: int = _setting(1, "parameter_server: ranks that keep the weights.", minimum=1)
    server_ranks: str = _setting(
        "last", "parameter_server: which ranks are servers.", choices=("first", "last")
    )
    server_shares: str = _setting(
        "", "parameter_server: share of the weights of each server, as 3,1; empty: equal."
    )
    exchange: str = _setting(
        "messages",
        "parameter_server: workers send and receive, or call the servers (torch.distributed.rpc).",
        choices=("messages", "calls"),
    )
    consistency: str = _setting(
        "sync",
        "parameter_server: workers wait for all, for none, or for those far behind.",
        choices=("sync", "async", "bounded"),
    )
    staleness: int = _setting(
        2, "parameter_server, bounded: steps that a worker may be ahead of the slowest.", minimum=0
    )
    backup_workers: int = _setting(
        0, "parameter_server, sync: gradients of a step that are not waited for.", minimum=0
    )
    reassign: bool = _setting(
        False, "parameter_server, sync: a worker that is behind leaves microbatches to others."
    )

    checkpoint_dir: str = _setting("", "Write checkpoints into this directory; empty: none.")
    checkpoint_every: int = _setting(50, "Steps between two checkpoints.", minimum=1)
    checkpoint_keep: int = _setting(2, "Newest checkpoints that are kept.", minimum=1)
    keep_best: bool = _setting(
        False,
        "Also keep the checkpoint with the least loss: of its validation, or without any the mean"
        " of training since the checkpoint before.",
    )
    resume: bool = _setting(True, "Go on from a checkpoint, if there is one.")
    resume_from: str = _setting(
        "newest",
        "The checkpoint to continue from; best: that with the least loss, and those after it go.",
        choices=("newest", "best"),
    )

    device: str = _setting(
        "auto",
        "Where to compute; auto: a GPU for each local rank if there are enough, else the CPU.",
        choices=("auto", "cpu", "cuda"),
    )
    threads: int = _setting(1, "CPU threads of one rank; 0: PyTorch decides.", minimum=0)
    grace_seconds: float = _setting(
        0.0,
        "After SIGTERM finish the step, save and leave together within this time; 0: at once.",
        minimum=0.0,
        below=1e6,
    )
    timeout_seconds: float = _setting(
        1800.0, "A collective that takes longer fails.", minimum=1.0, below=1e9
    )

    regroup: bool = _setting(
        False,
        "ddp, ring, fsdp with replicas: where a rank dies, stops or comes, the others train on"
        " without a restart;"
        " start with `python -m rankscope_trainer.regroup`.",
    )
    regroup_seconds: float = _setting(
        10.0,
        "regroup: a collective, or a rank that is waited for, may take so long.",
        minimum=0.5,
        below=1e6,
    )
    ask_advice: bool = _setting(
        False,
        "regroup: ask Rankscope's server which ranks to leave out, and log it (a dry run).",
    )
    obey_advice: bool = _setting(
        False, "regroup, ask_advice: leave them out, each advice once, and never half of the ranks."
    )
    samples: str = _setting(
        "",
        "regroup: append which windows each rank drew, and what became of the step, to this file"
        " as JSON lines.",
    )

    log_every: int = _setting(10, "Steps between two log lines.", minimum=1)
    losses: str = _setting("", "Append the exact loss of each step to this file as JSON lines.")
    step_times: str = _setting(
        "", "Append when each step of each rank began and ended to this file as JSON lines."
    )

    fault: tuple[str, ...] = _setting(
        (), "Break something on purpose: name:rank=R,start=S,steps=N,size=X. May be repeated."
    )
    fault_manifest: str = _setting("", "Append to this file what really fired, as JSON lines.")

    @property
    def takes_norm(self) -> bool:
        """Whether the gradient's norm is taken in each step: to clip by it, or to report it."""
        return bool(self.clip or self.gradient_norm)

    def microbatches_for(self, num_stages: int) -> int:
        """Return the microbatches of a step, with 0 replaced by the strategy's own number."""
        if self.microbatches:
            return self.microbatches
        default = DEFAULT_MICROBATCHES[self.strategy]
        return default * num_stages if self.strategy == "pipeline" else default

    def microbatches_by_rank(self, world_size: int) -> list[int]:
        """Return the microbatches of each data-parallel rank; they differ by one at most."""
        if not self.global_batch:
            return [self.microbatches_for(world_size)] * world_size
        even, rest = divmod(self.global_batch // self.batch_size, world_size)
        return [even + (rank < rest) for rank in range(world_size)]

    def mean_microbatches(self, world_size: int) -> float:
        """Return those of the mean rank.

        A reduction takes the mean over ranks. Where some have a microbatch more than others, all
        divide by this number in place of their own, so that each microbatch counts the same.
        """
        by_rank = self.microbatches_by_rank(world_size)
        return sum(by_rank) / len(by_rank)
