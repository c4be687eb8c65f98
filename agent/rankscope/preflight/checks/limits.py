"""Limits of processes, memory and cores, and settings of the kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rankscope.preflight.checks.base import BuiltinCheck, Run, listed, on_each
from rankscope.preflight.checks.comparing import compared, odd_ones
from rankscope.preflight.facts.limits import UNLIMITED, LimitFacts
from rankscope.preflight.model import CheckFinding, Fix, Status

# Measured with torch 2.13 and gloo, 2, 3, 4 and 6 ranks: a process group takes one file for each
# other rank and 4 of its own; the rank that hosts the store takes 9 more and one for each rank.
PER_GROUP, PER_STORE = 4, 9
NUM_GROUPS = 4  # the default one, and those of a device mesh of three dimensions
OWN_FILES = 64  # of Python, torch, logs, a loader's pipes: 64 files carried 3 ranks, barely
WANTED = 4096  # below, a few hundred loader pipes or checkpoint shards are enough to end a rank
GENEROUS = 65536


def needed_files(world_size: int) -> int:
    """Return how many files a rank opens at most in a job of so many ranks."""
    groups = NUM_GROUPS * (world_size - 1 + PER_GROUP)
    return OWN_FILES + groups + PER_STORE + world_size


class LimNofile(BuiltinCheck, id="lim.nofile"):
    """A rank may open a file for each of its peers, in each process group, and more.

    Below what gloo needs it fails; below 4,096 it warns, for loader pipes and checkpoint shards.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Compare the soft limit with what the ranks will open."""
        yield from self.not_measured(run, "limits")
        nodes = set(run.expected) | set(run.reports)
        world_size = sum(run.nproc(node) for node in nodes)
        need = needed_files(world_size)
        found: dict[Status, dict[str, tuple[int, int]]] = {"fail": {}, "warn": {}}
        for node, limits in run.each(lambda facts: facts.limits).items():
            if limits.nofile_soft in (None, UNLIMITED):
                continue
            soft, hard = limits.nofile_soft or 0, limits.nofile_hard
            if soft < max(need, WANTED):
                status: Status = "fail" if soft < need else "warn"
                found[status][node] = (soft, soft if hard is None else hard)
        for status, bad in found.items():
            if bad:
                yield _too_few_files(
                    run, status, bad, need if status == "fail" else max(need, WANTED)
                )


def _too_few_files(
    run: Run, status: Status, bad: dict[str, tuple[int, int]], wanted: int
) -> CheckFinding:
    least = min(soft for soft, _ in bad.values())
    return LimNofile.finding(
        status,
        f"{least} open files allowed, {wanted} wanted",
        at=bad,
        evidence={
            "nofile_soft": {node: soft for node, (soft, _) in bad.items()},
            "nofile_wanted": wanted,
        },
        lines=(
            f"{node}: ulimit -n is {soft}, hard limit {_words(hard)}"
            for node, (soft, hard) in bad.items()
        ),
        fix=(_nofile_fix(run, node, hard, wanted) for node, (_, hard) in bad.items()),
        impact="a rank dies with 'Too many open files' while it connects to its peers, or as soon "
        "as loader workers or a checkpoint open more"
        if status == "fail"
        else "works until loader workers or checkpoint shards open more: 'Too many open files'",
        unless="the job is started with another limit than this shell",
    )


def _words(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else str(limit)


def _nofile_fix(run: Run, node: str, hard: int, wanted: int) -> Fix:
    best = max(wanted, GENEROUS)
    if hard == UNLIMITED or hard >= wanted:
        return Fix(node=node, command=f"ulimit -n {best if hard == UNLIMITED else min(best, hard)}")
    container = run.container(node)
    if container in ("docker", "podman"):
        command = f"{container} run --ulimit nofile={best}:{best} ...   # start it with this"
        return Fix(node=node, command=command)
    command = f"sudo prlimit --nofile={best}:{best} --pid $$   # for good: limits.d, LimitNOFILE="
    return Fix(node=node, command=command, owner="admin")


class LimMemlock(BuiltinCheck, id="lim.memlock", needs=("rdma",)):
    """Locked memory is unlimited wherever RDMA is used.

    Registering a buffer pins it; NCCL registers buffers of any size, so no number is enough.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where a node with RDMA ports has a limit that binds."""
        yield from self.not_measured(run, "limits")
        if run.backend != "nccl":
            yield self.skipped(f"{run.backend} does not lock memory")
            return
        rdma = run.each(lambda facts: facts.rdma)
        bad = {
            node: limits.memlock_soft_bytes or 0
            for node, limits in run.each(lambda facts: facts.limits).items()
            if node in rdma and rdma[node].ports and not limits.may_lock_memory
            if limits.memlock_soft_bytes not in (None, UNLIMITED)
        }
        if not bad:
            return
        least = min(bad.values())
        yield self.fail(
            f"only {least >> 10} KiB may be locked, RDMA needs unlimited",
            at=bad,
            evidence={"memlock_soft_bytes": bad},
            lines=(f"{node}: ulimit -l is {size >> 10} KiB" for node, size in bad.items()),
            fix=(_memlock_fix(run, node) for node in bad),
            impact="NCCL init fails: ibv_create_cq or ibv_reg_mr 'Cannot allocate memory'",
            unless="the job runs with other limits than this shell (systemd, Slurm propagation)",
        )


def _memlock_fix(run: Run, node: str) -> Fix:
    container = run.container(node)
    if container in ("docker", "podman"):
        command = f"{container} run --ulimit memlock=-1 ...   # start the container with this"
        return Fix(node=node, command=command)
    line = "* - memlock unlimited"
    command = f"echo '{line}' | sudo tee /etc/security/limits.d/90-rdma.conf   # then log in again"
    return Fix(node=node, command=command, owner="admin")


# Measured with torch 2.13 for CPUs on two cores: 0.6 GiB once it is imported, 0.9 GiB in a step. A
# driver of GPUs maps addresses for all memory of the machine and of its GPUs.
LEAST_ADDRESSES_BYTES = 1 << 30


class LimAddress(BuiltinCheck, id="lim.address"):
    """A rank may map as much memory as it wants to: `ulimit -v` is unlimited."""

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail where it is too little for torch alone; warn about any other limit."""
        yield from self.not_measured(run, "limits")
        found: dict[Status, dict[str, int]] = {"fail": {}, "warn": {}}
        all_limits = run.each(lambda facts: facts.limits)
        for node, limits in all_limits.items():
            if limits.address_soft_bytes not in (None, UNLIMITED):
                size = limits.address_soft_bytes or 0
                found["fail" if size < LEAST_ADDRESSES_BYTES else "warn"][node] = size
        for status, bad in found.items():
            if not bad:
                continue
            yield self.finding(
                status,
                f"only {min(bad.values()) / GIB:.1f} GiB of addresses may be mapped (ulimit -v)",
                at=bad,
                evidence={"address_soft_bytes": bad},
                lines=(f"{node}: ulimit -v is {size >> 10} KiB" for node, size in bad.items()),
                fix=(_address_fix(node, all_limits[node]) for node in bad),
                impact="a rank dies at import: 'failed to map segment' or MemoryError"
                if status == "fail"
                else "works on CPUs while it is enough; with GPUs the driver fails to start, and "
                "loader workers end with 'Cannot allocate memory'",
                unless="the job is started with another limit than this shell",
            )


