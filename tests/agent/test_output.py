"""Output of ranks that no launcher of ours started: from the best source that cannot harm them."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rankscope.files import journal
from rankscope.node.launch.naming import tee_variables
from rankscope.node.ranks.outputs import RankOutput
from rankscope.output.lines import TEE_VARIABLE
from rankscope.rank import guard
from rankscope.rank.hooks.output import Writes, source_of
from rankscope.wire import schema
from tests.agent import recorded
from tests.agent.collector.processes import wait_for
from tests.agent.collector.receiver import Receiver

SCRIPT = recorded.SCRIPTS / "prints.py"


def lines_of(directory: Path) -> list[schema.LogLine]:
    """Return what the collector makes of a rank's journal and files."""
    found: list[schema.LogLine] = []

    def forward(body: bytes) -> None:
        record = schema.decode_record(body)
        if isinstance(record, schema.LogLine):
            found.append(record)

    output = RankOutput(directory, (0, 0), {}, lambda reason, count: None)
    output.begin(forward)
    for kind, body, _ in journal.read_frames(directory / "journal.0", 0):
        if kind == journal.OUTPUT:
            output.frame(body)
    while output.turn(forward, gone=True):
        pass
    return found


def test_python_writes_where_nobody_may_read_the_stream(tmp_path: Path) -> None:
    more = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = recorded.run(tmp_path, "prints.py", launched=True, **more)
    plain = recorded.run(tmp_path / "plain", "prints.py", launched=True, RANKSCOPE="0", **more)
    assert done.returncode == plain.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == (plain.stdout, plain.stderr)
    (rank,) = recorded.read(tmp_path)
    lines = [(line.stream, line.message.splitlines()[0]) for line in lines_of(rank.directory)]
    assert [text for stream, text in lines if stream == "stdout"] == [
        "python 0 says hello", "no line end yet: Bearer ***", "a", "b",
        done.stdout.splitlines()[-2],
    ]  # fmt: skip
    # what logging and warnings print is a record of theirs, and no second line
    assert [text for stream, text in lines if stream == "stderr"] == [
        "100%|##", "Traceback (most recent call last):",
    ]  # fmt: skip
    sources = rank.of(schema.RankRegistered)[-1].sources["output"]
    assert "C and C++ are not seen" in sources
    logged = {line.message: line.fields for line in rank.of(schema.LogLine)}
    assert logged["logged"] == {"epoch": "3", "password": "***"}


def test_a_terminal_stays_one(tmp_path: Path) -> None:
    facts = [facts_at_a_terminal(tmp_path, attached) for attached in ("1", "0")]
    assert facts[0] == facts[1]
    assert facts[0]["isatty"]
    (rank,) = recorded.read(tmp_path)
    assert "python 0 says hello" in [line.message for line in lines_of(rank.directory)]


def facts_at_a_terminal(tmp_path: Path, attached: str) -> dict[str, object]:
    parent, child = pty.openpty()
    environment = recorded.environment(
        tmp_path, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", RANKSCOPE=attached
    )
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT)], env=environment, stdout=child, stderr=child
    )
    os.close(child)
    text = b""
    while True:
        try:
            text += os.read(parent, 65536)
        except OSError:
            break
    assert process.wait(60) == 0
    os.close(parent)
    facts: dict[str, object] = json.loads(text[text.index(b"{") : text.index(b"}") + 1])
    return facts


@pytest.mark.multiproc
def test_files_of_torchrun_are_read_with_what_c_wrote(tmp_path: Path) -> None:
    receiver = Receiver()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--log-dir", str(tmp_path / "logs"), "--redirects", "3", str(SCRIPT), "fail",
    ]  # fmt: skip
    environment = recorded.environment(
        tmp_path, RANKSCOPE_COLLECTOR="1", RANKSCOPE_SERVER=receiver.url
    )
    done = subprocess.run(command, env=environment, capture_output=True, timeout=180, check=False)
    assert done.returncode == 1
    wait_for(lambda: len(receiver.records(schema.RankEnded)) == 2, 60)
    lines = receiver.records(schema.LogLine)
    for rank in (0, 1):
        texts = [line.message for line in lines if line.rank == rank and line.stream == "stdout"]
        assert f"python {rank} says hello" in texts
        assert f"C {rank} says hello" in texts
        assert len(texts) == len(set(texts))
    (source,) = {r.sources["output"] for r in receiver.records(schema.RankRegistered)}
    assert (
        source == "stdout: its file, read by the collector; stderr: its file, read by the collector"
    )
    errors = [e for e in receiver.records(schema.ErrorRaised) if e.type == "ValueError"]
    assert {error.rank for error in errors} <= {0, 1}
    assert errors
    assert not receiver.losses()
    receiver.close()


