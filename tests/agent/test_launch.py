"""`rankscope run`: bytes, signals, exit codes, and what is made of the output."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.cli import main
from rankscope.files import journal
from rankscope.node.launch import naming
from rankscope.node.launch.output import OutputRecords
from rankscope.node.launch.tee import Tee
from rankscope.node.processes import exits
from rankscope.node.ranks.launchers import own_directory
from rankscope.output.line_records import FAILURE_SUMMARY
from rankscope.output.lines import BURST_LINES, Line, LineIndexer, level_of
from rankscope.wire import schema
from tests.agent.collector import processes
from tests.agent.collector.fake_rank import FakeRank
from tests.agent.collector.processes import environment, is_alive, wait_for
from tests.agent.collector.receiver import Receiver

# --- the whole of it, as a process ---------------------------------------------------------


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    yield server
    server.close()


def words(tmp_path: Path, *command: str, options: tuple[str, ...] = ()) -> list[str]:
    return [
        sys.executable, "-m", "rankscope", "run", "--dir", str(tmp_path), "--run-id", "r",
        *options, "--", *command,
    ]  # fmt: skip


def launch(
    tmp_path: Path, *command: str, options: tuple[str, ...] = (), **settings: object
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        words(tmp_path, *command, options=options), env=environment(**settings),
        capture_output=True, timeout=90, check=False,
    )  # fmt: skip


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def no_collector_is_left(tmp_path: Path) -> bool:
    return not is_alive(processes.collector_pid(tmp_path / "r"))


NOISE = bytes(range(256)) * 4000 + b"\xff no newline at the end"


def test_bytes_pass_unchanged_and_in_their_streams(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(NOISE)
    code = f"cat {tmp_path}/noise; cat {tmp_path}/noise >&2; exit 7"
    done = launch(tmp_path, "sh", "-c", code)
    assert done.stdout == NOISE
    assert NOISE in done.stderr  # between our own lines
    assert done.returncode == 7


def test_order_is_kept_where_both_streams_go_to_one_place(tmp_path: Path) -> None:
    code = "for i in $(seq 200); do echo out $i; echo err $i >&2; done"
    done = subprocess.run(
        words(tmp_path, "sh", "-c", code), env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=90, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if not line.startswith("rankscope:")]
    assert lines == [f"{name} {i}" for i in range(1, 201) for name in ("out", "err")]


@pytest.mark.core
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("sh", "-c", "exit 0"), 0),
        (("sh", "-c", "kill -9 $$"), 137),
        (("sh", "-c", "kill -15 $$"), 143),
        (("no-such-command-at-all",), 127),
        (("/etc/passwd",), 126),
    ],
)
def test_exit_codes(tmp_path: Path, command: tuple[str, ...], code: int) -> None:
    assert launch(tmp_path, *command).returncode == code


def test_records_and_the_last_line(tmp_path: Path, receiver: Receiver) -> None:
    code = "import sys; print('[rank3]: hello'); sys.exit('bad end')"
    done = launch(tmp_path, *python(code), options=("--server", receiver.url), name="my run")
    assert done.stdout == b"[rank3]: hello\n"
    assert f"exit code 1: {receiver.url}/runs/r" in done.stderr.decode()
    (started,) = receiver.records(schema.RunStarted)
    assert (started.name, started.launcher) == ("my run", "python")
    assert started.command[0] == sys.executable
    (ended,) = [e for e in receiver.records(schema.Event) if e.name == schema.COMMAND_ENDED]
    assert (ended.rank, ended.fields) == (schema.NODE_RANK, {"exit_code": "1"})
    assert ended.time_ns > started.time_ns
    lines = {line.message: line for line in receiver.records(schema.LogLine)}
    assert (lines["hello"].rank, lines["hello"].stream) == (3, "stdout")
    assert (lines["bad end"].rank, lines["bad end"].stream) == (-1, "stderr")
    assert no_collector_is_left(tmp_path)
    again = launch(tmp_path, "echo", "second", options=("--server", receiver.url))
    assert again.returncode == 0  # the same run id again: nothing trips over what is left
    assert "second" in [line.message for line in receiver.records(schema.LogLine)]
    assert len({producer for producer, _ in receiver.batches}) == 1


def test_json_and_no_server(tmp_path: Path) -> None:
    done = launch(tmp_path, "echo", "hi", options=("--json",))
    answer = json.loads(done.stdout)  # and nothing else is there
    assert "hi\n" in done.stderr.decode()
    assert (answer["run_id"], answer["exit_code"], answer["url"]) == ("r", 0, None)
    assert "no server is set" in done.stderr.decode()


def test_a_server_that_is_away_is_one_warning(tmp_path: Path) -> None:
    done = launch(tmp_path, "sh", "-c", "sleep 1.5", options=("--server", "http://127.0.0.1:1"))
    text = done.stderr.decode()
    assert done.returncode == 0
    assert text.count("does not answer") == 1
    assert re.search(r"batches \(.* kB\) did not reach the server and wait in .*spool", text)
    os.kill(processes.collector_pid(tmp_path / "r"), signal.SIGTERM)  # it would try for a minute
    wait_for(lambda: no_collector_is_left(tmp_path))


def test_the_collector_is_started_again(tmp_path: Path, receiver: Receiver) -> None:
    process = subprocess.Popen(
        words(tmp_path, "sleep", "6", options=("--server", receiver.url)), env=environment()
    )
    pid_file = tmp_path / "r" / "node" / "pid"
    wait_for(pid_file.exists)
    first = processes.collector_pid(tmp_path / "r")
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: processes.collector_pid(tmp_path / "r") != first)
    assert process.wait(60) == 0
    assert no_collector_is_left(tmp_path)


def test_a_directory_that_cannot_be_made_does_not_stop_the_command(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = launch(tmp_path / "file", "sh", "-c", "echo ran; exit 5")
    assert (done.stdout, done.returncode) == (b"ran\n", 5)
    assert "not watched" in done.stderr.decode()


def test_sigterm_reaches_the_command(tmp_path: Path) -> None:
    code = "trap 'echo got it; exit 9' TERM; echo up; while :; do sleep 0.1; done"
    process = subprocess.Popen(
        words(tmp_path, "sh", "-c", code), env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.terminate()
    assert process.communicate(timeout=60)[0] == "got it\n"
    assert process.returncode == 9
    assert no_collector_is_left(tmp_path)


PASSED_ON = [
    signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU,
    signal.SIGRTMIN + 3,
]  # fmt: skip


@pytest.mark.parametrize("number", PASSED_ON)
def test_a_signal_reaches_the_command_which_may_go_on(tmp_path: Path, number: int) -> None:
    code = (
        "import signal\n"
        f"number = {{{number:d}}}\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, number)\n"
        "print('up', flush=True); signal.sigwait(number)\n"
        "print('saved', flush=True); signal.sigwait(number); raise SystemExit(9)\n"
    )
    process = subprocess.Popen(
        words(tmp_path, *python(code)), env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for said in ("up\n", "saved\n"):
        assert process.stdout.readline() == said
        process.send_signal(number)
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == 9


def test_signals_that_are_ignored_stay_so(tmp_path: Path) -> None:
    """As nohup, and a shell without job control in the background, start a command."""
    code = (
        "import os, signal\n"
        "ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)\n"
        "print([signal.getsignal(number) is signal.SIG_IGN for number in ignored], flush=True)\n"
        "print(input(), flush=True)\n"
    )
    process = subprocess.Popen(
        ["sh", "-c", "trap '' HUP INT USR1; exec \"$@\"", "sh", *words(tmp_path, *python(code))],
        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "[True, True, True]\n"
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
        process.send_signal(number)
    assert process.communicate("trained\n", timeout=60)[0] == "trained\n"
    assert process.returncode == 0


def test_an_indexer_that_fails_costs_lines_not_the_command(tmp_path: Path) -> None:
    failed: list[tuple[str, str]] = []

    def line(line: Line) -> None:
        raise OverflowError(line.text)

    tee = Tee(
        lambda stream: LineIndexer(stream, line, lambda count: None, ()),
        lambda stream, error: failed.append((stream, str(error))),
        os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT),
    )
    code = "for i in 1 2 3; do echo $i; sleep 0.3; done; seq 100000; echo end"
    command = subprocess.Popen(["sh", "-c", code], stdout=tee.child_stdout, stderr=tee.child_stderr)
    tee.start()
    assert command.wait(60) == 0
    tee.finish()
    assert (tmp_path / "out").read_text().startswith("1\n2\n3\n1\n")
    assert (tmp_path / "out").read_text().endswith("100000\nend\n")
    assert failed == [("stdout", "1")]


def test_ctrl_c_at_a_terminal_reaches_the_command_once_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time\n"
        "count = []\n"
        "signal.signal(signal.SIGINT, lambda *_: count.append(1))\n"
        "print('tty', sys.stdout.isatty(), os.get_terminal_size().columns, flush=True)\n"
        "time.sleep(1.5); time.sleep(0.5)\n"
        "print('interrupts', len(count), flush=True); sys.exit(130)\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, words(tmp_path, *python(code)), environment())
    with contextlib.suppress(OSError):
        import fcntl
        import struct
        import termios

        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 33, 77, 0, 0))
    output = b""
    interrupted = False
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            output += os.read(terminal, 65536)
        except OSError:
            break
        if re.search(rb"tty .*\n", output) and not interrupted:
            interrupted = True
            os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    text = output.decode()
    assert "tty True 77" in text
    assert "interrupts 1" in text
    assert "\r\r\n" not in text  # the terminal's line ends, once
    assert os.waitstatus_to_exitcode(status) == 130
    assert no_collector_is_left(tmp_path)


def test_torchrun_under_the_launcher(tmp_path: Path, receiver: Receiver) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(30)\n"
    )
    done = launch(
        tmp_path, sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", "2", str(script), options=("--server", receiver.url),
    )  # fmt: skip
    assert done.returncode == 1
    (started,) = [r for r in receiver.records(schema.RunStarted) if r.rank == -1]
    assert (started.name, started.launcher) == ("train.py", "torchrun")
    ended = {record.rank: record for record in receiver.records(schema.RankEnded)}
    assert {rank: record.signal for rank, record in ended.items()} == {0: 15, 1: 9}
    (summary,) = [e for e in receiver.records(schema.Event) if e.name == FAILURE_SUMMARY]
    assert (summary.rank, summary.fields["exit_code"]) == (1, "-9")
    exit_statuses = (tmp_path / "r" / "node" / "exits.jsonl").read_text()
    told = [json.loads(line) for line in exit_statuses.splitlines()]
    assert {9, 15} <= {line.get("signal") for line in told if "torchrun" in line["source"]}
    assert no_collector_is_left(tmp_path)


# --- the command line ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["run"], "no command given"),
        (["run", "--server"], "expected one argument"),
        (["run", "--no-such-flag", "--", "x"], "rankscope"),
        (["run", "--server", "ftp://x", "--", "x"], "expected http://HOST:PORT"),
    ],
)
def test_wrong_usage_is_64_with_a_remedy(
    argv: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(argv)
    except SystemExit as ending:
        code = int(ending.code or 0)
    assert code == 64
    assert says in capfd.readouterr().err


def test_a_setting_that_does_not_parse_is_64(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANKSCOPE_FLUSH_SECONDS", "soon")
    assert main(["run", "--", "true"]) == 64
    assert "RANKSCOPE_FLUSH_SECONDS" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("command", "title", "kind"),
    [
        ("torchrun --nproc-per-node 4 train.py --x 1", "train.py", "torchrun"),
        ("python -m torch.distributed.run -m my.train", "my.train", "torchrun"),
        ("/usr/bin/python3.11 -u dir/train.py", "train.py", "python"),
        ("accelerate launch --config c.yaml train.py", "train.py", "accelerate"),
        ("srun -N 2 python train.py", "train.py", "srun"),
        ("bash dir/run.sh 1", "run.sh", "command"),
        ("python -m pkg.mod", "pkg.mod", "python"),
    ],
)
def test_what_a_command_is_called(command: str, title: str, kind: str) -> None:
    assert naming.title(command.split()) == title
    assert naming.launcher_kind(command.split()) == kind


def test_the_name_of_a_run() -> None:
    torchrun = ["torchrun", "--rdzv-id=job 7", "train.py"]
    assert naming.shared_run_id(torchrun, {}, "mine") == "mine"
    assert naming.shared_run_id(torchrun, {}) == "job-7"
    assert naming.shared_run_id(["x", "--rdzv_id", "a"], {}) == "a"
    assert naming.shared_run_id(["x"], {"SLURM_JOB_ID": "12"}) == "slurm-12"
    assert naming.shared_run_id(["x"], {}) == ""
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", naming.new_run_id())
    assert naming.spans_nodes(["torchrun", "--nnodes", "2", "train.py"])
    assert not naming.spans_nodes(["torchrun", "--nnodes=1", "train.py"])


# --- lines -----------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Indexed:
    """An indexer and what came out of it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.lines: list[Line] = []
        self.suppressed: list[int] = []
        self.indexer = LineIndexer(
            "stderr", self.lines.append, self.suppressed.append, ("default", "trainer"),
            self.clock, lambda: 1,
        )  # fmt: skip

    def texts(self) -> list[str]:
        return [line.text for line in self.lines]


