"""Every setting of the trainer, written once: name, default and sentence.

The dataclass below is the table. The command line (`--batch-size 4`), the TOML file
(`batch_size = 4`) and the help text are made from it. Later sources win: defaults, then the file
named by `--config`, then `RANKSCOPE_FAULTS` and `RANKSCOPE_FAULT_MANIFEST`, then the flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rankscope_trainer.errors import SettingError
from rankscope_trainer.faults.plan import parse_fault
from rankscope_trainer.strategies import STRATEGIES, checks

# Environment variables that stand for a setting, so that a launcher need not edit a command line.
ENVIRONMENT = {"RANKSCOPE_FAULTS": "fault", "RANKSCOPE_FAULT_MANIFEST": "fault_manifest"}


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
        "ddp", "How the model is spread over the ranks.", choices=tuple(STRATEGIES)
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
        "ddp: sequences of a step over all ranks, however many there are;"
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
        choices=("none", "fp16", "bf16", "powersgd"),
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
        "ring", "ring: who adds up, our ring or the library.", choices=("ring", "library")
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
    resume: bool = _setting(True, "Go on from the newest checkpoint, if there is one.")

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
        """Whether the gradient's norm is taken in each step: to clip by it, or to tell it."""
        return bool(self.clip or self.gradient_norm)

    def microbatches_for(self, num_stages: int) -> int:
        """Return the microbatches of a step, with 0 replaced by the strategy's own number."""
        if self.microbatches:
            return self.microbatches
        return STRATEGIES[self.strategy].microbatches(num_stages)

    def microbatches_by_rank(self, world_size: int) -> list[int]:
        """Return the microbatches of each data-parallel rank; they differ by one at most."""
        if not self.global_batch:
            return [self.microbatches_for(world_size)] * world_size
        even, rest = divmod(self.global_batch // self.batch_size, world_size)
        return [even + (rank < rest) for rank in range(world_size)]


def load_settings(
    arguments: Sequence[str], environment: Mapping[str, str], world_size: int = 1
) -> Settings:
    """Merge defaults, file, environment and flags, and check the result against the world size."""
    flags = vars(_parser().parse_args(arguments))
    flags.pop("help", None)
    flags.pop("list_faults", None)
    values: dict[str, Any] = {}
    config = flags.pop("config", None)
    if config is not None:
        values |= _read_toml(Path(config))
    for variable, name in ENVIRONMENT.items():
        if environment.get(variable):
            text = environment[variable]
            values[name] = text.split(";") if name == "fault" else text
    values |= flags
    checked = {name: _check_value(_FIELDS[name], value) for name, value in values.items()}
    settings = Settings(**checked)
    _check_together(settings, world_size)
    return settings


def help_text() -> str:
    """Return the text of `--help`."""
    return _parser().format_help()


_FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


class _Parser(argparse.ArgumentParser):
    """An argument parser that fails the way the rest of the settings fail."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving: the caller decides how a wrong setting ends."""
        remedy = "`python -m rankscope_trainer --help` lists every setting"
        flag, colon, problem = message.removeprefix("argument ").partition(": ")
        if colon and message.startswith("argument "):
            raise SettingError(flag.split("/")[0].lstrip("-").replace("-", "_"), problem, remedy)
        raise SettingError("command line", message, remedy)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torchrun --standalone --nproc-per-node N -m rankscope_trainer",
        description="Train a small byte-level GPT on the Python standard library's own sources.",
        epilog="Without torchrun, `python -m rankscope_trainer` trains with a single rank.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--help", "-h", action="store_true", help="Show this text and leave.")
    parser.add_argument(
        "--list-faults", action="store_true", help="Show each fault and the finding it leads to."
    )
    parser.add_argument(
        "--config", metavar="FILE", help="Read settings from this TOML file; flags win over it."
    )
    for field in _FIELDS.values():
        flag = "--" + field.name.replace("_", "-")
        text = field.metadata["sentence"].replace("%", "%%")
        if field.name == "fault":
            parser.add_argument(flag, action="append", metavar="FAULT", help=text)
        elif isinstance(field.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            metavar = "|".join(field.metadata["choices"]) or type(field.default).__name__.upper()
            if field.default != "":
                text += f" Default: {field.default}."
            parser.add_argument(flag, metavar=metavar, help=text)
    return parser


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        remedy = "Name a TOML file that exists"
        raise SettingError("config", f"cannot read {path}: {error.strerror}", remedy) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError("config", f"{path} is not TOML: {error}", "Correct the file") from error
    for name in values:
        if name not in _FIELDS:
            known = ", ".join(sorted(_FIELDS))
            raise SettingError(name, f"unknown in {path}", f"Known settings: {known}")
    return values


def _check_value(field: dataclasses.Field[Any], value: Any) -> Any:
    """Turn a flag's text or a TOML value into the field's type, or say what is wrong with it."""
    name, metadata = field.name, field.metadata
    if name == "fault":
        return _check_faults(value)
    kind = type(field.default)
    if isinstance(value, str) and kind in (int, float):
        try:
            value = kind(value)
        except ValueError as error:
            word = "a whole number" if kind is int else "a number"
            raise SettingError(name, f"{value!r} is not {word}", f"Give {word}") from error
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise SettingError(
            name, f"{value!r} has the wrong type", f"Give a value like {field.default!r}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingError(name, f"{value} is not finite", "Give a finite number")
    choices = metadata["choices"]
    if choices and value not in choices:
        raise SettingError(name, f"{value!r} is unknown", f"Choose one of: {', '.join(choices)}")
    minimum, below = metadata["minimum"], metadata["below"]
    if minimum is not None and not value >= minimum:
        raise SettingError(name, f"{value} is too small", f"Give at least {minimum}")
    if below is not None and not value < below:
        raise SettingError(name, f"{value} is too large", f"Give less than {below}")
    return value


def _check_faults(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise SettingError("fault", f"{value!r} is not a list of texts", 'Write fault = ["..."]')
    return tuple(text.strip() for text in texts if text.strip())


def _check_together(settings: Settings, world_size: int) -> None:
    """Refuse what only the combination of several settings, or the world size, makes impossible."""
    if settings.width % settings.heads:
        raise SettingError(
            "heads",
            f"{settings.heads} heads do not divide width {settings.width} evenly",
            "Choose a width that is a multiple of heads",
        )
    STRATEGIES[settings.strategy].check(settings, world_size)
    if settings.layer_seconds:
        checks.layer_seconds(settings)
    if settings.global_batch:
        checks.global_batch(settings, world_size)
    if settings.uneven_ratio and settings.strategy != "ddp":
        raise SettingError("uneven_ratio", "only ddp can join", "Choose ddp, or leave it out")
    if settings.loader_workers and settings.data_path:
        problem = "processes of their own cannot tell the rank that the data went away"
        raise SettingError("loader_workers", problem, "Leave it out, or data_path")
    for text in settings.fault:
        parse_fault(text, world_size, settings.steps)
    if settings.patience and not settings.validate_every:
        raise SettingError("patience", "nothing is validated", "Give validate_every as well")
    if settings.validate_every and not settings.validation_ratio:
        raise SettingError(
            "validation_ratio", "there is nothing to validate on", "Give a ratio above 0"
        )
