"""GPUs: number, memory, health, clocks, links, pace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from rankscope.preflight.checks.base import BuiltinCheck, Run, grouped, listed, on_each
from rankscope.preflight.checks.comparing import by_value, compared, odd_ones
from rankscope.preflight.facts.gpu import Burn, Gpu, GpuFacts
from rankscope.preflight.model import CheckFinding, Fix, Owner, Status
from rankscope.wire.nvidia_codes import throttle_words, xid_words

GIB = 1 << 30
_MAX_LINES = 16
Bad = tuple[str, Gpu, str]  # node, GPU, what is wrong with it


def nodes_with(run: Run) -> Iterator[tuple[str, GpuFacts]]:
    """Yield the nodes that have GPUs."""
    for node, facts in run.each(lambda facts: facts.gpu).items():
        if facts.gpus:
            yield node, facts


def gpus(run: Run) -> Iterator[tuple[str, Gpu]]:
    """Yield every GPU that NVML gave."""
    for node, facts in nodes_with(run):
        for gpu in facts.gpus:
            yield node, gpu


class GpuCheck(BuiltinCheck):
    """A check over single GPUs: one finding for one cause, with all GPUs that have it."""

    @classmethod
    def gpus(
        cls,
        status: Status,
        bad: Sequence[Bad],
        command: str,
        *,
        impact: str,
        unless: str,
        owner: Owner = "admin",
    ) -> Iterator[CheckFinding]:
        """Yield one finding for all `bad` GPUs; `command` may hold {index}, of a node's first."""
        if not bad:
            return
        nodes = {node: gpu for node, gpu, _ in reversed(bad)}
        nodes = {node: nodes[node] for node, _, _ in bad}
        of_gpus = f"GPU {bad[0][1].index}" if len(bad) == 1 else f"{len(bad)} GPUs"
        yield cls.finding(
            status,
            f"{of_gpus}: {bad[0][2]}",
            at=nodes,
            evidence={
                "gpus": [
                    {"node": node, "index": gpu.index, "uuid": gpu.uuid, "what": what}
                    for node, gpu, what in bad
                ]
            },
            lines=(f"{n}: GPU {g.index} {g.bus_id}: {what}" for n, g, what in bad[:_MAX_LINES]),
            fix=(
                Fix(node=node, command=command.format(index=gpu.index), owner=owner)
                for node, gpu in nodes.items()
            ),
            impact=impact,
            unless=unless,
        )


