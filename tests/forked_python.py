"""In place of a Python that would import PyTorch: it is forked where that is imported already.

    python -S tests/forked_python.py SOCKET [-u] (-m MODULE | PROGRAM) [ARGUMENTS ...]

The fork server listens at SOCKET. All open files go along, by their numbers. Signals that this
process gets the other one gets; it ends with this one, and this one ends as it does.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    """Order the process and wait for its end."""
    path, *words = sys.argv[1:]
    files = _open_files()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        order = {
            "argv": [sys.executable, *words], "directory": os.getcwd(), "inside": 0,
            "environ": dict(os.environ), "numbers": files,
        }  # fmt: skip
        text = json.dumps(order).encode() + b"\n"
        sent = socket.send_fds(connection, [text], files)
        connection.sendall(text[sent:])
        for file in files[3:]:
            os.close(file)
        answers = connection.makefile()
        answers.readline()  # its number, which in other namespaces is another

        def pass_on(number: int, _: object) -> None:
            with contextlib.suppress(OSError):
                connection.sendall(bytes((number,)))

        for number in _PASSED_ON:
            signal.signal(number, pass_on)
        code = int(answers.readline())
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _open_files() -> list[int]:
    """Return the numbers of the files that this process was given, those of the streams first."""
    given = [int(name) for name in os.listdir("/proc/self/fd")]
    return sorted(file for file in given if _is_open(file))


def _is_open(file: int) -> bool:
    try:
        return os.get_inheritable(file)  # what Python opened by itself is not
    except OSError:  # that of the listing
        return False


if __name__ == "__main__":
    sys.exit(main())
