"""The command behind `make test`: what it counts, what it says, how it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import capabilities, outcomes, run
from tests.lanes import LEFT_OUT
from tests.outcomes import Outcome
from tests.run import Check, Group

TESTS = """
import os, pytest, time

def test_right(): time.sleep(1)

def test_wrong(): assert 1 == 2

def test_left_out(): pytest.skip("the moon is full")

@pytest.fixture
def breaks():
    yield
    raise RuntimeError("too late")

def test_right_until_its_end(breaks): pass

@pytest.mark.xfail(strict=True)
def test_known_to_be_wrong(): assert 1 == 2

@pytest.mark.parametrize("number", range(3))
def test_many(number): assert number < 2
"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "test_some.py"
    path.write_text(TESTS)
    return path


def states(found: list[Outcome]) -> dict[str, str]:
    return {outcome.name.rpartition("::")[2]: outcome.state for outcome in found}


def group(*words: object) -> list[Outcome]:
    return run.run_group(Group("some", ("-q", *map(str, words)), root=Path("/")))


@pytest.mark.parametrize(
    "lanes", [(), ("-p", "tests.lanes", "--lanes", "2")], ids=("alone", "lanes")
)
def test_every_test_is_counted_once_and_its_worst_end_holds(
    written: Path, lanes: tuple[str, ...]
) -> None:
    found = group(*lanes, written)
    assert states(found) == {
        "test_right": "passed", "test_wrong": "failed", "test_left_out": "skipped",
        "test_right_until_its_end": "failed", "test_known_to_be_wrong": "passed",
        "test_many[0]": "passed", "test_many[1]": "passed", "test_many[2]": "failed",
    }  # fmt: skip
    assert run.closing(found) == "4 passed, 3 failed, 1 skipped"
    assert "     1  the moon is full\n" in run.summary(found)
    slowest = [line for line in run.summary(found).splitlines() if line.startswith("     1  ")]
    assert slowest[0].endswith("::test_right")
    assert any(line.endswith(written.name) for line in run.summary(found).splitlines())
    assert run.summary(found).endswith("\n\n4 passed, 3 failed, 1 skipped")


@pytest.mark.parametrize("is_beside", [False, True])
def test_what_is_compiled_is_kept(monkeypatch: pytest.MonkeyPatch, *, is_beside: bool) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    program = "import sys; sys.exit(sys.dont_write_bytecode)"
    check = Check("keeps", (sys.executable, "-c", program))
    assert run.run_check(check, is_beside=is_beside) == [Outcome("keeps", "passed")]


UNSTEADY = """
import pathlib
import pytest

@pytest.mark.parametrize("number", range({count}), ids="http://name/{{}}/".format)
def test_it(number):
    told = pathlib.Path(__file__).with_name(str(number))
    has_run, _ = told.exists(), told.touch()
    assert has_run

def test_right(): pass
"""


def test_a_test_that_passes_alone_is_unsteady_and_told_so(written: Path) -> None:
    written.write_text(UNSTEADY.format(count=3))
    found = group(written)
    assert run.closing(found) == "4 passed, 0 failed, 0 skipped"
    assert "Unsteady (failed, then passed alone; find out why):\n  " in run.summary(found)
    assert [outcome.is_unsteady for outcome in found] == [True, True, True, False]


def test_many_failures_are_no_accident(written: Path) -> None:
    written.write_text(UNSTEADY.format(count=4))
    assert run.closing(group(written)) == "1 passed, 4 failed, 0 skipped"


def test_a_group_that_dies_keeps_what_it_knew_and_fails(written: Path) -> None:
    written.write_text("import os\ndef test_a(): pass\ndef test_b(): os._exit(0)\n")
    found = group(written)
    assert states(found) == {"test_a": "passed", "some": "failed"}


LANES = """
import os, time, pathlib, pytest

def note(what): open(pathlib.Path(__file__).with_name("notes"), "a").write(f"{what}\\n")

@pytest.mark.parametrize("number", range(4))
def test_run(number): time.sleep(0.2); note("run")

def test_dies(): os._exit(3)

@pytest.fixture(scope="module")
def shared(): return os.getpid()

@pytest.mark.parametrize("number", range(3))
def test_shares(shared, number): assert shared == os.getpid()

@pytest.mark.together("pair")
def test_one(): note(f"pair {os.getpid()}")

@pytest.mark.together("pair")
def test_other(): note(f"pair {os.getpid()}")

@pytest.mark.quiet
@pytest.mark.parametrize("number", range(2))
def test_quiet(number): note("quiet")

@pytest.mark.alone
def test_alone(): note("alone")
"""


def test_lanes_keep_together_and_apart_what_asks_for_it(written: Path) -> None:
    written.write_text(LANES)
    found = group("-p", "tests.lanes", "--lanes", "3", written)
    assert states(found) == dict.fromkeys(states(found), "passed") | {"test_dies": "failed"}
    assert len(found) == 13
    notes = written.with_name("notes").read_text().split("\n")[:-1]
    pair = {note for note in notes if note.startswith("pair")}
    assert len(pair) == 1
    order = [note for note in notes if not note.startswith("pair")]
    assert order == ["run"] * 4 + ["quiet"] * 2 + ["alone"]


LONG = """
import pytest

@pytest.mark.multiproc
@pytest.mark.parametrize("number", range(3))
def test_long(number): pass

@pytest.mark.multiproc
@pytest.mark.core
def test_core(): pass

@pytest.mark.browser
def test_pages(): pass

@pytest.mark.alone
@pytest.mark.core
def test_alone(): pass

def test_short(): pass
"""


