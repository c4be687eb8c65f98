"""A process that has imported the commands once, and forks those that tests start.

`rankscope serve` imports for a second, a node of `rankscope preflight` for a third of one: longer
than most tests need of them. `Forked` takes the place of `subprocess.Popen` for such a command: the
same words, variables, streams, signals and exit code, in a process that need not import. Tests of
starting, of memory and of what a library does that is loaded first start real ones.

    python -m tests.command_server --at PATH   forks one for each that connects to this socket
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from rankscope.preflight.collective import child
from tests import fork_server

_IMPORTED = (
    "rankscope.cli.json_errors", "rankscope.cli.preflight", "rankscope.preflight.start",
    "rankscope.preflight.runner", "rankscope.preflight.persist", "rankscope.preflight.probe.prober",
    "rankscope.preflight.report.deliver", "rankscope.preflight.report.summary",
    "rankscope.preflight.report.progress", "encodings.idna", "rich.table",
    "rankscope.cli.ask", "rankscope.cli.run", "rankscope.node.launch.launcher",
    "rankscope.node.offline", "rankscope_server.report.run", "rankscope_server.report.page",
    "rankscope_server.api.app", "rankscope_server.access.local", "rankscope_server.connections",
    "rankscope_server.store.migrations.columns", "uvicorn.lifespan.on", "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto", "anyio._backends._asyncio",
)  # fmt: skip
_LIMIT_SECONDS = 120.0
_LAUNCHER_LOOK_SECONDS = 0.1  # torchrun's
_SPACES = ("net", "uts", "mnt")  # that a command enters; that of processes is for its children
_PEER = struct.Struct("3i")  # what the kernel knows of a client: process, user, group
PEER = 0  # in an order, for the process that sends it
_shared: Path | None = None  # the socket of the server that this process and its forks use
_keeps_shared: subprocess.Popen[str] | None = None
_starting = threading.Lock()


class Forked(subprocess.Popen[str]):
    """A command `[python, "-S", "-m", MODULE, ...]` that the server forks: what tests use of Popen.

    `inside` is a process whose namespaces it enters, as `nsenter` does. It ends with this process.
    `has_torch`: the child that imports PyTorch for a preflight is forked, too.
    """

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None,
        stdin: IO[Any] | None = None, stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None, errors: str | None = None, inside: int | None = None,
        has_torch: bool = False,
    ) -> None:  # fmt: skip
        self.args, self.returncode, self.stdin = list(argv), None, None
        self._errors, self._kept = errors, dict[IO[str], bytes]()
        order = {
            "argv": self.args, "directory": os.getcwd(), "inside": inside,
            "environ": dict(os.environ if env is None else env),
            "python": fork_server.python() if has_torch else None,
        }  # fmt: skip
        with contextlib.ExitStack() as ours:
            out, self.stdout = self._stream(ours, stdout, 1)
            err, self.stderr = (
                (out, None) if stderr == subprocess.STDOUT else self._stream(ours, stderr, 2)
            )
            self._connection = fork_server.connected(_server())
            text = json.dumps(order).encode() + b"\n"
            given, _ = self._stream(ours, stdin or subprocess.DEVNULL, 0)
            sent = socket.send_fds(self._connection, [text], [given, out, err])
            self._connection.sendall(text[sent:])
        self.pid = self._answer()

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, that of a signal below 0."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._answer()
            self._connection.close()
        return self.returncode

    def communicate(
        self, input: str | None = None, timeout: float | None = None
    ) -> tuple[str, str]:
        """Read all that it says, to its end. What a time-out left is there at the next call."""
        assert input is None
        until = None if timeout is None else time.monotonic() + timeout
        streams = [one for one in (self.stdout, self.stderr) if one is not None]
        reading = [one for one in streams if not one.closed]
        while reading:
            left = None if until is None else max(0.0, until - time.monotonic())
            ready = select.select(reading, [], [], left)[0]
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            for one in ready:
                data = os.read(one.fileno(), 1 << 16)
                self._kept[one] = self._kept.get(one, b"") + data
                if not data:
                    one.close()
                    reading.remove(one)
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        return self._said(self.stdout), self._said(self.stderr)

    def send_signal(self, sig: int) -> None:
        """Send a signal, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _stream(
        self, ours: contextlib.ExitStack, given: int | IO[Any] | None, default: int
    ) -> tuple[int, IO[str] | None]:
        """Return what the command gets, and what is read here where that is a pipe."""
        if given == subprocess.PIPE:
            reading, writing = os.pipe()
            ours.callback(os.close, writing)
            return writing, os.fdopen(reading, errors=self._errors)
        if given == subprocess.DEVNULL:
            nothing = os.open(os.devnull, os.O_RDWR)
            ours.callback(os.close, nothing)
            return nothing, None
        if given is None:
            return default, None
        return given if isinstance(given, int) else given.fileno(), None

    def _said(self, stream: IO[str] | None) -> str:
        data = self._kept.get(stream, b"") if stream is not None else b""
        return io.TextIOWrapper(io.BytesIO(data), errors=self._errors).read()

    def _answer(self) -> int:
        line = b""
        while not line.endswith(b"\n"):
            line += (byte := self._connection.recv(1))
            if not byte:
                raise RuntimeError(f"the command server lost {self.args!r}")
        return int(line)


