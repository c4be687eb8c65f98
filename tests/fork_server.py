"""A process that has imported PyTorch and the trainer once, and forks the ranks of each run.

To import them takes a rank longer than most tests train. What torchrun does for ranks that come
to their end is done here: variables, a store on a port of the kernel's choice, an end of all when
one fails. Tests of launching, of signals, of restarts and of what attaches when start real ones.

    python -m tests.fork_server    reads orders, a JSON line each, and answers likewise
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

LIMIT_SECONDS = 280.0
_GRACE_SECONDS = 15.0  # after SIGTERM
_LOOK_SECONDS = 0.02
_IMPORTED = (
    "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict", "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.profiler", "rankscope_trainer.__main__", "rankscope_trainer.train",
    "rankscope_trainer.faults.injector",
)  # fmt: skip
_ROOT = Path(__file__).parents[1]


class ForkServer:
    """The client's end: one server for a process of tests."""

    def __init__(self) -> None:
        plain = {k: v for k, v in os.environ.items() if not k.startswith("RANKSCOPE")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server"], cwd=_ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=plain | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._lock = threading.Lock()
        atexit.register(self._process.kill)

    def run(
        self, program: Path, ranks: int, arguments: list[str], output: Path, *,
        errors: Path | None = None, environ: dict[str, str] | None = None,
    ) -> int:  # fmt: skip
        """Run ranks to their end; return 0, or 1 if one failed. They write into `output`.

        Without ranks (0) the program is a process that no launcher started, and its own exit code
        is returned, that of a signal below 0. What goes to stderr goes into `errors`, if given.
        The agent attaches where the variables say so, as Python does it at its start.
        """
        order = {
            "program": str(program), "ranks": ranks, "arguments": arguments,
            "output": str(output), "errors": str(errors or output),
            "directory": str(Path.cwd()),
            "environ": dict(os.environ) if environ is None else environ,
        }  # fmt: skip
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the fork server ended with {self._process.poll()}")
        code: int | None = json.loads(answer)
        if code is None:
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
    # A rank that collects, or takes down at its end, what was imported here copies all of it first.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        stop, port = _host_store() if order["ranks"] else (-1, 0)
        pids: dict[int, int] = {}
        for rank in range(max(1, order["ranks"])):
            pid = os.fork()
            if pid == 0:
                if stop >= 0:
                    os.close(stop)
                return _be_rank(order, rank, port)
            pids[pid] = rank
        code = _watch(pids, order)
        if stop >= 0:
            os.close(stop)
            os.wait()  # for the store
        sys.stdout.write(f"{json.dumps(code)}\n")
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
    with (
        open(os.devnull, "rb") as nothing,
        open(order["output"], "ab") as output,
        open(order["errors"], "ab") as errors,
    ):
        for target, source in ((0, nothing), (1, output), (2, errors)):
            os.dup2(source.fileno(), target)
    os.environ.clear()
    os.environ.update(order["environ"])
    if order["ranks"]:
        os.environ.update(_variables(rank, order["ranks"], port))
    os.chdir(order["directory"])
    program = order["program"]
    sys.path[0], sys.argv = str(Path(program).parent), [program, *order["arguments"]]
    sys.orig_argv[1:] = sys.argv
    if os.environ.get("RANKSCOPE"):
        from rankscope.rank.attach.start import attach_from_environment

        attach_from_environment()
    return _run(program)


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return what torchrun tells a rank."""
    variables = {
        "RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0,
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "ROLE_WORLD_SIZE": ranks,
        "GROUP_WORLD_SIZE": 1, "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "forked", "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    return {name: str(value) for name, value in variables.items()}


def _run(program: str) -> int:
    """Run a file as `__main__` and return its exit code, as the interpreter does."""
    main = ModuleType("__main__")
    main.__dict__.update(__file__=program, __builtins__=builtins)
    sys.modules["__main__"] = main
    try:
        exec(compile(Path(program).read_bytes(), program, "exec"), main.__dict__)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        trace: TracebackType | None = error.__traceback__
        inside = trace.tb_next if trace is not None else None  # the frame above is ours
        sys.excepthook(type(error), error.with_traceback(inside), inside)
        return 1
    return 0


def _watch(pids: dict[int, int], order: dict[str, Any]) -> int | None:
    """Wait for all ranks; when one fails, end the others. Return the code, None after the limit."""
    began, failed, ending = time.monotonic(), [], 0.0
    code = 0
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
    if ending and not failed:
        return None
    if not order["ranks"]:
        return code
    with Path(order["errors"]).open("a") as file:
        file.writelines(failed)
    return int(bool(failed))


def _end(pids: dict[int, int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _main() -> NoReturn:
    raise SystemExit(_serve())


if __name__ == "__main__":
    _main()
