"""Real launchers between hosts of the laboratory: Slurm's daemons with munge, sshd for mpirun.

The last host is the one where people log in: it has Slurm's controller and starts the jobs. All
hosts see the laboratory's directory; the home directory in it is shared by all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.capabilities import find
from tests.preflight.nslab import Lab
from tests.preflight.scene import base_environment

ROOT = Path(__file__).parents[3]
SECRET = "of the nodes of this cluster"
JOB_LIMIT_S = 120.0  # far above what any takes
_READY_LIMIT_S = 60.0
_SLURM = """
ClusterName=laboratory
SlurmctldHost={head}({address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
NodeName={nodes} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def launches(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what each node of an answer (`--json`) knows of the launch."""
    return {report["node"]: report["facts"]["launch"] for report in answer["reports"]}


class Cluster:
    """Hosts to compute on, and one to log in."""

    def __init__(self, num_nodes: int = 3) -> None:
        self.lab = Lab(num_nodes + 1, base=base_environment())
        self.head = num_nodes
        self.nodes = self.lab.names[:num_nodes]
        self.folder = self.lab.folder / "cluster"
        self.work = self.folder / "work"  # where jobs start: all hosts see it
        self._started: list[subprocess.Popen[str]] = []
        try:
            self._make_home()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, command: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a line of shell where people log in, to its end, whatever that is."""
        return self.lab.hosts[self.head].run(
            f"cd {self.work} && {command}",
            env=self.lab.environment(self.head) | dict(env or {}), check=False,
            limit_s=JOB_LIMIT_S,
        )  # fmt: skip

    def firewall(self, number: int, *rules: str) -> None:
        """Let nothing into a node but answers and what the rules accept."""
        body = "\n".join(("iif lo accept", "ct state established,related accept", *rules))
        head = "type filter hook input priority 0; policy drop;"
        rules_text = f"table inet fw {{\nchain in {{\n{head}\n{body}\n}}\n}}\n"
        self.lab.hosts[number].run(["nft", "-f", "-"], input=rules_text)

    def open(self, number: int) -> None:
        """Take the firewall away."""
        self.lab.hosts[number].run("nft flush ruleset")

    def start_slurm(self, settings: str = "") -> None:
        """Start munge and Slurm; `settings` are more lines of slurm.conf."""
        folder = self.folder
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        last = self.head - 1
        configuration = folder / "slurm.conf"
        # without this it looks for the control groups of a /sys that has none
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        configuration.write_text(
            _SLURM.format(
                head=self.lab.names[self.head], address=self.lab.ip(self.head), folder=folder,
                nodes=f"node[0-{last}]",
            ) + settings
        )  # fmt: skip
        for number in range(self.head + 1):
            self.lab.env[number]["SLURM_CONF"] = str(configuration)
        self._start(
            self.head, "munged", "--foreground", "--force", f"--key-file={key}",
            f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid",
            f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed",
        )  # fmt: skip
        self.wait(lambda: (folder / "munge.socket").exists())
        self._start(self.head, "slurmctld", "-D")
        for number in range(self.head):
            self._start(number, "slurmd", "-D")
        self.wait(lambda: set(self.states().values()) == {"idle"})

    def states(self) -> dict[str, str]:
        """Return the state of each node, as Slurm says it: idle, drained ..."""
        said = self.run("sinfo --noheader --Node --format='%N %T'").stdout
        return dict(line.split() for line in said.splitlines())

    def wait_for_states(self, wanted: Mapping[str, str]) -> None:
        """Wait until the nodes are in these states."""
        self.wait(lambda: self.states() == wanted)

    def settle(self) -> None:
        """Wait until no job is there any more, not even one that ends."""
        self.wait(lambda: set(self.states().values()) == {"idle"})

    def resume(self, node: str) -> None:
        """Give a drained node back to the scheduler."""
        self.run(f"scontrol update nodename={node} state=resume")
        self.settle()

    def start_ssh(self) -> tuple[str, ...]:
        """Start an ssh server on every node; return the options with which it is called."""
        for name in ("host", "user"):
            path = str(self.folder / name)
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path]
            subprocess.run(make, check=True)
        folder = self.folder
        (folder / "sshd.conf").write_text(
            f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nPidFile none\n"
            "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
            f"SetEnv PATH={self.lab.base['PATH']}\n"
        )
        for number in range(self.head):
            self.lab.hosts[number].run("mkdir -p /run/sshd")
            self._start(number, str(find("sshd")), "-D", "-e", "-f", f"{folder}/sshd.conf")
        options = (
            "-i", f"{folder}/user", "-F", "none", "-o", "StrictHostKeyChecking=no",
            "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR",
        )  # fmt: skip
        calls = [f"ssh {' '.join(options)} {node} true" for node in self.nodes]
        self.wait(lambda: all(self.run(call).returncode == 0 for call in calls))
        return options

    def hold_port(self, number: int, port: int) -> subprocess.Popen[str]:
        """Start a program on a node that holds a port."""
        code = f"import socket, time; s = socket.create_server(('', {port})); time.sleep(600)"
        child = self.lab.popen(number, [sys.executable, "-S", "-c", code])
        self.wait(lambda: f":{port} " in self.lab.run(number, "ss -Hltn").stdout)
        return child

    def end(self, child: subprocess.Popen[str]) -> None:
        """End what was started on a node."""
        self.lab.signal(child, signal.SIGKILL)
        child.wait()

    def close(self) -> None:
        """End all that runs there."""
        for child in reversed(self._started):
            child.terminate()  # nsenter, which waits; the daemons end with their hosts
        self.lab.close()

    def _make_home(self) -> None:
        self.work.mkdir(parents=True)
        home, tools = self.folder / "home", self.folder / "bin"
        home.mkdir(mode=0o700)
        tools.mkdir()
        # what a job starts: neither PATH nor PYTHONPATH reaches all that Slurm runs
        program = tools / "rankscope"
        program.write_text(
            f'#!/bin/sh\nPYTHONPATH={ROOT / "agent"} exec {sys.executable} -m rankscope "$@"\n'
        )
        program.chmod(0o755)
        users = f"root:x:0:0:root:{home}:/bin/sh\nnobody:x:65534:65534::/nonexistent:/bin/false\n"
        path = os.pathsep.join((str(tools), self.lab.base["PATH"]))
        for number in range(self.head + 1):
            self.lab.write_etc(number, "passwd", users + "sshd:x:100:65534::/run/sshd:/bin/false\n")
            self.lab.env[number].update(HOME=str(home), PATH=path)

    def _start(self, number: int, *words: str) -> None:
        child = self.lab.popen(
            number, words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )  # fmt: skip
        self._started.append(child)

    def wait(self, is_there: Callable[[], bool]) -> None:
        """Wait until something is so; fail with the daemons' words if it does not come."""
        deadline = time.monotonic() + _READY_LIMIT_S
        while not is_there():
            assert time.monotonic() < deadline, self._logs()
            time.sleep(0.1)

    def _logs(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text()[-600:]}" for path in logs)
