"""What hosts cost an hour, by the price list of this server, and so a rank-hour of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

_MOST = 1e9


@dataclass(frozen=True, slots=True)
class HostPrice:
    """What an hour of a host costs whose name fits a pattern.

    `spot` is the price of an hour where the provider may take the host away, which it does so many
    times an hour (`interruptions`); None: not known.
    """

    pattern: str
    price: float
    spot: float | None = None
    interruptions: float | None = None


@dataclass(frozen=True, slots=True)
class Rate:
    """What an hour of one rank costs. `interruptions` an hour are those of all hosts of the run."""

    per_rank_hour: float
    currency: str
    num_ranks: int = 0
    host_hour: float = 0.0  # of one of its hosts, the mean
    spot_per_rank_hour: float | None = None
    interruptions: float | None = None
    cheaper: tuple[HostPrice, ...] = ()  # rows of the list below each of its hosts, cheapest first

    def text(self, amount: float) -> str:
        """Return an amount with the currency: "1,152.00 EUR"."""
        return f"{amount:,.2f} {self.currency}".rstrip()


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices by patterns of host names; the first that fits counts."""

    rows: tuple[HostPrice, ...]
    currency: str

    def of_host(self, host: str) -> HostPrice | None:
        """Return the row of a host, None where no pattern fits."""
        return next((row for row in self.rows if fnmatchcase(host, row.pattern)), None)

    def rate_of(self, hosts: Sequence[str]) -> Rate | None:
        """Return what an hour of a rank costs, the mean over ranks; `hosts` has that of each rank.

        A host is paid for as a whole, however many ranks are on it. None where one has no price.
        """
        rows = [self.of_host(host) for host in set(hosts)]
        known = [row for row in rows if row is not None]
        if not rows or len(known) < len(rows):
            return None
        whole, least = sum(row.price for row in known), min(row.price for row in known)
        spot = _sum_of([row.spot for row in known])
        return Rate(
            whole / len(hosts), self.currency, len(hosts), whole / len(known),
            None if spot is None else spot / len(hosts),
            _sum_of([row.interruptions for row in known]),
            tuple(sorted((row for row in self.rows if row.price < least), key=_price)),
        )  # fmt: skip


def _price(row: HostPrice) -> float:
    return row.price


def _sum_of(values: Sequence[float | None]) -> float | None:
    """Return the sum, None where one is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


NO_PRICES = PriceList((), "")


def price_list(text: str, currency: str) -> PriceList:
    """Return the list that a text like "gpu-*=24/9@0.02,*=3.50" gives. Raises ValueError.

    A row is PATTERN=PRICE, /SPOT behind it, and @INTERRUPTIONS of a host in an hour behind that.
    """
    rows = []
    for part in filter(None, map(str.strip, text.split(","))):
        pattern, _, prices = (word.strip() for word in part.rpartition("="))
        price, has_spot, rest = prices.partition("/")
        spot, has_rate, interruptions = rest.partition("@")
        try:
            row = HostPrice(
                pattern, _number(price), _number(spot) if has_spot else None,
                _number(interruptions) if has_rate else None,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"{part!r} is no price of a host") from error
        if not pattern:
            raise ValueError(f"{part!r} is no price of a host")
        rows.append(row)
    return PriceList(tuple(rows), currency)


def _number(text: str) -> float:
    value = float(text)
    if math.isnan(value) or not 0 <= value < _MOST:
        raise ValueError(text)
    return value
