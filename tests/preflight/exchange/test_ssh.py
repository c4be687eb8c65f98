"""Agents started over ssh: a real sshd on loopback, with keys and a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest

from rankscope.preflight.exchange.carrier import CarrierError
from rankscope.preflight.exchange.ssh import SSH, SshCarrier
from rankscope.preflight.model import NodeReport
from tests import capabilities

# one after the other: they look for agents on this machine, and want the same ports
pytestmark = pytest.mark.together("agents of preflight")

# An agent that knows nothing but its carrier: it is done when it has heard of two others.
AGENT = """
import asyncio, os, sys
from rankscope.preflight.exchange.lines import LineCarrier
from rankscope.preflight.model import NodeReport
async def main():
    node = sys.argv[sys.argv.index("--node") + 1]
    token = os.environ["RANKSCOPE_PREFLIGHT_TOKEN"]
    carrier = LineCarrier(sys.stdin.buffer, sys.stdout.buffer, lambda: os._exit(3))
    heard, version = {}, 0
    while True:
        stage = "done" if len(heard) >= 2 else "pairs"
        mine = NodeReport(node=node, version=version, stage=stage, heard=tuple(sorted(heard)),
                          extra={"token": token, "words": sys.argv[1:]})
        for report in await carrier.exchange(mine, heard):
            heard[report.node] = report.version
            version += 1
        await asyncio.sleep(0.05)
print("a greeting that is no JSON", flush=True)
asyncio.run(main())
"""


@dataclass(frozen=True)
class Server:
    ssh: tuple[str, ...]
    agent: tuple[str, ...]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Run an sshd that lets this user in by a throw-away key."""
    capabilities.need("sshd")
    tmp_path.chmod(0o700)
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(command, check=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = tmp_path / "config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\nPidFile none\n"
        f"AuthorizedKeysFile {tmp_path}/user.pub\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin yes\n"
    )
    with (tmp_path / "log").open("wb") as log:
        daemon = subprocess.Popen(
            [str(capabilities.find("sshd")), "-D", "-e", "-f", str(config)], stderr=log
        )
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    ssh = (
        *SSH, "-i", str(tmp_path / "user"), "-p", str(port), "-F", "none",
        "-o", "IdentitiesOnly=yes", "-o", "StrictHostKeyChecking=no",
        "-o", "UserKnownHostsFile=/dev/null", "-l", getpass.getuser(),
    )  # fmt: skip
    try:
        _wait_for(port, daemon, tmp_path / "log")
        yield Server(ssh, (sys.executable, str(agent)))
    finally:
        daemon.terminate()
        daemon.wait()


