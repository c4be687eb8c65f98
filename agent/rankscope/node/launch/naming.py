"""What a launched run is called, and what its command says about it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankscope.files.run_directory import clean_run_id
from rankscope.output.lines import TEE_VARIABLE
from rankscope.process.family import job_name

_LAUNCHERS = {
    "torchrun": "torchrun", "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun", "accelerate": "accelerate", "deepspeed": "deepspeed",
    "accelerate.commands.launch": "accelerate", "accelerate-launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed", "srun": "srun", "mpirun": "mpirun",
    "mpiexec": "mpirun", "orterun": "mpirun", "mpiexec.hydra": "mpirun",
    "horovodrun": "horovodrun",
}  # fmt: skip
_SHELLS = frozenset({"sh", "bash", "zsh", "dash"})


def shared_run_id(command: Sequence[str], environ: Mapping[str, str], chosen: str = "") -> str:
    """Return the run id that was chosen or that every node can derive, else an empty text."""
    rendezvous = option(command, "--rdzv-id", "--rdzv_id") or environ.get("PET_RDZV_ID", "")
    if chosen:
        return clean_run_id(chosen)
    if rendezvous and rendezvous != "none":
        return clean_run_id(rendezvous)
    job = job_name(environ)
    return clean_run_id(job) if job else ""


def new_run_id() -> str:
    """Return a run id that sorts by time."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + f"-{secrets.token_hex(2)}"


def spans_nodes(command: Sequence[str]) -> bool:
    """Return whether the command says that it is one of several nodes."""
    nodes = option(command, "--nnodes", "--num_machines", "--num-machines")
    return nodes not in ("", "1", "1:1")


def launcher_kind(command: Sequence[str]) -> str:
    """Return which launcher the command is, "python" or "command" where it is none."""
    for word in _programs(command):
        if word in _LAUNCHERS:
            return _LAUNCHERS[word]
    return "python" if Path(command[0]).name.startswith("python") else "command"


def title(command: Sequence[str]) -> str:
    """Return a short name for the run: the script or module that is trained."""
    programs = _programs(command)
    scripts = [word for word in programs if word not in _LAUNCHERS and word not in _SHELLS]
    named = [word for word in scripts if not word.startswith("python")]
    return (named or scripts or [Path(command[0]).name])[0]


def option(command: Sequence[str], *names: str) -> str:
    """Return the value of an option, given as two words or with an equals sign; else empty."""
    for position, word in enumerate(command):
        name, has_value, value = word.partition("=")
        if name in names:
            following = command[position + 1] if position + 1 < len(command) else ""
            return value if has_value else following
    return ""


def tee_variables(command: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return what lets the ranks know that the launcher sees their output, and which part of it.

    torchrun prints what it redirects to files if --tee says so; else the files alone have it.
    """
    teed = option(command, "--tee", "-t") or environ.get("PET_TEE", "0")
    prints_files = launcher_kind(command) == "torchrun" and teed not in ("", "0")
    return {TEE_VARIABLE: "files" if prints_files else "inherited"}


def _programs(command: Sequence[str]) -> list[str]:
    """Return the programs, scripts and modules that a command line names, in order."""
    found = [Path(command[0]).name]
    for position, word in enumerate(command[1:], 1):
        before = command[position - 1]
        if before == "-m" or word.endswith((".py", ".sh")) or word in _LAUNCHERS:
            found.append(Path(word).name if "/" in word else word)
    return found
