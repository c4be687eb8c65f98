"""Preflight under a real Slurm: three nodes of the laboratory, and one where people log in."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.preflight.launchers.cluster import JOB_LIMIT_S, ROOT, Cluster, launches

pytestmark = [
    pytest.mark.together("launchers of preflight"),
    pytest.mark.needs("root", "namespaces", "slurm"),
]
# What this machine really has is no matter of these tests, and it may be busy.
QUICK = "rankscope preflight --quick --only launch,names,ports"
EACH = "srun --nodes=3 --ntasks-per-node=1"
FIRST = "--output=0 --error=0"  # what task 0 says, of three that say the same
NODES = ["node0", "node1", "node2"]
ONLY_MASTER = ("tcp dport { 29500, 6818 } accept",)  # and slurmd's


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        for name in ("prolog", "epilog"):
            script(made, name, "#!/bin/sh\n")
        made.start_slurm(
            f"Prolog={made.folder}/prolog\nEpilog={made.folder}/epilog\nPrologFlags=Alloc,DeferBatch\n"
            "SchedulerParameters=nohold_on_prolog_fail\n"
        )
        made.lab.env[made.head]["RANKSCOPE_PREFLIGHT_TOKEN"] = "of the people of this cluster"
        yield made


def script(cluster: Cluster, name: str, text: str) -> None:
    path = cluster.folder / name
    path.write_text(text)
    path.chmod(0o755)


def recipe(cluster: Cluster, name: str) -> str:
    """Return a script as the documents have it, with the places of this cluster."""
    text = (ROOT / "docs" / "preflight.md").read_text()
    found = re.search(rf"```sh\n(#!/bin/sh\n# /etc/slurm/{name}\n.*?)```", text, re.DOTALL)
    assert found, f"no script /etc/slurm/{name} in the documents"
    parts = {
        "PATH=/opt/rankscope/bin:": f"PATH={cluster.folder}/bin:",
        "/etc/slurm/preflight.key": f"{cluster.folder}/preflight.key",
        "/var/log/slurm": str(cluster.folder),
    }
    changed = found[1]
    for theirs, ours in parts.items():
        changed = changed.replace(theirs, ours)
    # this machine's disks and limits are no matter of the test
    return changed.replace("--quick", "--quick --only launch,names,ports")


def answers(cluster: Cluster, command: str, **env: str) -> tuple[int, dict[str, Any]]:
    """Run the command on all nodes at once; return srun's exit code and each node's answer."""
    for old in cluster.work.glob("answer.*"):
        old.unlink()
    line = f"{command} --json answer.$SLURMD_NODENAME"
    done = cluster.run(f"{EACH} sh -c '{line}'", env)
    names = [path.name.partition(".")[2] for path in cluster.work.glob("answer.*")]
    read = {name: json.loads((cluster.work / f"answer.{name}").read_text()) for name in names}
    assert read, done.stdout + done.stderr
    return done.returncode, read


def ids(answer: dict[str, Any]) -> list[str]:
    return [finding["id"] for finding in answer["verdict"]["findings"]]


def test_srun_names_the_nodes_and_numbers_them(cluster: Cluster) -> None:
    code, read = answers(cluster, QUICK)
    assert code == 0, read
    assert sorted(read) == NODES
    for number, node in enumerate(NODES):
        answer = read[node]
        assert answer["verdict"]["expected"] == NODES
        assert sorted(launches(answer)) == NODES
        facts = launches(answer)[node]
        assert facts["launcher"] == "slurm"
        assert (facts["rank"], facts["world_size"], facts["master_addr"]) == (number, 3, "node0")
        assert ids(answer) == []


def test_of_two_tasks_on_a_node_one_does_it(cluster: Cluster) -> None:
    done = cluster.run(f"srun --nodes=3 --ntasks-per-node=2 {QUICK}")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("SLURM_LOCALID=1: local rank 0 of this machine") == 3
    assert done.stdout.count("exit 0") == 3


def test_the_bad_node_is_left_out_of_the_next_try(cluster: Cluster) -> None:
    cluster.firewall(1, *ONLY_MASTER)
    try:
        done = cluster.run(f"{EACH} {FIRST} {QUICK} --exclude-list bad.txt")
    finally:
        cluster.open(1)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "node1 drops random ports" in done.stdout
    assert (cluster.work / "bad.txt").read_text() == "node1\n"
    again = cluster.run('srun --nodes=2 --exclude="$(cat bad.txt)" hostname')
    assert sorted(again.stdout.split()) == ["node0", "node2"]


def test_a_node_without_an_agent_is_left_out_too(cluster: Cluster) -> None:
    agent = f"[ $SLURM_PROCID = 2 ] || {QUICK} --wait 10 --exclude-list gone.txt"
    done = cluster.run(f"{EACH} {FIRST} sh -c '{agent}'")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "node2: no report" in done.stdout
    assert (cluster.work / "gone.txt").read_text() == "node2\n"


def test_a_batch_script_is_told_to_use_srun(cluster: Cluster) -> None:
    """It has the numbers of a task, and nothing of it runs on the other nodes."""
    lines = (QUICK, "echo code $?", f"srun --ntasks-per-node=1 {FIRST} {QUICK}", "echo code $?")
    said = batch(cluster, "--nodes=3 --ntasks-per-node=2", *lines)
    assert "start it with `srun --ntasks-per-node=1 rankscope preflight`" in said
    assert re.findall(r"code (\d+)", said) == ["64", "0"], said


def batch(cluster: Cluster, options: str, *lines: str) -> str:
    """Submit a script and wait for its end; return what it printed."""
    (cluster.work / "job.sh").write_text("\n".join(("#!/bin/sh", *lines, "echo the end", "")))
    output = cluster.work / "job.out"
    output.unlink(missing_ok=True)
    done = cluster.run(f"sbatch {options} --output=job.out job.sh")
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + JOB_LIMIT_S
    while not (output.exists() and output.read_text().endswith("the end\n")):
        assert time.monotonic() < deadline, output.read_text() if output.exists() else done.stdout
        time.sleep(0.1)
    cluster.settle()
    return output.read_text()


@pytest.mark.needs("mpirun")
@pytest.mark.parametrize("where", ["batch", "salloc"])
def test_mpirun_in_a_job(cluster: Cluster, where: str) -> None:
    """Its daemons are started by srun, but on the node where it runs: there are no numbers."""
    for old in cluster.work.glob("mpi.*"):
        old.unlink()
    line = f"mpirun sh -c '{QUICK} --json mpi.$OMPI_COMM_WORLD_RANK'"
    root = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    options = "--nodes=3 --ntasks-per-node=2"
    if where == "batch":
        said = batch(cluster, options, root, line)
    else:
        done = cluster.run(f"{root}; salloc {options} {line}")
        said = done.stdout + done.stderr
    assert said.count("OMPI_COMM_WORLD_LOCAL_RANK=1: local rank 0") == 3, said
    read = {path.name: json.loads(path.read_text()) for path in cluster.work.glob("mpi.*")}
    assert sorted(read) == ["mpi.0", "mpi.2", "mpi.4"], said
    for answer in read.values():
        assert (answer["exit_code"], answer["verdict"]["expected"]) == (0, NODES)
        said_of = launches(answer)
        assert [said_of[node]["launcher"] for node in NODES] == ["mpi"] * 3
        assert [said_of[node]["rank"] for node in NODES] == [0, 2, 4]


def test_the_secret_in_the_environment_goes_with_srun(cluster: Cluster) -> None:
    code, _ = answers(cluster, QUICK)
    assert code == 0
    assert not (home(cluster) / ".config").exists()  # it took that of the environment


def home(cluster: Cluster) -> Path:
    return cluster.folder / "home"


def test_a_shared_home_has_the_secret(cluster: Cluster) -> None:
    code, read = answers(cluster, QUICK, RANKSCOPE_PREFLIGHT_TOKEN="")
    assert (code, ids(read["node0"])) == (0, [])
    key = home(cluster) / ".config" / "rankscope" / "preflight.key"
    assert key.stat().st_mode & 0o777 == 0o600
    # srun --export=NONE: no PATH, no HOME; the home directory is that of the user
    program = cluster.folder / "bin" / "rankscope"
    line = f"{program} {QUICK.removeprefix('rankscope ')}"
    done = cluster.run(f"{EACH} --export=NONE {FIRST} {line}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_homes_of_their_own_have_secrets_of_their_own(cluster: Cluster) -> None:
    own = "HOME=$PWD/home.$SLURM_NODEID; mkdir -p $HOME; export HOME"
    code, read = answers(cluster, f"{own}; {QUICK} --wait 10", RANKSCOPE_PREFLIGHT_TOKEN="")
    assert code == 3
    assert ids(read["node0"]) == ["node.secret"]


def test_the_prolog_of_the_documents_drains_the_node_that_breaks_jobs(cluster: Cluster) -> None:
    key = cluster.folder / "preflight.key"
    key.write_text("of the administrators of this cluster\n")
    key.chmod(0o600)
    script(cluster, "prolog", recipe(cluster, "prolog"))
    cluster.firewall(1, *ONLY_MASTER)
    try:
        done = cluster.run("sbatch --nodes=3 --output=prolog.out --wrap hostname")
        assert done.returncode == 0, done.stderr
        cluster.wait_for_states({"node0": "idle", "node1": "drained", "node2": "idle"})
        said = queue(cluster)
        assert said.startswith("PENDING"), said  # it waits for another node
        assert "held" not in said
        assert "Prolog error" in cluster.run("scontrol show node node1").stdout
        said = next(cluster.folder.glob("preflight.*.node1")).read_text()
        assert "node1 drops random ports" in said
    finally:
        cluster.open(1)
        cluster.run("scancel --user=root")
        cluster.resume("node1")
    try:
        assert cluster.run(f"{EACH} hostname").returncode == 0  # all is well: jobs begin
    finally:
        script(cluster, "prolog", "#!/bin/sh\n")
        cluster.settle()


def queue(cluster: Cluster) -> str:
    return cluster.run("squeue --noheader --format='%T %r'").stdout


def test_the_epilog_of_the_documents_drains_a_node_with_a_port_that_stays_taken(
    cluster: Cluster,
) -> None:
    script(cluster, "epilog", recipe(cluster, "epilog"))
    left = cluster.hold_port(2, 29500)
    try:
        assert cluster.run(f"{EACH} hostname").returncode == 0
        cluster.wait_for_states({"node0": "idle", "node1": "idle", "node2": "drained"})
        assert "Epilog error" in cluster.run("scontrol show node node2").stdout
        said = next(cluster.folder.glob("preflight.*.node2.epilog")).read_text()
        assert "port.master.free" in said
    finally:
        cluster.end(left)
        script(cluster, "epilog", "#!/bin/sh\n")
        cluster.resume("node2")


@pytest.mark.multiproc
def test_torchrun_is_checked_and_then_launched(cluster: Cluster) -> None:
    """The endpoint is the first node of the job, and one `rankscope run` stands on each."""
    script(
        cluster, "train.sh",
        "#!/bin/sh\nhead=$(scontrol show hostnames \"$SLURM_STEP_NODELIST\" | head -n 1)\n"
        "exec rankscope run --preflight=quick -- torchrun --nnodes 3"
        ' --nproc-per-node 1 --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d'
        ' --rdzv-endpoint "$head:29511" --no-python sh -c \'echo rank $RANK of $WORLD_SIZE\'\n',
    )  # fmt: skip
    done = cluster.run(f"{EACH} {cluster.folder}/train.sh", {"RANKSCOPE_DIR": str(cluster.work)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank \d of \d", done.stdout)) == [
        f"rank {number} of 3" for number in range(3)
    ]
    # "exit 0" on an idle machine; one that is busy may leave a time unanswered, and launches too
    screens = re.findall(r"run \d+ +3 nodes +gloo +Slurm, c10d", done.stderr)
    assert len(screens) == 3, done.stderr
    assert "FAIL" not in done.stderr