class GpuCount(GpuCheck, id="gpu.count", scope="all"):
    """Every node has a GPU for each rank, all have equally many, and the driver answers.

    Applies where the job uses NCCL, or where a driver for GPUs is loaded and fails.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail on a driver that fails, a lost GPU, and fewer GPUs than ranks."""
        nodes = run.each(lambda facts: facts.gpu)
        is_wanted = run.backend == "nccl"
        if not is_wanted and not any(_has_driver(facts) for facts in nodes.values()):
            yield self.skipped("no GPU on any node")
            return
        yield from self.not_measured(run, "gpu")
        broken = {node: why for node, facts in nodes.items() if (why := _driver_error(facts))}
        yield from self._driver(broken)
        yield from self._lost({node: facts for node, facts in nodes.items() if facts.lost})
        yield from self._invisible(nodes)
        good = {n: f for n, f in nodes.items() if n not in broken and not f.invisible}
        if not is_wanted:
            return
        few = {node: facts for node, facts in good.items() if facts.num_gpus < run.nproc(node)}
        if few:
            yield self._few(run, few)
        else:
            yield from self._unequal({node: facts.num_gpus for node, facts in good.items()})

    def _driver(self, broken: dict[str, str]) -> Iterator[CheckFinding]:
        for why, nodes in grouped((why, node) for node, why in broken.items()).items():
            yield self.fail(
                f"the GPU driver does not answer: {why}",
                at=nodes,
                evidence={"error": why},
                lines=(f"{node}: {why}" for node in nodes),
                fix=on_each(nodes, "nvidia-smi; cat /proc/driver/nvidia/version", "admin"),
                impact="no GPU can be used on this node: its ranks die, the others wait",
                unless="the preflight runs in a container without the driver, the job does not",
            )

    def _lost(self, lost: dict[str, GpuFacts]) -> Iterator[CheckFinding]:
        lines = [
            (node, f"GPU {index}: {why}")
            for node, facts in lost.items()
            for index, why in facts.lost.items()
        ]
        if lines:
            yield self.fail(
                lines[0][1],
                at=lost,
                evidence={"lost": {node: facts.lost for node, facts in lost.items()}},
                lines=(f"{node}: {text}" for node, text in lines),
                fix=on_each(lost, "sudo dmesg | grep -i xid; sudo reboot", "admin"),
                impact="the rank of this GPU dies when it sets its device",
                unless="the GPU is being reset at this moment",
            )

    def _invisible(self, nodes: dict[str, GpuFacts]) -> Iterator[CheckFinding]:
        for node, facts in nodes.items():
            if not facts.invisible:
                continue
            left = facts.num_gpus
            names = ",".join(str(gpu.index) for gpu in facts.gpus)
            yield self.fail(
                f"CUDA_VISIBLE_DEVICES={facts.visible}: there is no GPU {facts.invisible}",
                at=(node,),
                evidence={"visible": facts.visible, "count": facts.count, "usable": left},
                lines=(f"{node}: CUDA stops at the first entry that names no GPU: {left} left",),
                fix=(Fix(node=node, command=f"export CUDA_VISIBLE_DEVICES={names}"),),
                impact="ranks die with 'invalid device ordinal'",
                unless="the launcher sets the variable anew",
            )

    def _few(self, run: Run, few: dict[str, GpuFacts]) -> CheckFinding:
        node, least = min(few.items(), key=lambda item: item[1].num_gpus)
        counts = {name: facts.num_gpus for name, facts in few.items()}
        return self.fail(
            f"{least.num_gpus} GPUs for {run.nproc(node)} ranks",
            at=few,
            evidence={"num_gpus": counts, "on_bus": {n: f.host.num_on_bus for n, f in few.items()}},
            lines=(
                f"{name}: NVML counts {facts.count}, the bus {facts.host.num_on_bus}, "
                f"CUDA_VISIBLE_DEVICES is {facts.visible or 'not set'}"
                + (f" ({facts.absence})" if facts.absence else "")
                for name, facts in few.items()
            ),
            fix=(
                Fix(node=name, command=f"nvidia-smi -L   # or --nproc-per-node {max(count, 1)}")
                for name, count in counts.items()
            ),
            impact="ranks die with 'invalid device ordinal' or share a GPU; NCCL: 'Duplicate GPU'",
            unless="GPUs are handed to the job only when it starts",
        )

    def _unequal(self, counts: dict[str, int]) -> Iterator[CheckFinding]:
        if odd := odd_ones(counts):
            yield self.warn(
                f"{counts[odd[0]]} GPUs, not as many as the other nodes",
                at=odd,
                evidence={"num_gpus": counts},
                lines=compared(counts),
                fix=on_each(odd, "nvidia-smi -L; lspci | grep -i nvidia"),
                impact="one number of ranks does not fit all nodes",
                unless="the nodes are meant to differ",
            )


def _has_driver(facts: GpuFacts) -> bool:
    return bool(facts.count or facts.problem or facts.host.has_kernel_driver)


def _driver_error(facts: GpuFacts) -> str:
    """Return why NVML fails where there is a driver; empty: it works, or there is none."""
    if facts.problem:
        return facts.problem
    if facts.absence and facts.host.has_kernel_driver:
        return f"{facts.absence}, and the kernel driver is loaded"
    return ""


# A context takes 0.3 to 0.6 GiB, a display server less: above, another process holds data there.
BUSY_BYTES = GIB


class GpuBusy(GpuCheck, id="gpu.busy", needs=("gpu",)):
    """No other process holds more than 1 GiB of a GPU's memory, as a dead job's children do."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail with the processes and the memory that they hold."""
        yield from self.not_measured(run, "gpu")
        for node, facts in nodes_with(run):  # each node has processes of its own: each its finding
            busy = [gpu for gpu in facts.gpus if (gpu.memory_used_bytes or 0) > BUSY_BYTES]
            command, owner = _end_holders(busy)
            yield from self.gpus(
                "fail",
                [(node, gpu, _holders(gpu)) for gpu in busy],
                command,
                owner=owner,
                impact="'CUDA out of memory' at the first large allocation, or a GPU that is slow",
                unless="the other process ends before the launch, or shares the GPU on purpose",
            )


