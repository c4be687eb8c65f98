"""A Slurm of one node, for a test: its controller and its node daemon, as root, on free ports."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.ports import free_port

CONFIGURATION = """
ClusterName=rankscope
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/node.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
FirstJobId={first_job}
SwitchType=switch/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run the daemons; yield the variables with which srun finds them."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    configuration = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    configuration.write_text(
        CONFIGURATION.format(
            host=host, folder=folder, cpus=os.cpu_count(), controller_port=free_port(),
            node_port=free_port(),
            first_job=free_port(),  # each cluster has other jobs: they name runs of one server
        )
    )  # fmt: skip
    variables = {"SLURM_CONF": str(configuration), "PATH": _path()}
    daemons = [
        subprocess.Popen(
            [name, "-D", "-f", str(configuration)], env=os.environ | variables,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for name in ("slurmctld", "slurmd")
    ]  # fmt: skip
    try:
        _wait_until_idle(os.environ | variables, folder)
        yield variables
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def _wait_until_idle(environment: dict[str, str], folder: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.stdout.strip() == "idle":
            return
        log = folder / "controller.log"
        assert time.monotonic() < deadline, log.read_text() if log.exists() else done.stderr
        time.sleep(0.2)


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
