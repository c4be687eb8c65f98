"""PyTorch's own record of collectives, and the door through which the collector reads it.

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
from typing import TYPE_CHECKING, ClassVar

from rankscope.files.flight_recorder import OF_NCCL, OF_OTHERS, FlightSetup, encode
from rankscope.files.run_directory import FLIGHT_SETUP, FLIGHT_SOCKET
from rankscope.rank.control import replace_file
from rankscope.rank.events import GroupMade, listen
from rankscope.rank.guard import guarded
from rankscope.rank.hooks.base import HookSkipped

if TYPE_CHECKING:
    from rankscope.rank.runtime import Agent

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
    _door: ClassVar[_Door | None] = None  # one per process, also when hooks are installed again

    def install(self, agent: Agent) -> str:
        """Wait for a group with NCCL (with any backend, if the setting says `on`)."""
        from torch._C import _distributed_c10d as c10d

        self._agent, self._mode = agent, agent.settings.flight_recorder
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
        listen(agent, "group", self._made)
        agent.undo.append(self._shut)
        door = FlightRecorder._door
        if door is not None and door.pid == os.getpid():  # it was switched off and is on again
            door.write()
            return door.said
        return "waits for a group of NCCL" if self._mode == "auto" else "waits for a group"

    def _made(self, made: GroupMade) -> None:
        """Open the door for the first group that is worth it, and say what may be asked."""
        chosen = plan(made.backend, self._mode, self._handlers, _torch_version(), os.environ)
        if chosen is None:
            return
        said, door = self._agent.sources[self.name], self._open()
        setup = door.setup
        if chosen.handler not in setup.handlers:
            setup.handlers.append(chosen.handler)
        if chosen.is_polled and chosen.handler not in setup.polled:
            setup.polled.append(chosen.handler)
        if chosen.is_endless and len(setup.endless) < _MAX_GROUPS:
            setup.endless.append(made.label)
        if chosen.is_timed:
            made.process_group._enable_collectives_timing()
            setup.is_timed = True
        door.write()
        self._agent.sources[self.name] = door.said = chosen.said
        if chosen.said != said:
            self._agent.describe()

    def _open(self) -> _Door:
        recorder = self._agent.recorder
        assert recorder is not None
        door = FlightRecorder._door
        if door is None or door.pid != os.getpid() or door.directory != recorder.directory:
            door = FlightRecorder._door = _Door(recorder.directory)
        return door

    def _shut(self) -> None:
        """Let the collector ask no more; the server cannot be ended without a wait."""
        if FlightRecorder._door is not None:
            FlightRecorder._door.remove(FLIGHT_SETUP)


class _Door:
    """The control server of this process, on a socket in the rank's private directory."""

    def __init__(self, directory: Path) -> None:
        from torch._C._distributed_c10d import _WorkerServer

        self.pid, self.directory, self.setup = os.getpid(), directory, FlightSetup()
        self.said = ""
        self.remove(FLIGHT_SOCKET)  # of the program that this process ran before
        server = _WorkerServer(socket_address(directory / FLIGHT_SOCKET))
        # Its destructor waits for threads, which a forked child does not have: it never runs.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
        atexit.register(guarded(self._close))

    def write(self) -> None:
        """Tell the collector what may be asked now."""
        replace_file(self.directory / FLIGHT_SETUP, encode(self.setup))

    def remove(self, name: str) -> None:
        """Delete one of the two files, in the process that made them."""
        if os.getpid() == self.pid:
            with contextlib.suppress(FileNotFoundError):
                (self.directory / name).unlink()

    def _close(self) -> None:
        """Take the way in: a question that comes while C++ tears itself down might crash it."""
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
class Plan:
    """What is done for a group."""

    handler: str
    is_polled: bool  # may be asked all the time
    is_timed: bool  # CUDA events around each collective
    is_endless: bool  # no other source tells its ends
    said: str


def plan(
    backend: str, mode: str, handlers: Container[str], version: tuple[int, int],
    environ: Mapping[str, str],
) -> Plan | None:  # fmt: skip
    """Return what to do for a group of this backend, None where there is nothing to do."""
    is_nccl = "nccl" in re.split(r"[,:]", backend)
    handler = OF_NCCL if is_nccl else OF_OTHERS
    if handler not in handlers or not (is_nccl or mode == "on"):
        return None
    if not is_nccl:
        return Plan(handler, True, False, False, "read every 2 s, ends without times")
    if version < _SAFE_TO_POLL:
        why = "at incidents only: before PyTorch 2.14 reading it all the time may crash NCCL"
        return Plan(handler, False, False, False, why)
    if environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        why = "without timing, which would undo the overlap with CUDA_DEVICE_MAX_CONNECTIONS=1"
        return Plan(handler, True, False, True, f"read every 2 s, {why}")
    return Plan(handler, True, True, True, "read every 2 s, with times of the device")