def _holders(gpu: Gpu) -> str:
    used = (gpu.memory_used_bytes or 0) / GIB
    holders = ", ".join(
        f"pid {process.pid}{f' ({process.name[:60]})' if process.name else ''}"
        for process in gpu.processes[:4]
    )
    return f"{used:.1f} GiB held by {holders or 'processes that are not to be seen from here'}"


def _end_holders(busy: list[Gpu]) -> tuple[str, Owner]:
    mine = sorted({process.pid for gpu in busy for process in gpu.processes if process.name})
    if mine:
        return f"ps -fp {','.join(map(str, mine))}; kill {' '.join(map(str, mine))}", "you"
    indices = ",".join(str(gpu.index) for gpu in busy)
    return (
        f"nvidia-smi -i {indices}; sudo fuser -v /dev/nvidia*   # then end what is found",
        "admin",
    )


class GpuEcc(GpuCheck, id="gpu.ecc", needs=("gpu",)):
    """No GPU has uncorrected memory errors, rows to be remapped, or pages to be retired.

    Counts since the driver was loaded; corrected errors and finished remappings are normal wear.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail, apart for what a reset mends and what it does not."""
        yield from self.not_measured(run, "gpu")
        everything = list(gpus(run))
        yield from self.gpus(
            "fail",
            [
                (n, g, "remapping of a bad memory row failed")
                for n, g in everything
                if g.rows_failed
            ],
            "take the node out of service: the GPU at index {index} must be replaced",
            impact="the job dies of a memory error (Xid 48, 94, 95), sooner or later",
            unless="the GPU was replaced and the counters are old",
            owner="provider",
        )
        yield from self.gpus(
            "fail",
            [
                (n, g, _to_be_reset(g))
                for n, g in everything
                if not g.rows_failed and _to_be_reset(g)
            ],
            "sudo nvidia-smi --gpu-reset -i {index}   # with no process on it",
            impact="the job dies of a memory error (Xid 48, 94, 95), or computes nonsense",
            unless="the errors happened in a row that has been remapped since",
        )
        if silent := {node for node, gpu in everything if gpu.ecc is False}:
            title = f"ECC is switched off on {len(silent)} nodes: memory errors are not seen"
            yield self.skipped(title, nodes=sorted(silent))


def _to_be_reset(gpu: Gpu) -> str:
    if gpu.ecc_uncorrected:
        return f"{gpu.ecc_uncorrected} uncorrected memory errors since the driver was loaded"
    if gpu.rows_pending:
        return "a bad memory row waits for a reset to be remapped"
    if gpu.pages_pending:
        return "a bad memory page waits for a reset to be retired"
    return ""


# Faults of the hardware or the driver (NVIDIA, "Xid Errors"); the others are mostly faults of
# programs that ran before, and say nothing about the GPU.
_HARDWARE = frozenset({46, 48, 61, 62, 64, 74, 79, 92, 95, 119, 120, 136, 140, 143, 144, 145, 149,
                       154, 155, 158})  # fmt: skip


class GpuRecovery(GpuCheck, id="gpu.recovery", needs=("gpu",)):
    """No GPU waits for a reset, no question to the driver fails, no hardware Xid since boot.

    A driver's error is a failure; an Xid of the past only warns, for a reset may have mended it.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail on what is so now, warn of what the log holds."""
        yield from self.not_measured(run, "gpu")
        wanted: list[Bad] = []
        errors: list[Bad] = []
        for node, gpu in gpus(run):
            if gpu.recovery_action not in ("", "none"):
                wanted.append((node, gpu, f"the driver asks for: {gpu.recovery_action}"))
            elif gpu.errors:
                name, text = next(iter(gpu.errors.items()))
                errors.append((node, gpu, f"the driver fails: {text} ({name})"))
        yield from self.gpus(
            "fail",
            wanted,
            "sudo nvidia-smi --gpu-reset -i {index}   # or reboot, as it asks",
            impact="the rank on this GPU fails or hangs at its first kernel",
            unless="the recovery is under way",
        )
        yield from self.gpus(
            "fail",
            errors,
            "nvidia-smi -q -i {index}; sudo dmesg | grep -i -e xid -e nvrm | tail",
            impact="the rank on this GPU fails or hangs",
            unless="the driver of this GPU does not know the question and says so wrongly",
        )
        yield from self._log(run)

    def _log(self, run: Run) -> Iterator[CheckFinding]:
        own_log = {node: facts for node, facts in nodes_with(run) if not facts.recording}
        for node, facts in own_log.items():
            texts = [
                f"Xid {xid.number} ({xid_words(xid.number)}) x {xid.count} at {xid.bus_id}"
                for xid in facts.host.xids
                if xid.number in _HARDWARE
            ]
            if texts:
                yield self.warn(
                    f"since boot: {texts[0]}",
                    at=(node,),
                    evidence={"xids": texts},
                    lines=texts,
                    fix=on_each((node,), "sudo dmesg -T | grep Xid", "admin"),
                    impact="the GPU may fail again under load",
                    unless="the GPU was reset since, and has run well",
                    confidence="likely",
                )
        denied = [node for node, facts in own_log.items() if facts.host.xid_problem]
        title = "Xid errors of this boot: the kernel log cannot be read"
        yield from self.note("unknown", denied, title)


