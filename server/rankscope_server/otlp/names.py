"""What the name of a span says: a step, a phase of one, a collective, a wait, or a whole run.

Names are those that programs use, whatever their case and separators:
- `training_single_iteration`, `data_loading`, `model_forward`, `zero_grad`, `model_backward`,
  `optimizer_update`, `checkpoint_save_sync`, `validation_loop`, `application`: NVIDIA's One Logger,
  which Megatron-LM and NeMo call (nv-one-logger-training-telemetry 2.3.1, api/spans.py)
- `iteration_12` with `iter_id`, `checkpoint_save`, `training_run`: a TrainTracer of several public
  repositories (TRACER_OTLP_ENDPOINT)
- `Net.forward`, `autograd.backward`, `SGD.step`, `dataloader.next`: torchtel 0.0.3
- `forward-compute`, `batch-generator`, `all-grads-sync`, `forward-recv`: timers of Megatron-LM
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["step", "phase", "update", "call", "wait", "run", "mark", ""]

_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SEPARATORS = re.compile(r"[^a-z0-9]+")
_NUMBERED = re.compile(r"(.+?)_?(\d{1,15})")
# The end of such a span without a parent is the end of its rank; "train" may be an epoch.
_RUNS = frozenset({"application", "job", "main", "training_job", "training_run"})
_STEPS = re.compile(
    r"(?:.*_)?(?:train|training|trainer)_(?:one_|single_)?(?:step|iteration|iter|batch)|"
    r"step|global_step|one_step|iteration|iter|profiler_step"
)
# One Logger sends these beside each span: they say again when it began and ended
_MARK = re.compile(r"span_(?:start|stop)_event(?:_for_.*)?")
_SET_UP = re.compile(r".*(?:_init|_initialization|_setup)|(?:init|setup|build|create)_.*")
_CALLS = (
    ("reduce_scatter", r".*reduce_?scatter.*"),
    ("all_gather", r".*all_?gather.*"),
    ("all_to_all", r".*all_?to_?all.*|.*all2all.*"),
    ("all_reduce", r".*all_?reduce.*|(?:all_)?grad(?:ient)?s?_(?:sync|reduce)|sync_grad.*"),
    ("send", r"i?send|(?:forward|backward)_send(?:_.*)?"),
    ("recv", r"i?recv|receive|(?:forward|backward)_recv(?:_.*)?"),
    ("broadcast", r"broadcast|bcast"),
    ("barrier", r"(?:.*_)?barrier"),
    ("gather", r"gather"),
    ("scatter", r"scatter"),
    ("reduce", r"reduce"),
)
_OF_BACKEND = re.compile(
    r"(?:(?:c10d|collectives?|comm|communication|dist|distributed|gloo|mpi|nccl|p2p|pipeline|rccl|"
    r"torch|ucc|xccl)_)+"
)
_CHECKPOINT = r"(?:.*_)?(?:checkpoint|ckpt)(?:ing|s)?(?:_.*)?|save_(?:model|state|weights)"
_PHASES = (
    ("", r".*(?:activation_checkpoint|recompute).*|.*(?:load|restore)_(?:checkpoint|ckpt).*"
         r"|.*(?:checkpoint|ckpt)_(?:load|restore).*|.*_event_for_.*"),
    ("checkpoint", _CHECKPOINT),
    ("evaluation",
     r"(?:.*_)?(?:eval|evaluate|evaluation|valid|validate|validation|testing)(?:_.*)?"),
    ("other", r".*forward_backward.*"),
    ("backward", r".*backward.*|(?:.*_)?bwd(?:_.*)?"),
    ("forward", r".*forward.*|(?:.*_)?fwd(?:_.*)?"),
    ("optimizer", r".*zero_grad.*|.*clip_grad.*"),
    ("data", r".*data_?load.*|.*(?:get|next|load|fetch)_(?:next_)?(?:batch|data)|batch_generator|"
             r"data|data_(?:fetch|iter|next|wait|step)|input_pipeline"),
)  # fmt: skip
_UPDATE = re.compile(
    r"(?:.*_)?optim(?:izer)?(?:_(?:step|update|apply))?|"
    r"(?:.*_)?(?:sgd|asgd|adam_?w?|nadam|radam|adamax|adagrad|adadelta|adafactor|rmsprop|lbfgs|"
    r"lion|lamb|muon)_step"
)
_WAIT = re.compile(r"wait|wait_.*|.*_wait")
_compiled_calls = [(what, re.compile(pattern)) for what, pattern in _CALLS]
_compiled_phases = [(what, re.compile(pattern)) for what, pattern in _PHASES]


class Named(NamedTuple):
    """What a span is. `what` is a phase or an operation; `number` is in the name, -1 for none."""

    kind: Kind
    what: str = ""
    number: int = -1


@lru_cache(maxsize=8_192)
def named(name: str) -> Named:
    """Return what a span of this name is; a kind that is empty means: not known."""
    whole = _SEPARATORS.sub("_", _HUMP.sub("_", name[:256]).lower()).strip("_")
    found = _NUMBERED.fullmatch(whole)
    words, number = (found[1], int(found[2])) if found else (whole, -1)
    if _MARK.fullmatch(whole):
        return Named("mark")
    if words in _RUNS:
        return Named("run", words)
    if _STEPS.fullmatch(words):
        return Named("step", "", number)
    if _SET_UP.fullmatch(words):
        return Named("")
    call = operation_of(words)
    if call:
        return Named("call", call)
    if _UPDATE.fullmatch(words):
        return Named("update", "optimizer")
    for phase, pattern in _compiled_phases:
        if pattern.fullmatch(words):
            return Named("phase" if phase else "", phase)
    return Named("wait") if _WAIT.fullmatch(words) else Named("")


def operation_of(words: str) -> str:
    """Return the operation that words in lower case name, without their backend; else nothing."""
    bare = _OF_BACKEND.sub("", words, count=1) if _OF_BACKEND.match(words) else words
    return next((what for what, pattern in _compiled_calls if pattern.fullmatch(bare)), "")
