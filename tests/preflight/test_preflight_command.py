"""`rankscope preflight` as people type it: usage, help, list, merge; no network is used here."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rankscope.cli import main
from rankscope.cli.preflight_options import add_options, request_of
from rankscope.preflight.checks import CHECKS
from rankscope.preflight.exchange.discover import Discovery
from rankscope.preflight.model import decode_report, encode
from rankscope.preflight.options import Options
from rankscope.preflight.plan import Request
from rankscope.preflight.transports import _words
from tests.preflight.report import cases


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run the command in this process; return exit code, stdout and stderr."""
    try:
        code = main(["preflight", *words])
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("words", "named", "remedy"),
    [
        (("--wait", "soon"), "--wait", "write 30 or 0.5"),
        (("--wait", "-1"), "--wait", "write 30 or 0.5"),
        (("--timeout", "nan"), "--timeout", "write 30 or 0.5"),
        (("--expect-gbps", "fast"), "--expect-gbps", "write 10 or 2.5"),
        (("--master-port", "70000"), "--master-port", "write 1 to 65535"),
        (("--nproc", "-3"), "--nproc", "write 0, 1, 2"),
        (("--backend", "mpi"), "--backend", "gloo"),
        (("--ssh",), "--ssh: it is not known which other nodes", "add --nodes or --hostfile"),
        (("--emit", "--ssh", "--nodes", "a,b"), "--emit uses no network", "leave one of them out"),
        (("--nodes", ""), "--nodes", "write node0,node1"),
        (("--nodes", "node[3-1]"), "--nodes", "node[0-7]"),
        (("--nodes", "a,a"), "--nodes", "twice: name each node once"),
        (("--nodes", "node[0-2] node1"), "node1 is in the list twice", "name each node once"),
        (("--nodes", "a", "b", "c"), "--nodes: b is no program", "write --nodes a,b,c"),
        (("--nodes", "localhost,b"), "localhost", "the name by which the others reach"),
        (("--nodes", f"a,{'b' * 64}"), "--nodes: 'bbb", "63 are the most"),
        (("--nodes", ".a,b"), "'.a' is no host name", "write node0,node1"),
        (("--nodes", "a..b,c"), "nothing between two dots", "write node0,node1"),
        (("--nodes", "a:29500,b"), "'a:29500'", "--master-port"),
        (("--nodes", "a,b", "--node", "c"), "--node c", "a, b"),
        (("--hostfile", "/absent"), "--hostfile", "cannot be read"),
        (("--only", "port.mastr.free"), "--only", "did you mean port.master.free"),
        (("--skip", "nonsense"), "--skip", "preflight --list"),
        (("--json", "-", "--junit", "-"), "--json and --junit", "give one of them a file"),
        (("merge",), "merge", "merge FILE"),
        (("merge", "/absent.json"), "/absent.json", "No such file"),
        (("--no-such",), "--no-such", "--help"),
        (("quick",), "quick is no program", "write --quick"),
        (("ports",), "ports is no program", "write --only ports"),
    ],
)  # fmt: skip
def test_wrong_usage_names_the_option_and_the_remedy(
    words: tuple[str, ...], named: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "port.master" in remedy and not any(one.id == "port.master.free" for one in CHECKS):
        pytest.skip("this check is not there")
    code, out, err = told(capsys, *words)
    assert code == 64
    if "--json" in words:
        assert named in json.loads(out)["error"]
    else:
        assert out == ""
    assert named in err
    assert remedy in err
    assert "Try: rankscope preflight --help" in err


def test_help_begins_with_what_it_is_for_and_has_examples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = told(capsys, "--help")
    assert code == 0
    assert out.index("Examples:") < out.index("--nodes LIST")
    assert "Exit codes:" in out


def test_the_list_names_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "--list")
    assert code == 0
    for check in CHECKS:
        assert check.id in out
    code, out, _ = told(capsys, "--list", "--markdown")
    assert out.count("\n| `") == len(CHECKS)


def asked(*words: str) -> Request:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return request_of(parser.parse_args(words))


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--quick",),
        ("--deep", "--nproc", "8", "--backend", "gloo", "--only", "clock,port.oneway"),
        ("--skip", "gpu", "--expect-gbps", "2.5", "--loader-workers", "4", "--wait", "12.5"),
        ("--checkpoint-dir", "/a b", "--ckpt-gb", "10", "--script", "x y.py", "--data-dir", "/d"),
        ("--master-addr", "node0", "--master-port", "29501", "--timeout", "40"),
    ],
)  # fmt: skip
def test_agents_that_are_started_over_ssh_are_asked_the_same(words: tuple[str, ...]) -> None:
    here = asked("--nodes", "a,b", *words)
    there = asked(*_words(here, Discovery(nodes=("a", "b"), me="a")), "--node", "b")
    assert there.options == here.options
    assert there.who.nodes == here.who.nodes
    assert (there.wait_s, there.timeout_s) == (here.wait_s, here.timeout_s)
    assert there.who.master_addr == here.who.master_addr
    assert there.who.master_port == here.who.master_port