# Hardware slowdown, hardware thermal slowdown, power brake: never of a healthy GPU, idle or busy.
# A power cap by software is normal under load, and heat shows in the thermal bits.
_HARDWARE_BITS = 0x008 | 0x040 | 0x080
_THERMAL_BIT = 0x020

_SETTINGS: dict[str, tuple[Callable[[Gpu], object], str]] = {
    "power limit": (
        lambda gpu: None if gpu.power_limit_mw is None else f"{gpu.power_limit_mw / 1e3:.0f} W",
        "sudo nvidia-smi -i {index} -pl WATTS   # as on the other GPUs",
    ),
    "highest SM clock": (
        lambda gpu: None if gpu.sm_clock_max_mhz is None else f"{gpu.sm_clock_max_mhz} MHz",
        "sudo nvidia-smi -i {index} -rgc; sudo nvidia-smi -i {index} -rac",
    ),
    "persistence mode": (
        lambda gpu: None if gpu.persistence is None else "on" if gpu.persistence else "off",
        "sudo nvidia-smi -i {index} -pm 1",
    ),
    "MIG": (
        lambda gpu: None if gpu.mig is None else "on" if gpu.mig else "off",
        "sudo nvidia-smi -i {index} -mig 0   # or 1, as on the other GPUs",
    ),
    "compute mode": (lambda gpu: gpu.compute_mode or None, "sudo nvidia-smi -i {index} -c 0"),
}


class GpuClock(GpuCheck, id="gpu.clock", scope="all", needs=("gpu",)):
    """Nothing holds a GPU's clocks down, and all GPUs are set alike.

    Compared are power limit, highest clock, persistence, MIG and compute mode, among GPUs of one
    model, over all nodes.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail on a slowdown by hardware, warn of heat and of differences."""
        yield from self.not_measured(run, "gpu")
        found: dict[Status, list[Bad]] = {"fail": [], "warn": []}
        for node, gpu in gpus(run):
            reasons = gpu.clock_reasons or 0
            what = f"clocks are held down: {', '.join(throttle_words(reasons))}, "
            what += f"{gpu.temperature_c} C"
            if reasons & _HARDWARE_BITS:
                found["fail"].append((node, gpu, what))
            elif reasons & _THERMAL_BIT:
                found["warn"].append((node, gpu, what))
        for status, bad in found.items():
            yield from self.gpus(
                status,
                bad,
                "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {index}"
                "   # look at fans, cables, power supplies",
                impact="this GPU works at a fraction of its pace, and all ranks wait for it",
                unless="it passes as soon as the machine has cooled down",
            )
        yield from self._settings(run)

    def _settings(self, run: Run) -> Iterator[CheckFinding]:
        models: dict[str, list[tuple[str, Gpu]]] = {}
        for node, gpu in gpus(run):
            models.setdefault(gpu.name, []).append((node, gpu))
        for rows in models.values():
            for name, (ask, command) in _SETTINGS.items():
                values = {
                    f"{node}/{gpu.index}": value
                    for node, gpu in rows
                    if (value := ask(gpu)) is not None
                }
                groups = by_value(values)
                usual = next(iter(groups), None)
                if len(groups) < 2 or 2 * len(groups[usual]) <= len(values):
                    continue  # no majority: no GPU is the odd one
                yield from self.gpus(
                    "warn",
                    [
                        (node, gpu, f"{name} is {value}, of the others {usual}")
                        for node, gpu in rows
                        if (value := values.get(f"{node}/{gpu.index}", usual)) != usual
                    ],
                    command.replace("WATTS", str(usual).removesuffix(" W")),
                    impact="this GPU works at another pace, or cannot be used as the others",
                    unless="it is meant so",
                )