def run(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, input: str = "",
    timeout: float = _LIMIT_SECONDS,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a command to its end, as `subprocess.run` does when it captures all that is said."""
    with tempfile.TemporaryFile("w+") as given:
        given.write(input)
        given.seek(0)
        pipe = subprocess.PIPE
        with Forked(argv, env=env, stdin=given, stdout=pipe, stderr=pipe) as child:
            try:
                said, errors = child.communicate(timeout=timeout)
            except BaseException:
                child.kill()
                raise
    return subprocess.CompletedProcess(argv, child.returncode, said, errors)


def share(path: Path) -> None:
    """Start a server for this process and all that it will fork; it goes when this one does."""
    global _shared, _keeps_shared
    _keeps_shared = fork_server.start_server(
        "tests.command_server", "--at", str(path), stdout=subprocess.DEVNULL
    )
    atexit.register(fork_server.stop_server, _keeps_shared)
    _shared = path


def _server() -> Path:
    with _starting:
        if _shared is None:
            folder = tempfile.mkdtemp(prefix="rankscope-commands.")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            share(Path(folder) / "socket")
    assert _shared is not None
    return _shared


# --- the server's end -----------------------------------------------------------------------------


def _serve(path: str) -> NoReturn:
    """Fork a command for each client."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as servers of tests are started
        for name in _IMPORTED:
            importlib.import_module(name)
        _be_ready()
    gc.collect()
    gc.freeze()  # what collects would copy all that was imported here
    fork_server.fork_for_each(path)
    with socket.socket(fileno=os.dup(0)) as client:
        order = fork_server.order_from(client)
        if order is None:
            os._exit(0)
        fork(order, client)


def _be_ready() -> None:
    """Do once what each server does at its first requests: read its routes and known errors."""
    from rankscope_server.api.app import create_app
    from rankscope_server.known_errors.load import known_errors
    from rankscope_server.settings import Settings

    create_app(Settings()).openapi()
    known_errors()


def fork(order: dict[str, Any], client: socket.socket) -> NoReturn:
    """Fork a command, answer its number and its exit code; in the fork, become it."""
    files, inside = order["files"], order["inside"]
    if inside == PEER:
        inside = _peer_of(client)
    try:
        spaces, own = _spaces(inside, _SPACES), _spaces(inside, ("pid",))
    except FileNotFoundError:  # who ordered it has ended
        os._exit(1)
    for space in own:
        _set_namespace(space)  # for children, as ever
    pid = os.fork()
    if pid:
        with contextlib.suppress(BrokenPipeError):  # who ordered it was killed
            client.sendall(b"%d\n" % pid)
        for file in files:
            os.close(file)
        code = _wait(pid, client, is_rank="numbers" in order)
        with contextlib.suppress(BrokenPipeError):
            client.sendall(b"%d\n" % code)
        os._exit(0)
    client.close()
    os.setsid()
    os.chdir(order["directory"])
    for space in spaces:
        _set_namespace(space)  # that of mounts is its new directory, too
    _place(files, order.get("numbers", range(3)))
    if order.get("python"):
        child._COMMAND = (*order["python"], *child._COMMAND[1:])
    code = _be_command(order["argv"], order["environ"])
    # as at the end of an interpreter, but what was imported is not taken down: it would be copied
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give files the numbers that they have where they come from."""
    above = max([*files, *numbers]) + 1
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for file in {*files} - {0}:
        os.close(file)
    for file, number in zip(aside, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _peer_of(client: socket.socket) -> int:
    """Return the process at the other end, by the number that it has here."""
    numbers = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(numbers)[0])


def _spaces(pid: int | None, kinds: Sequence[str]) -> list[int]:
    """Open the namespaces of a process that are not ours."""
    if pid is None:
        return []
    theirs, ours = Path(f"/proc/{pid}/ns"), Path("/proc/self/ns")
    return [
        os.open(theirs / kind, os.O_RDONLY)
        for kind in kinds
        if os.readlink(theirs / kind) != os.readlink(ours / kind)
    ]


def _set_namespace(file: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(file, 0):  # os.setns is of Python 3.12
        raise OSError(ctypes.get_errno(), "setns")
    os.close(file)


def _wait(pid: int, client: socket.socket, *, is_rank: bool) -> int:
    """Return the exit code of the command; it gets signals that who started it names, or SIGKILL.

    That is for the end of who started it, which it does not outlive. A rank is reaped as launchers
    do it, which look now and then: the collector reads from what is left why it ended.
    """
    end = os.pidfd_open(pid)
    while end not in select.select([end, client.fileno()], [], [])[0]:
        number = client.recv(1) or bytes((signal.SIGKILL,))
        os.kill(pid, number[0])
        if number[0] == signal.SIGKILL:
            break
    if is_rank:
        time.sleep(_LAUNCHER_LOOK_SECONDS)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _be_command(argv: list[str], environ: dict[str, str]) -> int:
    """Become the command, as the interpreter starts a module or a program."""
    os.environ.clear()
    os.environ.update(environ)
    for action in filter(None, environ.get("PYTHONWARNINGS", "").split(",")):
        warnings.simplefilter(action)  # type: ignore[arg-type]
    place = next(n for n, word in enumerate(argv) if n and (word == "-m" or word[0] != "-"))
    flags, is_module = argv[1:place], argv[place] == "-m"
    target, arguments = argv[place + is_module], argv[place + is_module + 1 :]
    _open_streams(is_unbuffered="-u" in flags or bool(environ.get("PYTHONUNBUFFERED")))
    first = os.getcwd() if is_module else str(Path(target).parent)
    has_site = "-S" not in flags
    sys.path[:] = [first, *_search_path(environ.get("PYTHONPATH", ""), has_site=has_site)]
    importlib.invalidate_caches()
    sys.argv, sys.orig_argv[:] = [target, *arguments], argv
    sys.modules.pop(f"{target}.__main__", None)  # it may be imported here, and begins anew
    if has_site and environ.get("RANKSCOPE", "0") not in ("", "0"):  # as the .pth file does it
        from rankscope.rank.attach.start import attach_from_environment

        attach_from_environment()
    if not is_module:
        return fork_server.run_program(target)
    return fork_server.run_as_main(
        lambda: runpy.run_module(target, run_name="__main__", alter_sys=True)
    )


def _open_streams(*, is_unbuffered: bool) -> None:
    """Open the streams as the interpreter does at its start: a pipe wants others than a file."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = (  # type: ignore[misc]
        io.TextIOWrapper(open(1, "wb", 0, closefd=False), write_through=True)
        if is_unbuffered
        else open(1, "w", closefd=False)
    )
    sys.stderr = sys.__stderr__ = open(  # type: ignore[misc]
        2, "w", 1, errors="backslashreplace", closefd=False
    )


def _search_path(first: str, *, has_site: bool) -> list[str]:
    """Return where modules come from: PYTHONPATH, the library, what is installed."""
    library = os.path.dirname(os.__file__)
    plain = [library, os.path.join(library, "lib-dynload")]
    site = [place for place in sys.path[1:] if place not in plain] if has_site else []
    return [*filter(None, first.split(os.pathsep)), *plain, *site]


if __name__ == "__main__":
    _serve(sys.argv[2])