@pytest.fixture
def indexed() -> Indexed:
    return Indexed()


def test_lines_from_pieces(indexed: Indexed) -> None:
    for piece in (b"one\ntw", b"o\r\n\n  \nbar 1%\rbar 2%\rbar 3%\n", b"\xff\xfe\nend"):
        indexed.indexer.feed(piece)
    assert indexed.texts() == ["one", "two", "bar 3%", "\ufffd\ufffd"]
    indexed.indexer.close()
    assert indexed.texts()[-1] == "end"


def test_a_line_without_end_is_bounded(indexed: Indexed) -> None:
    indexed.indexer.feed(b"x" * 100_000)
    assert sum(len(text) for text in indexed.texts()) >= 80_000
    assert max(len(text) for text in indexed.texts()) <= 16 << 10


def test_whose_line_it_is(indexed: Indexed) -> None:
    indexed.indexer.feed(
        b"[rank3]: a\n[default2]:b\n[trainer0]:[rank8]: c\n[epoch3]: d\n[rank1]:W1121 x\n"
    )
    found = [(line.rank, line.local_rank, line.text) for line in indexed.lines]
    assert found == [
        (3, None, "a"), (None, 2, "b"), (8, 0, "c"), (None, None, "[epoch3]: d"),
        (1, None, "W1121 x"),
    ]  # fmt: skip