PCIE_SLOW_RATIO = 0.6  # of the median: less is a link of half the lanes, or one generation down


class GpuPcie(GpuCheck, id="gpu.pcie", needs=("gpu",)):
    """Every GPU has all lanes of its PCIe link, and under load the full generation.

    A link at rest steps its generation down to save power: only --deep, which loads it, looks at
    that, and the speed of a copy.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn of links that are narrower, older or slower than they could be."""
        yield from self.not_measured(run, "gpu")
        bad: list[Bad] = []
        for node, gpu in gpus(run):
            width, most = gpu.pcie_width, gpu.pcie_width_max
            if width and most and width < most:
                bad.append((node, gpu, f"PCIe x{width} of x{most}"))
        narrow = [gpu for _, gpu, _ in bad]
        bad += [row for row in self._loaded(run) if all(row[1] is not gpu for gpu in narrow)]
        yield from self.gpus(
            "warn",
            bad,
            "sudo lspci -vv -d 10de: | grep -e NVIDIA -e LnkSta:   # reseat the card",
            impact="loading batches and offloading are slower on this GPU, and all wait for it",
            unless="the slot is meant to be narrower",
        )

    def _loaded(self, run: Run) -> Iterator[Bad]:
        speeds = [b.copy_gb_per_s for _, f in nodes_with(run) for b in f.burns if b.copy_gb_per_s]
        usual = median(speeds) if len(speeds) > 2 else 0.0
        for node, facts in nodes_with(run):
            by_uuid = {gpu.uuid: gpu for gpu in facts.gpus}
            for burn in facts.burns:
                gpu = by_uuid.get(burn.uuid)
                if gpu is None:
                    continue
                now, most = burn.pcie_generation, gpu.pcie_generation_max
                if now and most and now < most:
                    yield node, gpu, f"PCIe generation {now} of {most} under load"
                elif burn.copy_gb_per_s and burn.copy_gb_per_s < PCIE_SLOW_RATIO * usual:
                    text = f"{burn.copy_gb_per_s:.1f} GB/s from the host, median {usual:.1f} GB/s"
                    yield node, gpu, text


# bits of the health mask: 1 in bits 0-1 is degraded bandwidth, in bits 4-5 an unhealthy route
_DEGRADED, _UNHEALTHY_ROUTE = (0, 1), (4, 1)
RECOVERIES = 1  # a link that had to be recovered even once has lost packets to hardware


class GpuNvlink(GpuCheck, id="gpu.nvlink", scope="all", needs=("gpu",)):
    """All NVLinks are up and without errors, and the fabric of NVSwitches is complete.

    A GPU of which some links are down works, and holds the others up.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail on links that are down, and on a fabric that is not up."""
        yield from self.not_measured(run, "gpu")
        if not any(gpu.links for _, gpu in gpus(run)):
            yield self.skipped("no GPU has NVLink")
            return
        yield from self._fabric(run)
        yield from self.gpus(
            "fail",
            list(_links_down(run)),
            "nvidia-smi nvlink --status -i {index}; sudo nvidia-smi --gpu-reset",
            impact="NCCL takes PCIe instead: all-reduce of the node is several times slower",
            unless="the node is built with fewer links than the GPU has",
        )
        yield from self.gpus(
            "warn",
            list(_links_recovered(run)),
            "nvidia-smi nvlink --errorcounters -i {index}",
            impact="Xid 74 and a dead job, when a link fails altogether",
            unless="the counters are of a time before a repair",
        )
        yield from self._topology(run)

    def _fabric(self, run: Run) -> Iterator[CheckFinding]:
        down: list[Bad] = []
        sick: list[Bad] = []
        for node, gpu in gpus(run):
            if gpu.fabric_state in ("not started", "in progress"):
                down.append((node, gpu, f"the NVSwitch fabric is {gpu.fabric_state}"))
            elif gpu.fabric_state == "completed" and gpu.fabric_status:
                what = f"the NVSwitch fabric failed with NVML error {gpu.fabric_status}"
                down.append((node, gpu, what))
            elif (what := _health(gpu)) != "":
                sick.append((node, gpu, what))
        yield from self.gpus(
            "fail",
            down,
            "sudo systemctl restart nvidia-fabricmanager; nvidia-smi -q -i {index}",
            impact="CUDA fails with error 802 'system not yet initialized'",
            unless="the node has just booted and the fabric manager still works",
        )
        yield from self.gpus(
            "fail",
            sick,
            "nvidia-smi -q -i {index} | grep -A12 Fabric; sudo nvidia-smi --gpu-reset",
            impact="collectives within the fabric are slow, or fail",
            unless="the fabric manager is just rebuilding its routes",
        )

    def _topology(self, run: Run) -> Iterator[CheckFinding]:
        levels = {node: _levels(facts) for node, facts in nodes_with(run) if facts.pairs}
        models = {frozenset(gpu.name for gpu in facts.gpus) for _, facts in nodes_with(run)}
        odd = odd_ones(levels)
        if len(models) > 1 or not odd or 2 * len(odd) >= len(levels):
            return  # other models have other boards
        yield self.warn(
            "GPUs are wired otherwise than on the other nodes",
            at=odd,
            evidence={"levels": levels},
            lines=compared(levels),
            fix=on_each(odd, "nvidia-smi topo -m", "admin"),
            impact="NCCL finds another ring on this node: slower, and the others wait",
            unless="the nodes are of different make",
        )


