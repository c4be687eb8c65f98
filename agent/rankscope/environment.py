"""What a training process runs on: versions really loaded, hardware, selected variables."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankscope.redaction import HIDDEN, has_secret_name, redact

# variables that decide how a run behaves; everything else stays private
_PREFIXES = (
    "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "TORCHELASTIC_", "CUDA_", "OMP_", "MKL_", "OPENBLAS_",
    "KMP_", "UCX_", "FI_", "SLURM_JOB", "SLURM_NNODES", "SLURM_NTASKS",
)  # fmt: skip
_NAMES = frozenset({
    "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTHONHASHSEED",
    "LD_PRELOAD", "LD_LIBRARY_PATH", "CUBLAS_WORKSPACE_CONFIG",
    "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN",  # which switches a node hangs on
})  # fmt: skip
# of one process by design: they would differ between healthy ranks
_OF_ONE_PROCESS = frozenset({"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"})
_LIBRARIES = (
    "torch", "numpy", "transformers", "lightning", "accelerate", "deepspeed", "megatron",
    "datasets", "triton", "apex", "flash_attn", "xformers",
)  # fmt: skip
MAX_VALUE_LENGTH = 400
_OPTIONS_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})  # of python itself


def snapshot(environ: Mapping[str, str]) -> dict[str, str]:
    """Return facts by name, `env.NAME` for variables. Loads nothing that is not loaded."""
    facts = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "os": _os_name(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "host.cpus": str(os.cpu_count() or 0),
        "host.cpus_usable": str(len(os.sched_getaffinity(0))),
        "host.cpu_model": _cpu_model(),
        "host.memory_bytes": str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    }
    for name in _LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            facts[name] = str(version)
    if "torch" in sys.modules:
        facts |= _torch_facts()
    facts |= {f"env.{name}": value for name, value in _variables(environ).items()}
    return {name: redact(value)[:MAX_VALUE_LENGTH] for name, value in facts.items() if value}


def _torch_facts() -> dict[str, str]:
    import torch

    facts = {
        "torch.threads": str(torch.get_num_threads()),
        "torch.cuda": str(torch.version.cuda or "none"),
        "torch.git": str(torch.version.git_version)[:12],
    }
    if not torch.cuda.is_available():
        return facts | {"gpu.count": "0"}
    facts["gpu.count"] = str(torch.cuda.device_count())
    facts["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    facts["cudnn"] = str(torch.backends.cudnn.version())
    if torch.cuda.is_initialized():  # never initialise CUDA for a fact
        facts["gpu.model"] = torch.cuda.get_device_name()
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        facts["driver"] = driver.read_text().splitlines()[0]
    return facts


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if (name in _NAMES or name.startswith(_PREFIXES))
        and name not in _OF_ONE_PROCESS
        and not has_secret_name(name)
    }


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return platform.system()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")


def own_command() -> list[str]:
    """Return the command line of this process; a child of multiprocessing has its parent's."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        return [sys.executable, *sys.argv]
    return sys.orig_argv


def command(argv: Sequence[str]) -> list[str]:
    """Return the command line without secrets: see rankscope.redaction."""
    cleaned: list[str] = []
    hide_next = False
    for word in argv:
        name, has_value, _ = word.partition("=")
        secret = name.startswith("-") and has_secret_name(name)
        if hide_next:
            cleaned.append(HIDDEN)
        elif secret and has_value:
            cleaned.append(f"{name}={HIDDEN}")
        else:
            cleaned.append(redact(word)[:MAX_VALUE_LENGTH])
        hide_next = secret and not has_value
    return cleaned


def title(argv: Sequence[str]) -> str:
    """Return a short name for a run: the notebook, or the module or script of its command line."""
    if notebook := os.environ.get("JPY_SESSION_NAME"):  # Jupyter says which file it runs
        return Path(notebook).name
    words = list(argv[1:])
    for position, word in enumerate(words):
        if word == "-m" and position + 1 < len(words):
            return words[position + 1]
        if word == "-c":
            return "python -c"
        if not word.startswith("-") and words[max(position - 1, 0)] not in _OPTIONS_WITH_VALUE:
            return Path(word).name
    return "python"
