"""The way to a server: proxies as the environment names them, and who judges in the end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping

import pytest

from rankscope.address import proxy_of, read_address
from rankscope.http import Client, HttpAnswer
from rankscope.preflight.exchange.carrier import CarrierError, server_verdict
from rankscope.preflight.model import LaunchVerdict, NodeReport

PROXY = "http://proxy.example:3128"


@pytest.mark.parametrize(
    ("scheme", "environ", "found"),
    [
        ("http", {"http_proxy": PROXY}, "proxy.example:3128 (http_proxy)"),
        ("http", {"HTTP_PROXY": PROXY}, "proxy.example:3128 (HTTP_PROXY)"),
        ("http", {"HTTP_PROXY": PROXY, "REQUEST_METHOD": "GET"}, ""),  # CGI: a stranger sets it
        ("https", {"HTTPS_PROXY": PROXY}, "proxy.example:3128 (HTTPS_PROXY)"),
        ("https", {"http_proxy": PROXY}, ""),
        ("https", {"all_proxy": "proxy.example"}, "proxy.example:3128 (all_proxy)"),
        ("http", {"http_proxy": PROXY, "no_proxy": "*"}, ""),
        ("http", {"http_proxy": PROXY, "no_proxy": "a.b, .example.com"}, ""),
        ("http", {"http_proxy": PROXY, "NO_PROXY": "scope.example.com:80"}, ""),
        ("http", {"http_proxy": PROXY, "no_proxy": "ample.com"}, "proxy.example:3128 (http_proxy)"),
        ("http", {}, ""),
    ],
)
def test_the_proxy_that_is_used(scheme: str, environ: dict[str, str], found: str) -> None:
    proxy = proxy_of(read_address(f"{scheme}://scope.example.com:80"), environ)
    assert (proxy.shown if proxy is not None else "") == found


def test_a_proxy_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="all_proxy='socks5://x:1'"):
        Client("https://scope", environ={"all_proxy": "socks5://x:1"})


def test_the_way_is_shown_without_the_password() -> None:
    environ = {"https_proxy": "http://me:secret@p:8080"}
    route = Client("https://[fd00::1]/scope/", environ=environ).route
    assert route == "https://[fd00::1]:443/scope through the proxy p:8080 (https_proxy)"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"error": {"what": "no preflight", "remedy": "make one"}}', "no preflight; make one"),
        (b"<html>\x00 blocked by the firm", "HTTP 403: <html>. blocked by the firm"),
        (b"[1]", "HTTP 403: [1]"),
    ],
)
def test_a_refusal_is_told_in_its_own_words(body: bytes, why: str) -> None:
    assert HttpAnswer(403, body).why() == why


class Side:
    """A carrier with or without a verdict of its own."""

    name = "side"

    def __init__(self, is_evaluator: bool, said: LaunchVerdict | None = None) -> None:
        self.is_evaluator, self._said = is_evaluator, said

    async def exchange(self, mine: NodeReport, have: Mapping[str, int]) -> list[NodeReport]:
        return []

    async def verdict(self, limit_s: float) -> LaunchVerdict | None:
        if self._said is None:
            raise CarrierError("gone")
        return self._said

    async def close(self) -> None:
        """Nothing is open."""


def test_the_carrier_that_kept_facts_back_judges_and_no_other() -> None:
    said = LaunchVerdict(run_id="x", expected=(), reported=(), findings=(), results=())

    def ask(*carriers: Side) -> LaunchVerdict | None:
        return asyncio.run(server_verdict(carriers))

    assert ask(Side(False, said), Side(True, said)) is said
    assert ask(Side(False, said)) is None
    assert ask(Side(True)) is None  # it is gone: then what came is judged here
    assert ask() is None


def test_two_threads_may_be_the_first_to_read() -> None:
    """Types that are made at first use by two threads at once crash the interpreter."""
    program = """
import sys, threading
from rankscope.preflight.exchange import http
from rankscope.preflight.model import decode_report, decode_verdict
sys.setswitchinterval(1e-6)
gate = threading.Barrier(8)
VERDICT = b'{"run_id":"","expected":[],"reported":[],"findings":[],"results":[]}'
def work():
    gate.wait()
    decode_report(b'{"node":"a"}')
    decode_verdict(VERDICT)
    http._DELTAS.decode(b'{"number":1,"pause_ms":1,"is_brief":false,"reports":[{"node":"a"}]}')
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
