"""A forked Python is to who starts it as one that was started: words, files, signals and end."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests import fork_server

pytestmark = pytest.mark.multiproc


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return tmp_path / "program.py"


def start(program: Path, *words: str, files: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*fork_server.python(), "-u", str(program), *words], cwd=program.parent, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=files,
        env=os.environ | {"ONE": "its own"},
    )  # fmt: skip


def test_it_has_words_variables_a_folder_and_files(program: Path) -> None:
    program.write_text(
        "import os, sys\n"
        "assert 'torch' in sys.modules\n"
        "os.write(int(sys.argv[1]), f'{os.getcwd()} {sys.path[0]}'.encode())\n"
        "print(os.environ['ONE'])\n"
        "sys.exit(7)\n"
    )
    reading, writing = os.pipe()
    with start(program, str(writing), files=(writing,)) as child:
        os.close(writing)
        with os.fdopen(reading) as told:
            assert told.read() == f"{program.parent} {program.parent}"
        assert child.communicate() == ("its own\n", "")
    assert child.returncode == 7


def test_an_exception_is_shown_as_the_interpreter_shows_it(program: Path) -> None:
    program.write_text("def fail():\n    raise ValueError('no')\nfail()\n")
    with start(program) as child:
        _, said = child.communicate()
    assert child.returncode == 1
    assert said.splitlines()[1::2] == [
        f'  File "{program}", line 3, in <module>',
        f'  File "{program}", line 2, in fail',
        "ValueError: no",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_reach_it_and_are_its_end(program: Path, number: signal.Signals) -> None:
    program.write_text("import os, time\nprint(os.getpid())\ntime.sleep(600)\n")
    with start(program) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        child.send_signal(number)
        assert child.wait(60) == -number


def test_it_does_not_outlive_who_was_started_in_its_place(program: Path) -> None:
    program.write_text("import os, time\nprint(os.getpid())\ntime.sleep(600)\n")
    with start(program) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        child.kill()
        assert child.stdout.read() == ""  # an end of file: the other one has gone, too


def test_a_signal_of_its_own_is_the_end_of_both(program: Path) -> None:
    program.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    with start(program) as child:
        assert child.wait(60) == -signal.SIGSEGV
