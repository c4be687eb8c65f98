"""What runs and findings cost in money, by the price list of the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from rankscope_server.prices import price_list
from tests.server.conftest import Sender

PriceOf = Callable[[str, str], None]


@pytest.fixture
def priced(seeded: Sender, monkeypatch: pytest.MonkeyPatch) -> PriceOf:
    """Set the price list of the server."""
    service = seeded.client.app.state.service  # type: ignore[attr-defined]
    service.analysis.look_now()

    def price(prices: str, currency: str) -> None:
        settings = dataclasses.replace(service.settings, prices=prices, currency=currency)
        monkeypatch.setattr(service, "settings", settings)

    return price


@pytest.mark.parametrize("text", ["gpu", "=3", "gpu=dear", "gpu=-1", "gpu=nan", "gpu=1e30"])
def test_what_is_no_price_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no price of a host"):
        price_list(text, "EUR")


def test_the_first_pattern_that_fits_counts_and_a_host_is_paid_for_once() -> None:
    prices = price_list("gpu-big-*=24, gpu-*=8,", "EUR")
    assert [prices.of_host(host) for host in ("gpu-big-1", "gpu-1", "cpu-1")] == [24.0, 8.0, None]
    rate = prices.rate_of(["gpu-big-1"] * 8 + ["gpu-1"] * 4)
    assert rate is not None
    assert rate.per_rank_hour == pytest.approx(32 / 12)
    assert prices.rate_of(["gpu-1", "cpu-1"]) is None
    assert prices.rate_of([]) is None


def test_findings_and_runs_have_their_price(seeded: Sender, priced: PriceOf) -> None:
    hosts = {row["host"] for row in seeded.get("/ranks")["ranks"]}
    priced("*=6", "EUR")
    per_rank = 6 * len(hosts) / 4
    shown = seeded.get("/cost")
    assert (shown["price_per_rank_hour"], shown["currency"]) == (per_rank, "EUR")
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