def _address_fix(node: str, limits: LimitFacts) -> Fix:
    if limits.address_hard_bytes == UNLIMITED:
        return Fix(node=node, command="ulimit -v unlimited")
    command = "sudo prlimit --as=unlimited:unlimited --pid $$   # for good: limits.d, LimitAS="
    return Fix(node=node, command=command, owner="admin")


# A rank on CPU runs the main thread, gloo's and autograd's threads and torchrun's own: 30 is what
# the design found; each loader worker is a process with a feeding thread beside it.
TASKS_PER_RANK = 30


class LimNproc(BuiltinCheck, id="lim.nproc"):
    """There is room for the processes and threads of all ranks and their loader workers.

    Counts threads of this user against `ulimit -u`, and tasks of the control group against
    `pids.max`.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where less is left than the ranks will start."""
        yield from self.not_measured(run, "limits")
        for what, command in _REMEDIES.items():
            bad: dict[str, tuple[int, int, int]] = {}
            for node, limits in run.each(lambda facts: facts.limits).items():
                room = _task_room(limits, what)
                need = run.nproc(node) * (run.options.num_loader_workers + TASKS_PER_RANK)
                if room is not None and room[0] - room[1] < need:
                    bad[node] = (*room, need)
            if bad:
                yield self._finding(what, command, bad)

    def _finding(
        self, what: str, command: str, bad: dict[str, tuple[int, int, int]]
    ) -> CheckFinding:
        limit, used, need = min(bad.values(), key=lambda row: row[0] - row[1])
        left = max(limit - used, 0)
        return self.warn(
            f"{left} more tasks allowed by {what}, {need} wanted",
            at=bad,
            evidence={"limit_used_wanted": {name: list(row) for name, row in bad.items()}},
            lines=(
                f"{name}: {used} of {limit} in use, the ranks start about {need}"
                for name, (limit, used, need) in bad.items()
            ),
            fix=(
                Fix(node=name, command=command.format(wanted=row[1] + 2 * row[2]), owner="admin")
                for name, row in bad.items()
            ),
            impact="a rank dies: 'Resource temporarily unavailable', 'can't start new thread'",
            unless="other processes of this user end before the launch",
        )