def _health(gpu: Gpu) -> str:
    mask = gpu.fabric_health or 0
    for (shift, value), words in (
        (_DEGRADED, "the NVSwitch fabric has degraded bandwidth"),
        (_UNHEALTHY_ROUTE, "a route through the NVSwitch fabric is unhealthy"),
    ):
        if mask >> shift & 0b11 == value:
            return words
    return ""


def _links_down(run: Run) -> Iterator[Bad]:
    """Yield GPUs with fewer links up than another of the model has: boards leave links out."""
    most: dict[str, int] = {}
    for _, gpu in gpus(run):
        most[gpu.name] = max(most.get(gpu.name, 0), _active(gpu))
    for node, gpu in gpus(run):
        if gpu.links and _active(gpu) < most[gpu.name]:
            yield node, gpu, f"{_active(gpu)} of {most[gpu.name]} NVLinks are up"


def _links_recovered(run: Run) -> Iterator[Bad]:
    for node, gpu in gpus(run):
        recovered = [n.number for n in gpu.links if n.errors.get("recovery", 0) >= RECOVERIES]
        if recovered:
            yield node, gpu, f"NVLink {', '.join(map(str, recovered))} had to be recovered"


def _active(gpu: Gpu) -> int:
    return sum(link.is_active for link in gpu.links)


def _levels(facts: GpuFacts) -> str:
    """Return how many pairs of GPUs are at each level."""
    levels = [pair.level for pair in facts.pairs]
    return ", ".join(f"{levels.count(level)} at level {level}" for level in sorted(set(levels)))


class GpuP2p(GpuCheck, id="gpu.p2p", needs=("gpu",)):
    """GPUs of a node reach each other, and RDMA reaches them, without a copy through the host.

    Looks at peer access, translation by the IOMMU, access control (ACS) on PCIe bridges, and
    nvidia_peermem or dma-buf.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn of each way that is closed."""
        yield from self.not_measured(run, "gpu")
        causes = grouped((row, node) for node, facts in nodes_with(run) for row in _closed(facts))
        for node, facts in nodes_with(run):
            rdma = run.reports[node].facts.rdma
            if rdma is not None and rdma.ports and _is_closed_to_rdma(facts):
                causes[_NO_PEERMEM].append(node)
        for (what, command, impact), nodes in causes.items():
            yield self.warn(
                what,
                at=nodes,
                evidence={"what": what},
                lines=(f"{node}: {what}" for node in nodes),
                fix=on_each(nodes, command, "admin"),
                impact=impact,
                unless="this is a virtual machine, where it cannot be otherwise",
            )
        unread = (
            node
            for node, facts in nodes_with(run)
            if len(facts.gpus) > 1 and facts.host.num_acs_bridges is None and not facts.recording
        )
        title = "access control on PCIe bridges: only root may read it"
        yield from self.note("unknown", unread, title)


_NO_PEERMEM = (
    "RDMA cannot reach GPU memory: nvidia_peermem is not loaded, and the driver has no dma-buf",
    "sudo modprobe nvidia_peermem",
    "NCCL copies through the host for every message between nodes: a fraction of the bandwidth",
)


