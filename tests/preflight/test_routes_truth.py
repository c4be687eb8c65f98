"""The kernel's own answers about routes and neighbours, on a host of the laboratory."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.preflight.nslab import Lab
from tests.preflight.scene import base_environment
from tests.preflight.trial import ROOT

pytestmark = [
    pytest.mark.multiproc, pytest.mark.laboratory, pytest.mark.needs("namespaces"),
]  # fmt: skip
_BREAK = """
ip route add blackhole 10.77.0.12/32
ip route add unreachable 10.77.0.13/32
ip route add prohibit 10.77.0.14/32
ip route add 10.77.0.15/32 via 10.77.0.99 dev eth0
ip rule add to 10.77.0.16 lookup 100; ip route add blackhole default table 100
ip rule add from 10.77.0.1 to 10.77.0.17 lookup 101
ip route add default via 10.77.0.98 table 101
ip neigh replace 10.77.0.18 lladdr 02:de:ad:00:00:01 dev eth0 nud permanent
sysctl -qw net.ipv6.conf.eth0.disable_ipv6=0; ip addr add fd77::1/64 dev eth0 nodad
ip -6 route add unreachable fd77::13/128
"""
_ASK = """
import json, msgspec, sys
from rankscope.preflight.facts import routes
for address, own in json.loads(sys.argv[1]):
    way = routes.towards(address, own)
    print(json.dumps([msgspec.to_builtins(way), msgspec.to_builtins(routes.next_hops(way))]))
"""


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[list[Any], list[Any]]]:
    """Return routes and neighbours by address."""
    asked = [[f"10.77.0.{last}", "10.77.0.1"] for last in range(11, 19)]
    asked += [["10.9.9.9", ""], ["fd77::12", "fd77::1"], ["fd77::13", ""], ["127.0.0.1", ""]]
    with Lab(1, base={**base_environment(), "PYTHONPATH": str(ROOT / "agent")}) as lab:
        lab.run(0, _BREAK)
        said = lab.run(0, [sys.executable, "-c", _ASK, json.dumps(asked)]).stdout.splitlines()
    lines = [json.loads(line) for line in said]
    return {address: line for (address, _), line in zip(asked, lines, strict=True)}


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("10.77.0.11", {"prefix": "10.77.0.0/24", "interface": "eth0"}),
        ("10.77.0.12", {"kind": "blackhole", "prefix": "10.77.0.12/32", "error": "EINVAL"}),
        ("10.77.0.13", {"kind": "unreachable", "prefix": "10.77.0.13/32"}),
        ("10.77.0.14", {"kind": "prohibit", "prefix": "10.77.0.14/32", "error": "EACCES"}),
        ("10.77.0.15", {"prefix": "10.77.0.15/32", "gateway": "10.77.0.99"}),
        ("10.77.0.16", {"kind": "blackhole", "prefix": "0.0.0.0/0", "table": 100}),
        ("10.9.9.9", {"kind": "none", "error": "ENETUNREACH"}),
        ("fd77::12", {"prefix": "fd77::/64", "interface": "eth0"}),
        ("fd77::13", {"kind": "unreachable", "prefix": "fd77::13/128"}),
    ],
)
def test_a_route(
    address: str, wanted: dict[str, Any], answers: dict[str, tuple[list[Any], list[Any]]]
) -> None:
    (route, *_), _ = answers[address]
    assert {name: route.get(name) for name in wanted} == wanted


def test_a_rule_for_the_own_address(answers: dict[str, tuple[list[Any], list[Any]]]) -> None:
    first, second = answers["10.77.0.17"][0]
    assert (first["prefix"], first.get("source")) == ("10.77.0.0/24", None)
    assert (second["gateway"], second["table"], second["source"]) == (
        "10.77.0.98", 101, "10.77.0.1",
    )  # fmt: skip


def test_a_fixed_neighbour(answers: dict[str, tuple[list[Any], list[Any]]]) -> None:
    (entry,) = answers["10.77.0.18"][1]
    assert (entry["mac"], entry["state"]) == ("02:de:ad:00:00:01", "permanent")
    assert answers["10.77.0.11"][1] == []


def test_loopback_is_not_asked_for(answers: dict[str, tuple[list[Any], list[Any]]]) -> None:
    assert answers["127.0.0.1"] == [[], []]


_CALL = """
import asyncio
from rankscope.preflight.key import RunKey
from rankscope.preflight.probe.dial import PROVEN_LIMIT_S, Caller, dial
async def call(after_s):
    await asyncio.sleep(after_s)
    found, _ = await dial(Caller(RunKey.of("secret"), "a"), "10.77.0.99", 29500, "",
                          limit_s=PROVEN_LIMIT_S)
    print(found.outcome, found.elapsed_ms < 1000)
async def all_calls():
    await asyncio.gather(*(call(number / 2) for number in range(6)))
asyncio.run(all_calls())
"""


def test_who_calls_a_dead_machine_late_gets_the_answer_of_who_called_first() -> None:
    with Lab(1, base={**base_environment(), "PYTHONPATH": str(ROOT / "agent")}) as lab:
        said = lab.run(0, [sys.executable, "-c", _CALL]).stdout.splitlines()
    assert "no-arp True" in said
    assert {line.split()[0] for line in said} == {"no-arp"}