def test_every_option_of_the_checks_is_forwarded() -> None:
    names = {"num_loader_workers": "loader-workers", "checkpoint_gb": "ckpt-gb", "tier": "deep"}
    odd = Options(
        tier="deep", backend="gloo", nproc=3, num_loader_workers=3, expect_gbps=3.0,
        checkpoint_dir="c", checkpoint_gb=3.0, script="s", data_dir="d", only=("x",), skip=("y",),
    )  # fmt: skip
    words = set(_words(Request(options=odd), Discovery(nodes=("a",))))
    for field in Options.__struct_fields__:
        assert f"--{names.get(field, field).replace('_', '-')}" in words


@pytest.mark.parametrize(
    ("words", "named", "remedy"),
    [
        (("--share", "/absent/dir", "--nodes", "a,b", "--node", "a"), "--share", "all nodes see"),
        (("--server", "http://127.0.0.1:1", "--nodes", "a,b", "--node", "a"), "--server", "--run"),
        (("--server", "ftp://127.0.0.1", "--run", "7"), "--server", "http"),
        (("--ssh", "--nodes", "a,b", "--node", "a", "--", "torchrun"), "--ssh", "--nproc"),
    ],
)  # fmt: skip
def test_a_way_that_cannot_be_gone_is_refused_at_once(
    words: tuple[str, ...], named: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = told(capsys, *words)
    assert code == 64
    assert named in err
    assert remedy in err


def lines(names: tuple[str, ...] = cases.THREE, **more: object) -> bytes:
    reports = cases.reports(names, **more)  # type: ignore[arg-type]
    return b"".join(encode(report) + b"\n" for report in reports.values())


def test_merge_judges_reports_that_travelled_as_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all.jsonl"
    labelled = b"".join(b"%d: " % n + line for n, line in enumerate(lines().splitlines(True)))
    path.write_bytes(labelled)  # as srun --label prints them
    code, out, _ = told(capsys, "merge", str(path), "--json", "-")
    document = json.loads(out)
    assert document["exit_code"] == code
    assert document["verdict"]["expected"] == list(cases.THREE)
    assert document["verdict"]["reported"] == list(cases.THREE)

    path.write_text(out)  # what --json wrote is read as well
    code_again, out, _ = told(capsys, "merge", str(path), "--json")  # as in every other command
    assert code_again == code
    again = json.loads(out)
    assert again["reports"] == document["reports"]


def test_a_report_that_could_not_be_written_is_no_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "all.jsonl"
    asked = Options(only=("launch",))  # these reports hold no more than that
    reports = (msgspec.structs.replace(decode_report(one), options=asked)
               for one in lines().splitlines())  # fmt: skip
    path.write_bytes(b"\n".join(map(encode, reports)))
    assert told(capsys, "merge", str(path))[0] == 0
    code, _, err = told(capsys, "merge", str(path), "--html", str(tmp_path / "absent" / "a.html"))
    assert code == 3
    assert "a.html cannot be written: No such file or directory" in err


@pytest.mark.parametrize("text", ["a b c", "a, b ,c", "a\nb\nc\n", "a,b,c,"])
def test_lists_are_read_as_people_write_them(text: str) -> None:
    assert asked("--nodes", text).who.nodes == ("a", "b", "c")


def test_a_launch_behind_the_list_is_a_launch() -> None:
    assert asked("--nodes", "a", "--", "python", "train.py").command == ("python", "train.py")


def test_merge_overwrites_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_bytes(lines())
    two.write_bytes(lines())
    assert told(capsys, "merge", "--json", str(one), str(two))[0] == 64
    assert told(capsys, "merge", "--json", str(one))[0] == 64
    assert one.read_bytes() == lines()


def test_merge_misses_a_node_that_the_launch_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "two.jsonl"
    path.write_bytes(lines(silent=("node2",)))
    code, out, err = told(capsys, "merge", str(path), "--json", "-")
    assert code == 3
    assert json.loads(out)["verdict"]["expected"] == ["node0", "node1", "node-rank-2"]
    assert "2 of 3 nodes" in err


def test_merge_takes_the_newest_report_of_a_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    data = lines()
    new.write_bytes(data)
    old.write_bytes(data.replace(b'"version":9', b'"version":3'))
    _, out, _ = told(capsys, "merge", str(new), str(old), "--json", "-")
    assert {report["version"] for report in json.loads(out)["reports"]} == {9}


@pytest.mark.parametrize("text", [b"", b"{", b'{"node": 3}', b"\x00\xff", b'{"verdict": 1}'])
def test_merge_says_which_file_is_no_report(
    text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.json"
    path.write_bytes(text)
    code, _, err = told(capsys, "merge", str(path))
    assert code == 64
    assert "odd.json" in err
    assert "Traceback" not in err


def test_neither_torch_nor_the_runner_is_loaded_for_the_help() -> None:
    text = (
        "import sys; from rankscope.cli import main\n"
        "try: main(['preflight', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'rankscope.preflight.runner'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
