"""Versions of what the job is made of, fingerprints of script and data. torch is never imported."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rankscope.preflight.facts import storage
from rankscope.preflight.facts.script import ScriptFacts
from rankscope.preflight.facts.script import collect as collect_script
from rankscope.preflight.system import System

if TYPE_CHECKING:
    from rankscope.preflight.options import Options

# whose difference between nodes changes results, speed or whether it runs at all
WATCHED = (
    "torch", "torchvision", "torchaudio", "torchdata", "torchao", "numpy", "triton",
    "accelerate", "transformers", "datasets", "deepspeed", "lightning", "pytorch-lightning",
    "flash-attn", "transformer-engine", "xformers", "apex", "megatron-core", "bitsandbytes", "peft",
    "trl", "vllm", "tokenizers", "safetensors", "pyarrow", "webdataset", "horovod", "mpi4py",
)  # fmt: skip
MAX_DATA_FILES, DATA_SECONDS = 20_000, 2.0
_TORCH_LINE = re.compile(r"^(__version__|cuda|hip|git_version)\b[^=]*=\s*'([^']*)'", re.MULTILINE)
_NVIDIA = re.compile(r"nvidia-(?!ml-py)")
_NCCL_FILE = re.compile(r"libnccl\.so\.(\d+\.\d+\.\d+)$")


class Library(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A libnccl that the loader can find, and by what."""

    path: str
    version: str = ""  # of the file's name; empty: it does not say
    found_by: str  # "LD_PRELOAD", "LD_LIBRARY_PATH", "ldconfig"


class DataFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Names and sizes below the data directory."""

    path: str
    error: str = ""
    count: int = 0
    bytes: int = 0
    digest: str = ""
    cut: str = ""  # "count": the first 20,000 only; "time": not comparable


class SoftwareFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Versions, fingerprints of script and data."""

    has_torch: bool = False
    torch: str = ""  # with what was built for: "2.13.0+cu126"
    torch_cuda: str = ""  # "12.6"; empty: built without
    torch_hip: str = ""
    torch_git: str = ""
    nccl: str = ""  # of the wheel beside torch; empty: it is part of torch, or there is none
    packages: dict[str, str] = {}  # those of WATCHED and of nvidia-*
    packages_digest: str = ""  # of all names and versions
    python: str = ""
    executable: str = ""
    kernel: str = ""
    libc: str = ""
    ofed: str = ""  # version of the mlx5 driver
    libraries: tuple[Library, ...] = ()
    has_cuda_compat: bool = False  # LD_LIBRARY_PATH names a newer libcuda than the driver's
    script: ScriptFacts | None = None
    data: DataFacts | None = None


def collect(system: System, options: Options, path: Sequence[str] | None = None) -> SoftwareFacts:
    """Read what is installed on `path`, else where this Python looks; script and data if asked."""
    packages = dict(sorted(_packages(path)))
    nvidia = {
        name: v
        for name, v in packages.items()
        if name.startswith("nvidia-") and name != "nvidia-ml-py"
    }
    watched = {name: packages[name] for name in WATCHED if name in packages} | nvidia
    torch = dict(_TORCH_LINE.findall(_torch_version(path)))
    listing = "\n".join(f"{name}=={version}" for name, version in packages.items())
    return SoftwareFacts(
        has_torch="torch" in packages or bool(torch),
        torch=torch.get("__version__") or packages.get("torch", ""),
        torch_cuda=torch.get("cuda", ""),
        torch_hip=torch.get("hip", ""),
        torch_git=torch.get("git_version", "")[:12],
        nccl=next((v for name, v in nvidia.items() if name.startswith("nvidia-nccl")), ""),
        packages=watched,
        packages_digest=hashlib.sha256(listing.encode()).hexdigest()[:16],
        python=platform.python_version(),
        executable=os.path.realpath(sys.executable),
        kernel=(system.read("/proc/sys/kernel/osrelease") or "").strip(),
        libc=" ".join(platform.libc_ver()),
        ofed=(system.read("/sys/module/mlx5_core/version") or "").strip(),
        libraries=tuple(_libraries(system)),
        has_cuda_compat=any("compat" in part for part in _library_path(system)),
        script=(
            collect_script(system, options.script, tries_imports=options.tier != "quick")
            if options.script
            else None
        ),
        data=_data(system, options.data_dir) if options.data_dir else None,
    )


def _packages(path: Sequence[str] | None) -> Iterator[tuple[str, str]]:
    found = (
        importlib.metadata.distributions()
        if path is None
        else importlib.metadata.distributions(path=list(path))
    )
    for distribution in found:
        name = distribution.metadata["Name"]
        if name:  # a directory half removed has none
            yield re.sub(r"[-_.]+", "-", name).lower(), distribution.version


def _torch_version(path: Sequence[str] | None) -> str:
    """Return the text of torch/version.py: finding a module does not import it."""
    if path is None:
        import importlib.util

        found = importlib.util.find_spec("torch")
        folders = list(found.submodule_search_locations or ()) if found is not None else []
    else:
        folders = [f"{folder}/torch" for folder in path]
    for folder in folders:
        try:
            return (Path(folder) / "version.py").read_text(errors="replace")
        except OSError:
            continue
    return ""


def _library_path(system: System) -> list[str]:
    return [part for part in system.environ.get("LD_LIBRARY_PATH", "").split(":") if part]


def _libraries(system: System) -> Iterator[Library]:
    """Yield every libnccl that the loader could take, in its order."""
    for part in re.split(r"[: ]", system.environ.get("LD_PRELOAD", "")):
        if "libnccl.so" in part:
            yield _library(system, part, "LD_PRELOAD")
    for folder in _library_path(system):
        names = [name for name in system.names(folder) if name.startswith("libnccl.so.2")]
        if names:
            yield _library(system, f"{folder}/{max(names, key=len)}", "LD_LIBRARY_PATH")
    cache = system.run(["/sbin/ldconfig", "-p"], 2.0).out
    for path in dict.fromkeys(re.findall(r"libnccl\.so\.2 .*=> (\S+)", cache)):
        yield _library(system, path, "ldconfig")


def _library(system: System, path: str, found_by: str) -> Library:
    real = os.path.realpath(system.root / path.lstrip("/"))
    match = _NCCL_FILE.search(real)
    return Library(path=path, version=match.group(1) if match else "", found_by=found_by)


def _data(system: System, folder: str) -> DataFacts:
    found = storage.fingerprint(system, folder, MAX_DATA_FILES, DATA_SECONDS)
    if "digest" not in found:
        return DataFacts(path=folder, error=str(found.get("error") or found.get("not_known")))
    return DataFacts(path=folder, **found)
