"""Drift of versions, environment and hardware: planted differences are found, others are not."""

from __future__ import annotations

import random

import pytest

from rankscope.wire import schema
from rankscope_server.analysis.state import RunState
from rankscope_server.diagnose.environment.detector import FactDifference, differences, fisher_p
from rankscope_server.findings.finding import DetectorStatus, Finding
from rankscope_server.observe.environment_rules import level_of, normal, severity_of
from rankscope_server.observe.environment_table import EnvironmentTable
from tests.analysis.simulator import START_NS

BASE = {
    "python": "3.12.4",
    "executable": "/usr/bin/python",
    "kernel": "5.15.0-105",
    "machine": "x86_64",
    "os": "Ubuntu 22.04",
    "libc": "glibc 2.35",
    "host.cpus": "128",
    "host.cpus_usable": "128",
    "host.cpu_model": "EPYC 9654",
    "torch": "2.13.0",
    "torch.git": "abcdef012345",
    "numpy": "2.1.0",
    "torch.cuda": "13.0",
    "torch.threads": "8",
    "gpu.count": "8",
    "gpu.model": "H100",
    "nccl": "2.27.5",
    "cudnn": "91000",
    "driver": "NVRM 570.86.10",
    "env.NCCL_DEBUG": "WARN",
    "env.NCCL_SOCKET_IFNAME": "eth0",
    "env.OMP_NUM_THREADS": "8",
    "env.TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "env.WORLD_SIZE": "64",
    "env.MASTER_ADDR": "10.0.0.1",
}
# fact, another value, its level
PLANTS = [
    ("nccl", "2.27.3", "critical"), ("torch", "2.12.1", "critical"),
    ("torch.cuda", "12.8", "critical"), ("torch.cuda", "13.1", "warning"),
    ("env.NCCL_PROTO", "Simple", "critical"), ("env.NCCL_ALGO", "Ring", "critical"),
    ("env.NCCL_COMM_ID", "10.0.0.9:1", "critical"), ("env.NCCL_NVLS_ENABLE", "0", "critical"),
    ("env.TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "critical"), ("env.WORLD_SIZE", "63", "critical"),
    ("model.config_hash", "ffff", "critical"), ("code.commit", "1234", "critical"),
    ("dataset.fingerprint", "99", "critical"), ("seed.policy", "per node", "critical"),
    ("amp.dtype", "float16", "critical"), ("gpu.capability", "8.0", "critical"),
    ("driver", "NVRM 570.86.15", "warning"), ("cudnn", "90800", "warning"),
    ("cublas", "13.0.1", "warning"), ("kernel", "5.15.0-99", "warning"),
    ("env.NCCL_IB_HCA", "mlx5_1", "warning"), ("env.NCCL_SOCKET_IFNAME", "eth1", "warning"),
    ("env.NCCL_TIMEOUT", "100", "warning"), ("host.cpus_usable", "64", "warning"),
    ("mtu", "1500", "warning"), ("ulimit.nofile", "1024", "warning"),
    ("governor", "powersave", "warning"), ("firmware.nic", "28.1", "warning"),
    ("python", "3.12.5", "info"), ("python", "3.11.9", "warning"),
    ("executable", "/opt/py", "info"),
    ("hostname", "odd", "info"), ("locale", "C", "info"), ("env.NCCL_DEBUG", "INFO", "info"),
    ("env.PATHS", "/x", "info"), ("code.hash", "77", "critical"),
    ("torch.dtype", "float64", "critical"), ("torch.deterministic", "True", "critical"),
    ("command.hash", "88", "info"), ("torch.seed", "7", "info"), ("code.dirty", "yes", "info"),
    ("dataset.length", "999", "info"),
]  # fmt: skip
EXTRA = {
    "model.config_hash": "0000", "code.commit": "aaaa", "dataset.fingerprint": "42",
    "seed.policy": "global", "amp.dtype": "bfloat16", "gpu.capability": "9.0", "cublas": "13.0.2",
    "mtu": "9000", "ulimit.nofile": "65536", "governor": "performance", "firmware.nic": "28.2",
    "hostname": "usual", "locale": "en_US", "code.hash": "55", "code.script": "train.py",
    "torch.dtype": "float32", "torch.deterministic": "False", "command.hash": "66",
    "torch.seed": "42", "code.dirty": "no", "dataset.length": "1000",
}  # fmt: skip


def place(rank: int) -> tuple[str, int]:
    return f"node-{rank // 8}", rank % 8


def own_facts(rank: int) -> dict[str, str]:
    """Return what differs by rank, local rank and host in every healthy job."""
    host, local = rank // 8, rank % 8
    return {
        "env.CUDA_VISIBLE_DEVICES": str(local), "env.SLURM_PROCID": str(rank),
        "env.TORCHELASTIC_ERROR_FILE": f"/tmp/{rank}", "env.UCX_NET_DEVICES": f"mlx5_{local}:1",
        "gpu.uuid": f"GPU-{rank}", "env.NCCL_TOPO_FILE": f"/topo/{host}.xml",
        "host.memory_bytes": str((1 << 40) - rank * 4096), "env.GLOO_SOCKET_IFNAME": f"en{host}",
        "env.NCCL_HOSTID": f"h{host}", "env.SLURMD_NODENAME": f"node-{host}",
    }  # fmt: skip


def environment(rank: int, facts: dict[str, str], time_ns: int = START_NS) -> schema.Environment:
    return schema.Environment(attempt=0, rank=rank, time_ns=time_ns, facts=facts)


def job(
    chance: random.Random, num_ranks: int
) -> tuple[list[schema.Environment], dict[str, tuple[str, tuple[int, ...]]]]:
    """Return snapshots with planted differences, and the truth: fact -> (severity, ranks)."""
    facts = {rank: BASE | EXTRA | own_facts(rank) for rank in range(num_ranks)}
    truth: dict[str, tuple[str, tuple[int, ...]]] = {}
    for fact, value, level in chance.sample(PLANTS, chance.randint(0, 5)):
        if fact in truth:
            continue
        host = chance.randrange(num_ranks // 8)
        size = 8 if fact == "command.hash" else chance.choice([1, 8])
        ranks = tuple(range(host * 8, host * 8 + size))
        for rank in ranks:
            facts[rank][fact] = value
        truth[fact] = (level, ranks)
    records = [environment(rank, known) for rank, known in facts.items()]
    chance.shuffle(records)
    return records, truth


def found_in(records: list[schema.Environment]) -> list[FactDifference]:
    table = EnvironmentTable()
    for record in records:
        table.put(record)
    return differences(table, {record.rank: place(record.rank) for record in records})


@pytest.mark.parametrize("num_hosts", [2, 3])
@pytest.mark.parametrize("fact", ["hostname", "host.fqdn", "machine_id", "host.ip"])
def test_names_of_hosts_differ_by_host(fact: str, num_hosts: int) -> None:
    """Also of two hosts, where each value is on half of the ranks."""

    def found(values: list[str]) -> list[FactDifference]:
        table = EnvironmentTable()
        for rank in range(2 * num_hosts):
            table.put(environment(rank, BASE | {fact: values[rank]}))
        places = {rank: (f"node-{rank // 2}", rank % 2) for rank in range(2 * num_hosts)}
        return differences(table, places)

    by_host = [f"node-{rank // 2}.cluster" for rank in range(2 * num_hosts)]
    assert not found(by_host)
    (odd,) = found([by_host[2], *by_host[1:]])
    assert odd.fact == fact


def test_two_hundred_generated_snapshots() -> None:
    wrong = []
    for seed in range(200):
        records, truth = job(random.Random(seed), random.Random(seed + 1).choice([32, 64, 128]))
        found = {finding.fact: (finding.severity, finding.ranks) for finding in found_in(records)}
        if found != truth:
            wrong.append((seed, found, truth))
    assert not wrong


def test_thousands_of_ranks_that_differ_by_design_only() -> None:
    records = [environment(rank, BASE | own_facts(rank)) for rank in range(4096)]
    assert found_in(records) == []


@pytest.mark.parametrize(("fact", "one", "other"), [
    ("env.NCCL_IB_DISABLE", "0", "false"),
    ("env.NCCL_IB_HCA", "mlx5_0, mlx5_1", "mlx5_0,mlx5_1"),
    ("nccl", "v2.27.5", "2.27.5"),
    ("env.LD_LIBRARY_PATH", "/a/lib:/b/lib", "/a/lib:/b/lib/"),
])  # fmt: skip
def test_equal_after_normalising(fact: str, one: str, other: str) -> None:
    assert normal(fact, one) == normal(fact, other)


def test_a_library_that_is_not_loaded_yet_says_nothing_but_an_unset_variable_does() -> None:
    facts = {rank: BASE | own_facts(rank) for rank in range(24)}
    facts[3]["transformers"] = "4.57"
    facts[5]["env.NCCL_ALGO"] = "Tree"
    found = found_in([environment(rank, known) for rank, known in facts.items()])
    assert [(finding.fact, finding.ranks, finding.severity) for finding in found] == [
        ("env.NCCL_ALGO", (5,), "critical")
    ]


def test_hardware_is_compared_within_one_gpu_model() -> None:
    facts = {rank: BASE | own_facts(rank) for rank in range(32)}
    for rank in range(24, 32):
        facts[rank] |= {"gpu.model": "A100", "host.cpu_model": "Xeon 8480", "host.cpus": "96"}
    found = found_in([environment(rank, known) for rank, known in facts.items()])
    assert [(finding.fact, finding.severity) for finding in found] == [("gpu.model", "warning")]


@pytest.mark.parametrize("policy", ["of rank", "of shard", "of stage", "one"])
def test_a_policy_of_seeds_is_no_drift(policy: str) -> None:
    def seed(rank: int) -> int:
        return {"of rank": rank, "of shard": rank % 4, "of stage": rank // 8, "one": 0}[policy]

    records = [
        environment(rank, EXTRA | own_facts(rank) | {"torch.seed": str(42 + seed(rank))})
        for rank in range(64)
    ]
    assert found_in(records) == []


def test_a_rank_that_breaks_the_policy_of_seeds_is_named() -> None:
    seeds = {rank: 42 + rank + (rank == 5) for rank in range(8)}
    records = [
        environment(rank, own_facts(rank) | {"torch.seed": str(seed), "code.dirty": "unknown"})
        for rank, seed in seeds.items()
    ]
    (found,) = found_in(records)
    assert (found.fact, found.severity, found.ranks) == ("torch.seed", "warning", (5,))


def test_code_is_compared_among_ranks_of_one_script() -> None:
    """A parameter server and its workers run two scripts; one worker's is another version."""
    records = [
        environment(rank, {"code.script": "server.py" if rank < 2 else "worker.py",
                           "code.hash": "aa" if rank < 2 else "cc" if rank == 5 else "bb",
                           "command.hash": "1" if rank < 2 else "2"})
        for rank in range(8)
    ]  # fmt: skip
    (found,) = found_in(records)
    assert (found.fact, found.severity, found.ranks) == ("code.hash", "critical", (5,))


def test_commands_that_differ_within_a_node_are_the_launchers() -> None:
    records = [environment(rank, {"command.hash": str(rank % 8 > 0)}) for rank in range(16)]
    assert found_in(records) == []


def test_a_fact_that_only_some_have_told_yet_differs_from_nothing() -> None:
    records = [
        environment(rank, {"torch.dtype": "bfloat16"} if rank < 3 else {}) for rank in range(8)
    ]
    assert found_in(records) == []


def test_without_a_majority_nobody_is_named() -> None:
    found = found_in([
        environment(0, BASE),
        environment(1, BASE | {"torch": "2.12.0"}),
    ])  # fmt: skip
    assert [(one.fact, one.ranks) for one in found] == [("torch", ())]


def test_fisher() -> None:
    # 8 of 64 marked, 8 drawn, all 8 marked: 1 / C(64, 8)
    assert fisher_p(64, 8, 8, 8) == pytest.approx(1 / 4426165368)
    assert fisher_p(10, 5, 5, 0) == pytest.approx(1.0)
    assert fisher_p(8, 4, 4, 3) == pytest.approx(17 / 70)  # the lady tasting tea


def test_every_view_and_detector_share_one_rule() -> None:
    assert level_of("env.LOCAL_RANK") == "own"
    assert level_of("env.RANK") == "own"
    assert level_of("env.OMP_NUM_THREADS") == "warning"


# --- through the analysis ------------------------------------------------------------------------


def drift_of(state: RunState) -> tuple[DetectorStatus, list[Finding]]:
    look = state.look(START_NS + 10**9)
    status = next(detector for detector in look.detectors if detector.name == "drift")
    return status, [finding for finding in look.findings if finding.detector == "drift"]


def started(records: list[schema.Environment], world: int) -> RunState:
    state = RunState("run")
    for record in records:
        host, local = place(record.rank)
        state.apply_record(schema.RankRegistered(
            attempt=0, rank=record.rank, time_ns=START_NS, world_size=world, local_rank=local,
            local_world_size=8, node_rank=record.rank // 8, host=host, pid=1000 + record.rank,
        ))  # fmt: skip
        state.apply_record(record)
    return state


def three_facts(relabel: dict[int, int] | None = None) -> list[schema.Environment]:
    facts = {rank: BASE | own_facts(rank) for rank in range(64)}
    for rank in range(24, 32):
        facts[rank] |= {"nccl": "2.27.3", "driver": "NVRM 550.1", "numpy": "1.26"}
    return [environment((relabel or {}).get(rank, rank), known) for rank, known in facts.items()]


def test_one_finding_for_all_that_the_same_ranks_differ_on() -> None:
    status, findings = drift_of(started(three_facts(), 64))
    assert status.state == "ran"
    assert status.reason.endswith("no rank reports it: code, model configuration, data set")
    (finding,) = findings
    assert (finding.kind, finding.severity) == ("version_drift", "critical")
    assert finding.ranks == tuple(range(24, 32))
    assert finding.hosts == ("node-3",)
    assert "2.27.3" in finding.what
    assert "2.27.5" in finding.what
    assert len(finding.evidence) == 3
    assert finding.next_command


@pytest.mark.parametrize(("fact", "command"), [
    ("env.NCCL_PROTO", "tr '\\0' '\\n' < /proc/{pid}/environ | grep ^NCCL_PROTO="),
    ("command.hash", "tr '\\0' ' ' < /proc/{pid}/cmdline"),
    ("code.commit", "git log -1 --oneline; git status --short"),
])  # fmt: skip
def test_a_command_shows_the_fact_where_it_differs(fact: str, command: str) -> None:
    records = [environment(rank, {fact: "b" if rank // 8 == 1 else "a"}) for rank in range(64)]
    state = started(records, 64)
    (finding,) = drift_of(state)[1]
    pid = state._attempts[0].ranks[8].pid
    assert finding.next_command == command.format(pid=pid)


def test_named_before_the_first_step_and_as_the_verdict() -> None:
    look = started(three_facts(), 64).look(START_NS + 10**9)
    assert look.verdict is not None
    assert look.verdict.detector == "drift"


def test_too_few_snapshots_say_so_and_name_nobody() -> None:
    status, findings = drift_of(started(three_facts()[20:40], 64))
    assert status.state == "skipped"
    assert status.reason == "snapshots of 20 of 64 ranks"
    assert findings == []


@pytest.mark.parametrize("seed", range(5))
def test_order_doubling_and_other_numbers_change_nothing(seed: int) -> None:
    chance = random.Random(seed)
    _, (plain,) = drift_of(started(three_facts(), 64))
    records = three_facts() * 2
    records += [environment(3, BASE | {"nccl": "1.0"}, START_NS - 1)]  # an older snapshot
    chance.shuffle(records)
    _, (shuffled,) = drift_of(started(records, 64))
    assert shuffled == plain
    nodes = list(range(8))
    chance.shuffle(nodes)
    relabel = {rank: nodes[rank // 8] * 8 + rank % 8 for rank in range(64)}
    _, (other,) = drift_of(started(three_facts(relabel), 64))
    assert set(other.ranks) == {relabel[rank] for rank in plain.ranks}
    assert (other.kind, other.severity) == (plain.kind, plain.severity)


def test_a_difference_of_those_in_trouble_weighs_more() -> None:
    facts = {rank: BASE | own_facts(rank) for rank in range(64)}
    for rank in range(24, 32):
        facts[rank]["driver"] = "NVRM 550.1"
    state = started([environment(rank, known) for rank, known in facts.items()], 64)
    for rank in range(24, 32):
        state.apply_record(schema.ErrorRaised(
            attempt=0, rank=rank, time_ns=START_NS + 5, type="RuntimeError",
            message="CUDA error: an illegal memory access was encountered",
        ))  # fmt: skip
    state.look(START_NS + 10**9)
    state.apply_record(environment(0, facts[0], START_NS + 7))
    _, (finding,) = drift_of(state)
    assert finding.severity == "critical"
    assert "Fisher" in finding.why


@pytest.mark.parametrize(
    ("fact", "values", "severity"),
    [
        ("package.yaml", ("6.0.4", ""), "info"),  # rank 0 alone imports what it saves with
        ("package.yaml", ("6.0.4", "5.4"), "warning"),
        ("nccl", ("2.27.5", "2.27.3", ""), "critical"),
        ("env.NCCL_PROTO", ("LL", ""), "critical"),  # a variable that is not set says something
        ("env.NCCL_IB_DISABLE", ("1", "true"), "info"),  # the same
        ("command.hash", ("a", "b"), "info"),
        ("hostname", ("a", "b"), "info"),
    ],
)
def test_the_page_is_as_severe_as_the_finding(
    fact: str, values: tuple[str, ...], severity: str
) -> None:
    assert severity_of(fact, values) == severity
