"""What a training process runs on: versions really loaded, hardware, selected variables."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankscope.process.code_version import code_facts
from rankscope.wire.assigned_secrets import HIDDEN
from rankscope.wire.redaction import redact
from rankscope.wire.secret_names import holds_secret, is_plain

# variables that decide how a run behaves; everything else stays private
_PREFIXES = (
    "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "TORCHELASTIC_", "CUDA_", "OMP_", "MKL_", "OPENBLAS_",
    "KMP_", "UCX_", "FI_", "SLURM_JOB", "SLURM_NNODES", "SLURM_NTASKS",
)  # fmt: skip
_NAMES = frozenset({
    "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTHONHASHSEED",
    "LD_PRELOAD", "LD_LIBRARY_PATH", "CUBLAS_WORKSPACE_CONFIG",
    "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN",  # which switches a node hangs on
    # where a rank of Kubernetes is, as far as its manifest asks for it
    "POD_NAME", "POD_NAMESPACE", "NODE_NAME", "JOB_COMPLETION_INDEX", "JOBSET_NAME",
    "JOBSET_RESTART_ATTEMPT", "VC_TASK_INDEX", "VC_JOB_RETRY_COUNT", "KUEUE_QUEUE",
    "SKYPILOT_TASK_ID", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES",
})  # fmt: skip
# of one process by design: they would differ between healthy ranks
_OF_ONE_PROCESS = frozenset({"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"})
_LIBRARIES = (
    "torch", "numpy", "transformers", "lightning", "accelerate", "deepspeed", "megatron",
    "datasets", "triton", "apex", "flash_attn", "xformers", "pytorch_lightning",
)  # fmt: skip
_MAX_PACKAGES = 200
MAX_VALUE_LENGTH = 400
# words of a command line that differ between ranks of one job by design
_OF_ONE_RANK = re.compile(
    r"rank|local|node|host|master|addr|port|rdzv|device|gpu|dir|path|file|out|log|save|tmp|seed|id$",
    re.IGNORECASE,
)
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
    facts |= _packages()
    if "torch" in sys.modules:
        facts |= _torch_facts()
    facts |= _program_facts()
    facts |= {f"env.{name}": value for name, value in _variables(environ).items()}
    return {name: redact(value)[:MAX_VALUE_LENGTH] for name, value in facts.items() if value}


def _packages() -> dict[str, str]:
    """Return the version that each loaded package of other authors says it has."""
    facts: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        if "." in name or name.startswith("_") or name in _LIBRARIES:
            continue
        if name in sys.stdlib_module_names or len(facts) >= _MAX_PACKAGES:
            continue
        version = getattr(module, "__dict__", {}).get("__version__")  # no lazy loading
        if isinstance(version, str):
            facts[f"package.{name}"] = version
    return {f"package.{name}": version for name, version in _installed()} | facts


@functools.cache
def _installed() -> tuple[tuple[str, str], ...]:
    """Return the versions of what torch needs, as installed: ranks may not have loaded it yet."""
    found = []
    try:
        wanted = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    for text in wanted:
        name = re.split(r"[^\w.-]", text, maxsplit=1)[0]
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append((name.replace("-", "_").lower(), importlib.metadata.version(name)))
    return tuple(found)


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


@functools.cache
def _program_facts() -> dict[str, str]:
    """Return which code runs, and a hash of its command line. Once: it stays what it was."""
    facts = {"command.hash": command_hash(command(own_command()))}
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script:
        facts |= code_facts(Path(script))
    return facts


def command_hash(argv: Sequence[str]) -> str:
    """Return what is equal for ranks that were started alike: numbers of ranks, hosts and paths
    are left out."""
    kept: list[str] = []
    takes_value = False
    for word in argv[1:]:
        name, has_value, value = word.partition("=")
        is_option = word.startswith("-")
        if takes_value and not is_option:
            takes_value = False
            continue
        takes_value = is_option and not has_value and bool(_OF_ONE_RANK.search(name))
        if is_option and _OF_ONE_RANK.search(name):
            kept.append(name)
        elif "/" in (value or word):
            kept.append(f"{name if has_value else ''}=/")
        else:
            kept.append(word)
    return hashlib.sha256("\0".join(kept).encode(errors="replace")).hexdigest()[:12]


def settled_facts() -> dict[str, str]:
    """Return what a script sets before it trains, so that it is recorded after the first step only:
    before, ranks that are not equally far would seem to differ."""
    if "torch" not in sys.modules:
        return {}
    import torch

    return {
        "torch.dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "torch.deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "torch.seed": str(torch.initial_seed()),
    }


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if (name in _NAMES or name.startswith(_PREFIXES))
        and name not in _OF_ONE_PROCESS
        and not holds_secret(name)
    }


def _ray_train_name() -> str:
    """Return what a run of Ray Train is called, by its user or by Ray; empty in another process."""
    train = sys.modules.get("ray.train")
    if train is None:
        return ""
    with contextlib.suppress(Exception):  # not within a worker, or another Ray
        return str(train.get_context().get_experiment_name() or "")
    return ""


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return platform.system()


@functools.cache
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


# last parts of the names of options that hold a learning rate
_RATES = frozenset({
    "lr", "learning_rate", "learningrate", "base_lr", "blr", "init_lr", "initial_lr", "max_lr",
    "peak_lr", "base_learning_rate", "max_learning_rate",
})  # fmt: skip


def given_rate(argv: Sequence[str]) -> float | None:
    """Return the learning rate that a command line gives; None for none, or for several."""
    found: set[float] = set()
    for word, following in zip(argv, (*argv[1:], ""), strict=True):
        name, has_value, value = word.partition("=")
        is_rate = name.lstrip("-+~").replace("-", "_").lower().rpartition(".")[2] in _RATES
        if is_rate and (has_value or word.startswith("-")):
            with contextlib.suppress(ValueError):
                found.add(float(value if has_value else following))
    return found.pop() if len(found) == 1 else None


_OPTION = re.compile(r"[-+~]*[\w.-]+$")  # or a variable, or what Hydra overrides


def command(argv: Sequence[str]) -> list[str]:
    """Return the command line without secrets: see rankscope.wire.redaction and .secret_names."""
    cleaned: list[str] = []
    option = ""  # that holds a secret, and whose value is perhaps the next word
    for word in argv:
        name, has_value, value = word.partition("=")
        if option and not word.startswith("-") and not is_plain(option, word):
            cleaned.append(HIDDEN)
        elif has_value and _OPTION.match(name) and holds_secret(name) and not is_plain(name, value):
            cleaned.append(f"{name}={HIDDEN}")
        else:
            cleaned.append(redact(word)[:MAX_VALUE_LENGTH])
        option = name if word.startswith("-") and not has_value and holds_secret(name) else ""
    return cleaned


def title(argv: Sequence[str]) -> str:
    """Return a short name for a run: the notebook, or the module or script of its command line."""
    if notebook := os.environ.get("JPY_SESSION_NAME"):  # Jupyter says which file it runs
        return Path(notebook).name
    if name := _ray_train_name():  # all of its workers run the same program of Ray's
        return name
    words = list(argv[1:])
    for position, word in enumerate(words):
        if word == "-m" and position + 1 < len(words):
            return words[position + 1]
        if word == "-c":
            return "python -c"
        if not word.startswith("-") and words[max(position - 1, 0)] not in _OPTIONS_WITH_VALUE:
            return Path(word).name
    return "python"
