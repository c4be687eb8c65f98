"""What runs and findings cost in money, by the price list of the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope.wire.chunk import encode_chunk
from rankscope_server.prices import price_list
from tests.analysis.gpu_samples import gpu_columns
from tests.analysis.records import START_NS, registered
from tests.server.conftest import Sender

PriceOf = Callable[[str, str], None]


def set_prices(sender: Sender, patch: pytest.MonkeyPatch, prices: str, currency: str) -> None:
    """Set the price list of a server."""
    service = sender.client.app.state.service  # type: ignore[attr-defined]
    settings = dataclasses.replace(service.settings, prices=prices, currency=currency)
    patch.setattr(service, "settings", settings)


@pytest.fixture
def priced(seeded: Sender, monkeypatch: pytest.MonkeyPatch) -> PriceOf:
    """Set the price list of the server that has a run."""
    seeded.client.app.state.service.analysis.look_now()  # type: ignore[attr-defined]
    return lambda prices, currency: set_prices(seeded, monkeypatch, prices, currency)


@pytest.mark.parametrize(
    "text",
    ["gpu", "=3", "gpu=dear", "gpu=-1", "gpu=nan", "gpu=1e30", "gpu=3/", "gpu=3/1@", "gpu=3@1"],
)
def test_what_is_no_price_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no price of a host"):
        price_list(text, "EUR")


def test_the_first_pattern_that_fits_counts_and_a_host_is_paid_for_once() -> None:
    prices = price_list("gpu-big-*=24, gpu-*=8,", "EUR")
    big, small = prices.rows
    assert [prices.of_host(host) for host in ("gpu-big-1", "gpu-1", "cpu-1")] == [big, small, None]
    assert (big.price, small.price) == (24.0, 8.0)
    rate = prices.rate_of(["gpu-big-1"] * 8 + ["gpu-1"] * 4)
    assert rate is not None
    assert rate.per_rank_hour == pytest.approx(32 / 12)
    assert prices.rate_of(["gpu-1", "cpu-1"]) is None
    assert prices.rate_of([]) is None
    assert (rate.host_hour, rate.num_ranks, rate.cheaper) == (16.0, 12, ())


def test_as_spot_each_host_of_a_run_may_interrupt_it() -> None:
    prices = price_list("a-*=24/9@0.02,b-*=8/4,c-*=8", "EUR")
    rate = prices.rate_of(["a-1"] * 8 + ["a-2"] * 8)
    assert rate is not None
    assert (rate.per_rank_hour, rate.spot_per_rank_hour) == (3.0, 18 / 16)
    assert rate.interruptions == pytest.approx(0.04)
    assert [row.pattern for row in rate.cheaper] == ["b-*", "c-*"]
    mixed = prices.rate_of(["a-1", "b-1"])
    assert mixed is not None
    assert (mixed.spot_per_rank_hour, mixed.interruptions) == (6.5, None)
    without = prices.rate_of(["a-1", "c-1"])
    assert without is not None
    assert without.spot_per_rank_hour is None


def test_findings_and_runs_have_their_price(seeded: Sender, priced: PriceOf) -> None:
    hosts = {row["host"] for row in seeded.get("/ranks")["ranks"]}
    priced("*=6/2@0.5", "EUR")
    per_rank = 6 * len(hosts) / 4
    shown = seeded.get("/cost")
    assert (shown["price_per_rank_hour"], shown["currency"]) == (per_rank, "EUR")
    assert shown["spot_per_rank_hour"] == pytest.approx(per_rank / 3)
    assert shown["interruptions_per_hour"] == 0.5 * len(hosts)
    listed = [one for one in seeded.get("/findings")["open"] if one["cost_rank_hours_per_day"]]
    assert listed
    alone = seeded.get(f"/findings/{listed[0]['id']}")
    verdict: dict[str, Any] = seeded.get("")["verdict"]
    for finding in (*listed, alone, verdict):
        wanted = finding["cost_rank_hours_per_day"] * per_rank
        assert finding["cost_money_per_day"] == pytest.approx(wanted)
        assert finding["currency"] == "EUR"


@pytest.mark.parametrize("prices", ["", "another-host=3"])
def test_without_a_price_of_each_host_there_is_no_amount(
    seeded: Sender, priced: PriceOf, prices: str
) -> None:
    priced(prices, "EUR")
    shown = seeded.get("/cost")
    assert (shown["price_per_rank_hour"], shown["currency"]) == (None, "")
    for finding in (*seeded.get("/findings")["open"], seeded.get("")["verdict"]):
        assert (finding["cost_money_per_day"], finding["currency"]) == (None, "")


def test_memory_that_is_not_used_stands_with_what_cheaper_hosts_may_take_longer(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {"cuda_reserved_bytes": 10e9, "cuda_peak_bytes": 9e9, "cuda_allocated_bytes": 8e9}
    columns = gpu_columns(2, 60, memory_used_bytes=np.array(11e9))
    times = columns["time_ns"]
    sender.send(
        *(registered(rank, 2) for rank in range(2)),
        *(
            schema.Metrics(attempt=0, rank=rank, time_ns=START_NS + step, step=step, values=held)
            for step in range(1, 302) for rank in range(2)
        ),
        chunks=[schema.Chunk(
            kind="gpu", attempt=0, rank=-1, host="node-0", count=len(times),
            time_lo_ns=int(times.min()), time_hi_ns=int(times.max()), data=encode_chunk(columns),
        )],
    )  # fmt: skip
    sender.client.app.state.service.analysis.look_now()  # type: ignore[attr-defined]

    def said() -> list[str]:
        listed = sender.get("/findings")["open"]
        (finding,) = (one for one in listed if one["kind"] == "unused_memory")
        return [line["text"] for line in finding["evidence"]][1:]

    assert said() == []
    set_prices(sender, monkeypatch, "node-*=24,small-*=8,large-*=30", "EUR")
    assert said() == [
        "By the price list its hosts cost 576.00 EUR a day",
        "A host small-* costs 8.00 EUR an hour in place of 24.00 EUR: with as many ranks on each "
        "it pays while a step takes less than 3.0 times as long there",
    ]