def _closed(facts: GpuFacts) -> Iterator[tuple[str, str, str]]:
    """Yield what closes the way between GPUs of a node: words, command, consequence."""
    if len(facts.gpus) < 2:
        return
    closed = [pair for pair in facts.pairs if pair.p2p in ("chipset", "topology", "disabled")]
    if closed:
        pair = closed[0]
        text = f"GPU {pair.first} and GPU {pair.second} cannot reach each other: {pair.p2p}"
        more = f" ({len(closed)} pairs)" if len(closed) > 1 else ""
        impact = "NCCL copies through the memory of the host: all-reduce of the node is slower"
        yield f"{text}{more}", "nvidia-smi topo -p2p r", impact
    has_links = any(link.is_active for gpu in facts.gpus for link in gpu.links)
    if has_links:
        return  # traffic between the GPUs takes NVLink, whatever the bus does
    if any(kind.startswith("DMA") for kind in facts.host.iommu_types):
        yield (
            f"the IOMMU translates for GPUs ({', '.join(facts.host.iommu_types)})",
            "add iommu=pt to the kernel's command line and reboot",
            "copies between GPUs are slow or hang",
        )
    if facts.host.num_acs_bridges:
        yield (
            f"access control (ACS) is on at {facts.host.num_acs_bridges} PCIe bridges",
            "for b in $(lspci -d ::0604 | cut -d' ' -f1); do "
            "sudo setpci -s $b ECAP_ACS+0x6.w=0000 2>/dev/null; done",
            "traffic between GPUs takes the way through the processor: slow, or NCCL hangs",
        )


def _is_closed_to_rdma(facts: GpuFacts) -> bool:
    host = facts.host
    return host.has_kernel_driver and not host.has_peermem and host.is_open_driver is False


BURN_SLOW_RATIO = 0.85  # of the median: GPUs of one model differ by a few per cent
LEAST_GPUS = 3  # of two, it cannot be said which is the slow one


class GpuBurn(GpuCheck, id="gpu.burn", scope="all", tier="deep", needs=("gpu", "torch")):
    """Half a second of matrix products runs at a like pace on every GPU, with the same result."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail on errors and wrong results, warn of slow GPUs."""
        yield from self.not_measured(run, "gpu")
        burns: list[tuple[str, Gpu, Burn]] = []
        idle: list[str] = []
        for node, facts in nodes_with(run):
            by_uuid = {gpu.uuid: gpu for gpu in facts.gpus}
            by_index = {gpu.index: gpu for gpu in facts.gpus}
            for burn in facts.burns:
                gpu = by_uuid.get(burn.uuid) or by_index.get(burn.index)
                if gpu is not None:
                    burns.append((node, gpu, burn))
            if not facts.burns:
                idle.append(f"{node}: {facts.burn_problem or 'no load was measured'}")
        yield from self.gpus(
            "fail",
            [
                (node, gpu, burn.error or "the same product came out in two ways")
                for node, gpu, burn in burns
                if burn.error or not burn.is_correct
            ],
            "nvidia-smi -q -i {index}; dcgmi diag -r 3 -i {index}",
            impact="the rank on this GPU dies, or trains with wrong numbers",
            unless="another process takes the GPU's memory at this moment",
        )
        yield from self._slow(burns)
        if idle:
            yield self.unknown(listed(idle))

    def _slow(self, burns: list[tuple[str, Gpu, Burn]]) -> Iterator[CheckFinding]:
        models: dict[str, list[tuple[str, Gpu, Burn]]] = {}
        for node, gpu, burn in burns:
            if burn.bf16_tflops > 0:
                models.setdefault(gpu.name, []).append((node, gpu, burn))
        for rows in models.values():
            if len(rows) < LEAST_GPUS:
                continue
            usual = median(burn.bf16_tflops for _, _, burn in rows)
            bad: list[Bad] = []
            for node, gpu, burn in rows:
                if burn.bf16_tflops < BURN_SLOW_RATIO * usual:
                    why = ", ".join(throttle_words(burn.clock_reasons or 0))
                    what = f"{burn.bf16_tflops:.0f} TFLOP/s in bf16, median {usual:.0f}"
                    bad.append((node, gpu, f"{what}{f' ({why})' if why else ''}"))
            yield from self.gpus(
                "warn",
                bad,
                "nvidia-smi -q -d PERFORMANCE,POWER,CLOCK -i {index}",
                impact="all ranks wait for this GPU in every step",
                unless="another process used the GPU at this moment",
            )
