"""JSON, JUnit, page and list of nodes: whole, safe, and the same as the screen."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.preflight.checks.base import Run
from rankscope.preflight.exchange.hostlist import expand
from rankscope.preflight.model import CheckFinding, LaunchVerdict
from rankscope.preflight.report import junit, stored
from rankscope.preflight.report.deliver import Wanted, deliver
from rankscope.preflight.report.nodes import bad_nodes, compress
from rankscope.preflight.report.page import page
from rankscope.preflight.report.summary import summarise
from tests.preflight.report import cases

ALL = [*cases.STORED.values(), lambda: cases.many(64, 20)]


@pytest.mark.parametrize("make", ALL)
def test_json_comes_back_as_it_was(make: object) -> None:
    summary = summarise(*make())  # type: ignore[operator]
    data = stored.encode(summary)
    document = json.loads(data)
    assert document["exit_code"] == summary.exit_code
    assert document["schema_version"] == 1
    assert stored.encode(summarise(*stored.decode(data))) == data


@pytest.mark.parametrize("fail_on", ["fail", "warn"])
@pytest.mark.parametrize("make", ALL)
def test_junit_has_one_case_per_check_and_its_totals_are_right(make: object, fail_on: str) -> None:
    summary = summarise(*make(), fail_on)  # type: ignore[operator]
    root = ElementTree.fromstring(junit.encode(summary, fail_on))
    suite = root[0]
    found = {case.get("name"): case for case in suite.iter("testcase")}
    assert list(found) == [result.id for result in summary.verdict.results]
    assert suite.get("tests") == str(len(found))
    assert suite.get("failures") == str(len(list(suite.iter("failure"))))
    assert suite.get("skipped") == str(len(list(suite.iter("skipped"))))
    for result in summary.verdict.results:
        kinds = [child.tag for child in found[result.id]]
        expected = {"ok": [], "fail": ["failure"], "skipped": ["skipped"], "unknown": ["skipped"]}
        warned = ["failure"] if fail_on == "warn" else ["system-out"]
        assert kinds == expected.get(result.status, warned)


def test_junit_tells_cause_and_repair_and_what_explains_a_folded_check() -> None:
    root = ElementTree.fromstring(junit.encode(summarise(*cases.red())))
    found = {case.get("name"): case for case in root.iter("testcase")}
    failure = found["port.ephemeral"].find("failure")
    assert failure is not None
    assert failure.get("message") == cases.PORTS.title
    assert "sudo ufw allow from 10.77.0.0/24" in (failure.text or "")
    folded = found["port.oneway"].find("failure")
    assert folded is not None
    assert folded.get("message") == f"explained by port.ephemeral: {cases.PORTS.title}"


class Tags(HTMLParser):
    """Collects tags, and checks that each is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("make", ALL)
def test_the_page_is_one_closed_file_without_scripts_or_links(make: object) -> None:
    text = page(summarise(*make()))  # type: ignore[operator]
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert not {"script", "link", "img", "iframe", "a", "blink"} & set(tags.seen)
    assert not {"src", "href", "onclick", "onload"} & tags.attributes
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_the_page_has_what_the_screen_has() -> None:
    text = page(summarise(*cases.red()))
    for wanted in (
        cases.PORTS.title,
        cases.PORTS.fix[0].command,
        cases.MTU.impact,
        cases.HANG.title,
    ):
        assert wanted in text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ((), ""),
        (("node1",), "node1"),
        (("node1", "node2", "node3", "node7"), "node[1-3,7]"),
        (("gpu001", "gpu002", "gpu004"), "gpu[001-002,004]"),
        (("n9", "n10", "n11"), "n[9-11]"),
        (("n09", "n10"), "n[09-10]"),
        (("n8", "n08", "n008", "n9"), "n[8-9,08,008]"),
        (("b2", "a1", "login", "a2"), "a[1-2],b2,login"),
        (("rack0-n1", "rack0-n2", "rack1-n1"), "rack0-n[1-2],rack1-n1"),
        (("node1.cluster", "node2.cluster"), "node1.cluster,node2.cluster"),
        (("n99", "n100"), "n[99-100]"),
        (("n1", "n1"), "n1"),
        (("x1234567890123",), "x1234567890123"),
    ],
)
def test_lists_are_slurms(names: tuple[str, ...], text: str) -> None:
    assert compress(names) == text
    assert set(expand(text)) == set(names)


@given(st.sets(st.from_regex(r"[a-z.-]{0,3}([0-9]{1,15})?", fullmatch=True).filter(bool)))
def test_every_list_comes_back(names: set[str]) -> None:
    assert set(expand(compress(names))) == names


def run_of(*findings: CheckFinding, names: tuple[str, ...] = cases.THREE) -> LaunchVerdict:
    run = Run("1", names, cases.reports(names))
    return cases.verdict(run, findings)


def found(id: str, *nodes: str, status: str = "fail", **more: object) -> CheckFinding:
    return CheckFinding(id=id, status=status, title="t", nodes=nodes, **more)  # type: ignore[arg-type]


def test_only_nodes_that_a_finding_is_about_are_left_out() -> None:
    assert bad_nodes(cases.red()[0]) == ("node1", "node2")
    assert bad_nodes(cases.absent()[0]) == ("node1", "node2")
    assert bad_nodes(cases.green()[0]) == ()
    assert bad_nodes(cases.one_way_pair()[0]) == ()  # a pair accuses nobody
    assert bad_nodes(run_of(found("lim.shm", *cases.THREE))) == ()  # the same everywhere
    assert bad_nodes(run_of(found("env.agree", "node2"))) == ()  # the launch, not the node
    assert bad_nodes(run_of(found("lim.nofile", "node2", status="warn"))) == ()
    assert bad_nodes(run_of(found("lim.nofile", "node2", status="warn")), True) == ("node2",)


def test_a_name_that_would_be_a_list_is_not_written() -> None:
    names = ("good", "a,good", "b[1-9]", "c d", "$(rm)")
    assert bad_nodes(run_of(found("lim.shm", *names[1:]), names=names)) == ()


def test_files_are_written_whole_and_what_cannot_be_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = summarise(*cases.red())
    wanted = Wanted(
        json=str(tmp_path / "a.json"),
        junit=str(tmp_path / "a.xml"),
        html=str(tmp_path / "absent" / "a.html"),
        exclude_list="-",
    )
    errors = deliver(summary, wanted)
    assert len(errors) == 1
    assert re.fullmatch(
        r"--html: .*a\.html cannot be written: No such file or directory", errors[0]
    )
    assert json.loads((tmp_path / "a.json").read_bytes())["bad_nodes"] == ["node1", "node2"]
    assert ElementTree.parse(tmp_path / "a.xml").getroot().tag == "testsuites"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.xml"]
    out, err = capsys.readouterr()
    assert out == "node[1-2]\n"  # nothing but the list: it goes into srun
    assert "FAIL 1" in err
