"""The reference trainer as a planner sees it: its model, and the layout of its settings."""

from __future__ import annotations

import importlib
import importlib.util
import math
import shlex
from typing import Any

from rankscope.planning.errors import PlanError
from rankscope.planning.layout import Layout
from rankscope.planning.model import PRECISIONS, Model, Transformer

_MIB = 1 << 20
_CHUNKED = ("interleaved", "zero_bubble", "zero_bubble_v")  # schedules with several stages a rank


def load(text: str, ranks: int) -> Any:
    """Return the trainer's settings: of a TOML file, or of its flags in one text.

    Raises PlanError where they are wrong, or where the trainer is not installed.
    """
    if importlib.util.find_spec("rankscope_trainer") is None:
        raise PlanError("trainer", "not installed", "pip install 'rankscope[trainer]'")
    # by name: the agent package imports no other
    command_line = importlib.import_module("rankscope_trainer.command_line")
    errors = importlib.import_module("rankscope_trainer.errors")
    words = shlex.split(text) if text.startswith("-") else ["--config", text]
    try:
        return command_line.load_settings(words, {}, ranks)
    except errors.SettingError as error:
        remedy = "See `python -m rankscope_trainer --help`"
        raise PlanError("trainer", str(error), remedy) from error


def model_of(settings: Any) -> Model:
    """Return the model of the trainer's settings."""
    transformer = Transformer(
        layers=settings.layers, width=settings.width, heads=settings.heads,
        sequence=settings.context, dropout=settings.dropout, has_biases=True, has_positions=True,
        vocabulary=importlib.import_module("rankscope_trainer.model").VOCABULARY,
    )  # fmt: skip
    return transformer.model("the reference trainer's", PRECISIONS[settings.precision])


def layout_of(settings: Any, ranks: int) -> Layout:
    """Return the layout of the settings on CPUs, where only DDP sends beside its work."""
    name: str = settings.strategy
    microbatches: int = settings.microbatches_for(ranks)
    common: dict[str, Any] = {"microbatches": microbatches, "samples": settings.batch_size}
    apart = common | {"data": ranks, "overlaps": False, "bucket_bytes": math.inf}
    stages = common | {"pipeline": ranks, "schedule": "1f1b"}
    tensor = {"tensor": ranks, "sequence_parallel": settings.sequence_parallel}
    chunks = settings.virtual_stages if settings.schedule in _CHUNKED else 1
    fields: dict[str, dict[str, Any]] = {
        "ddp": common | {
            "data": ranks, "bucket_bytes": settings.bucket_mib * _MIB, "has_bucket_copies": True,
        },
        "ring": apart | {"gradient_copies": 1},
        "local_sgd": apart | {"average_every": settings.average_every},
        "hogwild": apart,
        "fsdp": apart | {
            "shard": 3, "replicas": settings.replicas, "reduces_each": False,
            "recomputes": settings.checkpoint_activations,
        },
        "tensor": common | tensor,
        "pipeline": stages | {"schedule": settings.schedule, "chunks": chunks},
        # in one piece, of all microbatches
        "model_parallel": stages | {
            "schedule": "gpipe", "microbatches": 1, "samples": microbatches * settings.batch_size,
            "has_receive_buffers": False,
        },
        "pipedream": stages | {"schedule": "pipedream", "has_receive_buffers": False},
        "hybrid": common | {
            "data": settings.data_parallel, "pipeline": settings.pipeline_parallel,
            "tensor": settings.tensor_parallel, "schedule": "1f1b", "overlaps": False,
            "shard": 3, "keeps_weights": True, "reduces_each": False,
            "sequence_parallel": settings.sequence_parallel,
        },
        "parameter_server": common | {
            "data": ranks - settings.servers, "servers": settings.servers,
        },
    }  # fmt: skip
    family = {"ring": "ddp", "hybrid": "tensor+pipeline+data"}.get(name, name)
    return Layout(family=family, **fields[name])
