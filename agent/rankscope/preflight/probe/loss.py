"""Loss of a path: small UDP datagrams at a gentle pace, each acknowledged, counted at both ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from rankscope.preflight.facts.edges import Datagrams
from rankscope.preflight.key import RunKey
from rankscope.preflight.probe.datagrams import UNCOUNTED, Probes

NUM_SENT = 400  # 0.5 % each way loses four of them, 2 % sixteen
MAX_IN_ALL = 3200  # of one node to all its peers: one costs it and the peer 0.1 ms of a core
LEAST_SENT = 128
SIZE_BYTES = 64
BURST, PAUSE_S = 8, 0.008  # 1,000 a second, 64 kB/s: no queue fills by that
WAIT_S = 0.25  # after the last one, and twice the round trip
NUM_ASKED = 5  # datagrams that ask how many came
ANSWER_S = 0.05
ENOUGH = 32  # without one answer to these UDP is closed


async def measure(
    key: RunKey, address: str, port: int, rtt_ms: float, num_wanted: int = NUM_SENT
) -> Datagrams:
    """Send and count the answers. A closed UDP port costs 0.3 s."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    probes, num_sent = Probes(key), 0
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect((address, port))
        except OSError:
            return Datagrams(num_sent=0, num_answered=0)
        answers = _Answers(sock, probes)
        reading = asyncio.ensure_future(answers.count())
        while num_sent < num_wanted:
            for _ in range(BURST):
                with contextlib.suppress(OSError):
                    sock.send(probes.probe(num_sent, SIZE_BYTES))
                    num_sent += 1
            await asyncio.sleep(PAUSE_S)
            if num_sent == ENOUGH and not answers.num:
                await asyncio.sleep(WAIT_S + rtt_ms / 500)
                if not answers.num:
                    break
        for number in range(NUM_ASKED):  # how many came: this may be lost as well
            await asyncio.sleep((WAIT_S + rtt_ms / 500) / NUM_ASKED)
            with contextlib.suppress(OSError):
                sock.send(probes.probe(UNCOUNTED + number, SIZE_BYTES))
        await asyncio.sleep(ANSWER_S + rtt_ms / 500)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    num_arrived = min(num_sent, max(answers.num, answers.num_arrived)) if answers.num else -1
    return Datagrams(num_sent=num_sent, num_answered=answers.num, num_arrived=num_arrived)


class _Answers:
    def __init__(self, sock: socket.socket, probes: Probes) -> None:
        self._sock, self._probes = sock, probes
        self._numbers: set[int] = set()
        self.num_arrived = -1  # as the far end counts

    @property
    def num(self) -> int:
        """Return how many of ours were answered."""
        return len(self._numbers)

    async def count(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                answer = self._probes.answered(await loop.sock_recv(self._sock, 64))
                if answer is None:
                    continue
                self.num_arrived = max(self.num_arrived, answer.num_arrived)
                if answer.number < UNCOUNTED:
                    self._numbers.add(answer.number)
            except ConnectionRefusedError:
                await asyncio.sleep(0.01)


def num_for(num_peers: int) -> int:
    """Return how many datagrams each of so many peers is sent."""
    return min(NUM_SENT, max(LEAST_SENT, MAX_IN_ALL // max(num_peers, 1)))