def test_what_is_long_is_left_out_when_the_time_is_over_and_says_so(written: Path) -> None:
    written.write_text(LONG)
    over = group("-p", "tests.lanes", "--lanes", "2", "--minutes", "1e-6", written)
    left_out = {outcome.name.rpartition("::")[2] for outcome in over if outcome.reason == LEFT_OUT}
    assert left_out == {"test_long[0]", "test_long[1]", "test_long[2]", "test_pages"}
    assert run.closing(over) == "3 passed, 0 failed, 4 skipped"
    assert f"     4  {LEFT_OUT}\n          make test-all" in run.summary(over)
    for minutes in ("0", "5"):
        all_of_them = group("-p", "tests.lanes", "--lanes", "2", "--minutes", minutes, written)
        assert run.closing(all_of_them) == "7 passed, 0 failed, 0 skipped"


def test_all_tests_resume_with_what_did_not_pass(written: Path, tmp_path: Path) -> None:
    source = UNSTEADY.format(count=4)
    written.write_text(source)
    kept = Group("some", ("-q", str(written)), root=Path("/"), kept=tmp_path / "kept" / "it.jsonl")
    assert run.closing(run.run_group(kept)) == "1 passed, 4 failed, 0 skipped"
    written.write_text(source.replace("def test_right(): pass", "def test_right(): assert 0"))
    assert run.closing(run.run_group(kept)) == "5 passed, 0 failed, 0 skipped"
    assert run.closing(run.run_group(kept)) == "5 passed, 0 failed, 0 skipped"  # nothing is left


def test_a_group_without_tests_fails(written: Path) -> None:
    assert states(group(written, "-k", "nothing_is_called_so")) == {"some": "failed"}


def test_a_file_that_cannot_be_imported_fails(written: Path) -> None:
    written.write_text("import no_such_module_anywhere\n")
    (found,) = group(written)
    assert (found.state, found.reason) == ("failed", "it cannot be collected")


def test_checks_and_groups_run_whatever_became_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    monkeypatch.setattr(run, "CHECKS", (Check("bad", ("false",)), Check("good", ("true",))))
    groups = []
    for number in range(2):
        path = tmp_path / f"test_{number}.py"
        path.write_text(f"def test_it(): open({str(ran)!r}, 'a').write('x'); assert {number}\n")
        groups.append(Group(path.name, ("-q", str(path)), root=Path("/")))
    monkeypatch.setattr(run, "groups", lambda _: groups)
    monkeypatch.setattr(run, "CLOSING", tmp_path / "artifacts" / "closing")
    monkeypatch.setattr(sys, "argv", ["run", "test"])
    assert run.main() == 1
    assert ran.read_text() == "xxx"  # what failed had its second chance
    assert capsys.readouterr().out.splitlines()[-1] == "2 passed, 2 failed, 0 skipped"
    assert run.CLOSING.read_text() == "2 passed, 2 failed, 0 skipped\n"


def missing(name: str, **more: object) -> capabilities.Capability:
    return capabilities.Capability(name, "", (), lambda: f"there is no {name}", **more)  # type: ignore[arg-type]


def test_what_must_be_there_fails_where_the_rest_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rest, must = missing("rest", remedy="make rest"), missing("must", in_ci=True)
    monkeypatch.setattr(capabilities, "CAPABILITIES", (rest, must))
    monkeypatch.setattr(capabilities, "BY_NAME", {"rest": rest, "must": must})
    for asked in ("ci", "must"):
        monkeypatch.setenv(capabilities.REQUIRE, asked)
        (skipped,) = run.run_check(Check("a", ("false",), needs=("rest",)))
        (failed,) = run.run_check(Check("b", ("true",), needs=("must",)))
        assert (skipped.state, failed.state) == ("skipped", "failed")
        with pytest.raises(pytest.skip.Exception, match="needs rest: there is no rest"):
            capabilities.need("rest")
        with pytest.raises(pytest.fail.Exception, match="needs must: there is no must"):
            capabilities.need("must")
    monkeypatch.delenv(capabilities.REQUIRE)
    with pytest.raises(pytest.skip.Exception, match="needs must"):
        capabilities.need("must")
    assert "     1  needs rest: there is no rest\n          make rest\n" in run.summary([skipped])
    monkeypatch.setenv(capabilities.REQUIRE, "mist")
    with pytest.raises(ValueError, match="mist"):
        capabilities.required()


def test_packages_are_those_of_commands_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(capabilities, "search_path", lambda: str(tmp_path))
    capability = capabilities.Capability("x", "", ("cc", "c++", "ip", "tc", "node"))
    assert capability.missing() == "command not found: cc, c++, ip, tc, node"
    assert capability.enable() == "sudo apt-get install gcc g++ iproute2"
    for name in capability.tools:
        (tmp_path / name).touch(0o755)
    assert capability.missing_packages() == ()


@pytest.mark.parametrize("capability", capabilities.CAPABILITIES, ids=lambda c: c.name)
def test_a_capability_that_is_missing_has_a_command(
    capability: capabilities.Capability, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if capability.name != "ordinary-user":
        assert capability.tools or capability.remedy or capability.packages
    monkeypatch.setattr(capabilities, "search_path", lambda: str(tmp_path))
    assert not capability.tools or capability.enable()


def test_the_systems_python_can_run_it_before_anything_is_installed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-E", capabilities.__file__, "packages"], cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_file_that_was_never_begun_is_no_success(tmp_path: Path) -> None:
    assert outcomes.read(tmp_path / "none") == ([], False)
