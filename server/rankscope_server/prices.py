"""What hosts cost an hour, by the price list of this server, and so a rank-hour of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

_MOST = 1e9


@dataclass(frozen=True, slots=True)
class Rate:
    """What an hour of one rank costs."""

    per_rank_hour: float
    currency: str


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices of a host-hour by patterns of host names; the first that fits counts."""

    rows: tuple[tuple[str, float], ...]
    currency: str

    def of_host(self, host: str) -> float | None:
        """Return the price of an hour of a host, None where no pattern fits."""
        return next((price for pattern, price in self.rows if fnmatchcase(host, pattern)), None)

    def rate_of(self, hosts: Sequence[str]) -> Rate | None:
        """Return what an hour of a rank costs, the mean over ranks; `hosts` has that of each rank.

        A host is paid for as a whole, however many ranks are on it. None where one has no price.
        """
        prices = [self.of_host(host) for host in set(hosts)]
        known = [price for price in prices if price is not None]
        if not prices or len(known) < len(prices):
            return None
        return Rate(sum(known) / len(hosts), self.currency)


NO_PRICES = PriceList((), "")


def price_list(text: str, currency: str) -> PriceList:
    """Return the list that a text like "gpu-*=24,*=3.50" gives. Raises ValueError."""
    rows = []
    for part in filter(None, map(str.strip, text.split(","))):
        pattern, _, price = (word.strip() for word in part.rpartition("="))
        try:
            value = float(price)
        except ValueError:
            value = math.nan
        if not pattern or not 0 <= value < _MOST:
            raise ValueError(f"{part!r} is no price of a host")
        rows.append((pattern, value))
    return PriceList(tuple(rows), currency)
