"""PyTorch's own record of collectives, and the server from which the collector reads it.

Only it knows when NCCL was done on the device. It is read through torch's control server, C++
threads behind a socket that need no interpreter lock: nothing here runs again after the start.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rankscope.files.flight_recorder import OF_NCCL, OF_OTHERS, FlightSetup, encode
from rankscope.files.run_directory import FLIGHT_SETUP, FLIGHT_SOCKET, replace_file
from rankscope.rank.context import Context, HookSkipped
from rankscope.rank.group import GroupMade
from rankscope.rank.guard import guarded

# A dump may read CUDA events that the watchdog has freed, before this version.
_SAFE_TO_POLL = (2, 14)
_BUFFER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # new and old name
_NEW_NAME = (2, 9)
_NUM_ENTRIES = "2000"  # the default since 2.13; before it was nothing
_MAX_SOCKET_PATH = 100  # of 108 that the kernel takes
_MAX_GROUPS = 4096


class FlightRecorder:
    """Times on the device from PyTorch's Flight Recorder, read from outside the interpreter."""

    name: ClassVar[str] = "flight-recorder"
    needs: ClassVar[str] = "torch.distributed.distributed_c10d"
    _server: ClassVar[_ControlServer | None] = (
        None  # one per process, also when hooks are installed again
    )

    def install(self, context: Context) -> str:
        """Wait for a group with NCCL (with any backend, if the setting says `on`)."""
        from torch._C import _distributed_c10d as c10d

        self._context, self._mode = context, context.settings.flight_recorder
        if self._mode == "off":
            raise HookSkipped("RANKSCOPE_FLIGHT_RECORDER=off")
        names = getattr(c10d, "_get_handler_names", None)
        if names is None or not hasattr(c10d, "_WorkerServer"):
            raise HookSkipped("this PyTorch has no control server")
        handlers = set(names())
        if OF_NCCL not in handlers and (self._mode != "on" or OF_OTHERS not in handlers):
            raise HookSkipped("this PyTorch has no NCCL")
        if self._mode == "on" and not any(name in os.environ for name in _BUFFER_SIZES):
            name = _BUFFER_SIZES[_torch_version() < _NEW_NAME]
            os.environ[name] = _NUM_ENTRIES  # torch reads it at the first collective
        self._handlers = handlers
        context.listen("group", self._made)
        context.add_undo(self._shut)
        server = FlightRecorder._server
        if server is not None and server.pid == os.getpid():  # it was switched off and is on again
            server.write()
            return server.source
        return "waits for a group of NCCL" if self._mode == "auto" else "waits for a group"

    def _made(self, made: GroupMade) -> None:
        """Start the server for the first group that is worth it, and publish what may be asked."""
        chosen = plan(made.backend, self._mode, self._handlers, _torch_version(), os.environ)
        if chosen is None:
            return
        source, server = self._context.sources[self.name], self._open()
        setup = server.setup
        if chosen.handler not in setup.handlers:
            setup.handlers.append(chosen.handler)
        if chosen.is_polled and chosen.handler not in setup.polled:
            setup.polled.append(chosen.handler)
        if chosen.is_endless and len(setup.endless) < _MAX_GROUPS:
            setup.endless.append(made.label)
        if chosen.is_timed:
            made.process_group._enable_collectives_timing()
            setup.is_timed = True
        server.write()
        self._context.sources[self.name] = server.source = chosen.source
        if chosen.source != source:
            self._context.describe()

    def _open(self) -> _ControlServer:
        recorder = self._context.recorder
        assert recorder is not None
        server = FlightRecorder._server
        if server is None or server.pid != os.getpid() or server.directory != recorder.directory:
            server = FlightRecorder._server = _ControlServer(recorder.directory)
        return server

    def _shut(self) -> None:
        """Let the collector ask no more; the server cannot be ended without a wait."""
        if FlightRecorder._server is not None:
            FlightRecorder._server.remove(FLIGHT_SETUP)


class _ControlServer:
    """The control server of this process, on a socket in the rank's private directory."""

    def __init__(self, directory: Path) -> None:
        from torch._C._distributed_c10d import _WorkerServer

        self.pid, self.directory, self.setup = os.getpid(), directory, FlightSetup()
        self.source = ""
        self.remove(FLIGHT_SOCKET)  # of the program that this process ran before
        server = _WorkerServer(socket_address(directory / FLIGHT_SOCKET))
        # Its destructor waits for threads, which a forked child does not have: it never runs.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
        atexit.register(guarded(self._close))

    def write(self) -> None:
        """Publish to the collector what may be asked now."""
        replace_file(self.directory / FLIGHT_SETUP, encode(self.setup))

    def remove(self, name: str) -> None:
        """Delete one of the two files, in the process that made them."""
        if os.getpid() == self.pid:
            with contextlib.suppress(FileNotFoundError):
                (self.directory / name).unlink()

    def _close(self) -> None:
        """Remove the socket: a question that comes while C++ tears itself down might crash it."""
        self.remove(FLIGHT_SETUP)
        self.remove(FLIGHT_SOCKET)


def socket_address(path: Path) -> str:
    """Return a form of `path` that is short enough for the kernel; a descriptor stays open."""
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
        return str(path)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{descriptor}/{path.name}"


def _torch_version() -> tuple[int, int]:
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(re.match(r"\d+", minor)[0])  # type: ignore[index]


@dataclass(frozen=True)
class GroupPlan:
    """What is done for a group."""

    handler: str
    is_polled: bool  # may be asked all the time
    is_timed: bool  # CUDA events around each collective
    is_endless: bool  # no other source reports its ends
    source: str


def plan(
    backend: str, mode: str, handlers: Container[str], version: tuple[int, int],
    environ: Mapping[str, str],
) -> GroupPlan | None:  # fmt: skip
    """Return what to do for a group of this backend, None where there is nothing to do."""
    is_nccl = "nccl" in re.split(r"[,:]", backend)
    handler = OF_NCCL if is_nccl else OF_OTHERS
    if handler not in handlers or not (is_nccl or mode == "on"):
        return None
    if not is_nccl:
        return GroupPlan(handler, True, False, False, "read every 2 s, ends without times")
    if version < _SAFE_TO_POLL:
        why = "at incidents only: before PyTorch 2.14 reading it all the time may crash NCCL"
        return GroupPlan(handler, False, False, False, why)
    if environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        why = "without timing, which would undo the overlap with CUDA_DEVICE_MAX_CONNECTIONS=1"
        return GroupPlan(handler, True, False, True, f"read every 2 s, {why}")
    return GroupPlan(handler, True, True, True, "read every 2 s, with times of the device")