def test_under_the_launcher_every_line_comes_once(tmp_path: Path) -> None:
    receiver = Receiver()
    environment = recorded.environment(
        tmp_path, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", RANKSCOPE_COLLECTOR="1"
    )
    for name in ("RANKSCOPE", "RANKSCOPE_RUN_ID", "PYTHONPATH"):
        environment.pop(name)
    done = subprocess.run(
        [sys.executable, "-m", "rankscope", "run", "--server", receiver.url, "--run-id", "test",
         "--", sys.executable, str(SCRIPT)],
        env=environment, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in receiver.records(schema.LogLine) if line.stream in journal.STREAMS]
    texts = [line.message for line in lines]
    for text in ("python 0 says hello", "C 0 says hello", "no line end yet: Bearer ***"):
        assert texts.count(text) == 1
    assert {line.rank for line in lines} == {0}
    registered = receiver.records(schema.RankRegistered)
    assert registered[-1].sources["output"] == "stdout: rankscope run; stderr: rankscope run"
    receiver.close()


class Journal:
    """Takes what a rank would write; `Writes` needs no more of its context than that."""

    def __init__(self) -> None:
        self.recorder = self.journal = self
        self.step = 3
        self.lines: list[str] = []
        self.messages: list[str] = []
        self.drops = 0

    def append(self, kind: int, body: bytes) -> bool:
        assert kind == journal.OUTPUT
        self.lines += body[journal.OUTPUT_HEAD.size :].decode().split("\n")
        return True

    def log_line(self, level: int, message: str, **_: Any) -> None:
        self.messages.append(message)

    def count_drop(self, reason: str) -> None:
        self.drops += 1


