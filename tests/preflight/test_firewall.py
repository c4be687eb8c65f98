from __future__ import annotations

import pytest

from rankscope.preflight.checks import firewall

from .synthetic import cluster


@pytest.mark.parametrize(
    ("tools", "starts"),
    [
        (("ufw", "nft"), "sudo ufw allow from 10.77.0.0/16 to any port 29500 proto tcp"),
        (
            ("firewalld", "nft"),
            'sudo firewall-cmd --permanent --add-rich-rule=\'rule family="ipv4"',
        ),
        (("nft", "iptables"), "sudo nft list chains | awk"),
        (("iptables",), "sudo iptables -I INPUT -p tcp -s 10.77.0.0/16 --dport 29500 -j ACCEPT"),
        ((), "# security group of node0: allow inbound tcp 29500 from 10.77.0.0/16"),
    ],
)
def test_each_tool_in_its_own_words(tools: tuple[str, ...], starts: str) -> None:
    run = cluster(3, tools=tools).run()
    (fix,) = firewall.open_inbound(run, "node0", ("node1", "node2"), "29500")
    assert fix.command.startswith(starts)
    assert fix.owner == ("admin" if tools else "provider")
    assert fix.node == "node0"


def test_a_range_is_written_as_the_tool_wants_it() -> None:
    says = {
        tool: firewall.open_outbound(cluster(2, tools=(tool,)).run(), "node0", "32768-60999")[0]
        for tool in ("ufw", "firewalld", "nft", "iptables")
    }
    assert "port 32768:60999" in says["ufw"].command
    assert "--dport 32768:60999" in says["iptables"].command
    assert "--dport 32768:60999" in says["firewalld"].command
    assert "tcp dport 32768-60999" in says["nft"].command
    assert "hook output" in says["nft"].command


def test_prohibited_is_how_firewalld_rejects() -> None:
    run = cluster(2, tools=("ufw", "firewalld")).run()
    (fix,) = firewall.open_inbound(run, "node0", ("node1",), "29500", "prohibited")
    assert "firewall-cmd" in fix.command


def test_one_source_of_many_is_named_alone() -> None:
    run = cluster(4, tools=("iptables",)).run()
    (fix,) = firewall.open_inbound(run, "node0", ("node3",), "29500")
    assert "-s 10.77.0.4 " in fix.command


def test_the_range_is_that_of_the_node() -> None:
    some = cluster(2)
    facts = some.reports["node1"].facts.ports
    assert facts is not None
    some.facts("node1", ports=type(facts)(range_low=50000, range_high=51000))
    assert firewall.ephemeral_range(some.run(), "node1") == "50000-51000"
    assert firewall.ephemeral_range(some.run(), "nobody") == "32768-60999"
