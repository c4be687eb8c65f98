"""Ways to attach that have no launcher: notebooks, a prompt, threads, late and repeated calls."""

from __future__ import annotations

import importlib.util
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankscope.files import ring
from tests.agent import recorded

TRAIN = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""
LATE = """
import os, sys, threading, torch, torch.distributed as dist, rankscope
if sys.argv[1] == "thread":
    thread = threading.Thread(target=rankscope.init)
    thread.start()
    thread.join()
dist.init_process_group("gloo", rank=0, world_size=1, init_method="tcp://127.0.0.1:0")
dist.all_reduce(torch.ones(3))
if sys.argv[1] == "late":
    rankscope.init()
rankscope.init(log_level="ERROR")  # changes nothing
dist.all_reduce(torch.ones(3))
"""


def alone(tmp_path: Path) -> recorded.Recorded:
    (one,) = recorded.read(tmp_path)
    return one


def variables(tmp_path: Path, **more: str) -> dict[str, str]:
    found = recorded.environment(tmp_path, **more)
    if "PYTHONPATH" not in more:
        found.pop("PYTHONPATH")
    return found


@pytest.mark.multiproc
@pytest.mark.parametrize(("when", "all_reduces"), [("late", 1), ("thread", 2)])
def test_init_late_and_from_a_thread(tmp_path: Path, when: str, all_reduces: int) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE)
    done = subprocess.run(
        [sys.executable, str(script), when],
        # torch warns by itself where 127.0.0.1 has no name
        env=variables(tmp_path, RANKSCOPE="0", TORCH_CPP_LOG_LEVEL="ERROR"),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert alone(tmp_path).operations()["all_reduce"] == all_reduces


@pytest.mark.multiproc
@pytest.mark.parametrize("flag", ["-I", "-E"])
def test_isolated_python_needs_the_installed_package(tmp_path: Path, flag: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = subprocess.run(
        [sys.executable, flag, str(script)], env=variables(tmp_path), capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert len(alone(tmp_path).steps) == 5


@pytest.mark.multiproc
def test_a_notebook(tmp_path: Path) -> None:
    """The kernel of a real notebook, attached by a cell; a cell that fails ends nothing."""
    for name in ("nbclient", "ipykernel"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import nbformat, nbclient\n"
        "cells = ['import rankscope; rankscope.init()', '1 / 0', "
        f"{TRAIN!r}, 'rankscope.log_metrics(5, loss=1.5)']\n"
        "book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])\n"
        "nbclient.NotebookClient(book, timeout=120, allow_errors=True).execute()\n"
        "assert book.cells[1].outputs[0].ename == 'ZeroDivisionError'\n"
        "assert not any(c.outputs for c in book.cells[2:]), book.cells\n"
    )
    done = subprocess.run(
        [sys.executable, str(driver)], capture_output=True, text=True, timeout=200, check=False,
        env=variables(tmp_path, RANKSCOPE="0", JPY_SESSION_NAME="/work/study.ipynb"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kernel = alone(tmp_path)
    assert len(kernel.steps) == 5
    from rankscope.wire import schema

    assert kernel.of(schema.RunStarted)[0].name == "study.ipynb"
    assert kernel.of(schema.Metrics)[-1].values["loss"] == 1.5


_SLEEPS = "import time; print('re' + 'ady'); any(time.sleep(0.1) for _ in range(900))\n"


@pytest.mark.multiproc
def test_a_prompt_and_ctrl_c(tmp_path: Path) -> None:
    """Interactive Python on a terminal: Ctrl-C is an exception there, and the prompt goes on."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-i", "-q"], env=variables(tmp_path, TERM="dumb"), stdin=follower,
        stdout=follower, stderr=follower, start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(follower)
    try:
        _type(leader, TRAIN.strip() + "\n\n", expect="")
        # many short sleeps: Python notices a Ctrl-C that comes just before one only after it
        _type(leader, _SLEEPS, expect="ready")
        _type(leader, "\x03", expect="KeyboardInterrupt")
        _type(leader, TRAIN.strip() + "\n\nprint('al' + 'ive')\n", expect="alive")
        _type(leader, "exit()\n", expect="")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    prompt = alone(tmp_path)
    assert len(prompt.steps) == 10
    assert prompt.ended == ring.CLEAN


def _type(terminal: int, text: str, expect: str) -> None:
    """Write to the terminal, and read until what is expected was shown."""
    os.write(terminal, text.encode())
    shown, deadline = "", time.monotonic() + 60
    while expect not in shown:
        assert time.monotonic() < deadline, shown
        shown += os.read(terminal, 4096).decode(errors="replace")
