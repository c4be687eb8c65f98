"""One launch of plain torchrun in the preflight laboratory: what it says under one fault, and when.

    python benchmarks/preflight_launch.py master-drop static     prints one line of JSON

`preflight_faults.py` starts it for every fault. Times count from the start of the launch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.preflight.faults import BY_NAME, Fault
from tests.preflight.injections_machine import full_folder
from tests.preflight.nslab import Lab
from tests.preflight.scene import Scene, base_environment

CUT_S = 2000.0  # beyond torch's longest default, 1,800 s
JOB = Path(__file__).with_name("preflight_job.py")
NUM_KEPT_LINES = 6  # of a node, first and last
MAX_LINE = 300
_HINT = re.compile(
    r"error|fail|exception|timed? ?out|refused|no route|unable|warn|lost|retry|denied|gai|"
    r"clients joined|closed|killed|signal",
    re.IGNORECASE,
)
# What healthy launches print as well: it says nothing.
_BENIGN = re.compile(
    r"OMP_NUM_THREADS|hostname of the client socket cannot be retrieved|error_file|"
    r"torch\.distributed\.run|FutureWarning|^\s*(warnings\.warn|File \"|Traceback)|"
    r"^\s*at |^frame #|C\+\+ CapturedTraceback|^\s*raise |^\s*\^+$|^=+$|^-+$"
)
# Lines that healthy c10d launches print while they end.
_TEARDOWN = re.compile(
    r"Failed to recv, got 0 bytes|failed to shutdown the rendezvous|"
    r"failed to send a keep-alive heartbeat|recvValueWithTimeout|RendezvousConnectionError|"
    r"Broken pipe|store->|TCPStore|sendBytes failed"
)


@dataclass
class Watched:
    """One node of the launch: its lines with their times."""

    number: int
    child: subprocess.Popen[str]
    started: float
    lines: list[tuple[float, str]] = field(default_factory=list)
    ended_s: float | None = None

    def read(self) -> None:
        """Take the lines until the program and all its children have ended."""
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.lines.append((time.monotonic() - self.started, line.rstrip()[:MAX_LINE]))
        self.child.wait()
        self.ended_s = time.monotonic() - self.started


def launch(fault: Fault, mode: Any, cut_s: float) -> dict[str, Any]:
    """Break a laboratory, launch in it, and return what was seen."""
    with Lab(wire=fault.wire, mtu=fault.mtu, net=fault.net) as lab:
        scene = Scene(lab, mode)
        for own in lab.env:
            own["OMP_NUM_THREADS"] = "1"
        fault.build(scene)
        started = time.monotonic()
        watched = [
            Watched(number, _start(scene, number, fault), started)
            for number in scene.everywhere
            if number not in scene.missing
        ]
        threads = [threading.Thread(target=one.read, daemon=True) for one in watched]
        for thread in threads:
            thread.start()
        memory_mb = 0.0
        while any(thread.is_alive() for thread in threads):
            elapsed_s = time.monotonic() - started
            if elapsed_s > cut_s:
                break
            if 15 < elapsed_s < 17:
                memory_mb = max(memory_mb, _memory_mb(lab))
            time.sleep(0.5)
        seen = _seen(watched, cut_s)
    for thread in threads:
        thread.join(5)
    return {"fault": fault.name, "mode": mode, "memory_mb": round(memory_mb), **seen}


def _start(scene: Scene, number: int, fault: Fault) -> subprocess.Popen[str]:
    program = ["torchrun"] if scene.mode != "env" else [sys.executable]
    job = shlex.split(fault.job.format(shared=scene.shared, full=full_folder(scene)))
    return scene.start(
        number, [*program, str(JOB), *job], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        errors="replace",
    )  # fmt: skip


def _memory_mb(lab: Lab) -> float:
    """Return the memory that the programs in the laboratory have for themselves."""
    namespaces = {os.readlink(f"/proc/{host.pid}/ns/net") for host in lab.hosts}
    total = 0
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/net") in namespaces:
                text = Path(f"/proc/{entry}/smaps_rollup").read_text()
                total += int((re.search(r"^Pss:\s+(\d+)", text, re.M) or ["", "0"])[1])
        except OSError:
            continue
    return total / 1024


def _seen(watched: list[Watched], cut_s: float) -> dict[str, Any]:
    ends = [one.ended_s for one in watched]
    has_worked = all(one.child.poll() == 0 for one in watched)
    hints = [
        (when, one.number, text)
        for one in watched
        for when, text in list(one.lines)
        if _is_hint(text, has_worked)
    ]
    first = min(hints, default=None)
    text = "\n".join(text for one in watched for _, text in list(one.lines))
    worlds = re.findall(r"JOB rank \d+ of (\d+)", text)
    medians = [float(value) for value in re.findall(r"median ([\d.]+) ms", text)]
    return {
        "hint_s": round(first[0], 1) if first else None,
        "hint": {"node": f"node{first[1]}", "line": first[2]} if first else None,
        "end_s": None if None in ends else round(max(e for e in ends if e is not None), 1),
        "cut_s": cut_s,
        "worked": has_worked,
        "world_sizes": sorted({int(world) for world in worlds}),
        "median_step_ms": max(medians, default=None),
        "num_lines": sum(len(one.lines) for one in watched),
        "nodes": {f"node{one.number}": _node(one, has_worked) for one in watched},
    }


def _node(one: Watched, has_worked: bool) -> dict[str, Any]:
    hints = [
        f"{when:.1f} s: {text}" for when, text in list(one.lines) if _is_hint(text, has_worked)
    ]
    first, last = hints[:NUM_KEPT_LINES], hints[NUM_KEPT_LINES:][-NUM_KEPT_LINES:]
    return {
        "end_s": None if one.ended_s is None else round(one.ended_s, 1),
        "exit": one.child.poll(),
        "lines": [*first, *last],
        "num_hints": len(hints),
    }


def _is_hint(text: str, has_worked: bool) -> bool:
    if not _HINT.search(text) or _BENIGN.search(text) or text.startswith("JOB "):
        return False
    return not (has_worked and _TEARDOWN.search(text))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("fault", choices=sorted(BY_NAME))
    parser.add_argument("mode", choices=("static", "c10d", "env"))
    parser.add_argument("--cut", type=float, default=CUT_S)
    chosen = parser.parse_args()
    environment = base_environment()
    os.environ.clear()
    os.environ.update(environment)
    print(json.dumps(launch(BY_NAME[chosen.fault], chosen.mode, chosen.cut)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