_REMEDIES = {
    "ulimit -u": "sudo prlimit --nproc={wanted} --pid $PPID   # or /etc/security/limits.d",
    "pids.max": "start the container or the service with a higher limit: --pids-limit {wanted}, "
    "or TasksMax={wanted}",
}


def _task_room(limits: LimitFacts, what: str) -> tuple[int, int] | None:
    """Return the limit and what is used of it; None where there is none."""
    if what == "pids.max":
        group = limits.cgroup
        if group.pids_max is None or group.pids_now is None:
            return None
        return group.pids_max, group.pids_now
    if not limits.nproc_binds or limits.nproc_soft in (None, UNLIMITED):
        return None
    if limits.num_user_tasks is None:
        return None
    return limits.nproc_soft or 0, limits.num_user_tasks


MIB = 1 << 20
# What Docker gives a container by default: a batch of 32 pictures of 224 x 224 in
# float32 takes 18 MiB, and every worker keeps two.
TOO_SMALL_BYTES = 64 * MIB
WANTED_PER_RANK_BYTES = 1024 * MIB


class LimShm(BuiltinCheck, id="lim.shm"):
    """Shared memory in /dev/shm is large enough for loader workers and for NCCL.

    Loader workers hand every batch over through it; NCCL uses it between the GPUs of a node.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Fail at 64 MiB or less with loader workers, warn below 1 GiB for each rank."""
        yield from self.not_measured(run, "limits")
        found: dict[Status, dict[str, tuple[int, int]]] = {"fail": {}, "warn": {}}
        missing: list[str] = []
        for node, limits in run.each(lambda facts: facts.limits).items():
            total, free = limits.shm_total_bytes, limits.shm_free_bytes
            if total is None or free is None:
                missing.append(node)
            elif free <= TOO_SMALL_BYTES and run.options.num_loader_workers:
                found["fail"][node] = (total, free)
            elif free < WANTED_PER_RANK_BYTES * run.nproc(node):
                found["warn"][node] = (total, free)
        for status, bad in found.items():
            if bad:
                yield self._finding(run, status, bad)
        yield from self.note("unknown", missing, "no /dev/shm")

    def _finding(self, run: Run, status: Status, bad: dict[str, tuple[int, int]]) -> CheckFinding:
        node, (_, free) = min(bad.items(), key=lambda item: item[1][1])
        wanted = WANTED_PER_RANK_BYTES * run.nproc(node)
        wants = {name: WANTED_PER_RANK_BYTES * run.nproc(name) for name in bad}
        is_small = all(total < wants[name] for name, (total, _) in bad.items())
        return self.finding(
            status,
            f"{free // MIB} MiB free in /dev/shm, {wanted // MIB} MiB wanted",
            at=bad,
            evidence={
                "shm_total_bytes": {name: total for name, (total, _) in bad.items()},
                "shm_free_bytes": {name: left for name, (_, left) in bad.items()},
            },
            lines=(
                f"{name}: {left // MIB} of {total // MIB} MiB free"
                for name, (total, left) in bad.items()
            ),
            fix=(_shm_fix(run, name, is_small) for name in bad),
            impact="loader workers die with 'Bus error' or 'unable to allocate shared memory(shm)'"
            + ("; NCCL fails on its shared memory segment" if run.backend == "nccl" else ""),
            unless="the job uses no loader workers and no NCCL, or starts in another container",
        )


