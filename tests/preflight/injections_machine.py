"""What is broken on single machines: limits, disks, software, GPUs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from tests.preflight.injections import Injection
from tests.preflight.scene import Scene


def limit(number: int, options: str) -> Injection:
    """Start the programs of one host under limits, by options of prlimit."""

    def inject(scene: Scene) -> None:
        scene.limits[number] = options

    return inject


def tmpfs(number: int, place: str, size: str) -> Injection:
    """Mount a small tmpfs on one host; {shared} is the directory that all see."""
    return lambda scene: scene.lab.run(
        number, f"mount -t tmpfs -o size={size} tmpfs {place.format(shared=scene.shared)}"
    )


def read_only(number: int) -> Injection:
    """Make the shared directory read-only on one host."""
    return lambda scene: scene.lab.run(
        number, f"mount --bind {scene.shared} {scene.shared};"
        f" mount -o remount,bind,ro {scene.shared}",
    )  # fmt: skip


def full_temporary(number: int) -> Injection:
    """Give one host a TMPDIR without a free byte."""

    def inject(scene: Scene) -> None:
        place = full_folder(scene)
        scene.lab.run(
            number, f"mount -t tmpfs -o size=1m tmpfs {place};"
            f" dd if=/dev/zero of={place}/filler bs=64k 2>/dev/null; test -s {place}/filler",
        )  # fmt: skip
        scene.lab.env[number]["TMPDIR"] = str(place)

    return inject


def read_only_cache(number: int, variable: str) -> Injection:
    """Put the place that a variable names on a read-only mount of one host."""

    def inject(scene: Scene) -> None:
        place = scene.lab.folder / variable.lower()
        place.mkdir()
        scene.lab.run(number, f"mount --bind {place} {place}; mount -o remount,bind,ro {place}")
        scene.lab.env[number][variable] = str(place)

    return inject


def full_folder(scene: Scene) -> Path:
    """Return the directory that `full_temporary` fills on one host."""
    place = scene.lab.folder / "full"
    place.mkdir(exist_ok=True)
    return place


_HANG = """
import ctypes, os, sys, time
device = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"server:/checkpoints", sys.argv[1].encode(), b"fuse", 0, options):
    sys.exit(os.strerror(ctypes.get_errno()))
print("mounted", flush=True)
time.sleep(100000)  # nobody ever answers a request
"""


def hung_mount(number: int) -> Injection:
    """Let the shared directory of one host be a file system whose server never answers."""

    def inject(scene: Scene) -> None:
        program = scene.lab.popen(
            number, [sys.executable, "-c", _HANG, str(scene.shared)], stdout=subprocess.PIPE
        )
        assert program.stdout is not None
        if program.stdout.readline().strip() != "mounted":
            raise RuntimeError("a file system that hangs could not be mounted here")

    return inject


def older_torch(number: int) -> Injection:
    """Let torch call itself an older one on one host; what it does stays the same."""

    def inject(scene: Scene) -> None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            raise RuntimeError("torch is not installed")
        version = Path(spec.origin).with_name("version.py")
        older = scene.lab.folder / "version.py"
        older.write_text(
            re.sub(r"__version__ = '[\d.]+", "__version__ = '2.9.1", version.read_text())
        )
        scene.lab.run(number, f"mount --bind {older} {version}")

    return inject


def other_script(number: int) -> Injection:
    """Let one host see another version of the script."""

    def inject(scene: Scene) -> None:
        script = training_script(scene)
        other = scene.lab.folder / "other.py"
        other.write_text(script.read_text() + "\nBATCH_SIZE = 64\n")
        scene.lab.run(number, f"mount --bind {other} {script}")

    return inject


def training_script(scene: Scene) -> Path:
    """Return a small script that all hosts see."""
    script = scene.lab.folder / "train.py"
    if not script.exists():
        script.write_text("import json\nimport os\n\nBATCH_SIZE = 32\nprint(json, os)\n")
    return script


def stale_gpu_process(number: int) -> Injection:
    """Let every host have two GPUs, by recordings; on one a dead job's process holds memory."""

    def inject(scene: Scene) -> None:
        for host in scene.everywhere:
            name = "nvml_stale_process" if host == number else "nvml_two_healthy"
            path = Path(__file__).parent / "data" / f"{name}.json"
            scene.lab.env[host]["RANKSCOPE_PREFLIGHT_NVML"] = str(path)

    return inject
