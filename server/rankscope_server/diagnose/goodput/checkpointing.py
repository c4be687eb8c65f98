"""How often to save: Young's and Daly's interval, waste, and how often a job fails.

Times in one unit of the caller's choice. delta is what a save takes from training, M the mean
time between failures of this job, R detection, restart and reload together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# 419 unexpected interruptions in 54 days on 2,048 hosts (Llama 3, arXiv 2407.21783, section 3.3.4)
LLAMA_FAILURES_PER_HOST_DAY = 419 / (54 * 2048)
_Z_90 = 1.645


@dataclass(frozen=True, slots=True)
class Mtbf:
    """Mean time between failures in days with its 90 % interval, and what it rests on."""

    days: float
    low: float
    high: float
    failures: int
    source: str


def young(delta: float, mtbf: float) -> float:
    """Return sqrt(2 delta M) (Young 1974, CACM 17)."""
    return math.sqrt(2.0 * delta * mtbf)


def daly(delta: float, mtbf: float) -> float:
    """Return Daly's higher-order interval; M itself where saving takes more than 2 M.

    sqrt(2 delta M) [1 + 1/3 sqrt(delta / 2M) + 1/9 (delta / 2M)] - delta (Daly 2006, FGCS 22).
    """
    if delta >= 2.0 * mtbf:
        return mtbf
    x = delta / (2.0 * mtbf)
    return young(delta, mtbf) * (1.0 + math.sqrt(x) / 3.0 + x / 9.0) - delta


def waste(interval: float, delta: float, mtbf: float, restart: float) -> float:
    """Return the share of time that saving and failing take: delta/tau + (tau/2 + R)/M."""
    return delta / interval + (interval / 2.0 + restart) / mtbf


def mtbf_of(failures: int, host_days: float, num_hosts: int, min_own: int) -> Mtbf:
    """Return how long a job of `num_hosts` runs between failures.

    A gamma-Poisson posterior: the prior counts as one failure at Llama 3's rate. From `min_own`
    failures on only the job's own count: a job that fails each hour has another reason than age.
    """
    if failures >= min_own and host_days > 0:
        shape, exposure, source = float(failures), host_days, f"{failures} failures of this run"
    else:
        shape = 1.0 + failures
        exposure = 1.0 / LLAMA_FAILURES_PER_HOST_DAY + host_days
        source = f"Llama 3's rate and {failures} failures of this run"
    per_day = shape / exposure * num_hosts
    low, high = (_gamma_quantile(shape, z) / exposure * num_hosts for z in (-_Z_90, _Z_90))
    return Mtbf(1.0 / per_day, 1.0 / high, 1.0 / max(low, 1e-12), failures, source)


def _gamma_quantile(shape: float, z: float) -> float:
    """Return a quantile of Gamma(shape, 1) (Wilson & Hilferty 1931)."""
    scale = 1.0 / (9.0 * shape)
    return shape * max(0.0, 1.0 - scale + z * math.sqrt(scale)) ** 3
