"""A process that has imported PyTorch and the trainer once, and forks the ranks of each run.

To import them takes a rank longer than most tests train. What torchrun does for ranks that come
to their end is done here: variables, a store on a port of the kernel's choice, an end of all when
one fails. Tests of launching, of signals and of restarts use torchrun itself (`launch.start`).

    python -m tests.trainer.fork_server    reads orders, a JSON line each, and answers likewise
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

LIMIT_SECONDS = 280.0
_GRACE_SECONDS = 15.0  # after SIGTERM
_LOOK_SECONDS = 0.02
_IMPORTED = (
    "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel",
    "rankscope_trainer.__main__", "rankscope_trainer.train", "rankscope_trainer.faults.injector",
)  # fmt: skip
_ROOT = Path(__file__).parents[2]


class ForkServer:
    """The client's end: one server for a process of tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.fork_server"], cwd=_ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._lock = threading.Lock()
        atexit.register(self._process.kill)

    def run(self, program: Path, ranks: int, arguments: list[str], output: Path) -> int:
        """Run ranks to their end; return 0, or 1 if one failed. They write into `output`."""
        order = {
            "program": str(program), "ranks": ranks, "arguments": arguments,
            "output": str(output), "directory": str(Path.cwd()), "environ": dict(os.environ),
        }  # fmt: skip
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the fork server ended with {self._process.poll()}")
        code: int = json.loads(answer)
        if code < 0:
            raise TimeoutError(f"not over after {LIMIT_SECONDS:.0f} s: {output.read_text()}")
        return code


@cache
def server() -> ForkServer:
    """Return the server of this process, started at the first call."""
    return ForkServer()


# --- the server's end -----------------------------------------------------------------------------


def _serve() -> int | None:
    """Answer orders; in a forked rank return its exit code."""
    for name in _IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        order = json.loads(line)
        stop, port = _host_store()
        pids: dict[int, int] = {}
        for rank in range(order["ranks"]):
            pid = os.fork()
            if pid == 0:
                os.close(stop)
                return _be_rank(order, rank, port)
            pids[pid] = rank
        code = _watch(pids, Path(order["output"]))
        os.close(stop)
        os.wait()  # for the store
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()
    return None


def _host_store() -> tuple[int, int]:
    """Fork a process that holds the ranks' store; return what to close to end it, and the port.

    A process of its own, as the store has threads, and what forks must have none.
    """
    port_in, port_out = os.pipe()
    stop_in, stop_out = os.pipe()
    if os.fork():
        os.close(port_out)
        os.close(stop_in)
        with os.fdopen(port_in) as file:
            return stop_out, int(file.read())
    os.close(stop_out)
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(port_out, str(store.port).encode())
    os.close(port_out)
    os.read(stop_in, 1)
    os._exit(0)


def _be_rank(order: dict[str, Any], rank: int, port: int) -> int:
    """Become one rank: as a process that torchrun started, but for what is imported already."""
    os.setsid()
    with open(order["output"], "ab") as file, open(os.devnull, "rb") as nothing:
        for target, source in ((0, nothing), (1, file), (2, file)):
            os.dup2(source.fileno(), target)
    world = order["ranks"]
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0,
        "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "ROLE_WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": 1, "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "forked", "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    os.environ.clear()
    os.environ.update(order["environ"] | {name: str(value) for name, value in variables.items()})
    os.chdir(order["directory"])
    program = order["program"]
    sys.path[0], sys.argv = str(Path(program).parent), [program, *order["arguments"]]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def _watch(pids: dict[int, int], output: Path) -> int:
    """Wait for all ranks; when one fails, end the others. Return 0, 1, or -1 after the limit."""
    began, failed, ending = time.monotonic(), [], 0.0
    while pids:
        for pid in list(pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            rank, code = pids.pop(pid), os.waitstatus_to_exitcode(status)
            if code and not ending:
                failed.append(f"rank {rank} failed (exitcode: {code}, pid: {pid})\n")
        now = time.monotonic()
        if pids and not ending and (failed or now - began > LIMIT_SECONDS):
            ending = now
            _end(pids, signal.SIGTERM)
        elif ending and now - ending > _GRACE_SECONDS:
            _end(pids, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
    with output.open("a") as file:
        file.writelines(failed)
    return int(bool(failed)) if not ending or failed else -1


def _end(pids: dict[int, int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _main() -> NoReturn:
    raise SystemExit(_serve())


if __name__ == "__main__":
    _main()
