"""Connects back to a node: which one, how often, and what the answer may show.

The server is no port scanner. It dials an address only where a member of that preflight declared
the port. Of the address from which the member came, the outcome is shown; of one that it merely
claims, only whether its agent answered with the preflight's proof, after the same time always.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from rankscope.preflight.key import RunKey
from rankscope.preflight.probe.dial import Caller, dial
from rankscope_server.answers import Schema
from rankscope_server.limits import Buckets
from rankscope_server.preflight import targets
from rankscope_server.preflight.live import Live, Member
from rankscope_server.problems import Problem

LIMIT_S = 1.5  # of one connection
ANSWER_S = 1.6  # its greeting has a limit of its own, 1.5 s
SILENT_S = LIMIT_S + ANSWER_S
MAX_AT_A_TIME = 64
# A full preflight asks for a few of each node; the rest is retries.
PER_TOKEN_SIZE, PER_NODE = 20, 4
PER_TARGET_SIZE, PER_TARGET_S = 30, 0.5
RESOLVE_S = 2.0
NAME = "rankscope-server"  # who calls, in the words of the agents


@dataclass(frozen=True)
class Target:
    """A node to dial; `is_proven`: the node came to us from this very address."""

    member: Member
    address: str
    port: int
    is_proven: bool


class Dialler:
    """Dials for all preflights, a bounded number at a time."""

    def __init__(self, policy: targets.Policy, limits: Buckets) -> None:
        self._policy, self._limits = policy, limits
        self._slots = asyncio.Semaphore(MAX_AT_A_TIME)

    def target(self, member: Member, address: str, port: int) -> Target:
        """Return a target that the rules allow. Raises Problem 403."""
        is_proven = address == member.proven
        why = targets.port_refusal(port, member.ports)
        if why:
            raise Problem(403, f"port {port}: {why}", "port", "declare it when joining")
        if not is_proven and address not in member.addresses:
            raise Problem(403, f"{address} is no address of {member.node}", "address", "join first")
        why = targets.refusal(address, self._policy)
        if why:
            raise Problem(403, f"{address} is not dialled: {why}", "address", "test it from a peer")
        found = targets.address_of(address)
        is_listed = found is not None and targets.is_listed(found, self._policy)
        return Target(member, str(found), port, is_proven or is_listed)

    def spend(self, live: Live, address: str) -> None:
        """Count a dial against its limits. Raises Problem 429."""
        size = PER_TOKEN_SIZE + PER_NODE * len(live.members)
        wait_s = self._limits.wait_s(f"token {live.id}", size, size / 60)
        wait_s = wait_s or self._limits.wait_s(f"target {address}", PER_TARGET_SIZE, PER_TARGET_S)
        if wait_s:
            raise Problem(429, "too many dials", None, f"try again in {wait_s + 0.5:.0f} s")

    async def dial(self, live: Live, target: Target) -> Dialled:
        """Connect once and say hello; nothing that was received is shown."""
        self.spend(live, target.address)
        started = time.monotonic()
        words = target.member.hello_token or live.token
        caller = Caller(RunKey.of(words), NAME, by="server")
        try:
            async with self._slots, asyncio.timeout(SILENT_S):
                found, call = await dial(
                    caller, target.address, target.port, target.member.node, limit_s=LIMIT_S
                )
                if call is not None:
                    await call.close()
            outcome, elapsed_ms = str(found.outcome), found.elapsed_ms
        except TimeoutError:
            outcome, elapsed_ms = "drop", SILENT_S * 1e3
        if outcome == "ok" or target.is_proven:
            return _answer(target, outcome, elapsed_ms)
        # How long it took would distinguish a closed port from a silent one.
        await asyncio.sleep(max(0.0, started + SILENT_S - time.monotonic()))
        return _answer(target, "no-answer", SILENT_S * 1e3)


async def resolved(name: str) -> tuple[str, ...]:
    """Return the addresses of a name, asked once; none where there is no answer in time."""
    loop = asyncio.get_running_loop()
    try:
        rows = await asyncio.wait_for(loop.getaddrinfo(name, None), RESOLVE_S)
    except (OSError, TimeoutError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(row[4][0]) for row in rows))


_WHY = {
    "ok": "the agent of the node answered with the proof of this preflight",
    "no-answer": "its agent did not answer; the reason is shown only of the address it came from",
    "no-data": "the connection was accepted, and no byte came back",
    "not-us": "something else answered there",
    "other-secret": "an agent that does not know this preflight answered there",
    "other-version": "an older or a newer rankscope answered there",
    "wrong-host": "the agent of another node answered there",
    "drop": "no answer: a firewall drops, or a route is missing",
    "refused": "the machine refused: nothing listens, or a firewall rejects",
}


def _answer(target: Target, outcome: str, elapsed_ms: float) -> Dialled:
    return Dialled(
        outcome=outcome, address=target.address, port=target.port,
        elapsed_ms=round(elapsed_ms, 3), why=_WHY.get(outcome, ""),
    )  # fmt: skip


class Dialled(Schema, frozen=True):
    """How a connection from the server ended; what was received over it is never shown."""

    outcome: str  # ok, refused, drop ...; no-answer: of an address that no member came from
    address: str
    port: int
    elapsed_ms: float
    why: str
