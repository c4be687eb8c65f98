"""GPUs as NVML and the kernel show them. NVML is asked in a child: `gpu_child.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rankscope.preflight.facts import burn_child, child, gpu_child
from rankscope.preflight.facts.gpu_host import GpuHostFacts
from rankscope.preflight.facts.gpu_host import collect as collect_host
from rankscope.preflight.system import System

BURN_LIMIT_S = 30.0  # torch 4 s, a context on each of 8 GPUs 0.5 s, warm-up and 0.5 s of work each


class Burn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one GPU did under load. 0 and None: not known."""

    index: int  # as CUDA counts
    uuid: str = ""
    bf16_tflops: float = 0.0
    is_correct: bool = True  # the same product twice
    copy_gb_per_s: float = 0.0  # from pinned memory of the host
    pcie_generation: int | None = None
    pcie_width: int | None = None
    clock_reasons: int | None = None
    error: str = ""


# Made at import: two threads that are the first to use a type crash msgspec (0.22.0).
_BURNS = msgspec.json.Decoder(Burn)


def burn(system: System, num_gpus: int) -> tuple[tuple[Burn, ...], str]:
    """Return what each GPU did, or why nothing was measured."""
    argv = [sys.executable, "-P", str(Path(burn_child.__file__)), str(num_gpus)]
    done = system.run(argv, BURN_LIMIT_S)
    rows = []
    for line in done.out.splitlines():
        try:
            rows.append(_BURNS.decode(line))
        except msgspec.MsgspecError:
            continue  # torch itself may print
    problem = ""
    if done.code is None:
        problem = f"the load on the GPUs did not end in {BURN_LIMIT_S:g} s"
    elif done.code != 0 or not rows:
        problem = (done.err.strip().splitlines() or [f"exit code {done.code}"])[-1]
    return tuple(rows), problem


if TYPE_CHECKING:
    from rankscope.preflight.options import Options

NVML_LIMIT_S = 5.0  # eight GPUs answer in 0.2 s, 2 s without the persistence daemon


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process with memory on a GPU. An empty name: in another container, or of another user."""

    pid: int
    used_bytes: int = -1  # -1: not known
    name: str = ""


class NvLink(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One link of a GPU to another, or to a switch."""

    number: int
    is_active: bool = True
    errors: dict[str, int] = {}  # replay, recovery, crc: since the driver was loaded


class GpuPair(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is between two GPUs of the node."""

    first: int
    second: int
    level: int = -1  # 0 one board, 10 one switch, 20 several, 30 host bridge, 40 node, 50 system
    p2p: str = ""  # ok, chipset, gpu, topology, disabled, not supported, unknown


class Gpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU. None and empty: it does not say."""

    index: int
    name: str = ""
    uuid: str = ""
    bus_id: str = ""
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None  # by all processes
    processes: tuple[GpuProcess, ...] = ()
    ecc: bool | None = None
    ecc_uncorrected: int | None = None  # since the driver was loaded
    ecc_corrected: int | None = None
    rows_remapped: int | None = None  # for uncorrectable errors, in its life
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    pages_retired: int | None = None
    pages_pending: bool | None = None
    recovery_action: str = ""
    clock_reasons: int | None = None  # bits of gpu_words.THROTTLE_WORDS
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    power_limit_mw: int | None = None
    power_default_mw: int | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None
    persistence: bool | None = None
    mig: bool | None = None
    compute_mode: str = ""
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_generation: int | None = None  # at rest links step down: only `Burn` measures it
    pcie_generation_max: int | None = None
    pcie_replays: int | None = None
    links: tuple[NvLink, ...] = ()
    fabric_state: str = ""  # not supported, not started, in progress, completed
    fabric_status: int = 0  # of a completed one: an error code of NVML
    fabric_health: int | None = None  # NVML_GPU_FABRIC_HEALTH_MASK_*
    numa_node: int | None = None
    errors: dict[str, str] = {}  # function: what the driver answered instead


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All GPUs of the node."""

    num_gpus: int = 0  # that a process here may use: CUDA_VISIBLE_DEVICES is obeyed
    absence: str = ""  # why there is no NVML: no driver, no library
    problem: str = ""  # NVML is there and fails
    recording: str = ""  # the file that played NVML; empty: it was the real one
    count: int = 0  # as NVML counts
    lost: dict[str, str] = {}  # index: why there is no handle
    driver: str = ""
    cuda_driver: str = ""  # the newest CUDA that it runs: "12.8"
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    visible: str | None = None  # CUDA_VISIBLE_DEVICES; None: not set
    invisible: str = ""  # the first entry of it that names no GPU: CUDA stops there
    host: GpuHostFacts = GpuHostFacts()
    burns: tuple[Burn, ...] = ()
    burn_problem: str = ""  # why there are none, where they were asked for


# Made at import: two threads that are the first to use a type crash msgspec (0.22.0).
_FACTS = msgspec.json.Decoder(GpuFacts)


def collect(system: System, options: Options) -> GpuFacts:
    """Ask NVML and the kernel; with --deep also load every GPU for half a second.

    Raises `child.NotKnown` where the child that asks did not come so far.
    """
    argv = [sys.executable, "-P", str(Path(gpu_child.__file__))]
    try:
        facts = _FACTS.decode(child.ask(system, argv, NVML_LIMIT_S))
    except child.Hung as reason:
        facts = GpuFacts(problem=f"NVML: {reason}")
    facts = msgspec.structs.replace(facts, host=collect_host(system, facts.count > 0))
    facts = _visible(facts, system.environ.get("CUDA_VISIBLE_DEVICES"))
    if options.tier != "deep" or not facts.num_gpus or facts.recording:
        return facts
    burns, problem = burn(system, facts.num_gpus)
    return msgspec.structs.replace(facts, burns=burns, burn_problem=problem)


def _visible(facts: GpuFacts, visible: str | None) -> GpuFacts:
    """Count the GPUs as CUDA does: entries in order, up to the first that names none."""
    if visible is None:
        return msgspec.structs.replace(facts, num_gpus=len(facts.gpus))
    entries = [entry.strip() for entry in visible.split(",")] if visible.strip() else []
    if any(entry.startswith("MIG-") for entry in entries):
        return msgspec.structs.replace(facts, num_gpus=len(entries), visible=visible)
    number, invisible = 0, ""
    for entry in entries:
        is_number = entry.isdigit() and int(entry) < facts.count
        if not is_number and not any(g.uuid.startswith(entry) and entry for g in facts.gpus):
            invisible = "" if entry in ("-1", "NoDevFiles") else entry
            break
        number += 1
    if not facts.gpus:
        invisible = ""  # nothing to be seen in any case
    return msgspec.structs.replace(facts, num_gpus=number, visible=visible, invisible=invisible)
