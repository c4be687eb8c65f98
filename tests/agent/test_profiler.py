"""A few steps under the profiler: a process that ends meanwhile ends well, whoever profiles too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, json, sys
from pathlib import Path
import torch
from torch.autograd import profiler as module
from rankscope.rank.profiler import ProfilerRefused, ProfilerWindow

path = Path(sys.argv[1])
model = torch.nn.Linear(8, 8)
prepare = module.profile._prepare_trace

def step():
    model(torch.randn(4, 8)).sum().backward()

def seen(profile):
    return sum(one.count for one in profile.key_averages() if one.key == "aten::addmm")

def outcome(window):
    try:
        return window.step_ended()
    except ProfilerRefused as refused:
        return f"refused: {refused}"

said = {}
window = ProfilerWindow(path, 2)
window.start()
step()
said["first"] = outcome(window)
step()
said["second"] = outcome(window)
window = ProfilerWindow(path, 2, clock=iter(range(0, 1000, 200)).__next__)
window.start()
step()
said["slow"] = outcome(window)
for name, profiler in (("torch", torch.profiler.profile), ("legacy", module.profile)):
    window = ProfilerWindow(path, 5)
    window.start()
    with profiler() as own:
        step()
    said[name] = [seen(own), outcome(window)]
with torch.profiler.profile() as own:
    step()
    try:
        ProfilerWindow(path, 1).start()
    except ProfilerRefused as refused:
        said["inside"] = str(refused)
said["own"] = seen(own)
said["restored"] = module.profile._prepare_trace is prepare
window = ProfilerWindow(path, 5)
window.start()
atexit.register(window.abandon, "the end")  # without it torch crashes here
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], Path]:
    path = tmp_path_factory.mktemp("profiler") / "trace.json"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), path


def test_it_counts_steps_and_writes_what_they_did(said: tuple[dict[str, object], Path]) -> None:
    told, path = said
    assert told["first"] == ""
    assert str(told["second"]).startswith("2 steps in ")
    assert told["slow"] == "1 of 2 steps: 120 s had passed"
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("aten::addmm") == 1  # of the slow one, written last


def test_the_scripts_profiler_sees_all_of_its_own(said: tuple[dict[str, object], Path]) -> None:
    told, _ = said
    gave_way = "refused: a profiler of the script started: ours gave way"
    assert told["torch"] == told["legacy"] == [1, gave_way]
    assert "of the script is at work" in str(told["inside"])
    assert told["own"] == 1
    assert told["restored"]