def _shm_fix(run: Run, node: str, is_small: bool) -> Fix:
    wanted_gib = -(-WANTED_PER_RANK_BYTES * run.nproc(node) // (1 << 30))
    container = run.container(node)
    if not is_small:
        return Fix(node=node, command="ls -lhS /dev/shm | head   # remove what dead jobs left")
    if container in ("docker", "podman"):
        command = f"{container} run --shm-size={wanted_gib}g ...   # or --ipc=host"
        return Fix(node=node, command=command)
    if container == "kubernetes":
        command = "mount an emptyDir with medium: Memory at /dev/shm in the pod"
        return Fix(node=node, command=command)
    command = f"sudo mount -o remount,size={wanted_gib}G /dev/shm"
    return Fix(node=node, command=command, owner="admin")


GIB = 1 << 30
LEAST_ROOM_RATIO = 0.1  # of the limit: below, a checkpoint or a loader worker ends the job
SAME_RATIO = 0.9  # limits of nodes within a tenth are the same kind of machine


class LimCgroupMem(BuiltinCheck, id="lim.cgroup.mem", scope="all"):
    """At least a tenth of the memory is free, of the machine and of the control group.

    The killer of a control group ends one process and says nothing to the others.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where little is free, and where one node may use less than the others."""
        yield from self.not_measured(run, "limits")
        rooms = run.each(lambda facts: _memory_room(facts.limits) if facts.limits else None)
        low = {n: room for n, room in rooms.items() if room[1] < LEAST_ROOM_RATIO * room[0]}
        if low:
            yield self._low(low)
        yield from self._unequal({node: limit for node, (limit, _, _) in rooms.items()})

    def _low(self, low: dict[str, tuple[int, int, str]]) -> CheckFinding:
        limit, free, _ = min(low.values(), key=lambda row: row[1])
        return self.warn(
            f"{free / GIB:.1f} GiB of {limit / GIB:.1f} GiB memory left",
            at=low,
            evidence={"free_bytes": {name: row[1] for name, row in low.items()}},
            lines=(
                f"{name}: {free / GIB:.1f} of {limit / GIB:.1f} GiB left ({whose})"
                for name, (limit, free, whose) in low.items()
            ),
            fix=on_each(low, "ps -eo pid,user,rss,etime,args --sort=-rss | head"),
            impact="a rank is killed without a message when memory runs out; the others hang",
            unless="what holds the memory ends before the launch",
        )

    def _unequal(self, limits: dict[str, int]) -> Iterator[CheckFinding]:
        most = max(limits.values(), default=0)
        small = {node: limit for node, limit in limits.items() if limit < SAME_RATIO * most}
        if not small or 2 * len(small) >= len(limits):
            return  # no majority: no node is the odd one
        least = min(small.values())
        rounded = {node: f"{limit / GIB:.0f} GiB" for node, limit in limits.items()}
        yield self.warn(
            f"{listed(small)}: may use {least / GIB:.0f} GiB, others {most / GIB:.0f} GiB",
            nodes=tuple(node for node in small if node in odd_ones(rounded)) or tuple(small),
            evidence={"limit_bytes": limits},
            lines=compared(rounded),
            fix=on_each(small, "cat /proc/self/cgroup; free -g   # which limit holds?"),
            impact="a job that fits the other nodes is killed on this one",
            unless="the nodes differ on purpose, and the job was sized for the smallest",
        )


def _memory_room(limits: LimitFacts) -> tuple[int, int, str] | None:
    """Return limit, free bytes and whose limit it is, of the tighter of machine and group."""
    found: list[tuple[int, int, str]] = []
    total, available = limits.memory_total_bytes, limits.memory_available_bytes
    if total is not None and available is not None:
        found.append((total, available, "machine"))
    limit, used = limits.cgroup.memory_limit_bytes, limits.cgroup.memory_used_bytes
    if limit is not None and used is not None and (total is None or limit < total):
        free = max(limit - used, 0)
        found.append((limit, min(free, available or free), "control group"))
    return min(found, key=lambda row: row[0], default=None)


class LimCgroupCpu(BuiltinCheck, id="lim.cgroup.cpu"):
    """There is at least one usable core for each rank.

    A quota of the control group stops all threads of a rank for the rest of every 100 ms; an
    affinity that the launcher left puts all ranks on one core.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where ranks outnumber cores, by quota or affinity."""
        yield from self.not_measured(run, "limits")
        bad: dict[str, tuple[float, str, int]] = {}
        for node, limits in run.each(lambda facts: facts.limits).items():
            nproc = run.nproc(node)
            bounds = (
                (limits.num_cores, "affinity", 1 if _is_bound(run, node) else nproc),
                (limits.cgroup.cpu_cores, "quota of the control group", nproc),
            )
            short = [(float(n), whose, ranks) for n, whose, ranks in bounds if n is not None]
            short = [row for row in short if row[0] < row[2]]
            if short:
                bad[node] = min(short)
        if not bad:
            return
        least, whose, nproc = min(bad.values())
        yield self.warn(
            f"{least:g} cores usable ({whose}), {nproc} ranks",
            at=bad,
            evidence={"cores": {name: row[0] for name, row in bad.items()}, "nproc": nproc},
            lines=(
                f"{name}: {num:g} cores by {whose}, {nproc} ranks"
                for name, (num, whose, nproc) in bad.items()
            ),
            fix=(_cores_fix(name, row[1], row[2]) for name, row in bad.items()),
            impact="ranks take turns on the cores: every step is slower, timings of all ranks jump",
            unless="the job starts with another quota or affinity than this shell",
        )


def _is_bound(run: Run, node: str) -> bool:
    """Return whether the launcher started each rank by itself, and could bind it to its cores."""
    launch = run.launches.get(node)
    return (
        launch is not None
        and launch.launcher in ("mpi", "slurm")
        and launch.local_rank is not None
        and run.nproc(node) > 1
    )


def _cores_fix(node: str, whose: str, nproc: int) -> Fix:
    if whose == "affinity":
        return Fix(node=node, command=f"nproc; taskset -cp $$   # ask for {nproc} cores or more")
    command = f"docker update --cpus={nproc} CONTAINER   # or systemd CPUQuota={nproc * 100}%"
    return Fix(node=node, command=command, owner="admin")


_NAMES = {
    "governor": "CPU frequency governor",
    "huge_pages": "transparent huge pages",
    "numa_balancing": "NUMA balancing",
    "num_numa_nodes": "number of NUMA nodes",
}
_COMMANDS = {
    "governor": "echo {value} | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
    "huge_pages": "echo {value} | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    "numa_balancing": "sudo sysctl -w kernel.numa_balancing={value}",
    "num_numa_nodes": "lscpu | grep NUMA   # compare the BIOS settings (NPS, SNC) of the nodes",
}


class SysPerf(BuiltinCheck, id="sys.perf", scope="all", needs=("peers",)):
    """Settings of the kernel that set the pace are the same on all nodes.

    No setting is called wrong: only a difference is reported.
    """

    def evaluate(self, run: Run) -> Iterator[CheckFinding]:
        """Warn where one node is set otherwise than most."""
        yield from self.not_measured(run, "limits")
        for field, words in _NAMES.items():
            values: dict[str, object] = {
                node: value
                for node, limits in run.each(lambda facts: facts.limits).items()
                if (value := getattr(limits, field)) not in (None, "")
            }
            odd = odd_ones(values)
            if not odd:
                continue
            by_count = _by_count(values)
            usual = by_count[0]
            yield self.warn(
                f"{words} differs ({', '.join(map(str, by_count))})",
                at=odd,
                evidence={field: values},
                lines=compared(values),
                fix=(
                    Fix(node=node, command=_COMMANDS[field].format(value=usual), owner="admin")
                    for node in odd
                    if values[node] != usual
                ),
                impact="the slowest node sets the pace of every step",
                unless="the nodes are of different make, and that is meant",
            )


def _by_count(values: dict[str, object]) -> list[object]:
    counts = Counter(values.values())
    return sorted(counts, key=lambda value: (-counts[value], str(value)))
