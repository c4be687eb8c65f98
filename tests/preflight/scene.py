"""A laboratory with a launch in it: what torchrun and preflight are both started with.

Both read the launch from the environment, by the names that torchrun itself uses, so one
injection of a fault serves the two of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.capabilities import search_path
from tests.preflight.nslab import Lab

Mode = Literal["static", "c10d", "env"]
MASTER_PORT = 29500
SECRET = "that all hosts of the laboratory share"
# What one host says of the launch -> the variable in each mode ("" where the mode has none).
_VARIABLES: dict[str, dict[Mode, str]] = {
    "num_nodes": {"static": "PET_NNODES", "c10d": "PET_NNODES", "env": "WORLD_SIZE"},
    "node_rank": {"static": "PET_NODE_RANK", "c10d": "", "env": "RANK"},
    "master_addr": {"static": "PET_MASTER_ADDR", "c10d": "", "env": "MASTER_ADDR"},
    "master_port": {"static": "PET_MASTER_PORT", "c10d": "", "env": "MASTER_PORT"},
    "endpoint": {"static": "", "c10d": "PET_RDZV_ENDPOINT", "env": ""},
}


@dataclass
class Scene:
    """Hosts, and how each of them is told to launch."""

    lab: Lab
    mode: Mode = "static"
    missing: set[int] = field(default_factory=set)  # hosts on which nobody starts anything
    limits: dict[int, str] = field(default_factory=dict)  # options of prlimit, by host
    nodes: dict[int, str] = field(default_factory=dict)  # what a host is told as --nodes
    master_port: int = MASTER_PORT

    def __post_init__(self) -> None:
        """Tell every host the right launch; a fault then changes it."""
        for number in self.everywhere:
            self.say(
                number, num_nodes=self.lab.num_hosts, node_rank=number, master_addr="node0",
                master_port=self.master_port, endpoint=f"node0:{self.master_port}",
            )  # fmt: skip
            own = self.lab.env[number]
            if self.mode == "env":
                own["LOCAL_RANK"] = "0"
            else:
                own["PET_NPROC_PER_NODE"] = "1"
            if self.mode == "c10d":
                own.update(PET_RDZV_BACKEND="c10d", PET_RDZV_ID="lab")

    @property
    def everywhere(self) -> range:
        """Return the numbers of all hosts."""
        return range(self.lab.num_hosts)

    @property
    def answers(self) -> Path:
        """Return a directory for what programs tell the laboratory."""
        folder = self.lab.folder / "answers"
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        return folder

    @property
    def shared(self) -> Path:
        """Return a directory that all hosts see."""
        folder = self.lab.folder / "shared"
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        return folder

    def say(self, number: int, **words: object) -> None:
        """Change what one host is told of the launch."""
        for word, value in words.items():
            variable = _VARIABLES[word][self.mode]
            if variable:
                self.lab.env[number][variable] = str(value)

    def firewall(self, number: int, *rules: str, policy: str = "accept") -> None:
        """Give a host a firewall for what comes in; each rule stands on its own line."""
        body = "\n".join(("iif lo accept", *rules))
        head = f"type filter hook input priority 0; policy {policy};"
        self.nft(number, f"table inet fw {{\nchain in {{\n{head}\n{body}\n}}\n}}\n")

    def nft(self, number: int, rules: str) -> None:
        """Load rules of nftables on a host."""
        self.lab.hosts[number].run(["nft", "-f", "-"], input=rules)

    def add_nic(self, number: int, name: str, address: str, kind: str = "bridge") -> None:
        """Give a host one more interface."""
        self.lab.run(
            number,
            f"ip link add {name} type {kind}; ip addr add {address} dev {name};"
            f" ip link set {name} up",
        )

    def start(self, number: int, argv: Sequence[str], **settings: Any) -> subprocess.Popen[str]:
        """Start a program of the launch on a host, under the limits set for it."""
        limits = self.limits.get(number)
        prefix = ["prlimit", *limits.split()] if limits else []
        return self.lab.popen(number, [*prefix, *argv], **settings)

    def run_preflight(
        self, number: int, argv: Sequence[str], **settings: Any
    ) -> subprocess.Popen[str]:
        """Start preflight on a host: forked, but where something is to be done before it begins."""
        is_plain = argv[0] == sys.executable and number not in self.limits
        if not is_plain or "LD_PRELOAD" in settings["env"]:
            return self.start(number, argv, **settings)
        return self.lab.fork(number, argv, **settings)


def base_environment() -> dict[str, str]:
    """Return this environment for programs in the laboratory, without a launch of its own."""
    dropped = (
        "PET_", "SLURM_", "OMPI_", "NCCL_", "GLOO_", "TORCH", "RANK", "WORLD_SIZE", "MASTER",
        "OMP_", "MKL_", "OPENBLAS_", "CUDA_", "RANKSCOPE_",
    )  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    own = str(Path(sys.executable).parent)
    kept["RANKSCOPE_PREFLIGHT_TOKEN"] = SECRET
    kept["PATH"] = os.pathsep.join((own, search_path()))
    return kept
