"""A process that has imported PyTorch and the trainer once, and forks the ranks of each run.

To import them takes a rank longer than most tests train. What torchrun does for ranks that come
to their end is done here: variables, a store on a port of the kernel's choice, an end of all when
one fails. Tests of launching, of signals, of restarts and of what attaches when start real ones.

    python -m tests.fork_server            reads orders, a JSON line each, and answers likewise
    python -m tests.fork_server --at PATH  does so for each that connects to this socket
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn, TextIO

LIMIT_SECONDS = 280.0
_GRACE_SECONDS = 15.0  # after SIGTERM
_START_SECONDS = 120.0
_LOOK_SECONDS = 0.02
_MOST_FILES = 64  # that come along with an order
_IMPORTED = (
    "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict", "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.profiler", "torch.distributed.run", "rankscope_trainer.__main__",
    "rankscope_trainer.train", "rankscope_trainer.faults.injector",
)  # fmt: skip
_FILES = ("output", "errors")  # of an order that brings none along
_ROOT = Path(__file__).parents[1]
_shared: Path | None = None  # the socket of a server that several processes of tests share
_keeps_shared: subprocess.Popen[str] | None = None
_starting = threading.Lock()


class ForkServer:
    """The client's end: one server for a process of tests, or a part of the one that all share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: TextIO
        self._answers: TextIO
        if _shared is not None:
            self._connection = connected(_shared)
            atexit.register(self._connection.close)
            self._orders = self._connection.makefile("w")
            self._answers = self._connection.makefile("r")
            return
        process = start_server("tests.fork_server", stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        self._orders, self._answers = process.stdin, process.stdout
        atexit.register(stop_server, process)

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
            self._orders.write(json.dumps(order) + "\n")
            self._orders.flush()
            answer = self._answers.readline()
        if not answer:
            raise RuntimeError("the fork server has ended")
        code: int | None = json.loads(answer)
        if code is None:
            raise TimeoutError(f"not over after {LIMIT_SECONDS:.0f} s: {output.read_text()}")
        return code


@cache
def server() -> ForkServer:
    """Return the server of this process, started at the first call."""
    return ForkServer()


def launcher(ranks: int) -> list[str]:
    """Return a command that starts so many ranks of the program that follows (`forked.py`)."""
    return [*any_launcher(), str(ranks)]


def any_launcher() -> list[str]:
    """Return the same command without the number of ranks, which is to follow."""
    return [sys.executable, "-S", str(_ROOT / "tests" / "forked.py"), str(_listening())]


def python() -> list[str]:
    """Return a command in place of Python's, for what imports PyTorch (`forked_python.py`)."""
    return [sys.executable, "-S", str(_ROOT / "tests" / "forked_python.py"), str(_listening())]


def torchrun() -> list[str]:
    """Return torchrun's command, with its modules imported already; see `under_torchrun`."""
    return [*python(), "-m", "torch.distributed.run"]


def under_torchrun() -> dict[str, str]:
    """Return a variable that lets a real torchrun start ranks that need not import PyTorch."""
    program = _listening().with_name(f"{_listening().name}-python")
    if not program.exists():
        new = program.with_name(f"{program.name}.{os.getpid()}")
        new.write_text(f'#!/bin/sh\nexec {shlex.join(python())} "$@"\n')
        new.chmod(0o755)
        new.rename(program)  # whole, whoever else makes it now
    return {"PYTHON_EXEC": str(program)}


def _listening() -> Path:
    """Return the socket of the server that processes share, which listens."""
    with _starting:
        if _shared is None:
            folder = tempfile.mkdtemp(prefix="rankscope-forks.")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            share(Path(folder) / "socket")
    assert _shared is not None
    connected(_shared).close()
    return _shared


def share(path: Path) -> None:
    """Start a server for this process and all that it will fork; it goes when this one does."""
    global _shared, _keeps_shared
    _keeps_shared = start_server("tests.fork_server", "--at", str(path))
    atexit.register(stop_server, _keeps_shared)
    _shared = path


def start_server(module: str, *arguments: str, stdout: int | None = None) -> subprocess.Popen[str]:
    """Start a module as a server of forks, which goes when this process does."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("RANKSCOPE")}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments], cwd=_ROOT, text=True,
        stdin=subprocess.PIPE, stdout=stdout, env=plain | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def stop_server(process: subprocess.Popen[str]) -> None:
    """End what `start_server` returned."""
    process.kill()
    with process:  # waits, and closes its pipes
        pass


def connected(path: Path) -> socket.socket:
    """Connect to a server of forks, which listens when it has imported everything."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_SECONDS)
        else:
            return connection


# --- the server's end -----------------------------------------------------------------------------


def _serve(path: str) -> int | None:
    """Answer orders; in a forked rank return its exit code."""
    for name in _IMPORTED:
        importlib.import_module(name)
    # A rank that collects, or takes down at its end, what was imported here copies all of it first.
    gc.collect()
    gc.freeze()
    if path:
        fork_for_each(path)
    for order in _orders(is_socket=bool(path)):
        if "argv" in order:  # one whole command: the orders of this client are over
            from tests import command_server

            with socket.socket(fileno=os.dup(0)) as client:
                command_server.fork(order, client)
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
        for file in order["files"]:
            os.close(file)
        if stop >= 0:
            os.close(stop)
            os.wait()  # for the store
        sys.stdout.write(f"{json.dumps(code)}\n")
        sys.stdout.flush()
    return None


def _orders(*, is_socket: bool) -> Iterator[dict[str, Any]]:
    """Yield what is asked for on standard input; `files` are those that came along (1 and 2)."""
    if not is_socket:
        yield from ({**json.loads(line), "files": []} for line in sys.stdin)
        return
    with socket.socket(fileno=os.dup(0)) as connection:
        while True:
            order = order_from(connection)
            if order is None:
                return
            yield order


def order_from(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next order, its "files" are what came along; None when there will be no more.

    Who orders waits for the answer: there is nothing behind a line.
    """
    data, files = b"", list[int]()
    while not data.endswith(b"\n"):
        more, came, _, _ = socket.recv_fds(connection, 1 << 16, _MOST_FILES)
        if not more:
            return None
        data += more
        files += came
    return {**json.loads(data), "files": files}


def fork_for_each(path: str) -> None:
    """Return in a process of its own for each client, which is its standard input and output."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        while True:
            ready, _, _ = select.select([listening, sys.stdin], [], [])
            if sys.stdin in ready:  # who started it is gone
                os._exit(0)
            connection, _ = listening.accept()
            with connection:
                if os.fork():
                    continue
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for target in (0, 1):
                    os.dup2(connection.fileno(), target)
            return


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
    append = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    files = order["files"] or [os.open(order[name], append, 0o666) for name in _FILES]
    for target, source in enumerate((os.open(os.devnull, os.O_RDONLY), *files)):
        os.dup2(source, target)
        os.close(source)
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
    return 1 if (code := run_program(program)) < 0 else code


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


def run_program(program: str) -> int:
    """Run a file as `__main__` and return its exit code, as the interpreter does."""
    main = ModuleType("__main__")
    main.__dict__.update(__file__=program, __builtins__=builtins)
    sys.modules["__main__"] = main
    code = compile(Path(program).read_bytes(), program, "exec")
    return run_as_main(lambda: exec(code, main.__dict__))


def run_as_main(main: Callable[[], object]) -> int:
    """Call what is the main program and return its exit code, as the interpreter does.

    After Ctrl-C that is -2: the interpreter ends by the signal itself.
    """
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        trace: TracebackType | None = error.__traceback__
        for _ in range(2):  # the frames above are ours
            trace = trace.tb_next if trace is not None else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
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
        is_late = now - began > LIMIT_SECONDS or (order["files"] and _is_unwanted())
        if pids and not ending and (failed or is_late):
            ending = now
            _end(pids, signal.SIGTERM)
        elif ending and now - ending > _GRACE_SECONDS:
            _end(pids, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
    if ending and not failed:
        return None
    if not order["ranks"]:
        return code
    errors = order["files"][1] if order["files"] else order["errors"]
    with open(errors, "a", closefd=not order["files"]) as file:
        file.writelines(failed)
    return int(bool(failed))


def _is_unwanted() -> bool:
    """Return whether who waits for the ranks has ended, or wants their end."""
    return bool(select.select([0], [], [], 0)[0])


def _end(pids: dict[int, int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _main() -> NoReturn:
    raise SystemExit(_serve(sys.argv[2] if sys.argv[1:2] == ["--at"] else ""))


if __name__ == "__main__":
    _main()
