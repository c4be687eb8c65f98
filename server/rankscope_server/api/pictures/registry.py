"""Which picture belongs to which kind of finding: every kind has one."""

from __future__ import annotations

from rankscope_server.api.pictures.bars import by_role, ledger, shards, shares
from rankscope_server.api.pictures.counters import (
    FAULTS,
    GARBAGE,
    OTHER_THREADS,
    TAKEN_OFF,
    Counter,
    counted,
)
from rankscope_server.api.pictures.lanes import ends, gpu_errors, stops
from rankscope_server.api.pictures.machines import links, samples
from rankscope_server.api.pictures.numbers import (
    LEARNING_RATE,
    LOCAL_NORM,
    LOSS,
    NORM,
    PRINTED,
    TOKENS,
    Number,
    ages,
    memory,
    numbers,
)
from rankscope_server.api.pictures.records import calls, checksums, facts, loss_scale, passes, saves
from rankscope_server.api.pictures.steps import clocks, of_rank, pace
from rankscope_server.api.pictures.subject import Source

_NO_NUMBERS = "no number of training of these steps is stored"
_NO_STEPS = "no step around its onset is stored"


def _numbers(*wanted: Number) -> Source:
    return Source(numbers(*wanted), _NO_NUMBERS)


def _samples(*keys: str) -> Source:
    return Source(samples(*keys), "no sample of the machines around its onset is stored", "samples")


def _steps(metric: str, title: str) -> Source:
    return Source(of_rank(metric, title), _NO_STEPS)


def _counted(counter: Counter) -> Source:
    return Source(counted(counter), "no single step around its onset is stored", "steps")


_MEMORY = Source(memory, _NO_NUMBERS)
_OWN = _steps("own_work", "Self time, each step")
_DATA = _steps("data", "Wait for data, each step")
_PACE = Source(pace, _NO_STEPS)
_CLOCKS = Source(clocks, "no measurement of clocks and no step of other ranks is stored")
_GPU = _samples("gpu_clock", "gpu_temperature", "gpu_power")
_PROCESSORS = _samples("rank_processors", "node_processors")
_SHARES = Source(shares, "the steps of this attempt are not divided into parts")
_ROLES = Source(by_role, "the self time of stages or servers is not known")
_ENDS = Source(ends, "when ranks ended their last step is not stored")
_SAVES = Source(saves, "fewer than two checkpoints are stored", "events")
_FACTS = Source(facts, "the facts in which ranks differ are not stored")
_PASSES = Source(passes, "how passes over the data began is not stored", "events")
PLAIN: tuple[Source, ...] = (_OWN,)  # of a kind that has no picture of its own
PICTURES: dict[str, tuple[Source, ...]] = {
    "slow_compute": (_OWN,),
    "slow_data": (_DATA,),
    "garbage_collection": (_OWN, _counted(GARBAGE)),
    "host_contention": (
        _OWN, _samples("waits_for_processor"), _counted(TAKEN_OFF), _PROCESSORS,
    ),
    "thermal_or_power": (_OWN, _GPU),
    "page_cache": (_DATA, _counted(FAULTS)),
    "cpu_pinning": (_OWN, _samples("processors_allowed"), _PROCESSORS),
    "cpu_limit": (_OWN, _samples("held_by_limit"), _PROCESSORS),
    "busy_thread": (_OWN, _counted(OTHER_THREADS)),
    "sequence_imbalance": (_OWN, _numbers(TOKENS)),
    "stopped_process": (
        Source(stops, "no sample of the ranks' processes is stored", "samples"), _OWN,
    ),
    "unequal_ranks": (_OWN,),
    "uneven_work": (_OWN,),
    "hang": (_ENDS,),
    "desync": (Source(calls, "the calls around it are not stored", "collectives"), _ENDS),
    "crash": (_ENDS,),
    "failed_start": (_ENDS,),
    "stopped": (_ENDS,),
    "lost_rank": (_ENDS,),
    "clock_offset": (_CLOCKS,),
    "clock_drift": (_CLOCKS,),
    "slow_link": (
        Source(links, "no sample of the ranks' connections is stored", "samples"), _PACE,
    ),
    "communication_bound": (_PACE, _SHARES),
    "communication_advice": (_SHARES,),
    "low_bus_bandwidth": (_PACE,),
    "stage_imbalance": (_ROLES,),
    "no_pipelining": (_ROLES,),
    "pipeline_bubble": (_ROLES,),
    "version_drift": (_FACTS,),
    "drift": (_FACTS,),
    "replica_drift": (
        Source(checksums, "no checksum of replicas at its onset is stored"), _ENDS,
    ),
    "nan": (_numbers(LOSS, LOCAL_NORM, NORM),),
    "loss_spike": (_numbers(LOSS, NORM),),
    "divergence": (_numbers(LOSS, PRINTED, NORM),),
    "nothing_learnt": (_numbers(LOSS, NORM),),
    "accumulation": (
        Source(loss_scale, "by what the loss is divided is not stored", "events"), _numbers(LOSS),
    ),
    "no_warm_up": (_numbers(LEARNING_RATE, LOSS),),
    "linear_scaling": (_numbers(LEARNING_RATE, LOSS),),
    "corruption": (_numbers(LOCAL_NORM, LOSS),),
    "corrupt_batch": (_numbers(LOSS, LOCAL_NORM),),
    "same_samples": (_PASSES, _numbers(LOCAL_NORM, LOSS)),
    "same_order": (_PASSES,),
    "memory_growth": (_MEMORY,),
    "fragmentation": (_MEMORY,),
    "unused_memory": (_MEMORY,),
    "slow_epoch_start": (_DATA,),
    "bad_shard": (_DATA,),
    "xid": (
        Source(gpu_errors, "what the driver reported is not stored", "events"),
        _samples("gpu_utilization", "gpu_clock"),
    ),
    "gpu_error": (
        Source(gpu_errors, "what the driver reported is not stored", "events"),
        _samples("gpu_utilization", "ecc_uncorrected"),
    ),
    "throttle": (_GPU,),
    "power_cap": (_GPU,),
    "ecc": (_samples("ecc_uncorrected", "ecc_corrected", "rows_waiting"),),
    "gpu_outlier": (_GPU,),
    "gpu_underuse": (_samples("gpu_utilization"),),
    "noise_scale": (_numbers(LOCAL_NORM, NORM),),
    "staleness": (Source(ages, "no version of the parameters is stored"),),
    "server_bottleneck": (_ROLES,),
    "hot_shard": (Source(shards, "no totals of parameter shards are stored"),),
    "goodput": (Source(ledger, "what the run cost is not known"),),
    "crash_loop": (Source(ledger, "what the run cost is not known"),),
    "slow_checkpoint": (_SAVES, _OWN),
    "checkpoint_interval": (_SAVES,),
    "lone_evaluation": (
        _steps("evaluation", "Evaluation, each step"), _steps("blocked", "Blocked on peers"),
    ),
    "regression": (_PACE,),
    "slowdown": (_PACE,),
}  # fmt: skip
