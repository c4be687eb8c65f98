"""gloo's rules as we work them out, held against gloo itself on a fake host."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec

import pytest

from tests.preflight.nslab import Lab
from tests.preflight.scene import base_environment

# (GLOO_SOCKET_IFNAME, what the host name stands for in /etc/hosts)
CASES = (
    ("", "10.77.0.1"), ("", "127.0.1.1"), ("", "127.0.0.1"), ("", "::1"), ("", "fd00::7"),
    ("", "172.17.0.1"), ("", "10.77.0.99"), ("", ""), ("", "10.77.0.99 10.77.0.1"),
    ("", "127.0.1.1 10.77.0.1"), ("", "10.77.0.1 127.0.1.1"), ("", "10.88.0.1 10.77.0.1"),
    ("eth0", "127.0.1.1"), ("docker0", "10.77.0.1"), ("eth1,eth0", ""), ("lo", "10.77.0.1"),
    ("eth9", "10.77.0.1"), ("eth", "10.77.0.1"), ("^lo", "10.77.0.1"), ("=eth0", "10.77.0.1"),
    ("bare0", "10.77.0.1"), ("six0", "10.77.0.1"), (" eth0", "10.77.0.1"), ("eth0,eth9", ""),
)  # fmt: skip
_PROGRAM = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
from rankscope.preflight.facts import choice
from rankscope.preflight.collective.truth import ask_gloo
from rankscope.preflight.system import System

def rows(choices):
    return [[c.interface, c.address, bool(c.problem)] for c in choices]

system, found = System(), []
for variable, addresses in json.loads(sys.argv[1]):
    lines = ["127.0.0.1 localhost", *(f"{a} node0" for a in addresses.split())]
    with open("/etc/hosts", "w") as hosts:  # in place: it is mounted
        hosts.write("\\n".join(lines) + "\\n")
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    if variable:
        os.environ["GLOO_SOCKET_IFNAME"] = variable
    found.append([rows(choice.gloo(system, system.links())), rows(ask_gloo(os.environ))])
print(json.dumps(found))
"""
_NICS = (
    "ip link add docker0 type dummy; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up;"
    "ip link add eth1 type dummy; ip addr add 10.88.0.1/24 dev eth1; ip link set eth1 up;"
    "ip link add six0 type dummy; ip addr add fd00::7/64 dev six0 nodad; ip link set six0 up;"
    "ip link add bare0 type dummy; ip link set lo up"
)


@pytest.mark.multiproc
@pytest.mark.laboratory
@pytest.mark.needs("namespaces")
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_gloo_takes_what_we_say_it_takes() -> None:
    with Lab(1, base=base_environment()) as lab:
        lab.run(0, _NICS)
        command = [sys.executable, "-c", _PROGRAM, json.dumps(CASES)]
        # importing torch takes a minute on a machine that has much else to do
        done = lab.run(0, command, check=False, limit_s=240.0)
    assert done.returncode == 0, done.stderr
    for case, (ours, theirs) in zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True):
        told, truth = [row[1] for row in ours], [row[1] for row in theirs]
        assert told == truth, (case, ours, theirs)
