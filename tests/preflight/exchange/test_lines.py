"""Reports as lines of JSON between an agent and the one that started it."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from rankscope.preflight.exchange.carrier import CarrierError
from rankscope.preflight.exchange.lines import LineCarrier
from rankscope.preflight.model import NodeReport, decode_report, encode


def test_lines_go_both_ways_until_the_other_end_closes() -> None:
    to_agent, from_agent = os.pipe(), os.pipe()
    has_ended = threading.Event()
    with (
        os.fdopen(to_agent[0], "rb") as stdin,
        os.fdopen(to_agent[1], "wb") as feed,
        os.fdopen(from_agent[0], "rb") as seen,
        os.fdopen(from_agent[1], "wb") as stdout,
    ):
        carrier = LineCarrier(stdin, stdout, has_ended.set)
        feed.write(encode(NodeReport(node="b", version=2)) + b"\nno json\n")
        feed.close()
        assert has_ended.wait(10)

        async def talk() -> None:
            mine = NodeReport(node="a", version=1)
            assert [r.node for r in await carrier.exchange(mine, {})] == ["b"]
            assert await carrier.exchange(mine, {"b": 2}) == []
            await carrier.close()

        asyncio.run(talk())
        stdout.close()
        assert [decode_report(line).node for line in seen] == ["a"]  # once, though offered twice


def test_a_reader_that_is_gone_is_told() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    nothing = os.open(os.devnull, os.O_RDONLY)
    with os.fdopen(nothing, "rb") as stdin:
        stdout = os.fdopen(writing, "wb", 0)
        carrier = LineCarrier(stdin, stdout)
        with pytest.raises(CarrierError, match="does not read"):
            asyncio.run(carrier.exchange(NodeReport(node="a"), {}))
        stdout.close()