def test_writes_of_many_threads_lose_nothing() -> None:
    kept: Any = Journal()
    writes = Writes(kept, "stdout")

    def speak(name: int) -> None:
        for number in range(300):
            writes.take(f"thread {name} line {number}\n")

    threads = [threading.Thread(target=speak, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(kept.lines) == {f"thread {name} line {n}" for name in range(4) for n in range(300)}


@pytest.mark.parametrize(
    ("text", "kept_text"),
    [(" " * journal.MAX_BODY_BYTES, ""), ("word" + " " * journal.MAX_BODY_BYTES + "end", "word")],
)
def test_a_long_write_of_blanks_is_cut_without_an_error(text: str, kept_text: str) -> None:
    kept: Any = Journal()
    guard.failures.clear()
    writes = Writes(kept, "stdout")
    for _ in range(4):  # three failures would switch it off
        writes.take(f"{text}\n")
    writes.take("after\n")
    assert not guard.failures
    assert [line.strip() for line in kept.lines] == [*[kept_text] * 4, "after"]


def test_a_flood_of_writes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: Any = Journal()
    writes = Writes(kept, "stderr")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for _ in range(300):
        writes.take("x" * 9_999 + "\n")
    assert len(kept.lines) == 209  # 2 MiB at once
    assert kept.drops == 91
    now += 1
    writes.take("after\n")
    assert kept.messages == ["suppressed 91 lines of stderr: too many at once"]
    assert kept.lines[-1] == "after"


@pytest.mark.parametrize(
    ("command", "environ", "value"),
    [
        ("torchrun train.py", {}, "inherited"),
        ("torchrun --tee 3 train.py", {}, "files"),
        ("torchrun --tee=0 train.py", {}, "inherited"),
        ("torchrun train.py", {"PET_TEE": "1"}, "files"),
        ("python train.py -t 5", {}, "inherited"),
    ],
)
def test_what_the_launcher_tells(command: str, environ: dict[str, str], value: str) -> None:
    assert tee_variables(command.split(), environ) == {TEE_VARIABLE: value}


def test_the_choice_of_a_source(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        assert source_of(file.fileno(), {}) == "file"
        assert source_of(file.fileno(), {TEE_VARIABLE: "inherited"}) == "file"
        assert source_of(file.fileno(), {TEE_VARIABLE: "files"}) == "launcher"
    reader, writer = os.pipe()
    assert source_of(writer, {}) == "python"
    assert source_of(writer, {TEE_VARIABLE: "inherited"}) == "launcher"
    os.close(reader)
    os.close(writer)
    assert source_of(writer, {}) == "closed"
    with open(os.devnull, "w") as nothing:
        assert source_of(nothing.fileno(), {TEE_VARIABLE: "inherited"}) == "python"


def test_a_followed_file_survives_a_restart_of_the_collector(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.write_text("before us\n")
    outputs = {"files": [{"stream": "stdout", "path": str(log), "offset": 10}]}
    (tmp_path / "outputs.json").write_bytes(json.dumps(outputs).encode())
    texts: list[str] = []

    def forward(body: bytes) -> None:
        record: Any = schema.decode_record(body)
        texts.append(record.message)

    offsets: dict[str, int] = {}
    for part in (
        "one\nTraceback (most recent call last):\n  File",
        ' "x"\nKeyError\ntwo\nthr',
        "ee",
    ):
        with log.open("a") as file:
            file.write(part)
        output = RankOutput(tmp_path, (0, 0), offsets, lambda reason, count: None)
        output.turn(forward, gone=False)
        offsets = output.save()  # and the collector is killed
    output.turn(forward, gone=True)
    assert texts == [
        "one",
        'Traceback (most recent call last):\n  File "x"\nKeyError',
        "two",
        "three",
    ]


class Following:
    """The output of a rank whose only file is `log`."""

    def __init__(self, directory: Path, log: Path | str) -> None:
        outputs = {"files": [{"stream": "stdout", "path": str(log)}], "error_file": str(log)}
        (directory / "outputs.json").write_text(json.dumps(outputs))
        self.texts: list[str] = []
        self.events: list[tuple[str, dict[str, str]]] = []
        self.output = RankOutput(
            directory, (0, 0), {}, lambda reason, count: None,
            lambda *event: self.events.append(event),
        )  # fmt: skip

    def turn(self) -> None:
        self.output.begin(self._forward)
        self.output.turn(self._forward, gone=False)

    def _forward(self, body: bytes) -> None:
        record: Any = schema.decode_record(body)
        self.texts.append(record.message)


def test_a_file_that_is_renamed_and_deleted_is_followed_as_its_rank_writes_on(
    tmp_path: Path,
) -> None:
    log = tmp_path / "out.log"
    with log.open("w", buffering=1) as file:
        following = Following(tmp_path, log)
        file.write("one\n")
        following.turn()
        log.rename(tmp_path / "out.log.1")
        log.write_text("of another process\n")
        file.write("two\n")
        following.turn()
        (tmp_path / "out.log.1").unlink()
        file.write("three\n")
        following.turn()
    assert following.texts == ["one", "two", "three"]
    ((name, fields),) = following.events
    assert (name, fields["file"]) == ("output file moved", str(log))
    following.output.close()


@pytest.mark.parametrize("kind", ["pipe", "folder", "/dev/stdout", "/proc/self/fd/1", "/dev/tty"])
def test_what_is_no_file_is_left_alone_and_said_once(tmp_path: Path, kind: str) -> None:
    path = kind if kind.startswith("/") else str(tmp_path / kind)
    if kind == "pipe":
        os.mkfifo(path)
    if kind == "folder":
        os.mkdir(path)
    following = Following(tmp_path, path)
    for _ in range(3):
        following.turn()
    assert following.output.error(1) is None
    assert following.texts == []
    ((name, fields),) = following.events
    assert (name, fields["file"]) == ("output not followed", path)


def test_a_pipe_in_the_place_of_a_followed_file_makes_nothing_wait(tmp_path: Path) -> None:
    log = tmp_path / "out.log"
    log.write_text("one\n")
    following = Following(tmp_path, log)
    following.turn()
    log.unlink()
    os.mkfifo(log)
    following.turn()
    assert following.texts == ["one"]
    following.output.close()


def test_what_is_printed_after_the_journal_was_read_waits_for_the_next_turn(
    tmp_path: Path,
) -> None:
    """Else a print comes before the record of which it is a copy."""
    log = tmp_path / "out.log"
    log.write_text("one\n")
    following = Following(tmp_path, log)
    following.output.begin(following._forward)
    with log.open("a") as file:
        file.write("two\n")
    following.output.turn(following._forward, gone=False)
    assert following.texts == ["one"]
    following.turn()
    assert following.texts == ["one", "two"]
    following.output.close()


@pytest.mark.parametrize("path", ["/dev/stdout", "/proc/self/fd/2", "/dev/shm/nccl"])
def test_a_stream_by_its_name_is_no_file_of_nccl(tmp_path: Path, path: str) -> None:
    more = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "NCCL_DEBUG_FILE": path}
    assert recorded.run(tmp_path, "prints.py", "fail", **more).returncode == 1
    (rank,) = recorded.read(tmp_path)
    files = json.loads((rank.directory / "outputs.json").read_text())["files"]
    found = [file["path"] for file in files if file.get("logger") == "nccl"]
    assert found == ([path] if path == "/dev/shm/nccl" else [])


def test_files_that_variables_name(tmp_path: Path) -> None:
    more = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    own_error = tmp_path / "error.json"
    more |= {
        "NCCL_DEBUG_FILE": str(tmp_path / "nccl.%h.%p"),
        "TORCHELASTIC_ERROR_FILE": str(own_error),
    }
    done = recorded.run(tmp_path, "prints.py", "fail", **more)
    assert done.returncode == 1
    (rank,) = recorded.read(tmp_path)
    pid = rank.directory.name.split(".")[1]
    (tmp_path / f"nccl.{socket.gethostname()}.{pid}").write_text("node7:1:1 [0] NCCL WARN bad\n")
    (line,) = [line for line in lines_of(rank.directory) if line.logger == "nccl"]
    assert (line.message, line.level, line.rank) == ("node7:1:1 [0] NCCL WARN bad", 30, 0)
    # torch's own handler wrote the other one
    output = RankOutput(rank.directory, (0, 0), {}, lambda reason, count: None)
    output.turn(lambda body: None, gone=True)
    error = output.error(step=3)
    assert error is not None
    assert (error.type, error.message, error.step) == ("ValueError", "the end", 3)
    assert "prints.py" in error.traceback


def test_no_secret_reaches_a_file(tmp_path: Path) -> None:
    secret = "hf_" + "Zz9" * 12
    done = recorded.run(
        tmp_path, "tells_secrets.py", f"--hub-token={secret}", f"s3://u:{secret}@h",
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", PLANTED=secret, NCCL_COMMENT=secret,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count(secret) >= 5  # the script's own output is its own
    (rank,) = recorded.read(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 4
    for path in files:
        assert b"Zz9Zz9" not in path.read_bytes(), path
    texts = [line.message.splitlines()[0] for line in rank.of(schema.LogLine)]
    assert {"argument ***", "with traceback", "UserWarning: warned of ***"} <= set(texts)
    assert {error.message for error in rank.of(schema.ErrorRaised)} == {
        "in a thread: ***", "the end: ***",
    }  # fmt: skip
    assert rank.of(schema.RunStarted)[0].command[-2:] == ["--hub-token=***", "s3://u:***@h"]
    assert rank.of(schema.Environment)[0].facts["env.NCCL_COMMENT"] == "***"


@pytest.mark.parametrize(("hooks", "count"), [("exceptions", 1), ("all", 1)])
def test_the_handler_for_those_who_switch_the_hook_off(
    tmp_path: Path, hooks: str, count: int
) -> None:
    recorded.run(
        tmp_path, "tells_secrets.py", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", PLANTED="x",
        HANDLER="1", RANKSCOPE_HOOKS=hooks,
    )  # fmt: skip
    (rank,) = recorded.read(tmp_path)
    lines = rank.of(schema.LogLine)
    kept = [line for line in lines if line.message == "kept by the handler too"]
    assert len(kept) == count
    assert kept[0].fields == {"where": "https://u:***@h/"}
    assert any(line.message.startswith("argument") for line in lines) == (hooks == "all")


def test_damaged_frames_and_files_are_ignored(tmp_path: Path) -> None:
    output = RankOutput(tmp_path, (0, 0), {}, lambda reason, count: None)
    output.frame(b"short")
    output.frame(journal.OUTPUT_HEAD.pack(1, 1, 9) + b"of no stream")
    for text in ("", "[]", '{"files": 3}', '{"files": [{"stream": "x", "path": "/none"}]}'):
        (tmp_path / "outputs.json").write_text(text)
        assert not output.turn(lambda body: None, gone=True)
    assert output.error(1) is None