TRACEBACK = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
    g()
ValueError: bad"""


def test_tracebacks_stay_whole_even_when_ranks_interleave(indexed: Indexed) -> None:
    lines = TRACEBACK.split("\n")
    for line in lines:
        for rank in (0, 1):
            indexed.indexer.feed(f"[rank{rank}]: {line}\n".encode())
    indexed.indexer.feed(b"[rank0]: next\n")
    assert indexed.texts() == [TRACEBACK, "next"]
    indexed.clock.now += 1
    indexed.indexer.tick()
    assert indexed.texts() == [TRACEBACK, "next", TRACEBACK]
    assert [line.rank for line in indexed.lines] == [0, 0, 1]
    assert indexed.lines[0].level == logging.ERROR


def test_a_traceback_that_never_ends_is_bounded(indexed: Indexed) -> None:
    indexed.indexer.feed(b"Traceback (most recent call last):\n" + b"  deeper\n" * 1000)
    assert len(indexed.lines[0].text.splitlines()) == 400


def test_too_many_lines_are_counted(indexed: Indexed) -> None:
    total = BURST_LINES + 3000
    data = b"".join(b"line %d\n" % number for number in range(total))
    for start in range(0, len(data), 1000):
        indexed.indexer.feed(data[start : start + 1000])
    indexed.indexer.tick()
    assert len(indexed.lines) == BURST_LINES
    assert sum(indexed.suppressed) == 3000
    indexed.clock.now += 1
    indexed.indexer.feed(b"again\n")
    assert indexed.texts()[-1] == "again"


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("W0731 12:00:00.1 4242 torch/x.py:1] careful", logging.WARNING),
        ("E1121 10:16:15.2 29024 api.py:1002] failed", logging.ERROR),
        ("2026-01-01 INFO started", logging.INFO),
        ("ERROR: no", logging.ERROR),
        ("x.py:3: UserWarning: careful", logging.WARNING),
        ("RuntimeError: bad", logging.ERROR),
        ("loss 3.2 errors 0", logging.INFO),
        ("x" * 200 + " ERROR", logging.INFO),
    ],
)
def test_levels(text: str, level: int) -> None:
    assert level_of(text) == level


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("E1121 api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 4242) of binary: /x/python",
         exits.ExitStatus(None, 9, "torchrun's report")),
        ("  exitcode  : 3 (pid: 4242)", exits.ExitStatus(3, None, "torchrun's report")),
        ("exitcode of nothing", None),
    ],
)  # fmt: skip
def test_torchruns_report_goes_to_the_book(
    tmp_path: Path, text: str, status: exits.ExitStatus | None
) -> None:
    own = own_directory(tmp_path)
    own.mkdir(parents=True)
    records = OutputRecords(tmp_path, own)
    records.line(Line(text, "stderr", logging.ERROR, 1))
    records.close()
    assert exits.ExitStatuses(tmp_path / "node").find(4242, 1) == status


def test_a_summary_with_numbers_of_no_rank_is_recorded(tmp_path: Path) -> None:
    own = own_directory(tmp_path)
    own.mkdir(parents=True)
    records = OutputRecords(tmp_path, own)
    text = (
        "Root Cause (first observed failure):\n[0]:\n  rank : {0} (local_rank: {0})\n"
        "  exitcode : {0} (pid: {0})"
    )
    records.line(Line(text.format("9" * 30), "stderr", logging.ERROR, 1, kind="summary"))
    records.close()
    (segment,) = own.glob("journal.*")
    found = [schema.decode_record(body) for _, body, _ in journal.read_frames(segment, 0)]
    (summary,) = [record for record in found if isinstance(record, schema.Event)]
    assert (summary.name, summary.rank) == (FAILURE_SUMMARY, schema.NODE_RANK)
    assert exits.ExitStatuses(tmp_path / "node").find(int("9" * 30), 1) is None


def test_local_ranks_are_found_in_the_rings(tmp_path: Path) -> None:
    FakeRank(tmp_path, 6, attempt=2)
    own = own_directory(tmp_path)
    own.mkdir(parents=True)
    records = OutputRecords(tmp_path, own, own_rank=5)
    assert records._ranks.place(None, 6) == (2, 6)
    assert records._ranks.place(None, 1) == (2, schema.NODE_RANK)
    assert records._ranks.place(4, None) == (2, 4)
    assert records._ranks.place(None, None) == (2, 5)
    records.close()


def test_arguments_that_are_no_text(tmp_path: Path, receiver: Receiver) -> None:
    argv = [
        os.fsencode(word) for word in words(tmp_path, "echo", options=("--server", receiver.url))
    ]
    done = subprocess.run([*argv, b"\xff\xfe"], env=environment(), capture_output=True, check=False)
    assert done.stdout == b"\xff\xfe\n"
    (started,) = receiver.records(schema.RunStarted)
    assert started.command == ["echo", "??"]


def test_a_traceback_of_any_size_fits_a_record(indexed: Indexed) -> None:
    indexed.indexer.feed(b"Traceback (most recent call last):\n")
    for _ in range(30):
        indexed.indexer.feed(b"  " + b"x" * 15_000 + b"\n")
    indexed.indexer.close()
    assert len(indexed.lines[0].text) < 65_536
