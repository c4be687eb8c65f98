"""The hooks in real processes: what a script does is what the record says, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.files import ring
from rankscope.files.run_directory import COLLECTIVES_RING, STACKS
from rankscope.process import family
from rankscope.rank.attach import start
from rankscope.wire import schema
from tests.agent import recorded
from tests.matrix.launch import torch_version

pytestmark = pytest.mark.core


@pytest.mark.multiproc
def test_every_path_to_a_collective(tmp_path: Path) -> None:
    done = recorded.run(tmp_path, "every_path.py", str(tmp_path / "store"), ranks=2)
    assert done.returncode == 0, done.stderr
    assert "rankscope:" not in done.stderr
    assert done.stdout.count("USER SAW") == 2
    first, second = recorded.read(tmp_path)
    for rank in (first, second):
        seen = rank.operations()
        assert seen["broadcast"] >= 1  # DDP's constructor adds some of its own
        expected = {
            "all_reduce": 8,  # 6 as numbered in the script, one in a subgroup, one in a new world
            "reduce_scatter_tensor": 1,
            "all_to_all_single": 1,
            "reduce": 1,
            "gather": 1,
            "scatter": 1,
            "barrier": 1,
            # one of them refused by the backend; all_gather_object has two of its own since 2.15
            "all_gather_into_tensor": 4 if torch_version() >= (2, 15) else 2,
        }
        assert {name: seen[name] for name in expected} == expected
        p2p = seen["send"] + seen["recv"]
        assert p2p == 3
        all_reduces = rank.collectives[
            rank.collectives["operation"] == schema.OPERATIONS.index("all_reduce")
        ]
        assert sorted(all_reduces["input_bytes"].tolist()) == [40, *[4000] * 6, 40400]
        assert set(rank.groups.values()) == {"0", "1", "0#2"}
    _check_states(first)
    _check_sequences(first, second)
    assert any(site.endswith("<module>") for site in first.call_sites.values())
    assert not any("/torch/" in site for site in first.call_sites.values())


@pytest.mark.multiproc
def test_kernels_know_each_reduce_op_and_each_wait(tmp_path: Path) -> None:
    done = recorded.run(tmp_path, "ops_and_waits.py", RANKSCOPE_COLLECTIVES="kernels")
    assert done.returncode == 0, done.stderr
    assert "rankscope:" not in done.stderr
    (rank,) = recorded.read(tmp_path)
    ops = [schema.REDUCE_OPS[number] for number in rank.collectives["reduce_op"]]
    expected = ["sum", "max", "sum", "min", "max", "product", "min", *["sum"] * 4]
    unreadable = torch_version() in ((2, 6), (2, 9))
    assert ops == ([schema.REDUCE_OPS[0]] * len(expected) if unreadable else expected)
    assert (rank.collectives["blocked_ns"] > 0).all()


def _check_states(rank: recorded.Recorded) -> None:
    for slot in rank.collectives:
        operation = schema.OPERATIONS[slot["operation"]]
        assert slot["state"] in (schema.ENDED, schema.FAILED), operation
        assert slot["arrived_ns"] <= slot["ended_ns"], operation
    failed = rank.collectives[rank.collectives["state"] == schema.FAILED]
    assert [schema.OPERATIONS[number] for number in failed["operation"]] == [
        "all_gather_into_tensor"
    ]


def _check_sequences(first: recorded.Recorded, second: recorded.Recorded) -> None:
    """Both ranks number the collectives of a group alike, and without gaps."""
    keys = []
    for rank in (first, second):
        collectives = rank.collectives[(rank.collectives["flags"] & schema.FLAG_P2P) == 0]
        keys.append([
            (rank.groups[slot["group_id"]], slot["sequence"], slot["operation"])
            for slot in collectives
        ])  # fmt: skip
    assert keys[0] == keys[1]
    assert [sequence for group, sequence, _ in keys[0] if group == "1"] == [1]
    of_world = [sequence for group, sequence, _ in keys[0] if group == "0"]
    assert of_world == list(range(1, len(of_world) + 1))


@pytest.mark.multiproc
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_only_the_rank_records_not_its_children(tmp_path: Path, context: str) -> None:
    done = recorded.run(tmp_path, "children.py", context)
    assert done.returncode == 0, done.stderr
    assert "rankscope:" not in done.stderr
    (alone,) = recorded.read(tmp_path)
    assert alone.rank == 0
    assert [step["step"] for step in alone.steps] == [1, 2, 3, 4, 5, 6]
    assert alone.ended == ring.CLEAN
    assert (alone.steps["data_ns"] > 0).all()
    assert len(alone.of(schema.Environment)) == 1
    facts = alone.of(schema.Environment)[0].facts
    assert facts["torch"].startswith("2.")


def test_os_exit_keeps_what_was_recorded(tmp_path: Path) -> None:
    done = recorded.run(tmp_path, "children.py", "fork", "7")
    assert done.returncode == 7
    (alone,) = recorded.read(tmp_path)
    assert len(alone.steps) == 6
    assert alone.ended == ring.RUNNING  # nobody could say it; the collector sees exit code 7


def test_logs_warnings_and_exceptions(tmp_path: Path) -> None:
    more = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = recorded.run(tmp_path, "speaks.py", **more)
    assert done.returncode == 1
    # the user's own output is as without the agent: basicConfig worked, the traceback is there
    plain = recorded.run(tmp_path / "plain", "speaks.py", RANKSCOPE="0", **more)
    assert _without_addresses(done.stderr) == _without_addresses(plain.stderr)
    assert "FORMAT hello there" in done.stderr
    (rank,) = recorded.read(tmp_path)
    lines = {line.message.splitlines()[0]: line for line in rank.of(schema.LogLine)}
    assert set(lines) == {"hello there", "it broke", "UserWarning: careful"}
    assert "KeyError: 'inner'" in lines["it broke"].message
    assert lines["it broke"].level == 40
    errors = [(error.type, error.message, error.where) for error in rank.of(schema.ErrorRaised)]
    assert errors == [
        ("OSError", "thread trouble", "thread"),
        ("ValueError", "the end: ü", "main"),
    ]
    assert rank.of(schema.ErrorRaised)[1].step == 4
    assert rank.ended == ring.EXCEPTION


def test_an_exception_before_training_is_in_no_step(tmp_path: Path) -> None:
    more = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    steps = {}
    for script in ("fails_early.py", "speaks.py"):
        assert recorded.run(tmp_path / script, script, **more).returncode == 1
        (rank,) = recorded.read(tmp_path / script)
        assert rank.ended == ring.EXCEPTION
        reader = ring.RingReader(rank.directory / COLLECTIVES_RING, ring.COLLECTIVE_FIELDS)
        steps[script] = reader.u64(ring.STEP_AT), rank.of(schema.ErrorRaised)[-1].step
    assert steps == {"fails_early.py": (0, 0), "speaks.py": (4, 4)}


def test_a_warning_names_whom_it_names_without_us(tmp_path: Path) -> None:
    plain, attached = (
        recorded.run(tmp_path / said, "warns.py", RANKSCOPE=said).stdout for said in ("0", "1")
    )
    assert attached == plain
    assert plain.count("warns.py:") >= 4
    assert recorded.read(tmp_path / "1")[0].ended == ring.CLEAN


def test_floods_and_what_cannot_be_said(tmp_path: Path) -> None:
    more = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    done = recorded.run(tmp_path, "floods.py", **more)
    assert done.returncode == 0
    assert "rankscope:" not in done.stderr
    (rank,) = recorded.read(tmp_path)
    lines = rank.of(schema.LogLine)
    texts = [line.message for line in lines]
    assert texts.count("not formatted %s (not formatted)") == 5
    assert texts.count("too few %s %s (not formatted)") == 5
    assert "an error in the flood, password=***" in texts
    told = [line for line in lines if line.stream == "agent"]
    flood = [text for text in texts if text.startswith("flood ")]
    assert 1000 <= len(flood) < 13_345
    suppressed = sum(int(line.fields["suppressed"]) for line in told)
    assert suppressed == 13_345 - len(flood)
    assert told[-1].message.endswith(" similar lines: flood %d")
    (fields,) = [line.fields for line in lines if line.message == "fields"]
    assert fields == {
        "epoch": "3", "tags": "[a, {b: 2}]", "tensor": "<builtins.object>", "token": "***",
    }  # fmt: skip
    (unraisable,) = [line for line in lines if line.logger == "py.unraisable"]
    assert "OSError: in a finalizer" in unraisable.message
    assert unraisable.level == 40


def _without_addresses(text: str) -> list[str]:
    return [line for line in text.splitlines() if "Thread-" not in line]


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("RANKSCOPE_HOOKS", "collektives", "there are: exceptions, stacks"),
        ("RANKSCOPE_STEP_SLOTS", "lots", "expected int"),
    ],
)
def test_a_bad_setting_is_one_line_and_training_goes_on(
    tmp_path: Path, variable: str, value: str, words: str
) -> None:
    done = recorded.run(tmp_path, "children.py", "fork", **{variable: value})
    assert done.returncode == 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("rankscope:")]
    assert len(lines) == 1
    assert words in lines[0]
    assert not recorded.read(tmp_path)


def test_an_unwritable_directory_costs_the_record_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = recorded.run(tmp_path, "children.py", "fork", RANKSCOPE_DIR=str(tmp_path / "file"))
    assert done.returncode == 0
    assert done.stderr.count("records nothing") == 1


def test_the_users_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import os; os.environ['OWN'] = 'ran'\n")
    path = f"{recorded.SITE}:{tmp_path / 'own'}"
    done = subprocess.run(
        [sys.executable, "-c", "import os, torch, rankscope.rank.attach.start as s; "
         "print(os.environ['OWN'], s.agent() is not None)"],
        env=recorded.environment(tmp_path, PYTHONPATH=path),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["ran", "True"]


def test_a_source_that_cannot_work_here_is_registered_with_its_reason(tmp_path: Path) -> None:
    if torch_version() >= (2, 14):
        pytest.skip("this PyTorch has the hooks of the official source")
    done = recorded.run(
        tmp_path, "steps_and_collectives.py", "0.1", ranks=1, RANKSCOPE_COLLECTIVES="official"
    )
    assert done.returncode == 0, done.stderr
    (rank,) = recorded.read(tmp_path)
    said = rank.of(schema.RankRegistered)[-1].sources["collectives"]
    assert said.startswith("skipped: official: this PyTorch has no hooks")


@pytest.mark.parametrize(
    ("said", "is_on"),
    [("1", True), ("true", True), (" Yes ", True), ("on", True), ("0", False), ("off", False),
     ("No", False), ("", False), ("enable", False)],
)  # fmt: skip
def test_what_switches_it_on(said: str, is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waits_for: list[str] = []
    monkeypatch.setenv("RANKSCOPE", said)
    monkeypatch.setattr(start, "_tried", False)
    monkeypatch.setattr(start, "_is_our_own", lambda _: False)
    monkeypatch.setattr(start, "name_family", lambda _: None)
    monkeypatch.setattr(start, "is_rank", lambda _: False)
    monkeypatch.setattr(start, "when_imported", lambda name, _: waits_for.append(name))
    monkeypatch.delenv(family.ATTACHED, raising=False)
    start.attach_from_environment()
    assert waits_for == ["torch"] * is_on


@pytest.mark.parametrize(("said", "is_on"), [("Yes", True), ("enable", False)])
def test_who_never_imports_torch_pays_nothing(tmp_path: Path, said: str, is_on: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import rankscope.rank.attach.start as s; print(s.agent()); "
         "import torch; print(s.agent() is not None)"],
        env=recorded.environment(tmp_path, RANKSCOPE=said), capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == f"None\n{is_on}\n"
    why = "rankscope: not attached: RANKSCOPE='enable': set 1 or 0\n"
    assert done.stderr == (why if said == "enable" else "")


def test_a_tool_that_a_rank_starts_pays_nothing(tmp_path: Path) -> None:
    environ = recorded.environment(tmp_path, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    code = "import sys; print('rankscope.rank.runtime' in sys.modules)"
    for attached, loads in (("", True), ("1", False)):  # by a rank that has the number 1
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ | {family.ATTACHED: attached},
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert done.stdout == f"{loads}\n"


def test_numbers_that_the_script_closes_and_uses_are_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    done = recorded.run(tmp_path / "run", "closes_numbers.py", str(tmp_path / "own"), launched=True)
    assert done.returncode == 0, done.stderr
    written = [(tmp_path / "own" / f"user{number}").read_bytes() for number in range(8)]
    assert written == [b"weights"] * 8
    (rank,) = recorded.read(tmp_path / "run")
    assert [line.message for line in rank.of(schema.LogLine)] == ["hello from the user"]
    assert "closes_numbers.py" in (rank.directory / STACKS).read_text()


def test_the_start_fails_for_settings_only(tmp_path: Path) -> None:
    """Without a collector, and with an argument that is no UTF-8."""
    (tmp_path / "test" / "node" / "collector.log").mkdir(parents=True)  # cannot be opened
    code = "import rankscope; rankscope.init(); print('started')"
    environ = recorded.environment(tmp_path, RANKSCOPE="0", RANKSCOPE_COLLECTOR="1")
    environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    done = subprocess.run(
        [os.fsencode(sys.executable), b"-c", code.encode(), b"\xff\xfe.yaml"], env=environ,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("started\n", "")
    (rank,) = recorded.read(tmp_path)
    (started,) = rank.of(schema.RunStarted)
    assert started.command[-1] == "??.yaml"
    (event,) = [event for event in rank.of(schema.Event) if event.name == "no collector"]
    assert "collector.log" in event.fields["reason"]
