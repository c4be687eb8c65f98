"""Lists of nodes as schedulers write them."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.preflight.exchange.hostlist import (
    HostListError,
    expand,
    read_counted,
    read_hostfile,
    read_list,
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", "node1"),
        ("node[1-3]", "node1 node2 node3"),
        ("node[01-03,07],login", "node01 node02 node03 node07 login"),
        ("node[098-101]", "node098 node099 node100 node101"),
        ("gpu-a[1-2]-ib[0-1]", "gpu-a1-ib0 gpu-a1-ib1 gpu-a2-ib0 gpu-a2-ib1"),
        ("r[1,3]n[5].cluster, x", "r1n5.cluster r3n5.cluster x"),
        ("a,b,a", "a b"),
        ("", ""),
    ],
)
def test_slurms_compressed_form(text: str, names: str) -> None:
    assert expand(text) == tuple(names.split())


@pytest.mark.parametrize(
    "text",
    ["node[1-", "node]1", "n[3-1]", "n[a-b]", "n[]", "n[1-99999999]", "n[[1]]", "n[0-999][0-999]"],
)
def test_a_broken_list_is_refused(text: str) -> None:
    with pytest.raises(HostListError):
        expand(text)


@pytest.mark.parametrize(
    "text",
    [
        "node1 slots=8\nnode2 slots=8 max_slots=16\n",
        "# ours\nnode1:8\n\nnode2:8  # the new one\n",
        "node1\nnode1\nnode2\nnode2\n",
        "me@node1\nme@node2",
        "node1 8 all.q@node1 UNDEFINED\nnode2 8 all.q@node2 UNDEFINED\n",
    ],
)
def test_the_forms_of_host_files(text: str) -> None:
    assert read_hostfile(text) == ("node1", "node2")


def test_addresses_stay_whole() -> None:
    assert read_hostfile("10.0.0.1:8\nfd00::1\n[fd00::2]:8") == ("10.0.0.1", "fd00::1", "fd00::2")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a b c", "a b c"),
        ("a, b ,c", "a b c"),
        ("a\nb\r\nc\n", "a b c"),
        (",a,,b;c,", "a b c"),
        ("node[0-1] login", "node0 node1 login"),
        ("node[0, 2]", "node0 node2"),
        ("node0.site.,my_node", "node0.site my_node"),
        ("[fd00::1],fd00::2 10.0.0.1", "fd00::1 fd00::2 10.0.0.1"),
    ],
)
def test_what_people_type(text: str, names: str) -> None:
    assert read_list(text) == tuple(names.split())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b,a", "a is in the list twice: name each node once"),
        ("a,A.", "A is in the list twice"),
        ("node[0-2],node1", "node1 is in the list twice"),
        (f"a,{'b' * 64}", "64 characters"),
        (".a", "begins with a dot"),
        ("a..b", "nothing between two dots"),
        ("a..", "ends with two dots"),
        ("a:29500,b", "--master-port"),
        ("a,b!", "cannot be part of a name"),
        ("-a", "begins with a dash"),
        (f"{'a.' * 127}b", "characters"),
    ],
)
def test_what_cannot_be_a_list(text: str, words: str) -> None:
    with pytest.raises(HostListError, match=re.escape(words)):
        read_list(text)


def test_hosts_with_their_slots() -> None:
    assert read_counted("a 16 b 16") == read_counted("a a b b") == ("a", "b")


def test_a_line_without_a_host_is_refused() -> None:
    with pytest.raises(HostListError, match="line 2"):
        read_hostfile("node1\nslots=8\n")


@given(st.text("ab09[]-,. #:=@\n", max_size=30))
def test_any_text_is_a_list_or_refused(text: str) -> None:
    for read in (expand, read_hostfile):
        with contextlib.suppress(HostListError):
            names = read(text)
            assert len(set(names)) == len(names)