def _wait_for(port: int, daemon: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(100):
        if daemon.poll() is not None:
            pytest.fail(f"sshd does not run: {log.read_text().strip()[-200:]}")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    pytest.fail("sshd does not listen")


def carrier(server: Server, nodes: Sequence[str], **more: str) -> SshCarrier:
    return SshCarrier(
        nodes, ["--master-port", "29511"], ssh=server.ssh, agent=server.agent, **more
    )  # fmt: skip


def agents() -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if "agent.py" in " ".join(_words(p))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_reports_are_relayed_between_all(server: Server, tmp_path: Path) -> None:
    async def launch() -> dict[str, NodeReport]:
        ssh = carrier(server, ["127.0.0.1", "localhost"], token="secret", directory=str(tmp_path))
        mine = NodeReport(node="launcher", version=1)
        seen: dict[str, NodeReport] = {}
        async with asyncio.timeout(60):
            while len(seen) < 2 or any(r.stage != "done" for r in seen.values()):
                seen |= {r.node: r for r in await ssh.exchange(mine, {})}
                await asyncio.sleep(0.05)
        await ssh.close()
        assert ssh.failures == {}
        return seen

    seen = asyncio.run(launch())
    assert seen["127.0.0.1"].heard == ("launcher", "localhost")
    assert seen["localhost"].heard == ("127.0.0.1", "launcher")
    extra = seen["localhost"].extra
    assert extra["token"] == "secret"
    assert extra["words"] == ["--master-port", "29511", "--node", "localhost"]
    assert not agents()


def test_a_node_that_ssh_does_not_reach_is_told_once(server: Server) -> None:
    async def launch() -> str:
        ssh = carrier(server, ["localhost", "127.0.0.9"])  # the sshd listens on 127.0.0.1 only
        mine = NodeReport(node="launcher", version=1)
        told = []
        async with asyncio.timeout(60):
            while len(await _reports(ssh, mine, told)) < 1 or not told:
                await asyncio.sleep(0.05)
        for _ in range(3):
            await ssh.exchange(mine, {})  # not told again
        await ssh.close()
        return told[0]

    text = asyncio.run(launch())
    assert "ssh failed to 127.0.0.9: exit code 255: " in text
    assert "onnection refused" in text


async def _reports(ssh: SshCarrier, mine: NodeReport, told: list[str]) -> list[NodeReport]:
    try:
        return await ssh.exchange(mine, {})
    except CarrierError as error:
        told.append(str(error))
        return []


def test_a_wrong_key_says_why(server: Server, tmp_path: Path) -> None:
    (tmp_path / "user").unlink()

    async def launch() -> dict[str, NodeReport]:
        ssh = carrier(server, ["localhost"])
        reports = await ssh.collect(30.0, 30.0)
        await ssh.close()
        assert "Permission denied" in ssh.failures["localhost"]
        return reports

    assert asyncio.run(launch()) == {}


def test_one_who_is_no_node_gathers_the_reports(server: Server) -> None:
    async def launch() -> dict[str, NodeReport]:
        ssh = carrier(server, ["localhost", "127.0.0.1"])
        reports = await ssh.collect(5.0, 0.5)
        await ssh.close()
        return reports

    # two agents never hear of two others: the limit ends it, with what they said
    reports = asyncio.run(launch())
    assert {r.stage for r in reports.values()} == {"pairs"}
    assert set(reports) == {"localhost", "127.0.0.1"}
    assert not agents()


def test_the_command_starts_agents_and_judges_what_they_say(server: Server, tmp_path: Path) -> None:
    wrapper = tmp_path / "bin" / "ssh"  # what a user would write into ~/.ssh/config
    wrapper.parent.mkdir()
    real, *words = server.ssh
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join([shutil.which(real) or real, *words])} "$@"\n')
    wrapper.chmod(0o755)
    path = f"{wrapper.parent}:{os.environ['PATH']}"
    command = [sys.executable, "-m", "rankscope", "preflight", "--ssh", "--quick", "--json"]
    done = subprocess.run(
        [*command, "--nodes", "127.0.0.1,localhost", "--wait", "100"],
        env={**os.environ, "PATH": path}, capture_output=True, timeout=250, check=False,
    )  # fmt: skip
    document = msgspec.json.decode(done.stdout)
    assert {report["node"] for report in document["reports"]} == {"127.0.0.1", "localhost"}
    assert all(report["stage"] == "done" for report in document["reports"])
    # both names are this machine, and that is what is wrong with this launch
    assert "host.dup" in [finding["id"] for finding in document["verdict"]["findings"]]
    assert done.returncode == 2
    assert not [p for p in psutil.process_iter() if "--lines" in _words(p)]


def test_a_program_that_is_not_there_is_told() -> None:
    async def launch() -> dict[str, str]:
        ssh = SshCarrier(["a"], ssh=("/no/such/ssh",))
        with pytest.raises(CarrierError, match="cannot be started"):
            await ssh.exchange(NodeReport(node="me"), {})
        await ssh.close()
        return ssh.failures

    assert list(asyncio.run(launch())) == ["a"]


def test_a_node_that_looks_like_an_option_is_none_of_ssh(tmp_path: Path) -> None:
    seen, node = tmp_path / "seen", "-oProxyCommand=x"
    ssh = ("sh", "-c", f'printf "%s\\n" "$1" "$2" > {seen}; exit 1', "ssh")

    async def attempt() -> None:
        carrier = SshCarrier([node], ssh=ssh, agent=("true",))
        async with asyncio.timeout(20):
            while not carrier.failures:
                with contextlib.suppress(CarrierError):  # it names the failure
                    await carrier.exchange(NodeReport(node="me"), {})
                await asyncio.sleep(0.05)
        assert carrier.failures[node].startswith("exit code 1")
        await carrier.close()

    asyncio.run(attempt())
    assert seen.read_text().splitlines() == ["--", node]
