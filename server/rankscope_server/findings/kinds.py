"""Every kind of finding: its label, the detectors that make it, what it says, how severe it is.

The labels of the pages and the tables of kinds in the documents are made from here
(`python .ci/docs_tables.py`), and a finding of a kind that is not here cannot be built.
"""

from __future__ import annotations

from dataclasses import dataclass

# The two rules that the builder of findings applies itself: a severity that never changes is
# given by its name, and COST is the ladder of `severity_of_cost`.
COST = "by its cost: critical from 10 % of the throughput, warning from 2 %, else info"
_LASTING = f"{COST}; info while it is short or not clear"
_CRITICAL, _WARNING, _INFO = "critical", "warning", "info"
MORE_WORK = "sequence_imbalance"  # not a fault of the rank: never more than info
_SLOW, _GPU = ("straggler",), ("gpu-health",)
_WHY_SLOW = "the same, where a second signal says why"
_CLOCK = "this host's or process's clock is so far ahead of or behind the others, within a band"
_COMMUNICATION = (
    "so much of the step is exposed communication; this bucket size, `no_sync` or compression "
    "would give so much"
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of finding. The first of its detectors makes it where none is named."""

    id: str
    label: str  # on the pages
    detectors: tuple[str, ...]
    text: str  # one sentence for the documents
    severity: str  # always this one, COST, or a rule of the detector in words
    is_headline: bool = False  # the README names it
    family: str = "other"  # of the known errors that explain it in a recording
    confirmed_by: tuple[str, ...] = ()  # detectors that could confirm or refute a doubtful one


KINDS: tuple[Kind, ...] = (  # in the order of the detectors
    Kind(
        "slow_compute", "Straggler: slow compute", ("straggler", "stalls"),
        "this rank computes slower than its peers (or than itself before), since this step, at "
        "this cost", _LASTING, True, confirmed_by=("gpu-health", "gpu-events", "communication"),
    ),
    Kind(
        "slow_data", "Waiting for data", ("straggler", "data-loading"),
        "this rank waits for its data while the others wait for it; or all ranks do",
        f"{_LASTING}; of a wait on all ranks warning from 10 %", True,
        family="dataloader", confirmed_by=("data-loading",),
    ),
    Kind("garbage_collection", "Straggler: garbage collection", ("straggler", "stalls"),
         _WHY_SLOW, _LASTING, True),
    Kind("host_contention", "Straggler: other work on its processors", _SLOW,
         _WHY_SLOW, _LASTING, True, confirmed_by=("gpu-health",)),
    Kind("thermal_or_power", "Straggler: GPU held down by heat or power", _SLOW,
         _WHY_SLOW, _LASTING, True),
    Kind("page_cache", "Straggler: data not in memory", _SLOW, _WHY_SLOW, _LASTING, True),
    Kind("cpu_pinning", "Straggler: too few processors", _SLOW, _WHY_SLOW, _LASTING, True),
    Kind("cpu_limit", "Held up by a limit on processor time", ("straggler", "stalls"),
         _WHY_SLOW, _LASTING, True),
    Kind("busy_thread", "Straggler: another thread holds it up", _SLOW, _WHY_SLOW, _LASTING, True),
    Kind(MORE_WORK, "More work than its peers", ("straggler", "balance"),
         "this rank was given more tokens or microbatches: not slower, more to do", _INFO, True),
    Kind(
        "stopped_process", "A process is stopped", ("stopped-process",),
        "this rank's process is kept from running by a signal, a debugger, a frozen control group "
        "or a pause of its machine, for so much of the time", COST, True,
    ),
    Kind(
        "unequal_ranks", "Ranks unequal from the start", ("balance",),
        "these ranks have been slower than their peers since the first step, and the peers wait "
        "for them; which speed is the expected one is not known",
        f"{COST}; info while it is short for how small it is", True,
        confirmed_by=("drift", "gpu-health"),
    ),
    Kind(
        "uneven_work", "Uneven work from step to step", ("balance",),
        "in each step all wait for one rank, and each time for another: so much is lost; no rank "
        "is named", _INFO, True,
    ),
    Kind(
        "hang", "Hang", ("hang",),
        "this rank never entered collective number n of this group; these ranks wait for it, and "
        "for whom they wait", _CRITICAL, True,
        family="collective_timeout_hang", confirmed_by=("desync", "gpu-events", "clock"),
    ),
    Kind(
        "desync", "Desync: ranks call different collectives", ("desync",),
        "this rank skipped, added, swapped or mismatched collective number n of this group, also "
        "where the backend computes wrongly without an error",
        "critical; info where only the lines of code differ, in every step alike", True,
        family="desync_mismatch", confirmed_by=("hang",),
    ),
    Kind(
        "crash", "Crash", ("root-cause",),
        "this rank failed first, with this error or signal; the other errors are echoes of it",
        "critical; warning where only echoes were seen", True,
        confirmed_by=("gpu-events", "memory-growth", "desync", "hang", "clock"),
    ),
    Kind(
        "failed_start", "Ended before its first step", ("root-cause",),
        "the program ended by itself before any step was done, with the line by which it says why; "
        "where all ranks fail alike, none is named", _CRITICAL, True,
        confirmed_by=("drift",),
    ),
    Kind("stopped", "Stopped from outside", ("root-cause",),
         "the job was stopped by a signal from outside; no rank is named", _INFO),
    Kind(
        "lost_rank", "A rank was lost, the others train on", ("regrouping",),
        "the ranks that are left have regrouped and train on without this one, or a process has "
        "taken its place", "warning; info once its place is taken", True,
    ),
    Kind("clock_offset", "A clock is ahead or behind", ("clock",), _CLOCK,
         "warning from one second on, or between ranks of one host; else info", True),
    Kind("clock_drift", "A clock runs too fast or too slowly", ("clock",), _CLOCK, _WARNING, True),
    Kind(
        "slow_link", "Slow link, adapter, host or switch", ("slow-link",),
        "transfers through this link, adapter, host or switch are slow, those beside it are not",
        f"{COST}; info or warning where the place or the cost is not known", True,
    ),
    Kind("communication_bound", "Steps wait for the network", ("communication",),
         _COMMUNICATION, _INFO, True),
    Kind("communication_advice", "Communication could be faster", ("communication",),
         _COMMUNICATION, _INFO, True),
    Kind("low_bus_bandwidth", "Communication slower than it was", ("communication",),
         "collectives of this group and size reach so much of the bandwidth that they reached "
         "before", _INFO, True),
    Kind(
        "stage_imbalance", "Pipeline stages are uneven", ("pipeline",),
        "the pipeline idles so much by its schedule and so much by this stage; an even split would "
        "give so much", _INFO, True, confirmed_by=("straggler",),
    ),
    Kind(
        "no_pipelining", "Stages work one after the other", ("pipeline",),
        "the model is on so many ranks of which one works at any time: so much of the time idles, "
        "and so much less with 4 and 8 microbatches that are in the pipeline at once", _INFO, True,
    ),
    Kind(
        "pipeline_bubble", "Pipeline idles: few microbatches", ("pipeline",),
        "so few microbatches for so many stages: the schedule idles so much, this many would be "
        "enough", _INFO, True,
    ),
    Kind("version_drift", "Versions differ between ranks", ("drift",),
         "these ranks run other versions or variables than the others",
         "by the fact that differs; one level up where exactly these ranks are in trouble",
         family="nccl_version_mismatch"),
    Kind("drift", "Settings or hardware differ between ranks", ("drift",),
         "these ranks run on other settings, code or hardware than the others",
         "by the fact that differs; one level up where exactly these ranks are in trouble"),
    Kind("replica_drift", "Replicas of the model differ", ("replicas",),
         "this rank's copy of the parameters is no longer the same bits as its replicas, or is no "
         "longer updated", _CRITICAL, confirmed_by=("outliers", "desync", "gpu-events")),
    Kind("nan", "NaN or infinity", ("nan",),
         "this rank brought NaN or infinity into the training at this step",
         "critical while it goes on, else warning; info where a gradient scaler skipped few steps",
         family="numerics", confirmed_by=("outliers", "replicas", "gpu-events")),
    Kind("loss_spike", "Spike of the loss or the gradients", ("spikes",),
         "the loss or the gradient norm rose far above its history", _INFO,
         family="numerics", confirmed_by=("outliers", "nan")),
    Kind("divergence", "Training diverges", ("spikes",),
         "the loss rose and does not come back", "critical; info of networks that train in turn",
         family="numerics", confirmed_by=("outliers", "nan", "replicas")),
    Kind("nothing_learnt", "Nothing is learnt", ("learning",),
         "every gradient is exactly 0, or the loss is the same to the last bit since the first "
         "step", "warning; info where the loss has come down to exactly 0", family="numerics"),
    Kind("accumulation", "Accumulated gradients are scaled wrongly", ("learning",),
         "the loss of the passes that make one step is divided by their number twice, or not at "
         "all", _WARNING),
    Kind("no_warm_up", "No warm-up at a large batch", ("learning",),
         "the first step of a large batch takes the whole learning rate", _INFO),
    Kind("linear_scaling", "Rate scaled in proportion to the batch, with Adam", ("learning",),
         "the learning rate of an optimizer of Adam's kind grew as much as the batch did", _INFO),
    Kind("corruption", "One rank computes other numbers", ("outliers",),
         "this rank's loss or gradient is unlike the others' again and again", _WARNING,
         family="numerics", confirmed_by=("replicas", "gpu-events", "gpu-health")),
    Kind(
        "corrupt_batch", "One odd batch", ("outliers", "corrupt-batches"),
        "this rank drew a batch that is damaged or unlike the others",
        "warning where the script's own check says so or the whole job felt it, else info",
        confirmed_by=("replicas",),
    ),
    Kind("same_samples", "All ranks train on the same samples", ("sampling",),
         "replicas of a model draw the same samples, so that all of them together do what one "
         "alone would",
         f"{COST}, which is what all ranks but one do; info where their losses differ"),
    Kind("same_order", "Every epoch in the same order", ("sampling",),
         "the sampler is never given the number of the epoch by which it shuffles", _WARNING),
    Kind("memory_growth", "Memory grows", ("memory-growth",),
         "this rank's memory grows by so much a step and is full in so many steps",
         "critical 15 min before it is full, warning two hours or 2,000 steps before, else info",
         family="oom_host", confirmed_by=("gpu-health",)),
    Kind("fragmentation", "GPU memory in fragments", ("memory-growth",),
         "CUDA's allocator holds so much that no tensor uses",
         "warning where it holds nine tenths of the GPU, else info"),
    Kind("unused_memory", "GPU memory stays unused", ("memory-growth",),
         "no rank ever used more than half of the memory of its GPU; with a price list, what a "
         "cheaper host may take longer", _INFO),
    Kind("slow_epoch_start", "Slow start of every epoch", ("data-loading",),
         "each epoch begins with a wait for data", "warning from 10 % of the step, else info"),
    Kind("bad_shard", "Some batches come late", ("data-loading",),
         "some batches of this rank or worker come late",
         "warning from 10 % of the step, else info"),
    Kind("xid", "Xid error", ("gpu-events",), "the driver reported this Xid of this GPU",
         "by what the code asks for", family="gpu_hardware_xid"),
    Kind("gpu_error", "GPU error reported by the driver", ("gpu-events",),
         "the driver reported an uncorrectable error, or the GPU does not answer",
         "by what the error asks for"),
    Kind("throttle", "GPU held down by heat or power", _GPU,
         "heat or a power brake holds this GPU's clocks below those of its peers", COST),
    Kind("power_cap", "GPU held down by its power limit", _GPU,
         "this GPU runs at its power limit", _INFO),
    Kind("ecc", "Memory errors of a GPU", _GPU, "the memory of this GPU is failing",
         "critical where data may be wrong, else warning", family="ecc"),
    Kind("gpu_outlier", "GPU unlike the others", _GPU,
         "several sensors of this GPU are far from those of the others", _INFO),
    Kind("gpu_underuse", "GPUs with little to do", _GPU,
         "the GPUs computed less than a third of the last ten minutes", _INFO),
    Kind("noise_scale", "What a larger batch would give", ("noise-scale",),
         "how far a larger batch, and so more ranks, still saves steps", _INFO),
    Kind("staleness", "Gradients applied late", ("staleness",),
         "this worker's gradients are applied to parameters so many versions newer",
         "critical beyond the declared bound, else warning"),
    Kind("server_bottleneck", "Parameter servers are the bottleneck", ("staleness",),
         "all workers wait so much of each step for the servers; more servers, even shards or an "
         "all_reduce would leave so much", _INFO, True),
    Kind("hot_shard", "One parameter shard gets most requests", ("staleness",),
         "this parameter shard takes more than twice its share, and workers wait for it",
         "warning from 2 % of the time in its queue, else info"),
    Kind("goodput", "Where the time went", ("goodput",),
         "so much of the ranks' time went into steps that were kept, and where the rest went",
         _INFO),
    Kind("crash_loop", "Attempts fail alike", ("goodput",),
         "attempts in a row failed of the same rank, or by the same error, and none got further "
         "since; its cost is what restarts and steps done again take",
         "warning; critical from 10 % of the time", True),
    Kind("slow_checkpoint", "Slow checkpoints", ("goodput",),
         "saving takes so much of the time", "warning from 10 % of the time, else info", True),
    Kind("checkpoint_interval", "Checkpoints badly spaced", ("goodput",),
         "saving at this other interval would lose less",
         "warning from 2 % by the run's own failures, else info"),
    Kind("lone_evaluation", "One rank evaluates, the others wait", ("goodput",),
         "this rank evaluates while the others wait, for so much of the time",
         "warning from 10 % of the time, else info", True),
    Kind("regression", "Slower than earlier runs", ("regression",),
         "this run is slower than earlier runs of the same command", COST,
         confirmed_by=("communication", "data-loading", "gpu-health", "drift")),
    Kind("slowdown", "Slower than it was", ("regression",),
         "the whole job became slower at this step, or gradually",
         f"{COST}; info while it is short or little above the scatter",
         confirmed_by=("communication", "data-loading", "gpu-health")),
)  # fmt: skip

_BY_ID = {kind.id: kind for kind in KINDS}
# Of these the ranks that a finding names are those that others wait for.
SLOW_KINDS = frozenset(kind.id for kind in KINDS if "straggler" in kind.detectors)


def check(kind: str, detector: str) -> None:
    """Raise ValueError unless the detector makes findings of this kind."""
    known = _BY_ID.get(kind)
    if known is None or detector not in known.detectors:
        raise ValueError(f"findings/kinds.py has no kind {kind!r} of the detector {detector!r}")


def kinds_of(detector: str) -> tuple[str, ...]:
    """Return the ids of the kinds that a detector makes."""
    return tuple(kind.id for kind in KINDS if detector in kind.detectors)


def kind_named(name: str) -> Kind:
    """Return the kind with this id. Raises KeyError."""
    return _BY_ID[name]
